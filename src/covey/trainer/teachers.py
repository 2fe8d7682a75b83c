"""Teachers: models that score the tokens which the policy has sampled; each row may have its own teacher and prompt.

A teacher is a model of its own, the policy at an earlier time, or the policy itself with another prompt. It reads a
prompt, the row's or its own, and then the rollout's completion, by the same forward pass as every other policy. A
teacher that is a server reads the same tokens (`covey.trainer.served_teachers`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from covey.config.base import OnlineConfig
from covey.config.teacher_sources import is_loaded, is_server
from covey.core.advantages import weighted_total
from covey.core.batch import TrainBatch, distinct_prompts, expand, segment_ids
from covey.core.findings import CheckError, Finding
from covey.core.records import Message, Mode, Rollout, RolloutBatch
from covey.core.stats import Mean, Stat, Sum
from covey.data.validation import columns_of
from covey.engines.servers.protocols import ScoredToken
from covey.engines.servers.scoring import SAME_MODEL, ServerScorer, distance
from covey.policy.lm_head.scores import TokenScores, check_plain_head, head_of, teacher_head
from covey.policy.lm_head.teacher import TeacherHead
from covey.policy.loading import config_of_source, max_context, tokenizer_of_source
from covey.policy.replicas import Reference
from covey.policy.scoring import Teachers
from covey.policy.sharded_tensors import full_shape, reshard
from covey.policy.stored_adapters import stored_adapter
from covey.rollout.prompts import PromptCodec, PromptTooLong, are_messages, is_conversational, row_tools
from covey.runtime.import_path import is_reference, resolve
from covey.runtime.user_code import format_error, report, warn
from covey.trainer.batch_scorer import BatchScorer
from covey.trainer.run import Run
from covey.trainer.served_teachers import requests_of, scores_of

CONTEXT = "privileged_context"  # column of {context}
GIVEN = {"prompt", "context", "solution", "feedback"}
"""Fields of a template that are not columns."""
SERVED = "(served)"  # key of `TeacherScorer.state_dict` that is no teacher's name
BATCHES_WITHOUT = 3  # rollout batches in which no rollout has a teacher, after which that is an error
Prompt = str | list[Message]


@dataclass(frozen=True)
class Teacher:
    """A model that scores, by name; "" is the only one."""

    name: str
    # unwrapped policy -> the teacher, within the context; of a server it is not called
    within: Callable[[Any], AbstractContextManager[Any]]
    context: int | None = None  # most tokens it has positions for; None: as many as the policy
    vocabulary: int | None = None  # tokens that it has logits for; None: as many as the policy
    model: Any = None  # a model of its own; None: the policy's, with an adapter or without
    reference: Reference | None = None  # its weights where they are in checkpoints
    follows: bool = False  # it moves towards the policy every few optimizer steps
    head_moves: bool = False  # the weights of its head change while the policy is trained
    server: ServerScorer | None = None  # that scores instead of a model here


class TeacherPrompt(NamedTuple):
    """Facts from which a function of `teacher_prompt_template` makes the prompt that a teacher reads."""

    prompt: Prompt  # of the rollout, text or messages
    row: dict[str, Any]  # of the dataset
    rollout: Rollout
    reward: float | None  # total of the rollout, None without any
    solution: str | None  # a rewarded answer by another rollout of its group
    feedback: str | None  # what the environment or the row says of the answer


PromptMaker = Callable[[TeacherPrompt], Prompt | None]


@dataclass(eq=False)
class TeacherScorer:
    """Scores rollouts under their teachers."""

    run: Run
    scorer: BatchScorer
    teachers: dict[str, Teacher]
    codec: PromptCodec
    prompt_of: PromptMaker | None  # makes the teacher's own prompt; None: it reads the rollout's
    reads_solutions: bool
    reward_weights: Tensor  # [F]
    column: str  # with the name of a row's teacher, where there are several
    success_reward: float  # smallest total reward of an answer that is shown to the teacher of others
    alpha: float  # share of the policy that a follower takes in
    # Counts of tokens at each position that the teacher and the policy name. A server names as many as both together,
    # and the sampled token is added where the policy's are asked for.
    names: tuple[int, int] = (0, 0)
    beta: float | None = None  # of a divergence over the whole vocabulary, which the loss computes; None without one
    _patience: int = field(default=BATCHES_WITHOUT, init=False)  # 0 once some rollout of training had a teacher
    _warned: bool = field(default=False, init=False)
    _heads: dict[str, TeacherHead] = field(default_factory=dict, init=False)  # that do not move

    def __call__(self, rollouts: RolloutBatch, batch: TrainBatch, mode: Mode) -> tuple[TrainBatch, dict[str, Stat]]:
        """The batch of these rollouts with their teachers' log-probs, and metrics. Collective."""
        names = self._teacher_of(rollouts)
        prompts, unread = self._prompts(rollouts, batch, names)
        values = torch.full((batch.num_tokens,), torch.nan, device=batch.token_ids.device)
        owners = segment_ids(batch.lengths, batch.num_tokens)
        stats: dict[str, Stat] = {}
        hidden: list[tuple[Tensor, Tensor]] = []  # of each teacher: its tokens [N] and their hidden states
        batch, tops = self._named_by_the_policy(batch, mode)
        parts = {name: self._part(name, batch, names, prompts) for name in self.teachers}
        begun = self._begin({name: part for name, (_, part) in parts.items()})
        try:
            for name, teacher in self.teachers.items():  # all processes in one order, also those without a row of it
                rows, part = parts[name]
                scored = self._scores(teacher, part, mode, begun.get(name))
                if scored.hidden is not None:
                    hidden.append((rows[owners], scored.hidden))
                values[rows[owners]] = torch.where(part.sampled, scored.logprobs, torch.nan)
                if tops is not None and batch.named_ids is not None:
                    if teacher.server is None:
                        ids, logprobs = named_by_both(part, scored, self.names[0])
                    else:
                        ids, logprobs = named_by_server(part, scored, tops.shape[1], self.names[1] > 0)
                    batch.named_ids[rows[owners]], tops[rows[owners]] = ids, logprobs
                if name:
                    stats |= _kl_of(name, batch, values, rows[owners])
        finally:
            for future in begun.values():
                future.cancel()
        broken = batch.sampled & values.isinf()
        values = torch.where(broken, torch.nan, values)
        known = batch.sampled & ~values.isnan()
        rows_scored = torch.tensor([prompt is not None for prompt in prompts], device=batch.lengths.device)
        broken |= batch.sampled & values.isnan() & expand(rows_scored, batch.lengths, batch.num_tokens)
        self._check(sum(prompt is not None for prompt in prompts), int(broken.sum()), mode)
        stats["teacher/fraction"] = Mean(known.sum().item(), batch.sampled.sum().item())
        stats["teacher/too_long"] = Sum(float(unread))
        stats["teacher/not_finite"] = Mean(broken.sum().item(), max(batch.sampled.sum().item(), 1))
        return replace(batch, teacher_logprobs=values, teacher_tops=tops, **joined_hidden(hidden)), stats

    def heads(self) -> Teachers | None:
        """The teachers' heads as they are, where the loss compares the whole vocabulary. Collective.

        One that moves has not moved since it scored, as a rollout batch has a single optimizer step then
        (`check_heads`).
        """
        if self.beta is None:
            return None
        policy, found = self.run.policy, list[TeacherHead]()
        for name, teacher in self.teachers.items():
            if name not in self._heads or teacher.head_moves:
                with teacher.within(policy) as model, torch.no_grad():
                    inner = self.scorer.scorer.unwrap(model)
                    reshard(inner)
                    self._heads[name] = teacher_head(head_of(inner))
            found.append(self._heads[name])
        return Teachers(tuple(found), self.beta)

    def _part(
        self, name: str, batch: TrainBatch, names: Sequence[str | None], prompts: Sequence[list[int] | None]
    ) -> tuple[Tensor, TrainBatch]:
        """[B] mask of the rollouts that a teacher scores, and these with the prompts that it reads."""
        has = [one == name and prompt is not None for one, prompt in zip(names, prompts, strict=True)]
        rows = torch.tensor(has, dtype=torch.bool, device=batch.lengths.device)
        part = batch.select(rows.nonzero()[:, 0]).unrouted()  # a teacher has experts of its own
        if self.prompt_of is not None:
            own = [prompt for prompt, chosen in zip(prompts, has, strict=True) if chosen and prompt is not None]
            part = replace(part, **distinct_prompts(own, part.lengths.device))
        return rows, part

    def _begin(self, parts: Mapping[str, TrainBatch]) -> dict[str, "Future[list[list[ScoredToken]]]"]:
        """Ask the teachers that are servers, which score while those of this process do."""
        top, temperature = sum(self.names), self.run.args.temperature
        return {
            name: teacher.server.begin(requests_of(parts[name], top, temperature))
            for name, teacher in self.teachers.items()
            if teacher.server is not None
        }

    def _scores(
        self, teacher: Teacher, part: TrainBatch, mode: Mode, begun: "Future[list[list[ScoredToken]]] | None"
    ) -> TokenScores:
        if teacher.server is not None and begun is not None:
            return scores_of(part, teacher.server.wait(begun), sum(self.names))
        run = self.run
        asked: dict[str, Any] = {"top": self.names[0], "hidden": self.beta is not None}
        with teacher.within(run.policy) as model:
            return self.scorer.scores(model, part, **asked, rows=run.algebra.rows(mode))

    def _named_by_the_policy(self, batch: TrainBatch, mode: Mode) -> tuple[TrainBatch, Tensor | None]:
        """The batch with its likeliest tokens under the policy and room for the teacher's, and for all log-probs."""
        of_teacher, of_policy = self.names
        if not of_teacher + of_policy:
            return batch, None
        served = [teacher.server is not None for teacher in self.teachers.values()]
        width, device = of_teacher + of_policy + (any(served) and of_policy > 0), batch.token_ids.device
        ids = torch.full((batch.num_tokens, width), -1, device=device)
        if of_policy and not all(served):
            found = self.scorer.scores(self.run.policy, batch, top=of_policy, rows=self.run.algebra.rows(mode)).top_ids
            assert found is not None, "asked for"
            ids[:, : found.shape[1]] = found
        return replace(batch, named_ids=ids), torch.full((batch.num_tokens, width), -torch.inf, device=device)

    def _teacher_of(self, rollouts: RolloutBatch) -> list[str | None]:
        """Name of each rollout's teacher, or None; CheckError for an unknown name."""
        if "" in self.teachers:
            return [""] * len(rollouts.rollouts)
        names = []
        for sample in rollouts.samples:
            name = sample.row.get(self.column) or None
            if name is not None and name not in self.teachers:
                raise unknown_teacher(sample.prompt, self.column, name, self.teachers)
            names.append(name)
        return names

    def _prompts(
        self, rollouts: RolloutBatch, batch: TrainBatch, names: Sequence[str | None]
    ) -> tuple[list[list[int] | None], int]:
        """Tokens that each rollout's teacher reads before the completion, None without a teacher, and how many rollouts
        have none as they are too long for it."""
        too_long = 0
        found: list[list[int] | None] = []
        facts = self._facts(rollouts)  # collective
        for number, (name, rollout) in enumerate(zip(names, rollouts.rollouts, strict=True)):
            ids: list[int] | None = None if name is None else list(rollout.prompt_ids)
            if name is not None and self.prompt_of is not None:
                starts_within = any(follows < len(rollout.prompt_ids) for _, follows in rollout.strands)
                try:
                    ids = None if starts_within else self._read(facts[number])
                except PromptTooLong:
                    ids, too_long = None, too_long + 1
            if ids is not None and name is not None:
                teacher = self.teachers[name]
                longest = teacher.context or self.codec.max_context
                if longest is not None and len(ids) + len(rollout.completion_ids) > longest:
                    ids, too_long = None, too_long + 1
                elif teacher.vocabulary and max([*ids, *rollout.completion_ids], default=0) >= teacher.vocabulary:
                    ids = None
            found.append(ids)
        return found, too_long

    def _read(self, facts: TeacherPrompt) -> list[int] | None:
        assert self.prompt_of is not None, "asked for"
        try:
            prompt = self.prompt_of(facts)
        except CheckError:  # which names the column
            raise
        except Exception as error:
            raise ValueError(
                f"teacher_prompt_template={self.run.args.teacher_prompt_template!r} failed: {format_error(error)}"
            ) from error
        if prompt is None or not len(prompt):
            return None
        tools = row_tools(facts.row) if is_conversational(prompt) else []
        return list(self.codec.read(prompt, facts.row.get("chat_template_kwargs"), tools or None).ids)

    def _facts(self, rollouts: RolloutBatch) -> list[TeacherPrompt]:
        """Facts about each rollout. Collective where answers of the group are among them."""
        if self.prompt_of is None:
            return []
        totals = weighted_total(rollouts.rewards.double(), self.reward_weights.double()).tolist()
        rewards = [None if math.isnan(total) else total for total in totals]
        solutions = self._solutions(rollouts, rewards)
        facts = []
        for sample, rollout, reward, solution in zip(
            rollouts.samples, rollouts.rollouts, rewards, solutions, strict=True
        ):
            said = rollout.extras.get("feedback", sample.row.get("feedback"))
            prompt = rollout.asked(sample.row)
            facts.append(TeacherPrompt(prompt, sample.row, rollout, reward, solution, as_plain(said)))
        return facts

    def _solutions(self, rollouts: RolloutBatch, rewards: Sequence[float | None]) -> list[str | None]:
        """For each rollout the best rewarded answer of another one of its group, from `teacher_success_reward` on."""
        if not self.reads_solutions:
            return [None] * len(rewards)
        run, least = self.run, self.success_reward
        answers = [
            (sample.prompt, reward, answer_of(rollout)) if reward is not None and reward >= least else None
            for sample, rollout, reward in zip(rollouts.samples, rollouts.rollouts, rewards, strict=True)
        ]
        shares = run.collectives.gather(answers, "share the rewarded answers of groups")
        every = [answer for share in shares for answer in share]
        first = sum(len(share) for share in shares[: run.collectives.rank])
        found: list[str | None] = []
        for number, sample in enumerate(rollouts.samples, first):
            others = [
                answer
                for place, answer in enumerate(every)
                if answer is not None and answer[0] == sample.prompt and place != number
            ]
            found.append(max(others, key=lambda answer: answer[1])[2] if others else None)
        return found

    def _check(self, rollouts: int, broken: int, mode: Mode) -> None:
        """CheckError if no rollout of the first rollout batches has a teacher; one warning of log-probs that are not
        finite.

        The error is a warning where teachers are shown answers of the group, as these may come later. Collective.
        """
        if mode == "train" and self._patience:
            with_one = sum(self.run.collectives.gather(rollouts, "count the rollouts with a teacher"))
            self._patience = 0 if with_one else self._patience - 1
            if not with_one and not self._patience:
                evidence = f"no rollout of {BATCHES_WITHOUT} rollout batches has a teacher: {self._why_none()}"
                fix = "Look at a few rows: do they have what the teacher's prompt needs?"
                if self.reads_solutions:
                    report([Finding.warning("teacher-nothing", evidence, fix)])
                else:
                    raise CheckError.of("teacher-nothing", evidence, fix)
        if broken and not self._warned:
            self._warned = True
            warn(
                f"the teacher's log-prob of {broken} sampled tokens is infinite or NaN, so they are left out of its"
                " term. Likely, the teacher masks these tokens, or it overflows. teacher/not_finite counts them."
            )

    def _why_none(self) -> str:
        args = self.run.args
        if args.teacher_prompt:
            return f"every row lacks a prompt in the column {args.teacher_prompt!r}, or it is too long."
        if args.teacher_prompt_template:
            return "every rollout lacks a field of teacher_prompt_template, or its prompt is too long."
        return f"no row names a teacher in the column {self.column!r}, or all rollouts are too long for theirs."

    @property
    def follows(self) -> bool:
        """True if some teacher follows the policy."""
        return any(teacher.follows for teacher in self.teachers.values())

    def follow(self) -> None:
        """Move the followers, after an optimizer step."""
        for teacher in self.teachers.values():
            if teacher.follows and teacher.reference is not None:
                teacher.reference.follow(self.run.policy, self.alpha)

    def state_dict(self) -> dict[str, Any]:
        """Weights of teachers that are the policy, and log-probs by which the model of a server is known again."""
        weights = {name: one.reference.state_dict() for name, one in self.teachers.items() if one.reference is not None}
        served = {name: one.server.fingerprint for name, one in self.teachers.items() if one.server is not None}
        return {**weights, **({SERVED: served} if served else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, one in self.teachers.items():
            if one.reference is not None and state.get(name) is not None:
                one.reference.load_state_dict(state[name])
        report(self._check_served(state.get(SERVED) or {}))

    def _check_served(self, before: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
        """Warnings of teachers whose server has another model than when the checkpoint was written."""
        for name, one in self.teachers.items():
            if (
                one.server is not None
                and name in before
                and distance(one.server.fingerprint, before[name]) > SAME_MODEL
            ):
                yield Finding.warning(
                    "teacher-changed",
                    f"teacher={one.server.name!r} gives other log-probs than when the checkpoint was written, by"
                    f" {distance(one.server.fingerprint, before[name]):.3g} nats a token on average.",
                    "Serve the model that the run began with, unless the change is meant.",
                )


def joined_hidden(parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Fields of a batch with the hidden states of several teachers: the tokens [N] of each, and their states."""
    if not parts:
        return {}
    width, (tokens, first) = max(states.shape[1] for _, states in parts), parts[0]
    dtype = reduce(torch.promote_types, (states.dtype for _, states in parts))
    hidden = first.new_zeros(len(tokens), width, dtype=dtype)
    numbers = torch.full_like(tokens, -1, dtype=torch.long)
    for number, (of_teacher, states) in enumerate(parts):
        hidden[of_teacher, : states.shape[1]] = states.to(dtype)
        numbers[of_teacher] = number
    return {"teacher_hidden": hidden} | ({"teacher_numbers": numbers} if len(parts) > 1 else {})


def named_by_both(part: TrainBatch, scored: TokenScores, of_teacher: int) -> tuple[Tensor, Tensor]:
    """Ids [N, K] that the policy and, in the last `of_teacher` places, the teacher name, and the teacher's log-probs.

    A token that both name is there once; -1 and -inf where there are fewer.
    """
    assert part.named_ids is not None and scored.named is not None, "places for the names"
    ids, logprobs = part.named_ids.clone(), scored.named.float().clone()
    if of_teacher and scored.top_ids is not None and scored.top_logprobs is not None:
        first = ids.shape[1] - of_teacher
        known = (scored.top_ids[:, :, None] == ids[:, None, :first]).any(2)
        last = slice(first, first + scored.top_ids.shape[1])
        ids[:, last] = torch.where(known, -1, scored.top_ids)
        logprobs[:, last] = torch.where(known, -torch.inf, scored.top_logprobs.float())
    return ids, logprobs


def named_by_server(part: TrainBatch, scored: TokenScores, width: int, sampled_too: bool) -> tuple[Tensor, Tensor]:
    """Ids [N, width] that a server names, with the sampled token after them where it is not among them, and its
    log-probs; -1 and -inf where there are fewer."""
    assert scored.top_ids is not None and scored.top_logprobs is not None, "asked for"
    top = scored.top_ids.shape[1]
    ids = pad(scored.top_ids, (0, width - top), value=-1)
    logprobs = pad(scored.top_logprobs, (0, width - top), value=-torch.inf)
    if sampled_too:
        new = part.sampled & ~(scored.top_ids == part.token_ids[:, None]).any(1) & scored.logprobs.isfinite()
        ids[:, top] = torch.where(new, part.token_ids, -1)
        logprobs[:, top] = torch.where(new, scored.logprobs, -torch.inf)
    return ids, logprobs


def _kl_of(name: str, batch: TrainBatch, values: Tensor, tokens: Tensor) -> dict[str, Stat]:
    """`teacher/{name}/kl`: mean of log P - log T over one teacher's tokens, by the log-probs as sampled."""
    student = batch.old_logprobs if batch.old_logprobs is not None else batch.engine_logprobs
    if student is None:
        return {}
    known = tokens & batch.sampled & values.isfinite() & ~student.isnan()
    gap = torch.where(known, student - values, 0.0)
    return {f"teacher/{name}/kl": Mean(gap.sum().item(), known.sum().item())}


def answer_of(rollout: Rollout) -> str:
    """A rollout's answer as text: its last message, where it has several."""
    if isinstance(rollout.completion, str):
        return rollout.completion
    return as_plain(rollout.completion[-1].get("content") if rollout.completion else "") or ""


def as_plain(value: Any) -> str | None:
    """Text of a cell or a message, None where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, list):
        return "".join(part.get("text") or "" for part in value if isinstance(part, dict)) or None
    return str(value) or None


# ---- prompts ---------------------------------------------------------------------------------------------------------


def column_prompt(column: str, facts: TeacherPrompt) -> Prompt | None:
    """The prompt in a column of the row; ValueError where it is neither text nor messages."""
    prompt = facts.row.get(column)
    if prompt is None or isinstance(prompt, str) or not prompt or are_messages(prompt):
        return prompt
    raise CheckError.of(
        "prompt-type", f"the column {column!r} must hold text or messages, got {type(prompt).__name__}: {prompt!r:.120}"
    )


def template_prompt(template: str, facts: TeacherPrompt) -> Prompt | None:
    """The rollout's prompt with its last message (or its text) written by a template; None where a field is missing."""
    asked = facts.prompt
    last = asked if isinstance(asked, str) else as_plain(asked[-1].get("content")) or ""
    known = {**facts.row, "prompt": last, "context": as_plain(facts.row.get(CONTEXT))}
    known |= {"solution": facts.solution, "feedback": facts.feedback}
    values = {name: as_plain(known.get(name)) for name in fields_of(template)}
    if any(value is None for value in values.values()):
        return None
    text = template.format(**values)
    return text if isinstance(asked, str) else [*asked[:-1], {**asked[-1], "content": text}]


def fields_of(template: str) -> set[str]:
    """Names in the braces of a template; ValueError for braces that do not match."""
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def prompt_maker(args: OnlineConfig) -> PromptMaker | None:
    """The function that makes a teacher's prompt, None where it reads the rollout's; CheckError for a bad template."""
    if args.teacher_prompt is not None:
        return partial(column_prompt, args.teacher_prompt)
    template = args.teacher_prompt_template
    if template is None:
        return None
    if is_reference(template) and not re.search(r"[{}\s]", template):
        made: PromptMaker = resolve(template, "teacher_prompt_template")
        return made
    try:
        names = fields_of(template)
    except ValueError as error:
        names = None
        problem = str(error)
    if not names or not all(name.isidentifier() for name in names):
        problem = "it has no field in braces" if names == set() else f"its braces are no fields ({names or problem})"
        raise CheckError.of(
            "setting-format",
            f"teacher_prompt_template={template!r}: {problem}.",
            "Write text with {prompt}, {context}, {solution}, {feedback} or columns, and {{ for a brace, or"
            " path/to/file.py:name.",
        )
    return partial(template_prompt, template)


def columns_read(args: OnlineConfig) -> set[str]:
    """Columns of the dataset that teachers may read."""
    if args.teacher is None:
        return set()
    read = {args.teacher_column} if isinstance(args.teacher, dict) else set()
    if args.teacher_prompt:
        read.add(args.teacher_prompt)
    if template := args.teacher_prompt_template:
        read |= {CONTEXT, "feedback"}
        if "{" in template:
            read |= fields_of(template)
    return read


def check_columns(args: OnlineConfig, dataset: Any, role: str) -> Iterator[Finding]:
    """Errors of columns that every row's teacher needs and the dataset lacks."""
    if args.teacher is None or dataset is None:
        return
    columns = columns_of(dataset)
    needed = {args.teacher_column: "names the teacher"} if isinstance(args.teacher, dict) else {}
    if args.teacher_prompt:
        needed[args.teacher_prompt] = "holds the teacher's prompt"
    template = args.teacher_prompt_template or ""
    if "{" in template:
        own = {CONTEXT if name == "context" else name for name in fields_of(template) - {*GIVEN} | {"context"}}
        own -= set() if "{context}" in template else {CONTEXT}
        needed |= dict.fromkeys(own, "is a field of teacher_prompt_template")
    for column, what in needed.items():
        if column not in columns:
            yield Finding.error(
                "teacher-column",
                f"the column {column!r} {what}, and `{role}` has no such column; it has {', '.join(sorted(columns))}.",
                "Add it, or name another.",
            )


def unknown_teacher(row: int, column: str, name: Any, teachers: Mapping[str, Any]) -> CheckError:
    return CheckError.of(
        "teacher-name",
        f"row {row} has {column}={name!r}; there are: {', '.join(teachers)}.",
        "Leave the column empty for a row without a teacher.",
    )


# ---- making teachers -------------------------------------------------------------------------------------------------


def loaded_teacher(name: str, model: Any, policy: Any) -> Teacher:
    """A teacher that is a model of its own, already placed."""
    rows = full_shape(model.get_output_embeddings().weight)[0]
    own = full_shape(policy.get_output_embeddings().weight)[0]
    return Teacher(name, lambda policy: nullcontext(model), max_context(model), rows if rows < own else None, model)


def served_teacher(name: str, server: ServerScorer, last: int) -> Teacher:
    """A teacher that is a server; `last` is the largest id of the policy's tokenizer."""
    vocabulary = None if server.whole else last + 1
    return Teacher(name, nullcontext, server.max_context, vocabulary, server=server)


def policy_teacher(name: str, kind: str, reference: Reference | None, policy: Any) -> Teacher:
    """A teacher that is the policy, now or at another time."""
    weight = getattr(policy.get_output_embeddings(), "weight", None)
    head_moves = kind != "start" and (weight is None or weight.requires_grad)
    if reference is None:
        return Teacher(name, lambda policy: nullcontext(policy), head_moves=head_moves)
    own: dict[str, Any] = {"model": reference.copy, "reference": reference, "head_moves": head_moves}
    return Teacher(name, reference.model, follows=kind == "follower", **own)


def check_teachers(sources: Mapping[str, Any], policy: Any, tokenizer: Any, location: dict[str, Any]) -> list[Finding]:
    """Errors of teachers (folders, hub ids or models, by name) with another vocabulary than the policy's."""
    found: list[Finding] = []
    for source in dict.fromkeys(sources.values()):
        if not is_loaded(source):
            continue
        name = source if isinstance(source, str) else source_of(source)
        own = tokenizer_of_source(name, location) if name else None
        base, place = name, location
        if isinstance(source, str) and (adapter := stored_adapter(source, location)) is not None:
            base, place = adapter.base, {} if adapter.revision is None else {"revision": adapter.revision}
            own = own or tokenizer_of_source(base, place)
        found += [] if own is None else check_tokenizer(name, own, tokenizer)
        config = config_of_source(base, place) if isinstance(source, str) else source.config
        if config is not None:
            rows, ours = (one.get_text_config().vocab_size for one in (config, policy.config))
            found += check_vocabulary(name, rows, ours, tokenizer)
    return found


def check_tokenizer(source: str, tokenizer: Any, policy: Any) -> Iterator[Finding]:
    """Errors of a teacher, from `source`, whose tokenizer has other tokens than the policy's."""
    theirs, ours = (one.get_vocab() for one in (tokenizer, policy))
    differ = sorted((number, token) for token, number in ours.items() if theirs.get(token) != number)
    if not differ:
        return
    number, token = differ[0]
    other = next((text for text, place in theirs.items() if place == number), None)
    yield Finding.error(
        "teacher-tokenizer",
        f"teacher={source!r} has another tokenizer than the policy: {len(differ):,} of {len(ours):,} tokens differ, the"
        f" first is {number} ({token!r} / {other!r}). Distillation compares the same tokens.",
        "Choose a teacher of the same family, or train on its answers.",
    )


def check_vocabulary(source: str, rows: int, ours: int, tokenizer: Any) -> Iterator[Finding]:
    """Errors of a teacher, from `source`, with logits for `rows` tokens only, fewer than the tokenizer has."""
    if max(tokenizer.get_vocab().values()) >= rows:
        yield Finding.error(
            "teacher-vocabulary",
            f"teacher={source!r} has logits for {rows:,} tokens and the policy for {ours:,}, and ids from {rows:,} on"
            " belong to tokens of the tokenizer: the teacher has no probability for them.",
            "Choose a teacher with the policy's vocabulary.",
        )


def check_heads(scorer: TeacherScorer, model: Any, on_policy: bool) -> Iterator[Finding]:
    """Errors of teachers with whose heads the whole vocabulary cannot be compared."""
    if scorer.beta is None:
        return
    for teacher in scorer.teachers.values():
        check_plain_head(head_of(scorer.scorer.scorer.unwrap(model if teacher.model is None else teacher.model)))
        if teacher.head_moves and not on_policy:
            yield Finding.error(
                "teacher-head",
                "teacher_top_k=-1 needs the teacher's head as it was when it scored the rollouts, but this teacher is"
                " trained with the policy, and a rollout batch has several updates.",
                "Set teacher_top_k=64, take one update for each rollout batch (num_iterations=1, steps_per_generation="
                "gradient_accumulation_steps), or train an adapter that leaves the head out.",
            )


def source_of(model: Any) -> str:
    """Folder or hub id that a model was loaded from, by its config; "" if that has none."""
    return str(getattr(model.config, "_name_or_path", "") or "")


def check_prompts(args: OnlineConfig, vision: bool) -> Iterator[Finding]:
    """Errors of a teacher's prompts: a template that cannot be read, or prompts of its own next to images."""
    if args.teacher is None:
        return
    if prompt_maker(args) is not None and vision:
        yield Finding.error(
            "teacher-layout",
            "a teacher with a prompt of its own cannot be shown the images of a rollout.",
            "Leave out teacher_prompt and teacher_prompt_template, or pass `processing_class=processor.tokenizer` to"
            " train on text alone.",
        )
    served = next((source for source in args.teachers.values() if is_server(source)), None)
    if served is not None and vision:
        yield Finding.error(
            "teacher-layout",
            f"teacher={served!r} is a server, which is not sent the images of a rollout.",
            "Load the teacher by its folder or hub id, or pass `processing_class=processor.tokenizer` to train on text"
            " alone.",
        )
