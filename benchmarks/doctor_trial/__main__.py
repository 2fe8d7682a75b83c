"""`covey doctor` on runs that its checks were not written for: 43 faulty ones and 23 healthy ones.

    python -m benchmarks.doctor_trial [--case NAME] [--healthy | --faulty] [--part 1/4] [--round NAME] [--summary]
    python -m benchmarks.doctor_trial --fresh --round fresh       # 14 and 6 more, written after the doctor's repair

Each case is written into an empty folder as a user would have it. The doctor reads the run file before the run, the
run is made, and the doctor reads its folder. Counted are first findings that name the cause (decided in the cases, not
after the fact), errors and warnings in healthy runs, fixes that fail when they are applied, crashes, and folders that
the doctor has changed. Results are appended to a file after every diagnosis, so that an interrupted trial continues
and several processes can share the cases; `--round` keeps the figures of several versions of the doctor apart.
"""

import argparse
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import torch

from benchmarks.doctor_trial import model
from benchmarks.doctor_trial.cases import REAL, Case
from benchmarks.doctor_trial.faulty import FAULTY
from benchmarks.doctor_trial.fresh import FRESH_FAULTY, FRESH_HEALTHY
from benchmarks.doctor_trial.healthy import HEALTHY
from benchmarks.faults.__main__ import named_settings
from benchmarks.records import Records

ROOT = Path(__file__).parents[2]
LONGEST = 900  # seconds of a command, after which it counts as a crash
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_completion_length"}
LAST = 4  # steps whose rewards are compared with and without a fix
PHASES = ("before", "after")
PRELOADED = ("datasets", "peft", "transformers.models.llama.modeling_llama", "covey_tools.doctor.command")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor_trial", description=__doc__.split("\n")[0])
    parser.add_argument("--case", help="only the case of this name")
    parser.add_argument("--healthy", action="store_true", help="only healthy runs")
    parser.add_argument("--faulty", action="store_true", help="only faulty runs")
    parser.add_argument("--fresh", action="store_true", help="the runs that were written after the doctor's repair")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="only every N-th case, from the K-th on")
    parser.add_argument("--seconds", type=float, default=75.0, help="of the doctor for each diagnosis (75)")
    parser.add_argument("--round", default="now", help="name of the figures (now)")
    parser.add_argument(
        "--model", type=Path, default=ROOT / "runs/doctor_trial/model", help="folder of the small model"
    )
    parser.add_argument(
        "--records", type=Path, default=ROOT / "benchmarks/doctor_trial.jsonl", help="file of the results"
    )
    parser.add_argument("--summary", action="store_true", help="only print the table of what there is")
    options = parser.parse_args(argv)
    records, cases = Records(options.records), selected(options)
    if not options.summary:
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        torch.set_num_threads(1)  # of several threads none would survive in the processes that are forked
        small = model.build(options.model.resolve())
        for case in cases:
            examine(case, small, records, options)
    print(table(records))


def selected(options: argparse.Namespace) -> list[Case]:
    faulty, healthy = (FRESH_FAULTY, FRESH_HEALTHY) if options.fresh else (FAULTY, HEALTHY)
    chosen = [*([] if options.healthy else faulty), *([] if options.faulty else healthy)]
    if options.case:
        chosen = [case for case in chosen if case.name == options.case]
    first, of = map(int, options.part.split("/"))
    return chosen[first - 1 :: of]


def examine(case: Case, small: Path, records: Records, options: argparse.Namespace) -> None:
    """Diagnose a case before and after its run, and try the fixes, as far as the file does not hold it already."""
    found = {one["phase"]: one for one in records.find(case=case.name, digest=case.digest, round=options.round)}
    if {*case.when, "fixes"} <= {*found}:
        return
    base = small
    if case.task in REAL:
        from covey.cli.demo import model_folder

        base = model_folder()
    own = {"case": case.name, "digest": case.digest, "round": options.round}
    with tempfile.TemporaryDirectory(prefix="covey-trial-") as temporary:
        folder = Path(temporary, "run")
        case.write(folder, base)
        if "before" in case.when and "before" not in found:
            found["before"] = records.add(**own, **diagnosed(folder, "run.yaml", options.seconds), phase="before")
            print(line(case, found["before"]), flush=True)
        trained = train(folder, case)
        if "after" not in found:
            found["after"] = records.add(
                **own, **diagnosed(folder, "out", options.seconds), phase="after", trained=trained["status"]
            )
            print(line(case, found["after"]), flush=True)
        tried = [] if case.script else [*fixes(case, base, Path(temporary), found, folder, options.seconds)]
        found["fixes"] = records.add(**own, phase="fixes", tried=tried)
        for one in tried:
            print(f"{'':<38} fix {one['settings']}: {one['refuted'] or 'holds'}", flush=True)


def train(folder: Path, case: Case) -> dict[str, Any]:
    if case.script:
        return command(["train.py"], folder)
    return command([str(case.settings.get("method", "grpo")), "--config", "run.yaml"], folder)


def diagnosed(folder: Path, given: str, seconds: float) -> dict[str, Any]:
    """Findings, exit status, seconds, and whether the folder has changed or the doctor has crashed."""
    before = digest_of(folder)
    ended = command(["doctor", given, "--json", "--seconds", str(seconds)], folder)
    shown = [one for one in ended["output"].splitlines() if one.startswith('{"run"')]
    findings = json.loads(shown[-1])["findings"] if shown else []
    crashed = ended["status"] not in (0, 1, 2) or "Traceback" in ended["errors"] or (not shown and ended["status"] != 2)
    return {
        "status": ended["status"],
        "seconds": ended["seconds"],
        "findings": findings,
        "verdict": json.loads(shown[-1])["summary"]["verdict"] if shown else None,
        "crashed": crashed,
        "changed": digest_of(folder) != before,
        "problem": None if shown else ended["errors"][-500:],
    }


def digest_of(folder: Path) -> str:
    """Of the names and bytes of all files below a folder; compiled Python files are the interpreter's."""
    parts = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            parts.update(str(path.relative_to(folder)).encode() + hashlib.sha256(path.read_bytes()).digest())
    return parts.hexdigest()


def fixes(
    case: Case, base: Path, place: Path, found: dict[str, Any], folder: Path, seconds: float
) -> list[dict[str, Any]]:
    """Settings that first findings propose with a proof, and what became of a run with them."""
    proposed: dict[str, tuple[dict[str, Any], str]] = {}
    for phase in PHASES:
        first = next(iter(found.get(phase, {}).get("findings", [])), None)
        if first is not None and first["proof"] and (settings := named_settings(first["fix"])):
            proposed[json.dumps(settings, sort_keys=True)] = settings, first["code"]
    tried = []
    for number, (settings, code) in enumerate(proposed.values()):
        fixed = place / f"fixed{number}"
        case.write(fixed, base, settings)
        again = diagnosed(fixed, "run.yaml", seconds)
        ended = train(fixed, case)
        said = [one["code"] for one in again["findings"] if one["level"] == "error"][:1]
        refuted = ""
        if ended["status"] != 0 and (folder / "out" / "trainer_state.json").exists():
            refuted = f"the run does not train with it: {ended['errors'][-200:]}"
        elif said == [code]:
            refuted = f"{code} is found again, as an error"
        elif worse := fallen(*compared(case, base, place / f"judged{number}", settings, folder, fixed)):
            refuted = f"the reward is lower with it: {worse}"
        tried.append({"settings": settings, "code": code, "again": said, "refuted": refuted})
    return tried


def compared(
    case: Case, base: Path, place: Path, settings: dict[str, Any], without: Path, fixed: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Rewards of the runs `without` a fix and `fixed`, of completions that are sampled alike.

    Where the fix changes how completions are sampled, the last steps of the runs say nothing about their models:
    almost greedy samples get more reward from a model that is worse. Both models are then sampled as the fix does.
    """
    if not SAMPLING & settings.keys() or not (without / "out" / "config.json").exists():
        return rewards_of(without), rewards_of(fixed)
    case.write(place, base, {**settings, "eval_dataset": "rows.jsonl", "eval_strategy": "no"})
    found = []
    for run in (without, fixed):
        ended = command(["eval", "--config", "run.yaml", "--model", str(run / "out")], place)
        if ended["status"] != 0:
            raise RuntimeError(f"the models of {case.name} cannot be compared: {ended['errors'][-500:]}")
        metrics = json.loads((run / "out" / "evaluation.json").read_text())
        found.append({name: [value] for name, value in metrics.items() if re.fullmatch(r"eval_rewards/.*/mean", name)})
    return found[0], found[1]


def rewards_of(folder: Path) -> dict[str, list[float]]:
    """Mean of each reward function in the last steps of a run."""
    path = folder / "out" / "trainer_state.json"
    logs = json.loads(path.read_text())["log_history"] if path.exists() else []
    names = {name for log in logs for name in log if name.startswith("rewards/") and name.endswith("/mean")}
    return {name: [log[name] for log in logs if name in log][-LAST:] for name in sorted(names)}


def fallen(without: dict[str, list[float]], fixed: dict[str, list[float]]) -> str:
    """Functions whose reward has fallen by more than chance, if no other has risen; else nothing.

    Example:
        >>> fallen({"a": [0.5, 0.5]}, {"a": [0.1, 0.1]}), fallen({"a": [0.5, 0.5]}, {"a": [0.4, 0.7]})
        ('a 0.5 to 0.1', '')
    """
    falls, rises = [], []
    for name in without.keys() & fixed.keys():
        first, then = without[name], fixed[name]
        error = 2 * (pvariance(first) / len(first) + pvariance(then) / len(then)) ** 0.5 + 0.02
        if fmean(then) < fmean(first) - error:
            falls.append(f"{name} {fmean(first):.3g} to {fmean(then):.3g}")
        if fmean(then) > fmean(first) + error:
            rises.append(name)
    return "" if rises else ", ".join(falls)


def command(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Run a command of Covey's, or a script, in a process of its own: exit status, texts and seconds.

    The process is forked from this one, which has imported torch and transformers, and computes nothing itself.
    """
    _imported()
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.chdir(folder)
            _end(lambda: _run(arguments))
        status = _wait(child, began)
        for file in (output, errors):
            file.seek(0)
        texts = {"output": output.read(), "errors": errors.read()}
    return {"status": status, **texts, "seconds": round(time.perf_counter() - began, 1)}


def _imported() -> None:
    for name in PRELOADED:
        importlib.import_module(name)


def _run(arguments: list[str]) -> int:
    sys.path.insert(0, os.getcwd())
    if arguments[0].endswith(".py"):
        import runpy

        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    from covey.cli.main import main as covey

    sys.argv = ["covey", *arguments]
    return int(covey(arguments) or 0)


def _end(act: Callable[[], int]) -> None:
    """End this process with the status of an act."""
    status = 1
    try:
        status = act()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int, began: float) -> int | None:
    """The exit status; None for a process that was late."""
    while time.perf_counter() - began < LONGEST:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def verdict(case: Case, record: dict[str, Any]) -> str:
    """`right`, `accepted` or `wrong`; of a healthy run `right` or `alarm`."""
    findings = record["findings"]
    if not case.faulty:
        return "alarm" if any(one["level"] in ("error", "warning") for one in findings) else "right"
    if not findings:
        return "wrong"
    first = findings[0]
    told = " ".join(first[part] for part in ("evidence", "fix", "proof"))
    if first["code"] in case.right:
        return "right" if case.names in told else "accepted"
    return "accepted" if first["code"] in case.accepts else "wrong"


def line(case: Case, record: dict[str, Any]) -> str:
    shown = ", ".join(f"{one['code']} ({one['level']})" for one in record["findings"][:3]) or record["problem"] or "-"
    flaws = " CRASHED" * record["crashed"] + " CHANGED" * record["changed"]
    return (
        f"{case.name[:38]:<38} {record['phase']:<6} {verdict(case, record):<8} {record['seconds']:>5}s {shown}{flaws}"
    )


def table(records: Records) -> str:
    """Figures of each round, of cases as they are now, as Markdown."""
    known = {case.name: case for case in [*FAULTY, *HEALTHY, *FRESH_FAULTY, *FRESH_HEALTHY]}
    digests = {name: case.digest for name, case in known.items()}
    rows = [one for one in records.find() if digests.get(one["case"]) == one["digest"]]
    lines = [
        "| round | diagnosis | faulty: right | accepted | none or wrong | healthy: alarms | crashes | changed folders |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    told = [""]
    for name in dict.fromkeys(one["round"] for one in rows):
        for phase in PHASES:
            some = [(known[one["case"]], one) for one in rows if (one["round"], one["phase"]) == (name, phase)]
            said = [verdict(case, one) for case, one in some if case.faulty]
            alarms = [verdict(case, one) for case, one in some if not case.faulty]
            figures = [f"{said.count('right')} of {len(said)}", said.count("accepted"), said.count("wrong")]
            figures += [f"{alarms.count('alarm')} of {len(alarms)}"]
            figures += [sum(one[flaw] for _, one in some) for flaw in ("crashed", "changed")]
            lines.append(f"| {name} | {phase} | " + " | ".join(map(str, figures)) + " |")
        tried = [fix for one in rows if (one["round"], one["phase"]) == (name, "fixes") for fix in one["tried"]]
        refuted = [fix for fix in tried if fix["refuted"]]
        told.append(f"{name}: of {len(tried)} proposed settings {len(refuted)} were refuted.")
    return "\n".join([*lines, *told])


if __name__ == "__main__":
    main()
