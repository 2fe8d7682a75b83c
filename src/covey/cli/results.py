"""Results of a training command: curves, and a report with completions before and after."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from covey.cli.config_file import RUN_KEYS, RunConfig
from covey.observability.dashboard import duration
from covey.observability.evaluations import all_sets, metrics_of, with_interval
from covey.observability.report import Sample

SHOWN = 8  # pairs of completions in the report


def write_results(trainer: Any, run: RunConfig, since: float | None = None) -> None:
    from covey.observability.diagnostics import advice
    from covey.observability.plots import plot_curves
    from covey.observability.report import write_report
    from covey.observability.timeline import plot_timeline

    assert run.args.output_dir is not None, "transformers fills it in"
    output_dir = Path(run.args.output_dir)
    history = trainer.state.log_history
    title = f"{run.method.upper()}: {run.model}"
    rewarded = any("reward" in entry for entry in history)
    figures = [plot_curves(history, output_dir / "curves.png", title)] if rewarded else []
    weights = dict(zip(trainer.rewards.names, trainer.rewards.weights.tolist(), strict=True))
    timeline = plot_timeline(trainer.timeline, output_dir / "timeline.png")
    before, after = samples(output_dir / "completions", weights, trainer.state.global_step, since)
    report = write_report(
        output_dir / "summary.html",
        title=title,
        config=settings(run),
        log_history=history,
        figures=[*figures, *([timeline] if timeline else [])],
        before=before,
        after=after,
        summary=key_figures(history),
        advice=list(advice(history, run.args, ended=True).values()),
    )
    places = {"model": output_dir, "report": report, "curves": figures[0] if figures else None}
    if before or after:
        places["completions"] = output_dir / "completions"
    for name, place in places.items():
        if place is not None:
            print(f"{name + ':':<13}{place}")


def key_figures(history: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    figures: dict[str, Any] = {}
    if rewards:
        tenth = max(1, len(rewards) // 10)
        figures["Reward at first"] = round(sum(rewards[:tenth]) / tenth, 4)
        figures["Reward at last"] = round(sum(rewards[-tenth:]) / tenth, 4)
    latest: dict[str, Any] = {}
    for entry in history:
        latest.update(entry)
    for name in all_sets(history):
        metrics = metrics_of(name, latest)
        figures[f"Reward in evaluation {name}".rstrip()] = metrics["reward"]
        for label, text in with_interval(metrics):
            figures[f"{label} {name}".rstrip()] = text
    figures["Optimizer steps"] = latest.get("step", 0)
    if "num_tokens" in latest:
        figures["Tokens"] = int(latest["num_tokens"])
    if "train_runtime" in latest:
        figures["Training time"] = duration(latest["train_runtime"])
    return figures


def settings(run: RunConfig) -> dict[str, Any]:
    """Keys of the run and settings that differ from their defaults, without secrets."""
    values = run.args.to_dict()
    defaults = {field.name: field.default for field in dataclasses.fields(run.args)}
    named = {name: getattr(run, name) for name in RUN_KEYS if name != "dataset_split" or run.dataset}
    listed = {name: ", ".join(map(str, value)) for name, value in named.items() if isinstance(value, list)}
    changed = {
        name: value
        for name, value in values.items()
        if value != defaults.get(name, value) and not name.endswith(("_token", "_key", "_secret"))
    }
    return {name: value for name, value in (named | listed).items() if value not in (None, "")} | changed


def samples(
    folder: Path, weights: dict[str, float], last_step: int, since: float | None = None
) -> tuple[list[Sample], list[Sample]]:
    """Completions of the first and the last log of a run that began at `since`, those of common prompts first."""
    import pyarrow.parquet as pq

    paths = [path for path in folder.glob("completions_*.parquet") if since is None or path.stat().st_mtime >= since]
    steps = {int(path.stem.rpartition("_")[2]): path for path in paths}
    files = [steps[step] for step in sorted(steps) if step <= last_step]
    if not files:
        return [], []
    first, last = (_by_prompt(pq.read_table(path).to_pylist()) for path in (files[0], files[-1]))
    if len(files) == 1:
        return [], [_sample(row, weights) for row in list(last.values())[:SHOWN]]
    common = [prompt for prompt in first if prompt in last]
    chosen = [common + [prompt for prompt in rows if prompt not in common] for rows in (first, last)]
    before, after = (
        [_sample(rows[prompt], weights) for prompt in prompts[:SHOWN]]
        for rows, prompts in zip((first, last), chosen, strict=True)
    )
    return before, after


def _by_prompt(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first completion of every prompt: a fair choice, as completions of a group are in no order."""
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        chosen.setdefault(row["prompt"], row)
    return chosen


def _sample(row: dict[str, Any], weights: dict[str, float]) -> Sample:
    scores = [weight * row[name] for name, weight in weights.items() if row.get(name) is not None]
    completion = json.loads(row["messages"]) if row.get("messages") else row["completion"]
    return Sample(
        row["prompt"], completion, sum(scores) if scores else None, row.get("finish") or "", row.get("images") or ()
    )
