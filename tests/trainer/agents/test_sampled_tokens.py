"""Only what the policy sampled is learned from: tool results, and whatever else was written between, are read alone.

One optimizer step over conversations is put together from the real parts (rewards to advantages, weights, layouts, LM
head, objective) in float64, so that gradients can be compared with central differences of the loss itself.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch

from covey.algorithms import grpo, rloo
from covey.algorithms.credit import Scores, assign_credit
from covey.core.batch import LOSS_FIELDS, TrainBatch, collate, segment_sum
from covey.core.engine import EngineTraits, SamplingParams
from covey.core.losses import BatchCounts, mean_over_update, token_weights
from covey.core.objective import policy_loss
from covey.core.records import FinishReason, Rollout, absent_rollout
from covey.engines.scripted import ScriptedEngine
from covey.policy.layouts import LAYOUTS
from covey.policy.scoring import TokenScorer
from covey.trainer.engine_check.parity import corrected
from covey.trainer.experience import as_all_reported
from covey.trainer.microbatches import micro_batch_tokens
from covey.trainer.rollout_reports import sampling_entropy
from tests.support import runs, tiny
from tests.support.exact import KeepFloat64
from tests.trainer.agents.test_tools import CALL, TOKENIZER, add
from tests.trainer.agents.test_tools import trainer as tool_trainer

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
CONVERSATIONS = [
    # S sampled, t told: a tool's result or a user's message
    ("ab", "SSttSS"),
    ("ab", "SStt"),
    ("ab", "ttSS"),
    ("ab", "S"),
    ("c", "StStS"),
    ("c", ""),
    ("c", "tt"),
    ("cd", "SSS cut off"),
]
COMMON = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6, "num_iterations": 2}
SMOOTH = {
    "grpo with KL": {"loss_type": "grpo", "beta": 0.05},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo with a filter": {"loss_type": "dr_grpo", "off_policy_mask_threshold": 0.05},
    "dapo with an entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.1},
    "luspo by sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "dapo with credit for steps": {"loss_type": "dapo", "steps": True},
    "gmpo": {"loss_type": "gmpo"},
    "rloo": {"method": "rloo", "beta": 0.05},
}
LOSSES = {  # these hold some of their numbers fixed, so that their gradient is not that of their value
    **SMOOTH,
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo": {"loss_type": "vespo"},
    "dapo by sequences and tokens": {"loss_type": "dapo", "importance_sampling_level": "sequence_token"},
}
STEPS = [{0: pairs} for pairs in ([(1, 0.25), (3, 0.0), (5, 2.0)], [(0, 1.0)], [(3, 0.0)], [], [(1, 2.0)], [], [], [])]
"""Rewarded steps of each: some end at a token that the policy did not sample."""
STEP = 1e-5


def conversations() -> list[Rollout]:
    draw = torch.Generator().manual_seed(5)
    rollouts = []
    for prompt, pattern in CONVERSATIONS:
        turns = pattern.split(" ")[0]
        ids = torch.randint(4, 100, (len(turns),), generator=draw).tolist()
        finish = FinishReason.LENGTH if "cut off" in pattern else FinishReason.STOP
        prompt_ids = [10 + ord(letter) - ord("a") for letter in prompt]
        rollouts.append(Rollout(prompt_ids, ids, [c == "S" for c in turns], [0.0] * len(ids), [], finish))
    return rollouts


@dataclass
class Step:
    """One optimizer step of a method over the conversations."""

    layout: str
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        settings = {**COMMON, "mask_truncated_completions": True, **self.settings}
        method, self.steps = settings.pop("method", "grpo"), settings.pop("steps", False)
        self.config = runs.config("unused", method, **settings)
        made = (grpo if method == "grpo" else rloo).algorithm(self.config)
        self.algorithm = corrected(made, self.config, EngineTraits(), SamplingParams(max_tokens=6))
        self.model = tiny.model(scale=8.0, **SIZES).double()
        self.scorer = TokenScorer(lambda model: model, temperature=0.8, layout=self.layout)
        self.scorer.layout_of(self.model, collate(conversations()))

    @cached_property
    def batch(self) -> TrainBatch:
        """With every number that a loss may look at, float64."""
        batch = collate(conversations(), mask_truncated=True)
        with torch.no_grad():
            own = self.scores(batch).logprobs
        noise = torch.randn(4, batch.num_tokens, generator=torch.Generator().manual_seed(6)).double()
        batch.old_logprobs, batch.ref_logprobs = own + 0.3 * noise[0], own + 0.3 * noise[1]
        batch.engine_logprobs = torch.where(batch.sampled, batch.old_logprobs + 0.1 * noise[2], 0.0)
        if self.algorithm.objective.mismatch_in_surrogate or self.config.entropy_coef:  # others leave it to the loss
            batch.mismatch_weights, _ = self.algorithm.objective.correction(
                batch.old_logprobs, batch.engine_logprobs, batch.sampled, batch.lengths
            )
        rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0, 1.0, 0.0])[:, None]
        kl = segment_sum(torch.where(batch.sampled, batch.old_logprobs - batch.ref_logprobs, 0.0), batch.lengths)
        scores = Scores(rewards, STEPS if self.steps else [{}] * 8, batch.lengths.tolist())
        credit = assign_credit(
            self.algorithm, torch.ones(1), scores, 4, kl.float() if self.algorithm.kl_in_reward else None
        )
        batch.advantages = credit.of_tokens(slice(None)).double()
        tokens = batch.sampled_lengths.float()
        counts = BatchCounts(tokens, micro_batch_tokens(tokens, 4), len(batch), int(batch.sampled.sum()), 2, 6)
        batch.weights = token_weights(self.algorithm.weighting, counts, batch.sampled, batch.lengths)
        if self.config.entropy_coef:
            batch.entropy_weights = token_weights(mean_over_update, counts, batch.sampled, batch.lengths)
        return batch

    def scores(self, batch: TrainBatch) -> Any:
        with KeepFloat64():
            return self.scorer(self.model, batch, entropy=True)

    def loss(self, batch: TrainBatch | None = None) -> torch.Tensor:
        batch = self.batch if batch is None else batch
        return policy_loss(batch, *self.scores(batch)[:2], self.algorithm.objective, self.config.entropy_coef).loss

    def gradients(self, batch: TrainBatch | None = None) -> list[torch.Tensor]:
        return list(torch.autograd.grad(self.loss(batch), list(self.model.parameters())))

    def slope(self, move: Any) -> float:
        """The central difference of the loss, where `move(sign)` goes half of the way there and back."""
        with torch.no_grad():
            move(+1)
            above = self.loss().item()
            move(-2)
            below = self.loss().item()
            move(+1)
        return (above - below) / (2 * STEP)


@contextmanager
def added(module: torch.nn.Module, delta: torch.Tensor, field: str | None = None):
    """What the module gives out is increased by `delta`, wherever it gives out that shape."""

    def add(module, args, output):
        value = output if field is None else getattr(output, field)
        if value.shape != delta.shape:
            return None
        return value + delta if field is None else type(output)(**{**output, field: value + delta})

    handle = module.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def steps(losses):
    """Every loss in one layout, and two in the others: logits are computed by layouts, not by losses."""
    cases = [("shared_prefix", name) for name in losses]
    others = [layout for layout in LAYOUTS if layout != "shared_prefix"]
    cases += [(layout, name) for layout in others for name in ("grpo with KL", "gmpo")]
    return pytest.mark.parametrize(("layout", "name"), cases)


@steps(SMOOTH)
def test_the_gradient_is_the_slope_of_the_loss_in_the_parameters(layout, name):
    step = Step(layout, SMOOTH[name])
    gradients, parameters = step.gradients(), list(step.model.parameters())
    draw = torch.Generator().manual_seed(7)
    for _ in range(3):
        direction = [torch.randn(p.shape, generator=draw).double() * p.std() for p in parameters]

        def move(sign, direction=direction):
            for parameter, way in zip(parameters, direction, strict=True):
                parameter.add_(way, alpha=sign * STEP)

        wanted = sum((g * way).sum().item() for g, way in zip(gradients, direction, strict=True))
        assert abs(wanted) > 1e-4
        assert step.slope(move) == pytest.approx(wanted, rel=1e-5)


@steps(LOSSES)
def test_no_gradient_reaches_states_that_predict_other_tokens(layout, name):
    """Exact zeros at all of the layout's positions, prompts included, but those that predict a sampled token."""
    step = Step(layout, LOSSES[name])
    inputs = LAYOUTS[layout](step.batch, 0)
    shape = (*inputs.kwargs["input_ids"].shape, SIZES["hidden_size"])
    delta = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    with added(step.model.get_decoder(), delta, "last_hidden_state"):
        (gradient,) = torch.autograd.grad(step.loss(), delta)
    per_position = gradient.flatten(0, 1)
    predicts = torch.zeros(len(per_position), dtype=torch.bool)
    predicts[inputs.predictors[step.batch.sampled]] = True
    assert not per_position[~predicts].any()
    assert per_position[predicts].any(dim=1).sum() >= 5  # of 12: clipped tokens have none either


@pytest.mark.slow
@steps(SMOOTH)
def test_only_logits_of_sampled_tokens_have_a_gradient(layout, name):
    step = Step(layout, SMOOTH[name])
    sampled = int(step.batch.sampled.sum())
    delta = torch.zeros(sampled, step.model.config.vocab_size, dtype=torch.float64, requires_grad=True)
    directions = torch.randn(delta.shape, generator=torch.Generator().manual_seed(8)).double()
    directions[torch.arange(sampled), step.batch.token_ids[step.batch.sampled]] += 3.0
    with added(step.model.get_output_embeddings(), delta):
        (gradient,) = torch.autograd.grad(step.loss(), delta)
        assert gradient.any(dim=1).sum() > 3
        for row in range(sampled):

            def move(sign, row=row):
                delta.data[row].add_(directions[row], alpha=sign * STEP)

            wanted = (gradient[row] * directions[row]).sum().item()
            assert step.slope(move) == pytest.approx(wanted, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_at_other_tokens_change_no_loss_or_gradient(name):
    step = Step("packed", LOSSES[name])
    wanted, gradients = step.loss(), step.gradients()
    fields = {field: getattr(step.batch, field) for field in LOSS_FIELDS}
    noise = torch.randn(step.batch.num_tokens, generator=torch.Generator().manual_seed(9)).double()
    for wild in (noise, torch.inf, -torch.inf, torch.nan):
        numbers = {k: torch.where(step.batch.sampled, v, wild) for k, v in fields.items() if v is not None}
        changed = replace(step.batch, **numbers)
        assert torch.equal(step.loss(changed), wanted)
        assert all(map(torch.equal, step.gradients(changed), gradients))


def test_every_number_that_a_loss_may_look_at_is_tried():
    """So that the test above cannot pass by having nothing to change."""
    batches = [Step("packed", settings).batch for settings in LOSSES.values()]
    tried = {field for batch in batches for field in LOSS_FIELDS if getattr(batch, field) is not None}
    assert tried == {*LOSS_FIELDS}
    assert len(Step("packed", LOSSES["dapo with credit for steps"]).batch.advantages[:6].unique()) == 3


# ---- in a run --------------------------------------------------------------------------------------------------------


def answers_of_many_lengths():
    """Every rollout calls a tool, and then says a number of one to four digits, by its seed."""

    def script(prompt_ids, seed):
        answered = "<bos>tool: 5" in TOKENIZER.decode(prompt_ids)
        text = str(seed)[: 1 + seed % 4] if answered else f"Let me see. {CALL}"
        return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]

    return ScriptedEngine(script)


@pytest.fixture(scope="module")
def rollout_batch(tmp_path_factory):
    """What a run with a tool logged of its only step, with its rollouts."""
    kept = []
    settings = {"loss_type": "grpo", "beta": 0.05, "vllm_importance_sampling_correction": False}
    made = tool_trainer(tmp_path_factory.mktemp("run"), answers_of_many_lengths(), parts={"tools": [add]}, **settings)
    sample = made.rollouts.sample
    made.rollouts.sample = lambda *args, **kwargs: kept.append(sample(*args, **kwargs)) or kept[-1]
    made.train()
    return made.state.log_history[0], kept[0].rollouts


def test_lengths_and_num_tokens_count_what_the_policy_wrote(rollout_batch):
    logged, rollouts = rollout_batch
    told = [len(rollout.completion_ids) - rollout.num_sampled for rollout in rollouts]
    assert set(told) == {1 + len("tool: 5") + 1 + 1 + len("assistant: ")}  # <bos>tool: 5<eos><bos>assistant:
    lengths = [rollout.num_sampled for rollout in rollouts]
    assert len(set(lengths)) > 1
    assert logged["completions/mean_length"] == logged["completions/mean_terminated_length"]
    assert logged["completions/mean_length"] == sum(lengths) / len(lengths)
    assert (logged["completions/min_length"], logged["completions/max_length"]) == (min(lengths), max(lengths))
    assert logged["num_tokens"] == sum(lengths) + sum(len(rollout.prompt_ids) for rollout in rollouts)


@torch.no_grad()
def test_entropy_is_that_of_what_the_policy_wrote(rollout_batch):
    logged, rollouts = rollout_batch
    entropies = []
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        logprobs = tiny.model()(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double().log_softmax(-1)
        entropies.append(-(logprobs.exp() * logprobs).sum(-1)[torch.tensor(rollout.sampled)])
    assert logged["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-4)


def test_an_engines_entropies_count_where_it_sampled():
    rollouts = conversations()
    for rollout in rollouts:
        rollout.entropies = [float(len(rollout.completion_ids)) if one else torch.nan for one in rollout.sampled]
    # sampled: 4 tokens of six, 2 of four, 2 of four, 1 of one, 3 of five, and 3 of three that are cut off
    total = 4 * 6 + 2 * 4 + 2 * 4 + 1 * 1 + 3 * 5
    assert sampling_entropy(rollouts, collate(rollouts))["entropy"].value() == (total + 3 * 3) / 15
    assert sampling_entropy(rollouts, collate(rollouts, mask_truncated=True))["entropy"].value() == total / 12


@pytest.mark.parametrize("known", [True, False])
def test_a_process_of_absent_rollouts_alone_does_as_the_other(known):
    """Which has entropies and log-probs of its rollouts, or does not."""
    logprobs, entropies = ([-1.0], [0.5]) if known else (None, None)
    played = Rollout([1], [2], [True], logprobs, "two", FinishReason.STOP, entropies=entropies)
    given = [[played], [absent_rollout([1], "")]]
    mine = []
    for rollouts in given:
        as_all_reported(rollouts, collate(rollouts), lambda own, purpose: mine.append(own) or [own])
    found = [as_all_reported(rollouts, collate(rollouts), lambda own, purpose: mine) for rollouts in given]
    assert [complete for complete, _ in found] == [known, known]
    assert [batch.engine_logprobs is not None for _, batch in found] == [known, known]


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        ("grpo", [1 / 8 / 4, 1 / 8 / 2, 1 / 8 / 2, 1 / 8, 1 / 8 / 3, None, None, None]),
        ("bnpo", [1 / 9 / 2] * 4 + [1 / 3 / 2] + [None] * 3),
        ("dapo", [1 / 12] * 5 + [None] * 3),
        ("dr_grpo", [1 / 8 / 6] * 5 + [None] * 3),
        ("luspo", [1 / 8] * 5 + [None] * 3),
    ],
)
def test_averages_are_over_what_the_policy_wrote(loss_type, weights):
    """4, 2, 2, 1 and 3 tokens in eight rollouts: nine in the first micro-batch of four, three in the second."""
    batch = Step("packed", {"loss_type": loss_type}).batch
    for rollout, expected in zip(range(8), weights, strict=True):
        row = batch.select(torch.tensor([rollout]))
        assert row.weights[row.sampled].tolist() == pytest.approx([expected] * int(row.sampled.sum()))
        assert not row.weights[~row.sampled].any()
