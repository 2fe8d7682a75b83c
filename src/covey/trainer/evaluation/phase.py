"""Evaluation by sampling: plain datasets as in training, with a loss; an `EvalSuite` by its own settings, without
one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import rewrite_logs
from transformers.trainer_utils import EvalLoopOutput, has_length

from covey.core.advantages import weighted_total
from covey.core.likeness import Keys, keys_of
from covey.core.records import Experience, FinishReason, PromptSample, RolloutBatch
from covey.core.stats import Stat
from covey.core.transcript import RolloutSummary
from covey.data.sampler import eval_loader
from covey.data.sources import raw, source_of
from covey.data.validation import check_dataset
from covey.observability.completions import CompletionLog
from covey.observability.metrics import EVALUATE, rollout_batch_stats
from covey.observability.record import Recorder
from covey.runtime.user_code import report
from covey.trainer.evaluation.suites import EvalSuite, Graded, Grader, estimates, rows_of, with_user_messages
from covey.trainer.rollout_phase import RolloutPhase
from covey.trainer.rollout_reports import as_logged, columns_of, logs_completions, summarize
from covey.trainer.run import Run


@dataclass(eq=False)
class EvaluationPhase:
    """Samples and scores evaluation datasets, and collects metrics and completions."""

    run: Run
    rollouts: RolloutPhase
    # (samples, log of completions) -> their training data; collective
    experience: Callable[[list[PromptSample], CompletionLog], Experience]
    loss_of: Callable[[Experience], tuple[float, list[dict[str, Stat]]]]  # with metrics; collective
    prompts_required: bool  # an environment may give them otherwise
    recorder: Recorder | None
    completions: CompletionLog | None = field(default=None, init=False)

    def loader(self, datasets: Any, chosen: Any) -> Any:
        """The loader of the chosen dataset (its name, or rows), or of the trainer's; ValueError if there is none."""
        if isinstance(chosen, str):
            known = datasets if isinstance(datasets, dict) else {}
            if chosen not in known:
                raise ValueError(f"no evaluation dataset is called {chosen!r}; known: {sorted(known)}.")
            chosen = known[chosen]
        elif chosen is not None and self.run.args.prompts_as_messages:
            chosen = with_user_messages(chosen)
        chosen = datasets if chosen is None else chosen
        if chosen is None:
            raise ValueError("evaluation needs an `eval_dataset`; this trainer was made without one.")
        report(check_dataset(raw(rows_of(chosen)), "eval_dataset", self.prompts_required))
        suite = chosen if isinstance(chosen, EvalSuite) else None
        algebra = self.run.algebra if suite is None else suite.batches(self.run.algebra)
        report(algebra.check_eval())
        return eval_loader(rows_of(chosen), algebra, self.run.collectives.rank, suite)

    def send_completions(self) -> None:
        """Send the completions to trackers, after the first metrics, with which these begin their runs."""
        args = self.run.args
        if self.completions is not None and args.log_completions:
            self.completions.to_trackers(args.report_to or (), self.run.step)
        self.completions = None

    def evaluate(
        self, dataloader: Any, prefix: str, on_batch: Callable[[], None], optimizer: Any, training: bool
    ) -> EvalLoopOutput:
        """Sample and score a dataset; `training`: True if a run continues afterwards, with this optimizer."""
        run, args, model = self.run, self.run.args, self.run.policy
        was_training = model.training
        model.eval()
        on_batch = self._counting(prefix, dataloader, on_batch)
        self.rollouts.begin_evaluation()
        self.completions = log = CompletionLog(
            args.output_dir or ".",
            total_limit=args.log_completions_total_limit,
            unique_prompts=args.log_unique_prompts,
            sent_as=next(iter(rewrite_logs({f"{prefix}_completions": 0.0}))),
            folder=Path("evaluations"),
            name=prefix,
            export=args.exports_completions,
            enabled=run.collectives.rank == 0 and logs_completions(args),
        )
        if self.recorder is not None:
            self.recorder.begin_evaluation(log.name)
        try:
            with run.phases(EVALUATE), self._recommended_weights(optimizer, training):
                if dataloader.suite is None:
                    rows, found = self._evaluate_with_loss(dataloader, log, on_batch)
                else:
                    rows, found = self._evaluate_suite(dataloader, dataloader.suite, log, on_batch)
        finally:
            run.activity.inside("")
            model.train(was_training)
            if not training:
                self.rollouts.close()
        log.publish(run.step)
        if self.recorder is not None:
            self.recorder.end_evaluation(log.name, run.step)
        metrics = run.metrics.drain("eval", prefix=f"{prefix}_")
        metrics |= {f"{prefix}_{name}": value for name, value in found.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=rows)  # type: ignore[arg-type]

    def _counting(self, prefix: str, dataloader: Any, on_batch: Callable[[], None]) -> Callable[[], None]:
        """Have the activity tell how many batches of this evaluation are done; a stream has no number of batches."""
        name, done = prefix.removeprefix("eval").strip("_"), 0
        batches = len(dataloader) if has_length(dataloader) else 0

        def tell() -> None:
            place = f" {min(done + 1, batches)} of {batches}" if batches > 1 else ""
            self.run.activity.inside(f"evaluation{f' {name}' if name else ''}{place}")

        def counted() -> None:
            nonlocal done
            done += 1
            tell()
            on_batch()

        tell()
        return counted

    def _evaluate_with_loss(
        self, dataloader: Any, log: CompletionLog, on_batch: Callable[[], None]
    ) -> tuple[int, dict[str, float]]:
        """The number of completions of a plain dataset, and their loss."""
        losses, rows, collectives = 0.0, 0, self.run.collectives
        for samples in dataloader:
            with collectives.ending_all():
                experience = self.experience(samples, log)
                with torch.no_grad():
                    loss, found = self.loss_of(experience)
            for stats in (*experience.stats, *found):
                self.run.metrics.add(stats, "eval")
            shares = collectives.gather((loss, len(experience.batch)), "add up the evaluation's loss")
            rows += (batch_rows := sum(count for _, count in shares))
            losses += batch_rows * sum(loss for loss, _ in shares)
            on_batch()
        return rows, {"loss": losses / max(rows, 1)}

    @torch.no_grad()
    def _evaluate_suite(
        self, dataloader: Any, suite: EvalSuite, log: CompletionLog, on_batch: Callable[[], None]
    ) -> tuple[int, dict[str, float]]:
        """The number of completions of a suite, and its estimates."""
        run, functions = self.run, self.rollouts.rewards
        completions, grader = suite.completions(run.algebra), suite.grader(functions)
        graded: list[Graded] = []
        rewards: list[Tensor] = []
        lengths: list[int] = []
        truncated: list[bool] = []
        played: list[bool] = []
        likeness: list[Keys] = []
        key = self.rollouts.next_key("eval")  # one for all, so that samples do not depend on how prompts are batched
        params = suite.sampling(self.rollouts.params)
        for samples in dataloader:
            with run.collectives.ending_all():
                scored = self.rollouts.sample(key, samples, "eval", params=params)
                mine = self._grades(scored, grader, source_of(suite.dataset))
            for stats in scored.stats:
                run.metrics.add(stats, "eval")
            pairs = zip(scored.samples, scored.rollouts, strict=True)
            sizes = [(one.num_sampled, one.truncated, one.played, keys_of(draw, one)) for draw, one in pairs]
            shards = run.collectives.gather((mine, scored.rewards, sizes), "put the evaluation together")
            for grades, scores, rows in shards:
                graded += grades
                rewards.append(scores)
                lengths += [length for length, _, _, _ in rows]
                truncated += [cut for _, cut, _, _ in rows]
                played += [there for _, _, there, _ in rows]
                likeness += [keys for _, _, _, keys in rows]
            if self.recorder is not None:
                self.recorder.add_evaluated(log.name, scored, grades=[(grade.right, grade.answer) for grade in mine])
            if logs_completions(run.args):
                summaries = run.collectives.to_first(summarize(scored, run.args), "put the completions together")
                for (grades, scores, _), texts in zip(shards, summaries, strict=False):  # none but on the first process
                    self._log(log, grades, scores, texts)
            on_batch()
        stats = rollout_batch_stats(
            lengths=lengths,
            truncated=truncated,
            played=played,
            rewards_NF=torch.cat(rewards),
            weights=functions.weights_of(source_of(suite.dataset)),
            names=functions.names,
            num_generations=completions,
            likeness=likeness,
        )
        if completions == 1:
            del stats["frac_reward_zero_std"]  # of one each
        run.metrics.add(stats, "eval")
        return len(lengths), estimates(suite, completions, graded)

    def _log(
        self, log: CompletionLog, grades: list[Graded], scores: Tensor, summaries: Sequence[RolloutSummary]
    ) -> None:
        """Add a process's completions to the table, without absent ones."""
        there = [number for number, one in enumerate(summaries) if one.finish != FinishReason.ABSENT]
        if not log.enabled or not there:
            return
        names = self.rollouts.rewards.names
        logged = as_logged(columns_of([summaries[number] for number in there]), scores[there], names)
        given = {name: [getattr(grades[number], name) for number in there] for name in ("right", "answer")}
        known = {name: values for name, values in given.items() if any(value is not None for value in values)}
        logged["extras"] = known | logged["extras"]
        log.add(self.run.step, **logged)

    @contextmanager
    def _recommended_weights(self, given: Any, training: bool) -> Iterator[None]:
        """Switch an optimizer that trains other weights than it recommends (schedule-free) to the recommended ones."""
        optimizer = recommending_optimizer(given)
        if optimizer is None:
            yield
            return
        optimizer.eval()
        self.rollouts.weight_sync.forget()
        try:
            yield
        finally:
            self.rollouts.weight_sync.forget()
            if training:
                optimizer.train()  # the next rollout batch is sampled before the next step sets it

    def _grades(self, scored: RolloutBatch, grader: Grader, source: str) -> list[Graded]:
        weights = self.rollouts.rewards.weights_of(source)
        totals = weighted_total(scored.rewards.double(), weights.double()).tolist()
        any_scored = any(total == total for total in totals)
        answers = grader.answers([rollout.completion for rollout in scored.rollouts], scored.columns, any_scored)
        failed = [rollout.finish is FinishReason.ERROR for rollout in scored.rollouts]
        answers = [None if wrong else answer for answer, wrong in zip(answers, failed, strict=True)]
        verdicts = map(grader.right, scored.rewards.tolist(), failed)
        prompts = [sample.prompt for sample in scored.samples]
        return [Graded(*grade) for grade in zip(prompts, totals, verdicts, answers, strict=True)]


def recommending_optimizer(optimizer: Any) -> Any:
    """The optimizer inside its wrapper, if it trains other weights than it recommends; else None."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    switches = (getattr(inner, name, None) for name in ("train", "eval"))
    return inner if all(map(callable, switches)) else None
