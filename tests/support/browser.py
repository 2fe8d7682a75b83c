"""A headless Chromium, driven over its debugging protocol: pages are opened, measured, clicked and photographed."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio"),
    *("--no-default-browser-check", "--disable-features=OptimizationHints,MediaRouter,Translate", "--hide-scrollbars"),
)


def path() -> str | None:
    """The browser's program, where it is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._numbers = socket, itertools.count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []  # addresses that the page asked for
        self.complaints: list[str] = []  # errors and warnings of its console
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if (reply := self._replies.pop(data.get("id"), None)) is not None:
                reply.set_result(data)
            elif data.get("method") == "Network.requestWillBeSent":
                self.requests.append(data["params"]["request"]["url"])
            elif data.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(data["params"])[:2000])

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        data = await asyncio.wait_for(reply, 60)
        if "error" in data:
            raise RuntimeError(f"{method}: {data['error']}")
        return data["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        result = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"])[:1000])
        return result["result"].get("value")

    async def until(self, script: str, seconds: float = 20.0) -> float:
        """Wait until an expression is true; the milliseconds since the page's last mark (`performance.mark("go")`)."""
        waited = f"""new Promise((done, fail) => {{ const began = performance.now(); const look = () => {{
            let met = false; try {{ met = {script} }} catch {{}}
            if (met) requestAnimationFrame(() => done(performance.now() - (window.went ?? 0)));
            else if (performance.now() - began > {seconds * 1000}) fail(new Error("never: " + {json.dumps(script)}));
            else setTimeout(look, 5); }}; look(); }})"""
        return float(await self.run(waited))

    async def size(self, width: int, height: int, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, address: str) -> None:
        await self.send("Page.navigate", url=address)

    async def picture(self, file: Path, whole: bool = False) -> None:
        result = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(result["data"]))


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A tab of a browser with a profile of its own."""
    program = path()
    assert program is not None, "needs Chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(profile, "DevToolsActivePort")
            for _ in range(400):
                if port_file.exists() and (words := port_file.read_text().split()):
                    break
                await asyncio.sleep(0.05)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{words[0]}/json") as response:
                    target = next(one for one in await response.json() if one["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    found = Tab(socket)
                    for domain in ("Page", "Network", "Runtime", "Log"):
                        await found.send(f"{domain}.enable")
                    yield found
        finally:
            process.terminate()
            process.wait(20)
