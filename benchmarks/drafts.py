"""Drafts for the last sequences of a batch: how often they hold, what checking them costs, what that would bring.

    python -m benchmarks.drafts --task chain_sum --task copy --temperature 1.0
    python -m benchmarks.drafts --quick

When few sequences are left, a decoding step reads all weights for a handful of tokens, and one pass over several tokens
of each costs less than as many steps. A draft is what followed the longest match of a sequence's last tokens, in its
own, in the prompt or in the other completions of its group (Yang et al. 2023, arXiv 2304.04487). It holds as far as the
engine's random numbers draw the same tokens, so completions do not change. The engine does not draft in this way: this
benchmark says why. For each task it samples a batch with the built-in engine and prints

1. by the number of sequences left: how many of a draft's first tokens hold;
2. whether passes over whole completions draw the tokens that single steps drew (drafts are verified by the engine);
3. the processor time of a pass over several tokens of some sequences, in plain steps of these sequences;
4. the last steps of the batch, decoded again by these figures: plainly; with drafts as long as is expected to pay by
   how often matches held before; and with drafts of 8 tokens whose verification is free, which bounds every choice.
"""

import argparse
import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.machine import model_path
from covey.core.engine import SampleRequest, SamplingParams
from covey.engines.native.engine import NativeEngine
from covey.engines.native.prefill import continue_prompts, logit_tiles
from covey.engines.native.sampling import sample_tokens
from covey.policy.loading import end_token_ids

PROMPTS, GROUP, LIMIT = 6, 8, 160
LEFT = (1, 2, 4, 8, 16)  # numbers of sequences left, each row of the table up to the next
LONGEST_DRAFT = 8
LONGEST_KEY = 3  # matches are found by so many last tokens, or fewer
LONGEST_MATCH = 8  # longer ones count as this long
TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "spell_backward": {},
    "letter_counting": {},
    "copy": {},
}
"""Tasks of reasoning-gym with their settings; `copy` asks for one of `TEXTS` to be repeated."""
TEXTS = (
    "The old lighthouse keeper counted forty-two ships before the fog came in.",
    "Blue ink, seven candles and a borrowed map lay on the table.",
    "In 1987 the river Arno rose by three metres in a single night.",
    "Please send 12 boxes of tea to Marta Lindqvist, Harbour Street 9.",
    "def area(width, height): return width * height",
    "Nobody remembers why the clock in room 305 runs backwards.",
)


class Match(NamedTuple):
    """Earlier occurrence of a text's last tokens."""

    text: list[int]
    after: int  # index in `text` of the token that followed
    length: int  # tokens that agree, at most `LONGEST_MATCH`


class Continuations:
    """Where texts continued after the same 1 to `LONGEST_KEY` tokens, most recently."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def add(self, text: list[int], after: int) -> None:
        """Add the token of a text at this index, as the continuation of those before it."""
        for size in range(1, min(LONGEST_KEY, after) + 1):
            self._after[tuple(text[after - size : after])] = text, after

    def find(self, text: list[int], size: int) -> Match | None:
        """Match of the last `size` tokens of a text, and of more tokens before them."""
        found = self._after.get(tuple(text[-size:]))
        if found is None:
            return None
        source, after = found
        while size < min(LONGEST_MATCH, after, len(text)) and text[-size - 1] == source[after - size - 1]:
            size += 1
        return Match(source, after, size)


@dataclass(eq=False)
class Sequence:
    """Completion that is decoded again."""

    group: "Group"
    tokens: list[int]  # all of it
    text: list[int]  # its prompt and the tokens decoded so far
    own: Continuations = field(default_factory=Continuations)

    @property
    def decoded(self) -> int:
        return len(self.text) - len(self.group.prompt)

    @property
    def ended(self) -> bool:
        return self.decoded == len(self.tokens)

    def decode(self, count: int, rates: "Rates") -> None:
        """Decode so many tokens, and count which of them matches predicted."""
        for token in self.tokens[self.decoded : self.decoded + count]:
            if match := self.match():
                rates.count(match.length, match.text[match.after] == token)
            self.text.append(token)
            for index in (self.own, self.group.shared):
                index.add(self.text, len(self.text) - 1)

    def match(self) -> Match | None:
        """Longest match of the last tokens, rather in the completion itself than elsewhere."""
        for size in range(min(LONGEST_KEY, len(self.text)), 0, -1):
            if match := self.own.find(self.text, size) or self.group.shared.find(self.text, size):
                return match
        return None

    def draft(self) -> list[int]:
        """Up to `LONGEST_DRAFT` tokens that followed the match; a match in itself continues into the draft."""
        match = self.match()
        drafted: list[int] = []
        if match is not None:
            for at in range(match.after, match.after + LONGEST_DRAFT):
                if at < len(match.text):
                    drafted.append(match.text[at])
                elif match.text is self.text:
                    drafted.append(drafted[at - len(match.text)])
        return drafted

    def holds(self, most: int = LONGEST_DRAFT) -> int:
        """Tokens of a draft of at most `most` tokens that the sequence continues with."""
        held = 0
        for token, right in zip(self.draft()[:most], self.tokens[self.decoded :], strict=False):
            if token != right:
                break
            held += 1
        return held


class Group:
    """Prompt and completions of one request."""

    def __init__(self, prompt: list[int], completions: list[list[int]]):
        self.prompt = prompt
        self.shared = Continuations()
        for after in range(1, len(prompt)):
            self.shared.add(prompt, after)
        self.sequences = [Sequence(self, tokens, list(prompt)) for tokens in completions]


class Rates:
    """How often matches have predicted the next token, by their length."""

    def __init__(self) -> None:
        self.tries = [1.0] * (LONGEST_MATCH + 1)
        self.hits = [0.0] * (LONGEST_MATCH + 1)

    def count(self, length: int, right: bool) -> None:
        """Count one prediction."""
        self.tries[length] += 1
        self.hits[length] += right

    def best_length(self, sequences: list[Sequence], cost: Callable[[int, int], float]) -> int:
        """Tokens to draft of each for the most expected tokens per time; 0 where a plain step has as many.

        `cost`: time of a pass over so many sequences and tokens of each.
        """
        size, best, count, tokens = len(sequences), 1.0, 0, 1.0
        drafts = [(sequence.match(), len(sequence.draft())) for sequence in sequences]
        held = [1.0] * size  # probability that all tokens so far are right
        for drafted in range(LONGEST_DRAFT):
            for i, (match, longest) in enumerate(drafts):
                if match is None or drafted >= longest:
                    held[i] = 0.0
                else:
                    length = min(match.length + drafted, LONGEST_MATCH)
                    held[i] *= self.hits[length] / self.tries[length]
            tokens += sum(held) / size
            gain = tokens * cost(size, 1) / cost(size, drafted + 2)
            if gain > best:
                best, count = gain, drafted + 1
        return count


@dataclass
class Acceptance:
    """Drafts of `LONGEST_DRAFT` tokens while so many sequences are left."""

    tokens: int = 0  # sampled, with a draft before each
    matched: int = 0  # of them, with a match
    held: list[int] = field(default_factory=lambda: [0] * (LONGEST_DRAFT + 1))  # drafts whose first n tokens held

    def row(self) -> str:
        """Share with a match, and mean number of tokens that hold of drafts of 1, 2, 4 and 8 tokens."""
        means = [sum(self.held[1 : most + 1]) / max(1, self.tokens) for most in (1, 2, 4, 8)]
        return f"{self.tokens} | {self.matched / max(1, self.tokens):.2f} | " + " | ".join(f"{x:.2f}" for x in means)


def acceptance(groups: list[Group]) -> dict[int, Acceptance]:
    """How far drafts hold while the batch is decoded step by step, by the number of sequences left."""
    found: dict[int, Acceptance] = {left: Acceptance() for left in (*LEFT, 10**9)}
    rates = Rates()
    while running := running_of(groups):
        here = found[sorted(found)[bisect_left(sorted(found), len(running))]]
        for sequence in running:
            here.tokens += 1
            here.matched += sequence.match() is not None
            for count in range(sequence.holds() + 1):
                here.held[count] += 1
        for sequence in running:
            sequence.decode(1, rates)
    return found


def running_of(groups: list[Group]) -> list[Sequence]:
    """Sequences that have not ended."""
    return [sequence for group in groups for sequence in group.sequences if not sequence.ended]


def decode_tail(
    groups: list[Group], left: int, cost: Callable[[int, int], float], kind: str
) -> Iterator[tuple[float, int]]:
    """Decode the batch until at most `left` sequences are left, then yield time and drafted tokens of each pass."""
    rates = Rates()
    while len(running := running_of(groups)) > left:
        for sequence in running:
            sequence.decode(1, rates)
    while running := running_of(groups):
        size = len(running)
        if kind == "free":
            drafted, seconds = LONGEST_DRAFT, cost(size, 1)
        else:
            drafted = rates.best_length(running, cost) if kind == "drafts" else 0
            seconds = cost(size, drafted + 1)
        held = [sequence.holds(drafted) for sequence in running]
        for sequence, count in zip(running, held, strict=True):
            sequence.decode(count + 1, rates)
        yield seconds, drafted


# ---- the model -------------------------------------------------------------------------------------------------------


def questions(task: str, count: int) -> list[str]:
    """Questions of a task."""
    if task == "copy":
        return [f"Repeat this text exactly: {text}" for text in TEXTS[:count]]
    import reasoning_gym

    return [entry["question"] for entry in reasoning_gym.create_dataset(task, size=count, seed=1, **TASKS[task])]


def sample(engine: NativeEngine, requests: list[SampleRequest]) -> list[list[list[int]]]:
    """Tokens of the completions of each request."""

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    with engine.awake():
        return [[completion.token_ids for completion in group] for group in asyncio.run(all_of_them())]


def verified(engine: NativeEngine, requests: list[SampleRequest], completions: list[list[list[int]]]) -> int:
    """Completions that come out the same when each is its own draft, all of its positions in one pass."""
    drafted = [
        SampleRequest(request.prompt_ids, request.n, request.params, request.seeds, drafts=list(group))
        for request, group in zip(requests, completions, strict=True)
    ]
    again = sample(engine, drafted)
    pairs = zip((c for group in completions for c in group), (c for group in again for c in group), strict=True)
    return sum(a == b for a, b in pairs)


def pass_times(engine: NativeEngine, model: Any, prompt: list[int], rounds: int) -> dict[tuple[int, int], float]:
    """Least processor seconds of a pass over (sequences, tokens of each) after a prompt, sampling included."""
    params = SamplingParams(max_tokens=LIMIT)
    seconds: dict[tuple[int, int], float] = {}
    with engine.awake():
        cache = model(input_ids=torch.tensor([prompt[:-1]]), use_cache=True, logits_to_keep=1).past_key_values
        for _ in range(rounds):
            for size in LEFT:
                for count in (1, 2, 3, 5, 9):
                    began = time.process_time()
                    tokens = [prompt[:1] * count] * size
                    hidden, _ = continue_prompts(model, cache, [prompt], [0] * size, tokens)
                    for tile, logits in logit_tiles(model, hidden):
                        numbers = torch.arange(len(hidden))[tile]
                        sample_tokens(logits, numbers, numbers, params)
                    took = time.process_time() - began
                    seconds[size, count] = min(took, seconds.get((size, count), took))
    return seconds


def interpolated(seconds: dict[tuple[int, int], float], size: int, count: int) -> float:
    """Seconds of a pass over `size` sequences and `count` tokens of each, linear between the measured numbers."""
    counts = sorted({c for _, c in seconds})
    by_size = [float(np.interp(count, counts, [seconds[s, c] for c in counts])) for s in LEFT]
    return float(np.interp(size, LEFT, by_size))


def main() -> None:
    """Print the tables."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--task", action="append", choices=list(TASKS), help="may be repeated; all if absent")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--quick", action="store_true", help="a few short completions; the figures mean nothing")
    given = parser.parse_args()
    prompts, group, limit, rounds = (2, 5, 12, 1) if given.quick else (PROMPTS, GROUP, LIMIT, 8)
    folder = model_path(given.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = end_token_ids(model, tokenizer)
    engine = NativeEngine(lambda: model, eos_token_ids=ends, pad_token_id=tokenizer.pad_token_id)
    seconds = pass_times(engine, model, list(range(100, 200)), rounds)
    print(cost_table(seconds))
    for task in given.task or TASKS:
        requests = []
        for number, question in enumerate(questions(task, prompts)):
            messages = [{"role": "user", "content": question}]
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
            params = SamplingParams(max_tokens=limit, temperature=given.temperature)
            requests.append(SampleRequest(ids, group, params, [1000 * number + i for i in range(group)]))
        completions = sample(engine, requests)
        batch = [(request.prompt_ids, tokens) for request, tokens in zip(requests, completions, strict=True)]
        same = verified(engine, requests, completions)
        print(f"\n## {task}, temperature {given.temperature}\n")
        print(f"In one pass each, {same} of {prompts * group} completions are the same.")
        print(report(batch, partial(interpolated, seconds)), flush=True)


def cost_table(seconds: dict[tuple[int, int], float]) -> str:
    """Times of passes, in plain steps of as many sequences."""
    counts = sorted({count for _, count in seconds})
    lines = ["| sequences | a step, ms | " + " | ".join(f"{c} tokens each" for c in counts[1:]) + " |"]
    lines.append("|---|---|" + "---|" * len(counts[1:]))
    for size in LEFT:
        step = seconds[size, 1]
        costs = " | ".join(f"{seconds[size, count] / step:.2f}" for count in counts[1:])
        lines.append(f"| {size} | {1000 * step:.0f} | {costs} |")
    return "\n".join(lines)


def report(batch: list[tuple[list[int], list[list[int]]]], cost: Callable[[int, int], float]) -> str:
    """Acceptance by sequences left, and the last steps decoded in three ways."""
    lines = ["", "| sequences left | tokens | with a match | of 1 token hold | of 2 | of 4 | of 8 |"]
    lines.append("|---|---|---|---|---|---|---|")
    for most, found in acceptance([Group(*request) for request in batch]).items():
        if found.tokens:
            lines.append(f"| {'more' if most > LEFT[-1] else f'to {most}'} | {found.row()} |")
    lines += ["", "| the last | steps | seconds | passes, of them with drafts | speed | passes, free drafts | speed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for left in LEFT[2:]:
        ways = {
            kind: list(decode_tail([Group(*request) for request in batch], left, cost, kind))
            for kind in ("plain", "drafts", "free")
        }
        if not ways["plain"]:
            lines.append(f"| {left} | none: more completions have the largest length |" + " |" * 5)
            continue
        plain, taken, free = (sum(time for time, _ in passes) for passes in ways.values())
        drafted = sum(count > 0 for _, count in ways["drafts"])
        lines.append(
            f"| {left} | {len(ways['plain'])} | {plain:.1f} | {len(ways['drafts'])}, {drafted} |"
            f" {plain / taken:.2f} | {len(ways['free'])} | {plain / free:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
