"""Self-play of a tiny model at Kuhn poker, and the exact worth of what it has learnt.

Three cards, J < Q < K, one for each of two seats; each puts 1 into the pot. The first seat passes or bets 1. After a
pass the second seat passes (the higher card wins 1) or bets, and the first one folds or calls; after a bet the second
one folds or calls. A seat is a rollout: the first writes two letters, its opening and its answer to a bet after a
pass; the second writes one, to the opening that its prompt shows. "b" is to bet or to call, and every other token is
to pass or to fold.
"""

import itertools
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from benchmarks.claims.beds import Arms, history_logs, quiet
from benchmarks.claims.claim import Result, Runs

CARDS = "JQK"
VOCABULARY = {token: id for id, token in enumerate(["<pad>", "<eos>", "1", "2", *CARDS, "p", "b"])}
DEALS = list(itertools.permutations(range(3), 2))
OPENING, ANSWER, AFTER_PASS, AFTER_BET = range(4)
"""Decisions, for each of the three cards of the seat that takes them."""


def winnings(cards: tuple[int, int], opens: bool, calls: bool, replies: bool) -> int:
    """Chips of the first seat: it `opens` with a bet, `calls` a bet after its pass; the second one `replies` "b".

    Example:
        >>> winnings((2, 0), opens=True, calls=False, replies=True)
        2
    """
    higher = 1 if cards[0] > cards[1] else -1
    if opens:
        return 2 * higher if replies else 1
    if replies:
        return 2 * higher if calls else -1
    return higher


def value(policy: Sequence[Sequence[float]]) -> float:
    """Expected chips of the first seat, by the probabilities of "b" at `policy[decision][card]`, exact."""
    total = 0.0
    for first, second in DEALS:
        for opens, calls in itertools.product((False, True), repeat=2):
            reply = policy[AFTER_BET if opens else AFTER_PASS][second]
            weight = _chance(policy[OPENING][first], opens) * _chance(policy[ANSWER][first], calls)
            for replies in (False, True):
                total += weight * _chance(reply, replies) * winnings((first, second), opens, calls, replies) / 6
    return total


def _chance(probability: float, happens: bool) -> float:
    return probability if happens else 1 - probability


PURE = [list(one) for one in itertools.product((0.0, 1.0), repeat=3)]
EVEN = [0.5] * 3


def nash_conv(policy: Sequence[Sequence[float]]) -> float:
    """Chips that best replies of both seats win against the policy together: 0 at an equilibrium."""
    opening, answer, after_pass, after_bet = policy
    first = max(value([x, y, after_pass, after_bet]) for x in PURE for y in PURE)
    second = min(value([opening, answer, x, y]) for x in PURE for y in PURE)
    return first - second


def against_even(policy: Sequence[Sequence[float]]) -> float:
    """Mean chips of both seats against opponents who toss a coin at each decision."""
    return (value([*policy[:2], EVEN, EVEN]) - value([EVEN, EVEN, *policy[2:]])) / 2


def tokenizer() -> Any:
    """One token a letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def player() -> Any:
    """A random Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


@torch.no_grad()
def policy_of(model: Any) -> list[list[float]]:
    """Probabilities of "b" of a model at all decisions, [4][3]."""
    texts = [form.format(card) for form in ("1{}", "1{}p", "2{}p", "2{}b") for card in CARDS]
    found = []
    for text in texts:
        ids = torch.tensor([[VOCABULARY[letter] for letter in text]])
        found.append(float(model(input_ids=ids).logits[0, -1].float().softmax(-1)[VOCABULARY["b"]]))
    return [found[3 * decision : 3 * decision + 3] for decision in range(4)]


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

        curves: dict[str, list[float]] = {"against a coin": [], "NashConv": []}

        class Judge(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
                policy = policy_of(model)
                curves["against a coin"].append(round(against_even(policy), 4))
                curves["NashConv"].append(round(nash_conv(policy), 4))

        torch.manual_seed(seed)
        rows = [{"prompt": f"1{CARDS[a]}", "first": a, "second": b} for a, b in DEALS] * 4
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = GRPOTrainer(
                model=player(),
                reward_funcs=won,
                args=GRPOConfig(output_dir=folder, seed=seed, **self.config(changes)),
                train_dataset=rows,
                processing_class=tokenizer(),
                rollout_func=play,
                callbacks=[Judge()],
            )
            trainer.train()
        return {"curves": curves, "logs": history_logs(trainer.state.log_history)}
