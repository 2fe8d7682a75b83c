"""docs/recipes.md: what to set in which situation, by the verdicts of the claims.

The advice for every verdict is written before the runs, so that a result picks the advice and nobody fits it to one.
`python -m benchmarks.claims --write` writes the page.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.claims import page
from benchmarks.claims.claim import PILOT
from benchmarks.claims.records import ClaimRecords
from benchmarks.claims.statistic import FAILS, HOLDS, OPEN
from benchmarks.claims.table import CLAIMS

FEWEST_SEEDS = 4
"""An arm with fewer seeds is not shown as the best one."""


@dataclass(frozen=True)
class Recipe:
    """A situation with the advice that each verdict of a claim gives.

    `default` is what Covey does where nothing is set, and the advice without a verdict or with an undecided one. For
    each prefix of names of arms in `best`, the arm with the highest last score is shown.
    """

    situation: str
    claim: int
    default: str
    holds: str
    fails: str
    best: tuple[str, ...] = ()


RECIPES = (
    Recipe(
        "Learning rate and rank of an adapter, learning rate of a whole model",
        14,
        "`learning_rate=1e-6`, `r=8`",
        "rank 1 is enough; ten times the rate of the whole model",
        "rank and rates as measured on the right",
        best=("rank 1,", "rank 8,", "rank 64,", "whole,"),
    ),
    Recipe(
        "Size of a group, with a fixed number of completions in a step",
        4,
        "`num_generations=8`",
        "`num_generations=2` and four times the prompts are as good",
        "keep groups of 8 or 16",
        best=("G ",),
    ),
    Recipe(
        "Scale of advantages, with prompts of different difficulty",
        5,
        '`scale_rewards="group"`',
        '`scale_rewards="batch"`, or `advantages="reinforce_plus_plus"`',
        "keep the deviation of the group",
        best=("group,", "batch,", "none,", "reinforce++,"),
    ),
    Recipe(
        "Upper clip bound, with several updates of a rollout batch",
        2,
        "`epsilon_high=0.2`",
        "`epsilon_high=0.28`",
        "keep .2",
    ),
    Recipe(
        "Many groups in which all rewards are equal",
        3,
        "no filter",
        "`dynamic_sample=True`",
        "no filter; a higher rate gives as much",
    ),
    Recipe(
        "Wrong completions grow",
        1,
        '`loss_type="dapo"`, which divides by the tokens of the step',
        'not `loss_type="grpo"`; keep the default or `dr_grpo`',
        "any average; lengths do not tell them apart here",
    ),
    Recipe(
        "Completions are cut off at the limit",
        20,
        "no penalty",
        "add `get_soft_overlong_punishment` to the rewards",
        "a longer limit",
    ),
    Recipe(
        "Entropy falls early",
        11,
        '`loss_type="dapo"`',
        '`loss_type="kl_cov"` or `"clip_cov"`',
        "keep the default; entropy follows the reward",
    ),
    Recipe(
        "A penalty that keeps the model near its start",
        13,
        '`beta=0`; with `beta` `kl_estimator="k3"`, as in TRL',
        '`kl_estimator="k2"`, or `use_bias_correction_kl=True`',
        "any estimator: they differ little here",
    ),
    Recipe(
        "Several rewards of different rarity",
        19,
        "rewards are added",
        '`multi_objective_aggregation="normalize_then_sum"`',
        "add them, with weights",
    ),
    Recipe(
        "Prompts that are almost never solved",
        21,
        "GRPO's advantages",
        '`advantages="maxrl"`',
        "GRPO's advantages",
    ),
    Recipe(
        "Several samples are drawn in use, and one right one is enough",
        12,
        "GRPO's advantages",
        '`advantages="only_negative"` or `"pass_at_k"`',
        "GRPO's advantages",
    ),
    Recipe(
        "Training on the uncertain tokens only",
        10,
        "all tokens",
        "`top_entropy_quantile=0.2` loses nothing",
        "all tokens",
    ),
    Recipe(
        "The engine's log-probs differ from the trainer's",
        8,
        "ratios truncated or masked, as the loss needs",
        "keep the correction",
        "the correction does not help here; remove the cause (`fp16`, `engine_dtype`)",
    ),
    Recipe(
        "Number format of a model, where the engine computes in it, too",
        9,
        "as loaded",
        "`fp16=True` where the hardware has no cost for it",
        "bf16",
    ),
    Recipe(
        "A mixture of experts",
        7,
        "`routing_replay=None`",
        '`routing_replay="R3"`',
        "no replay",
    ),
    Recipe(
        "A mixture of experts with several updates of a rollout batch",
        6,
        '`importance_sampling_level="token"`',
        '`importance_sampling_level="sequence"`',
        "token ratios",
    ),
    Recipe(
        "Sampling while training",
        16,
        "`max_staleness=0`",
        "`max_staleness` of up to 8, corrected",
        "a small `max_staleness`",
    ),
    Recipe(
        "A better model of the same vocabulary is there",
        15,
        "rewards alone",
        "a teacher: [distillation](teachers.md) first, rewards afterwards",
        "a teacher as well, without the promise of seven times fewer steps",
    ),
    Recipe(
        "Self-play",
        22,
        '`compare="group"`',
        '`compare="role"` or `"role_average"`',
        "any comparison; `role` has less variance",
    ),
)

INTRODUCTION = """# Recipes

What to set in which situation, as far as the [claims](claims.md) of this repository tell: small models, short
completions, few steps. The advice for each verdict was written before the runs; the verdict picks it. Where a claim has
not run or is undecided, the advice is the default. The evidence is one experiment of a certain kind, and a
[study](studies.md) of your own task is a better one.

| situation | default | set | evidence |
|---|---|---|---|
"""


def render(records: ClaimRecords) -> str:
    """The page."""
    return INTRODUCTION + "".join(f"{row(recipe, records)}\n" for recipe in RECIPES)


def row(recipe: Recipe, records: ClaimRecords) -> str:
    """Row of a situation: the advice follows from the verdict, and figures stand beside it."""
    claim = next(one for one in CLAIMS if one.number == recipe.claim)
    now = page.standing(claim, records)
    advice: Mapping[str | None, str] = {HOLDS: recipe.holds, FAILS: recipe.fails}
    figures = [page.figure(one) for one in now.parts if one.interval is not None]
    for kind in recipe.best:
        if found := best(claim, kind, records):
            figures.append(f"best of `{kind.strip(' ,')}`: {found}")
    evidence = f"[claim {recipe.claim}](claims.md#claim-{recipe.claim}): {page.short(claim, records)}"
    cells = (
        recipe.situation,
        recipe.default,
        advice.get(now.verdict, "the default" + (" (undecided)" if now.verdict == OPEN else "")),
        ". ".join([evidence, *figures]) + ".",
    )
    return "| " + " | ".join(page.cell(cell) for cell in cells) + " |"


def best(claim: page.Claim, kind: str, records: ClaimRecords) -> str:
    """The arm with the highest mean of its last scores among the arms whose names begin so; empty if none has run."""
    scores = {}
    for arm in claim.arms or {}:
        own = [
            float(np.mean(result["evaluations"][-1][1]))
            for (name, seed), result in records.runs(claim).items()
            if name == arm and seed != PILOT and result.get("evaluations")
        ]
        if arm.startswith(kind) and len(own) >= FEWEST_SEEDS:
            scores[arm] = float(np.mean(own))
    if not scores:
        return ""
    name = max(scores, key=lambda arm: scores[arm])
    return f"{name.removeprefix(kind).strip()} (score {scores[name]:.2f})"
