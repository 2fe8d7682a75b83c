"""Measurements as markdown tables. No measuring here."""

from typing import Any

PHASES = ("generate", "score", "train", "optimizer", "other")
NAMES = {
    "covey_default": "Covey, defaults",
    "trl_default": "TRL, defaults",
    "covey_best": "Covey, best",
    "trl_best": "TRL, best",
    "covey_passive": "Covey, defaults, passive waiting",
    "trl_passive": "TRL, defaults, passive waiting",
}
GIB = 2**30


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table; the first column is text, the others are figures."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def step_tables(found: dict[str, Any]) -> str:
    """The comparison of steps: ratios first, then what each workload's time was spent on."""
    ratios = [
        [
            name,
            figure(entry["trl_over_covey_default"]),
            figure(entry["trl_over_covey_passive"]),
            figure(entry["trl_over_covey_best"]),
            figure(entry["trl_default_over_covey_best"]),
            figure(entry["memory_covey_over_trl"]["default"]),
            figure(entry["memory_covey_over_trl"]["best"]),
            *(figure(entry["efficiency"][name]) for name in ("covey_default", "covey_best")),
        ]
        for name, entry in found.items()
    ]
    header = [
        "",
        "time TRL / Covey, defaults",
        "the same, passive waiting",
        "time TRL / Covey, best",
        "time TRL defaults / Covey best",
        "memory Covey / TRL, defaults",
        "memory Covey / TRL, best",
        "efficiency, Covey defaults",
        "efficiency, Covey best",
    ]
    return "\n\n".join([table(header, ratios), *(_workload(name, entry) for name, entry in found.items())])


def _workload(name: str, entry: dict[str, Any]) -> str:
    rows = []
    for contender, measured in entry["contenders"].items():
        positions = measured["positions_computed"]
        rows.append(
            [
                NAMES[contender],
                figure(measured["seconds"], 1),
                *(figure(measured["phases"][phase], 1) for phase in PHASES),
                figure(measured["peak_bytes"] / GIB),
                f"{positions['generate']:.0f}",
                f"{positions['score'] + positions['train']:.0f}",
                figure(measured["efficiency"]),
                *(figure(share) for share in measured["of_roofline"].values()),
            ]
        )
    needed = entry["positions_needed"]
    rows.append(["needed", *["-"] * 7, f"{needed['generate']:.0f}", f"{needed['train']:.0f}", *["-"] * 3])
    header = [
        "seconds (medians)",
        "step",
        "generate",
        "score",
        "forward/backward",
        "optimizer",
        "other",
        "peak GiB",
        "positions sampled",
        "positions trained",
        "efficiency",
        "sampling of roofline",
        "training of roofline",
    ]
    settings = [_settings(NAMES[contender], measured) for contender, measured in entry["contenders"].items()]
    return "\n\n".join(
        [
            f"**{name}**: {entry['description']}. Matrix products ran at {entry['machine_flops'] / 1e9:.0f} GFLOP/s,"
            f" memory was read at {entry['machine_bandwidth'] / 1e9:.1f} GB/s.",
            table(header, rows),
            "\n".join(settings),
        ]
    )


def _settings(name: str, measured: dict[str, Any]) -> str:
    chosen = measured["settings"]
    tokens = chosen.get("max_tokens_per_micro_batch")
    words = [
        f"passes of {tokens} tokens" if tokens else f"micro-batch {chosen.get('per_device_train_batch_size')}",
        "gradient checkpointing" if chosen.get("gradient_checkpointing") else "no gradient checkpointing",
    ]
    if chosen.get("use_transformers_continuous_batching"):
        words.append("continuous batching")
    rounds = ", ".join(f"{seconds:.1f}" for seconds in measured["all_seconds"])
    return f"- {name}: {', '.join(words)}; rounds {rounds} s"


def script_table(found: dict[str, Any]) -> str:
    """A user's script for TRL, and the same with its import changed."""
    if not found:
        return "Nothing has been measured."
    header = ["", "seconds of each round", "peak GiB"]
    peaks = {name: peak and peak / GIB for name, peak in found["peak_bytes"].items()}
    rows = [
        [name, ", ".join(figure(one, 1) for one in seconds), figure(peaks[name])]
        for name, seconds in found["seconds"].items()
    ]
    rows.append(["ratio", figure(found["trl_over_covey"]), figure(found["memory_covey_over_trl"])])
    return table(header, rows)


def learn_tables(found: dict[str, Any]) -> str:
    """Time to the accuracy that TRL ends with."""
    if "mean_of_seeds" not in found:
        return "Not both libraries have run."
    rows = [
        [
            label,
            figure(100 * entry["accuracy"], 1, "%"),
            figure(entry["covey_seconds"], 0, " s"),
            figure(entry["trl_seconds"], 0, " s"),
            figure(entry["ratio"]),
            figure(100 * entry["covey_end"], 1, "%"),
            figure(100 * entry["trl_end"], 1, "%"),
            figure(entry["step_time_ratio"]),
        ]
        for label, entry in [
            *((f"seed {seed}", entry) for seed, entry in found["by_seed"].items()),
            ("mean curve of the seeds", found["mean_of_seeds"]),
        ]
    ]
    header = [
        "",
        "accuracy that TRL ends with",
        "Covey reaches it after",
        "TRL reaches it after",
        "TRL / Covey",
        "last of Covey",
        "last of TRL",
        "all steps, TRL / Covey",
    ]
    return table(header, rows)


def growth_tables(found: dict[str, Any]) -> str:
    """Times by G and by length, and the lines through them."""
    if not found:
        return "Nothing has been measured."
    parts = []
    for name, curve in found["curves"].items():
        points = curve["points"]
        parts.append(table([name, *map(str, points)], [["seconds a step", *(figure(s, 1) for s in points.values())]]))
        if "seconds_each" in curve:
            parts.append(f"{curve['fixed_seconds']:.2f} s + {curve['seconds_each']:.4f} s for each.")
    if found["prompt_seconds"]:
        cost = found["prompt_seconds"]
        row = ["seconds", *(figure(s, 1) for s in cost.values())]
        parts.append(table(["what the prompts cost, by G", *map(str, cost)], [row]))
    if "prompt_seconds_each" in found:
        parts.append(
            f"{found['prompt_fixed_seconds']:.2f} s + {found['prompt_seconds_each']:.4f} s for each completion of a"
            " prompt: the first term is the prompts, the second the attention of completions to them."
        )
    return "\n\n".join(parts)


def page(results: dict[str, Any], decode_markdown: str, readme: str = "README.md") -> str:
    """All of RESULTS.md; `readme` is the path from it to the method."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    parts = [
        "# Measurements",
        f"Written by `make bench`; how each figure is taken is in [README.md]({readme}), every number in"
        " [results.json](results.json).",
        f"{machine['processor']} ({', '.join(machine['instructions'])}), {machine['cores']} cores,"
        f" {machine['threads']} threads, {machine['memory_GiB']} GiB, {machine['system']}, {machine['dtype']},"
        f" {machine['date']}; {versions}."
        " SmolLM2-135M-Instruct, full fine-tuning.",
    ]
    if results.get("failures"):
        parts.append(
            "\n".join(f"- **failed**: {name}: {error.splitlines()[0]}" for name, error in results["failures"].items())
        )
    if results.get("step"):
        parts += ["## A training step", step_tables(results["step"])]
    if results.get("script"):
        parts += ["## W4: a script for TRL, and with its import changed", script_table(results["script"])]
    if results.get("decode"):
        parts += ["## Sampling alone", decode_markdown]
    if results.get("learn"):
        parts += ["## Learning", learn_tables(results["learn"]), "![Accuracy and reward against time](learn.png)"]
    if results.get("growth"):
        parts += ["## Growth", growth_tables(results["growth"]), "![Step time against G and length](growth.png)"]
    return "\n\n".join(parts) + "\n"
