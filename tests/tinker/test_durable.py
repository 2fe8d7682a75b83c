"""A server that is killed and started again continues what it had accepted: nothing is lost, nothing runs twice."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from covey.tinker import service as service_module
from covey.tinker.errors import Refusal
from covey.tinker.journal import FOLDER
from tests.support import tinkering
from tests.support.tinkering import Client, datum, tokens

DATA = [datum(tokens(size, size)) for size in (9, 17, 12)]
PROMPT = tokens(7, 3)
WRONG = [datum([5, 6, 200])]  # no such token


def requests(client, model):
    """The requests of a program in their order, each sent by a call, again with the same numbers."""
    rate, sampler = {"learning_rate": 0.05}, f"{client.session}:sample:0"
    save = {"model_id": model, "seq_id": 7, "path": "middle"}
    return [
        lambda: client.forward_backward(model, DATA[:1], number=1),
        lambda: client.forward_backward(model, DATA[1:], number=2),
        lambda: client.step(model, number=3, **rate),
        lambda: client.freeze(model, 4, 0),
        lambda: client.forward_backward(model, DATA[:2], number=5),
        lambda: client.step(model, number=6, **rate),
        lambda: client.service.save_weights(save),
        lambda: client.sample(sampler, PROMPT, 0, 2),
        lambda: client.forward_backward(model, WRONG, number=8),
        lambda: client.step(model, number=9, **rate),  # not taken, since 8 failed
        lambda: client.forward_backward(model, DATA, number=10, forward_only=True),
        lambda: client.forward_backward(model, DATA[2:], number=11),
        lambda: client.step(model, number=12, **rate),
        lambda: client.service.save_weights({**save, "seq_id": 13, "path": "end"}),
    ]


async def answers(client, model, calls):
    """Results of requests, without the names that differ between sessions."""
    found = []
    for call in calls:
        result = await client.result(call())
        found.append(repr(result).replace(client.session, "session"))
    return found


def adapter(folder, name):
    (file,) = folder.glob(f"*/weights/{name}/adapter_model.safetensors")
    return load_file(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Results and adapters of the program with a server that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")

    async def program(service, client):
        model = await client.create(seed=1)
        return await answers(client, model, requests(client, model))

    return tinkering.run(folder, program), adapter(folder, "middle"), adapter(folder, "end")


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("sent", range(1, 15))
def test_a_server_that_is_killed_after_any_request_continues(tmp_path, whole, sent, every):
    answered = sent - sent % 3  # the others are accepted alone

    async def before(service, client):
        model = await client.create(seed=1)
        calls = requests(client, model)
        known = await answers(client, model, calls[:answered])
        for call in calls[answered:sent]:
            if call is not calls[7] or sent > 8:  # its sampler may not be there yet
                call()
        shutil.copytree(tmp_path / "first", tmp_path / "second")  # the server is killed at this moment
        return client.session, model, known

    session, model, known = tinkering.run(tmp_path / "first", before, durable=every)

    async def after(service, client):
        again = Client(service, session)
        return await answers(again, model, requests(again, model))

    results, middle, end = whole
    assert known == results[:answered]
    assert tinkering.run(tmp_path / "second", after, durable=every) == results
    for name, expected in (("middle", middle), ("end", end)):
        found = adapter(tmp_path / "second", name)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_killed_server_continues_the_making_of_a_client(tmp_path):
    async def before(service, client):
        asked = {"session_id": client.session, "model_seq_id": 0, "base_model": tinkering.NAME}
        service.create_model(asked)
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        return client.session, asked

    session, asked = tinkering.run(tmp_path / "first", before, durable=1)

    async def after(service, client):
        again = Client(service, session)
        made = await again.result(service.create_model(asked))
        return made["model_id"], await again.result(again.forward_backward(made["model_id"], DATA, number=1))

    model, scored = tinkering.run(tmp_path / "second", after, durable=1)
    assert model == f"{session}:train:0" and isinstance(scored, bytes)


@pytest.mark.slow
def test_samplers_of_states_and_of_clients_are_there_again(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "KEPT_SAMPLERS", 2)
    params = {"seed": 5}

    async def before(service, client):
        model = await client.create()
        samplers = []
        for _ in range(3):
            await client.result(client.forward_backward(model, DATA))
            await client.result(client.step(model, learning_rate=0.1))
            samplers.append(await client.sampler(model))
        saved = (await client.save(model, "a", "save_weights_for_sampler"))["path"]
        samplers += [await client.sampling(saved), await client.sampling()]
        found = [await client.result(client.sample(one, PROMPT, 0, params=params)) for one in samplers[1:]]
        service.delete_checkpoint(model, "sampler_weights/a")  # its samplers do not need it
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        return samplers, found, client.session

    samplers, found, session = tinkering.run(tmp_path / "first", before, durable=1)
    assert len(list((tmp_path / "second" / FOLDER).glob("sampler-*"))) == 3

    async def after(service, client):
        again = Client(service, session)
        with pytest.raises(Refusal, match="newest 2"):
            again.sample(samplers[0], PROMPT)
        return [await again.result(again.sample(one, PROMPT, 1, params=params)) for one in samplers[1:]]

    assert tinkering.run(tmp_path / "second", after, durable=1) == found


def test_requests_that_waited_in_vain_stay_failed(tmp_path):
    async def before(service, client):
        model = await client.create()
        failed = await client.result(client.forward_backward(model, DATA, number=2))
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        return model, failed, client.session

    model, failed, session = tinkering.run(tmp_path / "first", before, durable=1, patience=0.1)

    async def after(service, client):
        again = Client(service, session)
        told = await again.result(again.forward_backward(model, DATA, number=2))
        return told, await again.result(again.step(model, number=3))

    told, step = tinkering.run(tmp_path / "second", after, durable=1)
    assert told == failed and "operation 1 did not come" in step["error"]


def test_an_ended_session_leaves_nothing_in_the_journal(tmp_path):
    async def program(service, client):
        model = await client.create()
        await client.result(client.forward_backward(model, DATA))
        await client.result(client.step(model))
        await client.sampler(model)
        await service.finish_session(client.session)
        return service.journal.past()

    past = tinkering.run(tmp_path, program, durable=1)
    assert (past.clients, past.samplers, past.requests) == ([], [], []) and len(past.sessions) == 0
    assert not list((tmp_path / FOLDER).glob("*.safetensors"))


def test_results_that_were_fetched_long_ago_leave_the_journal(tmp_path, monkeypatch):
    monkeypatch.setattr("covey.tinker.state.KEPT", 0.0)

    async def program(service, client):
        model = await client.create()
        await client.result(client.forward_backward(model, DATA))
        await client.result(client.step(model))
        await client.result(client.forward_backward(model, DATA))
        sampler = await client.sampling()
        for number in range(3):
            await client.result(client.sample(sampler, PROMPT, number))
        return [(entry.number, entry.dropped) for entry in service.journal.past().requests]

    # the forward_backward that came after the last weights is needed to run it again
    assert tinkering.run(tmp_path, program, durable=1) == [(3, True), (2, False)]


@pytest.mark.slow
def test_a_server_that_was_stopped_continues_too(tmp_path):
    said = []

    async def before(service, client):
        model = await client.create(seed=1)
        found = await answers(client, model, requests(client, model)[:3])
        await service.stop()
        return client.session, model, found

    session, model, found = tinkering.run(tmp_path, before, durable=1, say=said.append)
    assert len(said) == 1 and f"tinker://{model}/weights/unsaved-000001" in said[0]

    async def after(service, client):
        again = Client(service, session)
        return await answers(again, model, requests(again, model))

    assert tinkering.run(tmp_path, after, durable=1)[:3] == found


@pytest.mark.parametrize("changed", [{"seed": 7}, {"substitute": {"ppo": "cispo"}}])
def test_sessions_of_another_server_are_refused(tmp_path, changed):
    async def program(service, client):
        return None

    async def more(service, client):
        await client.create()

    tinkering.run(tmp_path, more, durable=1)
    with pytest.raises(Refusal, match=next(iter(changed))):
        tinkering.run(tmp_path, program, durable=1, **changed)


def test_weights_that_cannot_be_read_are_named(tmp_path):
    async def program(service, client):
        await client.create()

    tinkering.run(tmp_path, program, durable=1)
    (file,) = (tmp_path / FOLDER).glob("client-*")
    file.write_bytes(b"")
    with pytest.raises(Refusal, match=file.name):
        tinkering.run(tmp_path, program, durable=1)


def test_what_a_save_has_done_it_does_not_do_again(tmp_path):
    async def program(service, client):
        model = await client.create()
        learner, run = service.clients[model].learner, service.clients[model].run
        again = [service.store.save(run, "weights", "a", learner, operation="1") for _ in range(2)]
        with pytest.raises(Refusal, match="exists"):
            service.store.save(run, "weights", "a", learner, operation="2")
        return again

    one, other = tinkering.run(tmp_path, program)
    assert one == other


def test_two_programs_with_one_session_are_told_apart(tmp_path):
    async def program(service, client):
        model, sampler = await client.create(), await client.sampling()
        other = Client(service, client.session)
        first = client.forward_backward(model, DATA[:1], number=1)
        drawn = client.sample(sampler, PROMPT, 0)
        for send in (
            lambda: other.forward_backward(model, DATA[1:], number=1),
            lambda: other.step(model, number=1),
            lambda: other.sample(sampler, PROMPT[:-1], 0),
        ):
            with pytest.raises(Refusal, match="two programs"):
                send()
        with pytest.raises(Refusal, match="two programs"):
            await other.create(rank=8)
        return await client.result(first), await client.result(drawn)

    assert all(isinstance(one, bytes) for one in tinkering.run(tmp_path, program))


def test_nothing_is_written_without_durable(tmp_path):
    async def program(service, client):
        await client.create()

    tinkering.run(tmp_path, program)
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(Refusal, match="durable=0"):
        tinkering.run(tmp_path, program, durable=0)


def test_a_journal_that_cannot_be_written_accepts_nothing_and_serves_what_it_has(tmp_path):
    """As on a full disk."""

    async def program(service, client):
        model = await client.create()
        asked = client.forward_backward(model, DATA, number=1)
        service.journal._db.execute("PRAGMA query_only = ON")
        scored = await client.result(asked)
        with pytest.raises(Refusal) as refused:
            client.step(model, number=2)
        service.journal._db.execute("PRAGMA query_only = OFF")
        return scored, refused.value.status, await client.result(client.step(model, number=2))

    scored, status, step = tinkering.run(tmp_path, program, durable=1)
    assert isinstance(scored, bytes) and status == 503 and step["metrics"]["grad_norm"] > 0
