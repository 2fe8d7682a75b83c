"""Fields about what is shown and written beside the metrics."""

from dataclasses import dataclass

from covey.config.groups.describe import described


@dataclass
class LoggingFields:
    """Completions on the console and in trackers; the parquet files are always written."""

    log_completions: bool = described(
        False, "Show sampled prompts and completions at every log, on the console and in the trackers."
    )
    log_multimodal: bool = described(
        True, "Include small images of what vision-language models are shown in the tables of completions."
    )
    num_completions_to_print: int | None = described(
        None, "With `log_completions`: how many to print; unset prints all."
    )
    log_unique_prompts: bool = described(False, "With `log_completions`: one completion of each prompt only.")
    log_completions_hub_repo: str | None = described(
        None,
        "Hub data set to which the parquet files of completions are pushed while training, such as me/completions.",
    )
