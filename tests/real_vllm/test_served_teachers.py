"""A teacher that a real vLLM serves: the same numbers as in this process, its limits, and a server that comes back."""

import threading

import pytest
import torch

from covey.core.findings import CheckError
from covey.engines.servers.protocols import ScoreRequest
from covey.trainer.served_teachers import build_server_scorer
from tests.real_vllm.serving import SHAPE, serve
from tests.support import runs, tiny

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A server for these tests alone: others send theirs weights."""
    home = tmp_path_factory.mktemp("teacher")
    tiny.model(seed=1, **SHAPE).save_pretrained(home / "model")
    tiny.tokenizer().save_pretrained(home / "model")
    running = serve(home, str(home / "model"))
    yield running
    running.process.stop()


def trained(folder, **changes):
    """A trainer after two steps, and its training data."""
    trainer = runs.trainer(folder, **changes)
    found = runs.experiences(trainer)
    trainer.train()
    return trainer, found


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_the_gap_is_that_of_a_teacher_in_this_process(tmp_path, teacher, temperature):
    settings = {"temperature": temperature, "teacher_loss": "divergence"}
    served, batches = trained(tmp_path / "served", teacher=teacher.url, **settings)
    within, others = trained(tmp_path / "within", teacher=teacher.model, **settings)
    for batch, other in zip(batches, others, strict=True):
        assert torch.equal(batch.token_ids, other.token_ids)
        torch.testing.assert_close(batch.teacher_logprobs, other.teacher_logprobs, rtol=0, atol=1e-4)
    for name in ("teacher/kl", "teacher/loss"):
        assert runs.history(served, name) == pytest.approx(runs.history(within, name), abs=1e-4)


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.0, 0.7), (0.5, 1.0)])
def test_named_tokens_and_their_tail(tmp_path, teacher, beta, temperature):
    """With forward KL both name the same; else the sampled token stands in for the policy's likeliest."""
    settings = {"teacher_loss": "divergence", "teacher_top_k": 8, "teacher_beta": beta, "temperature": temperature}
    served, batches = trained(tmp_path / "served", teacher=teacher.url, **settings)
    assert 0 < runs.history(served, "teacher/student_mass")[0] <= 1
    if beta == 0:
        within, others = trained(tmp_path / "within", teacher=teacher.model, **settings)
        for batch, other in zip(batches, others, strict=True):
            assert torch.equal(batch.named_ids, other.named_ids)
            torch.testing.assert_close(batch.teacher_tops, other.teacher_tops, rtol=0, atol=1e-4)
        assert runs.history(served, "teacher/loss") == pytest.approx(runs.history(within, "teacher/loss"), abs=1e-4)
    else:
        batch = batches[0]
        assert (batch.named_ids == batch.token_ids[:, None]).any(1).all()


def test_requests_of_several_temperatures_at_once(tmp_path, teacher):
    """Each has its own, and so have the tokens that are sampled meanwhile."""
    scorers = {}
    for temperature in (1.0, 0.5, 2.0):
        args = runs.config(tmp_path, temperature=temperature)
        scorers[temperature] = build_server_scorer(args, teacher.url, tiny.model(seed=1, **SHAPE), tiny.tokenizer(), 2)
    sequences = [[5, 6, 7, 30 + number, 8, 40] for number in range(16)]
    begun = {
        temperature: scorer.begin([ScoreRequest(ids, 1, 2, temperature) for ids in sequences])
        for temperature, scorer in scorers.items()
    }
    model = tiny.model(seed=1, **SHAPE)
    for temperature, future in begun.items():
        for ids, answer in zip(sequences, scorers[temperature].wait(future), strict=True):
            with torch.no_grad():
                rows = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
            expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            assert [one.logprob for one in answer] == pytest.approx(expected, abs=1e-4)
            assert [[token for token, _ in one.top] for one in answer] == rows.topk(2).indices.tolist()


def test_more_named_tokens_than_the_server_allows(tmp_path, teacher):
    with pytest.raises(CheckError, match=r"teacher_top_k=21.*20.*--max-logprobs 21") as error:
        runs.trainer(tmp_path, teacher=teacher.url, teacher_loss="divergence", teacher_top_k=21)
    assert error.value.codes == ["teacher-server"]


def test_another_tokenizer_and_a_smaller_vocabulary(tmp_path, teacher):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    parts = {"model": tiny.model(vocab_size=105), "processing_class": tokenizer}
    with pytest.raises(CheckError) as error:
        runs.trainer(tmp_path, parts=parts, teacher=teacher.url)
    assert error.value.codes == ["teacher-vocabulary"]


def test_a_server_that_dies_and_comes_back_changes_nothing(tmp_path, teacher):
    """The run waits for it, and ends with the weights of an undisturbed one."""
    settings = {"teacher": teacher.url, "teacher_loss": "divergence", "teacher_server_timeout": 400.0}
    undisturbed, _ = trained(tmp_path / "a", **settings)
    trainer = runs.trainer(tmp_path / "b", **settings)
    teacher.process.stop()
    again = threading.Thread(target=teacher.process.start)
    again.start()
    trainer.train()
    again.join()
    for one, two in zip(runs.weights(undisturbed), runs.weights(trainer), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_a_plain_server_ignores_the_temperature_and_is_refused(tmp_path, start_server, teacher):
    """Without Covey's worker extension; at temperature 1 it serves."""
    teacher.process.stop()  # one at a time
    without = ["--worker-extension-cls", "", "--weight-transfer-config", '{"backend": "nccl"}']
    plain = start_server(*without, model=teacher.model)
    with pytest.raises(CheckError, match=r"temperature 1 where temperature=0\.7") as error:
        runs.trainer(tmp_path / "warm", teacher=plain.url, temperature=0.7)
    assert error.value.codes == ["teacher-server"]
    trainer, _ = trained(tmp_path / "cold", teacher=plain.url)
    assert runs.history(trainer, "teacher/fraction") == [1.0, 1.0]
