"""Updates: their size on a few completions, the KL penalty, the engine's log-probs, memory and time."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import group_relative, leave_one_out
from covey.core.batch import TrainBatch, expand
from covey.core.engine import traits_of
from covey.core.findings import Effect, Finding
from covey.core.records import FinishReason, Plan
from covey.core.routes import are_known, differing
from covey.core.routing import routing_of
from covey.policy.loading import has_dropout
from covey.trainer.checks import check_rounding
from covey.trainer.engine_check.parity import Comparison, likely_cause, no_numbers
from covey_tools.doctor.examined import ExaminedRun, SampleBatch, quiet

MOST_TOKENS, FEW = 3000, 8  # of completions in a trial update; completions of a model that is not small
SHORT = 50  # steps that a run is taken to have at least: one to try things out is no fault
LITTLE = 0.02  # nats a token over a whole run, below which nothing is learnt
PENALTIES = ("presence_penalty", "frequency_penalty", "no_repeat_ngram_size")  # of generation_kwargs
DIFFERING = 0.01  # share of (token, layer) pairs with other experts in engine and trainer; rounding of float32: 1e-4
ROUTED = 4  # prompts whose completions' experts are compared
SURPRISE = 0.1  # nats a token by which samples are less probable than the policy's own
HIGHEST = 0.1  # learning rate of Adam that is ever proposed: it moves each weight by about as much in a step
OUTWEIGHS = 2.0  # ratio of a bonus's gradient to the reward's, from which on the reward has little effect
FULL, USUAL_DECAY = 0.95, 0.01  # share of the weights that is all but all of them; a weight decay that costs nothing
MUCH = 1.0  # nats a token in one update, beyond which the policy is another one


@dataclass(frozen=True)
class TrialUpdate:
    """Figures of an update that was tried and undone."""

    moved: float  # mean absolute change of the log-probs of the completions' tokens, in nats
    seconds: float  # of forward and backward pass and optimizer, for a rollout batch
    finite: bool


class Trials:
    """Updates of the policy on a few completions."""

    def __init__(self, run: ExaminedRun):
        self.run, self.trainer = run, run.trainer
        self.trained = [p for p in self.trainer.model.parameters() if p.requires_grad]

    @cached_property
    def batch(self) -> TrainBatch:
        """Completions with advantages; of signs in turn where no reward differs."""
        run, base = self.run, self.run.base
        totals = base.totals
        if not base.spread.any():
            totals = torch.arange(totals.numel(), dtype=torch.double).view_as(totals) % 2
        if run.args.method == "rloo":
            advantages = leave_one_out(totals)
        else:
            advantages = group_relative(totals, str(run.args.scale_rewards))
        order = sorted(range(len(base.rollouts)), key=lambda n: (not advantages.flatten()[n], n % base.size))
        kept: list[int] = []
        tokens = 0
        most = FEW if sum(weight.numel() for weight in self.trained) > 10**7 else len(order)
        for number in order:
            rollout = base.rollouts[number]
            usable = rollout.finish is not FinishReason.ERROR and any(rollout.sampled)
            if usable and tokens < MOST_TOKENS and len(kept) < most:
                kept.append(number)
                tokens += len(rollout.completion_ids)
        kept.sort()
        batch = run.collated([base.rollouts[number] for number in kept])
        batch.advantages = expand(advantages.flatten()[kept].to(batch.lengths.device), batch.lengths)
        batch.weights = batch.sampled.float() / batch.sampled.sum()
        batch.entropy_weights = batch.weights if self.trainer.updates.entropy is not None else None
        batch.engine_logprobs = None
        return batch

    @cached_property
    def before(self) -> Tensor:
        """Log-probs [N] of the batch under the policy as it is."""
        return self.run.logprobs(self.batch, self.run.args.temperature, exact=True)

    def update(self, learning_rate: float) -> TrialUpdate:
        """The size of an update at a learning rate; the policy is as before afterwards."""
        with self.updated(learning_rate, 1) as found:
            return found

    @contextmanager
    def updated(self, learning_rate: float, steps: int) -> Iterator[TrialUpdate]:
        """The policy after a few updates, within this context."""
        saved = [weight.detach().clone() for weight in self.trained]
        try:
            yield self._apply(learning_rate, steps)
        finally:
            with torch.no_grad():
                for weight, value in zip(self.trained, saved, strict=True):
                    weight.copy_(value)

    @contextmanager
    def decayed(self, kept: float) -> Iterator[float]:
        """The policy with a share of its weights, as weight decay leaves it; the change of log-probs in nats a token.

        Weights that the trainer decays are taken, without biases and norms.
        """
        before, names = self.before, set(self.trainer.get_decay_parameter_names(self.trainer.model))
        decaying = [p for name, p in self.trainer.model.named_parameters() if p.requires_grad and name in names]
        saved = [weight.detach().clone() for weight in decaying]
        try:
            with torch.no_grad():
                for weight in decaying:
                    weight.mul_(kept)
            after = self.run.logprobs(self.batch, self.run.args.temperature, exact=True)
            yield (after - before)[self.batch.sampled].abs().mean().item()
        finally:
            with torch.no_grad():
                for weight, value in zip(decaying, saved, strict=True):
                    weight.copy_(value)

    def gradient(self) -> Tensor:
        """Gradient of the loss on the batch, with respect to all trained weights, as one vector in float32."""
        with quiet(), torch.enable_grad():
            self.trainer.updates.loss(self.trainer.model, self.batch, Plan([[self.batch]], training=False))[
                0
            ].backward()
        found = [weight.grad for weight in self.trained if weight.grad is not None]
        joined = torch.cat([one.detach().flatten().float() for one in found]) if found else torch.zeros(1)
        for weight in self.trained:
            weight.grad = None
        return joined

    def _optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """The run's own kind of optimizer, without weight decay; AdamW where it is not to be had on its own."""
        args = self.run.args
        with suppress(Exception):  # packages that are missing here, optimizers of single layers
            kind, settings = type(self.trainer).get_optimizer_cls_and_kwargs(args, self.trainer.model)
            if not args.optim_target_modules:
                return kind(self.trained, **{**settings, "lr": learning_rate, "weight_decay": 0.0})
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW(self.trained, lr=learning_rate, betas=betas, weight_decay=0.0)

    def _apply(self, learning_rate: float, steps: int) -> TrialUpdate:
        trainer, args, batch, before = self.trainer, self.run.args, self.batch, self.before
        optimizer = self._optimizer(learning_rate)
        if trainer.reference is not None and trainer.run.algorithm.beta:
            batch.ref_logprobs = before
        plan, finite, in_gradients, in_steps = Plan([[batch]], training=False), True, 0.0, 0.0
        with quiet():
            for _ in range(steps):
                began = time.perf_counter()
                with torch.enable_grad():
                    trainer.updates.loss(trainer.model, batch, plan)[0].backward()
                passed = time.perf_counter()
                norm = torch.nn.utils.clip_grad_norm_(self.trained, args.max_grad_norm or math.inf)
                finite = finite and bool(torch.isfinite(norm))
                optimizer.step()
                optimizer.zero_grad()
                in_gradients, in_steps = in_gradients + passed - began, in_steps + time.perf_counter() - passed
        after = self.run.logprobs(batch, args.temperature, exact=True)
        moved = (after - before)[batch.sampled].abs().mean().item()
        scale = trainer.run.algebra.generation_batch_size / max(len(batch), 1)
        return TrialUpdate(moved, (in_gradients * scale + in_steps) / steps, finite and math.isfinite(moved))


def rounding(run: ExaminedRun) -> Iterator[Finding]:
    """Weights held in half precision that an update at the learning rate would leave as they are."""
    if not run.trainer.sharding.name:
        yield from check_rounding(run.args, run.trainer.policy)


def learning_rate(run: ExaminedRun) -> Iterator[Finding]:
    """The change of log-probs by one update, and over the run, whose schedule may hold the learning rate back."""
    if not run.has_time("learning-rate-low"):
        run.leave_out("time", "learning-rate-high")
        return
    args, trials = run.args, Trials(run)
    rate, steps = args.learning_rate, max(run.steps, SHORT)
    one = trials.update(rate)
    run.summary["change_by_an_update"] = float(f"{one.moved:.3g}")
    share_of_batch = len(run.base.rollouts) / run.trainer.run.algebra.generation_batch_size
    per_step = one.seconds + run.base.seconds / share_of_batch
    run.summary["seconds_of_sampling_and_updates"] = round(per_step, 2)
    kind = "an adapter" if hasattr(run.trainer.model, "peft_config") else "all weights"
    optimizer = str(getattr(args.optim, "value", args.optim))
    kind += "" if optimizer.startswith("adamw") else f" by {optimizer}"
    whole = one.moved * steps * 0.5  # schedules fall to 0
    share = scheduled(run.trainer, run.steps)
    scheduled_change = one.moved * run.steps * share
    if one.finite and share < 0.1 and scheduled_change < LITTLE <= whole:
        warmup = args.get_warmup_steps(run.steps)
        schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        yield Finding(
            "learning-rate-low",
            "error" if scheduled_change < LITTLE / 2 and run.steps >= SHORT else "warning",
            f"the schedule ({schedule}, {warmup} steps of warm-up) leaves {share:.2%} of"
            f" learning_rate={rate:g} in the mean of {run.steps} steps, which change log-probs by"
            f" {scheduled_change:.2g} nats a token in all.",
            f"Set warmup_steps={run.steps // 10}." if warmup > run.steps / 2 else "Set lr_scheduler_type='constant'.",
            f"A single update at the whole of learning_rate={rate:g} changes them by {one.moved:.2g} nats.",
        )
    elif one.finite and whole < LITTLE:
        better = _aim(trials, rate, one.moved)
        other = trials.update(better)
        enough = other.finite and other.moved * steps * 0.5 >= LITTLE
        yield Finding(
            "learning-rate-low",
            "error" if whole < LITTLE / 2 else "warning",
            f"an update of {kind} at learning_rate={rate:g} changes log-probs by {one.moved:.2g} nats a token:"
            f" {whole:.2g} in all of {steps} steps.",
            f"Set learning_rate={better:g}.",
            f"At learning_rate={better:g} the same update changes them by {other.moved:.2g} nats.",
            Effect(float(one.moved * steps * 0.5 >= LITTLE), float(enough)),
            otherwise="No learning rate helps: look at what else holds updates back (temperature, max_grad_norm, frozen"
            " weights).",
        )
    elif run.base.spread.any() and (not one.finite or one.moved > MUCH / 4):
        yield from _too_high(run, trials, one)


def scheduled(trainer: Any, steps: int) -> float:
    """Mean of the learning rates of the first steps, as a share of `learning_rate`; 0.5 for unknown schedules."""
    trainer.lr_scheduler = None  # of no training yet
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = trainer.create_scheduler(max(steps, 1), optimizer)
    trainer.lr_scheduler = None
    factors = getattr(schedule, "lr_lambdas", None)
    return sum(factors[0](step) for step in range(steps)) / steps if factors else 0.5


def _aim(trials: Trials, rate: float, moved: float, tries: int = 2) -> float:
    """A learning rate of one digit whose updates would change log-probs by about two nats over the run."""
    wanted = min(max(2.0 / trials.run.steps, 0.005), 0.15)
    guess = max(rate, 1e-9) * (wanted / max(moved, 1e-12))
    guess = min(max(guess, 1e-6), HIGHEST)
    for _ in range(tries):
        found = trials.update(guess).moved
        if not found or 0.4 < found / wanted < 2.5:
            break
        guess = min(guess * min(max(wanted / found, 0.05), 20.0), HIGHEST)
    return float(f"{guess:.0e}")


def rate_within(run: ExaminedRun, rate: float) -> tuple[float, TrialUpdate, TrialUpdate]:
    """A learning rate whose updates keep the policy, with trial updates at the given rate and at this one."""
    trials = Trials(run)
    high = trials.update(rate)
    better = _aim(trials, rate, high.moved if high.finite else 100.0)
    return better, high, trials.update(better)


def _too_high(run: ExaminedRun, trials: Trials, one: TrialUpdate) -> Iterator[Finding]:
    """Samples after three updates at the learning rate, and at one at which the policy stays."""
    rate, base = run.args.learning_rate, run.base
    before, limit = base.first(min(base.prompts, 4)), min(base.limit, 64)

    def sampled() -> SampleBatch:
        return run.sample(before.prompts, base.size, max_tokens=limit)

    with trials.updated(rate, 3) as high:
        if high.finite and high.moved < MUCH:
            return
        ruined = sampled() if high.finite else None
    if ruined is not None and len(ruined.known):
        gain = before.gain(ruined)
        if gain > 0 or (gain == 0 and high.moved < 4 * MUCH):
            return
    better = _aim(trials, rate, one.moved if one.finite else 100.0, tries=1)
    with trials.updated(better, 3) as low:
        kept = sampled() if low.finite else None
    shown = "NaN" if ruined is None else f"{ruined.mean:.3g}"
    yield Finding(
        "learning-rate-high",
        "error",
        f"three updates at learning_rate={rate:g} change log-probs by {high.moved:.2g} nats a token and the mean reward"
        f" from {before.mean:.3g} to {shown}.",
        f"Set learning_rate={better:g}.",
        f"At learning_rate={better:g} three updates change them by {low.moved:.2g} nats, and the mean reward is"
        f" {kept.mean if kept is not None else math.nan:.3g}.",
        Effect(high.moved if high.finite else math.inf, low.moved if low.finite else math.nan, higher_is_better=False)
        if ruined is None or not len(ruined.known)
        else Effect(ruined.mean, kept.mean if kept is not None else math.nan),
        otherwise="Lower learning_rate until updates keep the policy.",
    )


def kl_scale(run: ExaminedRun) -> Iterator[Finding]:
    """The distance from the reference at which the penalty's gradient is as large as the reward's."""
    args = run.args
    if not args.beta:
        return
    batch = Trials(run).batch
    assert batch.advantages is not None
    size = batch.advantages[batch.sampled].abs()
    credit = (size[size > 0].mean() if (size > 0).any() else size.new_tensor(1.0)).item()
    length = batch.sampled.sum().item() / len(batch)
    # in the loss: beta * |log-ratio| of a token against |A|; in the reward: beta * the sum over a completion
    per_nat = args.beta * (length**0.5 if args.penalises_reward else 1.0)
    balance = credit / per_nat
    if balance > 0.5:
        return
    better = float(f"{args.beta * balance / 10:.0e}")
    yield Finding(
        "kl-scale",
        "error" if balance < 0.15 else "warning",
        f"advantages are {credit:.2g} on average, and beta={args.beta:g} outweighs them as soon as log-probs are"
        f" {balance:.2g} nats away from the reference: the policy cannot go further.",
        f"Set beta={better:g}, or beta=0.",
        f"On the same completions, with beta={better:g} both are equal at {balance * args.beta / better:.2g} nats.",
    )


def bonus_scale(run: ExaminedRun) -> Iterator[Finding]:
    """Gradients of the reward and of the entropy bonus on the same completions."""
    updates = run.trainer.updates
    if updates.entropy is None or not updates.entropy.effective or not run.base.spread.any():
        return
    if not run.has_time("kl-scale"):
        return
    trials, controller = Trials(run), updates.entropy
    coef = controller.effective
    whole = trials.gradient()
    updates.entropy = None
    try:
        reward = trials.gradient()
    finally:
        updates.entropy = controller
    ratio = ((whole - reward).norm() / reward.norm().clamp(min=1e-20)).item()
    if ratio < OUTWEIGHS:
        return
    better = float(f"{coef / ratio / 10:.0e}")
    yield Finding(
        "kl-scale",
        "error" if ratio > 4 * OUTWEIGHS else "warning",
        f"the gradient of the entropy bonus (entropy_coef={coef:g}) is {ratio:.3g} times as large as the"
        " reward's: updates make completions more random, whatever is paid.",
        f"Set entropy_coef={better:g}, or entropy_coef=0.",
        f"On the same completions, with entropy_coef={better:g} it is {ratio * better / coef:.2g} times as large.",
        Effect(ratio, ratio * better / coef, higher_is_better=False),
    )


def decay(run: ExaminedRun) -> Iterator[Finding]:
    """The policy with what weight decay leaves of its weights over the run."""
    args = run.args
    step = args.learning_rate * args.weight_decay
    if step <= 0:
        return
    steps = run.steps * scheduled(run.trainer, run.steps)
    kept = max(0.0, 1 - step) ** steps
    if kept > FULL or not run.has_time("learning-rate-high"):
        return
    trials, base = Trials(run), run.base
    before = base.first(min(base.prompts, 4))
    with trials.decayed(kept) as moved:
        ruined = run.sample(before.prompts, base.size, max_tokens=min(base.limit, 64))
    if moved < MUCH / 4 or before.gain(ruined) > 0:
        return
    with trials.decayed(max(0.0, 1 - args.learning_rate * USUAL_DECAY) ** steps) as low:
        pass
    yield Finding(
        "learning-rate-high",
        "error" if moved > MUCH else "warning",
        f"weight_decay={args.weight_decay:g} at learning_rate={args.learning_rate:g} takes {step:.2g} of each weight in"
        f" a step and leaves {kept:.2g} of it after {run.steps} steps: without any update by a reward log-probs change"
        f" by {moved:.2g} nats a token, and the mean reward goes from {before.mean:.3g} to {ruined.mean:.3g}.",
        f"Set weight_decay={USUAL_DECAY:g}.",
        f"With weight_decay={USUAL_DECAY:g} decay changes them by {low:.2g} nats.",
        Effect(moved, low, higher_is_better=False),
    )


def engine(run: ExaminedRun) -> Iterator[Finding]:
    """Log-probs of the completions by the engine and by the policy, as it is and at other settings."""
    check = run.trainer.behaviour.engine_check
    rollouts = [one for one in run.base.rollouts[: run.base.fresh] if one.logprobs and any(one.sampled)][:16]
    if not rollouts or not check.comparable:
        return
    batch, temperature = run.collated(rollouts), check.temperature
    scored = run.logprobs(batch, temperature)
    comparison = Comparison(batch, scored, run.logprobs, temperature, check.tolerance, check.bos_token_id)
    broken = no_numbers(comparison)
    if broken is None and comparison.gap <= check.tolerance:
        yield from _stale(run, comparison.gap)
        return
    yield Finding(
        "engine-mismatch",
        "error",
        f"engine and policy differ by {comparison.gap:.2g} nats a token; rounding explains {check.tolerance:g}.",
        broken or likely_cause(comparison),
        _proof(comparison),
    )


def routes(run: ExaminedRun) -> Iterator[Finding]:
    """Experts of the completions' tokens in the engine and in the trainer, and log-probs with the engine's."""
    trainer = run.trainer
    asks = traits_of(run.collector.engine).returns_routes and run.collector.spec is None
    if run.args.routing_replay or not asks or routing_of(trainer.policy) is None or not run.has_time("routes-differ"):
        return
    longest = min(run.base.limit, 64)
    sampled = run.sample(min(run.base.prompts, ROUTED), run.base.size, max_tokens=longest, keep_routes=True)
    batch = run.collated([one for one in sampled.rollouts if one.logprobs and one.routes is not None])
    if batch.routes is None or batch.engine_logprobs is None:
        return
    with quiet():
        trainer.batch_scorer.settle_layout(batch)
        own = trainer.batch_scorer.routes(replace(batch, routes=None, prompt_routes=None))
    known = are_known(batch.routes) & are_known(own)
    share = differing(batch.routes, own).sum().item() / max(known.sum().item() * own.shape[1], 1)
    if share < DIFFERING:
        return
    temperature, learned = trainer.behaviour.engine_check.temperature, batch.sampled
    now, then = (
        (batch.engine_logprobs - run.logprobs(one, temperature))[learned].abs().mean().item()
        for one in (replace(batch, routes=None, prompt_routes=None), batch)
    )
    yield differing_routes(
        share,
        f"Scored with the engine's experts, log-probs differ by {then:.2g} nats instead of {now:.2g}.",
        Effect(now, then, higher_is_better=False),
    )


def differing_routes(share: float, proof: str = "", effect: Effect | None = None) -> Finding:
    """The advice to replay the engine's experts, where it sends a `share` of (token, layer) pairs to others."""
    return Finding(
        "routes-differ",
        "warning",
        f"engine and trainer send {share:.1%} of the tokens, counted in each layer, to other experts, so the trainer"
        " scores completions with another network than they were sampled from.",
        "Set routing_replay='R3'.",
        proof,
        effect,
    )


def penalties(run: ExaminedRun) -> Iterator[Finding]:
    """Penalties that change what is sampled and not what is trained, by how improbable the policy finds its samples."""
    params = run.trainer.rollouts.params
    changed = {name: params.extra[name] for name in PENALTIES if params.extra.get(name)}
    settings = dict(changed)
    if params.repetition_penalty != 1.0 and not run.args.keep_sampling_mask:
        settings["repetition_penalty"] = params.repetition_penalty
    if not settings or (gap := _surprise(run.base)) < SURPRISE:
        return
    extra = {name: value for name, value in params.extra.items() if name not in changed}
    base = run.base
    other = run.again(repetition_penalty=1.0, extra=extra)
    if _surprise(other) > gap / 2:
        return
    shown = ", ".join(f"{name}={value:g}" for name, value in settings.items())
    yield Finding(
        "engine-mismatch",
        "error" if gap > 3 * SURPRISE or base.gain(other) >= 0.2 else "warning",
        f"{shown}: what is sampled is not what is trained. A sampled token has {gap:.2g} nats less log-probability"
        " under the policy than a sample of the policy has on average.",
        f"Remove {' and '.join(settings)}.",
        f"Sampled without, the difference is {_surprise(other):.2g} nats, and the mean reward is {other.mean:.3g}"
        f" instead of {base.mean:.3g}.",
    )


def dropout(run: ExaminedRun) -> Iterator[Finding]:
    """Log-probs of the completions with the dropout of training, and without."""
    model = run.trainer.model
    rollouts = [one for one in run.base.rollouts if any(one.sampled)][:16]
    if not rollouts or not has_dropout(model):
        return
    batch, was = run.collated(rollouts), model.training
    try:
        still, moving = (run.logprobs(batch, run.args.temperature, exact=True) for _ in map(model.train, (False, True)))
    finally:
        model.train(was)
    gap = (still - moving)[batch.sampled].abs().mean().item()
    if gap < SURPRISE:
        return
    yield Finding(
        "engine-mismatch",
        "error" if gap > 3 * SURPRISE else "warning",
        f"the model has dropout, which is on while it is trained and off while it samples: log-probs of the same"
        f" completions differ by {gap:.2g} nats a token.",
        "Set disable_dropout=True.",
        f"Scored without dropout, {len(rollouts)} completions have {still[batch.sampled].mean().item():.2f} nats a"
        f" token, and with it {moving[batch.sampled].mean().item():.2f}.",
    )


def _surprise(batch: SampleBatch) -> float:
    """Mean of -log p - H over sampled tokens, in nats: 0 for samples of the policy itself."""
    gaps = [
        -logprob - entropy
        for one in batch.rollouts
        for logprob, entropy, sampled in zip(one.logprobs or (), one.entropies or (), one.sampled, strict=False)
        if sampled
    ]
    return sum(gaps) / max(len(gaps), 1)


def _stale(run: ExaminedRun, gap: float) -> Iterator[Finding]:
    """The last rollout batch on record has the log-probs of the untrained policy, though updates change these."""
    rollouts = [one for one in run.others if one.logprobs and any(one.sampled)][:16]
    if not run.own_engine or not rollouts:
        return
    batch = run.collated(rollouts)
    assert batch.engine_logprobs is not None
    still = (batch.engine_logprobs - run.logprobs(batch, run.args.temperature))[batch.sampled].abs().mean().item()
    moved = Trials(run).update(run.args.learning_rate).moved
    if still > gap + 0.1 * moved:
        return
    yield Finding(
        "engine-mismatch",
        "error",
        "the engine samples with stale weights: log-probs of the last rollout batch fit the untrained"
        f" policy (a gap of {still:.2g} nats).",
        "Look at the engine's log: it does not take the weights that it is sent, or takes them for another model.",
        f"A single update changes log-probs by {moved:.2g} nats; scored with the weights before all updates, the gap of"
        f" the last rollout batch is {still:.2g}.",
    )


def _proof(comparison: Comparison) -> str:
    others = {1.0, comparison.temperature**2, 0.5, 0.7, 0.8, 1.2, 1.5} - {comparison.temperature}
    sampled = comparison.batch.sampled
    gaps = {
        other: (comparison.engine - comparison.rescore(comparison.batch, other))[sampled].abs().mean().item()
        for other in others
    }
    best = min(gaps, key=lambda other: gaps[other])
    return f"Scored again at temperature {best:g} the gap is {gaps[best]:.2g} instead of {comparison.gap:.2g} nats."
