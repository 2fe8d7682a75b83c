"""Tables of the GPU kit's records, for README.md and benchmarks/measured.md: `python -m benchmarks.gpu.table`."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import GIB, figure, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
NOT_MEASURED = "Not measured on a GPU yet."
NAMES = {
    "covey_default": "Covey, defaults",
    "trl_default": "TRL, defaults",
    "covey_best": "Covey, best",
    "trl_best": "TRL, best",
    "trl_continuous": "TRL, best, continuous batching",
}
Records = list[dict[str, Any]]


def summary(results: dict[str, Any]) -> str:
    """All parts that were measured, and the machine."""
    if not results.get("records"):
        return NOT_MEASURED
    titles = {
        "correct": "Tests",
        "step": "A training step",
        "decode": "Sampling alone",
        "head": "Log-probs from hidden states, forward and backward",
        "attention": "Attention of token trees, forward and backward",
        "memory": "Memory",
        "profile": "Profile of a step",
    }
    parts = [machine_line(results["machine"])]
    for part, title in titles.items():
        records = [record for record in results["records"] if record["part"] == part]
        good = _of(records, part)
        failed = [f"- failed: {r['job']} {r['case']}: {r['error'].splitlines()[-1]}" for r in records if "error" in r]
        if records:
            parts += [f"**{title}**", TABLES[part](good) if good else "", "\n".join(failed)]
    return "\n\n".join(filter(None, parts))


def short(results: dict[str, Any]) -> str:
    """The ratios of steps for the first page, and the machine in a sentence."""
    by_workload = _by_workload(_of(results.get("records", []), "step"))
    rows = []
    for case, name in FIRST_PAGE.items():
        found = by_workload.get(case, {})
        if {"trl_default", "covey_default"} <= found.keys():
            seconds = [figure(found[who]["seconds"]) for who in ("trl_default", "covey_default")]
            ratios = [_ratio(found, *RATIOS[kind]) for kind in ("TRL / Covey, defaults", "TRL / Covey, best")]
            rows.append([name, *seconds, *(f"{ratio:.1f} x" if ratio else "-" for ratio in ratios)])
    if not rows:
        return NOT_MEASURED
    header = ["one training step", "TRL, s", "Covey, s", "faster", "both at their best settings"]
    machine = results["machine"]
    versions = machine["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("trl", "torch", "transformers") if name in versions)
    sentence = f"{machine['device'].split(' HBM')[0]}, a model of 1.5 billion parameters in bfloat16, {named}."
    return "\n\n".join([table(header, rows), sentence])


FIRST_PAGE = {
    "W1": "short prompts, completions of equal length",
    "W2": "long prompts",
    "W3": "uneven lengths, half of the groups with equal rewards, which teach nothing",
}
"""Workloads of the first page, in words."""
RATIOS = {
    "TRL / Covey, defaults": ("trl_default", "covey_default"),
    "TRL / Covey, best": ("trl_best", "covey_best"),
    "TRL with continuous batching / Covey, best": ("trl_continuous", "covey_best"),
}


def machine_line(machine: dict[str, Any]) -> str:
    """One line: device, peaks and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    memory = f", {machine['device_memory_GiB']} GiB" if "device_memory_GiB" in machine else ""
    return (
        f"{machine['device']}{memory}; bf16 products {machine['flops'] / 1e12:.3g} TFLOP/s, copies"
        f" {machine['bandwidth'] / 1e9:.4g} GB/s (read and written); {machine['cores']} cores, {machine['date']};"
        f" {versions}."
    )


def _of(records: Records, part: str) -> Records:
    return [record for record in records if record["part"] == part and "error" not in record]


def _by_workload(steps: Records) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in steps:
        found.setdefault(record["case"], {})[record["job"]] = record
    return found


def _ratio(by_name: dict[str, dict[str, Any]], above: str, below: str) -> float | None:
    if above not in by_name or below not in by_name:
        return None
    return by_name[above]["seconds"] / by_name[below]["seconds"]


def _ratios(records: Records) -> list[list[str]]:
    """Rows of the workloads that both libraries have done."""
    rows = []
    for name, by_name in _by_workload(records).items():
        ratios = [_ratio(by_name, *pair) for pair in RATIOS.values()]
        if any(ratios):
            rows.append([name, *map(figure, ratios)])
    return rows


def _step(records: Records) -> str:
    ratios = _ratios(records)
    header = ["seconds (medians)", "step", "generate", "score", "forward/backward", "optimizer", "other"]
    header += ["peak GiB", "reserved GiB", "MFU of passes", "MFU of step", "first step"]
    tables = []
    for name, by_name in _by_workload(records).items():
        rows = []
        for contender, found in sorted(by_name.items(), key=lambda item: list(NAMES).index(item[0])):
            phases = [figure(found["phases"].get(p, 0.0)) for p in ("generate", "score", "train", "optimizer", "other")]
            seconds, memory = figure(found["seconds"]), [_gib(found["peak"]), _gib(found["reserved"])]
            rest = [_percent(found["mfu_train"]), _percent(found["mfu_step"]), figure(found["warm_up_seconds"], 1)]
            rows.append([NAMES[contender], seconds, *phases, *memory, *rest])
        tables.append(f"{name}: {next(iter(by_name.values()))['workload']}.\n\n{table(header, rows)}")
    return "\n\n".join([table(["time", *RATIOS], ratios), *tables])


def _decode(records: Records) -> str:
    rows = [
        [
            f"{r['job']}, {r['case']} sequences",
            f"{r['tokens_per_second']:.0f}",
            figure(r["ms_per_step"]),
            _percent(r["bandwidth_share"]),
            figure(r["ms_per_later_step"]),
            _percent(r["bandwidth_share_later"]),
            figure(r["first_seconds"], 1),
        ]
        for r in records
    ]
    header = ["", "tokens/s", "ms/step, prompts included", "of bandwidth limit", "ms of a later step"]
    return table([*header, "of bandwidth limit", "first run, s"], rows)


def _head(records: Records) -> str:
    rows = []
    for r in records:
        for name in ("covey", "torch"):
            one = r[name]
            figures = ["out of memory", *"----"]
            if one:
                differences = [f"{one['difference']:.1g}", f"{one['gradient_difference']:.1g}"]
                figures = [figure(one["ms"]), _gib(one["peak"]), _percent(one["mfu"]), *differences]
            rows.append([f"{r['case']} tokens, {name}", *figures])
    return table(["", "ms", "peak GiB", "MFU", "difference to float64", "of the gradient"], rows)


def _attention(records: Records) -> str:
    rows = [
        [
            r["case"],
            str(r["tokens"]),
            str(r["padded_tokens"]),
            figure(r["covey"]["ms"]),
            figure(r["torch"]["ms"]),
            figure(r["ratio"]),
            figure(r["covey"]["first_seconds"], 1),
            f"{r['covey']['difference']:.1g} / {r['torch']['difference']:.1g}",
        ]
        for r in records
    ]
    header = ["", "tokens", "padded", "Covey, ms", "torch, padded rows, ms", "torch / Covey", "Covey's first call, s"]
    return table([*header, "differences"], rows)


def _memory(records: Records) -> str:
    planned = [r for r in records if r["case"] == "plan"]
    largest = [r for r in records if r["case"] != "plan"]
    rows = [[r["job"], _gib(r["predicted"]), _gib(r["measured"]), _percent(r["off"], "+")] for r in planned]
    tables = [table(["", "predicted GiB", "measured GiB", "off"], rows)] if rows else []
    if largest:
        tables.append(
            table(
                ["largest micro-batch, 1.5B without checkpointing", "rollouts", "peak GiB"],
                [[r["job"], str(r["largest"]), _gib(_peak_of_largest(r))] for r in largest],
            )
        )
    return "\n\n".join(tables)


def _peak_of_largest(record: dict[str, Any]) -> int | None:
    return next((one.get("peak") for one in record["tried"] if one["rollouts"] == record["largest"]), None)


def _profile(records: Records) -> str:
    rows = [
        [
            f"{record['case']}: {name}",
            figure(1e3 * part["seconds"], 1),
            _percent(part["idle_share"]),
            str(part["launches"]),
            "; ".join(f"{kernel[:40]} {ms:.1f} ms" for kernel, ms, _ in part["kernels"][:3]) or "-",
        ]
        for record in records
        for name, part in record["parts"].items()
    ]
    return table(["", "ms", "idle", "launches", "top kernels"], rows)


def _correct(records: Records) -> str:
    rows = [
        [
            *(str(r[name]) for name in ("passed", "failed", "skipped")),
            figure(r["seconds"], 0),
            "yes" if r["complete"] else "no",
        ]
        for r in records
    ]
    return table(["passed", "failed", "skipped", "seconds", "complete"], rows)


TABLES: dict[str, Callable[[Records], str]] = {
    "correct": _correct,
    "step": _step,
    "decode": _decode,
    "head": _head,
    "attention": _attention,
    "memory": _memory,
    "profile": _profile,
}
PAGES = {"README.md": short, "benchmarks/measured.md": summary}


def _gib(size: int | None) -> str:
    return figure(size / GIB if size is not None else None, 1)


def _percent(share: float | None, sign: str = "") -> str:
    return "-" if share is None else f"{100 * share:{sign}.0f}%"


def written(page: str, text: str) -> str:
    """The page with `text` between its markers.

    Raises:
        ValueError: it has no markers.
    """
    marked = re.compile(r"(<!-- gpu -->\n).*?(<!-- /gpu -->)", re.DOTALL)
    if not marked.search(page):
        raise ValueError("the page has no lines <!-- gpu --> and <!-- /gpu -->")
    return marked.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def main() -> None:
    """Write the tables of a results file into the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--print", action="store_true", dest="prints", help="print them instead")
    given = parser.parse_args()
    results = json.loads(given.results.read_text()) if given.results.exists() else {}
    if given.prints:
        print(summary(results))
        return
    for name, made in PAGES.items():
        page = ROOT / name
        page.write_text(written(page.read_text(), made(results)))


if __name__ == "__main__":
    main()
