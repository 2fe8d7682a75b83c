"""Evaluations of a study, which all variants have in common, and what is made of them."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from covey_tools.study.command import rows_to_compare
from covey_tools.study.page import page_of
from covey_tools.study.plan import Halving
from covey_tools.study.progress import StudyDisplay
from covey_tools.study.report import rich_table, table
from covey_tools.study.variants import Variant
from tests.support import tiny
from tests.support.studies import study


@pytest.mark.slow
def test_equal_variants_are_seldom_called_different():
    import random

    from covey_tools.study.report import comparison
    from covey_tools.study.variants import Variant

    draw, wrong = random.Random(0), 0
    for _ in range(200):
        rewards = {name: [draw.gauss(0, 1) for _ in range(6)] for name in "abcdef"}
        variants = {name: Variant(name, {}, evaluations={1: one}) for name, one in rewards.items()}
        pairs = [difference for name in rewards for difference in comparison(variants, to=name)[1].values()]
        wrong += any(difference.is_real for difference in pairs)
    assert wrong <= 20  # 0.05 * 200 = 10, and three standard deviations of 3.1


def test_halving_stops_those_that_are_really_worse():
    from covey_tools.study.plan import Halving
    from covey_tools.study.variants import Variant

    def variant(name, rewards):
        made = Variant(name, {}, step=2, evaluations={2: rewards})
        made.turn = type("Running", (), {"ended": False})()
        return made

    noisy = [1.0, 0.0, 1.0, 0.6]
    rewards = {"best": [1.0, 0.9, 1.0, 0.8], "unsure": noisy, "worse": [0.1, 0.0, 0.1, 0.0], "worst": [0.0] * 4}
    made = type("Study", (), {"variants": {name: variant(name, one) for name, one in rewards.items()}})()
    assert Halving(0.5)(made) == ["worse", "worst"]
    assert Halving(0.25)(made) == ["worse", "worst"]  # "unsure" may be as good as the best one
    assert Halving(0.25, certain=False)(made) == ["unsure", "worse", "worst"]
    made.variants["lucky"] = variant("lucky", [4.0, -1.0, 4.0, -1.0])  # leads, and may be worse than all of them
    assert Halving(0.25)(made) == ["worse", "worst"]  # than "best"


OWN = (
    {"reward_funcs": "think_format_reward", "num_generations": 2, "temperature": 0.5},
    {"reward_weights": [2.0]},
    {"response_length": 3, "rloo_k": 2},  # old names of `max_completion_length` and `num_generations`
    {"top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.5},
    {"generation_kwargs": {"bad_words_ids": [[20]], "stop_strings": ["3"]}},
    {"method": "rloo"},
    {"seed": 7},
    {"allow_control_tokens": True},
)


@pytest.mark.slow
def test_variants_are_evaluated_with_the_settings_of_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "CHAT_TEMPLATE", "{{ more|default('') }}" + tiny.CHAT_TEMPLATE)
    asked = {"system": {"system_prompt": "Be brief."}, "template": {"chat_template_kwargs": {"more": "think"}}}
    variants = {"a": {}} | {"-".join(changes): changes for changes in OWN} | asked
    held_out = [{"prompt": [{"role": "user", "content": f"<eos>{i}+{i}="}]} for i in range(3)]
    data = {"train_dataset": tiny.rows(conversational=True), "eval_dataset": held_out}
    ended = study(tmp_path, variants, max_steps=1, learning_rate=0.0, **data).train()  # the model does not change
    found = {name: variant.evaluations[1] for name, variant in ended.items()}
    others = [found.pop(name) for name in asked]  # another prompt is another policy
    assert found == dict.fromkeys(found, found["a"]) and found["a"] not in others and len(found["a"]) == 3


def test_settings_of_the_study_itself_cause_no_warning(tmp_path, recwarn):
    made = study(tmp_path, {"a": {}, "b": {"beta": 0.1}}, max_steps=1)
    assert [str(one.message) for one in recwarn if "has no effect" in str(one.message)] == []
    assert {variant.name for variant in made.variants.values()} == {"a", "b"}


@pytest.mark.slow
def test_settings_of_all_need_not_make_a_run_by_themselves(tmp_path):
    """A batch of 4 cannot be cut into groups of 8, which no variant has."""
    common = {"num_generations": 8, "gradient_accumulation_steps": 1, "max_steps": 1}
    variants = {"a": {"num_generations": 2}, "b": {"num_generations": 4}}
    ended = study(tmp_path, variants, eval_dataset=tiny.rows(2), **common).train()
    assert [len(variant.evaluations[1]) for variant in ended.values()] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("saves", [{}, {"save_rounds": 1}])
def test_halving_acts_at_the_step_of_an_evaluation(tmp_path, saves):
    variants = {name: {"seed": seed} for seed, name in enumerate("abcd")}
    rule = Halving(certain=False)
    made = study(tmp_path, variants, max_steps=4, eval_dataset=tiny.rows(2), eval_steps=[1, 3], halving=rule, **saves)
    ended = made.train()
    assert sorted(variant.step for variant in ended.values()) == [1, 1, 3, 4]
    assert sorted(max(variant.evaluations) for variant in ended.values()) == [1, 1, 3, 4]
    assert {variant.status for variant in ended.values()} == {"stopped", "finished"}
    best = max(ended.values(), key=lambda variant: sum(variant.evaluations[1]))
    assert best.step > 1
    stopped = next(name for name, variant in ended.items() if variant.step == 1)
    made = study(tmp_path, variants, max_steps=4, eval_dataset=tiny.rows(2), eval_steps=[1, 3], halving=rule, **saves)
    made.resume(stopped)  # at that step, of which it has a checkpoint
    assert list(made.train(resume=True)[stopped].evaluations)[:2] == [1, 3]


def test_later_variants_are_compared_with_all_that_were_there():
    from covey_tools.study.variants import Variant

    def variant(name, step, live, *rewards):
        made = Variant(name, {}, step=step, evaluations=dict(rewards))
        made.turn = type("Turn", (), {"ended": not live})()
        return made

    good, bad = [1.0, 0.9, 1.0, 0.8], [0.1, 0.0, 0.1, 0.0]
    ended, late = variant("ended", 4, False, (2, good), (4, good)), variant("late", 2, True, (2, bad))
    coming, far = variant("coming", 1, True), variant("far", 1, True)

    def stopped(*variants):
        return Halving(0.5)(type("Study", (), {"variants": {one.name: one for one in variants}})())

    assert stopped(ended, late) == ["late"]
    assert stopped(ended, late, coming) == []  # it will be evaluated at step 2, too
    assert stopped(ended, variant("late", 4, True, (2, good), (4, bad)), far) == ["late"]  # far is not waited for


@pytest.mark.parametrize("keep", [0, 1, 2, True, "half"])
def test_the_share_to_keep_is_checked(keep):
    with pytest.raises(ValueError, match="is the share of variants to keep"):
        Halving(keep)


@pytest.mark.slow
@pytest.mark.pages
def test_the_page_shows_curves_and_descent(tmp_path):
    made = study(tmp_path, {"a": {}, "b<i>": {}}, max_steps=2, eval_dataset=tiny.rows(2), eval_steps=1)

    def clone(study):
        if study.round == 1:
            study.clone("a", "child", learning_rate=1.0)
        return []

    made.halving = clone
    made.train()
    shown = page_of(tmp_path)
    assert {"a", "b<i>", "child"} == shown["curves"][0]["series"].keys() and len(shown["curves"]) >= 3
    assert "&nbsp;&nbsp;child" in [row[0] for row in shown["rows"]]


def test_a_setting_of_several_lines_is_one_cell():
    from covey_tools.study.report import table
    from covey_tools.study.variants import Variant

    changes = {"system_prompt": "Think first.\n\nThen | answer."}
    *_, a, b = table({"a": Variant("a", changes), "b": Variant("b", {})}).splitlines()
    assert a.endswith("| system_prompt=Think first. Then / answer.") and b.startswith("b | ")


def test_a_variant_without_rewards_is_not_the_best():
    from covey_tools.study.report import comparison, table
    from covey_tools.study.variants import Variant

    unknown = Variant("a", {}, evaluations={1: [float("nan")] * 2})
    assert comparison({"a": unknown}) == (None, {}) and table({"a": unknown}).endswith("a | running | 0 |  |  | ")
    both = {"a": unknown, "b": Variant("b", {}, evaluations={1: [-1.0, -2.0]})}
    assert comparison(both) == ("b", {}) and comparison(both, to="a") == ("a", {})


def evaluated(**rewards):
    return {name: Variant(name, {}, evaluations={1: list(one)}) for name, one in rewards.items()}


def test_none_is_the_best_while_a_difference_may_be_chance():
    """Rewards that differ by 1 on every prompt are certain; those that are the same, or differ by chance, are not."""
    equal = evaluated(a=[0.5, 0.5, 0.5], b=[0.5, 0.5, 0.5])
    noisy = evaluated(a=[0.9, 0.1, 0.6], b=[0.1, 0.8, 0.5])
    certain = evaluated(a=[1.0, 1.1, 1.0, 1.15], b=[0.0, 0.1, 0.0, 0.1])
    assert [table(one).count("| best |") for one in (equal, noisy, certain)] == [0, 0, 1]


def test_a_terminal_shows_every_cell_of_the_table():
    text = table(evaluated(a=[1.0, 1.0], b=[0.0, 0.5]))
    shown = rich_table(text)
    assert shown.row_count == 2 and len(shown.columns) == len(text.splitlines()[0].split(" | "))


class Screen:
    """A display of a study off a terminal, with a clock that is set by hand."""

    def __init__(self, hidden=False):
        self.out, self.now = io.StringIO(), 0.0
        self.display = StudyDisplay(Console(file=self.out, width=200), lambda: self.now, hidden)

    def lines(self, seconds):
        for number in range(seconds):
            self.now = float(number)
            self.display.show_round(number, evaluated(a=[1.0]))
        return self.out.getvalue().splitlines()


def test_off_a_terminal_rounds_are_told_now_and_then():
    assert len(Screen().lines(25)) == 3  # at 0, 10 and 20 s
    assert Screen(hidden=True).lines(25) == []


def test_what_a_round_does_is_shown_with_every_variant():
    screen = Screen()
    screen.display.show_round(3, evaluated(small=[1.0, 0.5], fast=[]))
    screen.display.doing("sampling for 2 variants")
    screen.display.console.print(screen.display)
    shown = screen.out.getvalue()
    assert all(part in shown for part in ("small", "fast", "0.750", "sampling for 2 variants"))


def test_a_mapping_of_evaluation_sets_is_compared_on_all_their_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(3)))
    sets = {"a": {"dataset": str(rows), "temperature": 0}, "b": str(rows)}
    run = SimpleNamespace(eval_dataset=sets, columns=None)
    with pytest.warns(UserWarning, match="temperature"):
        assert [row["prompt"] for row in rows_to_compare(run)] == ["0", "1", "2"] * 2
