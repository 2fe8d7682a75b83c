"""Time lost to slow tools and slow rewards by rollouts that do not wait for them.

    python -m benchmarks.concurrency

64 rollouts of 4 turns (8 prompts, 8 each), with a call of a tool between turns that sleeps 0.2 s, against the same
rollouts with a tool that answers at once; everything else, tokens included, is the same. Two engines: the scripted one,
which takes 0.1 s for a request and works on 16 at a time, and the built-in one on a tiny model, whose turns end by
chance after about 100 tokens. The agent is the trainers' own (`ToolAgent`); whatever the model says is read as a call.

A rollout cannot take less than its own turns and sleeps, and the batch no less than its longest rollout: where sampling
takes T, no schedule is sure of less than T + 0.6 s. One that plays rollout after rollout sleeps for 38 s.

Then the tool hangs in one call of one rollout, up to `tool_timeout`: when do the others end, and do they say the same?
Last, rewards: what is left to do when everything is sampled, if functions are called then, or when a rollout has ended
(`per_completion`).
"""

import argparse
import asyncio
import functools
import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.staleness import tokenizer as character_tokenizer
from covey.core.engine import RolloutEngine, SamplingParams
from covey.core.records import Rollout
from covey.engines.native.engine import NativeEngine
from covey.engines.scripted import ScriptedEngine
from covey.rewards import RewardContext, RewardSuite, accuracy_reward, numeric_match_reward, per_completion
from covey.rewards.call import RewardStream
from covey.rollout.collector import Collector, PromptSample, RolloutSpec
from covey.rollout.episode import TurnTemplates
from covey.rollout.prompts import PromptCodec
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.tools.calls import AssistantTurn, ToolCall
from covey.rollout.tools.parsers import ToolParser
from covey.rollout.tools.toolbox import Toolbox

PROMPTS, GROUP, TURNS = 8, 8, 4
SLEEP = 0.2
BOUND = 1.3
"""Time with the sleep over time without it, at most."""

TOOL_TIMEOUT = 2.0
TEMPLATE = (
    "{% for t in tools or [] %}<bos>tool: {{ t.function.name }}<eos>{% endfor %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
ALWAYS = ToolParser(lambda text: AssistantTurn(text, [ToolCall("wait", {})]))
"""Reads every turn as a call."""

ENGINES: dict[str, Callable[[], RolloutEngine]] = {
    "scripted": lambda: ScriptedEngine(_script, seconds=0.1, lanes=16),
    "built-in": lambda: NativeEngine(_model, eos_token_ids={1}, pad_token_id=0),
}


@dataclass
class Played:
    """A batch of rollouts.

    Attributes:
        rollouts: all of them.
        ends: seconds until each ended.
        cpu: seconds of a processor that this took, other programs aside.
    """

    rollouts: list[Rollout]
    ends: list[float]
    cpu: float

    @property
    def seconds(self) -> float:
        """Until the last ended."""
        return max(self.ends)

    def digests(self) -> list[str]:
        """Digests of the completions."""
        return [hashlib.sha256(repr(rollout.completion_ids).encode()).hexdigest()[:12] for rollout in self.rollouts]


class _Ends:
    """Takes down when each rollout ended, and passes them on."""

    def __init__(self, stream: RewardStream | None = None) -> None:
        self.stream = stream or RewardStream()
        self.began = time.perf_counter()
        self.ends: dict[int, float] = {}

    def on_rollouts(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        self.stream.on_rollouts(place, rows, rollouts)
        for number in range(len(rollouts)):
            self.ends[place + number] = time.perf_counter() - self.began

    def on_group(self, place: int, rows: list[dict[str, Any]], rollouts: list[Rollout]) -> None:
        self.stream.on_group(place, rows, rollouts)


def sleeping(seconds: float, blocking: bool, hangs: bool) -> Callable[..., Any]:
    """A tool that sleeps; an ordinary one if `blocking`, else async. With `hangs`, its third call never answers."""
    calls, lock = [0], threading.Lock()

    def time_of_this_call() -> float:
        with lock:
            calls[0] += 1
            return 3600.0 if hangs and calls[0] == 3 else seconds

    def wait() -> str:
        """Wait for a while."""
        time.sleep(time_of_this_call())
        return "done"

    async def wait_async() -> str:
        """Wait for a while."""
        await asyncio.sleep(time_of_this_call())
        return "done"

    wait_async.__name__ = "wait"
    return wait if blocking else wait_async


def play(
    engine: RolloutEngine, tool: Callable[..., Any] | None, watch: _Ends | None = None, tool_timeout: float = 60.0
) -> Played:
    """One batch; without a tool, each rollout is one completion."""
    tokenizer = _tokenizer()
    codec = PromptCodec(tokenizer, None, None)
    agency = None
    if tool is not None:
        toolbox = Toolbox([tool], timeout=tool_timeout)
        codec.tools = toolbox.schemas
        agency = RolloutSpec(ToolAgent(toolbox, ALWAYS, TURNS - 1), TurnTemplates(codec, [1]), timeout=600.0)
    watch, cpu = watch or _Ends(), time.process_time()
    with torch.no_grad():
        rollouts = Collector(engine, codec, 0, agency).collect(
            draws(), SamplingParams(4000), ("train", 0), callbacks=watch
        )
    if tool is not None:
        assert all(len(rollout.turn_ends) == TURNS for rollout in rollouts), "every rollout takes four turns"
    return Played(rollouts, [watch.ends[place] for place in range(len(rollouts))], time.process_time() - cpu)


def draws() -> list[PromptSample]:
    """Prompt samples of the workload."""
    rows = [
        {"prompt": [{"role": "user", "content": f"Question {i}"}], "solution": str(i), "answer": str(i)}
        for i in range(PROMPTS)
    ]
    return [PromptSample(row, number, sample) for number, row in enumerate(rows) for sample in range(GROUP)]


def _script(prompt_ids: Sequence[int], seed: int) -> list[int]:
    return [*(4 + (seed + place) % 90 for place in range(20)), 1]


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@functools.cache
def _model() -> LlamaForCausalLM:
    """Nearly uniform over 104 tokens, one of which ends a turn."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=104,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


# ---- what is measured ------------------------------------------------------------------------------------------------


def measure_sleep(rounds: int) -> bool:
    """Print a table of both engines and both kinds of tools; whether all are within the bound."""
    print(f"| engine | tool | at once, s | sleeping {SLEEP:g} s, s | ratio | T + {(TURNS - 1) * SLEEP:g} s | CPU, s |")
    print("|---|---|---|---|---|---|---|")
    kept = True
    for name, make in ENGINES.items():
        for blocking in (False, True):
            engine, pairs = make(), []
            play(engine, sleeping(0.0, blocking, False))
            for _ in range(rounds):
                quick = play(engine, sleeping(0.0, blocking, False))
                slow = play(engine, sleeping(SLEEP, blocking, False))
                assert quick.digests() == slow.digests(), "a sleep changes nothing that is said"
                pairs.append((quick.seconds, slow.seconds, quick.cpu, slow.cpu))
            quick_s, slow_s, quick_cpu, slow_cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(slow / quick for quick, slow, *_ in pairs)
            kept &= ratio < BOUND
            bound = (quick_s + (TURNS - 1) * SLEEP) / quick_s
            kind = "ordinary" if blocking else "async"
            print(
                f"| {name} | {kind} | {quick_s:.2f} | {slow_s:.2f} | {ratio:.2f} | {bound:.2f} |"
                f" {quick_cpu:.2f}, {slow_cpu:.2f} |",
                flush=True,
            )
    return kept


def measure_hang() -> bool:
    """Print a table about one call that hangs; whether it cost its own rollout alone."""
    print(
        f"\n| engine | tool | others end after, s | if nothing hangs, s | the one (tool_timeout {TOOL_TIMEOUT:g} s) |"
    )
    print("|---|---|---|---|---|")
    kept = True
    for name, make in ENGINES.items():
        for blocking in (False, True):
            engine = make()
            play(engine, sleeping(0.0, blocking, False))
            usual = play(engine, sleeping(SLEEP, blocking, False))
            hung = play(engine, sleeping(SLEEP, blocking, True), tool_timeout=TOOL_TIMEOUT)
            (one,) = [place for place, rollout in enumerate(hung.rollouts) if rollout.calls.get("timeout")]
            others = [place for place in range(len(hung.ends)) if place != one]
            same = all(hung.digests()[place] == usual.digests()[place] for place in others)
            took, expected = (max(played.ends[place] for place in others) for played in (hung, usual))
            kept &= same and took < BOUND * expected
            kind = "ordinary" if blocking else "async"
            print(f"| {name} | {kind} | {took:.2f} | {expected:.2f} | {hung.ends[one]:.2f} |", flush=True)
    return kept


def measure_rewards(rounds: int) -> None:
    """Print a table about functions called when all is sampled, or when a rollout has ended; the built-in engine."""
    print("\n| rollouts | reward | called | left when all is sampled, s | altogether, s | CPU, s |")
    print("|---|---|---|---|---|---|")
    cases: list[tuple[str, Any, Callable[[], Callable[..., Any]], str]] = [
        ("one completion", None, lambda: numeric_match_reward, "numeric_match_reward"),
        ("one completion", None, lambda: accuracy_reward, "accuracy_reward"),
        ("one completion", None, Judge, "async, 4 at a time, 0.1 s each"),
        ("4 turns", 0.0, lambda: accuracy_reward, "accuracy_reward"),
        ("4 turns", 0.0, Judge, "async, 4 at a time, 0.1 s each"),
    ]
    for what, tool_seconds, function, name in cases:
        engine = ENGINES["built-in"]()
        tool = None if tool_seconds is None else sleeping(tool_seconds, False, False)
        play(engine, tool)
        took: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for number in range(rounds):
            for streamed in (False, True):
                took[streamed].append(_scored(engine, tool, function(), streamed, number))
        for streamed, called in ((False, "at the end"), (True, "as rollouts end")):
            left, whole, cpu = (statistics.median(column) for column in zip(*took[streamed], strict=True))
            print(f"| {what} | {name} | {called} | {left:.3f} | {whole:.2f} | {cpu:.2f} |", flush=True)


class Judge:
    """Asks a service that takes `seconds` for a completion and answers four at a time."""

    __name__ = "judge"

    def __init__(self, seconds: float = 0.1) -> None:
        self._seconds = seconds
        self._lanes: asyncio.Semaphore | None = None

    async def __call__(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """A reward for each."""
        self._lanes = lanes = self._lanes or asyncio.Semaphore(4)  # of the event loop that this runs on

        async def ask() -> float:
            async with lanes:
                await asyncio.sleep(self._seconds)
            return 1.0

        return await asyncio.gather(*(ask() for _ in completions))


def _scored(
    engine: RolloutEngine, tool: Any, function: Callable[..., Any], streamed: bool, round_: int
) -> tuple[float, float, float]:
    """Seconds from when all is sampled until all is scored, from the beginning until then, and of a processor."""

    async def boxed_async(completions: list[Any], **kwargs: Any) -> list[float]:
        return await function(completions=completions, **kwargs)

    def boxed(completions: list[Any], **kwargs: Any) -> Any:
        # What a random model says is no mathematics: give the reward something to compare, anew in every round.
        texts = [rf"{str(one)[:200]} so it is \boxed{{{round_ + streamed / 2} + x}}" for one in completions]
        return function(completions=texts, **kwargs)

    chosen = functools.partial(boxed_async if isinstance(function, Judge) else boxed)
    suite = RewardSuite(per_completion(chosen) if streamed else chosen)
    context = RewardContext(None, log_extra=lambda *column: None, log_metric=lambda *metric: None)
    began, cpu = time.perf_counter(), time.process_time()
    watch = _Ends(suite.stream(None))
    with watch.stream:
        played = play(engine, tool, watch)
        sampled = time.perf_counter()
        suite([draw.row for draw in draws()], played.rollouts, context, watch.stream)
    scored = time.perf_counter()
    return scored - sampled, scored - began, time.process_time() - cpu


def main() -> int:
    """Measure and print; the exit code is 1 where a bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.concurrency",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each comparison; the median counts")
    parser.add_argument("--part", choices=("sleep", "hang", "rewards"), help="one part alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kept = True
    if given.part in (None, "sleep"):
        kept &= measure_sleep(given.rounds)
    if given.part in (None, "hang"):
        kept &= measure_hang()
    if given.part in (None, "rewards"):
        measure_rewards(given.rounds)
    verdict = "yes" if kept else "NO"
    print(f"\nA sleep costs less than {BOUND - 1:.0%}, a call that hangs its own rollout alone: {verdict}.")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
