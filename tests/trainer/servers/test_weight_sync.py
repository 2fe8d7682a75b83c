"""When weights are sent, what, and that processes agree about it."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from covey.core.engine import EngineTraits
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.engines.weight_sync import WeightSync
from tests.support import tiny

peft = pytest.importorskip("peft")


class Engine:
    """Takes weights as any engine does, and remembers them."""

    def __init__(self, fails=None, passes=1, **traits):
        self.traits = EngineTraits(**traits)
        self.fails, self.passes, self.updates = fails, passes, []

    def load_weights(self, update):
        for _ in range(self.passes):
            self.tensors = {spec.name: tensor.clone() for spec, tensor in update.checked()}
        if self.fails is not None:
            raise self.fails
        self.updates.append(update)


class Shared(Engine):
    """Uses servers that other processes use, too."""

    adopted = None
    holds = 0

    @contextlib.contextmanager
    def held(self):
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    def export_state(self):
        return ["http://a"]

    def import_state(self, version, told):
        self.adopted = version, told


def adapted(**changes):
    return peft.get_peft_model(tiny.model(), peft.LoraConfig(r=2, target_modules=["q_proj"], **changes))


def test_weights_are_sent_first_and_whenever_the_policy_changed():
    engine, model = Engine(), tiny.model()
    sync = WeightSync(engine, lambda: model, ALONE)
    sent = [bool(sync.ensure_current(version)) for version in (0, 0, 1, 1, 3)]
    assert sent == [True, False, True, False, True]
    assert [update.version for update in engine.updates] == [0, 1, 3]


def test_what_was_sent_is_the_policy_of_that_moment():
    engine, model = Engine(), tiny.model()
    sync = WeightSync(engine, lambda: model, ALONE)
    stats = sync.ensure_current(0)
    assert stats["sync/bytes"].total == sum(p.numel() * 4 for p in model.parameters())
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    sync.ensure_current(1)
    assert engine.tensors["model.norm.weight"].tolist() == [3.0] * 32


def test_an_engine_that_shares_the_policy_is_sent_nothing():
    engine = Engine(shares_policy=True)
    assert WeightSync(engine, tiny.model, ALONE).ensure_current(0) == {}
    assert not engine.updates


def test_weights_that_could_not_be_sent_are_sent_again():
    engine, model = Engine(fails=RuntimeError("disk full")), tiny.model()
    sync = WeightSync(engine, lambda: model, ALONE)
    with pytest.raises(RuntimeError, match="disk full"):
        sync.ensure_current(0)
    engine.fails = None
    assert sync.ensure_current(0)


@pytest.mark.parametrize(
    ("lora_sync", "takes_adapters", "changes", "alone"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"use_dora": True}, False),
        ("merged", True, {}, False),
        ("adapter", True, {}, True),
    ],
)
def test_an_adapter_is_sent_alone_where_possible(lora_sync, takes_adapters, changes, alone):
    engine, model = Engine(takes_adapters=takes_adapters), adapted(**changes)
    WeightSync(engine, lambda: model, ALONE, lora_sync=lora_sync).ensure_current(0)
    assert (engine.updates[0].adapter is not None) is alone


@pytest.mark.parametrize(
    ("traits", "changes", "why"),
    [({}, {}, "the engine takes none"), ({"takes_adapters": True}, {"use_dora": True}, "it is a DoRA")],
)
def test_an_adapter_that_cannot_be_sent_alone_is_an_error(traits, changes, why):
    model = adapted(**changes)
    with pytest.raises(ValueError, match=f"vllm_lora_sync='adapter'.*{why}"):
        WeightSync(Engine(**traits), lambda: model, ALONE, lora_sync="adapter").ensure_current(0)


class WithoutBase(Shared):
    """Its servers lack the model under the first adapter they are sent."""

    def load_weights(self, update):
        if not self.updates:
            self.base = list(update.base.checked())
        super().load_weights(update)


def test_the_model_under_an_adapter_counts_as_sent_where_it_was():
    adapter = sum(p.numel() * 4 for name, p in adapted().named_parameters() if "lora_" in name)
    model = sum(p.numel() * 4 for p in tiny.model().parameters())
    world, engines = Processes(), (WithoutBase(takes_adapters=True), WithoutBase(takes_adapters=True))
    syncs = [world.sync(rank, engines[rank], adapted()) for rank in (0, 1)]
    first, second = world.run(syncs, 0), world.run(syncs, 1)
    assert [stats["sync/bytes"].total for stats in first] == [adapter + model] * 2
    assert [stats["sync/bytes"].total for stats in second] == [adapter] * 2


# ---- several processes, as threads -----------------------------------------------------------------------------------


class Processes:
    """Two of them; a word that nobody takes or sends fails the test."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=600)
        self._slots = [None, None]

    def run(self, syncs, version):
        def one(rank):
            try:
                return syncs[rank].ensure_current(version)
            except Exception as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1), timeout=60))

    def sync(self, rank, engine, model):
        return WeightSync(engine, lambda: model, Meeting(rank, self._barrier, self._slots))


class Meeting:
    """What `Collectives` does, for threads."""

    size = 2

    def __init__(self, rank, barrier, slots):
        self.rank, self._barrier, self._slots = rank, barrier, slots

    def gather(self, mine, what):
        self._slots[self.rank] = mine, what
        self._barrier.wait()
        words = list(self._slots)
        self._barrier.wait()
        assert len({what for _, what in words}) == 1, words
        return [mine for mine, _ in words]

    def meet(self, what):
        self.gather(None, what)


ALONE = Collectives(rank=0, size=1, seconds=60.0, step=lambda: 0)


def test_one_process_sends_for_all_and_the_others_learn_of_it():
    world, engines = Processes(), (Shared(), Shared())
    results = world.run([world.sync(rank, engines[rank], tiny.model()) for rank in (0, 1)], 4)
    assert all("sync/seconds" in stats for stats in results)
    assert [len(engine.updates) for engine in engines] == [1, 0]
    assert engines[1].adopted == (4, ["http://a"])


def test_weights_change_while_no_process_begins_requests():
    held = []

    class Looks(Shared):
        def load_weights(self, update):
            held.extend(engine.holds for engine in engines)

    world = Processes()
    engines = Looks(), Shared()
    world.run([world.sync(rank, engines[rank], tiny.model()) for rank in (0, 1)], 4)
    assert held == [1, 1]
    assert [engine.holds for engine in engines] == [0, 0]


def test_what_the_sender_could_not_do_is_raised_in_every_process():
    world, engines = Processes(), (Shared(fails=RuntimeError("http://a: out of memory")), Shared())
    errors = world.run([world.sync(rank, engines[rank], tiny.model()) for rank in (0, 1)], 4)
    assert [type(error) for error in errors] == [RuntimeError, RuntimeError]
    assert "process 0 could not send the weights" in str(errors[1]) and "http://a: out of memory" in str(errors[1])


def test_a_process_that_cannot_load_its_own_engine_stops_all():
    world, engines = Processes(), (Engine(), Engine(fails=RuntimeError("out of memory")))
    errors = world.run([world.sync(rank, engines[rank], tiny.model()) for rank in (0, 1)], 4)
    assert str(errors[0]) == "process 1 could not load weights: out of memory"
    assert str(errors[1]) == "out of memory"


class Sharded(torch.nn.Parameter):
    """A parameter that only all processes together can gather."""

    meets = None
    device_mesh = SimpleNamespace(device_type="cpu")

    def detach(self):
        return self

    def full_tensor(self):
        self.meets.wait()
        return self.data


def sharded_model(barrier):
    model = tiny.model()
    parameter = Sharded(model.model.norm.weight.data)
    parameter.meets = barrier
    model.model.norm.weight = parameter
    return model


@pytest.mark.parametrize("passes", [1, 3])
def test_every_process_takes_part_in_sharded_gathers(passes):
    world, engines, barrier = Processes(), (Shared(passes=passes), Shared()), threading.Barrier(2, timeout=600)
    results = world.run([world.sync(rank, engines[rank], sharded_model(barrier)) for rank in (0, 1)], 0)
    assert all("sync/seconds" in stats for stats in results), results
    assert barrier.n_waiting == 0 and not barrier.broken


def test_a_cancelled_gather_ends_in_every_process():
    class GivesUp(Shared):
        def load_weights(self, update):
            one = update.tensors()
            next(one)
            one.close()
            raise RuntimeError("server gone")

    world, barrier = Processes(), threading.Barrier(2, timeout=600)
    engines = GivesUp(), Shared()
    errors = world.run([world.sync(rank, engines[rank], sharded_model(barrier)) for rank in (0, 1)], 0)
    assert str(errors[0]) == "server gone" and "server gone" in str(errors[1])
    assert not barrier.broken
