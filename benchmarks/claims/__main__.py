"""Published methods on small models: do their claims hold here?

    python -m benchmarks.claims [N ...] [--seeds S]     # runs what is missing of these claims (all), prints verdicts
    python -m benchmarks.claims --exact                 # only enumerations, which take seconds
    python -m benchmarks.claims --summary               # prints the page from the records (docs/claims.md)
    python -m benchmarks.claims --write                 # writes it, docs/recipes.md, pictures, verdicts on other pages

Every finished run is a line of `benchmarks/claims.jsonl` with the digest of its claim: an interrupted claim continues
where it stopped, and lines of another protocol are not used. A claim that is undecided after its seeds runs as many
again, once, unless a precondition fails. Runs of SmolLM2 train in studies; one that is interrupted continues from its
last checkpoint in `runs/claims`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.claims import page, recipes
from benchmarks.claims.claim import Claim, Enumerated
from benchmarks.claims.records import RECORDS, ClaimRecords
from benchmarks.claims.statistic import OPEN
from benchmarks.claims.table import CLAIMS, claim
from benchmarks.machine import describe

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", type=int, nargs="*", metavar="N", help="claims; all if none is given")
    parser.add_argument("--seeds", type=int, help="run only so many seeds now, and no extension")
    parser.add_argument("--exact", action="store_true", help="only the enumerations, which take seconds")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of finished runs")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "claims", help="for checkpoints of studies")
    parser.add_argument("--summary", action="store_true", help="only print the page")
    parser.add_argument("--write", action="store_true", help="only write the pages, pictures and verdicts elsewhere")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # runs of one claim in this process
    given = parser.parse_args()
    records = ClaimRecords(given.records)
    if given.job:
        print(json.dumps(job(**json.loads(given.job))))
    elif given.summary:
        print(page.render(records), end="")
    elif given.write:
        (ROOT / "docs" / "recipes.md").write_text(recipes.render(records))
        page.write(records, ROOT)
    else:
        known = [one.number for one in CLAIMS]
        if unknown := sorted({*given.numbers} - {*known}):
            parser.error(f"no claim has the number {unknown[0]}; there are {known[0]} to {known[-1]}")
        for number in given.numbers or known:
            run(claim(number), records, given)


def run(one: Claim, records: ClaimRecords, given: argparse.Namespace) -> None:
    """Run what is missing of a claim, and print its verdict."""
    for part in (*one.parts, *one.notes):
        if isinstance(part, Enumerated) and part.name not in records.enumerated(one):
            start = time.perf_counter()
            records.add_enumeration(
                one, part.name, part.check(), seconds=time.perf_counter() - start, **circumstances()
            )
    if one.missing:
        print(f"claim {one.number} cannot run yet: {one.missing}", flush=True)
    if one.bed is not None and not given.exact:
        run_missing(one, records, min(given.seeds or one.seeds, one.seeds), given)
        now = page.standing(one, records)
        if given.seeds is None and one.extends and now.verdict == OPEN and not now.failed:
            run_missing(one, records, 2 * one.seeds, given)
    print(page.line(one, records), flush=True)


def run_missing(one: Claim, records: ClaimRecords, seeds: int, given: argparse.Namespace) -> None:
    """Run the pairs of arm and seed without a record, as many in a process as the bed takes."""
    assert one.bed is not None
    done = records.runs(one)
    missing = [pair for pair in one.planned(seeds) if pair not in done]
    for first in range(0, len(missing), one.bed.at_once):
        batch = missing[first : first + one.bed.at_once]
        folder = given.folder / f"{one.number}-{one.digest}" / "_".join(f"{arm}.{seed}" for arm, seed in batch[:1])
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"number": one.number, "runs": batch, "folder": str(folder)})
        start = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.claims", "--job", text]
        found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        seconds = (time.perf_counter() - start) / len(batch)
        for arm, seed, result in json.loads(found.stdout.splitlines()[-1]):
            records.add_run(one, arm, seed, result, seconds=seconds, together=len(batch), **circumstances())
            print(f"claim {one.number}: {arm}, seed {seed}, {seconds:.0f} s", flush=True)


def job(number: int, runs: list[list[Any]], folder: str) -> list[list[Any]]:
    """Run pairs of arm and seed in this process."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    one = claim(number)
    assert one.bed is not None and one.arms is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = one.bed.run(one.arms, [(arm, seed) for arm, seed in runs], folder)
    return [[arm, seed, result] for (arm, seed), result in found.items()]


def circumstances() -> dict[str, Any]:
    """Commit, versions, machine and load of now."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    machine = describe(int(os.environ.get("OMP_NUM_THREADS", "2")))
    kept = ("processor", "cores", "threads", "versions", "date")
    return {
        "commit": commit.stdout.strip(),
        "machine": {name: machine[name] for name in kept},
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
