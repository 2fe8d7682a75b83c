"""Teachers that are servers, in runs: the same numbers as in this process, own denominators, and faults of servers."""

import threading
import time

import pytest
import torch

from covey import DistillationConfig, DistillationTrainer
from covey.core.batch import collate
from covey.core.findings import CheckError, CheckWarning
from covey.core.records import FinishReason, Rollout
from covey.engines.servers import server_pool
from covey.engines.servers.errors import NoServerLeft
from covey.engines.servers.protocols import ScoredToken
from covey.trainer.served_teachers import probe_tokens, requests_of, scores_of
from tests.support import runs, tiny
from tests.support.servers.fake_vllm import FakeVllm, dies, edited, status
from tests.support.servers.sglang_servers import InThread
from tests.trainer.test_teachers import codes, direct, own_prompts, trained

PATH = "/v1/completions"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(server_pool, "FIRST_PAUSE", 0.05)
    for name in ("VLLM_API_KEY", "SGLANG_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with FakeVllm(tiny.model(seed=1), dev_mode=False, tokenizer=tiny.tokenizer(), warm=True) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("teacher")
    tiny.model(seed=1).save_pretrained(home)
    tiny.tokenizer().save_pretrained(home)
    return str(home)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss", ["advantage", "divergence"])
def test_a_server_gives_the_gap_of_a_teacher_in_this_process(tmp_path, server, folder, loss, temperature):
    settings = {"teacher_loss": loss, "temperature": temperature}
    served, (batch,) = trained(tmp_path / "served", teacher=server.url, **settings)
    within, (other,) = trained(tmp_path / "within", teacher=folder, **settings)
    assert torch.equal(batch.token_ids, other.token_ids)
    torch.testing.assert_close(batch.teacher_logprobs, other.teacher_logprobs, rtol=0, atol=2e-5)
    for one, two in zip(runs.weights(served), runs.weights(within), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
    assert runs.history(served, "teacher/kl") == pytest.approx(runs.history(within, "teacher/kl"), abs=1e-4)
    assert runs.history(served, "teacher/fraction") == [1.0]


def test_sglang_gives_the_same(tmp_path, folder):
    server = InThread(folder)
    try:
        _, (batch,) = trained(
            tmp_path, teacher=server.url, teacher_loss="divergence", teacher_top_k=4, teacher_beta=0.0
        )
    finally:
        server.stop()
    expected = direct(tiny.model(seed=1), own_prompts(batch), batch)
    torch.testing.assert_close(batch.teacher_logprobs, expected, rtol=0, atol=2e-5)
    assert batch.named_ids.shape == (batch.num_tokens, 4)


@pytest.mark.slow
def test_the_forward_kl_is_the_same_as_in_this_process(tmp_path, server, folder):
    settings = {"teacher_loss": "divergence", "teacher_top_k": 4, "teacher_beta": 0.0}
    served, (batch,) = trained(tmp_path / "served", teacher=server.url, **settings)
    within, (other,) = trained(tmp_path / "within", teacher=folder, **settings)
    assert torch.equal(batch.named_ids, other.named_ids)
    torch.testing.assert_close(batch.teacher_tops, other.teacher_tops, rtol=0, atol=5e-5)
    assert runs.history(served, "teacher/loss") == pytest.approx(runs.history(within, "teacher/loss"), rel=1e-3)


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_sampled_token_joins_those_that_a_server_names(tmp_path, server, beta):
    settings = {"teacher_loss": "divergence", "teacher_top_k": 3, "teacher_beta": beta}
    trainer, (batch,) = trained(tmp_path, teacher=server.url, **settings)
    assert batch.named_ids.shape[1] == 4
    rows = torch.cat([
        tiny.model(seed=1)(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for prompt, completion in zip(own_prompts(batch), batch.completions(), strict=True)
    ]).detach()  # fmt: skip
    for row, token, named, tops in zip(rows, batch.token_ids, batch.named_ids, batch.teacher_tops, strict=True):
        likeliest = set(row.topk(3).indices.tolist())
        assert {one for one in named.tolist() if one >= 0} == likeliest | {token.item()}
        for one, value in zip(named.tolist(), tops.tolist(), strict=True):
            assert value == (pytest.approx(row[one].item(), abs=5e-5) if one >= 0 else -torch.inf)
    assert runs.history(trainer, "teacher/loss")[0] > 0


@pytest.mark.slow
def test_servers_and_models_of_this_process_by_column(tmp_path, server, folder):
    """Each row by its own; rows without a name have none and are in no count."""
    names = ["served", "within", "start", None]
    rows = [{**row, "teacher": names[number % 4]} for number, row in enumerate(tiny.rows())]
    given = {"served": server.url, "within": folder, "start": "start"}
    changes = {"per_device_train_batch_size": 8, "shuffle_dataset": False, "learning_rate": 0.0}
    settings = {"teacher_loss": "divergence", "teacher_top_k": 4, "teacher_beta": 0.5}
    trainer, (batch,) = trained(tmp_path, rows, teacher=given, **settings, **changes)
    other = direct(tiny.model(seed=1), own_prompts(batch), batch)
    start = direct(tiny.model(), own_prompts(batch), batch)
    of_row = torch.arange(len(batch)) // 4 % 4
    owner = torch.repeat_interleave(of_row, batch.lengths)
    expected = torch.where(owner < 2, other, torch.where(owner == 2, start, torch.nan))
    torch.testing.assert_close(batch.teacher_logprobs, expected, rtol=0, atol=2e-5, equal_nan=True)
    assert torch.equal(batch.term_tokens["teacher"], (owner < 3).float())
    scale = batch.term_scales["teacher"][of_row < 3]
    assert scale.tolist() == pytest.approx([1 / (owner < 3).sum().item()] * len(scale))  # dapo: a token mean
    assert batch.named_ids.shape[1] == 5
    assert (batch.named_ids[owner == 3] == -1).all() or batch.teacher_tops[owner == 3].isinf().all()
    for name in given:
        assert len(runs.history(trainer, f"teacher/{name}/kl")) == 1


def test_a_server_reads_the_teachers_prompt(tmp_path, server):
    """Rows without one are not sent."""
    rows = [{**row, "hint": f"{row['prompt']}!" if number % 2 else None} for number, row in enumerate(tiny.rows())]
    _, (batch,) = trained(tmp_path, rows, teacher=server.url, teacher_prompt="hint", shuffle_dataset=False)
    exclamation = torch.tensor(tiny.tokenizer()("!")["input_ids"])
    expected = direct(tiny.model(seed=1), [torch.cat([prompt, exclamation]) for prompt in own_prompts(batch)], batch)
    has = torch.repeat_interleave(torch.arange(len(batch)) // 4 % 2 == 1, batch.lengths)
    assert batch.teacher_logprobs[~has].isnan().all()
    torch.testing.assert_close(batch.teacher_logprobs[has], expected[has], rtol=0, atol=2e-5)


def test_rollouts_that_are_longer_than_the_servers_context_have_no_teacher(tmp_path, server):
    server.max_model_len = 12
    rows = [{**row, "hint": "x" * (9 if number % 2 else 2)} for number, row in enumerate(tiny.rows())]
    changes = {"teacher_prompt": "hint", "shuffle_dataset": False}
    trainer, (batch,) = trained(tmp_path, rows, teacher=server.url, **changes)
    sent = [body["prompt"] for body in server.asked(PATH)]
    assert max(map(len, sent)) <= 11
    assert runs.history(trainer, "teacher/too_long")[0] > 0
    assert batch.teacher_logprobs.isnan().any() and batch.teacher_logprobs.isfinite().any()


@pytest.mark.slow
def test_evaluations_ask_the_server(tmp_path, server):
    trainer, _ = trained(tmp_path, teacher=server.url, parts={"eval_dataset": tiny.rows(4)})
    assert trainer.evaluate()["eval_teacher/kl"] > 0


@pytest.mark.slow
def test_a_distillation_trainer_takes_a_url(tmp_path, server):
    args = DistillationConfig(
        str(tmp_path), **{**runs.DEFAULTS, "num_generations": 1, "teacher_top_k": 20, "max_steps": 1}
    )
    trainer = DistillationTrainer(
        model=tiny.model(), teacher_model=server.url + "/", args=args, train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    trainer.train()
    assert runs.history(trainer, "teacher/loss")[0] > 0


# ---- requests --------------------------------------------------------------------------------------------------------


def test_a_request_ends_with_the_last_sampled_token():
    """And asks from the first one on; rollouts without a sampled token are not sent."""
    rollouts = [
        Rollout([1, 2, 3], [4, 5, 6, 7], [False, True, True, False], None, "", FinishReason.STOP),
        Rollout([1, 2], [8, 9], [False, False], None, "", FinishReason.STOP),
    ]
    (request,) = requests_of(collate(rollouts), 2, 0.5)
    assert (request.token_ids, request.first, request.top, request.temperature) == ([1, 2, 3, 4, 5, 6], 4, 2, 0.5)
    answer = [ScoredToken(-1.0, [(3, -0.5), (4, -1.5)], "a"), ScoredToken(-2.0, [(3, -0.1)], "b")]
    found = scores_of(collate(rollouts), [answer], 2)
    assert found.logprobs.nan_to_num(9.0).tolist() == [9.0, -1.0, -2.0, 9.0, 9.0, 9.0]
    assert found.top_ids.tolist()[1:3] == [[3, 4], [3, -1]]


def test_rollouts_without_a_sampled_token_have_no_scores():
    batch = collate([Rollout([1, 2], [8, 9], [False, False], None, "", FinishReason.STOP)])
    assert requests_of(batch, 4, 1.0) == []
    found = scores_of(batch, [], 4)
    assert found.logprobs.isnan().all() and found.top_ids.tolist() == [[-1] * 4] * 2


def test_each_strand_is_a_sequence_of_its_own():
    """The rollout of `covey.core.strands`' example: 3, 4 after 1, 2; then 5 after 1, 9."""
    sampled = [True, True, False, True]
    rollout = Rollout([1, 2], [3, 4, 9, 5], sampled, None, "ab", FinishReason.STOP, strands=[(2, 0)])
    requests = requests_of(collate([rollout]), 0, 1.0)
    assert [(one.token_ids, one.first) for one in requests] == [([1, 2, 3, 4], 2), ([1, 9, 5], 2)]
    answers = [[ScoredToken(-1.0, [], None), ScoredToken(-2.0, [], None)], [ScoredToken(-3.0, [], None)]]
    values = scores_of(collate([rollout]), answers, 0).logprobs
    assert values.nan_to_num(9.0).tolist() == [-1.0, -2.0, 9.0, -3.0]


def test_probe_tokens_cover_special_ones():
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
    probe = probe_tokens(tokenizer, 128)
    assert probe.last == 104 and probe.rows == 128
    assert {0, 1, 2, 3, 104} <= {*probe.ids} and probe.texts[-1] == "<call>"


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_changes_nothing(tmp_path, server):
    """The run waits, and has the weights of an undisturbed one."""
    settings = {"teacher": server.url, "teacher_loss": "divergence", "teacher_server_timeout": 60.0}
    undisturbed, _ = trained(tmp_path / "a", **settings)
    trainer = runs.trainer(tmp_path / "b", max_steps=1, **settings)
    server.misbehave(PATH, dies(server))

    def revive():
        while server.misbehaves():
            time.sleep(0.01)
        server.kill()
        server.start()

    reviving = threading.Thread(target=revive)
    reviving.start()
    trainer.train()
    reviving.join()
    assert all(map(torch.equal, runs.weights(undisturbed), runs.weights(trainer)))


def test_a_server_that_stays_away_ends_the_run(tmp_path, server):
    trainer = runs.trainer(tmp_path, max_steps=1, teacher=server.url, teacher_server_timeout=0.5)
    server.kill()
    with pytest.raises(NoServerLeft, match="teacher_server_timeout"):
        trainer.train()


def test_a_busy_server_is_asked_again(tmp_path, server):
    trainer = runs.trainer(tmp_path, max_steps=1, teacher=server.url)
    server.misbehave(PATH, status(503, "overloaded"), times=2)
    trainer.train()
    assert runs.history(trainer, "teacher/fraction") == [1.0]


def test_a_log_prob_that_is_infinite_is_left_out_of_sum_and_count(tmp_path, server):
    """Not counted as 0: the term has one token less."""

    def change(answer):
        last = answer["choices"][0]["prompt_logprobs"][-1]
        for entry in last.values():
            entry["logprob"] = -9999.0

    trainer = runs.trainer(tmp_path, max_steps=1, teacher=server.url, teacher_loss="divergence")
    found = runs.experiences(trainer)
    server.misbehave(PATH, edited(change))
    with pytest.warns(UserWarning, match="infinite or NaN"):
        trainer.train()
    (batch,) = found
    assert batch.teacher_logprobs.isnan().sum() == 1
    tokens = batch.num_tokens - 1
    assert batch.term_scales["teacher"].tolist() == pytest.approx([1 / tokens] * len(batch))
    assert runs.history(trainer, "teacher/not_finite") == pytest.approx([1 / batch.num_tokens])


@pytest.mark.slow
def test_a_resumed_run_notices_another_model(tmp_path, server):
    settings = {"teacher": server.url, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = runs.trainer(tmp_path, **{**settings, "max_steps": 1})
    trainer.train()
    again = runs.trainer(tmp_path, **settings)
    again.train(resume_from_checkpoint=True)
    server.kill()
    server._original = tiny.model(seed=2)
    server.start()
    third = runs.trainer(tmp_path, **{**settings, "max_steps": 3, "teacher": server.url})
    with pytest.warns(CheckWarning) as caught:
        third.train(resume_from_checkpoint=True)
    found = [one.message.finding.code for one in caught if isinstance(one.message, CheckWarning)]
    assert found.count("teacher-changed") == 1


# ---- wrong use -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("setting-format", {"teacher": "http://127.0.0.1:1/v1"}),
        ("secret-in-url", {"teacher": "http://user:word@127.0.0.1:1"}),
        ("secret-in-url", {"teacher": {"a": "http://user:word@127.0.0.1:1"}}),
        ("settings-contradict", {"teacher": "http://127.0.0.1:1", "keep_sampling_mask": True, "top_k": 4}),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, code, changes):
    assert code in codes(tmp_path, **changes)


def test_what_a_server_cannot_do_is_refused(tmp_path, server):
    server.warm = False
    assert codes(tmp_path, teacher=server.url, temperature=0.7) == {"teacher-server"}
    many = {"teacher_loss": "divergence", "teacher_top_k": 21}
    assert codes(tmp_path, teacher=server.url, **many) == {"teacher-server"}
    small = FakeVllm(tiny.model(vocab_size=50), tokenizer=tiny.tokenizer())
    with small:
        assert codes(tmp_path, teacher=small.url) == {"teacher-vocabulary"}


def test_a_key_is_in_no_message(tmp_path, server):
    server.api_key = "secret"
    with pytest.raises(CheckError) as error:
        runs.trainer(tmp_path, teacher=server.url, teacher_server_api_key="wrong")
    assert "wrong" not in str(error.value) and "secret" not in str(error.value)
    trainer = runs.trainer(tmp_path, teacher=server.url, teacher_server_api_key="secret")
    assert "secret" not in str(trainer.args)
