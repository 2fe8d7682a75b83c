"""Makes a trainer of either library through its public API, forces completion lengths, and times its phases.

The same in both: model, prompts, rewards, forced lengths, float32, AdamW, learning rate, completions a step. Only this
file knows what either library calls things inside. TRL is imported here and nowhere else.

Forcing. TRL: a logits processor forbids the end token before a row's length and forces it there (an in-place write into
one column of the logits); under continuous batching each request gets its length as a limit and no end token. Covey:
each row gets its length as its limit, and no token ends it. Tokens are drawn at temperature 1 by the library's usual
code in every case. The lengths that came out are compared with those that were asked for after each step.
"""

import functools
import inspect
from pathlib import Path
from typing import Any

from benchmarks.stopwatch import Stopwatch
from benchmarks.workloads import WARM_UPS, Workload, reward_for, rows

LEARNING_RATE = 1e-6
DEFAULT_MICRO_BATCH = 8
"""Of both libraries, as of Hugging Face's `TrainingArguments`."""

DATASET_STEPS = 32
"""Steps until prompts come again."""

PROBE = "probe"
"""Not a field: an option that leaves a part of the work out, `generate` or `train` alone being of interest."""


def continuous_batching(workload: Workload) -> dict[str, Any]:
    """Settings of transformers' continuous batching: left alone it would reserve half of a CPU machine's memory."""
    page = 32
    pages = -(-(workload.prompt_tokens + workload.longest) // page) + 1
    return {
        "page_size": page,
        "num_blocks": pages * workload.completions,
        "max_batch_tokens": 1024,
        "max_requests_per_batch": workload.completions,
        "use_async_batching": False,
    }


class Forced:
    """The lengths that the completions of the coming step are to have, and those that the last one had."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.seen: list[int] = []

    def check(self) -> None:
        """Complain if a step did other work than it was given.

        Raises:
            RuntimeError: the lengths differ.
        """
        if self.seen != self.lengths:
            raise RuntimeError(f"completions of {self.seen} tokens were sampled where {self.lengths} were wanted")


def settings(workload: Workload, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of either library's config.

    Args:
        workload: what is run.
        folder: for output.
        options: `per_device_train_batch_size` and any other field that is not left at its default.
    """
    options = {name: value for name, value in options.items() if name != PROBE}
    micro_batch = min(options.pop("per_device_train_batch_size", DEFAULT_MICRO_BATCH), workload.completions)
    return {
        "output_dir": str(folder),
        "max_steps": 10_000,
        "learning_rate": LEARNING_RATE,
        "num_generations": workload.group_size,
        "max_completion_length": workload.longest,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": workload.completions // micro_batch,
        "shuffle_dataset": False,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }


def build(
    library: str,
    workload: Workload,
    model: str,
    folder: Path,
    options: dict[str, Any],
    forced: Forced,
    watch: Stopwatch,
) -> Any:
    """A trainer that is ready to train, with its phases timed and its lengths forced.

    Args:
        library: `covey` or `trl`.
        workload: what is run.
        model: folder of the model.
        folder: for output.
        options: config fields that are not left at their defaults.
        forced: holds the lengths of the coming step.
        watch: takes the times.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = Dataset.from_list(rows(workload, tokenizer, DATASET_STEPS, WARM_UPS))
    trainer = _trainer_class(library)[0](
        model=model,
        reward_funcs=reward_for(workload),
        args=_trainer_class(library)[1](**settings(workload, folder, options)),
        train_dataset=dataset,
    )
    dtype = next(trainer.model.parameters()).dtype
    if str(dtype) != "torch.float32":
        raise RuntimeError(f"{library} loaded the model in {dtype}, not in float32")
    if options.get(PROBE):
        _leave_out(trainer, options[PROBE], forced)
    {"covey": _force_covey, "trl": _force_trl}[library](trainer, forced)
    {"covey": _time_covey, "trl": _time_trl}[library](trainer, watch)
    decoder = trainer.model.get_decoder()
    watch.count_positions(decoder.embed_tokens, decoder.layers[0].input_layernorm)
    return trainer


def _trainer_class(library: str) -> tuple[Any, Any]:
    if library == "covey":
        from covey import GRPOConfig, GRPOTrainer

        return GRPOTrainer, GRPOConfig
    from trl import GRPOConfig as TRLConfig
    from trl import GRPOTrainer as TRLTrainer

    return TRLTrainer, TRLConfig


# ---- forcing lengths ---------------------------------------------------------------------------------------------


def _force_covey(trainer: Any, forced: Forced) -> None:
    from covey.engines.native import sampling as native

    engine, make_row = trainer.collector.engine, inspect.unwrap(native.SequenceState)  # not an earlier trainer's
    engine.eos_token_ids = set()
    limits: dict[int, int] = {}
    generate, collect = engine.generate, trainer.collector.collect

    @functools.wraps(make_row)
    def row(request: Any, index: int, budget: int, *rest: Any) -> Any:
        return make_row(request, index, limits.get(request.seeds[index], budget), *rest)

    async def with_limits(request: Any) -> Any:
        start = len(limits)
        limits.update(zip(request.seeds, forced.lengths[start : start + request.n], strict=True))
        return await generate(request)

    def checked(*args: Any, **kwargs: Any) -> Any:
        limits.clear()
        rollouts = collect(*args, **kwargs)
        forced.seen = [len(rollout.completion_ids) for rollout in rollouts]
        return rollouts

    native.SequenceState = row  # type: ignore[assignment, misc]
    engine.generate, trainer.collector.collect = with_limits, checked


def _force_trl(trainer: Any, forced: Forced) -> None:
    turn = trainer._generate_single_turn

    def checked(*args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = turn(*args, **kwargs)
        forced.seen = [len(ids) for ids in completion_ids]
        return completion_ids, logprobs

    trainer._generate_single_turn = checked
    if trainer.args.use_transformers_continuous_batching:
        _limit_requests(forced)
        return
    generate = trainer.model.generate

    def with_lengths(*args: Any, **kwargs: Any) -> Any:
        processor = _EndsAt(forced.lengths, trainer.eos_token_ids)
        return generate(*args, logits_processor=[processor], **kwargs)

    trainer.model.generate = with_lengths


class _EndsAt:
    """Logits processor: the end token is impossible before a row's length and certain there."""

    def __init__(self, lengths: list[int], end_tokens: list[int]):
        self.end_tokens = end_tokens
        self.step = 0
        self.ending: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            self.ending.setdefault(length, []).append(row)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.step += 1
        scores[:, self.end_tokens] = float("-inf")
        if rows := self.ending.get(self.step):
            scores[rows] = float("-inf")
            scores[rows, self.end_tokens[0]] = 0.0
        return scores


def _limit_requests(forced: Forced) -> None:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    add_request = inspect.unwrap(ContinuousBatchingManager.add_request)

    @functools.wraps(add_request)
    def limited(self: Any, input_ids: list[int], request_id: str, **kwargs: Any) -> Any:
        number = int(request_id.rsplit("_", 1)[1])
        kwargs.update(max_new_tokens=forced.lengths[number], eos_token_id=-1)
        return add_request(self, input_ids, request_id=request_id, **kwargs)

    ContinuousBatchingManager.add_request = limited  # type: ignore[method-assign, assignment]


def _leave_out(trainer: Any, probe: str, forced: Forced) -> None:
    """Let TRL do only the part of a step whose setting is being looked for."""
    if probe == "generate":
        trainer.compute_loss = lambda model, *args, **kwargs: 0.0 * next(model.parameters()).sum()
    else:
        trainer._generate_single_turn = lambda *args: ([[7] * length for length in forced.lengths], None)


# ---- phases ------------------------------------------------------------------------------------------------------


def _time_covey(trainer: Any, watch: Stopwatch) -> None:
    _time_common(trainer, watch)
    watch.wrap(trainer.collector, "collect", "generate")
    watch.wrap(type(trainer.rewards), "__call__", "score")
    watch.wrap(trainer, "plan", "other")
    watch.wrap(trainer.updates, "plan", "train")
    watch.wrap(trainer.behaviour, "score", "score")


def _time_trl(trainer: Any, watch: Stopwatch) -> None:
    _time_common(trainer, watch)
    watch.wrap(trainer, "_prepare_inputs", "other")
    watch.wrap(trainer, "_generate_single_turn", "generate")
    watch.wrap(trainer, "_calculate_rewards", "score")
    watch.wrap(trainer, "_get_per_token_logps_and_entropies", "train", inside={"other": "score"})


def _time_common(trainer: Any, watch: Stopwatch) -> None:
    watch.wrap(trainer, "training_step", "train")
    watch.wrap(trainer.accelerator, "clip_grad_norm_", "optimizer")


def time_optimizer(trainer: Any, watch: Stopwatch) -> None:
    """Time the optimizer, which exists only once training has begun."""
    watch.wrap(trainer.optimizer, "step", "optimizer")
