"""A hub on this machine: takes repositories and commits as huggingface_hub sends them, and keeps their files."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """Serves until `close`.

    Attributes:
        url: of the server.
        created: (kind, id, private) of every repository.
        commits: (kind, id, message, {path: content}) of every commit, in their order.
        refuses: kinds ("model", "dataset") whose commits get an error.
        tokens: every token that was shown.
        fails: number of the next commits that get an error.
        open: an event without which no commit begins.
    """

    def __init__(self):
        self.created, self.commits, self.refuses, self.tokens, self.fails = [], [], set(), set(), 0
        self.open = threading.Event()
        self.open.set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self._answer({"id": "me/it", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})

            def do_POST(self):
                hub.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not body and self.headers.get("Transfer-Encoding") == "chunked":
                    body = b"".join(iter(self._chunk, b""))
                status, reply = hub.take(self.path, body)
                self._answer(reply, status)

            def _chunk(self):
                size = int(self.rfile.readline(), 16)
                content = self.rfile.read(size)
                self.rfile.readline()
                return content

            def _answer(self, reply, status=200):
                content = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path, body):
        """Status and answer to a request."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            kind = asked.get("type", "model")
            name = "/".join(filter(None, [asked.get("organization") or "me", asked["name"]]))
            private = asked.get("private") or asked.get("visibility") == "private"
            self.created.append((kind, name, private))
            return 200, {"url": f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{name}"}
        if path == "/api/validate-yaml":  # the first request of an upload with a card
            self.open.wait(60)
            return 200, {"errors": [], "warnings": []}
        found = re.fullmatch(r"/api/(model|dataset)s/(.+)/(preupload|commit)/[^/]+", path.split("?")[0])
        if found is None:
            return 404, {"error": f"no such path here: {path}"}
        kind, name, what = found.groups()
        if kind in self.refuses:
            return 403, {"error": "not allowed"}
        if what == "preupload":
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if self.fails:
            self.fails -= 1
            return 403, {"error": "not now"}
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        self.commits.append((kind, name, message, files))
        return 200, {
            "commitUrl": f"{self.url}/{name}/commit/{len(self.commits):040d}",
            "commitOid": f"{len(self.commits):040d}",
            "success": True,
        }

    def close(self):
        self._server.shutdown()
        self._server.server_close()
