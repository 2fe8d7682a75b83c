"""Checks of `covey doctor` on rows, without a model."""

from types import SimpleNamespace

import pytest

from covey.trainer.evaluation.suites import EvalSuite
from covey_tools.doctor import data
from covey_tools.doctor.examined import ExaminedRun
from covey_tools.doctor.recorded import frozen, own_tokenizer
from tests.support import tiny


def asked(text, system=None):
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def run(rows, evaluations=None, **changes):
    args = SimpleNamespace(shuffle_dataset=True, prompt_sampler="uniform")
    given = {"rescores": True, "group": 8, "args": args, "evaluations": evaluations or {}, **changes}
    return SimpleNamespace(rows=rows, taken=rows, numbers=list(range(len(rows))), **given)


def found(check, *given, **changes):
    return [(one.code, one.level) for one in check(run(*given, **changes))]


@pytest.mark.parametrize(("blank", "level"), [(0, None), (1, "warning"), (4, "warning"), (5, "error"), (8, "error")])
def test_prompts_without_text_are_counted(blank, level):
    rows = [{"prompt": asked(" " if n < blank else "2+2?"), "answer": "4"} for n in range(8)]
    assert found(data.empty, rows) == ([("prompt-empty", level)] if level else [])
    assert found(data.empty, rows, rescores=False) == [], "an environment may add the text"


def test_text_of_the_models_own_choice_needs_no_prompt():
    assert found(data.empty, [{"prompt": ""}] * 8) == []


def test_an_image_is_a_prompt():
    rows = [{"prompt": asked([{"type": "image"}]), "answer": "cat"}] * 8
    assert found(data.empty, rows) == []


SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def test_rows_that_repeat_are_a_note_and_multiplied_ones_a_warning():
    assert found(data.repeated, SUMS) == []
    assert found(data.repeated, SUMS + SUMS[:5]) == []
    assert found(data.repeated, SUMS[:3] * 10) == [("data-repeated", "note")]
    assert found(data.repeated, SUMS + SUMS[:1] * 20) == [("data-repeated", "warning")]  # 21 of 45 are one row


def test_prompts_with_several_right_answers_are_told():
    joined = [{**row, "answer": str(answer)} for row in SUMS for answer in range(3)]
    assert found(data.contradicting, joined) == [("data-contradicts", "warning")]
    assert found(data.contradicting, joined, rescores=False) == [], "of an environment a column is a state"
    assert found(data.contradicting, SUMS * 3) == []


def test_rows_of_one_prompt_whose_states_differ_are_different():
    assert found(data.repeated, [{"prompt": "guess", "number": n} for n in range(20)]) == []


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{**row, "prompt": f"{row['prompt']} ({row['answer']})"} for row in SUMS], True),
        ([{**row, "prompt": f"The answer is {row['answer']}. {row['prompt']}"} for row in SUMS], True),
        (SUMS, False),
        (
            [{"prompt": f"say {word}", "answer": word} for word in ("red", "blue", "green", "white", "pink", "grey")]
            * 2,
            False,
        ),
    ],
    ids=["behind", "before", "not there", "nothing else to be read"],
)
def test_answers_at_one_place_of_prompts_are_noted(rows, told):
    assert found(data.answer_in_prompt, rows) == ([("answer-in-prompt", "note")] if told else [])


def test_evaluation_rows_that_are_trained_on_are_told():
    assert found(data.evaluation, SUMS[:15], {"": SUMS[15:]}) == []
    assert found(data.evaluation, SUMS[:15], {"": SUMS[10:]}) == [("eval-overlap", "warning")]
    held = [{**row, "source": "test"} for row in SUMS[:5]]  # a column that the training data lacks
    assert found(data.evaluation, SUMS[:15], {"sums": held}) == [("eval-overlap", "warning")]


def test_another_system_message_in_evaluation_is_told():
    brief, long = ([{**row, "prompt": asked(row["prompt"], text)} for row in SUMS] for text in ("brief", "explain"))
    assert found(data.evaluation, brief[:15], {"": long[15:]}) == [("eval-differs", "warning")]
    assert found(data.evaluation, brief[:15], {"": SUMS[15:]}) == [("eval-differs", "warning")]
    assert found(data.evaluation, brief[:15], {"": brief[15:]}) == []
    assert found(data.evaluation, brief[:8] + long[:8], {"": long[15:]}) == []


def test_sets_of_every_form_are_read():
    suite = EvalSuite(SUMS)
    assert data.sets_of(None) == {} and data.sets_of(SUMS) == {"": SUMS}
    assert data.sets_of({"a": suite, "b": SUMS}) == {"a": SUMS, "b": SUMS}


def ordered(signals, read=60, count=90):
    """An unshuffled run of 60 of 90 rows; `signals` of the first rows, the last that are read, and the others."""
    parts = iter(signals)

    def sampled_of(rows, size, max_tokens):
        signal = next(parts)
        return SimpleNamespace(signal=lambda group: signal, mean=signal / 2)

    args = SimpleNamespace(shuffle_dataset=False, prompt_sampler="uniform")
    rows = [{"prompt": str(number)} for number in range(count)]
    base, has_time = SimpleNamespace(limit=8), lambda code: True
    return found(data.order, rows, args=args, rows_read=read, base=base, sampled_of=sampled_of, has_time=has_time)


def test_rows_in_an_order_are_told_where_a_part_has_no_signal():
    assert ordered([1.0, 0.0, 0.0]) == [("data-order", "warning")]  # it ends in rows that teach nothing
    assert ordered([0.0, 0.0, 1.0]) == [("data-order", "error")]  # and here it never comes to others
    assert ordered([1.0, 0.5, 0.3]) == [], "a curriculum"
    assert ordered([0.0, 0.0, 0.0]) == [], "the task is the cause, not its order"


def test_an_unshuffled_run_is_judged_by_the_rows_that_it_reads():
    """Ten steps of four prompts come to 40 of 1,000 rows."""
    algebra = SimpleNamespace(updates_per_rollout_batch=1, generation_batch_size=32)
    trainer = SimpleNamespace(run=SimpleNamespace(algebra=algebra))
    own = SimpleNamespace(rows=range(1000), steps=10, group=8, trainer=trainer)
    own.args = SimpleNamespace(shuffle_dataset=False, prompt_sampler="uniform", dynamic_sample=False, gates=None)
    assert ExaminedRun.rows_read.fget(own) == 40
    own.args.shuffle_dataset = True
    assert ExaminedRun.rows_read.fget(own) == 1000


@pytest.mark.parametrize(("trained", "adapter", "told"), [(64, False, True), (64, True, False), (9000, False, False)])
def test_a_model_without_trained_weights_is_told(trained, adapter, told):
    described = {"model": {"weights": 100_000, "trained": trained, "adapter": adapter}}
    read = SimpleNamespace(described=described, has_learned=False)
    assert [one.code for one in frozen(read)] == (["weights-frozen"] if told else [])


def test_the_tokenizer_of_a_record_has_the_template_of_the_run(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    assert own_tokenizer(str(tmp_path), {"chat_template": "{{ 'other' }}"}).chat_template == "{{ 'other' }}"
    assert own_tokenizer(str(tmp_path), {"chat_template": None}).chat_template is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert own_tokenizer(str(tmp_path), {"chat_template": None}) is None, "a processor has its own"
