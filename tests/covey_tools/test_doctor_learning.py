"""Trial updates of `covey doctor`, whose sizes are given."""

import json
from types import SimpleNamespace

import pytest
import torch

from covey import GRPOConfig
from covey.core.engine import EngineTraits
from covey.core.findings import ranked
from covey.core.routing import routing_of
from covey.trainer.trainer import OnlineTrainer
from covey_tools.doctor import course, learning
from covey_tools.doctor.examined import ExaminedRun
from covey_tools.doctor.learning import Trials, TrialUpdate
from tests.support import mixtures, runs, tiny
from tests.support.engines import CopyEngine


def found(monkeypatch, moved, rate=1e-9):
    """Findings of a run whose updates change log-probs by `moved(learning rate)`."""

    class Trials:
        def __init__(self, run):
            self.run = run

        def update(self, learning_rate):
            return TrialUpdate(moved(learning_rate), 0.1, True)

    monkeypatch.setattr(learning, "Trials", Trials)
    monkeypatch.setattr(learning, "scheduled", lambda trainer, steps: 1.0)
    algebra = SimpleNamespace(generation_batch_size=8)
    trainer = SimpleNamespace(run=SimpleNamespace(algebra=algebra), model=object())
    base = SimpleNamespace(rollouts=[None] * 8, seconds=1.0, spread=torch.zeros(1))
    args = SimpleNamespace(learning_rate=rate, optim="adamw_torch")
    run = SimpleNamespace(args=args, steps=100, trainer=trainer, base=base, summary={}, has_time=lambda code: True)
    return ranked(learning.learning_rate(run))


def test_a_rate_is_proposed_where_its_updates_learn(monkeypatch):
    (low,) = found(monkeypatch, lambda rate: 10 * rate)  # 0.02 nats an update at 0.002: two nats in 100 steps
    assert (low.code, low.level, low.fix) == ("learning-rate-low", "error", "Set learning_rate=0.002.")


@pytest.mark.parametrize("moved", [lambda rate: 0.0, lambda rate: 1e-6 * rate])
def test_no_rate_is_proposed_where_none_helps(moved, monkeypatch):
    """A cold policy, or frozen weights: the largest rate that is proposed would change nothing either."""
    (low,) = found(monkeypatch, moved)
    assert low.code == "learning-rate-low" and "Set learning_rate" not in low.fix


def test_dropout_of_attention_is_seen_through_the_trainers_own_scoring(tmp_path):
    """A model whose attention drops half of its weights."""
    model = tiny.folder(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**config, "attention_dropout": 0.9}))
    parts = {"model": model, "reward_funcs": lambda completions, **kwargs: [float(len(one)) for one in completions]}
    trainer = runs.trainer(tmp_path / "run", parts=parts)
    (found,) = learning.dropout(ExaminedRun(trainer, trainer.train_dataset))
    assert (found.code, found.fix) == ("engine-mismatch", "Set disable_dropout=True.")


class OfLinear:
    """A trainer of two weights."""

    get_optimizer_cls_and_kwargs = staticmethod(OnlineTrainer.get_optimizer_cls_and_kwargs)

    def __init__(self):
        self.model = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("optim", "kind"), [("sgd", torch.optim.SGD), ("adamw_torch", torch.optim.AdamW), ("none such", torch.optim.AdamW)]
)
def test_a_trial_takes_the_kind_of_optimizer_of_the_run(optim, kind):
    """With gradients clipped to 1e-6, SGD moves weights by 1e-9 and AdamW by the learning rate."""
    args = GRPOConfig(output_dir="", optim=optim if kind is torch.optim.SGD else "adamw_torch", learning_rate=1e-3)
    args.optim = optim
    trials = Trials(SimpleNamespace(args=args, trainer=OfLinear()))
    optimizer = trials._optimizer(0.5)
    assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.5


class Dropping(torch.nn.Module):
    """A model whose dropout is on in training."""

    def __init__(self, dropout):
        super().__init__()
        self.attention_dropout = dropout


@pytest.mark.parametrize(("dropout", "gap", "level"), [(0.5, 0.4, "error"), (0.1, 0.2, "warning"), (0.1, 0.05, None)])
def test_dropout_is_measured(dropout, gap, level):
    model = Dropping(dropout).eval()
    batch = SimpleNamespace(sampled=torch.ones(4, dtype=torch.bool))
    run = SimpleNamespace(
        trainer=SimpleNamespace(model=model),
        args=SimpleNamespace(temperature=1.0),
        base=SimpleNamespace(rollouts=[SimpleNamespace(sampled=[True])]),
        collated=lambda rollouts: batch,
        logprobs=lambda batch, temperature, exact: torch.full((4,), -1.0 - gap * model.training),
    )
    assert [one.level for one in learning.dropout(run)] == ([level] if level else [])
    assert not model.training
    model.attention_dropout = 0.0
    assert [*learning.dropout(run)] == []


def examined(folder, **settings):
    """A tiny model, whose rewards differ by chance."""
    parts = {
        "model": tiny.folder(folder / "model"),
        "reward_funcs": lambda completions, **kwargs: [float(len(set(one))) for one in completions],
    }
    trainer = runs.trainer(folder / "run", parts=parts, max_steps=10, **settings)
    return ExaminedRun(trainer, trainer.train_dataset)


def test_weight_decay_that_leaves_no_weights_is_named(tmp_path):
    """A half of each weight in a step: a thousandth is left after ten."""
    run = examined(tmp_path, weight_decay=50.0, learning_rate=1e-2)
    before = [weight.clone() for weight in run.trainer.model.parameters()]
    (found,) = learning.decay(run)
    assert (found.code, found.fix) == ("learning-rate-high", "Set weight_decay=0.01.")
    assert found.supported is found
    assert all(torch.equal(a, b) for a, b in zip(before, run.trainer.model.parameters(), strict=True))


def test_a_usual_weight_decay_is_not_tried(tmp_path):
    assert [*learning.decay(examined(tmp_path, weight_decay=0.1, learning_rate=1e-4))] == []


def test_an_entropy_bonus_that_outweighs_the_reward_is_named(tmp_path):
    run = examined(tmp_path, entropy_coef=1000.0)
    (found,) = learning.bonus_scale(run)
    assert (found.code, found.level) == ("kl-scale", "error") and "entropy_coef=0" in found.fix
    assert run.trainer.updates.entropy is not None
    assert all(weight.grad is None for weight in run.trainer.model.parameters())
    run.trainer.updates.entropy.coef = 1e-6
    assert [*learning.bonus_scale(run)] == []


def rounded(model, sharding="", **settings):
    trainer = SimpleNamespace(policy=model, sharding=SimpleNamespace(name=sharding))
    run = SimpleNamespace(trainer=trainer, args=runs.config("unused", **settings))
    return [(one.code, one.level, one.fix) for one in learning.rounding(run)]


def test_weights_that_updates_are_rounded_away_from_are_named():
    """Numbers of bfloat16 near 0.02 are 1.2e-4 apart, so updates of 1e-6 are lost and those of 1e-3 are not."""
    half, whole = tiny.model().bfloat16(), tiny.model()
    ((code, level, fix),) = rounded(half, learning_rate=1e-6)
    assert (code, level) == ("weights-rounded", "warning")
    assert "optim='adamw_stochastic'" in fix
    assert rounded(half, learning_rate=1e-3) == rounded(whole, learning_rate=1e-6) == []
    assert rounded(half, learning_rate=1e-6, optim="adamw_stochastic") == []
    assert rounded(half, "FSDP2", learning_rate=1e-6) == [], "of shards each process has a part"


# ---- experts ---------------------------------------------------------------------------------------------------------


class Routed(CopyEngine):
    """An engine that returns the experts of its tokens; its model may choose others than the policy."""

    def __init__(self, model):
        super().__init__(model)
        self.traits = EngineTraits(returns_routes=True, batch_invariant=True)


def with_routes(folder, engine, model=None, **settings):
    parts = {"model": model or mixtures.model("Mixtral"), "engine": engine}
    trainer = runs.trainer(folder, parts=parts, router_aux_loss_coef=0.0, engine_parity="warn", **settings)
    return ExaminedRun(trainer, trainer.train_dataset)


def with_other_routers():
    """The model of `with_routes` with other routers, as kernels of other rounding choose other experts."""
    model = mixtures.model("Mixtral")
    with torch.no_grad():
        for router in routing_of(model).routers:
            router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(5)))
    return model


@pytest.mark.slow
def test_an_engine_that_sends_tokens_to_other_experts_is_named(tmp_path):
    run = with_routes(tmp_path, Routed(with_other_routers()))
    (found,) = learning.routes(run)
    assert (found.code, found.level, found.fix) == ("routes-differ", "warning", "Set routing_replay='R3'.")
    share = float(found.evidence.partition("send ")[2].partition("%")[0])
    assert 20 < share < 100
    # Replayed, the same experts answer, and the shares that each router gives them alone are others.
    assert 0 < found.effect.then < found.effect.now and found.effect.improves


@pytest.mark.slow
def test_experts_are_not_named_where_they_agree_or_are_replayed(tmp_path):
    assert [*learning.routes(with_routes(tmp_path / "same", Routed(mixtures.model("Mixtral"))))] == []
    replaying = with_routes(tmp_path / "r3", Routed(with_other_routers()), routing_replay="R3")
    assert [*learning.routes(replaying)] == []


def test_experts_are_not_compared_where_there_are_none_or_the_engine_returns_none(tmp_path):
    unrouted = with_routes(tmp_path / "unrouted", CopyEngine(with_other_routers()))
    dense = with_routes(tmp_path / "dense", Routed(tiny.model()), tiny.model())
    for run in (unrouted, dense):
        run.sample = lambda *given, **changes: pytest.fail("sampled")
        assert [*learning.routes(run)] == []


@pytest.mark.parametrize(("shares", "named"), [([0.0, 0.004], False), ([0.004, 0.03], True), ([None], False)])
def test_logs_of_a_run_tell_that_experts_differ(shares, named):
    found = [*course.other_experts([{"loss": 0.0}, *({"routing/differing": share} for share in shares)])]
    assert [one.code for one in found] == ["routes-differ"] * named
    assert not named or "3.0%" in found[0].evidence
