"""`engine_dtype` of a run: the number format that the built-in engine rounds to, as it is given or as it is measured.

`auto` measures a decoding step of the policy with each format that this machine has a faster product for, and the
difference that the format makes to log-probs, once, when the trainer is made. A resumed run takes what its checkpoint
says, since another choice would sample other tokens.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch

from covey.config.base import OnlineConfig
from covey.core.engine import EngineTraits, RolloutEngine, SampleRequest, SamplingParams, traits_of
from covey.core.findings import Finding
from covey.core.model import compute_dtype
from covey.core.records import Completion
from covey.engines.native.inference_contexts import PolicyEngine
from covey.engines.native.number_formats import FAST, FORMATS, fast_product
from covey.engines.native.packed_weights import adapter_modules, roundable
from covey.policy.adapters import base_model
from covey.policy.quantization import quantization_method
from covey.rollout.collector import run_async
from covey.rollout.prompts import PromptCodec
from covey.trainer.distributed.stopping import random_state, set_random_state
from covey.trainer.run import Run

AUTO = "auto"
LEAST_GAIN = 1.2  # times that a decoding step must get faster for `auto` to round
# Largest mean difference of a sampled token's log-prob, in nats, with which `auto` rounds: half of what half precision
# may make (`engine_check.parity`). Of 100 tokens with independent differences of this size, the ratio of trainer to
# engine probability varies by a factor of about 1.9 (exp(0.05 * sqrt(pi / 2) * sqrt(100))).
LARGEST_DIFFERENCE = 0.05
CLEAR = (1.05, 1.5)  # gains below and above which one measurement is enough
ROUNDS = 3  # measurements of a gain between these, of which the median counts
STEPS = 4  # decoding steps in a measurement
PROMPT = 32  # tokens of its prompts
TOKENS = 251  # different tokens in them, at most
ROWS, SAMPLES, LENGTH = 4, 4, 32  # prompts, completions of each and their tokens that log-probs are compared on
LONGEST_PROMPT = 256  # tokens of these prompts, the last of each
LEAST_SHARE = 0.5  # share of the weights that decoding multiplies with, below which a warning says that few are rounded


@dataclass(eq=False)
class EngineRounding:
    """The format that a run's engine rounds to; part of checkpoints."""

    args: OnlineConfig
    engine: RolloutEngine | None  # None: the trainer was given one, which does not read `engine_dtype`
    changed: Callable[[EngineTraits], None]  # called where a checkpoint says another format than was chosen
    reason: str = ""  # a sentence for the log; "": nothing was chosen

    def state_dict(self) -> dict[str, Any]:
        return {"rounded_to": traits_of(self.engine).rounded_to}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.args.engine_dtype != AUTO or not isinstance(self.engine, PolicyEngine):
            return
        self.reason = f"engine_dtype=auto: {state['rounded_to'] or 'not rounded'}, as in the checkpoint."
        if state["rounded_to"] != self.engine.dtype:
            self.engine.sample_in(state["rounded_to"])
            self.changed(self.engine.traits)


def given_dtype(args: OnlineConfig) -> str | None:
    """The format that the config names for the built-in engine; None if it names none, or `auto`."""
    return args.engine_dtype if args.rounds_engine and args.engine_dtype != AUTO else None


def check_rounding(args: OnlineConfig, model: Any, device: str, in_step: bool, sharding: str) -> Iterator[Finding]:
    """Findings about the `engine_dtype` of the built-in engine; `sharding` names what shards the weights, or is ""."""
    if not args.rounds_engine:
        return
    given = f"engine_dtype={args.engine_dtype!r}"
    if in_step:
        yield Finding.error(
            "engine-dtype",
            f"{given} needs whole weights, and ds3_gather_for_generation=False leaves them spread out.",
            "Set one of the two back to its default.",
        )
        return
    if (method := quantization_method(base_model(model))) is not None:
        yield Finding.error(
            "engine-dtype",
            f"{given} rounds weights that are numbers, and {method} has quantised this model's.",
            "Leave engine_dtype unset: the engine samples from the quantised weights as they are.",
        )
        return
    if sharding and args.engine_dtype == AUTO:
        yield Finding.warning(
            "setting-unread",
            f"`engine_dtype='auto'` has no effect: a decoding step is measured with whole weights, and {sharding}"
            " shards them.",
            "Name a format, such as engine_dtype='float8'.",
        )
    share = 1.0 if sharding else rounded_share(model)  # shards have other shapes
    if share < LEAST_SHARE:
        report = Finding.error if share == 0 else Finding.warning
        yield report(
            "engine-dtype",
            f"{given} rounds the weights of linear layers (torch.nn.Linear), which hold {share:.0%} of the numbers in"
            f" the matrices of this model ({type(base_model(model)).__name__}).",
            "Leave engine_dtype unset, or sample from a server.",
        )
    elif args.engine_dtype != AUTO and (slow := why_slow(device, str(args.engine_dtype))):
        yield Finding.warning(
            "engine-dtype-slow",
            f"{given} does not make decoding faster here: {slow} Samples are those of the rounded weights all the"
            " same.",
            "Leave engine_dtype unset, or set 'auto', which rounds only where it pays.",
        )


def rounded_share(model: Any) -> float:
    """Share of the numbers in a model's matrices, without embeddings and adapters, that rounding applies to."""
    layers = roundable(model)
    rounded = {id(layer.weight): layer.weight.numel() for layer in layers}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    adapters = {id(p) for module in adapter_modules(model) for p in module.parameters()}
    matrices = {id(p): p.numel() for p in model.parameters() if p.dim() > 1}
    others = sum(n for key, n in matrices.items() if key not in embeddings | adapters | rounded.keys())
    total = sum(rounded.values())
    return total / (total + others) if total + others else 0.0


def why_slow(device: str, name: str) -> str:
    """A sentence on why products of a format take no less time than others on this machine; "" where they do."""
    if fast_product(device, name) is not None:
        return ""
    if (device, name) not in FAST:
        return f"there are no products of {name} on a device of type {device!r}; they are computed as numbers."
    if device == "cpu":
        if FAST[device, name][0]():
            return f"oneDNN has no fast or right product of {name} for this processor."
        needs = "AMX or AVX512-BF16" if name == "bfloat16" else "AMX or VNNI"
        return f"this processor multiplies no {name} (it has neither {needs.replace(' or ', ' nor ')})."
    return f"this GPU, or this torch, multiplies no {name}."


class MeasuredFormat(NamedTuple):
    """Effect of rounding to a format on the time of decoding and on log-probs, on this machine."""

    gain: float  # time of a decoding step without it, by the time with it
    difference: float | None = None  # mean absolute, of log-probs of sampled tokens; None: the gain is too small anyway


def choose_rounding(
    run: Run,
    engine: RolloutEngine | None,
    prompts: Callable[[], list[list[int]]],
    changed: Callable[[EngineTraits], None],
) -> EngineRounding:
    """The run's rounding; measures it, on `prompts` for log-probs, where the config says `auto`. Collective."""
    args = run.args
    chosen = EngineRounding(args, engine, changed)
    if not isinstance(engine, PolicyEngine) or not args.rounds_engine or args.replay_from is not None:
        return chosen
    if args.engine_dtype != AUTO:
        chosen.reason = f"engine_dtype={engine.dtype}: weights and inputs of linear layers are rounded in sampling."
    elif not run.sharding.weights:
        found = measure(run, engine, prompts)
        dtype, chosen.reason = decision(run.collectives.gather(found, "choose the engine's number format"))
        engine.sample_in(dtype)
    return chosen


def decision(found: list[dict[str, MeasuredFormat]]) -> tuple[str | None, str]:
    """The format to round to and a sentence, given each process's measurements: the fastest with a small difference.

    A format counts with its least gain and its largest difference. None where no format gains `LEAST_GAIN` and stays
    within `LARGEST_DIFFERENCE`.

    Example:
        >>> int8, bfloat16 = MeasuredFormat(1.6, 0.16), MeasuredFormat(1.3, 0.014)
        >>> decision([{"int8": int8, "bfloat16": bfloat16}])[0]
        'bfloat16'
    """
    if not all(found):
        return None, "engine_dtype=auto: not rounded, as this machine multiplies no narrower format faster."
    names = [name for name in found[0] if all(name in one for one in found)]
    worst = {name: _worst([one[name] for one in found]) for name in names}
    fitting = {
        name: one.gain
        for name, one in worst.items()
        if one.gain >= LEAST_GAIN and one.difference is not None and one.difference <= LARGEST_DIFFERENCE
    }
    best = max(fitting, key=fitting.__getitem__, default=None)
    wanted = (
        f"a decoding step gets at least {LEAST_GAIN:g} times as fast and log-probs differ by at most"
        f" {LARGEST_DIFFERENCE:g} on average"
    )
    chosen = f"{best}, the fastest format" if best else "not rounded, as there is no format"
    return best, f"engine_dtype=auto: {chosen} with which {wanted} (measured: {_table(worst)})."


def _worst(found: Sequence[MeasuredFormat]) -> MeasuredFormat:
    """The least gain and the largest difference; NaN, as of a model that overflows, is larger than all."""
    known = [one.difference for one in found if one.difference is not None]
    largest = max(known, key=lambda x: (x != x, x)) if len(known) == len(found) else None
    return MeasuredFormat(min(one.gain for one in found), largest)


def _table(measured: Mapping[str, MeasuredFormat]) -> str:
    return "; ".join(
        f"{name} {one.gain:.2f} times as fast" + ("" if one.difference is None else f", {one.difference:.2g} apart")
        for name, one in measured.items()
    )


def candidates(run: Run) -> list[str]:
    """Formats that are narrower than the policy's and that this machine has fast products for."""
    with run.accelerator.autocast():
        width = compute_dtype(run.policy).itemsize
    device = run.device.type
    return [name for name in FORMATS if FORMATS[name].dtype.itemsize < width and fast_product(device, name)]


def measure(run: Run, engine: PolicyEngine, prompts: Callable[[], list[list[int]]]) -> dict[str, MeasuredFormat]:
    """Gain of each format that may gain, and the difference of log-probs where the gain suffices."""
    found = {name: MeasuredFormat(gain) for name, gain in gains(run, engine).items()}
    if any(one.gain >= LEAST_GAIN for one in found.values()):
        few, length = prompts() or made_up_prompts(run), min(LENGTH, run.args.max_completion_length or LENGTH)
        for name, (gain, _) in found.items():
            if gain >= LEAST_GAIN:
                found[name] = MeasuredFormat(gain, logprob_difference(engine, name, few, length, run.args.temperature))
    engine.sample_in(None)
    return found


def gains(run: Run, engine: PolicyEngine) -> dict[str, float]:
    """Seconds of a decoding step over those with rounding, for each format that may gain: medians of pairs."""
    args = run.args
    samples = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    size, group = min(args.max_concurrent_completions, samples), args.num_generations or 1
    tokens = min(TOKENS, run.policy.get_input_embeddings().num_embeddings)
    found = {}
    for name in candidates(run):
        ratios: list[float] = []
        while len(ratios) < ROUNDS and (not ratios or CLEAR[0] < statistics.median(ratios) < CLEAR[1]):
            plain, rounded = (step_seconds(engine, dtype, size, group, tokens) for dtype in (None, name))
            ratios.append(plain / rounded)
        found[name] = statistics.median(ratios)
    engine.sample_in(None)
    return found


def step_seconds(
    engine: PolicyEngine,
    dtype: str | None,
    size: int,
    group: int,
    tokens: int = TOKENS,
    steps: int = STEPS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a decoding step of `size` sequences that never end, rounded to `dtype`.

    Each `group` of sequences shares one prompt, which consists of the first `tokens` of the vocabulary.
    """
    engine.sample_in(dtype)

    def sample(length: int) -> float:
        params = SamplingParams(length, extra={"eos_token_id": []})
        requests = [
            SampleRequest(
                [(7 * start + 11 * place) % tokens for place in range(PROMPT)],
                count := min(group, size - start),
                params,
                [*range(start, start + count)],
            )
            for start in range(0, size, group)
        ]

        async def together() -> None:
            await asyncio.gather(*map(engine.generate, requests))

        began = clock()
        run_async(together())
        return clock() - began

    with torch.no_grad(), engine.awake():
        sample(1 + steps)  # packs weights, and measures kernels
        return max(1e-9, sample(1 + steps) - sample(1)) / steps


def logprob_difference(
    engine: PolicyEngine,
    dtype: str | None,
    prompts: Sequence[list[int]],
    length: int = LENGTH,
    temperature: float = 1.0,
    samples: int = SAMPLES,
) -> float:
    """Mean absolute difference of sampled tokens' log-probs between the engine rounded to `dtype` and the policy."""
    room = LONGEST_PROMPT
    if engine.max_context is not None:
        length = min(length, engine.max_context // 2)
        room = min(room, engine.max_context - length)
    params = SamplingParams(length, temperature=temperature, extra={"eos_token_id": []})
    requests = [
        SampleRequest(prompt[-room:], samples, params, [*range(samples * number, samples * (number + 1))])
        for number, prompt in enumerate(prompts)
    ]

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*map(engine.generate, requests))

    engine.sample_in(dtype)
    with torch.no_grad(), engine.awake():
        sampled = run_async(together())
    engine.sample_in(None)
    differences = []
    with torch.no_grad(), engine.awake():
        for request, completions in zip(requests, sampled, strict=True):
            tokens = torch.tensor([request.prompt_ids + one.token_ids for one in completions])
            scored = engine.score(tokens, temperature)[:, len(request.prompt_ids) - 1 :].cpu()
            differences.append((scored - torch.tensor([one.logprobs for one in completions])).abs().flatten())
    return torch.cat(differences).mean().item()


def first_prompts(codec: PromptCodec, rows: Any) -> list[list[int]]:
    """Token ids of a dataset's first prompts, of those that are text; none of a stream, which is read once.

    Random numbers that the dataset draws, as for an augmentation, are drawn again in training.
    """
    before = random_state()
    try:
        return [*islice(_prompts_of_text(codec, islice(rows if hasattr(rows, "__len__") else [], 4 * ROWS)), ROWS)]
    finally:
        set_random_state(before)


def _prompts_of_text(codec: PromptCodec, rows: Iterable[Any]) -> Iterator[list[int]]:
    for row in rows:
        try:
            encoded = codec.read_row(row)
        except ValueError:  # sampling reports it
            continue
        if encoded.ids and not encoded.media:
            yield list(encoded.ids)


def made_up_prompts(run: Run) -> list[list[int]]:
    tokens = min(TOKENS, run.policy.get_input_embeddings().num_embeddings)
    return [[(7 * number + 11 * place) % tokens for place in range(PROMPT)] for number in range(ROWS)]
