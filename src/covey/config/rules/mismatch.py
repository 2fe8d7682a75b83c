"""Rules about correcting the difference between an engine's log-probabilities and the trainer's."""

from typing import Any

from covey.config.rules.helpers import ignored, is_set, warn

OPTIONS = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
CORRECTION = ("vllm_importance_sampling_correction", *OPTIONS, "vllm_importance_sampling_cap")
"""Fields of the correction: named after one engine, in force for every one."""


def correction_has_an_engine(args: Any) -> None:
    """The built-in engine is corrected only when asked for."""
    if args.samples_elsewhere:
        ignored(args, ["correct_built_in_engine"], "another engine samples, which is corrected anyway")
    elif not args.correct_built_in_engine:
        because = (
            "the built-in engine samples with the trainer's own weights and precision; correct_built_in_engine=True"
            " corrects its rounding all the same"
        )
        ignored(args, CORRECTION, because)


def correction_options_are_read(args: Any) -> None:
    """Options of the correction need the correction."""
    if not args.vllm_importance_sampling_correction and (args.samples_elsewhere or args.correct_built_in_engine):
        because = "vllm_importance_sampling_correction is False"
        ignored(args, [*OPTIONS, "correct_built_in_engine"], because)


def bounds_enclose_agreement(args: Any) -> None:
    """A token of which engine and trainer think alike has ratio 1, which no bound may touch."""
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if not 0 <= (low or 0.0) <= 1 or (high is not None and not high >= 1):
        raise ValueError(
            f"vllm_importance_sampling_clip_min={low} and vllm_importance_sampling_clip_max={high} must lie on either"
            " side of 1, the ratio where engine and trainer agree: the first between 0 and 1, the second 1 or more,"
            " or either of them unset. 0.5 and 3 are usual."
        )


def vespo_is_corrected_by_token(args: Any) -> None:
    """vespo multiplies the ratios of a sequence's tokens itself."""
    mode, used = args.vllm_importance_sampling_mode, args.resolved_mismatch_mode
    if args.corrects_mismatch and mode != used and is_set(args, "vllm_importance_sampling_mode"):
        warn(
            f"vllm_importance_sampling_mode={mode!r} with loss_type={args.loss_type!r}: it multiplies the ratios of a"
            f" sequence's tokens itself, so {used!r} is used.",
        )
