"""Rollouts into training data: log-probs of the compared policies, then credit over all processes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.comparison import RoleAverages, check_comparison, check_zero_sum
from covey.algorithms.credit import (
    Credit,
    JudgeOf,
    UnreadSettings,
    credit_by_source,
    members_by_source,
    signal_stats,
    step_stats,
    weights_by_source,
)
from covey.core.advantages import weighted_total
from covey.core.batch import TrainBatch, collate, segment_sum, unreported, with_unknown_routes
from covey.core.findings import Finding
from covey.core.likeness import keys_of
from covey.core.losses import BatchCounts, mean_over_update, token_weights
from covey.core.records import Behaviour, Experience, Mode, RankShard, Rollout, RolloutBatch, Scores
from covey.core.routing import routing_of
from covey.core.stats import Mean, Stat
from covey.core.terms import TermCounts, term_sizes, tokens_of_terms
from covey.data.dynamic_sampling import SamplingRound
from covey.data.sources import Sources, averaged_by_source
from covey.observability.completions import CompletionLog
from covey.observability.metrics import rollout_batch_stats, stats_by_label
from covey.policy.loading import has_dropout
from covey.policy.replicas import Reference
from covey.rewards import RewardSuite
from covey.runtime.import_path import resolve
from covey.runtime.user_code import report
from covey.trainer import rollout_reports as reports
from covey.trainer.batch_scorer import BatchScorer
from covey.trainer.engine_check.parity import EngineCheck
from covey.trainer.microbatches import micro_batch_tokens, micro_batches_of
from covey.trainer.rollout_reports import (
    GlobalBatch,
    entropy_stats,
    logs_completions,
    mean_entropies,
    sampling_entropy,
    summarize,
    token_ages,
)
from covey.trainer.run import Run
from covey.trainer.teachers import TeacherScorer

Stats = dict[str, Stat]


def filtered(rollout: Rollout, may_count: Callable[[Rollout], Sequence[bool]]) -> Rollout:
    """The rollout with writer 0 (nobody) for completion tokens that a `supervised_filter` leaves out.

    Raises ValueError if the filter does not return one flag for each token.
    """
    if rollout.observed is None:
        return rollout
    flags = list(may_count(rollout))
    if len(flags) != len(rollout.observed):
        raise ValueError(
            f"supervised_filter gave {len(flags)} flags for a rollout of {len(rollout.observed)} completion_ids: give"
            " True or False for each."
        )
    return replace(rollout, observed=[who if flag else 0 for who, flag in zip(rollout.observed, flags, strict=True)])


def as_all_reported(
    rollouts: Sequence[Rollout], batch: TrainBatch, gather: Callable[[Any, str], list[Any]]
) -> tuple[bool, TrainBatch]:
    """True if all rollouts of all processes have entropies; and the batch, with the engine's log-probs if any do.

    Processes without a token, as of absent rollouts alone, do as the others, so that all score the same. Collective.
    """
    complete = all(rollout.entropies is not None for rollout in rollouts if not rollout.absent)
    mine = (complete, batch.num_tokens > 0, batch.engine_logprobs is not None)
    everyone = gather(mine, "agree on what the engine reported")
    reported = any([has for _, tokens, has in everyone if tokens] or [has for _, _, has in everyone])
    if not reported:
        batch = replace(batch, engine_logprobs=None)
    elif batch.engine_logprobs is None:
        batch = replace(batch, engine_logprobs=unreported("engine_logprobs", batch, torch.float32))
    return all(complete for complete, _, _ in everyone), batch


@dataclass(eq=False)
class BehaviourScorer:
    """Scores rollouts under the policies that the loss compares with, where it needs them."""

    run: Run
    scorer: BatchScorer
    reference: Reference | None  # of the KL penalty, or None
    engine_check: EngineCheck  # compares the engine's first log-probs with the scorer's
    teachers: TeacherScorer | None = None

    def __post_init__(self) -> None:
        reference = self.run.args.supervised_filter
        self._may_count = None if reference is None else resolve(reference, "supervised_filter")

    def score(self, scored: RolloutBatch, mode: Mode) -> Behaviour:
        """The rollouts with the log-probs that the loss needs, and the reward's KL penalty. Collective."""
        run, given = self.run, scored.rollouts
        masks = [run.masks_truncated(sample.source) for sample in scored.samples]
        counted = given if self._may_count is None else [filtered(one, self._may_count) for one in given]
        batch = self._collated(counted, masks)
        with run.phases("score"):
            self.scorer.settle_layout(batch)
            rollouts = self.with_entropies(given) if run.args.log_entropy else list(given)
            fresh = [row for row, age in enumerate(token_ages(rollouts, run.step)) if not age]
            checked = self.engine_check(batch, torch.tensor(fresh, dtype=torch.long, device=batch.lengths.device))
            if run.args.routing_replay != "R3":  # they were for the check alone
                batch = batch.unrouted()
                rollouts = [one if one.routes is None else replace(one, routes=None) for one in rollouts]
            has_entropies, batch = as_all_reported(rollouts, batch, run.collectives.gather)
            entropy = sampling_entropy(rollouts, batch) if has_entropies else {}
            if not self.engine_check.comparable:  # of another distribution than the trainer scores
                batch = replace(batch, engine_logprobs=None)
            batch, kl, measured, stats = self.with_logprobs(batch, mode, measures_entropy=not entropy)
            stats = [checked, *stats]
        if self.teachers is not None:
            with run.phases("teacher"):
                batch, found = self.teachers(scored, batch, mode)
                stats = [*stats, found]
        batch = replace(batch, term_tokens=tokens_of_terms(run.algorithm.objective.terms, batch))
        return Behaviour(rollouts, batch, kl, [entropy] if entropy else measured, stats)

    def with_logprobs(
        self, batch: TrainBatch, mode: Mode, measures_entropy: bool = False
    ) -> tuple[TrainBatch, Tensor | None, list[Stats], list[Stats]]:
        """Score under the old and the reference policy where needed.

        Returns:
            The batch with the log-probs, the KL penalty [B] or None, the metric `entropy` in parts where it was to be
            measured and a policy was scored, and other metrics.
        """
        run, algorithm, training = self.run, self.run.algorithm, mode == "train"
        penalised = algorithm.kl_in_reward and algorithm.beta != 0
        off_policy = training and not run.algebra.on_policy
        policy, old, stats, entropy = run.policy, None, list[Stats](), list[Stats]()
        correction, reported = algorithm.objective.correction, batch.engine_logprobs
        compared = correction is not None and reported is not None and training
        # With dropout the loss's own log-probs are not comparable with the engine's.
        if off_policy or penalised or (compared and has_dropout(policy)):
            if run.args.routing_replay == "R2" and off_policy:
                old, batch, entropy = self.scorer.with_routes(policy, batch, measures_entropy)
                entropy = entropy or ([{}] if measures_entropy else [])
            elif measures_entropy:
                old, entropy = self.scorer.with_entropy(policy, batch)
                entropy = entropy or [{}]  # of no rollouts
            else:
                old = self.scorer.logprobs(policy, batch)
            if correction is not None and reported is not None:
                weights, found = correction(old, reported, batch.sampled, batch.lengths)
                batch, stats = replace(batch, mismatch_weights=weights), [*stats, found]
        if self.reference is not None:
            with self.reference.model(policy) as reference:
                # It has experts of its own, also where it is the policy without its adapter.
                scored = self.scorer.logprobs(reference, batch.unrouted(), run.algebra.rows(mode))
                batch = replace(batch, ref_logprobs=scored)
        batch = replace(batch, old_logprobs=old if off_policy else None)
        if not penalised:
            return batch, None, entropy, stats
        assert old is not None and batch.ref_logprobs is not None, "a penalty needs both"
        kl = torch.where(batch.sampled, old - batch.ref_logprobs, 0.0)
        stats.append({"kl": Mean(kl.sum().item(), batch.sampled.sum().item())})
        return batch, segment_sum(kl, batch.lengths).cpu(), entropy, stats

    def with_entropies(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts with entropies, scored if the engine of any process did not report them. Collective."""
        lacking = any(rollout.entropies is None for rollout in rollouts)
        if not any(self.run.collectives.gather(lacking, "ask for entropies")):
            return list(rollouts)
        batch = self._collated(rollouts)  # with truncated completions, learned from or not
        if self.run.args.routing_replay != "R3":
            batch = batch.unrouted()
        measured = self.scorer.entropies(batch).cpu().split(batch.lengths.tolist())
        return [replace(one, entropies=own.tolist()) for one, own in zip(rollouts, measured, strict=True)]

    def probe(self, rollouts: Sequence[Rollout]) -> None:
        """Check the engine with rollouts that are not trained on, if there are any. Collective."""
        if not rollouts:
            return
        batch = self._collated(rollouts)
        with self.run.phases("score"):
            self.scorer.settle_layout(batch)
            self.engine_check(batch)

    def _collated(self, rollouts: Sequence[Rollout], masks: bool | Sequence[bool] = False) -> TrainBatch:
        """The rollouts as a batch; with R3 it has routes on every process. ValueError for routes of another model."""
        batch, routing = collate(rollouts, mask_truncated=masks), routing_of(self.run.policy)
        if routing is not None and batch.routes is not None:
            wanted = routing.shape.unknown(0)
            if batch.routes.shape[1:] != wanted.shape[1:] or batch.routes.dtype != wanted.dtype:
                raise ValueError(
                    f"rollouts came with routes [tokens, layers, experts of a token] of {list(batch.routes.shape)}"
                    f" {batch.routes.dtype}, and the policy's are [tokens, {', '.join(map(str, wanted.shape[1:]))}]"
                    f" {wanted.dtype}: pass on what an engine with the policy's model returns."
                )
        if self.run.args.routing_replay == "R3" and batch.routes is None:
            assert routing is not None, "checked with the model"
            batch = with_unknown_routes(batch, routing.shape.unknown(0))
        return batch.to(self.run.device)

    def state_dict(self) -> dict[str, Any]:
        teachers = None if self.teachers is None else self.teachers.state_dict()
        return {"reference": self.reference and self.reference.state_dict(), "teachers": teachers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["reference"] is not None and self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        if self.teachers is not None and state.get("teachers"):  # the checkpoint's run may have had none
            self.teachers.load_state_dict(state["teachers"])


PATIENCE = 3  # rollout batches before sources' shares are compared
DROWNED = 4.0  # factor between a source's shares of weight and of prompts at which a warning is given


@dataclass
class SourceShares:
    """Shares of sources in the loss and in the prompts over the first rollout batches; warns once if they differ."""

    batches: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)

    def observe(self, names: Sequence[str], weights: Sequence[float], sources: Sources | None) -> None:
        """Count a rollout batch of completions [N] with the names of their sources and their weights in the loss."""
        self.batches += 1
        if self.batches > PATIENCE or sources is None:
            return
        for name, weight in zip(names, weights, strict=True):
            self.weights[name] = self.weights.get(name, 0.0) + weight
            self.prompts[name] = self.prompts.get(name, 0) + 1
        if self.batches == PATIENCE:
            report(self._check(sources))

    def _check(self, sources: Sources) -> Iterator[Finding]:
        joint = [name for name in self.prompts if sources.settings(name).average == "joint"]
        weight, prompts = (sum(known[name] for name in joint) for known in (self.weights, self.prompts))
        for name in joint:
            share, wanted = self.weights[name] / weight if weight else 0.0, self.prompts[name] / prompts
            if share * DROWNED < wanted or share > wanted * DROWNED:
                yield Finding.warning(
                    "source-drowned",
                    f"source {name!r} has {wanted:.1%} of the prompts and {share:.1%} of the weight in the loss in the"
                    f" first {PATIENCE} rollout batches, as its completions are longer or shorter than the others'.",
                    f"Give it an average of its own, as in sources={{{name!r}: {{'average': 'own'}}}}, or take a"
                    " loss_type that averages over completions, such as 'grpo'.",
                )


@dataclass(eq=False)
class CreditAssigner:
    """Compares the rollouts of all processes with one another."""

    run: Run
    rewards: RewardSuite
    judge_of: JudgeOf
    entropy_bonus: bool  # token weights of the entropy bonus are needed
    unread: UnreadSettings
    energies: Callable[[TrainBatch], Tensor] | None  # of all processes' tokens, where `Algorithm.token_baseline`
    num_tokens: int = field(default=0, init=False)  # prompt and completion tokens that were processed in training
    _newest: Scores | None = field(default=None, init=False)
    _checked_seats: set[str] = field(default_factory=set, init=False)  # sources with a comparison of their own, "" else
    _shares: SourceShares = field(default_factory=SourceShares, init=False)

    def __post_init__(self) -> None:
        comparison = self.run.algorithm.comparison
        self.averages = RoleAverages(comparison.decay) if comparison.averages else None  # running means of roles

    def assign(
        self, rollouts: RolloutBatch, behaviour: Behaviour, mode: Mode
    ) -> tuple[TrainBatch, Credit, GlobalBatch]:
        """Training data with advantages and token weights; credit and rewards of all processes. Collective."""
        run, args, algebra, batch = self.run, self.run.args, self.run.algebra, behaviour.batch
        everyone = self.gather(rollouts, behaviour, mode)
        if everyone.staleness > args.max_staleness:
            raise RuntimeError(
                f"the engine says that it sampled tokens with weights {everyone.staleness} optimizer steps older than"
                f" those that are trained, and max_staleness={args.max_staleness} allows {args.max_staleness}: it has"
                " not taken weights that it was sent. Look at the engine's log; a server that was restarted comes back"
                " with the weights it was started with. A rollout function must not return rollouts that it has kept"
                " from an earlier step."
            )
        self.unread.look(everyone.scores)
        self._newest = everyone.scores
        energies = None if self.energies is None else self.energies(batch)
        group = algebra.group_size(mode)
        if mode == "train":
            self._check_seats(everyone.scores, group)
        baselines = self._baselines(everyone.scores)
        credit = credit_by_source(self.judge_of, everyone.scores, group, everyone.kl, energies, baselines)
        tokens = batch.sampled_lengths.float()
        updates = algebra.steps_per_generation / algebra.gradient_accumulation_steps if mode == "train" else 1.0
        counts = BatchCounts(
            tokens,
            micro_batch_tokens(tokens, algebra.rows(mode)),
            rows_per_update=sum(everyone.scores.present) / updates,
            tokens_per_update=everyone.trained_tokens / updates,
            micro_batches_per_update=everyone.micro_batches / updates,
            max_completion_length=args.max_completion_length,
        )
        weighting, of_terms = run.algorithm.weighting, dict.fromkeys(everyone.terms, run.algorithm.weighting)
        if everyone.scores.sources:
            assert run.sources is not None, "rows have sources"
            known, device = run.sources, batch.lengths.device
            numbers = known.numbers(everyone.scores.sources)
            mine = numbers[everyone.mine]
            counts = replace(counts, max_completion_length=known.longest(mine, args.max_completion_length, device))
            sizes = known.sizes(numbers, everyone.trained, everyone.scores.present)
            by_source = partial(averaged_by_source, known, weighting, mine.to(device), sizes, updates)
            weighting = by_source()
            of_terms = {name: by_source(known.term_sizes(numbers, own)) for name, own in everyone.term_sizes.items()}
        bonus = token_weights(mean_over_update, counts, batch.sampled, batch.lengths) if self.entropy_bonus else None
        batch = replace(
            batch,
            advantages=credit.of_tokens(everyone.mine).to(batch.lengths.device),
            weights=token_weights(weighting, counts, batch.sampled, batch.lengths),
            entropy_weights=bonus,
            term_scales={
                name: everyone.terms[name]
                .times(1 / updates)
                .scales(
                    of_terms[name],
                    sizes.float(),
                    micro_batch_tokens(sizes.float(), algebra.rows(mode)),
                    counts.max_completion_length,
                )
                for name, sizes in term_sizes(batch).items()
            },
        )
        return batch, credit, everyone

    def weights_of_all(self, everyone: GlobalBatch, mode: Mode) -> list[float]:
        """[N] weight in the loss of each completion of all processes, over all of its tokens."""
        run, known = self.run, self.run.sources
        assert known is not None, "rows have sources"
        numbers = known.numbers(everyone.scores.sources)
        tokens, rows = torch.tensor(everyone.trained, dtype=torch.float32), sum(everyone.scores.present)
        counts = BatchCounts(
            tokens,
            micro_batch_tokens(tokens, run.algebra.rows(mode)),
            rows_per_update=rows,
            tokens_per_update=everyone.trained_tokens,
            micro_batches_per_update=everyone.micro_batches,
            max_completion_length=known.longest(numbers, run.args.max_completion_length, torch.device("cpu")),
        )
        sizes = known.sizes(numbers, everyone.trained, everyone.scores.present)
        weighting = averaged_by_source(known, run.algorithm.weighting, numbers, sizes, 1.0)
        return (weighting(counts) * tokens).tolist()

    def describe_rewards(self) -> str:
        """Mean and range of the newest rollout batch's total rewards, for messages."""
        if self._newest is None:
            return "none yet"
        totals = weighted_total(self._newest.rewards.double(), self.rewards.weights.double())
        known = totals[~totals.isnan()]
        return f"mean {known.mean():.3g}, from {known.min():.3g} to {known.max():.3g}" if len(known) else "none"

    def experience(
        self, rollouts: RolloutBatch, behaviour: Behaviour, mode: Mode, log: CompletionLog | None
    ) -> Experience:
        """The training data of rollouts, with its metrics; `log` gets the completions. Collective."""
        batch, credit, everyone = self.assign(rollouts, behaviour, mode)
        if mode == "train":
            self.num_tokens += (rollouts.selection or everyone).processed_tokens
        if log is not None and logs_completions(self.run.args):
            self._write(log, everyone, credit, rollouts, mode)
        stats = [*rollouts.stats, *behaviour.stats, self._stats(everyone, credit, rollouts, mode)]
        if mode == "train" and self.averages is not None:  # after everything that was compared with the earlier means
            weights = weights_by_source(self.judge_of, everyone.scores)
            totals = self.run.algorithm.totals(everyone.scores.rewards, weights, everyone.kl)
            self.averages.update(everyone.scores, totals.where(self._averaged(everyone.scores), torch.nan))
        scores, mine = everyone.scores, everyone.mine
        return Experience(batch, behaviour.entropy, stats, scores.sources[mine], scores.absent[mine])

    def _baselines(self, scores: Scores) -> Tensor | None:
        """[N] running means that completions are compared with, NaN where a source compares them otherwise."""
        if self.averages is None:
            return None
        return self.averages.baselines(scores).where(self._averaged(scores), torch.nan)

    def _averaged(self, scores: Scores) -> Tensor:
        """[N] bool, true for completions that are compared with running means."""
        names = scores.sources or [""] * len(scores.lengths)
        averaged = {name: self.judge_of(name).algorithm.comparison.averages for name in dict.fromkeys(names)}
        return torch.tensor([averaged[name] for name in names])

    def _check_seats(self, scores: Scores, group: int) -> None:
        """Report what is wrong with the seats of the first rollout batch, on every process alike.

        Sources with a comparison of their own are checked by themselves, each in the first batch that has it.
        """
        args, sources = self.run.args, self.run.sources or Sources([])
        parts: dict[str, list[Tensor]] = {}
        for name, rows in scores.by_source().items():
            parts.setdefault("" if sources.settings(name).compare is None else name, []).append(rows)
        for name in [name for name in parts if name not in self._checked_seats]:
            self._checked_seats.add(name)
            own, settings, judge = scores.take(torch.cat(parts[name])), sources.settings(name), self.judge_of(name)
            comparison = judge.algorithm.comparison
            given = f"sources: {name}: compare={settings.compare!r}" if name else f"compare={args.compare!r}"
            by_k = (settings.advantages or args.advantages) == "pass_at_k"
            k = (settings.pass_at_k or args.pass_at_k) if by_k else None
            report(check_comparison(comparison, given, own, group, k))
            by_difficulty = (settings.sampler or args.prompt_sampler) == "difficulty"
            selects = {"dynamic": args.dynamic_sample, "difficulty": by_difficulty}
            report(check_zero_sum(comparison, own, judge.weights_F, group, **selects))

    def gather(self, rollouts: RolloutBatch, behaviour: Behaviour, mode: Mode) -> GlobalBatch:
        """Rewards and lengths of all processes' rollouts. Collective."""
        run, scored, sizes = self.run, rollouts, term_sizes(behaviour.batch)
        scores = scored.scores
        mine = RankShard(
            scores=scores,
            kl=behaviour.kl,
            trained=behaviour.batch.sampled_lengths.tolist(),
            micro_batches=micro_batches_of(scores.present, run.algebra.rows(mode)),
            staleness=max(token_ages(scored.rollouts, run.step), default=0),
            lengths=[rollout.num_sampled for rollout in scored.rollouts],
            truncated=[rollout.truncated for rollout in scored.rollouts],
            played=[rollout.played for rollout in scored.rollouts],
            prompt_tokens=sum(len(rollout.prompt_ids) for rollout in scored.rollouts if not rollout.absent),
            entropies=mean_entropies(scored.rollouts, run.args),
            likeness=[keys_of(*pair) for pair in zip(scored.samples, scored.rollouts, strict=True)],
            terms={name: TermCounts.of(size, run.algebra.rows(mode)) for name, size in sizes.items()},
            term_sizes={name: size.tolist() for name, size in sizes.items()},
        )
        purpose = "gather the rewards of {} rollout batch {}".format(*rollouts.key)
        return GlobalBatch(run.collectives.gather(mine, purpose), run.collectives.rank)

    def _stats(self, everyone: GlobalBatch, credit: Credit, rollouts: RolloutBatch, mode: Mode) -> Stats:
        run, names = self.run, self.rewards.names
        selection, group = rollouts.selection, run.algebra.group_size(mode)
        sampled, stats = (everyone, {}) if selection is None else (selection.first, dict(selection.stats))
        members = members_by_source(self.judge_of, sampled.scores, group)
        weights = weights_by_source(self.judge_of, sampled.scores)
        stats |= rollout_batch_stats(
            lengths=sampled.lengths,
            truncated=sampled.truncated,
            played=sampled.played,
            rewards_NF=sampled.scores.rewards,  # groups kept for their rewards would mislead
            weights=weights,
            names=names,
            num_generations=group,
            likeness=sampled.likeness,
            members_PG=members,
        )
        stats |= step_stats(self.judge_of, sampled.scores, names, members)
        alone = credit if everyone.kl is None else None  # the rewards' own
        baselines, signal = self._baselines(everyone.scores), None
        if self.rewards.abstains:  # nothing is compared
            stats.pop("frac_reward_zero_std", None)
        else:
            signal = alone or credit_by_source(self.judge_of, everyone.scores, group, baselines=baselines)
            stats |= signal_stats(signal, group)
        if everyone.scores.seats:
            stats |= reports.role_stats(sampled, weights, members)
            stats |= reports.credit_stats(everyone.scores, credit, baselines)
        if everyone.scores.sources:
            stats |= self._stats_of_sources(sampled, everyone, signal, mode)
        stats |= {f"{name}/tokens": Mean(counts.tokens, 1.0) for name, counts in everyone.terms.items()}
        return stats | (entropy_stats(everyone.entropies) if run.args.log_entropy else {})

    def _stats_of_sources(
        self, sampled: GlobalBatch | SamplingRound, everyone: GlobalBatch, signal: Credit | None, mode: Mode
    ) -> Stats:
        """Metrics by source: rewards and lengths as first sampled, shares and signals of what is trained on.

        Without rewards `signal` is None.
        """
        group = self.run.algebra.group_size(mode)
        weights_NF = weights_by_source(self.judge_of, sampled.scores)
        totals = weighted_total(sampled.scores.rewards.double(), weights_NF).tolist()
        means = {"reward": totals, **reports.lengths_of(sampled)}
        stats = stats_by_label("source", sampled.scores.sources, means, {"reward_std": totals})
        names = everyone.scores.sources
        silent = None if signal is None else ~signal.has_signal().view(-1, group).any(1)
        weights = self.weights_of_all(everyone, mode)
        if mode == "train":
            self._shares.observe(names, weights, self.run.sources)
        for name, rows in everyone.scores.by_source().items():
            tokens = sum(everyone.trained[row] for row in rows.tolist())
            if silent is not None:
                silent_of_source = silent[rows[::group] // group].double().tolist()
                stats[f"source/{name}/frac_advantage_zero"] = Mean.of(silent_of_source)
            stats |= {
                f"source/{name}/prompts": Mean(len(rows), len(names)),
                f"source/{name}/tokens": Mean(tokens, everyone.trained_tokens),
                f"source/{name}/weight": Mean(sum(weights[row] for row in rows.tolist()), sum(weights)),
            }
        return stats

    def _write(
        self, log: CompletionLog, everyone: GlobalBatch, credit: Credit, rollouts: RolloutBatch, mode: Mode
    ) -> None:
        run = self.run
        mine = summarize(rollouts, run.args)
        summaries = list(chain.from_iterable(run.collectives.to_first(mine, "put the completions together")))
        if log.enabled:
            table = everyone.table(summaries, self.rewards.names, credit.of_completions())
            log.add(run.step + (mode == "train"), **table)

    def state_dict(self) -> dict[str, Any]:
        averages = {} if self.averages is None else {"averages": self.averages.state_dict()}
        return {"num_tokens": self.num_tokens, **averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens = state["num_tokens"]
        if self.averages is not None and "averages" in state:
            self.averages.load_state_dict(state["averages"])
