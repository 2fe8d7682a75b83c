"""Weights on their way to vLLM servers, over real HTTP, gloo groups and files; what arrives is compared."""

import asyncio
import contextlib
import copy
import dataclasses
import time

import pytest
import torch

from covey.core.engine import TensorSpec, WeightUpdate
from covey.engines.servers.errors import BadAnswer, DeadlineExceeded, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ServerFacts
from covey.engines.servers.weights.channels import Group
from covey.policy.weights import weight_update
from tests.support import tiny
from tests.support.servers import fake_vllm
from tests.support.servers.fake_vllm import FakeVllm
from tests.support.servers.fake_vllm_weights import FakeVllmWeights
from tests.support.servers.senders import vllm_sender

SMALL = 4000
"""Bytes of a bucket: the tiny model takes about twenty."""


def update(model, version=1, adapter=None, base=None):
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    specs = tuple(TensorSpec(name, tuple(p.shape), p.dtype) for name, p in named)
    return WeightUpdate(version, specs, lambda: iter(named), adapter, base)


def adapter(version=1, rank=4, of="/models/tiny", base=None):
    torch.manual_seed(version)
    named = [("q_proj.lora_A.weight", torch.randn(rank, 8)), ("q_proj.lora_B.weight", torch.randn(8, rank))]
    specs = tuple(TensorSpec(name, tuple(p.shape), p.dtype) for name, p in named)
    config = {"peft_type": "LORA", "base_model_name_or_path": of}
    return WeightUpdate(version, specs, lambda: iter(named), config, base)


@pytest.fixture
def servers(tmp_path):
    """Makes fake servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(kind=FakeVllmWeights, **options):
            made = kind(tiny.model(), **options)
            made.home = tmp_path
            return stack.enter_context(made)

        yield make


@pytest.fixture
def weights():
    """Makes transports that are closed with the test."""
    made = []

    def make(way="auto", **options):
        made.append(vllm_sender(way, **{"bucket_bytes": SMALL, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def send(weights, servers, *updates, deadline=20.0):
    async def all_of_them():
        reached = [ServerClient(server.url) for server in servers]
        for one in updates:
            await weights.send(reached, one, deadline)

    asyncio.run(all_of_them())


def assert_holds(server, model):
    for (name, got), (_, wanted) in zip(server.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(got, wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("way", ["group", "disk", "auto"])
def test_every_server_gets_every_tensor_and_says_so(servers, weights, way):
    two, model, sender = [servers(), servers()], tiny.model(seed=7), weights(way)
    send(sender, two, update(tiny.model(seed=6), 4), update(model, 5))
    for server in two:
        assert_holds(server, model)
        assert server.stamp == sender.stamp(5)


def test_a_group_is_met_once_and_used_for_every_update(servers, weights):
    server = servers()
    send(weights("group"), [server], *(update(tiny.model(seed=s), s) for s in (1, 2, 3)))
    assert len(server.asked("/init_weight_transfer_engine")) == 1
    assert len(server.asked("/update_weights")) > 30
    assert not server.asked("/update_weight_version")  # a server that is restarted afterwards has no stamp


def test_a_restarted_server_joins_a_new_group(servers, weights):
    server, one, model = servers(), weights("group"), tiny.model(seed=3)
    send(one, [server], update(tiny.model(seed=2), 1))
    server.kill()
    server.start()
    send(one, [server], update(model, 2))
    assert_holds(server, model)


def test_nothing_is_left_on_the_disk(servers, weights, tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    one = weights("disk", folder=str(folder))
    send(one, [servers()], update(tiny.model(seed=7)))
    assert not [path for path in folder.rglob("*") if path.is_file()]
    one.close()
    assert not list(folder.iterdir())


def test_a_plain_server_takes_weights_as_files(servers, weights):
    server, model = servers(kind=FakeVllm), tiny.model(seed=7)
    send(weights(), [server], update(model))
    assert_holds(server, model)


@pytest.mark.parametrize(
    ("way", "options", "why"),
    [
        ("group", {"kind": FakeVllm}, r"by group:.*None"),
        ("group", {"backend": "nccl"}, r"by group:.*'nccl'"),
        ("disk", {"elsewhere": True}, r"by disk: it is on another machine.*vllm_weight_folder"),
    ],
)
def test_an_unsupported_method_is_refused_before_sending(servers, weights, way, options, why):
    server = servers(**options)
    with pytest.raises(ServerRefused, match=why):
        send(weights(way), [server], update(tiny.model(seed=7)))
    assert server.stamp == "default"


def test_a_failing_server_does_not_stop_the_others_update(servers, weights):
    bad, good, model, sender = servers(), servers(), tiny.model(seed=7), weights("group")
    bad.misbehave("/update_weights", fake_vllm.status(500, "out of memory"))
    with pytest.raises(ServerError, match=rf"{bad.url}.*version 3 \(bucket 1 of \d+: model.*out of memory"):
        send(sender, [bad, good], update(model, 3))
    assert_holds(good, model)
    assert good.stamp == sender.stamp(3) and bad.stamp == "default"


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights"])
def test_after_a_failure_the_next_attempt_sends_everything(servers, weights, path):
    server, one, model = servers(), weights("group"), tiny.model(seed=7)
    send(one, [server], update(tiny.model(seed=6), 1))
    if path.startswith("/init"):
        server.kill()
        server.start()
    server.misbehave(path, fake_vllm.status(500, "no memory for it"))
    with pytest.raises(ServerError, match="no memory for it"):
        send(one, [server], update(model, 2))
    send(one, [server], update(model, 2))
    assert_holds(server, model)


def test_changed_bytes_are_refused_by_tensor_name(servers, weights, monkeypatch):
    server, one, model = servers(), weights("group"), tiny.model(seed=7)
    true_send, sent = Group.send, []

    def spoil(self, data, seconds):
        sent.append(data)
        true_send(self, data ^ 1 if len(sent) == 4 else data, seconds)

    monkeypatch.setattr(Group, "send", spoil)
    with pytest.raises(ServerError, match=r"bucket 4 of .*'model\.layers.*changed on its way"):
        send(one, [server], update(model))
    send(one, [server], update(model))
    assert_holds(server, model)


def test_a_death_during_transfer_is_noticed_before_the_deadline(servers, weights, monkeypatch):
    server, true_send, sent = servers(), Group.send, []

    def die(self, data, seconds):
        sent.append(data)
        if len(sent) == 4:
            server.kill()
        true_send(self, data, seconds)

    monkeypatch.setattr(Group, "send", die)
    begun = time.monotonic()
    with pytest.raises(ServerError, match=r"version 1 \(bucket 4 of"):
        send(weights("group"), [server], update(tiny.model(seed=7)), deadline=600.0)
    assert time.monotonic() - begun < 300.0


@pytest.mark.slow
def test_a_server_that_never_answers_ends_at_the_deadline(servers, weights):
    server = servers()
    server.misbehave("/update_weights", fake_vllm.hang())
    with pytest.raises((DeadlineExceeded, ServerError), match=r"version 1 \(bucket 1 of"):
        send(weights("group"), [server], update(tiny.model(seed=7)), deadline=3.0)


def test_after_a_failed_gather_servers_take_the_next_update(servers, weights):
    server, one, model = servers(), weights("group"), tiny.model(seed=7)
    good = update(model)

    def breaks_off():
        for number, pair in enumerate(good.tensors()):
            if number == 5:
                raise RuntimeError("gathering failed")
            yield pair

    with pytest.raises(RuntimeError, match="gathering failed"):
        send(one, [server], WeightUpdate(1, good.specs, breaks_off))
    send(one, [server], good)
    assert_holds(server, model)


def test_what_another_trainer_left_open_is_ended_first(servers, weights):
    server, model = servers(), tiny.model(seed=7)
    server.misbehave("/finish_weight_update", fake_vllm.status(500, "the trainer was killed here"))
    with pytest.raises(ServerError):
        send(weights("group"), [server], update(tiny.model(seed=6), 1))
    assert server.active
    server.misbehave("/finish_weight_update", fake_vllm.drop())
    send(weights("group"), [server], update(model, 2))
    assert_holds(server, model)


def test_the_reported_version_must_be_the_one_sent(servers, weights):
    server = servers()
    server.misbehave("/weight_info", fake_vllm.edited(lambda answer: answer.update(weight_version="77")))
    with pytest.raises(BadAnswer, match=r"'77', not 'covey-[0-9a-f]{8}-1'.*Does another trainer"):
        send(weights("group"), [server], update(tiny.model(seed=7)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_adapters_get_a_name_each_and_old_ones_go(servers, weights, elsewhere):
    server, one = servers(max_lora_rank=8, elsewhere=elsewhere), weights()
    send(one, [server], *(adapter(version) for version in range(1, 7)))
    facts = ServerFacts(model="tiny")
    names = [one.model_name(facts, version) for version in (4, 5, 6)]
    assert list(server.adapters) == names and len(set(names)) == 3
    for version, name in zip((4, 5, 6), names, strict=True):
        wanted = dict(adapter(version).tensors())
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in server.adapters[name].items())
    assert one.model_name(facts, 1) == "tiny"  # gone
    written = {path.name for path in server.home.glob("*-*")}  # by the server: named by its start too
    assert written == ({f"{name}-{server.born}" for name in names} if elsewhere else set())


def test_other_processes_learn_the_names(servers, weights):
    one, other = weights(), weights()
    send(one, [servers(max_lora_rank=8)], adapter(3))
    other.import_state(one.export_state())
    facts = ServerFacts(model="tiny")
    assert other.model_name(facts, 3) == one.model_name(facts, 3) != "tiny"


@pytest.mark.parametrize(("of", "sends"), [("/models/tiny", False), ("/models/other", True)])
def test_a_base_is_sent_once_to_servers_that_have_another(servers, weights, of, sends):
    server, one, base = servers(max_lora_rank=8), weights(), tiny.model(seed=7)
    updates = [adapter(version, of=of, base=update(base, version)) for version in (1, 2)]
    send(one, [server], *updates)
    assert len(server.asked("/start_weight_update")) == int(sends)
    if sends:
        assert_holds(server, base)


def test_a_base_that_did_not_arrive_is_sent_again(servers, weights):
    server, one, base = servers(max_lora_rank=8), weights(), tiny.model(seed=7)
    lora = adapter(1, of="/models/other", base=update(base, 1))
    server.misbehave("/finish_weight_update", fake_vllm.status(500, "out of memory"))
    with pytest.raises(ServerError, match="out of memory"):
        send(one, [server], lora)
    send(one, [server], lora)
    assert_holds(server, base)
    assert server.adapters


def test_a_server_used_by_another_run_gets_the_base_again(servers, weights):
    server, base = servers(max_lora_rank=8), tiny.model()
    send(weights(), [server], update(tiny.model(seed=7), 12))
    send(weights(), [server], adapter(1, base=update(base, 1)))
    assert_holds(server, base)


def test_another_adapter_of_one_version_gets_another_name(servers, weights):
    server, one = servers(max_lora_rank=8), weights()
    changed = dataclasses.replace(adapter(2), version=1)  # of the same version as what the server has already
    send(one, [server], adapter(1), changed)
    name = one.model_name(ServerFacts(model="tiny"), 1)
    wanted = dict(changed.tensors())
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in server.adapters[name].items())


@pytest.mark.parametrize(
    ("options", "rank", "why"),
    [({}, 4, "started without adapters.*--enable-lora"), ({"max_lora_rank": 8}, 16, "rank 16.*'merged'")],
)
def test_an_unsuitable_adapter_is_refused_with_advice(servers, weights, options, rank, why):
    with pytest.raises(ServerError, match=why):
        send(weights(), [servers(**options)], adapter(1, rank=rank))


def test_a_restarted_plain_server_is_sent_the_adapter_again(servers, weights):
    server, one, lora = servers(max_lora_rank=8, worker=False), weights(), adapter(1)
    send(one, [server], lora)
    name = one.model_name(ServerFacts(model="tiny"), 1)
    server.kill()
    server.start()  # nothing tells this start from the one before, and the engine left it out meanwhile
    one.invalidate(ServerClient(server.url))
    send(one, [server], lora)
    assert list(server.adapters) == [name]
    one.invalidate(ServerClient(server.url))  # it was left out and has the adapter nevertheless
    send(one, [server], lora)
    assert list(server.adapters) == [name]


def test_unknown_ways_are_refused():
    with pytest.raises(ValueError, match="'telepathy'; choose one of: auto, group, disk"):
        vllm_sender("telepathy")


# ---- differences -----------------------------------------------------------------------------------------------------


def steps(count, seed=0):
    """A model in bfloat16 as it is after 0, 1, ... small steps: updates that read it late, and what they must bring."""
    model = tiny.model(seed=seed).bfloat16()
    for version in range(count):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[version::300] += 1.0
        yield update(model, version), copy.deepcopy(model).float()


def sends(one, servers, what, deadline=20.0):
    """What is sent to these servers."""
    return asyncio.run(one.send([ServerClient(server.url) for server in servers], what, deadline))


def whole_bytes(model):
    return sum(-(-2 * p.numel() // 16) * 16 for p in model.parameters())


@pytest.mark.slow
def test_differences_bring_every_bit_in_few_bytes(servers, weights):
    server, one = servers(), weights("group", differences=True)
    for version, (sent, model) in enumerate(steps(6)):
        found = sends(one, [server], sent)
        assert_holds(server, model)
        assert server.stamp == one.stamp(version)
        assert found.servers == 1 and found.whole == int(version == 0)
        assert found.nbytes == whole_bytes(model) if version == 0 else 0 < found.nbytes < whole_bytes(model) / 20
        assert found.changed is None if version == 0 else 1 / 400 < found.changed < 1 / 50


def test_without_the_option_everything_is_sent_and_nothing_kept(servers, weights):
    server, one = servers(), weights("group")
    for sent, model in steps(2):
        assert sends(one, [server], sent) is None
        assert_holds(server, model)
    assert server.receiver.held is None and not one._held.tensors


@pytest.mark.slow
def test_a_server_that_joins_gets_everything_and_the_others_what_changed(servers, weights):
    first, second, one = servers(), servers(), weights("group", differences=True)
    for version, (sent, model) in enumerate(steps(6)):
        pool = [first, second] if version >= 3 else [first]
        found = sends(one, pool, sent)
        assert (found.servers, found.whole) == (len(pool), int(version in (0, 3)))
        for server in pool:
            assert_holds(server, model)


def test_a_late_server_gets_the_update_and_not_the_policy_of_the_moment(servers, weights):
    """The policy is a step further by then; the two servers hold the same bits nevertheless."""
    first, second, one = servers(), servers(), weights("group", differences=True)
    (sent, _), (following, _) = steps(2)  # both read the same model, when they are sent
    sends(one, [first], sent)
    with torch.no_grad():
        for _, tensor in sent.tensors():
            tensor.add_(1.0)
    sends(one, [second], sent)
    for (name, a), (_, b) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    found = sends(one, [first, second], following)
    assert found.whole == 0
    wanted = dict(following.tensors())
    for server in (first, second):
        assert all(torch.equal(p, wanted[name].float()) for name, p in server.model.named_parameters())


@pytest.mark.slow
def test_a_server_with_another_bit_is_sent_everything_at_once(servers, weights):
    good, bad, one = servers(), servers(), weights("group", differences=True)
    for version, (sent, model) in enumerate(steps(4)):
        if version == 2:
            bad.receiver.held.tensors["model.norm.weight"].view(torch.int16)[5] ^= 1
        found = sends(one, [good, bad], sent)
        assert (found.servers, found.whole) == (2, {0: 2, 2: 1}.get(version, 0))
        for server in (good, bad):
            assert_holds(server, model)


def test_the_only_server_with_another_bit_is_sent_everything_at_once(servers, weights):
    server, one = servers(), weights("group", differences=True)
    for version, (sent, model) in enumerate(steps(3)):
        if version == 1:
            server.receiver.held.label = "of another run"
        assert sends(one, [server], sent).whole == int(version < 2)
        assert_holds(server, model)


def test_a_restarted_server_is_sent_everything(servers, weights):
    server, one = servers(), weights("group", differences=True)
    for version, (sent, model) in enumerate(steps(4)):
        if version == 2:
            server.kill()
            server.start()
        assert sends(one, [server], sent).whole == int(version in (0, 2))
        assert_holds(server, model)


def test_a_new_trainer_sends_everything_first(servers, weights):
    server, trainers = servers(), [weights("group", differences=True) for _ in range(2)]
    for version, (sent, model) in enumerate(steps(4)):
        assert sends(trainers[version // 2], [server], sent).whole == int(version in (0, 2))
        assert_holds(server, model)


def test_after_a_death_in_the_middle_everything_is_sent(servers, weights, monkeypatch):
    server, one, true_send, sent_buckets = servers(), weights("group", differences=True), Group.send, []

    def die(self, data, seconds):
        sent_buckets.append(data)
        if len(sent_buckets) == count + 3:  # the third bucket of the second update
            server.kill()
        true_send(self, data, seconds)

    monkeypatch.setattr(Group, "send", die)
    updates, count = steps(3), 10**9
    sends(one, [server], next(updates)[0])
    count = len(sent_buckets)
    with pytest.raises(ServerError):
        sends(one, [server], next(updates)[0])
    server.start()
    sent, model = next(updates)
    assert sends(one, [server], sent).whole == 1
    assert_holds(server, model)


def test_after_a_gather_that_failed_everything_is_sent(servers, weights):
    server, one = servers(), weights("group", differences=True)
    (sent, _), (following, model) = steps(2)
    sends(one, [server], sent)

    def breaks_off():
        for number, pair in enumerate(following.tensors()):
            if number == 5:
                raise RuntimeError("gathering failed")
            yield pair

    with pytest.raises(RuntimeError, match="gathering failed"):
        sends(one, [server], dataclasses.replace(following, tensors=breaks_off))
    assert sends(one, [server], following).whole == 1
    assert_holds(server, model)


@pytest.mark.slow
def test_older_servers_are_sent_everything_with_a_warning(servers, weights):
    old, new, one = servers(differences=False), servers(), weights("group", differences=True)
    with pytest.warns(UserWarning, match=rf"not sent as differences: {old.url}"):
        for version, (sent, model) in enumerate(steps(3)):
            assert sends(one, [old, new], sent).whole == (2 if version == 0 else 1)
            for server in (old, new):
                assert_holds(server, model)


@pytest.mark.parametrize(("way", "kind"), [("disk", FakeVllmWeights), ("auto", FakeVllm)])
def test_files_are_whole_with_a_warning(servers, weights, way, kind):
    server, one, model = servers(kind=kind), weights(way, differences=True), tiny.model(seed=7)
    with pytest.warns(UserWarning, match="not sent as differences.*files"):
        assert sends(one, [server], update(model)) is None
    assert_holds(server, model)


def test_another_architecture_is_sent_whole(servers, weights):
    """Tensors of another number format are no numbers that changed."""
    server, one, model = servers(), weights("group", differences=True), tiny.model(seed=7)
    sends(one, [server], update(tiny.model(seed=6).bfloat16(), 1))
    assert sends(one, [server], update(model, 2)).whole == 1
    assert_holds(server, model)


def test_a_base_under_an_adapter_is_not_kept(servers, weights):
    server, one = servers(max_lora_rank=8), weights("group", differences=True)
    base = tiny.model(seed=7)
    assert sends(one, [server], adapter(1, of="/models/other", base=update(base, 1))) is None
    assert_holds(server, base)
    assert server.receiver.held is None and not one._held.tensors


def master_weights(version):
    """In float32, of which most steps are below the rounding of bfloat16."""
    model = tiny.model(seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(version * 1e-5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def merged_adapter(version):
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.model(seed=0), lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1.0 + 1e-4 * version)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("policy", [master_weights, merged_adapter])
def test_the_servers_bits_are_those_of_the_format_that_is_sent(servers, weights, policy):
    """Compared with the update itself, which is the conversion of all weights, and with how few bytes that takes."""
    server, one = servers(), weights("group", differences=True)
    for version in range(4):
        sent = weight_update(policy(version), version, dtype=torch.bfloat16)
        found = sends(one, [server], sent)
        held = dict(server.model.named_parameters())
        assert all(torch.equal(held[name], tensor.float()) for name, tensor in sent.tensors())
        assert found.whole == int(version == 0) and (version == 0 or 0 < found.changed < 0.2)


def test_the_trainers_copy_has_the_format_that_is_sent(servers, weights):
    server, one = servers(), weights("group", differences=True)
    sent = weight_update(tiny.model(), 1, dtype=torch.bfloat16)
    sends(one, [server], sent)
    assert sum(tensor.nbytes for tensor in one._held.tensors.values()) == sent.nbytes
