"""Fields and rules about supervised terms: cross-entropy on tokens that the policy has not sampled."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from covey.config.fields import Args, check_schedule, describe_fields, limited
from covey.config.messages import ignored
from covey.core.findings import Finding
from covey.core.records import WRITERS


@dataclass
class SupervisionFields:
    """Cross-entropy on what tools and users said, and on demonstrations."""

    supervised_roles: dict[str, float] | str | None = None
    """Weight by role of a cross-entropy on the tokens in a rollout that the policy did not write, such as {"tool":
    0.05} (ECHO): `tool`, `user`, `system`, or several. It is a separate term of the loss, averaged over these tokens.
    Prompts are left out."""
    supervised_filter: str | None = None
    """With `supervised_roles`: path/to/file.py:name, a function of a rollout that returns one bool per completion
    token, False for tokens that must not count, such as errors of the harness."""

    demonstrations: str | None = None
    """Dataset of demonstrations to learn in addition to the rewards: a file (jsonl, json, parquet, csv), a folder or a
    hub id, whose rows have a `prompt`, as in the training data, and a `completion`. Their cross-entropy is a separate
    term of the loss, averaged over their completions' tokens."""
    demonstrations_per_step: int = limited(8, ge=1)
    """Demonstrations in each optimizer step, over all processes."""
    demonstrations_coef: float = limited(1.0, gt=0, finite=True, advice="0.1 to 1 are usual.")
    """Weight of the demonstrations' cross-entropy; the policy-gradient loss keeps its weight of 1."""
    demonstrations_schedule: dict[str, float] | str | None = None
    """CHORD's weight μ by optimizer step, instead of `demonstrations_coef`; the policy-gradient loss is weighted by 1 -
    μ. {"warmup": steps, "peak": a, "decay": steps, "valley": b}: linear from 0 to the peak, then along a cosine to the
    valley. Both weights are between 0 and 1."""
    demonstrations_phi: bool = False
    """Weigh each token of a demonstration by p (1 - p) of its probability p under the policy (CHORD-φ)."""


describe_fields(__name__)

# ---- rules -----------------------------------------------------------------------------------------------------------


def supervised_roles_have_weights(args: Args) -> Iterator[Finding]:
    given: Any = args.supervised_roles  # a config parses JSON
    if given is None:
        yield from ignored(args, ["supervised_filter"], "supervised_roles is unset")
        return
    right = isinstance(given, dict) and given and {*given} <= {*WRITERS}
    if not right or not all(isinstance(one, int | float) and 0 < one < float("inf") for one in given.values()):
        yield Finding.error(
            "setting-format",
            f"supervised_roles={given!r} must map roles ({', '.join(WRITERS)}) to weights above 0.",
            'Write supervised_roles={"tool": 0.05}.',
        )


def demonstrations_are_weighed_once(args: Args) -> Iterator[Finding]:
    names = [f"demonstrations_{name}" for name in ("per_step", "coef", "schedule", "phi")]
    if args.demonstrations is None:
        yield from ignored(args, names, "demonstrations is unset")
        return
    if args.demonstrations_schedule is not None:
        yield from ignored(args, ["demonstrations_coef"], "demonstrations_schedule is set")
        yield from check_schedule("demonstrations_schedule", args.demonstrations_schedule, most=1.0)
