"""The claims. A protocol is final before its first run; `changed` says what differs from the first plan, and why."""

from functools import partial
from math import log

from benchmarks.claims import exact
from benchmarks.claims.beds import DistillationBed, RoundingBed, RoutingBed, StudyBed, TinyBed, WeightsBed
from benchmarks.claims.claim import Best, Claim, Condition, Count, Enumerated, Part, Shares
from benchmarks.claims.games import KuhnBed
from benchmarks.claims.measures import (
    Arrival,
    AtEqualScore,
    BestRate,
    Curve,
    EntropyLaw,
    Fall,
    Growth,
    HardestThird,
    Listed,
    Logged,
    PassAt,
    Reach,
    Score,
)
from benchmarks.claims.rewards import LIMIT

DELTA = 0.05
"""Smallest difference of mean rewards that is called an effect."""


def arxiv(*numbers: str) -> str:
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in numbers)


FOUR_UPDATES = {"num_iterations": 4, "max_steps": 64}
"""Four optimizer steps on each of 16 rollout batches."""
OFF_POLICY = StudyBed(evaluations=(8, 16, 32), settings=FOUR_UPDATES)
LONG = StudyBed(
    tasks=(("sums of 2 digits", 0),),
    settings={"max_completion_length": 32, "per_device_train_batch_size": 64, "learning_rate": 1.5e-4},
)
RATES = (1e-4, 5e-4)


def rated(arms: dict[str, dict[str, object]], rates: tuple[float, ...] = RATES) -> dict[str, dict[str, object]]:
    return {f"{name}, {rate:g}": {**one, "learning_rate": rate} for name, one in arms.items() for rate in rates}


def best(name: str, rates: tuple[float, ...] = RATES) -> Best:
    return Best(tuple(f"{name}, {rate:g}" for rate in rates))


LORA_RATES, WHOLE_RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3), (5e-6, 1.5e-5, 5e-5, 1.5e-4)
EVERY_TWO = (2, 4, 6, 8, 10, 12, 14)

CLAIMS = (
    Claim(
        1,
        "A mean per sequence makes wrong answers longer",
        f"Dr. GRPO, {arxiv('2503.20783')}",
        (
            Enumerated(
                "H1",
                "With rewards that do not depend on length, the expected update lengthens wrong answers by 1/|o| and"
                " not by"
                " a constant or a sum.",
                exact.length_bias,
            ),
            Part(
                "H2",
                "Growth of wrong completions, `grpo` - `dr_grpo` > 0 tokens.",
                "superiority",
                1.0,
                Growth("wrong length", while_in=("accuracy", 0.9)),
                "grpo",
                "dr_grpo",
                "tokens",
            ),
            Part(
                "H3",
                "Growth of wrong completions, `grpo` - `luspo` > 0 tokens.",
                "superiority",
                1.0,
                Growth("wrong length", while_in=("accuracy", 0.9)),
                "grpo",
                "luspo",
                "tokens",
            ),
        ),
        "Longer wrong answers because right ones become short first: therefore lengths are those of wrong"
        " completions alone.",
        32,
        TinyBed(reward="first", tokens=32, steps=60, learning_rate=3e-4),
        {
            "grpo": {"loss_type": "grpo"},
            "dr_grpo": {"loss_type": "dr_grpo"},
            "luspo": {"loss_type": "luspo"},
            "dapo": {"loss_type": "dapo"},
        },
        seeds=8,
        changed="Lengths are those of the 128 completions that each step samples before its update (five steps at the"
        " end)"
        " in place of 256 further samples: they are as new, and cost nothing. Runs stop at step 60, where growth is"
        " read. The rate"
        " is 3e-4 by a pilot at seed 99, with which accuracy goes from .16 to .6."
        " H3 is added, as `luspo` is an arm; `dapo` divides by the sampled tokens and is shown without a hypothesis.",
        methods=("loss_type=grpo", "loss_type=dr_grpo", "loss_type=luspo"),
    ),
    Claim(
        2,
        "Clip-higher keeps entropy",
        f"DAPO, {arxiv('2503.14476')}",
        (
            Part(
                "H1",
                "Entropy over the last quarter, bound .28 - .2 > 0 nats.",
                "superiority",
                DELTA,
                Logged("entropy"),
                "0.28",
                "0.2",
                "nats",
            ),
            Part("H2", "Last score, .28 - .2 > -.05.", "non-inferiority", DELTA, Score(), "0.28", "0.2"),
        ),
        "Entropy is higher because learning is slower: the scores of the arms at the same steps tell.",
        30,
        OFF_POLICY,
        {"0.2": {"epsilon_high": 0.2}, "0.28": {"epsilon_high": 0.28}, "0.4": {"epsilon_high": 0.4}},
        conditions=(
            Condition(
                "share of tokens clipped above, in the .2 arm, at least .5%",
                Logged("clip_ratio/high_mean", 1.0),
                "0.2",
                0.005,
            ),
        ),
        notes=(Enumerated("X", "An unlikely token's rise in a batch.", exact.clip_higher),),
        methods=("epsilon_high",),
    ),
    Claim(
        3,
        "Dynamic sampling needs fewer updates",
        f"DAPO, {arxiv('2503.14476')}",
        (
            Part(
                "H1",
                "Steps to 80% of the baseline's last score, on / off < 1.",
                "superiority",
                log(1.1),
                Arrival("steps"),
                "off",
                "dynamic",
                "× as many without",
                "median",
            ),
            Part(
                "H2",
                "Sampled tokens to the same score, on / off < 1.",
                "superiority",
                log(1.1),
                Arrival("tokens"),
                "off",
                "dynamic",
                "× as many without",
                "median",
            ),
        ),
        "More useful groups are a larger effective rate: the arm `off, 2x` has twice the rate.",
        50,
        StudyBed(tasks=(("sums of 1 to 3 digits", 0),), evaluations=EVERY_TWO),
        {
            "off": {},
            "dynamic": {"dynamic_sample": True},
            "difficulty": {"prompt_sampler": "difficulty"},
            "off, 2x": {"learning_rate": 1e-3},
        },
        seeds=6,
        extends=False,
        pilots=("off",),
        conditions=(
            Condition(
                "share of groups without a signal, from 30 to 60%", Logged("frac_reward_zero_std", 1.0), "off", 0.3, 0.6
            ),
        ),
        notes=(Enumerated("X", "Groups to sample for each that has a signal.", exact.groups_for_a_signal),),
        changed="Six seeds in place of four, since the statistic is the median (runs may never arrive), and four"
        " seeds have no"
        " interval of 95% and six none of 97.5%: there is one look. The control has twice the rate in place of"
        " 1/share, which is not known before.",
        methods=("dynamic_sample", "prompt_sampler=difficulty"),
        seen="The threshold is passed at the same evaluation by nearly all runs, so steps cannot differ. At step 8 the"
        " mean score is .329 with dynamic sampling, .326 with the sampler and .279 without; at the end .325, .318 and"
        " .308.",
    ),
    Claim(
        4,
        "RLOO is GRPO unscaled; two rollouts of a prompt suffice",
        f"{arxiv('2402.14740', '2510.00977')}",
        (
            Enumerated("H1", "RLOO's advantages are the unscaled ones times G / (G - 1).", exact.rloo_identity),
            Part(
                "H2",
                "Last score at equal rollouts, absolute G 2 - G 16 < .05.",
                "equivalence",
                DELTA,
                Score(),
                "G 2",
                "G 16",
            ),
        ),
        "A flat optimum of 16 steps hides differences: the mean over all evaluations is shown too.",
        30,
        StudyBed(settings={"scale_rewards": "none", "loss_type": "dr_grpo"}),
        {f"G {size}": {"num_generations": size} for size in (2, 4, 8, 16)},
        notes=(Enumerated("X", "Noise of small groups at equal rollouts of one prompt.", exact.noise_of_small_groups),),
        methods=("loss_type=rloo", "method=rloo", "num_generations"),
    ),
    Claim(
        5,
        "The batch's deviation beats the group's",
        f"Lite PPO, {arxiv('2508.08221')}; REINFORCE++, {arxiv('2501.03262')}",
        (
            Part(
                "H1",
                "Mean of all scores, `scale_rewards=batch` - `group` > 0, each at its best rate.",
                "superiority",
                DELTA,
                Score("auc"),
                best("batch"),
                best("group"),
            ),
            Part(
                "H2",
                "The same, `reinforce_plus_plus` - `group` > 0.",
                "superiority",
                DELTA,
                Score("auc"),
                best("reinforce++"),
                best("group"),
            ),
        ),
        "Step size: therefore two rates an arm, the best by seeds 0 and 1, compared on the others.",
        60,
        StudyBed(tasks=(("sum", 60), ("multiple", 0))),
        rated(
            {
                "group": {},
                "batch": {"scale_rewards": "batch"},
                "none": {"scale_rewards": "none"},
                "reinforce++": {"advantages": "reinforce_plus_plus"},
            }
        ),
        seeds=6,
        notes=(Enumerated("X", "Weight of hard prompts by the group's deviation.", exact.weight_of_hard_prompts),),
        changed="Six seeds, as two of them choose the rates. Parts are two, as two papers claim two things.",
        methods=("scale_rewards=batch", "advantages=reinforce_plus_plus"),
        seen="The rate decides: after eight steps all arms have .56 to .57 at the higher one and .30 at the lower one.",
    ),
    Claim(
        6,
        "Sequence ratios are steadier on mixtures of experts",
        f"GSPO, {arxiv('2507.18071')}",
        (
            Part(
                "H2",
                "Late reward, `sequence` - `token` > 0.",
                "superiority",
                DELTA,
                Curve("accuracy"),
                "sequence",
                "token",
            ),
            Count(
                "H3", "Token runs that fall by .1 from their best: at least 3 of 6.", Fall("accuracy", 0.1), "token", 3
            ),
            Count("H3b", "Sequence runs that do: at most 1.", Fall("accuracy", 0.1), "sequence", 0, 1),
        ),
        "A random router is nearly uniform, so routes change more often than in trained models: a mechanism only.",
        54,
        TinyBed(
            reward="share",
            tokens=8,
            steps=150,
            mixture=True,
            copies=True,
            bits=8,
            settings={"num_iterations": 4, "loss_type": "grpo", "engine_parity": "off"},
        ),
        {
            "token": {"importance_sampling_level": "token"},
            "sequence": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
            "sequence_token": {"importance_sampling_level": "sequence_token", "epsilon": 3e-4, "epsilon_high": 4e-4},
        },
        seeds=6,
        changed="The engine's other precision is a copy rounded to 8 bits in place of bf16, which the tiny bed has."
        " Bounds of"
        " sequence ratios are the paper's. H1 (a mean has less spread than its terms) is no hypothesis and is left"
        " out; H3 is"
        " two counts.",
        methods=("importance_sampling_level=sequence",),
        seen="With the paper's bounds, which are narrow, ratios of sequences learn slower in both forms.",
    ),
    Claim(
        7,
        "Routing replay brings mixtures of experts to the level of dense models",
        f"R3, {arxiv('2510.11370')}",
        (
            Part(
                "H1",
                "k3 of engine and trainer in bf16, without / with replay of the engine's experts at least 2.",
                "superiority",
                0.0,
                Listed("k3"),
                "off",
                "R3",
                "×",
                "pairs",
                log(2),
            ),
            Part(
                "H2",
                "k3 with replay at most 1.5 times a dense model's: dense / R3 at least 1 / 1.5.",
                "superiority",
                0.0,
                Listed("k3"),
                "dense",
                "R3",
                "×",
                "pairs",
                -log(1.5),
            ),
            Part(
                "H3",
                "H1 with a trainer in float32 on the same weights.",
                "superiority",
                0.0,
                Listed("k3"),
                "off, float32",
                "R3, float32",
                "×",
                "pairs",
                log(2),
            ),
        ),
        "Weights are random, with a router far from uniform: how often routes change in a trained model is another"
        " figure; the share here is written down.",
        5,
        RoutingBed(),
        {
            "off": {"dtype": "bfloat16"},
            "R3": {"dtype": "bfloat16", "replay": True},
            "dense": {"dtype": "bfloat16", "mixture": False},
            "off, float32": {"dtype": "float32"},
            "R3, float32": {"dtype": "float32", "replay": True},
        },
        seeds=1,
        extends=False,
        changed="δ is 0, as the hypotheses have thresholds of their own. R2 is no arm: it replays what the trainer"
        " itself chose, so between engine and trainer it changes nothing before the first update.",
        methods=("routing_replay",),
    ),
    Claim(
        8,
        "Truncated or masked ratios repair an engine's mismatch",
        "Yao et al. 2025; Liu et al. 2025",
        (
            Part(
                "H1",
                "Late reward, `token_truncate` - none > 0.",
                "superiority",
                DELTA,
                Curve("accuracy"),
                "truncate",
                "none",
            ),
            Part(
                "H1b",
                "Late reward, `sequence_mask` - none > 0.",
                "superiority",
                DELTA,
                Curve("accuracy"),
                "mask",
                "none",
            ),
            Count(
                "H2",
                "Uncorrected runs that fall by .1 from their best: at least 4 of 6.",
                Fall("accuracy", 0.1),
                "none",
                4,
            ),
            Count("H2b", "Truncated runs that do: at most 1.", Fall("accuracy", 0.1), "truncate", 0, 1),
        ),
        "Masking helps because it trains on less: the share outside of the bounds is recorded.",
        30,
        TinyBed(reward="share", tokens=8, steps=150, copies=True, bits=2.75, settings={"engine_parity": "off"}),
        {
            "none": {"vllm_importance_sampling_correction": False},
            "truncate": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
            "mask": {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0},
            "no mismatch": {"bits": None},
        },
        seeds=6,
        conditions=(
            Condition(
                "mean |log p(engine) - log p(trainer)| from .05 to .1",
                Logged("engine difference", 1.0),
                "truncate",
                0.05,
                0.1,
            ),
        ),
        notes=(
            Enumerated(
                "X",
                "Errors of the gradient from samples of another policy.",
                partial(exact.corrected_gradients, 0.3, 1.0),
            ),
        ),
        changed="The copy is rounded to 2.75 bits a row, which in a pilot at seed 99 gives the difference that the"
        " precondition names (.083). It is read in the arm `truncate`, as `none` compares nothing. The arm with a"
        " random mask of the same share is left out: the share is not known before. A first protocol had 5 bits, a"
        " difference of .009, and is superseded: its precondition failed.",
        methods=("vllm_importance_sampling_mode",),
        seen="Runs without a correction end as high as those whose engine is exact (.79 and .80), runs with one lower"
        " (.67 and .63).",
    ),
    Claim(
        9,
        "fp16 removes most of the mismatch",
        arxiv("2510.26788"),
        (
            Part(
                "H1",
                "Mean |log p(engine) - log p(trainer)|, bf16 / fp16 at least 4.",
                "superiority",
                0.0,
                Listed("differences"),
                "bf16",
                "fp16",
                "×",
                "pairs",
                log(4),
            ),
        ),
        "On a CPU products are summed in float32, and kernels differ from a GPU's: a figure of this machine.",
        10,
        RoundingBed(),
        {"bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}, "fp32": {"dtype": "float32"}},
        seeds=1,
        extends=False,
        changed="δ is 0, as the hypothesis has a threshold of its own: an interval below 4 is one against the claim.",
        methods=("fp16",),
    ),
    Claim(
        10,
        "A fifth of the tokens is enough",
        arxiv("2506.01939"),
        (
            Part(
                "H1",
                "Last score, a fifth by entropy - all > -.05.",
                "non-inferiority",
                DELTA,
                Score(),
                "top 20%",
                "all",
            ),
            Part(
                "H2",
                "Last score, a fifth by entropy - the other 80% > 0.",
                "superiority",
                DELTA,
                Score(),
                "top 20%",
                "bottom 80%",
            ),
        ),
        "Few tokens suffice in any choice: the arm with a random fifth decides.",
        80,
        LONG,
        {
            "all": {},
            "top 20%": {"top_entropy_quantile": 0.2},
            "bottom 80%": {"loss_type": "sure_tokens"},
            "random 20%": {"loss_type": "random_tokens"},
            "top 20%, 2x": {"top_entropy_quantile": 0.2, "learning_rate": 3e-4},
        },
        changed="The threshold of the bottom 80% is that of a micro-batch in place of the step's.",
        methods=("top_entropy_quantile",),
    ),
    Claim(
        11,
        "Reward follows -a e^H + b; KL-Cov and Clip-Cov keep H",
        arxiv("2505.22617"),
        (
            Count(
                "H1",
                "The law explains more than 90%, and more than a line in H or in the step, in at least 3 of 4 seeds.",
                EntropyLaw(),
                "dapo",
                3,
            ),
            Part(
                "H2",
                "Entropy at equal reward, `kl_cov` - `dapo` > 0 nats.",
                "superiority",
                DELTA,
                AtEqualScore("entropy"),
                "kl_cov",
                "dapo",
                "nats",
            ),
            Part(
                "H3",
                "The same, `clip_cov` - `dapo` > 0.",
                "superiority",
                DELTA,
                AtEqualScore("entropy"),
                "clip_cov",
                "dapo",
                "nats",
            ),
        ),
        "H falls because the format is learnt.",
        60,
        StudyBed(evaluations=(16, 32), settings={"num_iterations": 4, "max_steps": 192, "cov_share": 0.02}),
        {"dapo": {"loss_type": "dapo"}, "kl_cov": {"loss_type": "kl_cov"}, "clip_cov": {"loss_type": "clip_cov"}},
        changed="`cov_share` is .02: the paper's .0002 of 48 tokens is less than one.",
        methods=("loss_type=kl_cov", "loss_type=clip_cov"),
        seen="`kl_cov` is ahead after four rollout batches (.64 against .38) and equal at the end.",
    ),
    Claim(
        12,
        "pass@k training and negative-only updates keep pass@k",
        arxiv("2508.10751", "2506.01347"),
        (
            Part("H1", "pass@16, negative-only - GRPO > 0.", "superiority", DELTA, PassAt(16, 32), "negative", "grpo"),
            Part("H2", "pass@1, GRPO - negative-only > 0.", "superiority", DELTA, PassAt(1, 32), "grpo", "negative"),
            Part("H3", "pass@16, start - GRPO > 0.", "superiority", DELTA, PassAt(16, 32), "start", "grpo"),
            Part("H4", "pass@16, `pass_at_k` - GRPO > 0.", "superiority", DELTA, PassAt(16, 32), "pass_at_k", "grpo"),
        ),
        "Temperature: a higher one gives GRPO's model the same spread; evaluations of a study have one temperature.",
        70,
        StudyBed(held_out=48, evaluations=(), rewards="binary", settings={"num_generations": 32, "max_steps": 32}),
        {
            "grpo": {"num_generations": 8},
            "pass_at_k": {"num_generations": 8, "advantages": "pass_at_k", "pass_at_k": 4},
            "negative": {"num_generations": 8, "advantages": "only_negative"},
            "positive": {"num_generations": 8, "advantages": "only_positive"},
            "start": {"num_generations": 8, "learning_rate": 0.0, "max_steps": 1},
        },
        conditions=(Condition("pass@16 of the start from .5 to .95", PassAt(16, 32), "start", 0.5, 0.95),),
        changed="48 held-out prompts with 32 completions in the study's own evaluation, in place of 80 in a suite:"
        " one way of"
        " evaluating. The control at temperature 1.3 is left out. H4 is the first paper's claim, which had no part.",
        methods=("advantages=pass_at_k",),
    ),
    Claim(
        13,
        "k3 in the loss is biased; k2 in the loss is k1 in the reward",
        arxiv("2510.01555", "2512.21852", "2506.09477"),
        (
            Enumerated(
                "H1",
                "As terms of the loss, k2 has the gradient of KL(π || ref), k1 none, k3 that of KL(ref || π).",
                exact.kl_gradients,
            ),
            Part(
                "H2",
                "KL(π || ref) at equal reward differs between k2 and k3 (β = .1).",
                "difference",
                log(1.1),
                AtEqualScore("reverse_kl", log=True),
                "k2",
                "k3",
                "×",
            ),
        ),
        "At small KL the two divergences agree to second order, so that nothing differs.",
        40,
        StudyBed(settings={"beta": 0.1, "loss_type": "dapo_with_kl"}),
        {
            "k1": {"kl_estimator": "k1", "use_bias_correction_kl": False},
            "k2": {"kl_estimator": "k2", "use_bias_correction_kl": False},
            "k3": {"kl_estimator": "k3", "use_bias_correction_kl": False},
            "k3, corrected": {"kl_estimator": "k3", "use_bias_correction_kl": True},
            "in the reward": {"kl_in_reward": True, "loss_type": "dapo"},
        },
        changed="The KL is log π - log π_ref over trained tokens in all arms, whatever the estimator of the penalty.",
        methods=("kl_estimator", "use_bias_correction_kl"),
        seen="k2 and the corrected k3 give the same runs, as their gradients are the same with one update of a rollout"
        " batch.",
    ),
    Claim(
        14,
        "LoRA of rank 1 equals full training, at ten times the rate",
        "[Thinking Machines 2025](https://thinkingmachines.ai/blog/lora/)",
        (
            Part(
                "H1",
                "Last score at the best rates, absolute rank 1 - whole < .05.",
                "equivalence",
                DELTA,
                Score(),
                best("rank 1", LORA_RATES),
                best("whole", WHOLE_RATES),
            ),
            Part(
                "H2",
                "Best rate of rank 1 / of the whole model from 5 to 16 times, by seed.",
                "equivalence",
                0.25,
                BestRate(),
                Best(best("rank 1", LORA_RATES).arms, ()),
                Best(best("whole", WHOLE_RATES).arms, ()),
                "(log10)",
                shift=0.95,
            ),
        ),
        "16 steps on one task need one direction: rank 1 is enough for this.",
        180,
        StudyBed(),
        {
            **rated({f"rank {r}": {"peft": {"r": r, "lora_alpha": 2 * r}} for r in (1, 8, 64)}, LORA_RATES),
            **rated({"whole": {"peft": None}}, WHOLE_RATES),
        },
        seeds=6,
        changed="The second task with 48 steps is left out until the first has run. H2 compares the best rate of each"
        " seed.",
        methods=("peft",),
    ),
    Claim(
        15,
        "On-policy distillation needs 7 to 10 times fewer steps",
        "[Thinking Machines 2025](https://thinkingmachines.ai/blog/on-policy-distillation/)",
        (
            Part(
                "H1",
                "Steps to 80% of the reward that reinforcement learning ends with, reinforcement / distillation > 7.",
                "superiority",
                0.0,
                Reach("accuracy"),
                "rewards",
                "teacher",
                "× as many",
                "median",
                log(7),
            ),
            Part(
                "H2",
                "The same in operations, with the teacher's forward pass (5 in place of 4 a token) > 9.",
                "superiority",
                0.0,
                Reach("accuracy", price=1.25),
                "rewards",
                "teacher",
                "× as many",
                "median",
                log(9),
            ),
        ),
        "The teacher has the student's shape, so that nothing is lost; the arm with both says what rewards add.",
        30,
        DistillationBed(reward="share", tokens=8, steps=150),
        {
            "rewards": {},
            "teacher": {"teacher": "trained", "teacher_loss": "divergence", "advantages": "no_rewards"},
            "both": {"teacher": "trained"},
        },
        seeds=6,
        pilots=("rewards",),
        extends=False,
        changed="A tiny model in place of SmolLM2, as studies have no teachers and a run alone takes many minutes."
        " Six seeds and medians, as runs may never arrive. Without the arms of eight likely tokens and of supervised"
        " training.",
        methods=("teacher",),
    ),
    Claim(
        16,
        "Staleness of 8 steps is harmless with the decoupled objective",
        f"AReaL, {arxiv('2505.24298')}",
        (
            Part(
                "H1",
                "Late reward, staleness 8 corrected - none > -.05.",
                "non-inferiority",
                DELTA,
                Curve("accuracy"),
                "8, corrected",
                "0",
            ),
            Part(
                "H2",
                "Late reward, staleness 8 corrected - uncorrected > 0.",
                "superiority",
                DELTA,
                Curve("accuracy"),
                "8, corrected",
                "8",
            ),
        ),
        "At small rates both are harmless: the arms with `3x` have three times the rate.",
        60,
        TinyBed(
            reward="share",
            tokens=8,
            steps=150,
            copies=True,
            settings={"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
        ),
        {
            "0": {},
            **{f"{s}, corrected": {"max_staleness": s} for s in (2, 8)},
            "8": {"max_staleness": 8, "vllm_importance_sampling_correction": False},
            "0, 3x": {"learning_rate": 3e-3},
            "8, corrected, 3x": {"max_staleness": 8, "learning_rate": 3e-3},
            "8, 3x": {"max_staleness": 8, "vllm_importance_sampling_correction": False, "learning_rate": 3e-3},
        },
        seeds=6,
        conditions=(Condition("largest staleness at least 6", Logged("staleness", 0.5), "8, corrected", 6),),
        notes=(
            Enumerated(
                "X",
                "Errors of the gradient from samples of another policy.",
                partial(exact.corrected_gradients, 0.1, 0.3, 1.0),
            ),
        ),
        changed="Staleness 0, 2 and 8 in place of 0, 1, 2, 4 and 8: the hypotheses are about 0 and 8.",
        methods=("max_staleness",),
        seen="The correction repairs about two thirds of what a staleness of 8 costs: .82 without staleness, .69 with"
        " the correction, .47 without.",
    ),
    Claim(
        17,
        "99% of bf16 weights do not change in a step",
        arxiv("2602.03839"),
        (
            Enumerated("H1", "A step of 1e-6 changes no weight above 1e-6 · 2^9 in bf16.", exact.smallest_bf16_change),
            Count(
                "H2",
                "At a rate of 1e-6 at least 99% of the weights stay as they were.",
                Listed("unchanged"),
                "1e-06",
                1,
                above=0.99,
            ),
        ),
        "It follows from the size of AdamW's step: the share says how many weights are larger than 512 rates. The first"
        " step is a whole rate for every weight, later ones are smaller, and the verdict is about the mean of three.",
        3,
        WeightsBed(),
        {f"{rate:g}": {"learning_rate": rate} for rate in (1e-6, 1e-5, 1e-4)},
        seeds=1,
        extends=False,
        methods=("optim",),
    ),
    Claim(
        18,
        "Reinforcement learning forgets less than supervised training at equal skill",
        f"RL's Razor, {arxiv('2509.04259')}",
        (),
        "Smaller steps forget less, whatever the loss.",
        60,
        missing="It compares rewards with supervised terms of the loss at three rates each, and has no arms yet.",
    ),
    Claim(
        19,
        "GDPO keeps rewards apart",
        f"GDPO, {arxiv('2601.05242')}",
        (
            Enumerated(
                "H1",
                "Rewards (1, 0) and (0, 1) get one advantage by their sum and two by GDPO.",
                exact.distinct_advantages,
            ),
            Part(
                "H2",
                "The rarer reward (right numbers) over the last quarter, GDPO - sum > 0.",
                "superiority",
                DELTA,
                Logged("rewards/all_or_nothing/mean"),
                "gdpo",
                "sum",
            ),
        ),
        "More distinct advantages need not be better ones; the batch's deviation changes the step size too.",
        20,
        StudyBed(tasks=(("sums of 1 to 3 digits", 0),), rewards="two"),
        {"sum": {}, "gdpo": {"multi_objective_aggregation": "normalize_then_sum"}},
        seen="At this rate the policy is almost deterministic from step 10 on: most groups have one reward, both arms"
        " learn to answer with a number, and in no seed is a right number more frequent at the end than in the middle."
        " A lower rate would leave more groups in which the two differ.",
        methods=("multi_objective_aggregation",),
    ),
    Claim(
        20,
        "A soft penalty of long completions lowers cut-offs at equal accuracy",
        f"DAPO, {arxiv('2503.14476')}",
        (
            Part(
                "H1",
                "Log odds of a cut-off over the last quarter, without - with the penalty > 0.",
                "superiority",
                0.4,
                Logged("completions/clipped_ratio", logit=True),
                "off",
                "penalty",
                "in log odds",
            ),
            Part("H2", "Last score, with - without > -.05.", "non-inferiority", DELTA, Score(), "penalty", "off"),
        ),
        "A longer limit has fewer cut-offs too: the arm `longer` has twice the limit.",
        30,
        StudyBed(
            tasks=(("sums of 2 digits", 0),),
            rewards="binary",
            settings={"max_completion_length": LIMIT, "per_device_train_batch_size": 64, "learning_rate": 1.5e-4},
        ),
        {
            "off": {},
            "penalty": {
                "reward_funcs": [f"benchmarks/claims/rewards.py:{one}" for one in ("all_or_nothing", "short_enough")]
            },
            "longer": {"max_completion_length": 2 * LIMIT},
        },
        conditions=(
            Condition(
                "share of cut-offs without the penalty at least 5%",
                Logged("completions/clipped_ratio", 1.0),
                "off",
                0.05,
            ),
        ),
        methods=("get_soft_overlong_punishment",),
    ),
    Claim(
        21,
        "MaxRL helps hard prompts",
        f"MaxRL, {arxiv('2602.02710')}",
        (
            Enumerated("H1", "The expected weight of a prompt is 1/p.", exact.weight_by_pass_rate),
            Part(
                "H2",
                "Last score of the hardest third of prompts, `maxrl` - GRPO > 0.",
                "superiority",
                DELTA,
                HardestThird(),
                "maxrl",
                "grpo",
            ),
        ),
        "The step size: a mean of weights above 1 is a larger rate, which the arm `grpo, 2x` has.",
        20,
        StudyBed(tasks=(("sums of 1 to 3 digits", 0),), held_out=48, rewards="binary"),
        {
            "grpo": {},
            "maxrl": {"advantages": "maxrl"},
            "grpo, 2x": {"learning_rate": 1e-3},
            "start": {"learning_rate": 0.0, "max_steps": 1},
        },
        pilots=("start",),
        methods=("advantages=maxrl",),
    ),
    Claim(
        22,
        "Self-play collapses, and a baseline for each role prevents it",
        f"SPIRAL, {arxiv('2506.24119')}",
        (
            Enumerated(
                "H1", "A role's baseline changes the variance of the gradient, and not its mean.", exact.role_baselines
            ),
            Shares(
                "H2",
                "Runs that fall by .2 chips against a coin from their best: more with `group` than with `role`.",
                Fall("against a coin", 0.2),
                "group",
                "role",
            ),
            Shares(
                "H3", "The same, `group` against `role_average`.", Fall("against a coin", 0.2), "group", "role_average"
            ),
        ),
        "Against better opponents one wins less against a coin: NashConv, which is exact too, tells these apart.",
        30,
        KuhnBed(),
        {name: {"compare": name} for name in ("group", "role", "role_average")},
        seeds=8,
        changed="Kuhn poker alone, whose equilibria are known, without tic-tac-toe. Scores are exact, from the policy's"
        " probabilities, in place of played games.",
        methods=("compare=role_average",),
    ),
)

NOT_TESTED = {
    "loss_type=bnpo": "it is the mean of a micro-batch, kept for comparison with TRL; no paper claims that it is"
    " better",
    "loss_type=dapo": "it is the baseline of claims 2, 3, 10, 11 and 13",
    "loss_type=cispo": "its claim is about ratios far from 1, which 16 rollout batches of 3 tokens do not reach",
    "loss_type=sapo": "its claim is about stability over thousands of steps",
    "loss_type=vespo": "its claim is about strongly stale samples of long completions",
    "loss_type=gmpo": "its claim is about outlying ratios within long completions",
    "loss_type=dppo_tv": "its claim is about rare tokens of large vocabularies over many updates of a batch",
    "loss_type=dppo_kl": "as dppo_tv",
    "loss_type=gpg": "on-policy it is dr_grpo's gradient but for a factor, which is a rate",
    "loss_type=dro": "its claim is about offline data, which Covey does not sample",
    "advantages=reinforce_plus_plus_baseline": "claim 5 compares REINFORCE++ and the batch's deviation, which it"
    " combines",
    "advantages=gpg": "it is a rate that follows the share of groups with a signal",
    "advantages=opo": "with completions of one length it is the group's mean",
    "advantages=otb": "its claim is a lower variance over long completions, at two passes more",
    "prompt_sampler=uniform": "it is the baseline, and no paper's",
    "prompt_sampler=pools": "its shares are the user's, for data whose difficulty changes over long runs",
    "prompt_sampler=order": "a curriculum needs more steps than an epoch of these tasks has",
}
"""Methods without a claim, and why."""


def claim(number: int) -> Claim:
    return next(one for one in CLAIMS if one.number == number)
