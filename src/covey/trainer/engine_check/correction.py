"""Correction and check of the difference between the engine's log-probs and the trainer's, chosen by the config.

Log-probs that are scored anyway are compared; an on-policy run compares those of its training passes.
"""

import warnings
from dataclasses import replace
from functools import partial

from covey.algorithms.algorithm import Algorithm
from covey.config.base import OnlineConfig
from covey.core.engine import EngineTraits, SamplingParams
from covey.core.mismatch import mismatch_weights
from covey.policy.adapters import unwrapped
from covey.rollout.collector import Collector
from covey.trainer.context import RunContext
from covey.trainer.engine_check.parity import AUTOCAST, EngineCheck, Rescore, tolerance
from covey.trainer.engine_check.staleness import VersionTest

RESHAPING = frozenset(
    {"allowed_token_ids", "bad_words", "frequency_penalty", "guided_decoding", "json_schema", "logit_bias", "regex"}
    | {"logits_processors", "min_tokens", "presence_penalty", "structured_outputs", "typical_p"}
)  # engine settings beyond `SamplingParams`' own that change which tokens may come and how often


def corrected(algorithm: Algorithm, args: OnlineConfig, traits: EngineTraits, params: SamplingParams) -> Algorithm:
    """The algorithm with weights of tokens by trainer over engine probability, where these may differ."""
    if not args.vllm_importance_sampling_correction or (traits.shares_policy and not args.correct_built_in_engine):
        return algorithm
    reshaping = reshapes(args, params)
    if traits.reports_after_cut and reshaping:
        warnings.warn(
            f"the engine's mismatch is not corrected: it reports log-probs after {', '.join(reshaping)} had their"
            " effect, and the trainer scores the distribution before. Leave these settings at their defaults, or set"
            " vllm_importance_sampling_correction=False to silence this.",
            stacklevel=2,
        )
        return algorithm
    correction = partial(
        mismatch_weights,
        mode=args.resolved_mismatch_mode,
        clip_min=args.vllm_importance_sampling_clip_min,
        clip_max=args.vllm_importance_sampling_clip_max,
    )
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


def build_engine_check(
    context: RunContext, collector: Collector, params: SamplingParams, traits: EngineTraits, rescore: Rescore
) -> EngineCheck:
    args, model = context.args, unwrapped(context.loop.model)
    comparable = not (traits.reports_after_cut and reshapes(args, params))
    action = "off" if args.replay_from else args.engine_parity  # another run's engine is not there to be asked
    looks = comparable and action != "off" and not traits.shares_policy
    return EngineCheck(
        action=action,
        traits=traits,
        rescore=rescore,
        gather=context.collectives.named("compare engine and trainer"),
        model_name=type(model).__name__,
        temperature=args.temperature,
        tolerance=tolerance(
            args.temperature, model.dtype, AUTOCAST.get(context.accelerator.mixed_precision), traits.dtype
        ),
        bos_token_id=collector.codec.tokenizer.bos_token_id,
        corrected=context.algorithm.objective.correction is not None,
        together=context.sharding.weights,
        versions=VersionTest(lambda: context.loop.policy, lambda: context.step) if looks else None,
        comparable=comparable,
        plays=collector.spec is not None,
    )
