"""A small model learns in unmodified public agents, through the URL; and what the URL costs a call.

    python -m benchmarks.agents --agents openai_agents langgraph_agent anthropic_agent --seeds 0 1 2
    python -m benchmarks.agents --part overhead

The task, its rewards and settings are those of `benchmarks.tools`, whose figures are the native loop's. Each agent runs
in a process and an environment of its own (`make test-agents` makes it), takes its rollouts from `RemoteAgents`, and
talks in another API: responses, chat completions, Anthropic's messages. Measured after training on questions that were
never trained on: the share of rollouts whose one and only call is right, and the share with the right answer.

The overhead is that of a conversation of 8 turns over HTTP, client included, compared with the same turns sampled by a
rollout function, with an engine that answers at once: per call, one session alone and 64 at once, all on one thread.
"""

import argparse
import os
import secrets
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, model_path
from benchmarks.records import Records
from benchmarks.tools import CURVES, LEARNING, measure, questions, right_answer, right_calls, torch_threads

ROOT = Path(__file__).resolve().parents[1]
AGENTS = ("openai_agents", "langgraph_agent", "anthropic_agent")
AT_ONCE = 64
TURNS = 8
"""Of each conversation whose overhead is measured."""


@contextmanager
def serving(agent: str, python: str, port: int, key: str) -> Iterator[None]:
    """A process that plays rollouts of the port with a public agent."""
    command = [python, str(ROOT / "examples/agents/run.py"), agent, "--at-once", str(AT_ONCE)]
    process = subprocess.Popen(
        [*command, "--serve", f"http://127.0.0.1:{port}"],
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "COVEY_AGENTS_KEY": key},
        start_new_session=True,
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def learn(model: str, agent: str, python: str, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """Train once in a public agent, from the last checkpoint if there is one, and measure afterwards."""
    from transformers.trainer_utils import get_last_checkpoint

    from covey import GRPOConfig, GRPOTrainer
    from covey.rollout.agents import RemoteAgents

    train, test = questions(seed, steps * 8, 60)
    port, key = free_port(), secrets.token_hex(16)
    settings = LEARNING | {"max_completion_length": 80, "tool_parser": "json", "reward_weights": [1.0, 0.5]}
    quiet = {"logging_steps": 1, "save_steps": 4, "save_total_limit": 1, "report_to": "none"}
    trainer = GRPOTrainer(
        model=model,
        agent=RemoteAgents(port, key=key),
        reward_funcs=[right_answer, right_calls],
        args=GRPOConfig(output_dir=str(output), max_steps=steps, seed=seed, **settings, **quiet),
        train_dataset=train,
    )
    with serving(agent, python, port, key):
        start = time.perf_counter()
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output)) if output.is_dir() else None)
        seconds = time.perf_counter() - start
        after = measure(trainer, test, "after", seed)
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    kept = (*CURVES, "rollouts/failed", "completions/mean_length")
    return {
        "after": after,
        "seconds": round(seconds, 1),
        "bf16": bool(trainer.args.bf16),
        "curves": {name: [entry.get(name) for entry in history] for name in kept},
    }


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each agent and seed."""
    lines = [
        "| agent | seed | right calls in step 1 | after | right answer after | greedily | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        sampled = [run["after"]["sampled"][what] for what in ("call", "answer")]
        shares = [f"{one['mean']:.1%} ({one['interval'][0]:.1%} to {one['interval'][1]:.1%})" for one in sampled]
        first = f"{run['curves']['rewards/right_calls/mean'][0]:.0%}"
        greedy = f"{run['after']['greedy']['answer']['mean']:.0%}"
        cells = [run["agent"], str(run["seed"]), first, *shares, greedy, f"{run['seconds'] / 60:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- overhead of a call ----------------------------------------------------------------------------------------------


def overhead(sessions: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds a call, medians of rounds in turn: through the URL, and sampled by a rollout function."""
    from covey.rollout.agents import AgentProgram
    from covey.rollout.environments.agent import PlayedEnvironment
    from covey.rollout.user_functions import RolloutFunction, RolloutValidator

    tokenizer = _tokenizer()
    limits = RolloutValidator(len(tokenizer), None)
    ways = {
        "url": PlayedEnvironment(AgentProgram(_asks), 300.0, limits),
        "function": RolloutFunction(_samples, 300.0, limits),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}

    def work() -> None:
        for number in range(rounds + 1):  # the first warms up
            for name, player in ways.items():
                seconds = _seconds(tokenizer, player, sessions)
                if number:
                    found[name].append(1000 * seconds / (sessions * TURNS))

    work()
    ways["url"].close()
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {"sessions": sessions, **{name: round(one, 3) for name, one in medians.items()}} | {
        "overhead": round(medians["url"] - medians["function"], 3)
    }


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path(None))


QUESTION = {"role": "user", "content": "What is 317 times 468? Think step by step, then give the number."}


async def _samples(row: dict[str, Any], engine: Any) -> Any:
    episode = engine.begin([QUESTION])
    for turn in range(TURNS):
        await episode.sample()
        if turn + 1 < TURNS:
            assert episode.write([QUESTION])
    return episode.done()


async def _asks(row: dict[str, Any], base_url: str, api_key: str) -> None:
    import aiohttp

    messages = [QUESTION]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
        for _ in range(TURNS):
            body = {"model": "policy", "messages": messages}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            messages = [*messages, answer["choices"][0]["message"], QUESTION]


def _seconds(tokenizer: Any, player: Any, sessions: int) -> float:
    from covey.core.engine import SamplingParams
    from covey.core.records import PromptSample
    from covey.engines.scripted import ScriptedEngine
    from covey.rollout.collector import Collector
    from covey.rollout.prompts import PromptCodec
    from covey.rollout.runner import RolloutSpec
    from covey.rollout.tools.turn_template import TurnTemplates

    answer = [*tokenizer(" 317 times 468 is the same as 300 times 468 and 17 times 468.")["input_ids"]]
    engine = ScriptedEngine(lambda ids, seed: [*answer, tokenizer.eos_token_id])
    codec = PromptCodec(tokenizer, None, None)
    spec = RolloutSpec(player, TurnTemplates(codec, [tokenizer.eos_token_id], "keep"), 300.0)
    draws = [PromptSample({"prompt": [QUESTION]}, number, 0) for number in range(sessions)]
    began = time.perf_counter()
    rollouts = Collector(engine, codec, 0, spec).collect(draws, SamplingParams(max_tokens=4096), ("overhead",))
    seconds = time.perf_counter() - began
    assert all(one.error is None and len(one.turn_ends) == TURNS and not one.strands for one in rollouts)
    return seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("learn", "overhead"), default="learn")
    parser.add_argument("--agents", nargs="+", default=AGENTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--python", default=str(ROOT / ".venv-agents/bin/python"), help="has the agents' libraries")
    parser.add_argument("--output", type=Path, default=Path("runs/agents"), help="for completions and records")
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/agents.jsonl")
    given = parser.parse_args()
    if given.part == "overhead":
        for sessions in (1, AT_ONCE):
            print(overhead(sessions))
        return
    records, alike = Records(given.records), {"steps": given.steps}
    runs = [{"agent": agent, "seed": seed, **alike} for seed in given.seeds for agent in given.agents]
    for run in runs:
        if not records.find(**run):
            folder = given.output / f"{run['agent']}-{run['seed']}"
            found = learn(model_path(given.model), run["agent"], given.python, run["seed"], given.steps, folder)
            records.add(**run, **found, machine=describe(torch_threads()))
    print(table([one for run in runs for one in records.find(**run)[-1:]]))


if __name__ == "__main__":
    main()
