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

    def add(self, **record: Any) -> dict[str, Any]:
        """Write one down and return it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def find(self, **wanted: Any) -> list[dict[str, Any]]:
        """All that have these values, in the order of writing."""
        if not self.path.exists():
            return []
        lines = (json.loads(line) for line in self.path.read_text().splitlines())
        return [record for record in lines if all(record.get(name) == value for name, value in wanted.items())]
