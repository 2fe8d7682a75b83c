"""Gradients and steps of an adapter, against plain torch."""

import math
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn

from covey.core.model import patched_forward
from covey.policy.fused import GatedMLP, RMSNorm
from covey.tinker.adapter import Adapter, AdapterSpec, layers_of
from covey.tinker.errors import Refusal
from covey.tinker.learner import AdamParams, Learner, checked, loss_of_rows, micro_batches
from covey.tinker.losses import loss_of
from covey.tinker.wire import Datum
from tests.support import tinkering, tiny
from tests.support.tinkering import datum, tensor, tokens

CROSS = loss_of("cross_entropy", {})


def learner(model=None, spec=None, token_budget=2048):
    base = tinkering.base(model, token_budget)
    made = Learner(base, Adapter.new(base.model, spec or AdapterSpec(4, seed=1)))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # an adapter that changes something: both of its matrices get a gradient
        for _, b in made.adapter.matrices.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.01)
    return made


def gradients(made):
    return [parameter.grad.clone() for parameter in made.adapter.parameters()]


DATA = [datum(tokens(size, size), weights=[0.0] + [1.0] * (size - 3) + [-0.5]) for size in (9, 17, 12, 5, 30)]


def plain_logprobs(model, adapter, one):
    """Log-probs of the targets of a datum, by a model whose layers multiply with W + scale B A."""
    with ExitStack() as patches:
        for name, (a, b) in adapter.matrices.items():
            layer = model.get_submodule(name)
            weight = layer.weight + adapter.spec.scale * (b @ a)
            forward = lambda x, weight=weight, layer=layer: nn.functional.linear(x, weight, layer.bias)  # noqa: E731
            patches.enter_context(patched_forward(layer, forward))
        logits = model(input_ids=torch.tensor([one.tokens]), use_cache=False).logits[0]
    targets = torch.from_numpy(one.inputs["target_tokens"].dense())
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, targets if targets.dim() == 2 else targets[:, None]).view(targets.shape)


def plain_gradients(made, data, model):
    for parameter in made.adapter.parameters():
        parameter.grad = None
    for one in data:
        weights = torch.from_numpy(one.inputs["weights"].dense())
        (-weights * plain_logprobs(model, made.adapter, one)).sum().backward()
    return gradients(made)


@pytest.mark.parametrize("train_mlp", [True, False])
def test_norms_are_computed_fused_and_mlps_where_they_have_no_adapter(train_mlp):
    made = learner(spec=AdapterSpec(4, seed=1, train_mlp=train_mlp))
    made.forward_backward(DATA, *CROSS)
    fused = {layer.function for layer in made._fused}
    assert fused == ({RMSNorm} if train_mlp else {RMSNorm, GatedMLP})
    for ours, plain in zip(gradients(made), plain_gradients(made, DATA, tiny.model()), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("targets", ["next", "others", "two of each position"])
def test_gradients_are_those_of_a_plain_forward_pass(targets):
    data = DATA
    if targets == "others":
        data = [Datum(one.tokens, {**one.inputs, "target_tokens": tensor(tokens(len(one.tokens), 7))}) for one in DATA]
    if targets == "two of each position":
        shape = [(len(one.tokens), 2) for one in DATA]
        pairs = [np.asarray(tokens(2 * n, n)).reshape(n, 2) for n, _ in shape]
        weights = [np.linspace(-1, 1, 2 * n).astype(np.float32).reshape(n, 2) for n, _ in shape]
        parts = zip(DATA, pairs, weights, strict=True)
        data = [Datum(one.tokens, {"target_tokens": tensor(t), "weights": tensor(w)}) for one, t, w in parts]
    made = learner()
    scored = made.forward_backward(data, *CROSS)
    ours = gradients(made)
    model = tiny.model().requires_grad_(False)
    for found, one in zip(scored.logprobs, data, strict=True):
        expected = plain_logprobs(model, made.adapter, one).detach().numpy()
        np.testing.assert_allclose(found, expected, atol=2e-5)
    for mine, theirs in zip(ours, plain_gradients(made, data, model), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert scored.metrics["tokens:sum"] == sum(np.count_nonzero(one.inputs["weights"].dense()) for one in data)


def close(mine, theirs, tolerance=1e-5):
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("budget", [1, 20, 40])
def test_the_cut_into_micro_batches_does_not_matter(budget):
    whole, cut = learner(), learner(token_budget=budget)
    whole.forward_backward(DATA, *CROSS)
    scored = cut.forward_backward(DATA, *CROSS)
    close(gradients(whole), gradients(cut))
    assert [len(one) for one in scored.logprobs] == [len(one.tokens) for one in DATA]


def test_gradients_of_requests_add_up_and_forward_leaves_them_alone():
    once, thrice = learner(), learner()
    once.forward_backward(DATA, *CROSS)
    thrice.forward_backward(DATA[:2], *CROSS)
    thrice.forward(DATA, *CROSS)
    thrice.forward_backward(DATA[2:], *CROSS)
    close(gradients(once), gradients(thrice))


def group_of(prompt, count=4, **more):
    """Completions of one prompt, whose positions have log-prob and advantage 0."""
    data = []
    for n in range(count):
        completion, before = tokens(4 + n, n), len(prompt) - 1
        inputs = {"logprobs": [0.0] * before + [-2.0] * len(completion)}
        inputs["advantages"] = [0.0] * before + [n - 1.5] * len(completion)
        inputs |= {name: [0.0] * before + [value] * len(completion) for name, value in more.items()}
        data.append(datum([*prompt, *completion], **inputs))
    return data


def test_a_prompt_that_data_share_is_computed_once():
    made, passes = learner(), []
    scorer = made.base.scorer

    def counting(model, batch, **options):
        passes.append((len(batch.prompt_ids), batch.num_tokens))
        return scorer(model, batch, **options)

    made.base.scorer = counting
    made.forward_backward(group_of(tokens(20, 1)), *loss_of("importance_sampling", {}))
    # 20 tokens once and 4 + 5 + 6 + 7 behind them; then log-probs of the 19 positions within the prompt
    assert passes == [(20, 22), (1, 19)]


def test_micro_batches_end_with_their_groups():
    # positions: 19 of the prompt and 4 + 5 + 6 + 7 = 41; 8 and the same 22 = 30; and a row of 5
    data = [
        *group_of(tokens(20, 1)),
        *group_of(tokens(9, 2)),
        datum(tokens(6, 3), logprobs=[-1.0] * 5, advantages=[1.0] * 5),
    ]
    rows = checked(data, loss_of("importance_sampling", {})[0], tinkering.base())
    heads = [row.head for row in rows]
    assert heads == [19] * 4 + [8] * 4 + [0]

    def parts(budget, enough):
        return sorted(sorted(numbers) for _, numbers in micro_batches(rows, heads, budget, enough))

    groups = [0, 1, 2, 3], [4, 5, 6, 7], [8]
    assert parts(budget=100, enough=76) == [[*range(9)]]
    assert parts(budget=100, enough=30) == [*groups]
    cut = parts(budget=35, enough=30)  # the first group has 41
    assert [*groups[1]] in cut and [8] in cut and len(cut) == 4


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
@pytest.mark.parametrize("budget", [2048, 30])
def test_shared_prompts_change_no_logprob_loss_or_gradient(name, budget):
    more = {"sequence_ratio_mask": 1.0} if name == "gspo" else {}
    data = [*group_of(tokens(20, 1), **more), *group_of(tokens(9, 2), **more), *group_of([5], 1, **more)]
    loss, config = loss_of(name, {"beta": 0.05} if name == "dro" else {})
    made = learner(token_budget=budget)
    scored = made.forward_backward(data, loss, config)
    ours = gradients(made)
    for parameter in made.adapter.parameters():
        parameter.grad = None
    rows = checked(data, loss, made.base)
    plain = [plain_logprobs(tiny.model().requires_grad_(False), made.adapter, one) for one in data]
    value = loss_of_rows(torch.cat(plain), rows, loss, config)
    value.backward()
    assert scored.metrics["loss:sum"] == pytest.approx(value.item(), rel=1e-4)
    for found, expected in zip(scored.logprobs, plain, strict=True):
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=2e-5)
    for mine, theirs in zip(ours, gradients(made), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_data_without_a_weight_are_scored_and_add_nothing():
    idle = [Datum(one.tokens, {**one.inputs, "weights": tensor([0.0] * len(one.tokens))}) for one in DATA[:2]]
    made = learner()
    alone = made.forward(idle, *CROSS).logprobs
    scored = made.forward_backward([*idle, DATA[2]], *CROSS)
    together = gradients(made)
    made.forget()
    made.forward_backward([DATA[2]], *CROSS)
    close(together, gradients(made))
    np.testing.assert_allclose(scored.logprobs[0], alone[0], atol=1e-6)


def test_a_step_is_adamw_with_decoupled_decay():
    made = learner()
    start = [parameter.detach().clone() for parameter in made.adapter.parameters()]
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in start]
    for step, rate in enumerate((0.01, 0.003), 1):
        made.forward_backward(DATA, *CROSS)
        grads = gradients(made)
        norm = math.sqrt(sum(float(one.square().sum()) for one in grads))
        metrics = made.step(AdamParams(rate, 0.8, 0.9, 1e-6, 0.1, norm / 2))  # clipped to half
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for one, (m, v), grad in zip(start, moments, grads, strict=True):
            grad = grad / 2
            m.mul_(0.8).add_(grad, alpha=0.2)
            v.mul_(0.9).addcmul_(grad, grad, value=0.1)
            update = (m / (1 - 0.8**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-6)
            one.mul_(1 - rate * 0.1).sub_(rate * update)
        close(start, [parameter.detach() for parameter in made.adapter.parameters()])
    assert made.steps == 2


def test_a_step_without_gradients_is_refused():
    made = learner()
    with pytest.raises(Refusal, match="no forward_backward"):
        made.step(AdamParams())
    made.forward_backward(DATA, *CROSS)
    made.step(AdamParams())
    with pytest.raises(Refusal, match="no forward_backward"):
        made.step(AdamParams())


def test_a_loss_that_is_not_finite_names_its_position():
    broken = datum(tokens(6, 1), weights=[0.0, 1.0, math.inf, 0.0, 1.0])
    with pytest.raises(FloatingPointError, match="datum 1, position 2"):
        learner().forward_backward([DATA[0], broken], *CROSS)


def test_the_switches_choose_the_layers():
    model = tiny.model()
    chosen = layers_of(model, AdapterSpec(4, train_mlp=False, train_unembed=False))
    assert {name.rpartition(".")[2] for name in chosen} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(layers_of(model, AdapterSpec(4, train_attn=False, train_mlp=False))) == {"lm_head"}
    assert len(layers_of(model, AdapterSpec(4))) == 2 * 7 + 1
    with pytest.raises(Refusal, match="nothing would be trained"):
        layers_of(model, AdapterSpec(4, train_attn=False, train_mlp=False, train_unembed=False))


def test_an_adapter_starts_without_an_effect_and_by_its_seed():
    base = tinkering.base()
    first, same, other = (Adapter.new(base.model, AdapterSpec(4, seed=seed)) for seed in (1, 1, 2))
    for (a, b), (a_same, _), (a_other, _) in zip(
        first.matrices.values(), same.matrices.values(), other.matrices.values(), strict=True
    ):
        assert not b.any() and torch.equal(a, a_same) and not torch.equal(a, a_other)
        assert a.abs().max() <= 1 / math.sqrt(a.shape[1])


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (Datum([], {}), "0 tokens"),
        (Datum([5] * 256, {}), "256 tokens"),
        (Datum([5, 104], {}), "input token 104"),
        (Datum([5, 6], {"weights": tensor([1.0, 1.0])}), "target_tokens"),
        (Datum([5, 6], {"target_tokens": tensor([6])}), "1 rows for 2"),
        (Datum([5, 6], {"target_tokens": tensor([6, -1])}), "target token -1"),
        (Datum([5, 6], {"target_tokens": tensor([6.0, 7.0])}), "int64"),
        (Datum([5, 6], {"target_tokens": tensor([6, 7]), "weights": tensor([1, 1])}), "float32"),
        (Datum([5, 6], {"target_tokens": tensor([6, 7]), "mask": tensor([1.0, 1.0])}), "mask"),
        (Datum([5, 6], {"target_tokens": tensor([6, 7]), "weights": tensor([[1.0], [1.0]])}), "weights"),
        (Datum([5, 6], {"target_tokens": tensor([6, 7])}, "an image"), "an image"),
    ],
)
def test_a_datum_that_does_not_fit_is_refused_by_its_number(one, told):
    with pytest.raises(Refusal) as refused:
        learner().forward_backward([DATA[0], one], *CROSS)
    assert "datum 1" in str(refused.value) and told in str(refused.value)
