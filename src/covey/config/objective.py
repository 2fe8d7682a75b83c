"""Fields and rules about the objective: rewards, loss, KL penalty, entropy."""

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

from covey.algorithms import LOSS_TYPES
from covey.algorithms.comparison import ROLE_AVERAGE
from covey.config.choosing import BY_ADVANTAGES, gates_among, unfiltered
from covey.config.fields import Args, Limits, describe_fields, limited
from covey.config.messages import ignored
from covey.core.credit import COMPARED_WITH
from covey.core.findings import Finding
from covey.core.losses import KL_ESTIMATORS, RATIO_LEVELS


@dataclass
class RewardFields:
    """From reward functions to advantages."""

    reward_weights: list[float] | None = None
    """Weight of each reward function, in their order. Unset: all 1."""
    reward_timeout: float = limited(300.0, gt=0, le=10**9, advice="It is in seconds; 300 is the default.")
    """Seconds after which a reward function that has not answered counts as failed."""
    reward_isolation: str = limited("thread", choices=("thread", "process"))
    """Where reward functions run: `thread`, in the trainer's process; `process`, each in a process of its own, which is
    killed when it crashes, is late, or needs more than 4 GiB or 64 processes. `covey.isolated` marks a single one."""
    stream_rewards: bool = False
    """Score each group of completions as soon as it is sampled, while other groups are still being sampled: functions
    are called group by group, on threads of their own. Off: each is called once per rollout batch, with all
    completions. Functions marked `per_completion` score every rollout when it ends in either case."""
    multi_objective_aggregation: str = limited(
        "sum_then_normalize", choices=("sum_then_normalize", "normalize_then_sum")
    )
    """Order of summing several rewards and normalizing: `sum_then_normalize` turns the weighted sum of rewards into
    advantages; `normalize_then_sum` turns each reward into advantages first and sums these (GDPO, arXiv 2601.05242)."""
    scale_rewards: str = limited("group", choices=("group", "batch", "none"))
    """Divisor of advantages: the standard deviation of the `group`, of the whole `batch`, or `none`. True means
    `group`, False `none`."""
    advantages: str | None = None
    """Formula of the advantages, instead of the method's own: reinforce_plus_plus, reinforce_plus_plus_baseline, maxrl,
    gpg, opo, pass_at_k, otb, one registered with `covey.algorithms.register_advantages`, or path/to/file.py:name. It
    replaces the advantages of whole completions; rewards of steps are compared as `step_baseline` says."""
    compare: dict | str | None = "group"
    """Rollouts that a rollout's reward is compared with: `group`, all of its prompt; `role`, those of its prompt that
    were played in the same role; `episode`, those of the same role and game; `role_average`, no other rollout, but a
    running mean of the rewards of its environment and role (SPIRAL, arXiv 2506.24119). Or a dict (or JSON) that gives
    roles one of the first three, as in `{"proposer": "role", "solver": "episode"}`; roles that it does not name are
    compared by `role`."""
    role_decay: float = limited(0.95, ge=0, le=1 - 1e-9, advice="0.95 is usual; 0 compares with the last reward alone.")
    """compare=role_average: decay d of the running mean, b = d * b + (1 - d) * reward."""
    pass_at_k: int = limited(4, ge=1)
    """advantages=pass_at_k: k, the completions in a group of which the best one counts."""
    process_weight: float = limited(1.0, ge=0, finite=True, advice="1.0 is the default; 0 leaves that part out.")
    """Weight of the advantages of steps, for reward functions that reward steps or turns."""
    outcome_weight: float = limited(1.0, ge=0, finite=True, advice="1.0 is the default; 0 leaves that part out.")
    """Weight of the advantages of whole completions."""
    step_discount: float = limited(1.0, ge=0, le=1, advice="1.0 counts every later step in full.")
    """Discount per step of later steps' advantages: the tokens of a step get the step's own advantage, plus
    step_discount times the next step's, plus step_discount squared times the advantage of the step after, and so on."""
    step_baseline: str = limited("group", choices=COMPARED_WITH)
    """Steps that a step's reward is compared with: `group`, all steps of the group (RLOO: of the other
    completions); `turn`, steps of the same number (first steps with first steps)."""


@dataclass
class KLFields:
    """The KL penalty and its reference model."""

    beta: float = limited(0.0, ge=0, finite=True, advice="0 switches the KL penalty off; 0.001 to 0.1 are usual.")
    """Weight of the KL penalty towards the reference model; 0 means that no reference model is loaded."""
    kl_in_reward: bool = False
    """Subtract the KL penalty of the whole completion (k1, with weight `beta`) from its reward, as RLOO always does,
    instead of adding it to the loss."""
    kl_estimator: str = limited("k3", choices=tuple(KL_ESTIMATORS))
    """Estimator of KL(policy || reference) from the sampled tokens: `k1` (log ratio), `k2` (half its square), `k3`
    (unbiased, never negative). See http://joschu.net/blog/kl-approx.html."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the importance ratio, so that its gradient is unbiased off-policy (DeepSeek-V3.2, arXiv
    2512.02556)."""
    sync_ref_model: bool = False
    """Move the reference model towards the policy every `ref_model_sync_steps` updates (TR-DPO, arXiv 2404.09656)."""
    ref_model_mixup_alpha: float = limited(0.6, gt=0, le=1, advice="0.6 is usual.")
    """With `sync_ref_model`: reference = (1 - alpha) * reference + alpha * policy."""
    ref_model_sync_steps: int = limited(512, ge=1)
    """With `sync_ref_model`: optimizer updates from one move to the next."""


@dataclass
class LossFields:
    """The surrogate, its ratio and its average."""

    loss_type: str = "dapo"
    """Loss: grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo, gmpo, dppo_tv, dppo_kl, gpg, dro, kl_cov,
    clip_cov, one registered with `covey.algorithms.register_loss`, or path/to/file.py:name."""
    epsilon: float = 0.2
    """Clipping: how far below 1 the importance ratio may fall. gmpo bounds the log ratio, at -epsilon."""
    epsilon_high: float | None = limited(None, ge=0, advice="0.2 to 0.28 are usual; with cispo 5.")
    """Clipping: how far above 1 the importance ratio may rise. Unset: the same as `epsilon`. With gmpo the bound of the
    log ratio; with cispo the largest ratio itself (unset: 5)."""
    delta: float | None = None
    """Largest importance ratio of completions with a negative advantage (two-sided clipping, INTELLECT-2, arXiv
    2505.07291); unset: no bound."""
    importance_sampling_level: str = limited("token", choices=tuple(RATIO_LEVELS))
    """Importance ratio of each `token`, of the whole `sequence` (GSPO), or `sequence_token` (GSPO-token)."""
    sapo_temperature_neg: float = limited(1.05, gt=0, finite=True, advice="1.05 is the default.")
    """sapo: temperature of the soft gate that replaces clipping, for negative advantages; a larger one closes it
    sooner."""
    sapo_temperature_pos: float = limited(1.0, gt=0, finite=True, advice="1.0 is the default.")
    """sapo: temperature of the soft gate that replaces clipping, for positive advantages; a larger one closes it
    sooner."""
    vespo_k_pos: float = 2.0
    """vespo: k in exp(λ + k log w - λ w), the weight of a sequence with importance ratio w; for positive advantages."""
    vespo_lambda_pos: float = 3.0
    """vespo: λ in exp(λ + k log w - λ w), for positive advantages."""
    vespo_k_neg: float = 3.0
    """vespo: k in exp(λ + k log w - λ w), the weight of a sequence with importance ratio w; for negative advantages."""
    vespo_lambda_neg: float = 2.0
    """vespo: λ in exp(λ + k log w - λ w), for negative advantages."""
    dro_beta: float = limited(0.05, ge=0, finite=True)
    """dro: weight of the quadratic penalty on the log ratio to the old policy."""
    cov_share: float = limited(0.0002, gt=0, le=1, advice="0.0002 to 0.002 are usual.")
    """kl_cov, clip_cov: share of the step's tokens that are selected by the covariance of their log-prob and advantage;
    one token at least."""
    kl_cov_coef: float = limited(1.0, ge=0, finite=True)
    """kl_cov: weight of the KL penalty on the selected tokens."""
    clip_cov_low: float = 1.0
    """clip_cov: smallest covariance of a token that may be selected."""
    clip_cov_high: float = 5.0
    """clip_cov: largest covariance of a token that may be selected."""
    normalize_over: str = limited("rollout", choices=("rollout", "strand", "turn"))
    """Average within a rollout: over its tokens (`rollout`); or over the tokens of each `turn`, or of each `strand`
    (one of the histories that a program has kept), and then over turns or strands. The rollout's weight in the batch
    stays the same."""
    mask_truncated_completions: bool = False
    """Leave completions that reached the length limit out of the loss (DAPO)."""
    off_policy_mask_threshold: float | None = limited(None, ge=0, advice="0.1 to 1 are usual.")
    """Leave out completions with a negative advantage whose log-probs under the sampling policy exceed those under the
    current one by more than this in the mean (DeepSeek-V3.2); unset keeps all."""
    top_entropy_quantile: float = limited(1.0, gt=0, le=1, advice="1.0 trains on all tokens, 0.2 on a fifth of them.")
    """Train only on this share of the tokens, those of highest entropy; 1 trains on all."""


@dataclass
class EntropyFields:
    """The entropy bonus."""

    entropy_coef: float = limited(0.0, ge=0, finite=True, advice="Below 0 it would punish exploration.")
    """Weight of the entropy bonus; 0 switches it off. With `use_adaptive_entropy`, the initial weight."""
    use_adaptive_entropy: bool = False
    """Adapt the weight after every update: raise it after an entropy at or below `entropy_target`, lower it otherwise.
    The bonus acts only while the entropy is at or below the target (Skywork-OR1, arXiv 2505.22312, section 4)."""
    entropy_coef_min: float = limited(0.0, ge=0)
    """Adaptive: smallest weight."""
    entropy_coef_max: float = 1.0
    """Adaptive: largest weight."""
    entropy_coef_delta: float = 0.005
    """Adaptive: change of the weight after each update."""
    entropy_target: float = 0.2
    """Adaptive: entropy, in nats per token, that the bonus keeps the policy above."""


describe_fields(__name__)

# ---- rules -----------------------------------------------------------------------------------------------------------

CLIPPED = frozenset(name for name, row in LOSS_TYPES.items() if row.reads and "delta" in row.reads)
BUILT_IN = frozenset(name for name, row in LOSS_TYPES.items() if row.reads is not None)
OVER_TOKENS = frozenset({"bnpo", "dr_grpo", "dapo", "cispo"})  # average token losses, whatever the completion
LOSS_OPTIONS = frozenset().union(*(LOSS_TYPES[name].reads or () for name in BUILT_IN))


def loss_type_suits_the_method(args: Args) -> Iterator[Finding]:
    if args.method == "grpo" and args.loss_type == "rloo":
        fix = "use RLOOConfig and RLOOTrainer (`covey rloo`)."
        yield Finding.error("loss-method", "loss_type='rloo' belongs to RLOO:", fix)
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        evidence = "loss_type='dr_grpo' divides by max_completion_length, which is None."
        yield Finding.error("loss-length", evidence, "Set it, or use loss_type='dapo'.")


def advantages_scale_themselves(args: Args) -> Iterator[Finding]:
    if args.advantages != "pass_at_k":
        yield from ignored(args, ["pass_at_k"], f"advantages is {args.advantages!r}")
    if args.advantages is None:
        return
    if args.multi_objective_aggregation == "normalize_then_sum":
        yield Finding.error(
            "advantages-twice",
            f"advantages={args.advantages!r} and multi_objective_aggregation={args.multi_objective_aggregation!r} are"
            " two ways from rewards to advantages: leave one of them out.",
        )
    own = "normalize_advantages" if args.method == "rloo" else "scale_rewards"
    yield from ignored(args, [own], f"advantages={args.advantages!r} scales them itself")
    shares_gradient = args.importance_sampling_level == "sequence" and not LOSS_TYPES[args.loss_type].credits_tokens
    if args.advantages == "otb" and (args.loss_type == "gmpo" or shares_gradient):
        yield Finding.error(
            "advantages-tokens",
            "advantages='otb' gives each token an advantage of its own, but this loss gives all tokens of a completion"
            " the same (loss_type='gmpo', or importance_sampling_level='sequence').",
            "Choose another.",
        )
    if args.advantages == "pass_at_k" and args.pass_at_k > (args.num_generations or 0):
        evidence = f"pass_at_k={args.pass_at_k} must be at most num_generations={args.num_generations}."
        yield Finding.error("setting-range", evidence)


def comparison_has_what_it_reads(args: Args) -> Iterator[Finding]:
    if args.compare != ROLE_AVERAGE:
        yield from ignored(args, ["role_decay"], f"compare is {args.compare!r}")
        return
    others = {"advantages": None, "multi_objective_aggregation": "sum_then_normalize"}
    for name in (name for name, default in others.items() if getattr(args, name) != default):
        yield Finding.error(
            "advantages-twice",
            f"compare='role_average' and {name}={getattr(args, name)!r} are two ways from rewards to advantages:",
            "leave one of them out.",
        )
    if args.dynamic_sample:
        yield unfiltered("dynamic_sample=True")
    if gates_among(args.gates, BY_ADVANTAGES):
        yield unfiltered(f"gates={args.gates!r}")


def clipping_leaves_a_range(args: Args) -> Iterator[Finding]:
    """1 - epsilon and 1 + epsilon_high enclose 1, and delta lies beyond them."""
    if args.loss_type == "gmpo":  # clips between exp(-epsilon) and exp(epsilon_high)
        yield from Limits(ge=0, advice="0.4 is usual for gmpo.").check("epsilon", args.epsilon)
    elif not 0 <= args.epsilon < 1:
        evidence = f"epsilon={args.epsilon} is out of range: it must be at least 0 and below 1."
        yield Finding.error("setting-range", evidence, "0.2 is usual.")
    if args.delta is not None and args.loss_type in CLIPPED and args.delta <= 1 + args.resolved_epsilon_high:
        yield Finding.error(
            "clip-range",
            f"delta={args.delta} must be larger than 1 + epsilon_high = {1 + args.resolved_epsilon_high:g}: it bounds "
            "the ratios that ordinary clipping lets through when the advantage is negative.",
            "2 to 4 are usual.",
        )


def cispo_has_its_cap(args: Args) -> Iterator[Finding]:
    if args.loss_type != "cispo":
        return
    if args.epsilon_high is None:
        yield Finding.warning(
            "clip-cap",
            f"loss_type='cispo' needs a largest ratio and `epsilon_high` is not set: {args.resolved_epsilon_high:g} is "
            "used.",
        )
    elif args.epsilon_high <= 1:
        yield Finding.warning(
            "clip-cap",
            f"epsilon_high={args.epsilon_high} with loss_type='cispo' is the largest ratio itself, not a distance from "
            "1: it shrinks every gradient.",
            "5 is usual.",
        )


def loss_options_are_read(args: Args) -> Iterator[Finding]:
    """Options of a loss are read by the chosen one; on-policy, every ratio is 1 and no bound acts."""
    row = LOSS_TYPES[args.loss_type]
    if row.reads is not None:
        yield from ignored(args, sorted(LOSS_OPTIONS - row.reads), f"loss_type={args.loss_type!r} does not read it")
    if row.ratio_level is not None:
        yield from ignored(args, ["importance_sampling_level"], f"loss_type={args.loss_type!r} prescribes its own")
    elif args.importance_sampling_level != "token" and args.loss_type in OVER_TOKENS:
        yield Finding.warning(
            "ratio-length",
            f"importance_sampling_level={args.importance_sampling_level!r} with loss_type={args.loss_type!r}: all"
            " tokens of a completion have one ratio, and this loss averages over tokens, so a completion counts by its"
            " length.",
            "GSPO's loss_type='grpo' counts completions alike.",
        )
    on_policy = args.algebra().on_policy
    if on_policy and row.reads is not None and args.loss_type != "cispo":  # its cap is no distance from 1
        bounds = [name for name in ("epsilon", "epsilon_high", "delta") if name in row.reads]
        yield from ignored(args, bounds, "this run is on-policy, so every importance ratio is 1; see `covey explain`")
        if args.loss_type == "kl_cov":
            yield Finding.warning(
                "loss-on-policy",
                "loss_type='kl_cov' punishes nothing in this run: it is on-policy, so every importance ratio is 1.",
                "Set num_iterations or steps_per_generation so that a rollout batch is trained on more than once.",
            )
    if args.loss_type == "clip_cov" and args.clip_cov_low >= args.clip_cov_high:
        evidence = f"clip_cov_low={args.clip_cov_low} must be below clip_cov_high={args.clip_cov_high}."
        yield Finding.error("clip-range", evidence)
    if on_policy and not args.max_staleness:
        yield from ignored(args, ["off_policy_mask_threshold"], "this run is on-policy, so no completion is stale")


def reference_sync_needs_a_reference(args: Args) -> Iterator[Finding]:
    if args.sync_ref_model and args.beta == 0:
        evidence = "sync_ref_model=True needs a reference model, and beta=0 loads none."
        yield Finding.error("reference-missing", evidence, "Set beta above 0 (0.04, say) or sync_ref_model=False.")
    if not args.sync_ref_model:
        yield from ignored(args, ["ref_model_mixup_alpha", "ref_model_sync_steps"], "sync_ref_model is False")


def kl_options_are_read(args: Args) -> Iterator[Finding]:
    """Options of the KL term need a KL term in the loss; in RLOO's reward only k1, summed, is the penalty."""
    if args.method == "rloo" and args.kl_estimator != "k1":
        yield Finding.error(
            "kl-form",
            f"kl_estimator={args.kl_estimator!r} with RLOO: the penalty is part of the reward there, and its estimator "
            "is 'k1', the log ratio of the whole completion.",
            "Leave kl_estimator unset, or use GRPO.",
        )
    if args.beta == 0:
        names = ["kl_estimator", "use_bias_correction_kl", "kl_in_reward"]
        yield from ignored(args, names, "beta is 0, so there is no KL penalty")
    elif args.method == "rloo":
        yield from ignored(
            args, ["use_bias_correction_kl"], "RLOO's KL penalty is part of the reward and carries no gradient"
        )
        yield from ignored(args, ["kl_in_reward"], "RLOO's KL penalty always is part of the reward")
    elif args.kl_in_reward:
        names = ["kl_estimator", "use_bias_correction_kl"]
        yield from ignored(
            args, names, "with kl_in_reward the penalty is k1, summed over the completion, without a gradient"
        )
        if args.multi_objective_aggregation == "normalize_then_sum":
            evidence = "kl_in_reward=True cannot be with multi_objective_aggregation='normalize_then_sum'."
            yield Finding.error("kl-form", evidence, "Leave one of the two out.")


def entropy_controller_has_room(args: Args) -> Iterator[Finding]:
    low, high = args.entropy_coef_min, args.entropy_coef_max
    if low > high:
        yield Finding.error("entropy-range", f"entropy_coef_min={low} must not be above entropy_coef_max={high}.")
        return
    if not args.use_adaptive_entropy:
        names = ["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"]
        yield from ignored(args, names, "use_adaptive_entropy is False")
        return
    if not low <= args.entropy_coef <= high:
        yield Finding.error(
            "entropy-range",
            f"entropy_coef={args.entropy_coef}, where the adaptive weight starts, is outside "
            f"[entropy_coef_min, entropy_coef_max] = [{low}, {high}].",
        )
    if args.entropy_coef_delta <= 0 or args.entropy_target < 0:
        yield Finding.error(
            "entropy-range",
            f"use_adaptive_entropy=True needs entropy_coef_delta above 0 (is {args.entropy_coef_delta}) and "
            f"entropy_target of 0 or more (is {args.entropy_target}).",
        )


def rewards_carry_weight(args: Args) -> Iterator[Finding]:
    weights = args.reward_weights
    if weights is None:
        return
    numbers = isinstance(weights, list | tuple) and all(isinstance(weight, Real) for weight in weights)
    if not numbers or not all(abs(weight) < 1e18 for weight in weights) or not any(weights):
        yield Finding.error(
            "reward-weights",
            f"reward_weights={weights!r}: give a list of one finite number per reward function, at least one of them "
            "not 0, or leave it unset to weigh all alike.",
        )


def steps_or_outcomes_carry_weight(args: Args) -> Iterator[Finding]:
    if args.process_weight == args.outcome_weight == 0:
        evidence = "process_weight=0 and outcome_weight=0 leave no advantage to learn from: set one of them above 0."
        yield Finding.error("nothing-trained", evidence)
    if args.method == "rloo" and args.outcome_weight == 0 < args.beta:
        yield Finding.warning(
            "kl-dropped",
            f"outcome_weight=0 leaves out RLOO's KL penalty (beta={args.beta}), which is part of the outcome.",
            "Set outcome_weight above 0, or beta=0 to save the reference model.",
        )


def scaling_is_read(args: Args) -> Iterator[Finding]:
    if args.method == "rloo":
        names = ["scale_rewards", "multi_objective_aggregation"]
        yield from ignored(
            args, names, "RLOO's baseline is the mean of the other completions; see normalize_advantages"
        )
    elif args.multi_objective_aggregation == "normalize_then_sum":
        yield from ignored(
            args, ["scale_rewards"], "multi_objective_aggregation='normalize_then_sum' scales each reward itself"
        )
