"""`covey explain`: what a config means, in words, before any of it is computed.

Batches, updates, whether ratios can clip, what the loss will look like and why, tokens, memory, and whether data and
rewards are there. No model is loaded, only its config. Each section is a function from the run to lines; a new section
goes into `SECTIONS`. Whole paragraphs are in `explain_sentences`.
"""

import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.cli.config_file import load_run
from covey.cli.evaluations import has_plain, suite_settings
from covey.cli.explain import sentences as sentences
from covey.cli.explain.colocation import colocation, gpu_bytes
from covey.cli.explain.costs import costs
from covey.cli.explain.flags import Cluster, take_flags
from covey.cli.explain.model import ModelPlan, model_plan
from covey.cli.explain.sentences import count
from covey.cli.explain.start import Start, check_start
from covey.cli.train import take_config
from covey.config.algebra import BatchAlgebra
from covey.config.rules.objective import CLIPPED
from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, MemoryEstimate, ShardCounts, estimate, readable
from covey.sizing.step_cost import MACHINES
from covey.sizing.vllm_memory import EngineMemory, engine_memory
from covey.trainer.evaluation.suites import suite_of

USAGE = """usage: covey explain [--config] CONFIG [--world_size N] [--accelerate_config NAME]
                     [--gpu NAME] [--gpus_of_node N] [--prompt_tokens N] [--gpu_memory N]
                     [--images N] [--image_size WxH] [--field value ...]

Say in words what a run will do: batches, updates, loss, tokens, memory, what processes send one
another; and whether its data and rewards are there. Its exit status is 2 where the run would not
start.

  CONFIG            YAML or JSON file of the run
  --world_size N    explain it for N processes; --num_processes is the same
  --accelerate_config NAME
                    how they share weights: multi_gpu, fsdp2, zero1, zero2, zero3, or the file of
                    a config; without --world_size, for as many processes as it has
  --gpu NAME        a100, h100 or h200: how long a step takes there, on paper
  --gpus_of_node N  GPUs of one machine (8 if not given)
  --prompt_tokens N length of a prompt, for tokens and memory (256 if not given)
  --gpu_memory N    GiB of a GPU, where the run has another than this machine
  --images N        images of a prompt, where the model sees some (1 if not given; 0 for none)
  --image_size WxH  pixels of each (512x512 if not given)
  --field value     any setting of the run, in place of the file's
"""


@dataclass(frozen=True)
class Run:
    """What the sections read."""

    args: Any
    algebra: BatchAlgebra
    prompt_tokens: int
    has_eval: bool
    memory: MemoryEstimate | None
    model: ModelPlan
    start: Start | None = None
    engine: EngineMemory | None = None
    gpu: int | None = None
    suites: dict[str, dict[str, Any]] | None = None
    cluster: Cluster | None = None


def explain(
    args: Any,
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
    """Explain a config in words.

    Args:
        args: a `GRPOConfig` or `RLOOConfig`.
        model: what is known of the model, for the memory estimate.
        world_size: number of processes; those that are running by default.
        prompt_tokens: length of a prompt, its images aside.
        has_eval: the run has an evaluation dataset that is sampled as in training.
        start: what is known of its data and rewards.
        gpu: bytes of a GPU; this machine's if None.
        suites: settings of its evaluation suites, by name.
        cluster: how the processes share the model; None: each has all of it.

    Raises:
        ValueError: the batch sizes do not divide for `world_size` processes.
    """
    length, model = prompt_tokens or ASSUMED_PROMPT_TOKENS, model or ModelPlan()
    spread = cluster.spread if cluster else None
    device = "cuda" if cluster and cluster.machine else None
    memory = engine = None
    if model.config is not None:
        what = {"images": model.images, "peft": model.peft, "quantization": model.quantization}
        memory = estimate(model.config, args, prompt_tokens=length, spread=spread, device=device, **what)
    if memory is not None and args.use_vllm and args.vllm_mode == "colocate":
        engine = engine_memory(memory, model.config, args, length)
    run = Run(
        *(args, args.algebra(world_size), length, has_eval, memory, model),
        *(start, engine, gpu or gpu_bytes(), suites, cluster),
    )
    sections = {title: lines(run) for title, lines in SECTIONS.items()}
    return "\n\n".join(_section(title, lines) for title, lines in sections.items() if lines)


def main(argv: list[str]) -> int:
    """The command; returns its exit status."""
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


# --- sections --------------------------------------------------------------------------------------------------------


def batches(run: Run) -> list[str]:
    """Prompts, completions and updates."""
    a = run.algebra
    per_device = f"{a.per_device_train_batch_size} completions in each of {count(a.world_size, 'process', 'es')}"
    lines = [
        f"Batch sizes count completions, not prompts. One generation: {count(a.prompts_per_generation, 'prompt')}, "
        f"{a.num_generations} completions each, {a.generation_batch_size} completions in all (generation_batch_size).",
        f"It is cut into {count(a.steps_per_generation, 'micro-batch', 'es')} (steps_per_generation) of {per_device}"
        + (f", and gone through {a.num_iterations} times (num_iterations)." if a.num_iterations > 1 else "."),
        f"One optimizer update averages over {count(a.gradient_accumulation_steps, 'micro-batch', 'es')} "
        f"(gradient_accumulation_steps), that is {a.completions_per_update} completions.",
        sentences.updates_per_generation(a.updates_per_generation),
        sentences.total_updates(run.args, run.algebra, run.start.rows if run.start else None),
    ]
    if a.updates_per_generation == 1:
        lines.append(
            "For several smaller updates per generation, make steps_per_generation a multiple of "
            f"gradient_accumulation_steps: {2 * a.gradient_accumulation_steps} would give 2."
        )
    return [*lines, *sentences.choice_of_prompts(run.args, run.algebra), *sentences.streaming(run.args)]


def policy(run: Run) -> list[str]:
    """On- or off-policy, and what follows for ratios and clipping."""
    a, args = run.algebra, run.args
    numbers = (
        f"gradient_accumulation_steps={a.gradient_accumulation_steps}, "
        f"steps_per_generation * num_iterations={a.micro_batches}"
    )
    if a.on_policy:
        metric = "clip_ratio/* stays 0" if args.loss_type in CLIPPED | {"rloo"} else "no bound on them acts"
        return [
            f"On-policy ({numbers}): every gradient is computed with the weights that sampled the completions."
            if not args.max_staleness
            else f"One update per generation at most ({numbers}): its gradient is computed with the weights that the "
            "generation's training begins with.",
            f"So all importance ratios are exactly 1 and nothing can clip: {metric}. That is how it should be. To make "
            "use of clipping, set num_iterations above 1 or steps_per_generation above gradient_accumulation_steps.",
            "One forward pass more per generation computes the log-probabilities that the KL penalty needs."
            if args.method == "rloo" and args.beta
            else "Old log-probabilities are those of the current forward pass; no extra pass is spent on them.",
            *sentences.mismatch(args, a.on_policy),
            *sentences.ahead(args, a),
        ]
    return [
        f"Off-policy ({numbers}): after the first update on a generation, the policy is no longer the one that "
        "sampled it.",
        "The first update still has ratios of 1; later ones drift away from 1, and more so with a higher "
        f"learning rate ({args.learning_rate:g}).",
        sentences.clipping(args),
        "One forward pass more per generation computes the old log-probabilities.",
        *sentences.mismatch(args, a.on_policy),
        *sentences.ahead(args, a),
    ]


def loss(run: Run) -> list[str]:
    """What the logged loss will look like, and why."""
    lines = [sentences.loss_value(run.args, run.algebra), sentences.loss_trend(run.args, run.algebra)]
    args = run.args
    if args.method == "grpo" and args.scale_rewards == "group" and run.algebra.num_generations == 2:
        lines.append(
            "With groups of 2 scaled by their own standard deviation, advantages are always +0.71 and -0.71 (or 0 on a "
            "tie), however far apart the rewards are. scale_rewards=none keeps the distance."
        )
    lines.append(
        "A group whose rewards are all equal has advantages of 0 and teaches nothing; frac_reward_zero_std says how "
        "many there were. Near 1, the task is too hard, too easy, or the reward too coarse."
    )
    lines.append(sentences.kl_penalty(args))
    lines.append(sentences.truncation(args))
    if args.entropy_coef or args.use_adaptive_entropy:
        lines.append("The entropy bonus is subtracted from the loss; policy_loss is without it.")
    return lines


def tokens(run: Run) -> list[str]:
    """Tokens sampled and trained on."""
    a, length = run.algebra, run.args.max_completion_length
    prompts = f"with prompts of {run.prompt_tokens} tokens"
    if length is None:
        return [
            "max_completion_length is unset: completions run until the model's context is full, so no bound here.",
            *sentences.reuse(run.args),
        ]
    return [
        f"A generation samples at most {a.generation_batch_size * length:,} tokens "
        f"({a.generation_batch_size} completions of up to {length}).",
        f"An update trains on at most {a.completions_per_update * length:,} completion tokens, and {prompts} reads at "
        f"most {a.completions_per_update * (length + run.prompt_tokens):,} in all.",
        *sentences.reuse(run.args),
    ]


def sampling(run: Run) -> list[str]:
    """Where completions come from, if not from the trainer's own process."""
    return sentences.vllm_servers(run.args, run.algebra) + sentences.sglang_servers(run.args, run.algebra)


def memory(run: Run) -> list[str]:
    """Bytes by part."""
    m, args = run.memory, run.args
    if m is None:
        return [f"No estimate: {run.model.missing}."]
    share = f", {m.trainable:,} of them trained" if m.trainable != m.parameters else ""
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else "the type of the weights"
    parts = {
        "weights": m.weights,
        "reference model": m.reference,
        "gradients": m.gradients,
        "optimizer": m.optimizer,
        "activations": m.activations,
        "logits": m.logits + m.head_gradient + m.late_gradient,
    }
    more = {"encoder": m.encoder, "gaps between": m.gaps, "weights' casts": m.casts, "unpacked weight": m.unpacked}
    more |= {"gathered layers": m.gathered, "gathered copy": m.copy}
    parts |= {name: size for name, size in more.items() if size}
    if not args.samples_elsewhere:
        parts |= {"KV cache": m.kv_cache, "packed weights": m.packed}
    table = [f"{name:<16}{readable(size):>12}" for name, size in parts.items()]
    return [
        f"{m.parameters:,} parameters{share}; computing in {precision}. Per process, {_shared_out(run)}, completions "
        "of full length:",
        *table,
        *run.model.notes,
        f"Training needs about {readable(m.training)}, sampling {readable(m.sampling)}; they take turns, so the peak "
        f"is about {readable(m.peak)}.",
        *_too_large(run, m),
        sentences.largest_part(m, args),
        *(colocation(m, run.engine, args, run.gpu) if run.engine is not None else []),
    ]


def _too_large(run: Run, m: MemoryEstimate) -> list[str]:
    machine = run.cluster.machine if run.cluster else None
    if machine is None or m.peak <= MACHINES[machine].memory:
        return []
    return [f"That does not fit: a {machine} has {readable(int(MACHINES[machine].memory))}."]


def _shared_out(run: Run) -> str:
    spread = run.cluster.spread if run.cluster else ShardCounts()
    parts = [name for name in ("weights", "gradients", "optimizer") if getattr(spread, name) > 1]
    if not parts:
        return "nothing sharded"
    return f"{', '.join(parts)} shared out over {spread.processes} processes ({spread.name})"


def communication(run: Run) -> list[str]:
    """What a step computes and what processes send one another, where several or a machine are named."""
    cluster = run.cluster
    if run.memory is None or cluster is None or run.args.max_completion_length is None:
        return []
    return costs(
        run.model.config,
        run.args,
        run.memory,
        cluster.spread,
        prompt_tokens=run.prompt_tokens + run.model.images.tokens,
        adapter=run.model.peft is not None,
        machine=cluster.machine,
        gpus_of_node=cluster.gpus_of_node,
    )


def evaluation(run: Run) -> list[str]:
    """What evaluation samples, if anything."""
    a = run.algebra
    if not run.has_eval and not run.suites:
        return ["None: no eval_dataset is given, and nothing is split off the training data."]
    lines = []
    if run.has_eval:
        try:
            a.check_eval()
        except ValueError as error:
            return [f"This will fail: {error}"]
        lines.append(
            f"Each evaluation batch: {count(a.prompts_per_eval_batch, 'prompt')}, {a.eval_group} completions each, "
            f"{a.eval_batch_size} completions in all."
        )
    for name, settings in (run.suites or {}).items():
        try:
            each = suite_of({k: v for k, v in settings.items() if k not in ("dataset", "split")}, None).completions(a)
        except ValueError as error:
            return [*lines, f"This will fail: {error}"]
        greedy = ", greedy" if settings.get("temperature") == 0 else ""
        lines.append(f"Suite {name}".rstrip() + f": {count(each, 'completion')} of each prompt{greedy}.")
    if str(getattr(run.args.eval_strategy, "value", run.args.eval_strategy)) == "no":
        lines.append("eval_strategy is `no`, so nothing is evaluated during training; set eval_strategy=steps.")
    return lines


def start(run: Run) -> list[str]:
    """Whether what the run names is there."""
    return run.start.lines() if run.start else []


SECTIONS: dict[str, Callable[[Run], list[str]]] = {
    "Batches": batches,
    "On- or off-policy": policy,
    "Loss": loss,
    "Tokens": tokens,
    "Sampling": sampling,
    "Memory": memory,
    "Operations and communication": communication,
    "Evaluation": evaluation,
    "Start": start,
}
"""Title -> lines, in the order of the page; one without lines is left out."""


# --- helpers ---------------------------------------------------------------------------------------------------------


def _section(title: str, lines: list[str]) -> str:
    wrapped = [
        textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="    ", drop_whitespace=True)
        if "   " not in line
        else "    " + line
        for line in lines
    ]
    return "\n".join([title, *wrapped])
