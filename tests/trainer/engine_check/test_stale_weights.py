"""Stale weights are seen throughout a run: which version of the weights explains the engine's log-probs better?"""

import itertools

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import fully_shard

from covey.core.batch import TrainBatch
from covey.trainer.engine_check.stale_weights import Snapshot, StaleWeightsTest
from tests.support import runs, tiny
from tests.support.engines import CopyEngine


def layers():
    """Matrices of 4, 16 and 8 bytes, the second of them frozen."""
    made = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (1, 4, 2))
    made[1].requires_grad_(False)
    return made


def values(model):
    return [weight.detach().clone() for weight in model.parameters()]


def same(left, right):
    return [torch.equal(a, b) for a, b in zip(left, right, strict=True)]


def test_earlier_weights_are_put_back_for_a_moment_alone():
    model = layers()
    before, snapshot = values(model), Snapshot(model)
    for weight in model.parameters():
        weight.data += 1.0
    after = values(model)
    with torch.no_grad(), snapshot.in_place():
        assert same(values(model), before) == [True, False, True]  # what is not trained stays
    assert same(values(model), after) == [True, True, True]
    with pytest.raises(RuntimeError, match="in between"), torch.no_grad(), snapshot.in_place():
        raise RuntimeError("in between")
    assert same(values(model), after) == [True, True, True]


def test_the_smallest_weights_are_copied_up_to_the_limit():
    model = layers()
    before, snapshot = values(model), Snapshot(model, limit=11)  # 4 bytes, and 8 are too many
    for weight in model.parameters():
        weight.data += 1.0
    with torch.no_grad(), snapshot.in_place():
        assert same(values(model), before) == [True, False, False]


def test_weights_may_move_after_they_were_copied():
    """As when a policy is offloaded while an engine samples."""
    model = layers()
    before, snapshot = values(model), Snapshot(model)
    for weight in model.parameters():
        weight.data = weight.data.clone() + 1.0
    with torch.no_grad(), snapshot.in_place():
        assert same(values(model), before) == [True, False, True]


def test_shards_are_copied_of_weights_that_are_gathered():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = fully_shard(nn.Sequential(nn.Linear(2, 1, bias=False)))
        with torch.no_grad():
            model[0].weight.to_local().fill_(1.0)
            assert model(torch.ones(1, 2)).item() == 2  # the last weights of a forward pass stay gathered
            snapshot = Snapshot(model)
            model[0].weight.to_local().fill_(3.0)
            assert model(torch.ones(1, 2)).item() == 6
            with snapshot.in_place():
                assert model(torch.ones(1, 2)).item() == 2
            assert model(torch.ones(1, 2)).item() == 6
    finally:
        torch.distributed.destroy_process_group()


class Run:
    """A test of versions whose model scores every token with its only weight."""

    def __init__(self, **settings):
        self.model, self.version = nn.Linear(1, 1, bias=False), 0
        self.model.weight.data.fill_(0.0)
        self.test = StaleWeightsTest(lambda: self.model, lambda: self.version, **settings)
        assert not self.test.due()

    def step(self):
        self.version += 1
        self.model.weight.data += 1.0

    def few(self, *engine):
        count = len(engine)
        return TrainBatch(
            token_ids=torch.zeros(count, dtype=torch.long),
            lengths=torch.ones(count, dtype=torch.long),
            sampled=torch.ones(count, dtype=torch.bool),
            prompt_ids=torch.tensor([10]),
            prompt_lengths=torch.tensor([1]),
            groups=torch.zeros(count, dtype=torch.long),
            engine_logprobs=torch.tensor(engine),
        )

    def rescore(self, batch):
        return self.model.weight.detach().view(1).expand(batch.num_tokens).clone()

    def preferences(self, *engine):
        return self.test.preferences(self.few(*engine), self.rescore)


def test_each_token_prefers_the_closer_version():
    run = Run()
    run.step()  # from 0 to 1: the engine's -1, 0, 0.25, 0.5 and 1 are -1 to 1 closer to the earlier one
    assert run.test.due()
    preferences = [(2 - 1) / 3, (1 - 0) / 1, (0.75 - 0.25) / 1, 0.0, (0 - 1) / 1]
    total, squares, sizes, now, then, tokens = run.preferences(-1.0, 0.0, 0.25, 0.5, 1.0)
    assert total == pytest.approx(sum(preferences))
    assert squares == pytest.approx(sum(one**2 for one in preferences))
    assert sizes == pytest.approx(sum(map(abs, preferences)))
    assert (now, then, tokens) == (2 + 1 + 0.75 + 0.5 + 0, 1 + 0 + 0.25 + 0.5 + 1, 5)
    assert run.model.weight.item() == 1.0


def test_preferences_of_one_sign_add_up_until_they_suffice():
    run = Run()
    run.step()
    assert run.test.due()
    assert run.test.finding([run.preferences(*[0.0] * 20)]) is None  # 20 / sqrt(20) = 4.5
    assert run.test.finding([]) is None  # no process had anything to compare
    run.step()
    assert run.test.due()
    found = run.test.finding(
        [run.preferences(*[0.0] * 10), run.preferences(*[0.0] * 10)]
    )  # 40 / sqrt(40) = 6.3, of two processes
    assert "stale weights: 40 of its log-probs are explained better by weights of about step 0" in found
    assert "(mean difference 0 nats) than by those of step 2, which it should sample with (1.5)" in found


def test_a_healthy_past_is_no_credit_nor_split_preferences_evidence():
    run, found = Run(), []
    for engine in (
        [1.0] * 30,  # 30 / sqrt(30) = 5.5 for the current weights, 1: not enough to copy them
        [0.0] * 700 + [2.0] * 300,  # 400 of 1000 by size for the copy: too divided
        [0.0] * 1000,
    ):
        run.step()
        while not run.test.due():
            run.step()
        found.append(run.test.finding([run.preferences(*engine)]))
    assert found[:2] == [None, None] and found[2] is not None


def test_the_current_weights_are_copied_where_they_win():
    run = Run()
    for _ in range(3):
        run.step()
        assert run.test.due()
        assert run.test.finding([run.preferences(*[run.model.weight.item()] * 40)]) is None
    run.step()
    assert run.test.due()
    found = run.test.finding([run.preferences(*[3.0] * 40)])  # it has stayed behind
    assert "by weights of about step 3" in found


def test_comparisons_are_spaced_while_the_current_weights_win():
    run, compared = Run(spacing=4), []
    for version in range(12):
        if run.test.due():
            compared.append(version)
            assert run.test.finding([run.preferences(*[float(version)] * 40)]) is None
        run.step()
    assert compared == [1, 5, 9]


def test_a_copy_is_kept_and_compared_more_rarely_where_no_version_wins():
    run, compared = Run(), []
    for version in range(20):
        if run.test.due():
            compared.append(version)
            assert run.test.finding([run.preferences(0.0, float(version))]) is None  # one token for each
            assert not run.test.due()
        run.step()
    assert compared == [1, 2, 4, 8, 16]


# ---- in a run --------------------------------------------------------------------------------------------------------


class Deaf(CopyEngine):
    """Takes no update after version `until`."""

    until = 0

    def load_weights(self, update):
        if update.version <= self.until:
            super().load_weights(update)

    async def generate(self, request):
        completions = await super().generate(request)
        for completion in completions:
            completion.versions = None  # it does not know better
        return completions


def trainer(folder, engine=Deaf, **settings):
    model = settings.pop("model", None) or tiny.model()
    parts = {"model": model, "engine": engine(model), **settings.pop("parts", {})}
    return runs.trainer(folder, parts=parts, **{"max_steps": 30, "logging_steps": 30, **settings})


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_an_engine_that_drops_every_update_is_found_at_once(tmp_path, rate):
    dropping = trainer(tmp_path, learning_rate=rate)
    with pytest.raises(ValueError, match="the engine has stale weights"):
        dropping.train()
    assert dropping.state.global_step <= 3


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "until"), [(1e-6, 5), (1e-3, 8)])
def test_an_engine_that_stops_taking_updates_is_found_soon(tmp_path, rate, until):
    dropping = trainer(tmp_path, learning_rate=rate, max_completion_length=12)
    dropping.collector.engine.until = until
    with pytest.raises(ValueError, match=f"explained better by weights of about step {until} "):
        dropping.train()
    assert until < dropping.state.global_step <= until + 3


def test_an_adapter_that_never_arrives_is_found(tmp_path):
    adapted = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    dropping = trainer(tmp_path, parts=adapted, learning_rate=1e-4)
    with pytest.raises(ValueError, match="the engine has stale weights"):
        dropping.train()
    assert dropping.state.global_step <= 3


@pytest.mark.slow
def test_a_part_of_the_weights_tells_versions_apart(tmp_path, monkeypatch):
    size = sum(weight.nbytes for weight in tiny.model().parameters())
    monkeypatch.setattr(Snapshot.__init__, "__defaults__", (size // 4,))
    dropping = trainer(tmp_path, learning_rate=1e-5)
    with pytest.raises(ValueError, match="the engine has stale weights"):
        dropping.train()


@pytest.mark.slow
def test_a_warning_is_given_once(tmp_path):
    with pytest.warns(UserWarning, match="stale weights.*Continuing because") as caught:
        trainer(tmp_path, learning_rate=1e-5, max_steps=8, engine_parity="warn").train()
    assert len([one for one in caught if "stale weights" in str(one.message)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "bf16"), [(1e-6, False), (1e-3, True)])
def test_a_healthy_engine_is_not_accused_and_nothing_changes(tmp_path, monkeypatch, rate, bf16):
    calls, preferences = itertools.count(), StaleWeightsTest.preferences
    monkeypatch.setattr(StaleWeightsTest, "preferences", lambda *given: (next(calls), preferences(*given))[1])
    trained = []
    for parity in ("raise", "off"):
        healthy = trainer(
            tmp_path / parity, CopyEngine, learning_rate=rate, bf16=bf16, engine_parity=parity, max_steps=12
        )
        healthy.train()
        trained.append(runs.weights(healthy))
    assert next(calls) >= 4
    assert all(same(*trained))
