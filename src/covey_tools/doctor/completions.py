"""Completions: experiments with the chat template, the end of sequence, length and temperature decide on the cause."""

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from math import exp
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from covey.core.findings import LEVELS, Effect, Finding
from covey.core.records import FinishReason, Rollout
from covey.core.transcript import content_text
from covey.observability.diagnostics import said_of
from covey.policy.loading import end_token_ids
from covey.rollout.prompts import is_conversational
from covey.rollout.tools.toolbox import call_stats
from covey_tools.doctor.examined import Encode, ExaminedRun, SampleBatch
from covey_tools.doctor.prompts import rendered
from covey_tools.doctor.reward_values import paid_for_length

FAMILIES = {  # prefix of a turn, its end, opening of the answer
    "ChatML": ("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "Llama 3": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": ("<start_of_turn>{role}\n", "<end_of_turn>\n", "<start_of_turn>model\n"),
    "Phi": ("<|{role}|>\n", "<|end|>\n", "<|assistant|>\n"),
}
MARK = re.compile(r"<\|?[a-z_]+\|?>")  # a control token of these
ANY_MARK = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|<(?:start|end)_of_turn>|<</?SYS>>|^###? ?[A-Z][a-z]+:", re.MULTILINE)
"""A control token of any model's template."""

ERROR = re.compile(
    r"\b(?:error|exception|traceback|fail(?:ed|ure)?|unavailable|denied|forbidden|time[d ]*out|not found|refused)\b",
    re.I,
)
"""Words by which a tool's answer is taken for an error."""


@dataclass(frozen=True)
class Experiment:
    """Completions under one change, and the finding if they are better."""

    code: str
    change: str
    evidence: str
    fix: str
    base: SampleBatch
    batch: SampleBatch
    suspected: bool = False  # other evidence than these completions supports it
    certain: bool = False  # the prompts alone prove it
    otherwise: str = ""  # advice where completions are not better
    masked: bool = False  # what is cut is left out of the loss, so that its share counts as well

    @property
    def worth(self) -> float:
        return self.base.gain(self.batch)

    @property
    def ended(self) -> float:
        return self.base.cut - self.batch.cut

    @property
    def strength(self) -> float:
        return self.worth + 0.3 * max(self.ended, 0.0) + 0.05 * self.suspected

    def level(self, run: ExaminedRun) -> str | None:
        """An error where nothing is learnt as it is; a warning where less is."""
        masked = bool(run.args.mask_truncated_completions) and self.base.cut > 0.95
        flat = self.base.signal(run.group) < 0.5 or self.base.mean <= self.batch.mean / 3
        ends = self.ended >= 0.5 and self.worth > -0.1
        if (self.worth >= 0.2 and flat) or (ends and (masked or self.code == "never-ends")):
            return "error"
        if self.worth >= 0.1:
            return "error" if self.suspected else "warning"
        if self.certain:
            return "error" if flat else "warning"
        if ends and self.code == "template":
            return "warning" if flat else "note"
        return "note" if self.code == "completions-cut" and (ends or self.base.cut > 0.9) else None

    def finding(self, run: ExaminedRun) -> Finding | None:
        base, batch, level = self.base, self.batch, self.level(run)
        if level is None:
            return None
        many, few = len(base.present), len(batch.present)
        reward = f", and the mean reward is {batch.mean:.3g} instead of {base.mean:.3g}"
        if run.suite.abstains:
            reward = ""
        elif not self.worth:
            reward = f", and the mean reward is the same but for chance ({batch.mean:.3g}, {base.mean:.3g} without)"
        proof = (
            f"{self.change} {round((1 - batch.cut) * few)} of {few} samples end by themselves instead of"
            f" {round((1 - base.cut) * many)} of {many}{reward}."
        )
        return Finding(self.code, level, self.evidence, self.fix, proof, self.effect(run), self.otherwise)

    def effect(self, run: ExaminedRun) -> Effect | None:
        """On the reward; where chance explains that, on the share that is cut. None: prompts alone are the proof."""
        of_reward = self.code == "completions-cut" and not (self.masked or run.suite.abstains)
        if self.worth or of_reward:
            return Effect(0.0, self.worth)
        if self.certain and self.ended <= 0:
            return None
        return Effect(self.base.cut, self.batch.cut, higher_is_better=False)


def experiments(run: ExaminedRun) -> Iterator[Finding]:
    """The best of all changes that make completions better; the others are taken for its consequences."""
    longer = [*_longer(run)]
    if paid := [one for one in longer if isinstance(one, Finding)]:  # for length: no limit would be enough
        yield from paid
        longer = []
    found = [*_ends(run), *_stopped(run), *_templates(run), *(one for one in longer if isinstance(one, Experiment))]
    proven = [(one.strength, finding) for one in found if (finding := one.finding(run)) is not None]
    best = min(proven, key=lambda pair: (LEVELS.index(pair[1].level), -pair[0]))[1] if proven else None
    if best is not None:
        yield best
    if run.args.mask_truncated_completions and run.base.cut == 1.0 and (best is None or best.level != "error"):
        yield _all_masked(run)


def _cutting(run: ExaminedRun) -> tuple[str, int]:
    """Name and value of the limit at which most of the cut completions end.

    `max_turn_length` ends those whose last turn has that many tokens although `max_completion_length` left room.
    """
    limit, base = run.turn_limit, run.base
    cut = [one for one in base.present if one.finish is FinishReason.LENGTH]
    if limit is not None:
        by_turn = sum(len(one.completion_ids) < base.limit and (_turns(one) or [0])[-1] >= limit for one in cut)
        if 2 * by_turn > len(cut):
            return "max_turn_length", limit
    return "max_completion_length", base.limit


def _turns(rollout: Rollout) -> list[int]:
    """Number of tokens of each turn of the policy."""
    return [sum(1 for _ in turn) for sampled, turn in groupby(rollout.sampled) if sampled]


def _all_masked(run: ExaminedRun) -> Finding:
    """Error of a loss from which every completion is left out; it needs no experiment."""
    count, (name, limit) = len(run.base.present), _cutting(run)
    some = "turns" if name == "max_turn_length" else "completions"
    return Finding(
        "completions-cut",
        "error",
        f"all of {count} completions are cut at {name}={limit}, and mask_truncated_completions=True leaves those out of"
        " the loss: nothing is trained.",
        f"Raise {name} until some {some} end by themselves, or set mask_truncated_completions=False.",
        f"0 of {count} completions count in the loss.",
    )


def calls(run: ExaminedRun) -> Iterator[Finding]:
    """Calls of tools among the samples: none, ones that cannot be read, ones that fail."""
    if not run.needs_calls:
        return
    args, rollouts = SimpleNamespace(**{**vars(run.args), "output_dir": run.place}), run.base.rollouts
    log = {name: stat.value() for name, stat in call_stats(rollouts).items()}
    log["rollouts/tool_budget"] = fmean(float(one.finish is FinishReason.TOOL_BUDGET) for one in rollouts)
    said = [one for one in said_of(log, args) if one[0].startswith("tools-")]
    level = "warning" if run.base.spread.any() else "error"
    for code, evidence, fix in said:
        counted = sum((Counter(one.calls) for one in rollouts), Counter[str]())
        shown = ", ".join(f"{times} {kind}" for kind, times in counted.most_common()) or "no call"
        answered = f" Most often {error}." if (error := _most_common_error(rollouts)) else ""
        yield Finding(
            code, level, f"of {len(rollouts)} samples: {evidence}", fix, f"The samples made: {shown}.{answered}"
        )
    if not said:
        yield from _only_errors(rollouts, level)


def answered_calls(rollouts: Sequence[Rollout]) -> list[tuple[str, str, str]]:
    """Name, arguments and answer of each call in the messages of rollouts."""
    found = []
    for rollout in rollouts:
        waiting: list[tuple[str, str]] = []
        for message in rollout.completion if isinstance(rollout.completion, list) else ():
            for call in message.get("tool_calls") or ():
                made = call.get("function", call)
                waiting.append((str(made.get("name")), json.dumps(made.get("arguments"), sort_keys=True, default=str)))
            if message.get("role") == "tool" and waiting:
                found.append((*waiting.pop(0), content_text(message.get("content"))))
    return found


def _most_common_error(rollouts: Sequence[Rollout]) -> str:
    failed = [one for one in answered_calls(rollouts) if ERROR.search(one[2])]
    if not failed:
        return ""
    answer = Counter(answer for _, _, answer in failed).most_common(1)[0][0]
    name, arguments = next(one[:2] for one in failed if one[2] == answer)
    return f"{name}({arguments[:60]}) got {answer[:120]!r}"


def _only_errors(rollouts: Sequence[Rollout], level: str) -> Iterator[Finding]:
    """Tools that answer different calls with one and the same text, which speaks of an error."""
    answers: dict[str, list[tuple[str, str]]] = {}
    for name, arguments, answer in answered_calls(rollouts):
        answers.setdefault(name, []).append((arguments, answer))
    for name, made in answers.items():
        texts, different = {answer for _, answer in made}, {arguments for arguments, _ in made}
        if len(texts) > 1 or len(different) < 3 or not ERROR.search(text := texts.pop()):
            continue
        yield Finding(
            "tools-failing",
            level,
            f"{name} answers every call with the same text, {text[:120]!r}: it raises nothing, so that no call counts"
            " as failed.",
            "Make such a call yourself, and repair what is behind the tool; let it raise an exception where it fails,"
            " which the run counts and names.",
            f"{len(made)} calls with {len(different)} different arguments got it.",
        )


def temperature(run: ExaminedRun) -> Iterator[Finding]:
    """Groups whose samples are alike by the sampling settings, and differ at temperature 1."""
    args, base = run.args, run.base
    tests = {
        "temperature": args.temperature < 0.9,
        "top_k": 0 < args.top_k <= 3,
        "top_p": args.top_p < 0.7,
        "min_p": (args.min_p or 0) > 0.3,
    }
    narrow = {name: getattr(args, name) for name, is_narrow in tests.items() if is_narrow}
    before = _different(base)
    if not narrow or before > 0.6 or not run.has_time("temperature-low"):
        return
    open_: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}
    other = run.again(**open_)
    after, signal, now = _different(other), base.signal(run.group), other.signal(run.group)
    if after - before < 0.2 and now - signal <= 0.15:  # where few answers are possible, few differ at any temperature
        return
    settings = ", ".join(f"{name}={value:g}" for name, value in narrow.items())
    yield Finding(
        "temperature-low",
        "error" if before < 0.2 or (signal < 0.35 and now - signal > 0.15) else "warning",
        f"with {settings} only {before:.0%} of the samples of a group differ from each other, and {signal:.0%} of the"
        " groups have a signal.",
        f"Set {', '.join(f'{name}={open_[name]}' for name in narrow)}.",
        f"Sampled so, {after:.0%} differ, and {now:.0%} of the groups have a signal.",
        Effect(before, after),
    )


def _different(batch: SampleBatch) -> float:
    """Share of completions that differ from all earlier ones of their group; the first of each group is not counted."""
    groups = [batch.rollouts[start : start + batch.size] for start in range(0, len(batch.rollouts), batch.size)]
    texts = [[str(one.completion) for one in group if not one.absent] for group in groups]
    later = sum(len(group) - 1 for group in texts if group)
    return sum(len(set(group)) - 1 for group in texts if group) / max(later, 1)


def _templates(run: ExaminedRun) -> Iterator[Experiment]:
    """Other ways to write the same prompts."""
    base = run.base
    firsts = base.samples[:: base.size]
    rows = [sample.row for sample in firsts]
    if not run.single or any(row.get("prompt") is None for row in rows):
        run.leave_out("kind", "template")
        return
    chat = is_conversational(rows[0]["prompt"])
    spoken = chat and all(row["prompt"][-1]["role"] == "assistant" for row in rows)
    if spoken and run.has_time("template"):
        yield Experiment(
            "template",
            "With the last message as a user's",
            "the last message of the prompts has the role of the assistant, so that the model continues it.",
            "Give the question the role `user`; end a prompt with an assistant's message only where the answer begins"
            " with it.",
            base,
            run.sampled_of(
                [(one.prompt, _asked_by_the_user(one.row)) for one in firsts], base.size, max_tokens=base.limit
            ),
        )
    opening = _opening(run.codec, rows[0]) if chat else None
    if opening and run.has_time("template"):
        added = run.tokenizer(opening, add_special_tokens=False)["input_ids"]
        yield Experiment(
            "template",
            f"With {opening!r} at the end of prompts",
            f"the chat template ignores add_generation_prompt: prompts end without {opening!r}, which opens an answer.",
            "Correct the tokenizer's chat_template: let it write the opening of an answer if add_generation_prompt.",
            base,
            run.again(encode=lambda row: [*run.codec.read_row(row).ids, *added]),
            suspected=True,
            certain=True,
        )
    ids: list[int] = []
    with suppress(ValueError):  # it cannot be read
        ids = run.codec.read_row(rows[0]).ids
    shown = str(run.tokenizer.decode(ids))
    own = run.tokenizer.get_vocab()
    foreign = next((mark for mark in ANY_MARK.findall(shown) if mark not in own), None)  # text to this tokenizer
    of_template = foreign is not None and chat and foreign not in str(rows[0]["prompt"])
    is_control = foreign is not None and not foreign.startswith("#")  # some models are trained on "### Instruction:"
    if not chat and run.tokenizer.chat_template is not None and run.has_time("template"):
        yield Experiment(
            "template",
            "Written as a conversation by the model's chat template,",
            "prompts are plain text, and the model has a chat template: it continues with the text rather than"
            " answering.",
            "Set prompts_as_messages=True, which makes each text a message of the user; a system_prompt in the run file"
            " does so, too.",
            base,
            run.again(encode=_as_conversation(run.codec)),
        )
    if not (opening or foreign or base.signal(run.group) < 0.5 or base.cut >= 0.5):
        return
    for name, (begin, _, _) in FAMILIES.items():
        tokenizer = copy.copy(run.tokenizer)
        if not with_template(tokenizer, name):
            continue
        opens = tokenizer.convert_tokens_to_ids(MARK.findall(begin.format(role="user"))[0])
        if (foreign or opens not in ids) and run.has_time("template"):
            yield Experiment(
                "template",
                f"Written as {name}, whose control tokens the tokenizer has,",
                f"the model reads {shown[-80:]!r}, without the control tokens of {name} that its tokenizer has"
                + (f"; {foreign!r} is no control token of it." if foreign else "."),
                f"Set the tokenizer's chat_template to the model's ({name}).",
                base,
                run.again(encode=_as_conversation(replace(run.codec, tokenizer=tokenizer))),
                suspected=bool(foreign) or chat,
                certain=of_template and is_control,
            )


def _asked_by_the_user(row: dict[str, Any]) -> dict[str, Any]:
    *earlier, last = row["prompt"]
    return {**row, "prompt": [*earlier, {**last, "role": "user"}]}


def _opening(codec: Any, row: dict[str, Any]) -> str | None:
    """Text that opens an answer in the chat template, where prompts lack it."""
    messages = row["prompt"]
    if messages[-1]["role"] == "assistant":
        return None
    plain, asked = (rendered(codec, row, messages, generation) for generation in (False, True))
    answered = rendered(codec, row, [*messages, {"role": "assistant", "content": "ANSWER"}], False)
    common = answered.partition("ANSWER")[0]
    opening = common.removeprefix(plain)
    if not plain or plain != asked or not common.startswith(plain) or not opening.strip():  # " " belongs to the answer
        return None
    return opening


def _as_conversation(codec: Any) -> Encode:
    def encode(row: dict[str, Any]) -> list[int]:
        prompt = row["prompt"]
        messages = prompt if is_conversational(prompt) else [{"role": "user", "content": prompt}]
        return codec.read(messages).ids

    return encode


def with_template(tokenizer: Any, name: str) -> bool:
    """Give a tokenizer the template of a family; False if it lacks the control tokens."""
    family, own = FAMILIES[name], tokenizer.get_vocab()
    if not all(mark in own for text in family for mark in MARK.findall(text.format(role="user"))):
        return False
    begin, end, answer = (text.replace("\n", "\\n").replace("'", "\\'") for text in family)
    turn = begin.replace("{role}", "' + m['role'] + '")
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{{{{ '{turn}' + (m['content'] or '') + '{end}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{answer}' }}}}{{% endif %}}"
    )
    return True


def _ends(run: ExaminedRun) -> Iterator[Experiment]:
    """Tokens after which a completion should have ended, and settings that keep it from ending."""
    base = run.base
    if base.cut < 0.4:
        return
    ends = end_token_ids(run.trainer.model, run.tokenizer)
    special = {n for n, token in run.tokenizer.added_tokens_decoder.items() if token.special} - ends
    hits: Counter[int] = Counter()
    for rollout in base.rollouts:
        pairs = zip(rollout.completion_ids, rollout.logprobs or (), strict=False)
        sure = [token for token, logprob in pairs if token in special and exp(logprob) >= 0.2]
        hits.update(sure[:1])
    extra = dict(run.trainer.rollouts.params.extra)
    if hits and sum(hits.values()) >= 0.3 * base.cut * len(base.present) and run.has_time("never-ends"):
        stops = [token for token, _ in hits.most_common(3)]
        names = ", ".join(map(repr, run.tokenizer.convert_ids_to_tokens(stops)))
        known = ", ".join(map(repr, run.tokenizer.convert_ids_to_tokens(sorted(ends))))
        yield Experiment(
            "never-ends",
            f"With {names} as an end of sequence",
            f"{sum(hits.values())} of {len(base.present)} completions continue after {names}: only {known} ends one.",
            f"Set eos_token to {names} in the model's tokenizer and generation config; or generation_kwargs="
            f"{{'stop_token_ids': {stops}}}.",
            base,
            run.again(extra={**extra, "stop_token_ids": stops}),
        )
    if not run.has_time("never-ends"):
        return
    if again := _begins_again(base):
        text, count = again
        yield Experiment(
            "never-ends",
            f"With {text!r} as a stop text",
            f"{count} of {len(base.present)} completions continue with {text!r}, as the prompt's examples do.",
            f"Set generation_kwargs={{'stop': [{text!r}]}}.",
            base,
            run.again(extra={**extra, "stop": [text]}),
        )
    elif extra:
        yield Experiment(
            "never-ends",
            f"Without generation_kwargs={extra}",
            f"{base.cut:.0%} of the completions are cut at {'='.join(map(str, _cutting(run)))}, with"
            f" generation_kwargs={extra}.",
            "Remove what keeps completions from ending from generation_kwargs.",
            base,
            run.again(extra={}),
        )


def _stopped(run: ExaminedRun) -> Iterator[Experiment]:
    """Completions that stop texts or tokens of the settings end, rather than the model."""
    base, extra = run.base, dict(run.trainer.rollouts.params.extra)
    stops = {name: extra.pop(name) for name in ("stop", "stop_token_ids") if extra.get(name)}
    if not stops or not run.single:
        return
    ends = end_token_ids(run.trainer.model, run.tokenizer)
    ended = [one for one in base.rollouts if one.finish is FinishReason.STOP and one.completion_ids]
    early = sum(one.completion_ids[-1] not in ends for one in ended)
    if early < 0.3 * len(base.present) or not run.has_time("completions-cut"):
        return
    shown = ", ".join(f"{name}={value!r}" for name, value in stops.items())
    yield Experiment(
        "completions-cut",
        f"Without {shown}",
        f"{early} of {len(base.present)} completions are ended by generation_kwargs ({shown}), not by the model.",
        f"Remove {' and '.join(stops)} from generation_kwargs, or choose what comes after a whole answer.",
        base,
        run.again(extra=extra),
    )


def _begins_again(base: SampleBatch) -> tuple[str, int] | None:
    """Text that begins an example of prompts without a chat template, if most completions write another one.

    Of several (`\\nQuestion:` and `\\nAnswer:`) the one that completions come to first; the end of the line where no
    part of an example takes several lines.
    """
    prompts = [sample.row.get("prompt") for sample in base.samples]
    heads = Counter(head for one in prompts if isinstance(one, str) for head in set(re.findall(r"\n\w{1,12}:", one)))
    found = []
    for head, times in heads.items():
        places = [text.index(head) for text in base.texts if head in text]
        if times > len(prompts) / 2 and len(places) > len(base.texts) / 2:
            found.append((sum(places) / len(places), head, len(places)))
    if found and all(re.match(r"\w{1,12}:", line) for one in prompts for line in str(one).split("\n")):
        return "\n", sum("\n" in text for text in base.texts)
    return min(found)[1:] if found else None


def _longer(run: ExaminedRun) -> Iterator[Experiment | Finding]:
    """Room for longer completions or turns; or a finding, where any text of that length gets the reward."""
    base = run.base
    if base.cut < 0.3 or base.limit < run.limit or run.args.max_completion_length is None:
        return
    name, now = _cutting(run)
    of_turns = name == "max_turn_length"
    prompts, size = min(base.prompts, 4), base.size
    context = (run.codec.max_context or 2**20) - max(len(one.prompt_ids) for one in base.rollouts)
    most = min(4 * now if now >= 32 else 128, context, 1024, base.limit if of_turns else 1024)
    fits = run.tokens_within(min(run.seconds / 4, run.left / 2), prompts * size)
    limit = min(most, fits)
    if limit < 1.5 * now:
        if fits < most:
            run.leave_out("time", "completions-cut")
        return
    if of_turns:
        batch = run.sample(prompts, size, max_turn_length=limit, max_tokens=min(base.limit, fits))
    else:
        batch = run.sample(prompts, size, max_tokens=limit)
    short = base.first(batch.prompts)
    if (paid := paid_for_length(run, short.joined(batch))) is not None:
        yield paid
        return
    stopped = [one for one in batch.rollouts if one.finish is FinishReason.STOP]
    ended = [max(_turns(one), default=0) if of_turns else len(one.completion_ids) for one in stopped]
    enough = sorted(ended)[int(0.95 * (len(ended) - 1))] if ended else limit
    rounded = max(8, 1 << (enough - 1).bit_length())  # up to a power of 2
    fix = f"Set {name}={rounded}: 95% of those that ended took at most {enough} tokens."
    if of_turns:
        fix = f"Set {name}={min(rounded, base.limit)}: 95% of those that ended have turns of at most {enough} tokens."
    yield Experiment(
        "completions-cut",
        f"With {name}={limit} instead of {now}",
        f"{base.cut:.0%} of the completions are cut at {name}={now}.",
        fix,
        short,
        batch,
        masked=bool(run.args.mask_truncated_completions) and base.cut > 0.95,
        otherwise="More room gives no more reward: let the prompts ask for a short answer, or end it by a stop text"
        " (generation_kwargs={'stop': [...]}).",
    )
