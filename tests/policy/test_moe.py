"""The load-balancing loss is transformers' own, in every layout, and adds up over parts."""

import pytest
import torch

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.layouts import LAYOUTS
from covey.policy.moe import RouterLoads, experts_per_token, load_balancing_loss, loads_of
from covey.policy.scoring import TokenScorer
from tests.support import mixtures
from tests.support.exact import KeepFloat64

WITH_A_LOSS = ["Mixtral", "Qwen3Moe", "Olmoe", "GptOss"]


@pytest.fixture(autouse=True)
def _keep_float64():
    with KeepFloat64():
        yield


def batch_of(*groups):
    """(prompt length, [completion lengths]) each; tokens at random."""
    chance = torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(4, 100, (count,), generator=chance).tolist()

    rollouts = []
    for group, (prompt, lengths) in enumerate(groups):
        tokens = ids(prompt)
        for length in lengths:
            rollouts.append(Rollout(tokens, ids(length), [True] * length, None, "", FinishReason.STOP, group=group))
    return collate(rollouts)


BATCH = batch_of((5, [3, 7, 1]), (2, [4, 4]))


def scorer(layout):
    return TokenScorer(lambda model: model, temperature=1.0, layout=layout)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_balance_loss_uses_batch_means():
    # Probabilities of the first expert: 0.9, 0.8, 0.7, 0.4, so it is chosen 3 of 4 times and has 0.7 on average.
    odds = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])
    loads = loads_of([odds.log()], torch.ones(4), top_k=1)
    assert loads.chosen.tolist() == [3, 1]
    assert load_balancing_loss(loads, loads).item() == pytest.approx(2 * (0.75 * 0.7 + 0.25 * 0.3))
    # With the last token counted twice: chosen 3 and 2 of 5, probabilities (2.8 + 0.4) / 5 and (1.2 + 0.6) / 5.
    twice = loads_of([odds.log()], torch.tensor([1.0, 1.0, 1.0, 2.0]), top_k=1)
    assert load_balancing_loss(twice, twice).item() == pytest.approx(2 * (0.6 * 0.64 + 0.4 * 0.36))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WITH_A_LOSS)
def test_loss_and_gradient_equal_transformers_own(name, layout):
    model = mixtures.model(name).double()
    theirs = model(**LAYOUTS["padded"](BATCH, 0).kwargs, output_router_logits=True).aux_loss
    theirs.backward()
    expected = gradients(model)
    model.zero_grad()
    _, loads = scorer(layout).with_loads(model, BATCH, experts_per_token(model))
    ours = load_balancing_loss(loads, loads)
    ours.backward()
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-6, atol=0)
    for parameter, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[parameter], rtol=1e-4, atol=1e-7, msg=parameter)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_micro_batches_add_up_to_the_whole(layout):
    model = mixtures.model("Qwen3Moe").double()
    mine = scorer(layout)
    whole = mine.loads(model, BATCH, 2)
    parts = [mine.loads(model, part, 2) for part in BATCH.split(2)]
    for one, other in zip(RouterLoads.of_all(parts), whole, strict=True):
        torch.testing.assert_close(one, other)
    assert whole.pairs == (3 * 5 + 11 + 2 * 2 + 8) * 2  # tokens as padded rows have them, times layers
    losses = [load_balancing_loss(whole, part) for part in parts]
    torch.testing.assert_close(sum(losses), load_balancing_loss(whole, whole))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollouts_without_learned_tokens_do_not_count(layout):
    model = mixtures.model("Mixtral").double()
    batch = BATCH.select(torch.arange(5))
    batch.sampled[3:10] = False  # the second rollout, of seven tokens
    left = scorer(layout).loads(model, BATCH.select(torch.tensor([0, 2, 3, 4])), 2)
    for one, other in zip(scorer(layout).with_loads(model, batch, 2)[1], left, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_give_the_gradient_or_an_error(reentrant):
    model = mixtures.model("Qwen3Moe").double().train()

    def loss():
        loads = scorer("shared_prefix").with_loads(model, BATCH, 2)[1]
        return load_balancing_loss(loads, loads)

    loss().backward()
    expected = gradients(model)
    model.zero_grad()
    settings = {"use_reentrant": reentrant}
    if not reentrant:
        settings["context_fn"] = lambda: (KeepFloat64(), KeepFloat64())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    if reentrant:
        model.enable_input_require_grads()
        with pytest.raises(ValueError, match=r"use_reentrant.: False"):
            loss()
    else:
        loss().backward()
        for parameter, grad in gradients(model).items():
            torch.testing.assert_close(grad, expected[parameter], msg=parameter)
