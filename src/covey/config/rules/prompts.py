"""Rules about which prompts are trained on."""

from typing import Any

from covey.config.rules.helpers import ignored, within

LEAST_FLOOR = 0.01
"""Below it, a dataset whose prompts are all settled would be gone through a hundred times for one draw."""


def refills_are_counted(args: Any) -> None:
    """The number of rounds is not negative, and is read."""
    within(args, "max_resample_times", "0 or more", lambda rounds: rounds >= 0, "0 never refills; 3 is usual.")
    if not args.dynamic_sample:
        ignored(args, ["max_resample_times"], "dynamic_sample is False")


def no_prompt_is_starved(args: Any) -> None:
    """Every prompt comes again some time, and the floor is read."""
    within(
        args,
        "difficulty_floor",
        f"between {LEAST_FLOOR} and 1",
        lambda floor: LEAST_FLOOR <= floor <= 1,
        "At 0 a prompt that failed once would never come again; at 1 all prompts come alike. 0.1 is usual.",
    )
    if args.prompt_sampler != "difficulty":
        ignored(args, ["difficulty_floor"], f"prompt_sampler is {args.prompt_sampler!r}")


def workers_know_what_to_read(args: Any) -> None:
    """Dataloader workers read ahead only where it is known which rows come next (streams: `sampler.train_loader`)."""
    if args.prompt_sampler == "difficulty":
        because = "with prompt_sampler='difficulty' a generation's prompts are chosen, and read, when it begins"
        ignored(args, ["dataloader_num_workers"], because)
    elif args.max_staleness:
        because = (
            f"with max_staleness={args.max_staleness} prompts are read, a generation at a time, when it is sampled"
        )
        ignored(args, ["dataloader_num_workers"], because)
