"""`covey explain`: the meaning of a config in plain English, before any of it is computed.

No model is loaded, only its config. A new paragraph goes into a section of `covey.cli.explain.sections`, a new table
into `covey.cli.explain.figures`.
"""

import sys
import textwrap
import warnings
from typing import Any

import torch

from covey.cli.config_file import load_run
from covey.cli.evaluations import has_plain, suite_settings
from covey.cli.explain import figures, sections
from covey.cli.explain.flags import Cluster, take_flags
from covey.cli.explain.model import ModelPlan, model_plan
from covey.cli.explain.run import ExplainedRun
from covey.cli.explain.start import Start, check_start
from covey.cli.train import take_config
from covey.config.base import OnlineConfig
from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, estimate
from covey.sizing.vllm_memory import engine_memory
from covey.trainer.evaluation.suites import suite_of

USAGE = """usage: covey explain [--config] CONFIG [--world_size N] [--accelerate_config NAME]
                     [--gpu NAME] [--gpus_of_node N] [--prompt_tokens N] [--gpu_memory N]
                     [--images N] [--image_size WxH] [--field value ...]

Explain a run: batches, updates, loss, tokens, memory and communication, and whether its data
and rewards are there. The exit status is 2 if the run would not start.

  CONFIG            YAML or JSON file of the run
  --world_size N    explain it for N processes; --num_processes is the same
  --accelerate_config NAME
                    how the model is sharded: multi_gpu, fsdp2, zero1, zero2, zero3, or the file
                    of a config; without --world_size, for its number of processes
  --gpu NAME        a100, h100 or h200: estimate the time of a step there
  --gpus_of_node N  GPUs of one machine (8 if not given)
  --prompt_tokens N length of a prompt, for tokens and memory (256 if not given)
  --gpu_memory N    GiB of a GPU, if the run has another than this machine
  --images N        images of a prompt, if the model sees images (1 if not given; 0 for none)
  --image_size WxH  pixels of each (512x512 if not given)
  --field value     any setting of the run, in place of the file's
"""


def explain(
    args: OnlineConfig,
    *,
    model: ModelPlan | None = None,
    world_size: int | None = None,
    prompt_tokens: int | None = None,
    has_eval: bool = False,
    start: Start | None = None,
    gpu: int | None = None,
    suites: dict[str, dict[str, Any]] | None = None,
    cluster: Cluster | None = None,
) -> str:
    """Explain a config.

    Args:
        args: a `GRPOConfig` or `RLOOConfig`.
        model: the model, for the memory estimate.
        world_size: number of processes; those that are running by default.
        prompt_tokens: length of a prompt without its images.
        has_eval: the run has an evaluation dataset that is sampled as in training.
        start: findings about its data and rewards.
        gpu: bytes of a GPU; this machine's if None.
        suites: settings of its evaluation suites, by name.
        cluster: processes and machines; None: each process has all of the model.

    Raises:
        ValueError: the batch sizes do not divide for `world_size` processes.
    """
    length, model = prompt_tokens or ASSUMED_PROMPT_TOKENS, model or ModelPlan()
    memory = engine = None
    if model.config is not None:
        memory = estimate(
            model.config,
            args,
            prompt_tokens=length,
            images=model.images,
            peft=model.peft,
            quantization=model.quantization,
            spread=cluster.spread if cluster else None,
            device="cuda" if cluster and cluster.machine else None,
        )
        if args.use_vllm and args.vllm_mode == "colocate":
            engine = engine_memory(memory, model.config, args, length)
    run = ExplainedRun(
        args=args,
        algebra=args.algebra(world_size),
        prompt_tokens=length,
        model=model,
        memory=memory,
        engine=engine,
        gpu=gpu or gpu_bytes(),
        cluster=cluster,
        start=start,
        samples_eval_dataset=has_eval,
        suites=suites,
    )
    contents = {
        "Batches": sections.fill(sections.BATCHES, run),
        "On- or off-policy": sections.fill(sections.POLICY, run),
        "Loss": sections.fill(sections.LOSS, run),
        "Tokens": sections.fill(sections.TOKENS, run),
        "Sampling": sections.fill(sections.SAMPLING, run),
        "Memory": figures.memory(run),
        "Operations and communication": figures.communication(run),
        "Evaluation": evaluation(run),
        "Start": start.lines() if start else [],
    }
    return "\n\n".join(_section(title, lines) for title, lines in contents.items() if lines)


def main(argv: list[str]) -> int:
    """Run the command; returns its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        path, argv = take_config(argv)
        flags, settings = take_flags(argv)
        if flags.cluster is not None and flags.cluster.machine and gpu_bytes() is None:
            settings += ["--use_cpu", "true"]  # else a config with bf16 would be refused here
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = load_run(path, settings, world_size=flags.world_size)
        start = check_start(run, run.args.algebra(flags.world_size))
        text = explain(
            run.args,
            model=model_plan(run, flags.images, flags.image_size),
            world_size=flags.world_size,
            prompt_tokens=flags.prompt_tokens,
            has_eval=has_plain(run.eval_dataset),
            suites=suite_settings(run.eval_dataset) if run.eval_dataset else None,
            start=start,
            gpu=flags.gpu,
            cluster=flags.cluster,
        )
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"covey explain: {error}", file=sys.stderr)
        return 2
    print(f"{run.method.upper()} of {run.model or 'a model yet to be named'}\n")
    print(text)
    notes = [str(w.message) for w in caught if issubclass(w.category, (UserWarning, FutureWarning))]
    if notes:
        print("\n" + _section("Warnings", notes))
    return 2 if start.problems else 0


def gpu_bytes() -> int | None:
    """Memory of this machine's first GPU, if it has one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def evaluation(run: ExplainedRun) -> list[str]:
    """Completions of evaluation batches and suites."""
    if not run.samples_eval_dataset and not run.suites:
        return ["None: no eval_dataset is given, and nothing is split off the training data."]
    a, lines = run.algebra, []
    try:
        if run.samples_eval_dataset:
            a.check_eval()
            lines.append(
                f"Each evaluation batch: {a.prompts_per_eval_batch} prompt(s), {a.eval_group} completions each, "
                f"{a.eval_batch_size} completions in all."
            )
        for name, settings in (run.suites or {}).items():
            own = {key: value for key, value in settings.items() if key not in ("dataset", "split")}
            greedy = ", greedy" if settings.get("temperature") == 0 else ""
            title = f"Suite {name}".rstrip()
            lines.append(f"{title}: {suite_of(own, None).completions(a)} completion(s) of each prompt{greedy}.")
    except ValueError as error:
        return [*lines, f"This will fail: {error}"]
    if str(getattr(run.args.eval_strategy, "value", run.args.eval_strategy)) == "no":
        lines.append("eval_strategy is `no`, so nothing is evaluated during training; set eval_strategy=steps.")
    return lines


def _section(title: str, lines: list[str]) -> str:
    wrapped = [
        "    " + line  # of a table
        if "   " in line
        else textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="    ", drop_whitespace=True)
        for line in lines
    ]
    return "\n".join([title, *wrapped])
