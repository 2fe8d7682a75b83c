"""Reading and writing files of findings in the record of a run."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from covey.core.findings import Finding
from covey.runtime.files import written_whole


def read_findings(path: Path) -> list[dict[str, Any]]:
    """Findings in a file; empty if it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return list(json.loads(path.read_text()))
    return []


def add_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Add findings to a file; a new finding replaces an older one of the same code."""
    known = {one["code"]: one for one in read_findings(path)}
    known |= {finding.code: finding.as_dict() for finding in findings}
    with written_whole(path) as new:
        new.write_text(json.dumps([*known.values()], indent=1))


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    with written_whole(path) as new:
        new.write_text(json.dumps([finding.as_dict() for finding in findings], indent=1))
