"""Prose of `covey explain`: sections as generators of paragraphs. Change them together with the formulas they state."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey.cli.explain.run import ExplainedRun
from covey.config.base import OnlineConfig
from covey.config.engines import SERVER_FORMATS
from covey.config.objective import BUILT_IN, CLIPPED, OVER_TOKENS
from covey.config.teacher_sources import is_server
from covey.core.distillation import WHOLE_VOCABULARY
from covey.engines.native.number_formats import FORMATS, fast_product
from covey.engines.servers.pool_file import PoolFile
from covey.runtime.waiting import CHOSEN
from covey.sizing.memory import ASSUMED_PROMPT_TOKENS
from covey.trainer.engines.rounding import AUTO, LARGEST_DIFFERENCE, LEAST_GAIN, why_slow
from covey.trainer.teacher_weights import weights_of_teachers


def count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("s", "ch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def batches(run: ExplainedRun) -> Iterator[str]:
    a, args, updates = run.algebra, run.args, run.algebra.updates_per_rollout_batch
    unequal = run.start is not None and any(size < a.num_generations for size in run.start.group_sizes.values())
    most = "at most " * unequal
    yield f"""Batch sizes count completions, not prompts. One rollout batch:
    {count(a.prompts_per_rollout_batch, "prompt")}, {most}{a.num_generations} completions each,
    {most}{a.generation_batch_size} completions in all (generation_batch_size)."""
    if unequal:
        yield """Sources have smaller groups (num_generations); the sizes below count each group as if it were full."""
    yield f"""It is cut into {count(a.steps_per_generation, "micro-batch")} (steps_per_generation) of
    {a.per_device_train_batch_size} completions in each of {count(a.world_size, "process")}."""
    if a.num_iterations > 1:
        yield f"It is trained on {a.num_iterations} times (num_iterations)."
    yield f"""One optimizer update averages over {count(a.gradient_accumulation_steps, "micro-batch")}
    (gradient_accumulation_steps), that is {a.completions_per_update} completions."""
    if updates == 1:
        yield "One optimizer update per rollout batch."
    elif updates.denominator == 1:
        yield f"{updates} optimizer updates per rollout batch."
    elif updates.numerator == 1:
        yield f"One optimizer update spans {updates.denominator} rollout batches."
    else:
        yield f"{updates} optimizer updates per rollout batch: some updates mix two rollout batches."
    yield from _epochs(run)
    if updates == 1:
        yield f"""For several smaller updates per rollout batch, make steps_per_generation a multiple of
        gradient_accumulation_steps={a.gradient_accumulation_steps}: twice as many steps give 2 updates."""
    if isinstance(args.prompt_sampler, dict) and "order" in args.prompt_sampler:
        yield f"""Every epoch goes from the smallest value of the column {args.prompt_sampler["order"]!r} to the largest
        (prompt_sampler)."""
    elif args.prompt_sampler not in ("uniform", "difficulty"):
        yield f"""Prompts come by the chance that {args.prompt_sampler!r} gives them (prompt_sampler): in an epoch some
        come several times and others not at all."""
    if args.prompt_sampler == "difficulty":
        yield f"""Prompts of intermediate difficulty come more often (prompt_sampler=difficulty): in an epoch some
        prompts come several times and others not at all. One that is always or never solved comes about
        {args.difficulty_floor:g} times as often as one that is solved half of the time."""
    if args.dynamic_sample or args.gates:
        what = "Groups without a signal are replaced before training (dynamic_sample)"
        if args.gates:
            also = "a signal (dynamic_sample), " * args.dynamic_sample
            what = f"Groups that do not pass the gates ({also}{', '.join(args.gates)}) are replaced before training"
        yield f"""{what}, in up to
        {count(args.max_resample_times, "round")} (max_resample_times): a rollout batch samples at most
        {(1 + args.max_resample_times) * a.generation_batch_size} completions and trains on
        {a.generation_batch_size}."""
    if args.stream_rewards:
        yield f"""Each group is scored as soon as it is sampled (stream_rewards): reward functions receive one group at
        a time and have {args.reward_timeout:g} seconds (reward_timeout) for each; phase/reward is the time that they
        still take after the last completion."""


def _epochs(run: ExplainedRun) -> Iterator[str]:
    a, args, updates = run.algebra, run.args, run.algebra.updates_per_rollout_batch
    prompts = (run.start.rows if run.start else None) or 0
    if prompts >= a.prompts_per_rollout_batch:
        full, left = divmod(prompts, a.prompts_per_rollout_batch)
        per_epoch = math.ceil(full * updates)
        left_over = f" ({count(left, 'prompt')} left over)" if left else ""
        yield f"""The dataset's {count(prompts, "prompt")} make {count(full, "rollout batch")} per epoch{left_over} and
        {count(per_epoch, "update")}."""
        if args.max_steps > 0:
            epochs = f"{args.max_steps / per_epoch:.3g}"
            yield f"max_steps={args.max_steps} is {epochs} epoch{'' if epochs == '1' else 's'}."
        else:
            total = math.ceil(args.num_train_epochs * per_epoch)
            yield f"num_train_epochs={args.num_train_epochs:g} makes {count(total, 'update')} in all."
    elif args.max_steps > 0:
        wanted = args.max_steps / updates
        yield f"""max_steps={args.max_steps} updates are {float(wanted):g} rollout batches,
        {float(wanted * a.prompts_per_rollout_batch):g} prompts in all."""
    else:
        per_thousand = float(1000 * updates / a.prompts_per_rollout_batch)
        yield f"""Every 1,000 prompts of the dataset are about {per_thousand:.4g} updates;
        num_train_epochs={args.num_train_epochs:g} goes through the dataset so many times. A last, incomplete rollout
        batch is left out."""


def policy(run: ExplainedRun) -> Iterator[str]:
    a, args = run.algebra, run.args
    steps = f"""(gradient_accumulation_steps={a.gradient_accumulation_steps}, steps_per_generation *
    num_iterations={a.micro_batches})"""
    if not a.on_policy:
        yield f"""Off-policy {steps}: after the first update on a rollout batch, the policy differs from the one that
        sampled it."""
        yield f"""The first update has ratios of 1; later ones differ from 1, and more so with a higher learning rate
        ({args.learning_rate:g})."""
        yield _clipping(run)
        if args.loss_type in CLIPPED and args.delta:
            yield f"With a negative advantage, ratios are cut at delta={args.delta:g}."
        yield "An additional forward pass per rollout batch computes the old log-probabilities."
    else:
        if args.max_staleness:
            yield f"""One update per rollout batch at most {steps}: its gradient is computed with the weights that
            training on the batch begins with."""
        else:
            yield f"On-policy {steps}: every gradient is computed with the weights that sampled the completions."
        can_clip = args.loss_type in CLIPPED | {"rloo"}
        yield f"""So all importance ratios are exactly 1 and nothing can clip:
        {"clip_ratio/* stays 0" if can_clip else "no bound on them acts"}. That is correct. To use clipping, set
        num_iterations above 1 or steps_per_generation above gradient_accumulation_steps."""
        if run.scores_old:
            yield """An additional forward pass per rollout batch computes the log-probabilities that the KL penalty
            needs."""
        else:
            yield ("Old log-probabilities are those of the current forward pass; no additional pass is spent on them.")
    if args.corrects_mismatch:
        yield _mismatch(run)
    if args.rejects_completions and (args.samples_elsewhere or args.correct_built_in_engine):
        bounds = f"geometric_mask_min={args.geometric_mask_min}, geometric_mask_max={args.geometric_mask_max}"
        yield f"""Completions are left out whose ratio of trainer to engine probability, in the geometric mean of their
        tokens, is outside of these bounds ({bounds}): sampling/geometric_ratio/outside is their share."""
    if args.max_staleness:
        yield from _staleness(run)


def _clipping(run: ExplainedRun) -> str:
    args, high = run.args, run.args.resolved_epsilon_high
    match args.loss_type:
        case "cispo":
            return f"Ratios above {high:g} are cut to {high:g} and keep their gradient; watch cispo_clip_ratio."
        case "sapo":
            return "sapo has no hard clip: a smooth gate closes as a ratio leaves 1."
        case "vespo":
            return """vespo has no hard clip: a smooth weight of the sequence's ratio falls off; watch
            vespo/phi_seq_mean."""
        case "dppo_tv" | "dppo_kl":
            return f"""Tokens whose probability has moved with their advantage by a divergence above {high:g}, or
            {args.epsilon:g} where it is negative, stop contributing."""
        case "gpg":
            return "gpg has no ratio and no clip: keep the updates per rollout batch few."
        case "dro":
            return "dro has no clip: a quadratic penalty holds the policy near the old one."
        case "gmpo":
            return f"""Token log-ratios are clipped at -{args.epsilon:g} and +{high:g}, then averaged over the
            completion."""
    by_token = args.loss_type != "rloo" and args.importance_sampling_level == "token"
    return f"""{"Tokens" if by_token else "Sequences"} whose ratio has left [{1 - args.epsilon:g}, {1 + high:g}] in the
    direction of their advantage stop contributing; clip_ratio/* is their fraction. A few percent is healthy, tens of
    percent mean too many or too large updates per rollout batch."""


def _mismatch(run: ExplainedRun) -> str:
    args, mode = run.args, run.args.resolved_mismatch_mode
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    bounds = " or ".join(f"{name} {bound}" for name, bound in (("below", low), ("above", high)) if bound is not None)
    treatment = "is dropped" if mode.endswith("mask") else "counts as the bound"
    beyond = f"; {bounds} it {treatment}" if bounds else ""
    passes = (
        "That reads the log-probabilities of the additional pass."
        if run.scores_old
        else "That compares log-probabilities that training computes anyway: no additional pass, except for a model"
        " with dropout."
    )
    return f"""Each {mode.partition("_")[0]} is weighed by trainer probability over engine probability ({mode}){beyond}.
    {passes} Watch sampling/*."""


def _staleness(run: ExplainedRun) -> Iterator[str]:
    args, updates = run.args, run.algebra.updates_per_rollout_batch
    yield f"""Async rollouts (max_staleness={args.max_staleness}): the weights that sample are up to
    {count(args.max_staleness, "optimizer step")} older than those that training on a rollout batch begins with."""
    in_flight = int(args.max_staleness / updates)
    if updates > args.max_staleness:
        yield f"""A rollout batch feeds {updates} updates, so the next is sampled only during the last
        {count(args.max_staleness, "update")} of them; max_staleness={math.ceil(updates)} would overlap them all."""
    elif in_flight == 1:
        yield "While one rollout batch is trained on, the next one is sampled."
    else:
        yield f"While one rollout batch is trained on, up to {in_flight} more are sampled."
    corrected = "The ratio of trainer to engine probability corrects for the older weights."
    if not args.corrects_mismatch:
        yield "Nothing corrects for the older weights (vllm_importance_sampling_correction=False)."
    elif args.resolved_mismatch_mode.startswith("sequence"):
        yield f"""{corrected} Ratios of whole sequences soon leave their bounds;
        vllm_importance_sampling_mode=token_truncate keeps more. sampling/importance_sampling_ratio/outside is the
        fraction that is lost."""
    else:
        yield corrected


def loss(run: ExplainedRun) -> Iterator[str]:
    args = run.args
    if run.rewarded:
        yield from _of_rewards(run)
    else:
        yield """There are no rewards: every advantage is 0, and the policy learns from its teacher alone. teacher/kl is
        what should fall."""
    if args.beta == 0:
        yield "beta=0: no KL penalty, no reference model in memory, no kl metric."
    else:
        where = "subtracted from the reward" if args.penalises_reward else f"added to the loss ({args.kl_estimator})"
        yield f"""beta={args.beta:g}: {args.beta:g} * KL to the reference model is {where}. kl starts at 0. beta=0
        removes the penalty and the reference model."""
    yield from _teachers(run)
    yield from _supervised(args)
    if args.beta and args.sync_ref_model:
        yield f"The reference moves towards the policy every {args.ref_model_sync_steps} updates."
    if args.max_completion_length is None:
        yield "Completions end by themselves or when the context is full."
    elif args.mask_truncated_completions:
        yield f"""Completions cut off at {args.max_completion_length} tokens are left out of the loss, kl and
        clip_ratio. If all of an update are cut off, there is nothing to average: the loss is 0 and kl is not logged.
        Keep completions/clipped_ratio well below 1."""
    else:
        yield f"""Completions cut off at {args.max_completion_length} tokens are trained on like others;
        completions/clipped_ratio is their fraction. mask_truncated_completions leaves them out."""
    if args.entropy_coef or args.use_adaptive_entropy:
        yield "The entropy bonus is subtracted from the loss; policy_loss is without it."


def _of_rewards(run: ExplainedRun) -> Iterator[str]:
    """The values of the loss, and the completions that a completion is compared with."""
    a, args = run.algebra, run.args
    yield _values_of_loss(run)
    if args.teachers and args.teacher_loss == "divergence" and args.teacher_coef:
        yield """The divergence from the teacher is added to it, so the loss is above 0 and falls as the policy
        approaches the teacher. teacher/loss is this part alone."""
    else:
        yield "So a loss that stays around 0 and does not fall is normal here; `reward` is what should rise."
    if not a.on_policy:
        yield "Within a rollout batch the loss falls below 0 as the policy moves towards the better completions."
    if args.beta and not args.penalises_reward:
        yield f"The KL term adds {args.beta:g} * kl, so over time the loss rises slowly."
    if args.method == "grpo" and args.scale_rewards == "group" and a.num_generations == 2:
        yield """With groups of 2 scaled by their own standard deviation, advantages are always +0.71 and -0.71 (or 0 on
        a tie), however far apart the rewards are. scale_rewards=none keeps the distance."""
    if args.compare != "group":
        yield from _comparison(args.compare, args.role_decay)
    if args.advantages == "reinforce_plus_plus":
        yield "The baseline is the whole batch, so a group whose rewards are all equal teaches too."
    elif args.compare != "role_average":  # which has no groups
        yield """A group whose rewards are all equal has advantages of 0 and teaches nothing; frac_reward_zero_std is
        the fraction of such groups. Near 1, the task is too hard, too easy, or the reward too coarse."""


def _supervised(args: OnlineConfig) -> Iterator[str]:
    """Supervised terms, each with its denominator."""
    if isinstance(args.supervised_roles, dict):
        roles = ", ".join(f"{weight:g} * of {role}" for role, weight in args.supervised_roles.items())
        yield f"""The cross-entropy of what others wrote in rollouts ({roles}) is a term of its own (supervised/loss),
        averaged over these tokens of an update as loss_type={args.loss_type} averages: others are not counted."""
    if args.demonstrations is not None:
        coef = f"{args.demonstrations_coef:g} * "
        if args.demonstrations_schedule is not None:
            coef = "by its schedule μ, and the rewards' part by 1 - μ: "
        yield f"""Demonstrations: {coef}the cross-entropy of {args.demonstrations_per_step} completions of
        {args.demonstrations} in each update is a term of its own (demonstrations/loss), averaged over their tokens as
        loss_type={args.loss_type} averages. They run with the update's micro-batches and take memory as rollouts do."""


def _comparison(compare: Any, decay: float) -> Iterator[str]:
    """Rollouts that a rollout is compared with; `compare` is not `group`."""
    with_whom = {
        "group": "all of its prompt",
        "role": "those of its prompt that were played in the same role",
        "episode": "those that were played in the same role of the same game",
    }
    if compare == "role_average":
        yield f"""A rollout is compared with the running mean of the rewards of its environment and role, which a new
        reward moves by {1 - decay:.3g} of its distance (role_decay={decay:g}). The first rollout batch has no mean yet:
        its advantages are its rewards."""
    elif isinstance(compare, str):
        yield f"A rollout is compared with {with_whom[compare]} (compare={compare!r})."
    else:
        for role, by in compare.items():
            yield f"A rollout of the role {role!r} is compared with {with_whom[by]} (compare)."
        yield f"One of any other role is compared with {with_whom['role']}."


def _teachers(run: ExplainedRun) -> Iterator[str]:
    """Terms of teachers, each with its denominator, and their cost."""
    args = run.args
    kinds = args.teachers
    if not kinds:
        return
    whom = ", ".join(f"{name} ({source})" if name else str(source) for name, source in kinds.items())
    coef = f"{args.teacher_coef:g}" + (" times its schedule" if args.teacher_schedule else "")
    if args.teacher_loss == "advantage":
        yield f"""Teacher {whom}: {coef} * (its log-prob - the policy's) is added to the advantage of every token that
        has a teacher; loss_type={args.loss_type} averages both together."""
    else:
        unit = "those tokens" if args.loss_type in OVER_TOKENS else "rollouts that have such tokens"
        yield f"""Teacher {whom}: {coef} * the divergence from it is a term of its own, averaged over the tokens of an
        update that have a teacher, as loss_type={args.loss_type} averages: its denominator counts {unit} alone."""
    if args.teacher_prompt or args.teacher_prompt_template:
        what = f"column {args.teacher_prompt!r}" if args.teacher_prompt else "teacher_prompt_template"
        yield f"""It reads the prompt of {what}, then the completion. A row without it has no teacher
        (teacher/fraction)."""
    copies = [source for source in kinds.values() if source in ("start", "follower")]
    adapter = run.model.peft is not None
    whole = "the adapter's weights" if adapter else "a copy of the policy's weights"
    memory = [one.said for one in weights_of_teachers(args, run.policy_weights)]
    memory += [
        "none for 'start' with a new adapter" if adapter and source == "start" else f"{whole} for {source!r}"
        for source in copies
    ]
    if args.teacher_loss == "divergence" and args.teacher_top_k == WHOLE_VOCABULARY:
        memory.append("its last hidden state of every token of a rollout batch")
        yield """The divergence is over the whole vocabulary (teacher_top_k=-1): the loss multiplies by the teacher's
        head once more forward and once backward, a few tokens at a time."""
    if any(not is_server(source) for source in kinds.values()):
        yield f"""Each teacher in this process costs one forward pass over its rollouts, without a gradient, once per
        rollout batch (phase/teacher), and memory: {", ".join(memory) or "none"}."""
    for source in filter(is_server, kinds.values()):
        yield from _served_teacher(args, source)


def _served_teacher(args: OnlineConfig, source: str) -> Iterator[str]:
    """Requests to a teacher's servers, their size, and what is checked when the trainer is made."""
    named = args.teacher_top_k if args.teacher_loss == "divergence" else 0
    bytes_each = 75 * (named + 1)  # of JSON for a log-prob
    yield f"""The teacher at {source} scores prompts and completions in requests of one rollout, at most
    {args.teacher_server_concurrency} at once at a server, and takes none of this machine's memory. An answer has about
    {bytes_each:,} bytes a token. Tokenizer{", number of tokens named at a position" * (named > 0)} and temperature are
    compared when the trainer is made. A server that dies is waited for (teacher_server_timeout,
    {args.teacher_server_timeout:g} s), and the run ends with the last error where none comes back."""


def _values_of_loss(run: ExplainedRun) -> str:
    kind = run.args.loss_type
    if kind in ("cispo", "vespo"):
        return f"""{kind} logs advantage times log-probability, so its value follows how probable completions are; its
        size and sign mean little. Watch `reward`."""
    if kind not in BUILT_IN:
        return f"The values of {kind!r}, a registered loss, are not known here. Watch `reward`."
    centred = "with ratios of 1 it is minus the mean advantage, and the advantages of a group add up to 0"
    learns = "Its gradient is not 0, and the model learns."
    if not run.algebra.on_policy:
        return f"""The loss starts near 0 on each rollout batch and may be negative: {centred} (an update trains on some
        of the groups). {learns}"""
    if kind in CLIPPED - {"grpo"}:
        return f"""The loss is close to 0 and may be negative: {centred} over completions, though not over tokens: the
        rest shows whether longer or shorter completions did better. {learns}"""
    up_to = "the difference of sapo's two temperatures" if kind == "sapo" else "rounding"
    return f"The loss is 0 up to {up_to}: {centred}. {learns}"


def tokens(run: ExplainedRun) -> Iterator[str]:
    a, args, length = run.algebra, run.args, run.args.max_completion_length
    if length is None:
        yield "max_completion_length is unset: completions run until the model's context is full, so there is no bound."
    else:
        trained = a.completions_per_update * length
        known = run.prompt_tokens != ASSUMED_PROMPT_TOKENS or (run.start and run.start.prompt_tokens)
        assumed = "" if known else " (assumed; `--prompt_tokens` sets another length)"
        yield f"""A rollout batch samples at most {a.generation_batch_size * length:,} tokens ({a.generation_batch_size}
        completions of up to {length})."""
        yield f"""An update trains on at most {trained:,} completion tokens, and with prompts of {run.prompt_tokens}
        tokens{assumed} reads at most {trained + a.completions_per_update * run.prompt_tokens:,} in all."""
    if args.speculative_reuse:
        rule = (
            "that differs from a new sample with the same seed. So no completion depends on its draft; for that, a "
            "prompt keeps its seeds from epoch to epoch."
            if args.speculative_reuse == "exact"
            else "that is rejected. A token stays with probability min(1, lenience * p_now / p_then), with "
            f"speculative_lenience={args.speculative_lenience:g}; tokens that stay are slightly off-policy, which "
            "nothing corrects."
        )
        yield f"""When a prompt comes again, its last completions are drafts
        (speculative_reuse={args.speculative_reuse}): one forward pass checks them, and decoding begins at the first
        token {rule} sampling/reused_token_fraction is the fraction of tokens that were not decoded."""


def sampling(run: ExplainedRun) -> Iterator[str]:
    if run.args.use_sglang:
        yield from _sglang(run)
    elif run.args.use_vllm and run.args.vllm_mode == "server":
        yield from _vllm(run)
    if run.args.engine_dtype is not None:
        yield from _rounding(run)


def _rounding(run: ExplainedRun) -> Iterator[str]:
    """Sentences on `engine_dtype`, and on whether it pays on this machine."""
    args, name, here = run.args, str(run.args.engine_dtype), run.device == run.args.device.type
    if args.samples_elsewhere and name in SERVER_FORMATS:
        flag, value = SERVER_FORMATS[name]
        starts = args.vllm_mode == "colocate" if args.use_vllm else not (args.sglang_urls or args.server_pool_file)
        if starts:
            engine = "vLLM in this process" if args.use_vllm else "The SGLang server"
            yield f"{engine} is started with {flag}={value} (engine_dtype={name!r})."
    if not args.rounds_engine:
        return
    if name == AUTO:
        fast = [one for one in FORMATS if fast_product(run.device, one) is not None]
        if not here:
            yield f"A decoding step is measured where the run starts (engine_dtype={name!r})."
        elif fast:
            yield f"""When the run starts, a decoding step of the model is measured as it is and with weights and inputs
            rounded to {", ".join(fast)} (engine_dtype={name!r}). The fastest format is taken with which a step gets
            at least {LEAST_GAIN:g} times as fast and log-probabilities of sampled tokens differ by at most
            {LARGEST_DIFFERENCE:g} on average; else none."""
        else:
            reasons = " ".join(f"{one}: {why_slow(run.device, one)}" for one in FORMATS)
            yield f"""engine_dtype={name!r} changes nothing on this machine, which multiplies no narrower format faster.
            {reasons}"""
            return
    else:
        yield f"""The built-in engine rounds weights and inputs of linear layers to {name}, once for each rollout batch
        (engine_dtype)."""
        if here and (slow := why_slow(run.device, name)):
            yield f"That does not make decoding faster here: {slow}"
    yield """Log-probabilities of samples are those of the rounded policy, and the loss is corrected for the difference;
    sampling/sampling_logp_difference/mean is its size. Evaluations sample from the rounded policy, too."""


def _listed(args: OnlineConfig, urls: list[str]) -> tuple[list[str], str]:
    """URLs of servers as they are known now, and where more may come from."""
    if args.server_pool_file is None:
        return urls, ""
    try:
        urls = [server.url for server in PoolFile(Path(args.server_pool_file)).servers()]
    except ValueError as error:
        return [], f" ({error})"
    return (
        urls,
        f""" (listed in {args.server_pool_file}, which is read again before each rollout batch: servers that
        are added get all weights and take part from then on, those that are removed get no more requests)""",
    )


def _vllm(run: ExplainedRun) -> Iterator[str]:
    args, size = run.args, run.algebra.generation_batch_size
    urls, origin = _listed(args, args.vllm_urls)
    at_once = min(args.vllm_server_concurrency, math.ceil(size / max(len(urls), 1)))
    yield f"""Completions come from {count(len(urls), "vLLM server")}: {", ".join(urls)}{origin}. A rollout batch
    requests {size}; each server gets about {at_once} at once, at most {args.vllm_server_concurrency} at a time
    (vllm_server_concurrency)."""
    yield f"""Each server is sent the weights before a rollout batch whenever they have changed; running completions are
    continued with the new ones. That may take {args.vllm_server_sync_timeout:g} s (vllm_server_sync_timeout)."""
    port = f"port {args.vllm_group_port}" if args.vllm_group_port else "a free port"
    group = f"over a group that servers join by connecting to this machine at {port} (vllm_group_port)"
    folder = args.vllm_weight_folder or "a temporary folder, which servers on other machines do not see"
    disk = f"as files in {folder} (vllm_weight_folder)"
    transfer = {
        "auto": f"{group}, or, if a server was not started for that, {disk}",
        "group": group,
        "disk": disk,
    }[args.vllm_weight_transfer]
    yield f"The weights are sent {transfer} (vllm_weight_transfer={args.vllm_weight_transfer!r})."
    if args.vllm_weight_differences and args.vllm_weight_transfer != "disk":
        yield """Over a group, servers that hold the last update are sent the positions and values of the numbers that
        changed, or a part of a tensor whole where that is shorter (vllm_weight_differences=True); sync/bytes and
        sync/changed tell how much. Servers that are new, were restarted or hold other bits are sent everything. The
        trainer's first process and each server keep a copy of the weights in host memory, as large as all weights that
        are sent."""
    elif args.vllm_weight_transfer != "disk":
        yield """Every update sends all weights; vllm_weight_differences=True sends what changed, for one more copy of
        the weights in host memory here and at each server."""
    yield f"""If a server fails, the others sample its prompts; it is used again once it is up and has the weights. If
    all have failed, the run waits {args.vllm_server_timeout:g} s for one (vllm_server_timeout) and then ends; a prompt
    may take {args.vllm_server_request_timeout:g} s (vllm_server_request_timeout)."""
    if size > args.vllm_server_concurrency * len(urls):
        yield """A rollout batch has more completions than the servers get at once: raise vllm_server_concurrency if
        they idle."""
    if args.temperature != 1.0:
        yield f"""At temperature {args.temperature:g} the servers must report log-probabilities of the distribution that
        they sample from: --logprobs-mode processed_logprobs, which `covey vllm-serve` sets."""


def _sglang(run: ExplainedRun) -> Iterator[str]:
    args, size = run.args, run.algebra.generation_batch_size
    urls, more = _listed(args, args.sglang_urls)
    if urls or more:
        origin = f"{count(len(urls), 'SGLang server')}: {', '.join(urls)}{more}."
    else:
        origin = f"""an SGLang server that the run starts on {args.sglang_device} and ends with (sglang_device); its log
        is sglang-server.log in output_dir."""
    yield f"""Completions come from {origin} A rollout batch requests {size}; {"a" if urls else "the"} server gets at
    most {args.sglang_concurrency} at a time (sglang_concurrency)."""
    yield f"""Before a rollout batch whose weights have changed, servers get the new ones by
    sglang_weight_transfer={args.sglang_weight_transfer!r}, within {args.sglang_sync_timeout:g} s
    (sglang_sync_timeout). They are always sent whole: SGLang takes no differences."""
    yield f"""If a server fails, it is used again once it is up and has the weights. If all have failed, the run waits
    {args.sglang_server_timeout:g} s for one (sglang_server_timeout) and then ends."""


def threads(run: ExplainedRun) -> Iterator[str]:
    """Waiting of threads, for a run on a CPU."""
    if run.device == "cpu" and run.cluster is None:
        yield f"Between two operations threads wait {CHOSEN}."
