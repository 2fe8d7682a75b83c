"""Stale weights are seen throughout a run: which version of the weights explains the engine's log-probs better?"""

import itertools

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import fully_shard

from covey.core.batch import TrainBatch
from covey.trainer.engine_check import staleness
from covey.trainer.engine_check.staleness import COMPARED_AT, Snapshot, VersionTest
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
            snapshot.renew()
            model[0].weight.to_local().fill_(5.0)
            with snapshot.in_place():
                assert model(torch.ones(1, 2)).item() == 6
            assert model(torch.ones(1, 2)).item() == 10
    finally:
        torch.distributed.destroy_process_group()


class Run:
    """A test of versions whose model scores every token with its only weight."""

    def __init__(self):
        self.model, self.version = nn.Linear(1, 1, bias=False), 0
        self.model.weight.data.fill_(0.0)
        self.test = VersionTest(lambda: self.model, lambda: self.version)
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

    def look(self, *engine, last=False):
        return self.test.preferences(self.few(*engine), self.rescore, last)


def test_each_token_prefers_the_closer_version():
    run = Run()
    run.step()  # from 0 to 1: the engine's -1, 0, 0.25, 0.5 and 1 are -1 to 1 closer to the earlier one
    assert run.test.due()
    preferences = [(2 - 1) / 3, (1 - 0) / 1, (0.75 - 0.25) / 1, 0.0, (0 - 1) / 1]
    total, squares, sizes, now, then, tokens = run.look(-1.0, 0.0, 0.25, 0.5, 1.0)
    assert total == pytest.approx(sum(preferences))
    assert squares == pytest.approx(sum(one**2 for one in preferences))
    assert sizes == pytest.approx(sum(map(abs, preferences)))
    assert (now, then, tokens) == (2 + 1 + 0.75 + 0.5 + 0, 1 + 0 + 0.25 + 0.5 + 1, 5)
    assert run.model.weight.item() == 1.0


def test_preferences_of_one_sign_count_over_looks_until_they_suffice():
    run = Run()
    run.step()
    assert run.test.finding([run.look(*[0.0] * 20)]) is None  # 20 / sqrt(20) = 4.5
    assert run.test.finding([]) is None  # no process had anything to compare
    run.step()
    assert run.test.due()
    found = run.test.finding([run.look(*[0.0] * 10), run.look(*[0.0] * 10)])  # 40 / sqrt(40) = 6.3, of two processes
    assert "stale weights: 40 of its log-probs are explained better by weights of about step 0" in found
    assert "(mean difference 0 nats) than by those of step 2, which it should sample with (1.5)" in found


def test_a_healthy_past_is_no_credit_nor_split_preferences_evidence():
    run = Run()
    run.step()
    assert run.test.finding([run.look(*[1.0] * 1000)]) is None
    run.step()
    assert run.test.finding([run.look(*[0.0] * 70, *[2.0] * 30)]) is None  # 40 of 100 preferences by size: too divided
    run.step()
    assert run.test.finding([run.look(*[0.0] * 1000)]) is not None


def test_looks_are_far_apart_and_a_new_copy_follows_the_last():
    run, looked = Run(), []
    for version in range(2 * COMPARED_AT[-1] + 1):
        if run.test.due():
            looked.append(version)
            run.test.finding([run.look(float(version))])
            assert not run.test.due()
        run.step()
    assert looked == [*COMPARED_AT, *(COMPARED_AT[-1] + age for age in COMPARED_AT)]


def differences(run, *engine):
    """The first half of a rollout batch's comparison: is the last version to be asked?"""
    assert run.test.moved()
    few = run.few(*engine)
    asked = run.test.jumped([run.test.difference(few, run.rescore)])
    assert not run.test.moved()
    return asked


def test_the_last_version_is_asked_when_the_difference_jumps():
    run = Run()
    assert not differences(run, *[0.125] * 40)  # version 0: the rounding of this engine
    run.step()
    assert not differences(run, *[1.25] * 40)  # twice as much
    run.step()
    assert differences(run, *[1.0] * 40)  # it has stayed behind
    assert "by weights of about step 1" in run.test.finding([run.look(*[1.0] * 40, last=True)], last=True)


def test_a_difference_that_no_version_explains_is_rounding():
    run = Run()
    assert not differences(run, *[0.0] * 40)
    run.step()
    assert differences(run, *[1.25, 0.75] * 20)
    assert run.test.finding([run.look(*[1.25, 0.75] * 20, last=True)], last=True) is None
    run.step()
    assert not differences(run, *[2.25, 1.75] * 20)


def test_preferences_for_the_last_version_add_up_until_they_suffice():
    run = Run()
    assert not differences(run, *[0.0] * 20)
    for _ in range(2):
        run.step()
        assert differences(run, *[0.0] * 20)
        found = run.test.finding([run.look(*[0.0] * 20, last=True)], last=True)
    assert "40 of its log-probs are explained better by weights of about step 0" in found  # 20 are too few


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


def test_a_part_of_the_weights_tells_versions_apart(tmp_path, monkeypatch):
    size = sum(weight.nbytes for weight in tiny.model().parameters())
    monkeypatch.setattr(Snapshot.__init__, "__defaults__", (size // 4,))
    dropping = trainer(tmp_path, learning_rate=1e-5)
    with pytest.raises(ValueError, match="the engine has stale weights"):
        dropping.train()


def test_a_warning_is_given_once(tmp_path):
    with pytest.warns(UserWarning, match="stale weights.*Continuing because") as caught:
        trainer(tmp_path, learning_rate=1e-5, max_steps=8, engine_parity="warn").train()
    assert len([one for one in caught if "stale weights" in str(one.message)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "bf16"), [(1e-6, False), (1e-3, True)])
def test_a_healthy_engine_is_not_accused_and_nothing_changes(tmp_path, monkeypatch, rate, bf16):
    monkeypatch.setattr(staleness, "COMPARED_AT", (1,))
    looks, preferences = itertools.count(), VersionTest.preferences
    monkeypatch.setattr(VersionTest, "preferences", lambda *given: (next(looks), preferences(*given))[1])
    trained = []
    for parity in ("raise", "off"):
        healthy = trainer(
            tmp_path / parity, CopyEngine, learning_rate=rate, bf16=bf16, engine_parity=parity, max_steps=12
        )
        healthy.train()
        trained.append(runs.weights(healthy))
    assert next(looks) == 11
    assert all(same(*trained))
