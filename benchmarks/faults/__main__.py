"""Diagnoses of `covey doctor` against the bank: 60 planted faults of 20 kinds, and 20 healthy runs.

    python -m benchmarks.faults [--kind KIND] [--healthy] [--learn]

Every entry is written into a temporary folder as a user would have it. The doctor reads the run file, or the record of
a few steps; its first finding should be of the entry's kind, and a healthy run have none of level error. `--learn`
applies the settings that the first finding's fix names, or else the entry's repair, trains 16 steps, and measures the
gain in reward.
Entries whose repaired runs are the same share one training, as equal runs have equal rewards.
Results are appended to a file, so that an interrupted run continues; `--fresh` starts over.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.faults.bank import Entry, Setup, faults, healthy
from benchmarks.records import Records
from covey.cli.demo import model_folder

ROOT = Path(__file__).parents[2]
SECONDS = 90
"""Longest diagnosis."""

RECORDED_STEPS = 4
"""Of a run whose record is looked at."""

SETTING = re.compile(r"\b([a-z_]+)=(\{.*\}|\[.*?\]|[^\s,:;)]+)")
"""Name and value in the text of a fix."""

GAIN = 0.2
"""Least rise of the reward in 16 steps that counts as learning."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--kind", help="only faults of this kind")
    parser.add_argument("--entry", help="only the entry of this name")
    parser.add_argument("--healthy", action="store_true", help="only healthy runs")
    parser.add_argument("--learn", action="store_true", help="also train with the fix")
    parser.add_argument("--list", action="store_true", help="name the entries, and do nothing")
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/faults.jsonl", help="file of the results")
    options = parser.parse_args(argv)
    entries = selected(options)
    if options.list:
        for entry in entries:
            print(f"{entry.kind or 'healthy':<20} {entry.when:<6} {entry.name}: {entry.about}")
        return
    records = Records(options.records)
    if options.fresh:
        records.path.unlink(missing_ok=True)
    for entry in entries:
        found = latest(records, entry, "diagnosis") or records.add(**diagnosed(entry))
        print(line(entry, found), flush=True)
        if options.learn and not latest(records, entry, "learning"):
            print(f"{'':<20} {gain_of(records.add(**learned(entry, found, records)))}", flush=True)
    print(summary(entries, records))


def selected(options: argparse.Namespace) -> list[Entry]:
    entries = healthy() if options.healthy else faults() if options.kind else faults() + healthy()
    if options.kind:
        entries = [entry for entry in entries if entry.kind == options.kind]
    if options.entry:
        entries = [entry for entry in entries if entry.name == options.entry]
    if not entries:
        raise SystemExit(f"no such entries; kinds are: {', '.join(dict.fromkeys(str(e.kind) for e in faults()))}")
    return entries


def latest(records: Records, entry: Entry, what: str) -> dict[str, Any] | None:
    return next(iter(records.find(what=what, entry=entry.name, digest=entry.digest)[::-1]), None)


def diagnosed(entry: Entry) -> dict[str, Any]:
    """A record of the doctor's findings on an entry."""
    with tempfile.TemporaryDirectory(prefix="covey-fault-") as temporary:
        folder, given = Path(temporary, "run"), "run.yaml"
        entry.setup().write(folder, model_folder())
        if entry.when == "after":
            settings = ["--max_steps", str(RECORDED_STEPS), "--record", "tokens"]
            covey(["grpo_or_rloo", "--config", given, *settings], folder, 1800)  # a fault may end it early
            given = "out"
        ended = covey(["doctor", given, "--json"], folder, SECONDS)
    findings = read_findings(ended["output"])
    return {
        "what": "diagnosis",
        **identity(entry),
        "status": ended["status"],
        "seconds": ended["seconds"],
        "findings": findings,
        "problem": None if findings is not None else ended["errors"][-500:] or "no JSON",
    }


def identity(entry: Entry) -> dict[str, Any]:
    return {"entry": entry.name, "digest": entry.digest, "kind": entry.kind}


def read_findings(output: str) -> list[dict[str, Any]] | None:
    """The findings that `covey doctor --json` printed; None where it printed none.

    Example:
        >>> read_findings('{"run": "out", "findings": [{"code": "template"}], "summary": {}}')
        [{'code': 'template'}]
        >>> read_findings("") is None
        True
    """
    return json.loads(output)["findings"] if output.strip() else None


def covey(arguments: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """A command's status (None where it was late), seconds and texts; `grpo_or_rloo` is the run file's method."""
    if arguments[0] == "grpo_or_rloo":
        method = "rloo" if "method: rloo" in (folder / "run.yaml").read_text() else "grpo"
        arguments = [method, *arguments[1:]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    start = time.perf_counter()
    command = [sys.executable, "-m", "covey.cli.main", *arguments]
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        status, output, errors = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired:
        status, output, errors = None, "", f"not ready after {seconds} s"
    return {"status": status, "output": output, "errors": errors, "seconds": round(time.perf_counter() - start, 1)}


def learned(entry: Entry, diagnosis: dict[str, Any], records: Records) -> dict[str, Any]:
    """A record of the rewards of 16 steps with the fix."""
    fix = next((named_settings(finding["fix"]) for finding in diagnosis["findings"] or ()), {}) if entry.kind else {}
    repaired = entry.setup(repaired=bool(entry.repair))
    trained = entry.setup().changed(fix) if fix else repaired
    earlier = records.find(what="learning", setup=trained.digest)
    outcome = earlier[0] if earlier else trial(trained, repaired)
    return {
        "what": "learning",
        **identity(entry),
        "fix": fix or "the repair",
        "setup": trained.digest,
        **{key: outcome[key] for key in ("rewards", "seconds", "problem")},
    }


def trial(trained: Setup, repaired: Setup) -> dict[str, Any]:
    """Rewards by the repaired run's functions, seconds, and the error of a run that failed."""
    with tempfile.TemporaryDirectory(prefix="covey-fault-") as temporary:
        folder = Path(temporary, "run")
        trained.write(folder, model_folder())
        ended = covey(["grpo_or_rloo", "--config", "run.yaml"], folder, 3600)
        state = folder / "out" / "trainer_state.json"
        logs = json.loads(state.read_text())["log_history"] if ended["status"] == 0 else []
    return {
        "rewards": rewards(logs, repaired),
        "seconds": ended["seconds"],
        "problem": None if ended["status"] == 0 else ended["errors"][-500:],
    }


def named_settings(fix: str) -> dict[str, Any]:
    """Settings of a fix that begins with "Set", up to its first alternative; empty where it names none.

    Example:
        >>> named_settings("Set temperature=1.0, top_k=0."), named_settings("Set beta=0.04, or beta=0.")
        ({'temperature': 1.0, 'top_k': 0}, {'beta': 0.04})
        >>> named_settings("Set generation_kwargs={'stop': ['a b']}."), named_settings("Remove top_k=1.")
        ({'generation_kwargs': {'stop': ['a b']}}, {})
    """
    found: dict[str, Any] = {}
    if fix.startswith("Set "):
        for name, value in SETTING.findall(re.split(r",? \(?or ", fix)[0]):
            with suppress(ValueError, SyntaxError):  # of another form than Python's
                found[name] = ast.literal_eval(value.rstrip("."))
    return found


def rewards(logs: list[dict[str, Any]], setup: Setup) -> list[float]:
    """Rewards of the steps by the repaired run's functions and weights, where they are logged; else by the run's own.

    A fix that leaves a reward at another scale would be compared by that scale otherwise.
    """
    steps = [step for step in logs if "reward" in step]
    names = [name.rpartition(":")[2].rpartition(".")[2] for name in setup.run.get("reward_funcs", [])]
    weights = setup.run.get("reward_weights") or [1.0] * len(names)
    if not names or not all(f"rewards/{name}/mean" in step for name in names for step in steps):
        return [step["reward"] for step in steps]
    pairs = list(zip(names, weights, strict=True))
    return [sum(weight * step[f"rewards/{name}/mean"] for name, weight in pairs) for step in steps]


def gain(values: list[float]) -> float:
    """Rise from the first two steps, during the warm-up, to the last four.

    Example:
        >>> round(gain([0.2, 0.4, 0.5, 0.6, 0.6, 0.6]), 3)
        0.275
    """
    return sum(values[-4:]) / 4 - sum(values[:2]) / 2 if len(values) >= 6 else 0.0


def gain_of(record: dict[str, Any]) -> str:
    if record["problem"]:
        return f"did not train: {record['problem']}"
    return f"{gain(record['rewards']):+.2f} in {len(record['rewards'])} steps, by {record['fix']}"


def verdict(entry: Entry, record: dict[str, Any]) -> str:
    """`right`, `accepted`, `wrong`, or `false alarm` on a healthy run, where only errors count."""
    findings = record["findings"]
    if entry.kind is None:
        alarmed = findings is None or any(finding["level"] == "error" for finding in findings)
        return "false alarm" if alarmed else "right"
    first = findings[0]["code"] if findings else None
    return "right" if first == entry.kind else "accepted" if first in entry.accepts else "wrong"


def line(entry: Entry, record: dict[str, Any]) -> str:
    codes = ", ".join(f"{finding['code']} ({finding['level']})" for finding in (record["findings"] or [])[:3])
    found = codes or ("nothing" if record["findings"] is not None else f"failed: {record['problem']}")
    expected = entry.kind or "healthy"
    return f"{expected:<20} {entry.name:<45} {verdict(entry, record):<12} {record['seconds']:>5.1f} s  {found}"


def summary(entries: list[Entry], records: Records) -> str:
    found = [(entry, latest(records, entry, "diagnosis")) for entry in entries]
    verdicts = [(entry, verdict(entry, record), record) for entry, record in found if record]
    planted = [name for entry, name, _ in verdicts if entry.kind]
    sound = [name for entry, name, _ in verdicts if not entry.kind]
    late = sum(record["status"] is None or record["seconds"] > SECONDS for _, _, record in verdicts)
    gains = [
        (bool(entry.kind), gain(record["rewards"]))
        for entry in entries
        if (record := latest(records, entry, "learning")) is not None
    ]
    lines = [
        "",
        f"faults: {planted.count('right')} of {len(planted)} first findings right, {planted.count('accepted')} more "
        "with an accepted code",
        f"healthy: {sound.count('false alarm')} of {len(sound)} with a finding of level error",
        f"{late} later than {SECONDS} s",
    ]
    for is_fault, name in ((True, "faults"), (False, "healthy")):
        if group := [value for fault, value in gains if fault is is_fault]:
            good = sum(value >= GAIN for value in group)
            lines.append(f"{name}: {good} of {len(group)} gain {GAIN} or more in reward")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
