"""Teachers in a run: what they score, by which prompt, and how that reaches the loss."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM

from covey.core.batch import collate
from covey.core.findings import CheckError, CheckWarning
from covey.core.records import FinishReason, Rollout
from covey.core.terms import term_weights
from covey.policy.loading import load_teacher
from covey.trainer import build
from covey.trainer.teachers import TeacherPrompt, check_tokenizer, check_vocabulary, fields_of, template_prompt
from tests.core.test_distillation import full_divergence
from tests.support import runs, tiny

PARTS = {"reward_funcs": runs.longer}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two teachers with other weights than the policy's, and a smaller one."""
    home = tmp_path_factory.mktemp("teachers")
    for seed, name in ((1, "one"), (2, "two")):
        tiny.model(seed=seed).save_pretrained(home / name)
        tiny.tokenizer().save_pretrained(home / name)
    return home


def trained(folder, rows=None, **changes):
    """A trainer after a step, and its training data."""
    parts = {} if rows is None else {"train_dataset": rows}
    trainer = runs.trainer(folder, parts={**parts, **changes.pop("parts", {})}, **{"max_steps": 1, **changes})
    found = runs.experiences(trainer)
    trainer.train()
    return trainer, found


def direct(model, prompts, batch, temperature=1.0):
    """Log-probs [N] by plain calls of the model on the concatenated tokens."""
    values = []
    for prompt, completion in zip(prompts, batch.completions(), strict=True):
        ids = torch.cat([torch.as_tensor(prompt), completion])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : len(ids) - 1] / temperature
        values.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return torch.cat(values)


def own_prompts(batch):
    return [batch.prompts()[group] for group in batch.groups.tolist()]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared_prefix"])
def test_a_folder_scores_the_policys_tokens(tmp_path, folders, layout, temperature):
    settings = {"teacher": str(folders / "one"), "attn_layout": layout, "temperature": temperature}
    trainer, (batch,) = trained(tmp_path, **settings, learning_rate=0.0)
    expected = direct(tiny.model(seed=1), own_prompts(batch), batch, temperature)
    torch.testing.assert_close(batch.teacher_logprobs, expected, rtol=0, atol=2e-5)
    assert runs.history(trainer, "teacher/fraction") == [1.0]
    own = direct(trainer.policy, own_prompts(batch), batch, temperature)
    assert runs.history(trainer, "teacher/kl") == pytest.approx([(own - expected).mean().item()], abs=1e-4)


def test_the_start_equals_the_policy_at_first_and_then_not(tmp_path):
    trainer, _ = trained(tmp_path, teacher="start", teacher_loss="divergence", max_steps=3)
    gaps = runs.history(trainer, "teacher/kl")
    assert gaps[0] == pytest.approx(0.0, abs=1e-6) and gaps[-1] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_a_follower_is_the_policy_of_some_steps_ago(tmp_path, lora):
    parts = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)} if lora else {}
    trainer = runs.trainer(tmp_path, parts=parts, teacher="follower", teacher_sync_steps=2, max_steps=5)
    teachers, policies, seen = trainer.behaviour.teachers.teachers, [], []
    teacher = teachers[""]

    @contextmanager
    def within(policy):
        policies.append(runs.weights(trainer))
        with teacher.within(policy) as model:
            seen.append([one.detach().clone() for one in model.parameters()])
            yield model

    teachers[""] = replace(teacher, within=within)
    trainer.train()
    for step, expected in enumerate([0, 0, 2, 2, 4]):
        assert all(map(torch.equal, seen[step], policies[expected])), step
    assert not all(map(torch.equal, policies[0], policies[2]))


def test_an_average_starts_from_the_policys_adapter(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    settings = {"teacher": "follower", "teacher_mixup_alpha": 0.25, "max_steps": 1, "learning_rate": 0.1}
    trainer = runs.trainer(tmp_path, parts={"peft_config": adapter}, **settings)
    before = {name: one.detach().clone() for name, one in trainer.policy.named_parameters() if one.requires_grad}
    trainer.train()
    kept = trainer.behaviour.teachers.teachers[""].reference.state_dict()
    now = dict(trainer.policy.named_parameters())
    for name, first in before.items():
        torch.testing.assert_close(kept[name], first.lerp(now[name].detach(), 0.25), rtol=0, atol=0)
    assert any(not torch.equal(kept[name], before[name]) for name in before)


def test_the_policy_reading_its_own_prompt_has_no_gap(tmp_path):
    rows = [{**row, "hint": row["prompt"]} for row in tiny.rows()]
    trainer, (batch,) = trained(tmp_path, rows, teacher="policy", teacher_prompt="hint")
    assert batch.teacher_logprobs.isfinite().all()
    assert runs.history(trainer, "teacher/kl") == pytest.approx([0.0], abs=1e-6)


def test_the_policy_reads_the_teachers_prompt(tmp_path):
    """Rows without one have no teacher."""
    rows = [{**row, "hint": f"{row['prompt']}!" if number % 2 else None} for number, row in enumerate(tiny.rows())]
    _, (batch,) = trained(tmp_path, rows, teacher="policy", teacher_prompt="hint", shuffle_dataset=False, max_steps=1)
    exclamation = tiny.tokenizer()("!")["input_ids"]
    prompts = [torch.cat([prompt, torch.tensor(exclamation)]) for prompt in own_prompts(batch)]
    expected = direct(tiny.model(), prompts, batch)
    has = torch.repeat_interleave(torch.arange(len(batch)) // 4 % 2 == 1, batch.lengths)
    assert batch.teacher_logprobs[~has].isnan().all()
    torch.testing.assert_close(batch.teacher_logprobs[has], expected[has], rtol=0, atol=2e-5)
    assert torch.equal(batch.term_tokens["teacher"], has.float())


@pytest.mark.slow
def test_rows_choose_among_several_teachers(tmp_path, folders):
    names = ["one", "two", None, ""]
    rows = [{**row, "who": names[number % 4]} for number, row in enumerate(tiny.rows())]
    given = {"teacher": {name: str(folders / name) for name in ("one", "two")}, "teacher_column": "who"}
    changes = {"per_device_train_batch_size": 8, "shuffle_dataset": False}
    trainer, (batch,) = trained(tmp_path, rows, **given, **changes)
    of = {name: direct(tiny.model(seed=seed), own_prompts(batch), batch) for name, seed in (("one", 1), ("two", 2))}
    row_names = [names[row // 4 % 4] for row in range(len(batch))]
    for row, (values, start) in enumerate(
        zip(
            batch.teacher_logprobs.split(batch.lengths.tolist()), (batch.lengths.cumsum(0) - batch.lengths), strict=True
        )
    ):
        name = row_names[row]
        if not name:
            assert values.isnan().all()
        else:
            expected = of[name][start : start + len(values)]
            torch.testing.assert_close(values, expected, rtol=0, atol=2e-5)
    assert runs.history(trainer, "teacher/one/kl") and runs.history(trainer, "teacher/two/kl")


@pytest.mark.parametrize(("beta", "first", "second"), [(0.0, 4, 0), (0.5, 2, 2), (1.0, 0, 4)])
def test_teacher_and_policy_name_their_likeliest_tokens(tmp_path, folders, beta, first, second):
    settings = {"teacher": str(folders / "one"), "teacher_loss": "divergence", "teacher_top_k": 4, "learning_rate": 0.0}
    trainer, (batch,) = trained(tmp_path, **settings, teacher_beta=beta)
    start, model = 0, tiny.model(seed=1)
    for prompt, completion in zip(own_prompts(batch), batch.completions(), strict=True):
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            teacher, own = (
                one(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for one in (model, trainer.policy)
            )
        for row in range(len(completion)):
            place = start + row
            expected = {*teacher[row].topk(first).indices.tolist(), *own[row].topk(second).indices.tolist()}
            named = batch.named_ids[place]
            assert {*named[named >= 0].tolist()} == expected
            for token, logprob in zip(named.tolist(), batch.teacher_tops[place].tolist(), strict=True):
                if token >= 0:
                    assert logprob == pytest.approx(teacher[row, token].item(), abs=5e-5)
        start += len(completion)
    assert 0 < runs.history(trainer, "teacher/student_mass")[0] <= 1


def test_named_tokens_of_rows_without_a_teacher_are_none(tmp_path):
    rows = [{**row, "hint": "x" if number % 2 else None} for number, row in enumerate(tiny.rows())]
    given = {"teacher": "policy", "teacher_prompt": "hint", "teacher_top_k": 3, "teacher_beta": 0.5}
    trainer, (batch,) = trained(tmp_path, rows, **given, teacher_loss="divergence", shuffle_dataset=False)
    lacking = batch.teacher_logprobs.isnan()
    assert lacking.any() and batch.teacher_tops[lacking].isinf().all()
    assert batch.teacher_tops[~lacking].isfinite().any()
    assert runs.history(trainer, "teacher/loss")[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("lora", [False, True])
def test_the_whole_vocabulary_is_all_tokens_but_one_by_name_and_the_rest(tmp_path, folders, beta, lora):
    """104 tokens: 103 of them named and one left make the same divergence, so that runs end alike.

    Between the two KLs teacher and policy each name half of them, many of which are the same.
    """
    parts = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)} if lora else {}
    settings = {"teacher": str(folders / "one"), "teacher_loss": "divergence", "teacher_beta": beta, "max_steps": 3}
    settings |= {"learning_rate": 0.1, "optim": "sgd", "parts": parts}
    made = []
    for top_k in (-1, 206 if beta == 0.5 else 103):
        torch.manual_seed(0)  # of the adapter
        made.append(trained(tmp_path / str(top_k), **{**settings, "parts": dict(parts)}, teacher_top_k=top_k)[0])
    for name in ("teacher/loss", "teacher/kl", "loss"):
        whole, named = (runs.history(one, name) for one in made)
        assert whole == pytest.approx(named, abs=2e-5), name
    for whole, named in zip(*map(runs.weights, made), strict=True):
        torch.testing.assert_close(whole, named, rtol=0, atol=2e-5)


def test_each_rollout_is_compared_with_its_own_teacher_over_the_vocabulary(tmp_path, folders):
    """A wider teacher and one with a prompt of no one else; rows without a teacher are in no mean."""
    tiny.model(seed=3, hidden_size=64).save_pretrained(tmp_path / "wide")
    tiny.tokenizer().save_pretrained(tmp_path / "wide")
    rows = [{**row, "teacher": ["wide", "two", ""][number % 3]} for number, row in enumerate(tiny.rows())]
    given = {"teacher": {"wide": str(tmp_path / "wide"), "two": str(folders / "two")}, "teacher_loss": "divergence"}
    settings = {**given, "teacher_top_k": -1, "teacher_beta": 0.5, "shuffle_dataset": False, "learning_rate": 0.0}
    settings |= {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    trainer, (batch,) = trained(tmp_path / "run", rows, **settings)
    models = {"wide": tiny.model(seed=3, hidden_size=64), "two": tiny.model(seed=2), "": None}
    values = []
    for row, (prompt, completion) in enumerate(zip(own_prompts(batch), batch.completions(), strict=True)):
        teacher = models[["wide", "two", ""][row // 4 % 3]]
        if teacher is None:
            continue
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            log_p, log_t = (
                model(ids[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(1)
                for model in (trainer.policy, teacher)
            )
        values.append(full_divergence(log_p, log_t, 0.5))
    assert runs.history(trainer, "teacher/loss") == pytest.approx([torch.cat(values).mean().item()], abs=1e-5)
    assert 0 < runs.history(trainer, "teacher/fraction")[0] < 1


@pytest.mark.parametrize("kind", ["policy", "follower", "start"])
def test_teachers_that_are_the_policy_are_compared_over_the_vocabulary(tmp_path, kind):
    rows = [{**row, "hint": f"{row['prompt']}!"} for row in tiny.rows()]
    settings = {"teacher": kind, "teacher_prompt": "hint", "teacher_loss": "divergence", "teacher_top_k": -1}
    trainer, _ = trained(tmp_path, rows, **settings, max_steps=3)
    assert min(runs.history(trainer, "teacher/loss")) > 0


def test_a_teacher_whose_head_moves_between_updates_of_its_rollouts_is_refused(tmp_path):
    several = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
    settings = {"teacher": "follower", "teacher_loss": "divergence", "teacher_top_k": -1, **several}
    assert codes(tmp_path, **settings) == {"teacher-head"}
    trained(tmp_path / "start", **{**settings, "teacher": "start"})
    adapter = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}  # whose head stays
    trained(tmp_path / "adapter", **settings, parts=adapter)


def test_an_adapter_on_the_head_of_the_teacher_is_refused(tmp_path):
    settings = {"teacher": "follower", "teacher_loss": "divergence", "teacher_top_k": -1}
    parts = {"model": tiny.model(tie_word_embeddings=False), "peft_config": LoraConfig(r=2, target_modules=["lm_head"])}
    assert codes(tmp_path, **settings, parts=parts) == {"teacher-head"}


def test_evaluations_compare_the_whole_vocabulary(tmp_path, folders):
    settings = {"teacher": str(folders / "one"), "teacher_loss": "divergence", "teacher_top_k": -1}
    trainer, _ = trained(tmp_path, **settings, parts={"eval_dataset": tiny.rows(4)})
    assert trainer.evaluate()["eval_teacher/loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_named_tokens_move_the_policy_towards_the_teacher(tmp_path, folders, beta):
    settings = {"teacher_loss": "divergence", "teacher_top_k": 16, "teacher_beta": beta, "max_steps": 10}
    nothing = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    settings |= {"teacher": str(folders / "one"), "learning_rate": 3e-3}
    trainer, _ = trained(tmp_path, parts=nothing, **settings)
    values = runs.history(trainer, "teacher/loss")
    assert sum(values[-3:]) < 0.7 * sum(values[:3])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["advantage", "divergence"])
def test_a_teacher_moves_the_policy_towards_itself(tmp_path, folders, loss):
    """Without any signal of the rewards."""
    settings = {"teacher": str(folders / "one"), "teacher_loss": loss, "max_steps": 12, "learning_rate": 3e-3}
    nothing = {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    trainer, _ = trained(tmp_path, parts=nothing, **settings)
    gaps = runs.history(trainer, "teacher/kl")
    assert sum(gaps[-3:]) < 0.8 * sum(gaps[:3])


def test_a_weight_of_zero_only_measures(tmp_path, folders):
    measured, _ = trained(tmp_path / "a", teacher=str(folders / "one"), teacher_coef=0.0)
    without, _ = trained(tmp_path / "b")
    assert all(map(torch.equal, runs.weights(measured), runs.weights(without)))
    assert runs.history(measured, "teacher/kl")[0] > 0


def test_truncated_completions_that_are_masked_have_no_teacher(tmp_path, folders):
    settings = {"teacher": str(folders / "one"), "mask_truncated_completions": True, "teacher_loss": "divergence"}
    _, (batch,) = trained(tmp_path, **settings)
    assert not batch.sampled.all()
    assert torch.equal(batch.teacher_logprobs.isnan(), ~batch.sampled)


def test_a_teacher_is_restricted_as_the_policy_was(tmp_path, folders):
    """Log-probs over what each token was sampled from, after the repetition penalty."""
    settings = {"teacher": str(folders / "one"), "keep_sampling_mask": True, "top_k": 4, "max_steps": 1}
    _, (batch,) = trained(tmp_path, **settings, learning_rate=0.0, attn_layout="padded")
    model, position, kept = tiny.model(seed=1), 0, batch.kept_ids.split(batch.kept_counts.tolist())
    for prompt, completion in zip(own_prompts(batch), batch.completions(), strict=True):
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        for row, token in zip(logits, completion, strict=True):
            allowed = kept[position].long()
            expected = row[token] - row[allowed].logsumexp(0)
            assert batch.teacher_logprobs[position].item() == pytest.approx(expected.item(), abs=2e-5)
            position += 1


@pytest.mark.slow
def test_evaluations_measure_the_teacher(tmp_path, folders):
    trainer, _ = trained(tmp_path, teacher=str(folders / "one"), parts={"eval_dataset": tiny.rows(4)})
    assert trainer.evaluate()["eval_teacher/kl"] > 0


def test_the_record_holds_the_teachers_log_probs(tmp_path, folders):
    import pyarrow.parquet as pq

    from covey.observability.page.tables import RecordedBatch

    _, (batch,) = trained(tmp_path, teacher=str(folders / "one"), teacher_loss="divergence", record="tokens")
    (path,) = (tmp_path / "record").glob("generation*.parquet")
    table = pq.read_table(path)
    recorded = [value for row in table["teacher_logprobs"].to_pylist() for value in row]
    assert recorded == batch.teacher_logprobs.tolist()
    assert "term/teacher" in table.column_names
    columns = RecordedBatch(table, []).rollout(0, "x", [b"?"] * 104)["tokens"]["columns"]
    titles = {column["name"]: column["title"] for column in columns}
    assert titles["term/teacher"] == "weight in teacher" and "teacher_logprobs" in titles


# ---- adapters --------------------------------------------------------------------------------------------------------

LORA = {"r": 2, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A base model and two adapters on it, as folders."""
    home = tmp_path_factory.mktemp("adapters")
    tiny.folder(home / "base")
    for seed, name in ((1, "one"), (2, "two")):
        torch.manual_seed(seed)
        base = LlamaForCausalLM.from_pretrained(home / "base")
        get_peft_model(base, LoraConfig(**LORA, init_lora_weights=False)).save_pretrained(home / name)
    return home


def adapted(stored, name):
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(stored / "base"), stored / name).eval()


def storages(model):
    return {weight.data_ptr() for weight in model.parameters()}


def teacher_of(trainer, name=""):
    with trainer.behaviour.teachers.teachers[name].within(trainer.policy) as model:
        return model


@pytest.mark.slow
def test_an_adapter_on_the_policys_base_shares_it(tmp_path, stored):
    """The base is in memory once, and what the policy learns does not reach the teacher."""
    parts = {"model": str(stored / "base"), "peft_config": LoraConfig(**LORA)}
    settings = {"teacher": str(stored / "one"), "learning_rate": 0.1, "max_steps": 2}
    trainer = runs.trainer(tmp_path, parts=parts, **settings)
    found = runs.experiences(trainer)
    teacher = teacher_of(trainer)
    own = {name for name, weight in teacher.named_parameters() if weight.data_ptr() not in storages(trainer.policy)}
    assert own == {name for name, _ in teacher.named_parameters() if "lora_" in name} != set()
    before = runs.weights(trainer)
    trainer.train()
    assert not all(map(torch.equal, before, runs.weights(trainer)))
    for batch in found:
        expected = direct(adapted(stored, "one"), own_prompts(batch), batch)
        torch.testing.assert_close(batch.teacher_logprobs, expected, rtol=0, atol=2e-5)
    assert not any("one" in name for name, _ in trainer.policy.named_parameters())
    trainer.save_model(str(tmp_path / "saved"))
    assert not any("teacher" in str(path) for path in (tmp_path / "saved").rglob("*"))


@pytest.mark.slow
def test_adapters_that_do_not_share_the_policys_base_share_one(tmp_path, stored):
    """The policy trains all of its weights, so that they cannot be the teachers'."""
    given = {name: str(stored / name) for name in ("one", "two")}
    rows = [{**row, "teacher": ("one", "two")[number % 2]} for number, row in enumerate(tiny.rows())]
    changes = {"shuffle_dataset": False, "per_device_train_batch_size": 8, "learning_rate": 0.0}
    parts = {"model": str(stored / "base")}
    trainer, (batch,) = trained(tmp_path, rows, teacher=given, parts=parts, **changes)
    one, two = teacher_of(trainer, "one"), teacher_of(trainer, "two")
    assert not storages(one) & storages(trainer.policy)
    alone = {name for name, weight in two.named_parameters() if weight.data_ptr() not in storages(one)}
    assert alone == {name for name, _ in two.named_parameters() if "lora_" in name} != set()
    of_row = torch.repeat_interleave(torch.arange(len(batch)) // 4 % 2 == 0, batch.lengths)
    expected = [direct(adapted(stored, name), own_prompts(batch), batch) for name in given]
    torch.testing.assert_close(batch.teacher_logprobs, torch.where(of_row, *expected), rtol=0, atol=2e-5)


def test_arguments_of_loading_give_an_adapter_a_base_of_its_own(tmp_path, stored):
    parts = {"model": str(stored / "base"), "peft_config": LoraConfig(**LORA)}
    settings = {"teacher": str(stored / "one"), "teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    trainer = runs.trainer(tmp_path, parts=parts, **settings)
    teacher = teacher_of(trainer)
    assert not storages(teacher) & storages(trainer.policy)
    assert teacher.get_base_model().dtype == torch.bfloat16


def test_the_policys_own_start_is_not_changed_by_a_teacher(tmp_path, stored):
    """Trained with and without a teacher that only measures, the weights are equal bit by bit."""

    def parts():
        return {"model": str(stored / "base"), "peft_config": LoraConfig(**LORA)}

    with_one, _ = trained(tmp_path / "a", parts=parts(), teacher=str(stored / "one"), teacher_coef=0.0)
    without, _ = trained(tmp_path / "b", parts=parts())
    assert all(map(torch.equal, runs.weights(with_one), runs.weights(without)))


def merged(stored):
    """The base with an adapter merged into it, which still has the base's name."""
    return adapted(stored, "two").merge_and_unload()


def unmerged(stored):
    """The base from which an adapter was subtracted after it had been added: it is rounded."""
    policy = adapted(stored, "two")
    policy.merge_adapter()
    policy.unmerge_adapter()
    return policy.unload()


def as_object(stored, dtype=torch.float32):
    return LlamaForCausalLM.from_pretrained(stored / "base", dtype=dtype)


PISSA = LoraConfig(**LORA, init_lora_weights="pissa")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts, shares",
    [
        (lambda at: {"model": as_object(at), "peft_config": LoraConfig(**LORA)}, True),
        (lambda at: {"model": get_peft_model(as_object(at), LoraConfig(**LORA))}, True),
        (lambda at: {"model": as_object(at, torch.bfloat16), "peft_config": LoraConfig(**LORA)}, True),
        (lambda at: {"model": merged(at), "peft_config": LoraConfig(**LORA)}, False),
        (lambda at: {"model": unmerged(at), "peft_config": LoraConfig(**LORA)}, False),
        (lambda at: {"model": str(at / "base"), "peft_config": PISSA}, False),
    ],
    ids=["a model", "with an adapter", "rounded", "already merged", "merged and unmerged", "changed by PiSSA"],
)
def test_a_base_is_shared_if_its_weights_are_those_that_its_name_promises(tmp_path, stored, parts, shares):
    settings = {"teacher": str(stored / "one"), "learning_rate": 0.0, "max_steps": 1}
    trainer = runs.trainer(tmp_path, parts=parts(stored), **settings)
    found, teacher = runs.experiences(trainer), teacher_of(trainer)
    assert bool(storages(teacher) & storages(trainer.policy)) == shares
    trainer.train()
    expected = adapted(stored, "one").to(teacher.get_base_model().dtype)
    for batch in found:
        scores = direct(expected, own_prompts(batch), batch)
        torch.testing.assert_close(
            batch.teacher_logprobs, scores.float(), rtol=0, atol=2e-5 if shares is False else 5e-2
        )


def test_a_base_that_is_compared_and_differs_is_loaded_once(tmp_path, stored, monkeypatch):
    loaded = []

    def load(*args, **settings):
        loaded.append(load_teacher(*args, **settings))
        return loaded[-1]

    monkeypatch.setattr(build, "load_teacher", load)
    parts = {"model": merged(stored), "peft_config": LoraConfig(**LORA)}
    trainer = runs.trainer(tmp_path, parts=parts, teacher=str(stored / "one"))
    assert len(loaded) == 1 and storages(teacher_of(trainer)) & storages(loaded[0])


@pytest.mark.parametrize("settings", [{"init_lora_weights": "pissa"}, {"bias": "all"}], ids=["PiSSA", "biases"])
def test_an_adapter_that_changes_weights_of_its_base_has_one_of_its_own(tmp_path, stored, settings):
    """PEFT replaces the base's weights when it loads such an adapter: neither the policy nor another teacher moves."""
    torch.manual_seed(3)
    changed = get_peft_model(as_object(stored), LoraConfig(**LORA, **settings))
    for name, weight in changed.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    changed.save_pretrained(tmp_path / "changed")
    rows = [{**row, "teacher": ("one", "changed")[number % 2]} for number, row in enumerate(tiny.rows())]
    given = {"changed": str(tmp_path / "changed"), "one": str(stored / "one")}
    parts = {"model": str(stored / "base"), "peft_config": LoraConfig(**LORA), "train_dataset": rows}
    trainer = runs.trainer(tmp_path, parts=parts, teacher=given)
    assert not storages(teacher_of(trainer, "changed")) & storages(trainer.policy)
    own = dict(as_object(stored).named_parameters())
    for name, weight in trainer.policy.get_base_model().named_parameters():
        if "lora_" not in name:
            assert torch.equal(weight, own[name.replace(".base_layer", "")]), name
    expected = PeftModel.from_pretrained(as_object(stored), tmp_path / "changed").state_dict()
    kept = teacher_of(trainer, "changed").state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("change", [{"base_model_name_or_path": None}, {"peft_type": "PREFIX_TUNING"}, {"r": 4}])
def test_an_adapter_that_cannot_be_a_teacher_is_refused(tmp_path, stored, change):
    shutil.copytree(stored / "one", tmp_path / "one")
    path = tmp_path / "one" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert codes(tmp_path / "run", teacher=str(tmp_path / "one")) == {"teacher-adapter"}


def test_an_adapter_is_checked_by_its_base(tmp_path, stored):
    """Neither tokenizer nor config are in its folder."""
    tiny.model(vocab_size=50).save_pretrained(tmp_path / "small")
    shutil.copytree(stored / "one", tmp_path / "one")
    path = tmp_path / "one" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(tmp_path / "small")}))
    assert codes(tmp_path / "run", teacher=str(tmp_path / "one")) == {"teacher-vocabulary"}


# ---- sources ---------------------------------------------------------------------------------------------------------

OF_SOURCES = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 1, "loss_type": "dapo",
    "teacher_loss": "divergence",
}  # fmt: skip


def by_source(trainer):
    """The first rollout batch, and [N] its tokens' sources."""
    seen, sample, found = [], trainer.rollouts.sample, runs.experiences(trainer)

    def sampling(key, samples, *given, **named):
        seen.extend(one.source for one in samples)
        return sample(key, samples, *given, **named)

    trainer.rollouts.sample = sampling
    trainer.train()
    batch = found[0]
    return batch, [name for name, length in zip(seen, batch.lengths.tolist(), strict=False) for _ in range(length)]


@pytest.mark.parametrize("own", [{}, {"average": "own"}, {"average": "own", "loss_weight": 3.0}])
def test_the_teachers_term_is_averaged_within_a_source_of_its_own_average(tmp_path, folders, own):
    """Over the tokens with a teacher of that source alone, times its share of the prompts or its weight."""
    hinted = [{**row, "teacher": "one" if number % 2 else None} for number, row in enumerate(tiny.rows(8))]
    data = {"sums": hinted, "code": tiny.rows(8)[::-1]}
    sources = {"sums": own, "code": {"teacher": "two", "max_completion_length": 2}}
    given = {name: str(folders / name) for name in ("one", "two")}
    parts = {"train_dataset": data, "sources": sources}
    trainer = runs.trainer(tmp_path, parts=parts, teacher=given, **OF_SOURCES)
    batch, names = by_source(trainer)
    tokens = batch.term_tokens["teacher"]
    weights = term_weights(batch, "teacher")
    in_sums = torch.tensor([name == "sums" for name in names])
    sums, code = (weights[where].sum().item() for where in (in_sums, ~in_sums))
    counts = [int(tokens[where].sum()) for where in (in_sums, ~in_sums)]
    assert 0 < counts[0] < int(in_sums.sum())
    if not own:
        assert (sums, code) == pytest.approx([count / sum(counts) for count in counts])
    else:
        assert (sums, code) == pytest.approx([own.get("loss_weight", 0.5), 0.5])
        assert weights[in_sums & (tokens > 0)].tolist() == pytest.approx([sums / counts[0]] * counts[0])


@pytest.mark.slow
@pytest.mark.parametrize("rewarded", [False, True])
def test_sources_with_a_teacher_need_no_rewards(tmp_path, folders, rewarded):
    """All of them, or one next to a source that is rewarded."""
    data = {"sums": tiny.rows(8), "code": tiny.rows(8)[::-1]}
    sources = {"sums": {"reward_funcs": runs.longer} if rewarded else {"teacher": "one"}, "code": {"teacher": "two"}}
    given = {name: str(folders / name) for name in ("one", "two")}
    parts = {"train_dataset": data, "sources": sources, "reward_funcs": None}
    trainer = runs.trainer(tmp_path, parts=parts, teacher=given, **OF_SOURCES)
    batch, names = by_source(trainer)
    taught = torch.tensor([name == "code" or not rewarded for name in names])
    assert torch.equal(batch.term_tokens["teacher"] > 0, taught)
    assert not batch.advantages[torch.tensor([name == "code" for name in names])].any()
    assert bool(batch.advantages.any()) == rewarded
    assert runs.history(trainer, "source/code/tokens")[0] > 0
    assert bool(runs.history(trainer, "source/sums/frac_advantage_zero")) == rewarded


@pytest.mark.parametrize("rewarded", [None, "code", "sums", "both"])
def test_groups_of_one_learn_from_a_teacher_alone(tmp_path, folders, rewarded):
    """Refused where a function rewards the source that has them."""
    data = {"sums": tiny.rows(8), "code": tiny.rows(8)[::-1]}
    sources = {"sums": {"num_generations": 1}, "code": {}}
    if rewarded in data:
        sources[rewarded]["reward_funcs"] = runs.longer
    parts = {"train_dataset": data, "sources": sources, "reward_funcs": runs.longer if rewarded == "both" else None}
    settings = {"parts": parts, "teacher": str(folders / "one"), **OF_SOURCES}
    if rewarded in ("sums", "both"):
        assert codes(tmp_path, **settings) == {"group-of-one"}
        return
    batch, names = by_source(runs.trainer(tmp_path, **settings))
    assert batch.term_tokens["teacher"].all() and {*names} == {*data}
    assert bool(batch.advantages.any()) == (rewarded == "code")


@pytest.mark.parametrize("own", [{"sampler": "difficulty"}, {"gates": {"signal": True}}])
def test_sources_without_rewards_cannot_choose_by_them(tmp_path, folders, own):
    data = {"sums": tiny.rows(8), "code": tiny.rows(8)[::-1]}
    parts = {"train_dataset": data, "sources": {"sums": own}, "reward_funcs": None}
    assert codes(tmp_path, parts=parts, teacher=str(folders / "one")) == {"reward-missing"}


def test_a_source_with_neither_rewards_nor_a_teacher_is_refused(tmp_path, folders):
    data = {"sums": tiny.rows(8), "code": tiny.rows(8)[::-1]}
    sources = {"sums": {"reward_funcs": runs.longer}}
    parts = {"train_dataset": data, "sources": sources, "reward_funcs": None}
    given = {"one": str(folders / "one")}
    rows = [{**row, "teacher": None} for row in data["code"]]
    assert codes(tmp_path, parts={**parts, "train_dataset": {**data, "code": rows}}, teacher=given) >= {"source-reward"}


# ---- prompts ---------------------------------------------------------------------------------------------------------


def facts(prompt="2+2=", solution=None, feedback=None, **row):
    rollout = Rollout([1], [5], [True], None, "", FinishReason.STOP)
    return TeacherPrompt(prompt, {"prompt": prompt, **row}, rollout, 1.0, solution, feedback)


def test_a_template_writes_the_text_or_the_last_message():
    template = "{prompt} Hint: {context}"
    assert template_prompt(template, facts(privileged_context="four")) == "2+2= Hint: four"
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    written = template_prompt(template, facts(messages, privileged_context="four"))
    assert written == [messages[0], {"role": "user", "content": "2+2= Hint: four"}]
    assert template_prompt("{prompt} {answer}", facts(answer=4)) == "2+2= 4"


@pytest.mark.parametrize("template", ["{prompt} {context}", "{solution}", "{feedback}", "{answer}"])
def test_a_rollout_that_lacks_a_field_has_no_teacher(template):
    assert template_prompt(template, facts(answer=None, privileged_context=float("nan"))) is None


def test_fields_of_a_template():
    assert fields_of("{prompt} {{x}} {solution}") == {"prompt", "solution"}


def test_a_rewarded_answer_of_the_group_is_shown_to_the_others(tmp_path):
    """The best answer for the others, the second best for the one that gave it."""
    template = "{prompt}|{solution}"
    settings = {"teacher": "policy", "teacher_prompt_template": template, "teacher_success_reward": 3.0}
    trainer = runs.trainer(tmp_path, **settings)
    given = []
    read = trainer.behaviour.teachers.codec.read
    trainer.behaviour.teachers.codec.read = lambda prompt, *a, **k: (given.append(prompt), read(prompt, *a, **k))[1]
    batches = []
    gather = trainer.credit.experience
    trainer.credit.experience = lambda rollouts, *a: (batches.append(rollouts), gather(rollouts, *a))[1]
    trainer.args.max_steps = 1
    trainer.train()
    shown = [prompt.partition("|")[2] for prompt in given if "|" in prompt][: len(batches[0].rollouts)]
    rewards = batches[0].rewards[:, 0].tolist()
    expected = []
    for number in range(len(rewards)):
        group = range(number // 4 * 4, number // 4 * 4 + 4)
        others = [place for place in group if place != number and rewards[place] >= 3.0]
        if others:
            expected.append(batches[0].rollouts[max(others, key=lambda place: rewards[place])].completion)
    assert shown == expected[: len(shown)] and len(shown) > 4


def test_a_function_makes_the_prompt(tmp_path):
    (tmp_path / "own.py").write_text(
        "def hint(x):\n    return x.prompt + '?' if x.row['prompt'][0] in '01' else None\n"
    )
    settings = {"teacher": "policy", "teacher_prompt_template": f"{tmp_path}/own.py:hint", "shuffle_dataset": False}
    _, (batch,) = trained(tmp_path / "run", **settings)
    question = torch.tensor(tiny.tokenizer()("?")["input_ids"])
    expected = direct(tiny.model(), [torch.cat([prompt, question]) for prompt in own_prompts(batch)], batch)
    known = ~batch.teacher_logprobs.isnan()
    assert known.any()
    torch.testing.assert_close(batch.teacher_logprobs[known], expected[known], rtol=0, atol=2e-5)


def test_rollouts_that_are_too_long_for_the_teacher_have_none(tmp_path):
    rows = [{**row, "hint": "x" * (300 if number % 2 else 3)} for number, row in enumerate(tiny.rows())]
    changes = {"teacher": "policy", "teacher_prompt": "hint", "shuffle_dataset": False}
    trainer, (batch,) = trained(tmp_path, rows, **changes)
    assert runs.history(trainer, "teacher/too_long") == [4.0]
    assert batch.teacher_logprobs.isnan().any() and not batch.teacher_logprobs.isnan().all()


# ---- wrong use -------------------------------------------------------------------------------------------------------


def codes(folder, rows=None, **changes):
    with pytest.raises(CheckError) as error:
        trained(folder, rows, **changes)
    return {finding.code for finding in error.value.findings}


HINTED = [{**row, "hint": "x"} for row in tiny.rows()]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("teacher-itself", {"teacher": "policy"}),
        ("teacher-unknown", {"teacher": {}}),
        ("settings-contradict", {"teacher": "policy", "teacher_prompt": "hint", "teacher_prompt_template": "{prompt}"}),
        ("setting-format", {"teacher": "start", "teacher_schedule": {"peak": 1.0}}),
        ("setting-format", {"teacher": "policy", "teacher_prompt_template": "no field"}),
        ("settings-contradict", {"teacher": "start", "teacher_loss": "divergence", "teacher_beta": 0.5}),
        ("advantages-tokens", {"teacher": "start", "loss_type": "gmpo"}),
        ("advantages-tokens", {"teacher": "start", "loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("teacher-column", {"teacher": "policy", "teacher_prompt": "absent"}),
        ("teacher-column", {"teacher": "policy", "teacher_prompt_template": "{prompt} {context}"}),
        ("teacher-column", {"teacher": {"a": "start"}}),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, code, changes):
    assert code in codes(tmp_path, HINTED, **changes)


def test_a_row_that_names_no_teacher_there_is(tmp_path):
    rows = [{**row, "teacher": "maths"} for row in tiny.rows()]
    assert codes(tmp_path, rows, teacher={"math": "start"}) == {"teacher-name"}


@pytest.mark.slow
def test_a_run_in_which_no_rollout_has_a_teacher(tmp_path):
    rows = [{**row, "hint": None} for row in tiny.rows()]
    given = {"teacher": "policy", "teacher_prompt": "hint"}
    trained(tmp_path / "two", rows, **given, max_steps=2)
    assert codes(tmp_path / "three", rows, **given, max_steps=3) == {"teacher-nothing"}


def test_answers_that_a_teacher_would_be_shown_may_come_later(tmp_path):
    template = {"teacher": "policy", "teacher_prompt_template": "{solution}", "teacher_success_reward": 99.0}
    with pytest.warns(CheckWarning) as caught:
        trained(tmp_path, **template, max_steps=3)
    codes = [one.message.finding.code for one in caught if isinstance(one.message, CheckWarning)]
    assert codes.count("teacher-nothing") == 1


def test_another_tokenizer_is_refused(tmp_path, folders):
    other = tiny.tokenizer()
    other.add_tokens(["<new>"])
    assert [one.code for one in check_tokenizer("b", tiny.tokenizer(), other)] == ["teacher-tokenizer"]
    assert not [*check_tokenizer("b", tiny.tokenizer(), tiny.tokenizer())]
    assert not [*check_tokenizer("b", other, tiny.tokenizer())]  # one token more, which the policy never samples


def test_a_teacher_without_logits_for_some_tokens_is_refused(tmp_path):
    small = tmp_path / "small"
    tiny.model(vocab_size=50).save_pretrained(small)
    assert codes(tmp_path / "run", teacher=str(small)) == {"teacher-vocabulary"}
    assert not [*check_vocabulary("b", 104, 128, tiny.tokenizer())]  # rows beyond the tokenizer's last id


def test_a_teacher_may_have_fewer_rows_than_the_policy(tmp_path, folders):
    """Rollouts with ids that it has no logits for have no teacher."""
    trainer = runs.trainer(
        tmp_path, parts={"model": tiny.model(vocab_size=128)}, teacher=str(folders / "one"), max_steps=1
    )
    assert trainer.behaviour.teachers.teachers[""].vocabulary == 104
    rollout = Rollout([5, 6], [7, 110], [True, True], None, "", FinishReason.STOP)
    teachers = trainer.behaviour.teachers
    samples = [type("S", (), {"row": {}, "prompt": 0})()] * 2
    scored = type("R", (), {"rollouts": [rollout, replace(rollout, completion_ids=[7, 8])], "samples": samples})()
    batch, _ = teachers(scored, collate(scored.rollouts), "train")
    assert batch.teacher_logprobs[:2].isnan().all() and batch.teacher_logprobs[2:].isfinite().all()


def test_settings_of_a_teacher_without_one_are_pointed_out(tmp_path):
    with pytest.warns(UserWarning, match="teacher_clip=2.0"):
        runs.trainer(tmp_path, teacher_clip=2.0)


def test_sync_ref_model_moves_the_state_of_an_adapter(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer, _ = trained(tmp_path, parts={"peft_config": adapter}, **settings, max_steps=2)
    kept = trainer.reference.state_dict()
    for name, one in trainer.policy.named_parameters():
        if one.requires_grad:
            assert torch.equal(kept[name], one.detach())


def test_a_prompt_that_is_none_is_named_by_its_column(tmp_path):
    rows = [{**row, "hint": 3} for row in tiny.rows(8)]
    with pytest.raises(CheckError, match="'hint'") as error:
        trained(tmp_path, rows, teacher="policy", teacher_prompt="hint")
    assert error.value.codes == ["prompt-type"]
