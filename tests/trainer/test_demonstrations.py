"""Demonstrations: their term has a count of its own, whatever rollouts, processes and cuts there are."""

import json

import pytest
import torch

from covey.algorithms.terms import demonstrations as term_of
from covey.algorithms.terms import surrogate_coefficient
from covey.core.batch import collate
from covey.core.findings import CheckError
from covey.core.losses import mean_over_update, mean_per_sequence
from covey.core.objective import Objective, policy_loss
from covey.core.records import FinishReason, Rollout
from covey.core.terms import peak_and_valley, term_weights
from covey.trainer.demonstrations import Demonstrations, load_demonstrations
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex, join_indexes
from tests.support import runs

SCHEDULE = {"warmup": 4, "peak": 0.8, "decay": 10, "valley": 0.2}


def sampled(prompt, tokens):
    return Rollout([prompt], [5] * tokens, [True] * tokens, None, "", FinishReason.STOP)


def shown(prompt, tokens):
    return Rollout([prompt], [6] * tokens, [False] * tokens, None, "", FinishReason.STOP)


ROWS = [shown(1, 2), shown(2, 6), shown(3, 4)]


def demonstrations(processes=1, weighting=mean_over_update, per_step=2, rows=ROWS):
    return Demonstrations(rows, per_step, 0, processes, weighting, 2, 100)


def own_batch(rank=0):
    batch = collate([sampled(7 + rank, 3), sampled(8 + rank, 1)])
    batch.advantages = torch.ones(batch.num_tokens)
    batch.weights = torch.full((batch.num_tokens,), 0.25)
    return batch


def test_schedule_rises_to_its_peak_and_falls_to_its_valley():
    values = [peak_and_valley(step, **SCHEDULE) for step in (0, 2, 4, 9, 14, 1000)]
    assert values == pytest.approx([0.0, 0.4, 0.8, 0.5, 0.2, 0.2])
    assert peak_and_valley(0, warmup=0, peak=0.9, decay=0, valley=0.1) == 0.1


def test_each_row_comes_once_before_any_comes_again():
    chosen = demonstrations(per_step=2)
    seen = [row.prompt_ids[0] for step in range(6) for row in chosen.of_step(step)]
    assert all(sorted(seen[start : start + 3]) == [1, 2, 3] for start in range(0, 12, 3))
    assert seen[:3] != seen[3:6] or seen[:3] != seen[6:9]
    assert [row.prompt_ids for row in chosen.of_step(3)] == [row.prompt_ids for row in demonstrations().of_step(3)]


def config(**given):
    return runs.config("unused", demonstrations="rows.jsonl", **given)


@pytest.mark.parametrize("phi", [False, True])
@pytest.mark.parametrize("step", [0, 2, 9])
def test_the_gradient_has_two_denominators(step, phi):
    """CHORD: 1 - μ times the rewards' part over the rollouts' tokens, μ times the others' cross-entropy over theirs."""
    made = config(demonstrations_schedule=SCHEDULE, demonstrations_phi=phi)
    batch = own_batch()
    own, index, stats = demonstrations().added(OwnRollouts(batch, 0), RolloutIndex.of(batch), step)
    joined = own.batch.select(index.rows)
    objective = Objective(
        lambda x: -x.ratio * x.advantages, terms=(term_of(made),), surrogate_coef=surrogate_coefficient(made)
    )
    logprobs = torch.linspace(-3, -0.1, joined.num_tokens, dtype=torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(policy_loss(joined, logprobs, None, objective, 0.0, step).loss, logprobs)
    mu, shown_tokens = peak_and_valley(step, **SCHEDULE), ~joined.sampled
    p = logprobs.detach().exp()
    factor = p * (1 - p) if phi else torch.ones_like(p)
    expected = torch.where(shown_tokens, -mu * factor / shown_tokens.sum(), -(1 - mu) * 0.25)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-7)
    assert stats["demonstrations/tokens"].value() == shown_tokens.sum()
    assert sorted(joined.sampled_lengths.tolist()) == [0, 0, 1, 3]


@pytest.mark.parametrize("weighting", [mean_over_update, mean_per_sequence])
@pytest.mark.parametrize("per_step", [1, 3, 4])
def test_processes_share_the_demonstrations_of_a_step(weighting, per_step):
    """Two processes have the weights of one, though one of them may have no demonstration at all."""
    one = own_batch()
    alone, index, _ = demonstrations(1, weighting, per_step).added(OwnRollouts(one, 0), RolloutIndex.of(one), 5)
    assert term_weights(alone.batch, "demonstrations").sum().item() == pytest.approx(1.0)
    parts = [own_batch(rank) for rank in range(2)]
    everyone = join_indexes([RolloutIndex.of(part, rank) for rank, part in enumerate(parts)])
    both = [
        demonstrations(2, weighting, per_step).added(OwnRollouts(part, rank), everyone, 5)
        for rank, part in enumerate(parts)
    ]
    weights = [term_weights(own.batch, "demonstrations") for own, _, _ in both]
    assert sum(w.sum().item() for w in weights) == pytest.approx(1.0)
    found = sorted(w for part in weights for w in part[part > 0].tolist())
    assert found == pytest.approx(sorted(w for w in term_weights(alone.batch, "demonstrations").tolist() if w))
    for own, index, _ in both:  # every process finds the same rollouts at the places that the index names
        mine = index.rows[index.owners == own.rank]
        lengths = index.lengths[index.owners == own.rank]
        assert own.batch.lengths[mine].tolist() == lengths.tolist() and len(index) == 4 + per_step
        assert index.has_signal.all()


def test_a_part_of_a_step_has_its_part_of_the_weight():
    batch = own_batch()
    own, _, _ = demonstrations().added(OwnRollouts(batch, 0), RolloutIndex.of(batch), 0, share=0.5)
    assert term_weights(own.batch, "demonstrations").sum().item() == pytest.approx(0.5)


def written(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def shows(count=5, completion=" 7"):
    return [{"prompt": f"show {number}", "completion": completion} for number in range(count)]


def silent(completions, **_):
    return [0.0] * len(completions)


@pytest.mark.slow
def test_demonstrations_are_learned_where_no_reward_teaches(tmp_path):
    settings = {
        "demonstrations": written(tmp_path, shows()),
        "demonstrations_per_step": 3,
        "learning_rate": 1e-2,
        "demonstrations_schedule": {"warmup": 0, "peak": 1.0, "decay": 4, "valley": 0.5},
        "max_steps": 6,
        "parts": {"reward_funcs": silent},
    }
    trainer = runs.trainer(tmp_path / "run", **settings)
    trainer.train()
    losses = runs.history(trainer, "demonstrations/loss")
    assert losses[-1] < losses[0] / 2
    assert all(tokens == 3 * 3 for tokens in runs.history(trainer, "demonstrations/tokens"))
    assert runs.history(trainer, "demonstrations/coef")[::2] == pytest.approx([1.0, 0.75, 0.5])
    # the rollouts are counted as ever
    plain = runs.trainer(tmp_path / "plain", max_steps=1, parts={"reward_funcs": silent})
    plain.train()
    for name in ("num_tokens", "completions/mean_length", "entropy"):
        assert runs.history(trainer, name)[0] == pytest.approx(runs.history(plain, name)[0])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a", "answer": "b"}], "`completion`"),
        ([{"prompt": "a", "completion": ""}], "row 0"),
        ([{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}], "row 0"),
        ([*shows(1), {"prompt": "a", "completion": " 7" * 40}], "row 1"),
    ],
)
def test_rows_that_cannot_be_learned_are_named(tmp_path, rows, said):
    codec = runs.trainer(tmp_path / "run").collector.codec
    with pytest.raises(CheckError, match=said):
        load_demonstrations(written(tmp_path, rows), codec, 8)


def test_a_message_of_the_assistant_is_a_completion_that_ends(tmp_path):
    codec = runs.trainer(tmp_path / "run").collector.codec
    [message] = load_demonstrations(
        written(tmp_path, [{"prompt": "a", "completion": [{"role": "assistant", "content": " 7"}]}]), codec, 8
    )
    [text] = load_demonstrations(written(tmp_path, shows(1), "text.jsonl"), codec, None)
    assert message.completion_ids == text.completion_ids and text.completion_ids[-1] == codec.tokenizer.eos_token_id
    assert not any(text.sampled)


@pytest.mark.slow
def test_a_resumed_run_learns_from_the_same_demonstrations(tmp_path):
    settings = {"demonstrations": written(tmp_path, shows(7)), "demonstrations_per_step": 2, "max_steps": 4}
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = runs.trainer(tmp_path / "whole", **settings, **saved)
    whole.train()
    resumed = runs.trainer(tmp_path / "resumed", **settings, **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(runs.weights(whole), runs.weights(resumed), strict=True):
        assert torch.equal(one, other)
