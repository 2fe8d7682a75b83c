"""A file that lists the servers of a run, which may be changed while it runs."""

from dataclasses import dataclass
from pathlib import Path

from covey.engines.servers.http_client import ServerClient


@dataclass(frozen=True)
class PoolFile:
    """A file with the URLs of servers, one per line; empty lines and text after a # are ignored."""

    path: Path
    api_key: str | None = None  # of every server

    def servers(self) -> list[ServerClient]:
        """Clients of the servers that the file lists now; ValueError if it cannot be read, or lists none or no URL."""
        try:
            lines = self.path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the list of servers {self.path} cannot be read ({error}).") from error
        urls = [url.rstrip("/") for line in lines if (url := line.partition("#")[0].strip())]
        if not urls:
            raise ValueError(f"{self.path} lists no server: write a URL on each line, as in http://127.0.0.1:8000.")
        if any("@" in url for url in urls):  # not shown
            raise ValueError(
                f"{self.path} names a server with a user or password in its URL, which messages would show: write"
                " http://HOST:PORT, and give the key by its setting."
            )
        return [ServerClient(url, self.api_key) for url in dict.fromkeys(urls)]
