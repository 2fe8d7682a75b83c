"""Measurements as JSON lines: appended one by one, so that an interrupted run can continue and be summarised."""

import json
from pathlib import Path
from typing import Any


class Records:
    """A file of measurements.

    Args:
        path: of the file; made when the first record is written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._state: tuple[int, int] | None = None  # of the file when it was last read
        self._records: list[dict[str, Any]] = []

    def add(self, **record: Any) -> dict[str, Any]:
        """Write one down and return it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        """All that have these values, in the order of writing; not to be changed."""
        return [one for one in self._all() if all(one.get(name) == value for name, value in wanted.items())]

    def _all(self) -> list[dict[str, Any]]:
        """All lines, read again if the file has changed."""
        if not self.path.exists():
            return []
        now = self.path.stat()
        if self._state != (now.st_mtime_ns, now.st_size):
            self._records = [json.loads(line) for line in self.path.read_text().splitlines()]
            self._state = now.st_mtime_ns, now.st_size
        return self._records
