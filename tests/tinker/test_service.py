"""What a client may do, in which order, and what it is told: the service with a tiny model, without HTTP."""

import asyncio
import itertools
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from covey.core.records import Completion, FinishReason
from covey.tinker import service as service_module
from covey.tinker import work
from covey.tinker.build import serve
from covey.tinker.checkpoints import CheckpointStore
from covey.tinker.errors import Refusal
from covey.tinker.requests import sample_asked
from covey.tinker.sampling import answered
from tests.support import forking, launching, tinkering, tiny
from tests.support.tinkering import datum, tokens
from tests.tinker.test_wire import parse

DATA = [datum(tokens(size, size)) for size in (9, 17, 12)]
PROMPT = tokens(7, 3)
GREEDY = {"temperature": 0.0}


def logprobs(answer):
    """Log-probs of the data in an answer to forward_backward."""
    (record,) = parse(answer)[2]
    tensor = parse(parse(parse(record)[2][0])[2][0])
    return np.split(np.frombuffer(tensor[1][0], "<f4"), np.frombuffer(tensor[2][0], "<i8")[1:-1] // 4)


def samples(answer):
    """(tokens, log-probs, True if it stopped) of each sample."""
    read = [parse(one) for one in parse(answer)[1]]
    return [
        (np.frombuffer(one[2][0], "<i4").tolist(), np.frombuffer(one[3][0], "<f4").tolist(), one[1] == [0])
        for one in read
    ]


def adapter_of(folder, path):
    run, kind, name = path.removeprefix("tinker://").split("/")
    return load_file(folder / run.replace(":", ".") / kind / name / "adapter_model.safetensors")


async def trained(client, model, steps=1, rate=0.01):
    for _ in range(steps):
        await client.result(client.forward_backward(model, DATA))
        await client.result(client.step(model, learning_rate=rate))


def test_training_lowers_the_loss(tmp_path):
    async def program(service, client):
        model = await client.create()
        losses = []
        for _ in range(5):
            scored = await client.result(client.forward_backward(model, DATA))
            losses.append(-sum(float(one.sum()) for one in logprobs(scored)))
            await client.result(client.step(model))
        return losses

    losses = tinkering.run(tmp_path, program)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


def test_operations_run_in_the_order_of_their_numbers_and_once(tmp_path):
    async def program(service, client):
        ordered, mixed = await client.create(seed=1), await client.create(seed=1)
        for data in (DATA[:1], DATA[1:2], DATA[2:]):
            client.forward_backward(ordered, data)
        await client.result(client.step(ordered))
        # the parts of one batch arrive in any order, the step before them, and each twice
        first = [client.forward_backward(mixed, DATA[i : i + 1], number=i + 1) for i in (1, 2)]
        step = client.step(mixed, number=4)
        assert client.forward_backward(mixed, DATA[1:2], number=2) == first[0]
        last = client.forward_backward(mixed, DATA[:1], number=1)
        assert client.forward_backward(mixed, DATA[:1], number=1) == last
        assert client.step(mixed, number=4) == step
        await client.result(step)
        assert client.step(mixed, number=4) == step  # after it was done, too
        client._numbers[mixed] = iter([5])
        return (await client.save(ordered, "a"))["path"], (await client.save(mixed, "a"))["path"]

    one, other = (adapter_of(tmp_path, path) for path in tinkering.run(tmp_path, program))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_missing_operation_is_waited_for_and_then_named(tmp_path):
    async def program(service, client):
        model = await client.create()
        late = client.forward_backward(model, DATA, number=2)
        failure = await client.result(late)
        following = await client.result(client.step(model, number=3))
        again = client.forward_backward(model, DATA, number=4)
        return failure, following, await client.result(again)

    failure, following, again = tinkering.run(tmp_path, program, patience=0.2)
    assert failure["category"] == "user" and "operation 1" in failure["error"]
    assert "forward_backward 2 failed" in following["error"]
    assert len(logprobs(again)) == 3


def test_a_step_behind_a_failed_request_is_not_taken(tmp_path):
    async def program(service, client):
        model, alone = await client.create(seed=1), await client.create(seed=1)
        client.forward_backward(model, DATA[:1])
        client.forward_backward(model, [datum([5, 6, 200])])  # no such token
        client.forward_backward(model, DATA[1:])
        failed = await client.result(client.step(model))
        for one in (model, alone):  # the gradients of all three were dropped
            await trained(client, one)
        return failed, (await client.save(model, "a"))["path"], (await client.save(alone, "a"))["path"]

    failed, *paths = tinkering.run(tmp_path, program)
    assert "forward_backward 2 failed" in failed["error"] and failed["category"] == "user"
    one, other = (adapter_of(tmp_path, path) for path in paths)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_hosted_loss_is_refused_with_the_flag_or_substituted(tmp_path):
    data = [datum(PROMPT, logprobs=[-1.0] * 6, advantages=[1.0] * 6)]

    async def program(service, client):
        return await client.result(client.forward_backward(await client.create(), data, "stable_reinforce"))

    refused = tinkering.run(tmp_path, program)
    assert refused["category"] == "user" and "loss_fn=importance_sampling" in refused["error"]
    answer = tinkering.run(tmp_path, program, substitute={"stable_reinforce": "importance_sampling"})
    names = {parse(one)[1][0] for one in parse(answer)[3]}
    assert b"substituted:unique" in names


@pytest.mark.slow
def test_a_sampler_never_sees_later_weights(tmp_path):
    async def program(service, client):
        model = await client.create()
        await trained(client, model)
        old = await client.sampler(model)
        before = samples(await client.result(client.sample(old, PROMPT, 0, 3)))
        await trained(client, model, 3, rate=0.1)
        new = await client.sampler(model)
        same = samples(await client.result(client.sample(old, PROMPT, 1, 3, params={"seed": 5})))
        await trained(client, model, 1, rate=0.1)
        again = samples(await client.result(client.sample(old, PROMPT, 2, 3, params={"seed": 5})))
        other = samples(await client.result(client.sample(new, PROMPT, 0, 3, params={"seed": 5})))
        return before, same, again, other

    before, same, again, other = tinkering.run(tmp_path, program)
    assert same == again and same != other and len(before) == 3


@pytest.mark.slow
def test_sampled_logprobs_are_those_of_prompts_and_of_training(tmp_path):
    async def program(service, client):
        model = await client.create(rank=8)
        await trained(client, model, 2)
        sampler = await client.sampler(model)
        ((sampled, told, _),) = samples(await client.result(client.sample(sampler, PROMPT, 0)))
        asked = client.sample(sampler, [*PROMPT, *sampled], 1, prompt_logprobs=True, params={"max_tokens": 1})
        prompt = np.frombuffer(parse(await client.result(asked))[2][0], "<f4")
        answer = await client.result(client.forward_backward(model, [datum([*PROMPT, *sampled])], forward_only=True))
        return told, prompt, logprobs(answer)[0]

    told, prompt, forward = tinkering.run(tmp_path, program)
    assert math.isnan(prompt[0])
    np.testing.assert_allclose(prompt[1:], forward, atol=1e-5)
    np.testing.assert_allclose(told, forward[len(PROMPT) - 1 :], atol=1e-5)


def test_a_temperature_scales_the_logprobs_of_samples(tmp_path):
    async def program(service, client):
        sampler = await client.sampling()
        asked = client.sample(sampler, PROMPT, params={"temperature": 0.7, "top_k": 3})
        return samples(await client.result(asked))[0]

    sampled, told, _ = tinkering.run(tmp_path, program)
    logits = tiny.model()(input_ids=torch.tensor([[*PROMPT, *sampled]])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]
    np.testing.assert_allclose(told, expected.detach(), atol=1e-5)


def test_what_ends_a_sample_stays_in_it(tmp_path):
    async def program(service, client):
        sampler = await client.sampling()
        ((free, _, _),) = samples(
            await client.result(client.sample(sampler, PROMPT, 0, params={"stop": [], "seed": 1}))
        )
        text = tiny.tokenizer().decode(free[2:4])
        found = []
        for number, stop in enumerate([[free[2]], text, [text, "never"]], 1):
            asked = client.sample(sampler, PROMPT, number, params={"stop": stop, "seed": 1})
            found += samples(await client.result(asked))
        return free, found

    free, (by_id, by_text, by_texts) = tinkering.run(tmp_path, program)
    assert len(free) == 6
    assert by_id[0] == free[: free.index(free[2]) + 1] and by_id[2]
    assert by_text[0] == by_texts[0] == free[:4] and by_text[2]


@pytest.mark.slow
def test_end_tokens_end_a_sample_unless_there_are_none(tmp_path):
    async def program(service, client):
        sampler, found = await client.sampling(), []
        for number, params in enumerate([{}, {"stop": "never"}, {"stop": []}]):
            asked = client.sample(sampler, PROMPT, number, 64, params={"max_tokens": 20, "seed": 3, **params})
            found.append(samples(await client.result(asked)))
        return found

    default, beside_text, none = tinkering.run(tmp_path, program)
    assert any(stopped for _, _, stopped in default) and default == beside_text
    assert all(len(one) == 20 and not stopped for one, _, stopped in none)
    for (one, _, _), (whole, _, _) in zip(default, none, strict=True):
        assert one == whole[: len(one)]


def test_requests_repeat_their_samples_on_another_server_and_seeds_differ(tmp_path):
    async def program(service, client):
        sampler = await client.sampling()
        asked = [client.sample(sampler, PROMPT, number, 2) for number in range(2)]
        assert client.sample(sampler, PROMPT, 0, 2) == asked[0] and len(asked[0]["sample_sequence_ids"]) == 2
        return [samples(await client.result(one)) for one in asked]

    first, second = (tinkering.run(tmp_path, program) for _ in range(2))
    assert first == second and first[0] != first[1] and first[0][0] != first[0][1]
    assert tinkering.run(tmp_path, program, seed=1) != first


@pytest.mark.slow
def test_clients_of_other_ranks_at_once_equal_each_alone(tmp_path):
    ranks = (4, 8, 32)

    async def one(client, rank):
        model = await client.create(rank=rank, seed=rank)
        await trained(client, model)
        sampler = await client.sampler(model)
        asked = client.sample(sampler, PROMPT, rank, 2, params={"seed": rank})
        found = samples(await client.result(asked))
        await trained(client, model)
        return found, (await client.save(model, "end"))["path"]

    async def together(service, client):
        clients = [tinkering.Client(service) for _ in ranks]
        return await asyncio.gather(*(one(*pair) for pair in zip(clients, ranks, strict=True)))

    at_once = tinkering.run(tmp_path / "together", together)
    for rank, (sampled, path) in zip(ranks, at_once, strict=True):
        alone, own = tinkering.run(tmp_path / "alone", lambda service, client, rank=rank: one(client, rank))
        assert [a[0] for a in sampled] == [a[0] for a in alone]
        mine, theirs = adapter_of(tmp_path / "together", path), adapter_of(tmp_path / "alone", own)
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], atol=1e-5, rtol=0)


def test_the_most_probable_and_given_tokens_of_a_prompt(tmp_path):
    targets = {"data": [5, -1, 6, 7], "shape": [2, 2], "dtype": "int64"}

    async def program(service, client):
        sampler = await client.sampling()
        options = {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "target_prompt_logprobs": targets}
        return parse(await client.result(client.sample(sampler, PROMPT[:3], **options, params={"max_tokens": 2})))

    answer = tinkering.run(tmp_path, program)
    (sample,) = (parse(one) for one in answer[1])
    sampled = np.frombuffer(sample[2][0], "<i4").tolist()
    logits = tiny.model()(input_ids=torch.tensor([[*PROMPT[:3], *sampled]])).logits[0].log_softmax(-1)
    top = parse(answer[3][0])
    ids = np.frombuffer(top[1][0], "<i4").reshape(3, 3)
    values = np.frombuffer(top[2][0], "<f4").reshape(3, 3)
    assert ids[0].tolist() == [0, 0, 0] and values[0].tolist() == [-99999.0] * 3  # nothing comes before the first
    assert ids[1:].tolist() == logits[:2].topk(3).indices.tolist()
    np.testing.assert_allclose(values[1:], logits[:2].topk(3).values.detach(), atol=1e-5)
    own = parse(sample[4][0])
    assert np.frombuffer(own[1][0], "<i4").reshape(2, 2).tolist() == logits[2:4].topk(2).indices.tolist()
    found = np.frombuffer(parse(answer[5][0])[1][0], "<f4")
    expected = [logits[0, 5].item(), 0.0, logits[1, 6].item(), logits[1, 7].item()]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_state_is_loaded_with_its_optimizer_or_without(tmp_path):
    async def program(service, client):
        model = await client.create()
        await trained(client, model, 2)
        path = (await client.save(model, "middle"))["path"]
        await trained(client, model)
        whole = (await client.save(model, "end"))["path"]
        ends = []
        for optimizer in (True, False):
            resumed = (await client.load(path, optimizer))["model_id"]
            await trained(client, resumed)
            ends.append((await client.save(resumed, "end"))["path"])
        return whole, *ends

    whole, resumed, fresh = (adapter_of(tmp_path, path) for path in tinkering.run(tmp_path, program))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert any(not torch.equal(whole[name], fresh[name]) for name in whole)


@pytest.mark.slow
def test_states_outlive_the_server(tmp_path):
    async def save(service, client):
        model = await client.create()
        await trained(client, model)
        sampler = await client.sampler(model)
        found = samples(await client.result(client.sample(sampler, PROMPT, 0, params={"seed": 1})))
        saved = await client.save(model, "a"), await client.save(model, "a", "save_weights_for_sampler")
        return found, *(one["path"] for one in saved)

    async def resume(service, client):
        loaded = await client.load(path)
        sampler = await client.sampling(for_sampler)
        found = samples(await client.result(client.sample(sampler, PROMPT, 0, params={"seed": 1})))
        return loaded, found, service.weights_info({"tinker_path": path})

    before, path, for_sampler = tinkering.run(tmp_path, save)
    loaded, after, info = tinkering.run(tmp_path, resume)
    assert before == after and "model_id" in loaded and info["lora_rank"] == 4


def test_peft_loads_a_saved_state(tmp_path):
    from peft import PeftModel

    async def program(service, client):
        model = await client.create()
        await trained(client, model)
        path = (await client.save(model, "a", "save_weights_external"))["path"]
        answer = await client.result(client.forward_backward(model, DATA[:1], forward_only=True))
        run, _, _ = path.removeprefix("tinker://").split("/")
        place = service.download(run, "external_weights/a", "http://here")
        return logprobs(answer)[0], path, place

    told, path, place = tinkering.run(tmp_path, program)
    folder = CheckpointStore(tmp_path).find(path)[1]
    model = PeftModel.from_pretrained(tiny.model(), str(folder)).eval()
    logits = model(input_ids=torch.tensor([DATA[0].tokens])).logits[0].log_softmax(-1)
    expected = logits.gather(-1, torch.from_numpy(DATA[0].inputs["target_tokens"].dense())[:, None])[:, 0]
    np.testing.assert_allclose(told, expected.detach(), atol=1e-5)
    assert set(place["urls"]) == {"adapter_model.safetensors", "adapter_config.json"}


def test_a_damaged_state_is_refused_by_its_file(tmp_path):
    async def save(service, client):
        return (await client.save(await client.create(), "a"))["path"]

    async def load(service, client):
        return await client.load(path)

    path = tinkering.run(tmp_path, save)
    file = next(tmp_path.glob("*/weights/a/adapter_model.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Refusal, match=r"adapter_model.safetensors"):
        tinkering.run(tmp_path, load)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_server_that_dies_while_it_replaces_a_state_keeps_one_of_both(tmp_path, monkeypatch, renames):
    async def replace(service, client):
        model = await client.create()
        path = (await client.save(model, "a"))["path"]
        await trained(client, model)
        left = itertools.count()

        def rename(self, target, *, whole=Path.rename):
            if next(left) >= renames:
                raise MemoryError("as if the server were killed")
            return whole(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            patch.setattr("shutil.rmtree", lambda *args, **options: None)
            assert "error" in await client.save(model, "a", overwrite=True)
        return path

    async def load(service, client):
        return await client.load(path), [one["tinker_path"] for one in service.checkpoints(None, {})["checkpoints"]]

    path = tinkering.run(tmp_path, replace)
    loaded, listed = tinkering.run(tmp_path, load)
    assert "model_id" in loaded and listed == [path]
    assert not list(tmp_path.glob("*/*/.*"))


@pytest.mark.slow
def test_two_servers_do_not_share_a_folder(tmp_path):
    with tinkering.service(tmp_path):
        code = "from tests.support import tinkering; tinkering.service(sys.argv[1]).__enter__()"
        command = [sys.executable, "-c", f"import sys; {code}", str(tmp_path)]
        done = forking.run(command, env=launching.environment(), timeout=120)
    assert done.returncode == 1 and "another server" in done.stderr


@pytest.mark.slow
def test_equal_prompts_that_come_one_by_one_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "QUIET", 0.3)  # seconds that a slow machine may take between two of them
    monkeypatch.setattr(work, "MOST_QUIET", 30.0)

    async def program(service, client):
        computed, engine = [], service.worker._engine
        whole = engine._compute_prompts
        engine._compute_prompts = lambda prompts: computed.append(len(prompts)) or whole(prompts)
        model = await client.create()
        await trained(client, model)
        sampler = await client.sampler(model)
        await client.result(client.sample(sampler, PROMPT, 99))  # layouts are tried with prompts of their own
        computed.clear()
        asked = []
        for number in range(8):
            asked.append(client.sample(sampler, PROMPT, number))
            await asyncio.sleep(0.001)
        found = [samples(await client.result(one)) for one in asked]
        return computed, found

    computed, found = tinkering.run(tmp_path, program)
    assert computed == [1] and len({str(one) for one in found}) > 1


def test_states_are_listed_kept_and_deleted(tmp_path):
    async def program(service, client):
        model = await client.create()
        await trained(client, model)
        saved = [(await client.save(model, name, ttl_seconds=3600))["path"] for name in ("a", "b")]
        twice = await client.save(model, "a")
        over = await client.save(model, "a", overwrite=True)
        service.keep_checkpoint(model, "weights/b", {"ttl_seconds": 0})
        listed = service.checkpoints(model, {})["checkpoints"]
        service.delete_checkpoint(model, "weights/a")
        return model, saved, twice, over, listed, service.checkpoints(None, {}), service.training_runs({})

    model, saved, twice, over, listed, rest, runs = tinkering.run(tmp_path, program)
    assert saved == [f"tinker://{model}/weights/{name}" for name in "ab"]
    assert "overwrite" in twice["error"] and over["path"] == saved[0]
    assert [one["tinker_path"] for one in listed] == saved[:1] and rest["checkpoints"] == []
    assert runs["cursor"]["total_count"] == 1


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 129, "tinker://x", 5])
def test_a_name_cannot_leave_the_folder(tmp_path, name):
    async def program(service, client):
        model = await client.create()
        try:
            return await client.save(model, name)
        except Refusal as error:
            return {"error": str(error)}

    assert "error" in tinkering.run(tmp_path, program)
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "run.json"]


@pytest.mark.parametrize(
    "path", ["tinker://../weights/a", "/etc/passwd", "tinker://a/weights/..", "tinker://a/other/b", 3]
)
def test_a_path_is_no_file(tmp_path, path):
    async def program(service, client):
        with pytest.raises(Refusal):
            await client.sampling(path) if isinstance(path, str) else await client.load(path)

    tinkering.run(tmp_path, program)


@pytest.mark.parametrize("run", ["*", "../inner", "..", "/"])
def test_states_are_listed_of_runs_alone(tmp_path, run):
    async def program(service, client):
        await client.save(await client.create(), "a")
        with pytest.raises(Refusal, match="no id"):
            service.checkpoints(run, {})

    tinkering.run(tmp_path / "inner", program)


@pytest.mark.slow
def test_a_state_that_replaces_another_is_sampled_from(tmp_path):
    async def program(service, client):
        model = await client.create()
        found = []
        for _ in range(2):
            await trained(client, model, rate=0.5)
            saved = await client.save(model, "a", "save_weights_for_sampler", overwrite=True)
            samplers = await client.sampling(saved["path"]), await client.sampling(saved["path"])
            assert service.samplers[samplers[0]].snapshot is service.samplers[samplers[1]].snapshot
            newest = await client.sampler(model)
            pair = [await client.result(client.sample(one, PROMPT, params=GREEDY)) for one in (samplers[0], newest)]
            found.append([samples(one)[0][:2] for one in pair])
        return found

    (one, same), (other, equal) = tinkering.run(tmp_path, program)
    assert one == same and other == equal and one != other


def test_an_answer_without_scores_leaves_the_model_alone():
    """It is made while another thread may train with an adapter of its own in the same layers."""
    asked = sample_asked({"prompt": {"chunks": [{"tokens": PROMPT}]}}, 256, 104, set(), 1)
    sampled = Completion([5], [-1.0], FinishReason.STOP)
    answer = answered(None, work.WeightSnapshot("a", {"lm_head": (torch.ones(1, 1),) * 2}), asked, [sampled])
    assert answer.sequences[0].tokens == [5] and answer.prompt_logprobs is None


def test_a_client_that_ends_leaves_no_operation_waiting(tmp_path):
    async def program(service, client):
        model = await client.create()
        queued = [client.forward_backward(model, DATA) for _ in range(3)]
        late = client.forward_backward(model, DATA, number=9)
        service.unload_model({"model_id": model})
        return [await client.result(one) for one in queued], await client.result(late)

    scored, late = tinkering.run(tmp_path, program)
    assert all(len(logprobs(one)) == 3 for one in scored) and "operation 4 did not come" in late["error"]


def test_a_session_whose_state_cannot_be_saved_is_freed(tmp_path, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("broken")

    async def program(service, client):
        sampler = await client.sampling()
        await trained(client, await client.create())
        monkeypatch.setattr(service.store, "save", fails)
        await service.finish_session(client.session)
        assert sampler not in service.samplers and not service.clients

    tinkering.run(tmp_path, program)


def test_a_session_that_ends_saves_what_nothing_has_saved(tmp_path):
    async def program(service, client):
        saved, unsaved, _ = [await client.create() for _ in range(3)]
        await trained(client, saved)
        await client.save(saved, "mine")
        await trained(client, unsaved, 2)
        await service.finish_session(client.session)
        with pytest.raises(Refusal, match="knows no model"):
            service.get_info({"model_id": saved})
        return [one["tinker_path"] for one in service.checkpoints(None, {})["checkpoints"]], saved, unsaved

    paths, saved, unsaved = tinkering.run(tmp_path, program)
    assert paths == [f"tinker://{unsaved}/weights/unsaved-000002", f"tinker://{saved}/weights/mine"]


def test_silent_sessions_end(tmp_path, monkeypatch):
    async def program(service, client):
        await client.create()
        await service.end_silent_sessions()
        assert service.sessions
        monkeypatch.setattr(service_module, "SILENT", -1.0)
        await service.end_silent_sessions()
        return service.sessions, service.clients

    assert tinkering.run(tmp_path, program) == ({}, {})


def test_limits_are_named(tmp_path):
    async def program(service, client):
        for _ in range(2):
            await client.create()
        with pytest.raises(Refusal, match="--max-clients"):
            await client.create()
        with pytest.raises(Refusal, match="--max-rank"):
            await client.create(rank=16)
        with pytest.raises(Refusal, match="--as"):
            service.create_model({"session_id": client.session, "model_seq_id": 9, "base_model": "/etc"})
        sampler = await client.sampling()
        waiting = [client.sample(sampler, PROMPT, number) for number in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal) as refused:
            client.sample(sampler, PROMPT, 3)
        for one in waiting:
            await client.result(one)
        return refused.value.status

    assert tinkering.run(tmp_path, program, max_clients=2, max_rank=8, max_waiting=3) == 429


def test_waiting_training_requests_have_a_limit_of_bytes_together(tmp_path):
    async def program(service, client):
        first, second = await client.create(), await client.create()
        asked = [client.forward_backward(first, DATA, number=1)]  # may always wait, as it is next in order
        for model, number in [(first, 2), (second, 2)]:
            with pytest.raises(Refusal) as refused:
                client.forward_backward(model, DATA, number=number)
            assert refused.value.status == 429
        asked.append(client.forward_backward(second, DATA, number=1))
        assert client.forward_backward(first, DATA, number=1) == asked[0]
        asked.append(client.step(first, number=2))  # has no data
        results = [await client.result(one) for one in asked]
        again = await client.result(client.forward_backward(first, DATA, number=3))
        return [isinstance(one, bytes) or "error" not in one for one in [*results, again]]

    assert tinkering.run(tmp_path, program, max_waiting_bytes=1) == [True] * 4


def test_only_the_newest_unnamed_samplers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "KEPT_SAMPLERS", 2)

    async def program(service, client):
        model = await client.create()
        made = [await client.sampler(model) for _ in range(3)]
        for sampler in made[1:]:
            await client.result(client.sample(sampler, PROMPT))
        with pytest.raises(Refusal, match="newest 2"):
            client.sample(made[0], PROMPT)

    tinkering.run(tmp_path, program)


@pytest.mark.slow
def test_a_cancelled_sample_frees_its_place(tmp_path):
    async def program(service, client):
        sampler = await client.sampling()
        long = client.sample(sampler, PROMPT, 0, 64, params={"max_tokens": 240, "stop": []})
        while not service.worker._engine._running:
            await asyncio.sleep(0.001)
        service.cancel_future({"request_id": long["request_id"]})
        cancelled = await client.result(long)
        short = await client.result(client.sample(sampler, PROMPT, 1))
        return cancelled, samples(short), service._sampling

    cancelled, short, left = tinkering.run(tmp_path, program)
    assert "cancelled" in cancelled["error"] and len(short) == 1 and left == 0


def test_a_client_whose_weights_have_diverged_fails_alone(tmp_path):
    async def program(service, client):
        made = []
        for rate in (0.01, 1e30):
            model = await client.create()
            await client.result(client.forward_backward(model, DATA))
            await client.result(client.step(model, learning_rate=rate))
            made.append(await client.sampler(model))
        asked = [client.sample(one, PROMPT, 0, 4, params={"stop": []}) for one in made]  # one batch
        return [await client.result(one) for one in asked]

    sound, diverged = tinkering.run(tmp_path, program)
    assert len(samples(sound)) == 4 and "NaN" in diverged["error"]


@pytest.mark.slow
def test_training_runs_between_decoding_steps(tmp_path):
    params = {"max_tokens": 240, "stop": [], "seed": 1}

    async def program(service, client):
        model, sampler, engine = await client.create(), await client.sampling(), service.worker._engine
        decoding, run = [], service.worker.run
        service.worker.run = lambda job: run(lambda: decoding.append(len(engine._running)) or job())
        long = client.sample(sampler, PROMPT, 0, 32, params=params)
        while not engine._running:
            await asyncio.sleep(0.001)
        await client.result(client.forward_backward(model, DATA))
        busy = samples(await client.result(long))
        quiet = samples(await client.result(client.sample(sampler, PROMPT, 1, 32, params=params)))
        return decoding, busy, quiet

    decoding, busy, quiet = tinkering.run(tmp_path, program)
    assert decoding == [32] and busy == quiet


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "image"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [500]}]}}, "500"),
        ({"prompt": {"chunks": []}}, "0 tokens"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"sampling_params": {"stop": ["a"] * 129}}, "129"),
        ({"sampling_params": {"stop": ["a" * 1001]}}, "1,001"),
        ({"sampling_params": {"stop": ["\ud800"]}}, "surrogate"),
        ({"sampling_params": {"max_tokens": True}}, "max_tokens"),
        ({"topk_prompt_logprobs": 101}, "101"),
        ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [1, 1]}}, "target_prompt_logprobs"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_by_name(tmp_path, change, told):
    async def program(service, client):
        body = {"sampling_session_id": await client.sampling(), "seq_id": 0, "sampling_params": {"max_tokens": 2}}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        with pytest.raises(Refusal) as refused:
            service.asample({**body, **change})
        return str(refused.value)

    assert told in tinkering.run(tmp_path, program)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "dimuon"),
        ({"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
        ({"adam_params": {"beta1": 1.0}}, "beta1"),
        ({"adam_params": {"momentum": 0.9}}, "momentum"),
        ({}, "adam_params"),
    ],
)
def test_a_step_that_cannot_be_is_refused_by_name(tmp_path, params, told):
    async def program(service, client):
        model = await client.create()
        client.forward_backward(model, DATA)
        failed = await client.result(service.optim_step({"model_id": model, "seq_id": 2, **params}))
        return failed, await client.result(client.step(model, number=3))  # the gradients are still there

    failed, done = tinkering.run(tmp_path, program)
    assert failed["category"] == "user" and told in failed["error"] and done["metrics"]["grad_norm"] > 0


def test_random_requests_are_answered_or_refused(tmp_path):
    chance = random.Random(0)
    values = [None, True, -1, 0, 3, 1e9, "", "x", [], [1], {}, {"type": "x"}, float("nan")]
    names = ("session_id", "model_id", "seq_id", "path", "user_metadata", "lora_config", "base_model", "rank", "kind")
    routes = ("create_model", "load_weights", "get_info", "optim_step", "save_weights", "save_weights_for_sampler")

    async def program(service, client):
        model = await client.create()
        known = [client.session, model, tinkering.NAME, *values]
        for _ in range(300):
            body = {name: chance.choice(known) for name in chance.sample(names, 5)}
            try:
                json.dumps(getattr(service, chance.choice(routes))(body))
            except Refusal as refused:
                assert str(refused)

    tinkering.run(tmp_path, program, patience=0.1)


@pytest.mark.parametrize(("host", "key"), [("0.0.0.0", None), ("127.0.0.1", "mine")])
def test_a_server_needs_a_key_that_fits_its_address(tmp_path, host, key):
    with pytest.raises(ValueError, match="tml-"), serve("no/such/model", checkpoints=tmp_path, host=host, key=key):
        pass
