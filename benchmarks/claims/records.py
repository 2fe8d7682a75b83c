"""Records of claims: one line for each finished run or enumeration, with the digest of the protocol it belongs to."""

from pathlib import Path
from typing import Any

from benchmarks.claims.claim import Claim, Result
from benchmarks.claims.exact import Exact
from benchmarks.records import Records

RECORDS = Path(__file__).parents[1] / "claims.jsonl"


class ClaimRecords:
    """A file of finished runs.

    Args:
        path: of the file; made with the first record.
    """

    def __init__(self, path: Path = RECORDS):
        self.records = Records(path)

    def add_run(self, claim: Claim, arm: str, seed: int, result: Result, seconds: float, **circumstances: Any) -> None:
        """Write a finished run down."""
        self.records.add(
            claim=claim.number,
            digest=claim.digest,
            arm=arm,
            seed=seed,
            seconds=round(seconds, 1),
            **circumstances,
            result=result,
        )

    def add_enumeration(self, claim: Claim, name: str, found: Exact, seconds: float, **circumstances: Any) -> None:
        """Write down what an enumeration found."""
        self.records.add(
            claim=claim.number,
            digest=claim.digest,
            exact=name,
            seconds=round(seconds, 2),
            **circumstances,
            result={"holds": found.holds, "figures": found.figures, "sentence": found.sentence},
        )

    def of(self, claim: Claim) -> list[dict[str, Any]]:
        """Lines of this claim's protocol."""
        return [one for one in self.records.find(claim=claim.number) if one["digest"] == claim.digest]

    def superseded(self, claim: Claim) -> int:
        """Number of lines of earlier protocols of this claim, which are not used."""
        return len(self.records.find(claim=claim.number)) - len(self.of(claim))

    def runs(self, claim: Claim) -> dict[tuple[str, int], Result]:
        return {(one["arm"], one["seed"]): one["result"] for one in self.of(claim) if "arm" in one}

    def enumerated(self, claim: Claim) -> dict[str, Exact]:
        return {one["exact"]: Exact(**one["result"]) for one in self.of(claim) if "exact" in one}
