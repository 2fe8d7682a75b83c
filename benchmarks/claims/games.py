"""Self-play of a tiny model at Kuhn poker (`benchmarks.poker`), and the exact worth of what it has learnt.

A seat is a rollout: the first writes two letters, its opening and its answer to a bet after a pass; the second writes
one, to the opening that its prompt shows. "b" is to bet or to call, and every other token is to pass or to fold.
"""

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from benchmarks.claims.beds import Arms, history_logs, quiet
from benchmarks.claims.claim import Result, Runs
from benchmarks.letters import tiny_llama, tokenizer, vocabulary_of
from benchmarks.poker import CARDS, DEALS, against_even, nash_conv, value_of, winnings

VOCABULARY = vocabulary_of(["1", "2", *CARDS, "p", "b"])


@torch.no_grad()
def policy_of(model: Any) -> list[float]:
    """Probabilities of "b" of a model at all twelve decisions."""
    texts = [form.format(card) for form in ("1{}", "1{}p", "2{}p", "2{}b") for card in CARDS]
    found = []
    for text in texts:
        ids = torch.tensor([[VOCABULARY[letter] for letter in text]])
        found.append(float(model(input_ids=ids).logits[0, -1].float().softmax(-1)[VOCABULARY["b"]]))
    return found


async def play(row: Mapping[str, Any], engine: Any, n: int) -> list[Any]:
    """n / 2 games of one deal."""
    rollouts = []
    for game in range(n // 2):
        first = engine.begin(f"1{CARDS[row['first']]}")
        said = (await first.sample(max_tokens=2)).text
        opens, calls = said[:1] == "b", said[1:2] == "b"
        second = engine.begin(f"2{CARDS[row['second']]}{'b' if opens else 'p'}")
        replies = (await second.sample(max_tokens=1)).text[:1] == "b"
        chips = winnings((row["first"], row["second"]), opens, calls, replies)
        rollouts.append(first.done(role="first", game=game, chips=chips))
        rollouts.append(second.done(role="second", game=game, chips=-chips))
    return rollouts


def won(chips: list[int], **columns: Any) -> list[float]:
    return [one / 2 for one in chips]


@dataclass(frozen=True)
class KuhnBed:
    """Self-play at Kuhn poker: 64 games a step. Curves are exact, from the policy after each step."""

    name: ClassVar[str] = "tiny Llama, Kuhn poker"
    at_once: ClassVar[int] = 1
    steps: int = 150
    learning_rate: float = 1e-3
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        common = quiet(
            per_device_train_batch_size=128,
            num_generations=16,
            max_completion_length=2,
            max_steps=self.steps,
            learning_rate=self.learning_rate,
            scale_rewards="none",
            save_strategy="no",
        )
        return {**common, **self.settings, **changes}

    def run(self, arms: Arms, runs: Sequence[tuple[str, int]], folder: str) -> Runs:
        return {(arm, seed): self.train(arms[arm], seed) for arm, seed in runs}

    def train(self, changes: Mapping[str, Any], seed: int) -> Result:
        from transformers import TrainerCallback

        from covey import GRPOConfig, GRPOTrainer

        curves: dict[str, list[float]] = {"against a coin": [], "NashConv": [], "value for the first seat": []}

        class Judge(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
                policy = policy_of(model)
                curves["against a coin"].append(round(against_even(policy), 4))
                curves["NashConv"].append(round(nash_conv(policy), 4))
                curves["value for the first seat"].append(round(value_of(policy), 4))

        torch.manual_seed(seed)
        rows = [{"prompt": f"1{CARDS[a]}", "first": a, "second": b} for a, b in DEALS] * 4
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = GRPOTrainer(
                model=tiny_llama(VOCABULARY),
                reward_funcs=won,
                args=GRPOConfig(output_dir=folder, seed=seed, **self.config(changes)),
                train_dataset=rows,
                processing_class=tokenizer(VOCABULARY),
                rollout_func=play,
                callbacks=[Judge()],
            )
            trainer.train()
        return {"curves": curves, "logs": history_logs(trainer.state.log_history)}
