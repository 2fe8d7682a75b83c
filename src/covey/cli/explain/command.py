"""`covey explain`: the meaning of a config in plain English, before any of it is computed; no model is loaded."""

import argparse
import re
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any

import yaml

from covey.cli.explain import figures, sections
from covey.cli.explain.flags import flag_parser
from covey.cli.explain.run import Cluster, ExplainedRun, check_start, gpu_bytes, model_plan
from covey.cli.launch import find_config
from covey.cli.run_file import evaluation_sets, take_config
from covey.cli.train import read_run
from covey.policy.loading import sees_images
from covey.runtime.quiet import without_bars
from covey.runtime.safe_text import printable
from covey.runtime.user_code import report
from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, SHARDED, ShardCounts
from covey.sizing.vllm_memory import GIB
from covey.trainer.evaluation.suites import suite_of


@without_bars()
def main(argv: list[str]) -> int:
    path, argv = take_config(argv)
    flags, settings = take_flags(argv)
    planned_gpu = flags.gpu is not None or flags.gpu_memory is not None
    with warnings.catch_warnings(record=True, action="always") as caught:
        run = read_run(path, settings, None, needed=(), world_size=flags.world_size, gpu=planned_gpu)
        start = check_start(run, run.args.algebra(flags.world_size))
    model = model_plan(run, 1 if flags.images is None else flags.images, flags.image_size or (512, 512))
    explained = ExplainedRun(
        run.args,
        model,
        flags.world_size,
        prompt_tokens=flags.prompt_tokens or start.prompt_tokens or ASSUMED_PROMPT_TOKENS,
        gpu=flags.gpu_memory * GIB if flags.gpu_memory else gpu_bytes(),
        cluster=flags.cluster,
        start=start,
        evaluations=evaluation_sets(run.eval_dataset),
        seats=[seat for given in (run.seats, run.eval_seats) if isinstance(given, dict) for seat in given.values()],
        rewarded=run.rewarded or run.args.teacher is None,
    )
    text = explain(explained)
    print(f"{run.method.upper()} of {run.model or 'a model yet to be named'}\n")
    print(printable(text))
    for finding in figures.fit(explained):
        print(f"\n{finding}")
    notes = [str(w.message) for w in caught if issubclass(w.category, (UserWarning, FutureWarning))]
    notes += idle_flags(flags, model.config)
    if notes:
        print(printable("\n" + _section("Warnings", notes)))
    return 2 if start.problems else 0


def idle_flags(flags: argparse.Namespace, config: Any) -> Iterable[str]:
    """Sentences on flags that change nothing, with the model's config if it is known."""
    if config is not None and not sees_images(config):
        for name in ("images", "image_size"):
            if getattr(flags, name) is not None:
                yield f"`--{name}` has no effect: the model sees no images."
    if flags.gpus_of_node is not None and (flags.gpu is None or (flags.world_size or 1) == 1):
        yield "`--gpus_of_node` has no effect: times are estimated with --gpu, and one process needs no network."


def explain(run: ExplainedRun) -> str:
    """Explain a run; `ValueError` if its batch sizes do not divide for the number of processes."""
    start = run.start.lines() if run.start else []
    fails = bool(run.start and run.start.problems)
    contents = {
        **({"Start": start} if fails else {}),
        "Prompts and rewards": run.start.prompts if run.start else [],
        "Sources": run.start.sources if run.start else [],
        "Batches": sections.batches(run),
        "On- or off-policy": sections.policy(run),
        "Loss": sections.loss(run),
        "Tokens": sections.tokens(run),
        "Sampling": sections.sampling(run),
        "Memory": figures.memory(run),
        "Operations and communication": figures.communication(run),
        "Threads": sections.threads(run),
        "Evaluation": evaluation(run),
        **({} if fails else {"Start": start}),
    }
    texts = [_section(title, lines) for title, lines in contents.items()]
    return "\n\n".join(text for text in texts if "\n" in text)


def _section(title: str, lines: Iterable[str]) -> str:
    paragraphs = [re.sub(r"\n +", " ", line) for line in lines]  # broken where our source breaks
    wrapped = [
        "    " + line  # of a table
        if "   " in line
        else textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="    ", drop_whitespace=True)
        for line in paragraphs
    ]
    return "\n".join([title, *wrapped])


def evaluation(run: ExplainedRun) -> list[str]:
    if not run.evaluations:
        return ["None: no eval_dataset is given, and nothing is split off the training data."]
    a, lines = run.algebra, []
    try:
        suites = {name: entry for name, entry in run.evaluations.items() if isinstance(entry, dict)}
        if len(suites) < len(run.evaluations):
            report(a.check_eval())
            lines.append(
                f"Each evaluation batch: {a.prompts_per_eval_batch} prompt(s), {a.eval_group} completions each, "
                f"{a.eval_batch_size} completions in all."
            )
        for name, settings in suites.items():
            own = {key: value for key, value in settings.items() if key not in ("dataset", "split")}
            greedy = ", greedy" if settings.get("temperature") == 0 else ""
            title = f"Suite {name}".rstrip()
            lines.append(f"{title}: {suite_of(own, None).completions(a)} completion(s) of each prompt{greedy}.")
    except ValueError as error:
        return [*lines, f"This will fail: {error}"]
    if str(getattr(run.args.eval_strategy, "value", run.args.eval_strategy)) == "no":
        lines.append("eval_strategy is `no`, so nothing is evaluated during training; set eval_strategy=steps.")
    return lines


def take_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags that are no settings of a run, with the `cluster` they make, and return the other arguments."""
    spelled = [re.sub("(?<=[a-z])-", "_", word) if word.startswith("--") and "=" not in word else word for word in argv]
    found, rest = flag_parser().parse_known_args(spelled)
    found.cluster = None
    if found.accelerate_config is not None or found.gpu is not None:
        config = found.accelerate_config
        sharding, processes = sharding_of(config) if config is not None else ("multi_gpu", 1)
        found.world_size = found.world_size or processes
        found.cluster = Cluster(ShardCounts.of(sharding, found.world_size), found.gpu, found.gpus_of_node or 8)
    return found, rest


def sharding_of(config: str) -> tuple[str, int]:
    """Sharding (a key of `SHARDED`) and number of processes of an accelerate config, by its name or path."""
    path = find_config(config)
    try:
        values = yaml.safe_load(path.read_text())
        kind, processes = str(values["distributed_type"]).upper(), int(values.get("num_processes") or 1)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--accelerate_config {config!r} cannot be read as a config of accelerate, which names a distributed_type"
            f" and num_processes ({type(error).__name__}: {str(error).splitlines()[0]}). `accelerate config` makes"
            " one."
        ) from error
    stage = (values.get("deepspeed_config") or {}).get("zero_stage")
    version = (values.get("fsdp_config") or {}).get("fsdp_version")
    names = {"FSDP": f"fsdp{version or 1}", "DEEPSPEED": f"zero{stage}", "NO": "multi_gpu", "MULTI_CPU": "multi_gpu"}
    sharding = names.get(kind, kind.lower())
    if sharding not in SHARDED:
        raise ValueError(
            f"--accelerate_config {config!r} shares the model as {sharding!r}, which Covey does not train with; it"
            f" trains with {', '.join(SHARDED)}."
        )
    return sharding, processes
