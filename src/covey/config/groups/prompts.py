"""Fields about which prompts are trained on."""

from dataclasses import dataclass

from covey.config.groups.describe import described


@dataclass
class PromptFields:
    """Rewards that have a say in which prompts a generation draws and keeps."""

    dynamic_sample: bool = described(
        False,
        "Replace groups without a signal (all advantages 0) by groups of further prompts before training "
        "(dynamic sampling, DAPO).",
    )
    max_resample_times: int = described(
        3, "With `dynamic_sample`, most rounds of refilling; what is missing after them is trained on as first drawn."
    )
    prompt_sampler: str = described(
        "uniform",
        "`uniform`: an epoch draws every prompt once. `difficulty`: prompts of intermediate difficulty, judged by "
        "their rewards so far, come more often than those that are always or never solved.",
    )
    difficulty_floor: float = described(
        0.1,
        "With prompt_sampler `difficulty`, how often a prompt that is always or never solved comes, relative to one "
        "that is solved half of the time.",
    )
