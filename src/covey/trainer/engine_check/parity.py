"""Check that an engine samples from the policy: its log-probs against the scorer's, on the first samples of a run.

Where the two may differ, the loss is corrected (`corrected`), by the old policy's log-probs where these are scored,
else by each micro-batch's.

To add a cause of a difference, write a function of a `Comparison` and put it into `CAUSES`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from covey.algorithms.algorithm import Algorithm
from covey.config.base import OnlineConfig
from covey.core.batch import TrainBatch, expand, segment_ids, segment_starts, segment_sum
from covey.core.engine import EngineTraits, SamplingParams
from covey.core.mismatch import MismatchCorrection, mismatch_weights, rejecting
from covey.core.routes import are_known, differing
from covey.core.stats import Mean, Stat
from covey.policy.scoring import first_and_last
from covey.rollout.collector import Collector
from covey.trainer.engine_check.stale_weights import StaleWeightsTest
from covey.trainer.run import Run

RARELY = 8  # versions between tests for stale weights in async runs, which sample rollouts for each test
CHECKS = 2  # rollout batches that are compared: the second follows an update, which an engine must have taken
# Mean difference, in nats, that rounding may explain, by bytes of the narrowest number format on either side.
ROUNDING = {4: 0.01, 2: 0.1, 1: 0.3}
ROUNDED_TO = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8": torch.float8_e4m3fn}  # by `engine_dtype`
AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}  # by accelerate's names
TEMPERATURES = [twentieth / 20 for twentieth in range(1, 41)]  # those that people and generation configs name
ADVICE = "To train all the same, set engine_parity='warn'."
FIRST = 4  # tokens that count as the beginning of a completion

RESHAPING = frozenset(
    {"allowed_token_ids", "bad_words", "frequency_penalty", "guided_decoding", "json_schema", "logit_bias", "regex"}
    | {"logits_processors", "min_tokens", "presence_penalty", "structured_outputs", "typical_p"}
)  # engine settings beyond `SamplingParams`' own that change which tokens may come and how often

Rescore = Callable[[TrainBatch, float], Tensor]  # (rollouts, temperature) -> the policy's log-probs [N]


def tolerance(temperature: float, *dtypes: torch.dtype | None) -> float:
    """Largest mean difference that is taken for rounding, given what the two sides compute in.

    A temperature below 1 divides the logits, and so enlarges the error of each.
    """
    return ROUNDING[min([4, *(dtype.itemsize for dtype in dtypes if dtype is not None)])] / min(temperature, 1.0)


@dataclass(frozen=True)
class Comparison:
    """Log-probs of the same few rollouts by engine and trainer, and the means to test causes."""

    batch: TrainBatch  # rollouts with `engine_logprobs` [N]
    scored: Tensor  # [N], the trainer's
    rescore: Rescore  # scores other rollouts, or at another temperature
    temperature: float  # the one that both should have used
    tolerance: float  # mean difference that is taken for rounding
    bos_token_id: int | None = None  # what tokenizers put in front, if anything
    agreed: bool = False  # an earlier comparison found the two alike
    alone: bool = True  # this process may score by itself; else causes that would have to are not looked for

    @property
    def engine(self) -> Tensor:
        assert self.batch.engine_logprobs is not None, "an engine that reports no log-probs cannot be checked"
        return self.batch.engine_logprobs

    @property
    def differences(self) -> Tensor:
        """Engine minus trainer, over sampled tokens alone."""
        return (self.engine - self.scored)[self.batch.sampled]

    @property
    def gap(self) -> float:
        """Mean absolute difference in nats."""
        return self.gap_to(self.scored)

    def gap_to(self, scored: Tensor) -> float:
        return (self.engine - scored)[self.batch.sampled].abs().mean().item()

    def explains(self, scored: Tensor) -> bool:
        """True if these log-probs [N] are closer to the engine's than the trainer's own."""
        return self.gap_to(scored) <= min(self.tolerance, self.gap / 3)


def no_numbers(c: Comparison) -> str | None:
    """NaN, infinite and positive log-probs."""
    reported = c.engine[c.batch.sampled]
    if broken := int((~reported.isfinite()).sum()):
        return (
            f"{broken} of {len(reported)} are NaN or infinite. Its weights may have been damaged on their way, or it"
            " overflows in float16: try bfloat16, and look at the engine's own log."
        )
    if reported.max() > 1e-2:
        return f"some are above 0 ({reported.max():.2g}), so they are not natural logarithms of probabilities."
    return None


def stale_weights(c: Comparison) -> str | None:
    """Engine and trainer agreed before the last update."""
    if not c.agreed:
        return None
    return (
        "they agreed before the last update, so the engine has stale weights: it did not take the new ones, or not all"
        " of them (an adapter that was merged before, say)."
    )


def other_temperature(c: Comparison) -> str | None:
    """The trainer's numbers at another temperature are the engine's."""
    others = {1.0, c.temperature**2, *TEMPERATURES} - {c.temperature} if c.alone else ()
    scored = {other: c.rescore(c.batch, other) for other in others}
    other = min(scored, key=lambda other: c.gap_to(scored[other]), default=None)
    if other is None or not c.explains(scored[other]):
        return None
    if other == 1.0:
        return (
            f"they are the trainer's at temperature 1 instead of {c.temperature:g}: a rollout function asks for it,"
            " or the engine reports log-probs from before the temperature divides the logits. Have it report those"
            " it samples with (vLLM: logprobs_mode='processed_logprobs')."
        )
    return (
        f"they are the trainer's at temperature {other:g} instead of {c.temperature:g}. Look for what overrides it:"
        " a rollout function, or a default such as the model's generation_config.json on the engine's side."
    )


def shifted(c: Comparison) -> str | None:
    """Each log-prob is that of the token before or after."""
    ids, sampled = segment_ids(c.batch.lengths), c.batch.sampled
    pairs = (ids[1:] == ids[:-1]) & sampled[1:] & sampled[:-1]
    if pairs.sum() < FIRST:
        return None
    for engine, scored in ((c.engine[1:], c.scored[:-1]), (c.engine[:-1], c.scored[1:])):
        if (engine - scored)[pairs].abs().mean().item() <= min(c.tolerance, c.gap / 3):
            return "they are the trainer's, one token off: the list of log-probs does not line up with the tokens."
    return None


def beginning_of_text(c: Comparison) -> str | None:
    """The engine saw the prompt with one beginning-of-text token more, or one less."""
    bos = c.bos_token_id
    if bos is None or not c.alone:
        return None
    given = [prompt.tolist() for prompt in c.batch.prompts()]
    for what, prompts in {
        "one beginning-of-text token more": [[bos, *prompt] for prompt in given],
        "no beginning-of-text token": [prompt[1:] if prompt[:1] == [bos] else [] for prompt in given],
    }.items():
        if not all(prompts):
            continue
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=c.batch.prompt_ids.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=c.batch.prompt_lengths.device)
        changed = replace(c.batch, prompt_ids=ids, prompt_lengths=lengths, routes=None, prompt_routes=None)
        if c.explains(c.rescore(changed, c.temperature)):
            return (
                f"they are the trainer's for prompts with {what}: text is tokenised again on the way. Send ids, or"
                " add special tokens on one side only."
            )
    return None


def cut_distribution(c: Comparison) -> str | None:
    """No token is less probable than the trainer says."""
    if len(c.differences) < FIRST or c.differences.min() < -c.tolerance:
        return None
    return (
        "none is below the trainer's, as when top-k, top-p or min-p have cut the distribution before it is reported."
        " Have the engine report log-probs from before the cut, and look for a cut that it makes by itself (the model's"
        " generation_config.json on its side)."
    )


def number_format(c: Comparison) -> str | None:
    """The difference is of the size that a narrower number format makes."""
    if c.gap > ROUNDING[2]:
        return None
    return (
        "the difference is as large as rounding makes it in half precision or with quantised weights, while the trainer"
        " computes in float32: the two have different dtypes. Give them the same; or, if that is intended, set"
        " engine_parity='warn': the mismatch correction is there for it."
    )


def other_prompt(c: Comparison) -> str | None:
    """The difference fades as a completion continues, and the prompt with it."""
    lengths = c.batch.lengths
    place = torch.arange(c.batch.num_tokens, device=lengths.device) - expand(segment_starts(lengths), lengths)
    early = (place < FIRST)[c.batch.sampled]
    if not early.any() or (~early).sum() < early.sum():
        return None
    size = c.differences.abs()
    if size[early].mean() < 3 * size[~early].mean():
        return None
    return (
        "the difference is largest at the beginning of completions and fades from there, as when the engine was shown"
        " another prompt: compare the chat template and the special tokens on both sides."
    )


Cause = Callable[[Comparison], str | None]
OF_REQUESTS: tuple[Cause, ...] = (other_temperature, shifted, beginning_of_text, cut_distribution)
CAUSES: tuple[Cause, ...] = (stale_weights, *OF_REQUESTS, number_format, other_prompt)
"""Causes in the order in which they are tried. If none applies, one of the following does:"""
OTHER_WEIGHTS = (
    "no setting of sampling explains it, so the engine runs other weights: another model or checkpoint, an adapter that"
    " is not loaded, or weights that never arrived."
)
OTHER_ATTENTION = (  # an engine that samples with the policy itself cannot have other weights
    "no setting of sampling explains it, and its attention may be of a kind the built-in engine does not know."
)
ROUNDED = (
    "no setting of sampling explains it: this model does not bear weights and inputs in engine_dtype={0!r}. Set"
    " engine_dtype='bfloat16', or leave it unset."
)
REWRITTEN = (  # tools, environments or the user's functions stand between such an engine and its samples
    "no usual temperature explains it. It is an unusual one, or tokens or log-probs of rollouts are not as they were"
    " sampled, as when text is encoded again by a tokenizer that lower-cases: return the ids of replies, each with its"
    " log-prob."
)


def likely_cause(comparison: Comparison, causes: tuple[Cause, ...] = CAUSES, otherwise: str = OTHER_WEIGHTS) -> str:
    return next(filter(None, (cause(comparison) for cause in causes)), otherwise)


def corrected(algorithm: Algorithm, args: OnlineConfig, traits: EngineTraits, params: SamplingParams) -> Algorithm:
    """The algorithm with weights of tokens by trainer over engine probability where these may differ, else without."""
    algorithm = replace(algorithm, objective=replace(algorithm.objective, correction=None))
    wanted = args.vllm_importance_sampling_correction or args.rejects_completions
    if not wanted or (traits.samples_policy and not args.correct_built_in_engine):
        return algorithm
    reshaping = reshapes(args, params)
    if traits.reports_after_cut and reshaping:
        warnings.warn(
            f"the engine's mismatch is not corrected: it reports log-probs after {', '.join(reshaping)} had their"
            " effect, and the trainer scores the distribution before. Leave these settings at their defaults, or set"
            " vllm_importance_sampling_correction=False, without geometric_mask_min and geometric_mask_max, to silence"
            " this.",
            stacklevel=2,
        )
        return algorithm
    correction: MismatchCorrection | None = None
    if args.vllm_importance_sampling_correction:
        correction = partial(
            mismatch_weights,
            mode=args.resolved_mismatch_mode,
            clip_min=args.vllm_importance_sampling_clip_min,
            clip_max=args.vllm_importance_sampling_clip_max,
        )
    if args.rejects_completions:
        correction = rejecting(correction, args.geometric_mask_min, args.geometric_mask_max)
    return replace(algorithm, objective=replace(algorithm.objective, correction=correction))


def reshapes(args: OnlineConfig, params: SamplingParams) -> list[str]:
    """The settings, by name, that make the sampling distribution another than the one that the trainer scores."""
    if args.keep_sampling_mask:
        return []
    settings = {
        "top_k": params.top_k > 0,
        "top_p": params.top_p < 1.0,
        "min_p": bool(params.min_p),
        "repetition_penalty": params.repetition_penalty != 1.0,
        "vllm_structured_outputs_regex": args.vllm_structured_outputs_regex is not None,
    }
    return [name for name, acts in settings.items() if acts] + sorted(RESHAPING & set(params.extra))


class EngineCheck:
    """Compares an engine's first samples with the trainer's log-probs of them; all processes continue, or none does."""

    def __init__(
        self,
        run: Run,
        collector: Collector,
        params: SamplingParams,
        traits: EngineTraits,
        rescore: Rescore,
        routes_of: Callable[[TrainBatch], Tensor] | None = None,
    ):
        """`routes_of` gives the experts [N, L, k] of rollouts' tokens in the trainer; None: the policy has none."""
        args = run.args
        self._run, self.rescore, self.temperature = run, rescore, args.temperature
        self.expect(traits)
        self._model_name, self.bos_token_id = type(run.policy).__name__, collector.codec.tokenizer.bos_token_id
        self._gather = run.collectives.named("compare engine and trainer")
        self._action = "off" if args.replay_from else args.engine_parity  # a replay's engine is not there to be asked
        # False if the engine reports a distribution that sampling has cut: no score equals it.
        self.comparable = not (traits.reports_after_cut and reshapes(args, params))
        self._together = run.sharding.weights  # scoring takes all processes, each in step with the others
        self._plays = collector.spec is not None  # rollouts are more than the engine's completions
        looks = self.comparable and self._action != "off"
        self._left, self._asked = CHECKS if looks else 0, 0
        stale_weights = StaleWeightsTest(lambda: run.policy, lambda: run.step, RARELY if args.max_staleness else 1)
        self.stale_weights = stale_weights if looks and not traits.shares_policy else None
        self._agreed = self._warned = False
        self._replays = args.routing_replay == "R3"
        asked = self._replays or (traits.returns_routes and not self._plays)  # rollouts of users may come without
        self._routes_of = routes_of if looks and asked else None

    @property
    def wants_routes(self) -> bool:
        """True if the next rollout batch is to come with the experts of its tokens, to be compared."""
        return self._left > 0 and self._routes_of is not None

    def expect(self, traits: EngineTraits) -> None:
        """Compare with an engine of these traits from now on, as when it begins or ceases to round."""
        autocast = AUTOCAST.get(self._run.accelerator.mixed_precision)
        rounded = ROUNDED_TO.get(traits.rounded_to or "")
        self._traits = traits
        self.tolerance = tolerance(self.temperature, self._run.policy.dtype, autocast, traits.dtype, rounded)

    def wants_samples(self) -> bool:
        """True if samples for the check alone are wanted: for the first comparisons, or to test for stale weights."""
        self._asked += bool(self._left)
        return (self.stale_weights is not None and self.stale_weights.due()) or (
            self._left > 0 and self._asked <= CHECKS
        )

    def __call__(self, batch: TrainBatch, fresh: Tensor | None = None) -> dict[str, Stat]:
        """Compare a rollout batch; `fresh` [R] are the rollouts of the current weights (None: all). Collective.

        Returns:
            The metric `routing/differing`, where experts were compared.

        Raises:
            ValueError: the engine's log-probs differ, and engine_parity='raise'; or they are unusable.
        """
        self._check_reported(batch)
        test = self.stale_weights if self.stale_weights is not None and self.stale_weights.due() else None
        if test is None and not self._left:
            return {}
        comparable = batch if fresh is None else batch.select(fresh)
        if not self._replays:
            comparable = comparable.unrouted()
        if test is not None:
            self._test_stale_weights(test, comparable)
        if not self._left:
            return {}
        stats = self._compare_routes(batch if fresh is None else batch.select(fresh))
        findings = [finding for finding in self._gather(self._compare(comparable)) if finding is not None]
        problem = next(filter(None, findings), None)
        if problem is not None:
            self._complain(problem)
            self._left = 0
        elif findings:
            self._left -= 1
            self._agreed = True
        return stats

    def _compare_routes(self, batch: TrainBatch) -> dict[str, Stat]:
        """Share of (token, layer) pairs of a few rollouts that engine and trainer send to other experts. Collective."""
        if self._routes_of is None:
            return {}
        few, _ = self._few(batch)
        if few.routes is None and not self._together:
            return {}
        own = self._routes_of(few if self._replays else replace(few, routes=None, prompt_routes=None))
        if few.routes is None:
            return {}
        known = are_known(few.routes) & are_known(own)
        pairs = known.sum().item() * own.shape[1]
        return {"routing/differing": Mean(differing(few.routes, own).sum().item(), pairs)}

    def _complain(self, problem: str) -> None:
        if self._action == "raise":
            raise ValueError(problem)
        warnings.warn(f"{problem} Continuing because engine_parity='warn'.", stacklevel=3)

    def _test_stale_weights(self, test: StaleWeightsTest, batch: TrainBatch) -> None:
        """Compare what current and earlier weights make of a few rollouts. Collective."""
        (few, usable), sums = self._few(batch), None
        if usable or self._together:
            sums = test.preferences(few, lambda rollouts: self.rescore(rollouts, self.temperature))
        problem = test.finding([share for share in self._gather(sums) if share is not None])
        if problem is not None:
            self.stale_weights = None
            self._complain(f"{problem} {ADVICE}")

    def _few(self, batch: TrainBatch) -> tuple[TrainBatch, bool]:
        """A few rollouts, for which the engine reported log-probs if it did for any; False if there are none."""
        reported = batch.engine_logprobs
        if reported is not None:  # rollouts of the user's own making may come without, and others with some
            reporting = segment_sum(batch.sampled & reported.isfinite(), batch.lengths) > 0
            batch = batch.select(reporting.nonzero()[:, 0]) if reporting.any() else batch
        few = batch.select(first_and_last(batch))
        return few, reported is not None and bool(few.sampled.any())

    def _compare(self, batch: TrainBatch) -> str | None:
        """The error text, "" if there is no error, None if there is nothing to compare."""
        few, usable = self._few(batch)
        scored = self.rescore(few, self.temperature) if usable or self._together else None
        if not usable or scored is None:
            return None
        settings = self.rescore, self.temperature, self.tolerance, self.bos_token_id
        comparison = Comparison(few, scored, *settings, self._agreed, alone=not self._together)
        broken = no_numbers(comparison)
        if scored.isnan().any() or (comparison.gap <= self.tolerance and broken is None):
            return ""  # NaN of the trainer's own are not the engine's fault
        if self._traits.shares_policy:
            otherwise = REWRITTEN if self._plays else OTHER_ATTENTION
            if self._traits.rounded_to is not None:
                otherwise = ROUNDED.format(self._traits.rounded_to)
            cause = likely_cause(comparison, (*OF_REQUESTS, other_prompt), otherwise)
            return (
                f"the engine's log-probs differ from the model's own by {comparison.gap:.2g} on average, so"
                f" {self._model_name} is not sampled from as it is: {cause} If nothing of yours changes what is"
                " sampled, please report the model."
            )
        if broken:
            return f"the engine's log-probs are not usable: {broken} {ADVICE}"
        differences = comparison.differences.abs()
        return (
            f"the engine's log-probs differ from the trainer's by {comparison.gap:.2g} nats on average (at most"
            f" {differences.max():.2g}, over {len(differences)} tokens), and rounding explains {self.tolerance:g}:"
            f" {likely_cause(comparison)} {ADVICE}"
        )

    def _check_reported(self, batch: TrainBatch) -> None:
        """Refuse infinite log-probs; say once that there is nothing to correct the loss with."""
        if self._run.algorithm.objective.correction is None or not batch.sampled.any():
            return
        reported = batch.engine_logprobs
        if reported is not None and (wrong := int((batch.sampled & (reported.isinf() | (reported > 1))).sum())):
            raise ValueError(
                f"the engine's log-probs are not usable: {wrong} of {int(batch.sampled.sum())} are infinite or above"
                " 0. Look at the engine's own log: its weights may be damaged, or it overflows in float16."
            )
        missing = batch.sampled if reported is None else batch.sampled & reported.isnan()
        if missing.any() and not self._warned:
            self._warned = True
            warnings.warn(
                f"the engine reported no log-probs for {int(missing.sum())} of {int(batch.sampled.sum())} tokens: they"
                " are trained on as if the trainer's policy had sampled them. If it did, set"
                " vllm_importance_sampling_correction=False to silence this.",
                stacklevel=2,
            )
