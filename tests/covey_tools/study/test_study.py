"""Studies: variants side by side are the runs that they would be alone."""

import functools
import json
import os
import signal
import threading
from dataclasses import asdict

import pytest
import torch
from accelerate.state import GradientState, PartialState
from safetensors.torch import load_file

from covey_tools.study import commands
from covey_tools.study.commands import Command
from covey_tools.study.study import Study
from covey_tools.study.variants import settings_of
from tests.support import runs, tiny
from tests.support.studies import ADAPTER, COMMON, adapters, completions, study

THREE = {
    "a": {},
    "b": {"learning_rate": 3e-2, "peft": {"r": 2, "lora_alpha": 2}},
    "c": {"loss_type": "dr_grpo", "temperature": 0.8, "seed": 7},
    "d": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
}


@pytest.mark.slow
def test_variants_are_their_solo_runs(tmp_path):
    study(tmp_path, THREE, max_steps=2).train()
    from peft import LoraConfig

    for name, changes in THREE.items():
        own = {**ADAPTER, **changes.get("peft", {})}
        settings = {key: value for key, value in changes.items() if key != "peft"}
        alone = runs.trainer(
            tmp_path / f"alone-{name}",
            parts={"peft_config": LoraConfig(task_type="CAUSAL_LM", **own)},
            **{**COMMON, "max_steps": 2, **settings},
        )
        alone.train()
        alone.save_model()
        for key, weight in adapters(tmp_path / f"alone-{name}").items():
            torch.testing.assert_close(adapters(tmp_path / name)[key], weight, atol=1e-5, rtol=0)
        assert completions(tmp_path / name) == completions(tmp_path / f"alone-{name}")


@pytest.mark.slow
def test_variants_are_sampled_from_one_rounded_model_and_corrected(tmp_path):
    from peft import LoraConfig

    with pytest.warns(UserWarning, match="engine_dtype='float8' does not make decoding faster"):
        made = study(tmp_path, {"a": {}, "b": {"seed": 7}}, max_steps=1, settings={"engine_dtype": "float8"})
        made.train()
        parts = {"peft_config": LoraConfig(task_type="CAUSAL_LM", **ADAPTER)}
        alone = runs.trainer(tmp_path / "alone", parts=parts, **{**COMMON, "max_steps": 1}, engine_dtype="float8")
        alone.train()
    assert completions(tmp_path / "a") == completions(tmp_path / "alone")
    assert runs.history(alone, "sampling/sampling_logp_difference/mean")[0] > 1e-4
    with pytest.raises(ValueError, match="one engine samples for all variants"):
        settings_of({**COMMON, "engine_dtype": "auto"}, {}, tmp_path / "c")
    with pytest.raises(ValueError, match="engine_dtype='int8' for one variant"):
        settings_of(COMMON, {"engine_dtype": "int8"}, tmp_path / "c")


class Killed(BaseException):
    pass


def kill_after(made, rounds):
    play = made.play_round

    def play_round():
        if made.round == rounds:
            raise Killed
        play()

    made.play_round = play_round
    with pytest.raises(Killed):
        made.train()


def weights_of(folder, names):
    return {name: adapters(folder / name) for name in names}


def assert_bit_equal(one, other):
    assert one.keys() == other.keys()
    for name, matrices in one.items():
        assert all(torch.equal(matrix, other[name][key]) for key, matrix in matrices.items()), name


@pytest.mark.slow
def test_a_killed_study_resumes_bit_exactly(tmp_path):
    def make(folder):
        made = study(tmp_path / folder, THREE, max_steps=4, save_rounds=2, eval_dataset=tiny.rows(2), eval_steps=2)

        def watch(study):
            if study.round >= 4 and "fast" not in study.variants:
                study.clone("a", "fast", learning_rate=3e-2)
            return ["b"] if study.variants["b"].step == 2 else []

        made.halving = watch
        return made

    whole = make("whole").train()
    kill_after(make("killed"), 6)  # a round after the clone has begun
    resumed = make("killed").train(resume=True)
    names = ["a", "c", "d", "fast"]
    assert_bit_equal(weights_of(tmp_path / "whole", names), weights_of(tmp_path / "killed", names))
    for name, variant in whole.items():
        assert asdict(variant) == asdict(resumed[name])
    assert {name: variant.status for name, variant in whole.items()} == {
        "a": "finished",
        "b": "stopped",
        "c": "finished",
        "d": "finished",
        "fast": "finished",
    }
    assert list(whole["a"].evaluations) == [2, 4] and len(whole["a"].evaluations[4]) == 2


@pytest.mark.slow
def test_a_signal_saves_all_variants_and_ends_the_study(tmp_path):
    two = {"a": {}, "b": {"learning_rate": 3e-2}}
    study(tmp_path / "whole", two, max_steps=3).train()
    made = study(tmp_path / "ended", two, max_steps=3)
    made.halving = lambda study: os.kill(os.getpid(), signal.SIGTERM) or [] if study.round == 2 else []
    with pytest.raises(SystemExit) as ended:
        made.train()
    assert ended.value.code == 143
    state = json.loads((tmp_path / "ended" / "study.json").read_text())
    assert [(one["step"], one["status"]) for one in state["variants"].values()] == [(2, "running")] * 2
    study(tmp_path / "ended", two, max_steps=3).train(resume=True)
    assert_bit_equal(weights_of(tmp_path / "whole", two), weights_of(tmp_path / "ended", two))


def test_a_secret_of_a_variant_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one of hub_token holds a secret") as said:
        study(tmp_path, {"a": {"hub_token": "hf_S"}})
    assert "hf_S" not in str(said.value)
    with pytest.raises(ValueError, match="one of learning_rate, model_init_kwargs holds a secret"):
        Command("change", "a", {"learning_rate": 1e-3, "model_init_kwargs": {"token": "hf_S"}})


def test_model_init_kwargs_load_the_model_of_all(tiny_folder, tmp_path):
    args = {
        **COMMON,
        "peft": ADAPTER,
        "output_dir": str(tmp_path),
        "model_init_kwargs": {"attn_implementation": "eager"},
    }
    made = Study(tiny_folder, {"a": {}}, {**args, "max_steps": 1}, runs.longer, tiny.rows())
    made.train()
    assert made.base.config._attn_implementation == "eager" and made.variants["a"].status == "finished"


@pytest.mark.slow
def test_a_variant_that_fails_ends_alone(tmp_path):
    ended = study(tmp_path / "both", {"good": {}, "bad": {"learning_rate": 1e38}}, max_steps=4).train()
    study(tmp_path / "alone", {"good": {}}, max_steps=4).train()
    assert ended["bad"].status == "failed" and ended["bad"].reason.startswith("FloatingPointError")
    assert ended["good"].status == "finished"
    for key, matrix in adapters(tmp_path / "alone/good").items():
        torch.testing.assert_close(adapters(tmp_path / "both/good")[key], matrix, atol=1e-5, rtol=0)


def test_why_a_variant_failed_is_said_without_secrets(tmp_path):
    made = study(tmp_path, {"a": {}})
    made._end(made.variants["a"], ValueError("refused: api_key=abcdefgh"))
    assert made.variants["a"].reason == "ValueError: refused: api_key=..."


@pytest.mark.slow
def test_interventions_act_within_one_step(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {}}, max_steps=5)
    acts = {
        2: lambda: made.stop("a"),
        3: lambda: made.clone("b", "fast", learning_rate=5e-2),
        4: lambda: (made.change("b", loss_type="dapo"), made.resume("a")),
    }
    seen = {}

    def watch(study):
        seen[study.round] = {name: (v.step, v.status) for name, v in study.variants.items()}
        if act := acts.pop(study.round, None):
            act()
        return []

    made.halving = watch
    ended = made.train()
    assert seen[3]["a"] == (2, "stopped") and seen[3]["b"] == (2, "running")
    assert seen[4]["fast"] == (3, "running") and seen[4]["b"] == (3, "running")
    assert all(variant.status == "finished" and variant.step == 5 for variant in ended.values())
    assert ended["fast"].parent == "b" and ended["b"].changes == {"loss_type": "dapo"}
    assert [point["learning_rate"] for point in ended["fast"].curve][-1] == 5e-2
    state = json.loads((tmp_path / "study.json").read_text())
    assert state["variants"]["fast"]["history"][0].startswith("step 3: cloned from b")
    assert "loss_type='dapo'" in (tmp_path / "study.md").read_text()


@pytest.mark.slow
def test_a_study_of_a_file_is_driven_from_the_command_line(tiny_folder, tmp_path, capsys, monkeypatch):
    import yaml

    from covey.cli.main import main
    from covey_tools.study.study import Study

    file = tmp_path / "study.yaml"
    rows = [json.dumps({"prompt": f"{i}+{i}="}) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    plan = {"grid": {"learning_rate": ["1e-2", "2e-2"], "peft.r": [2]}, "variants": {"rl": {"loss_type": "dapo"}}}
    run = {
        **{name: value for name, value in COMMON.items() if name != "learning_rate"},
        **{"model": str(tiny_folder), "dataset": str(tmp_path / "rows.jsonl"), "max_steps": 3, "peft": ADAPTER},
        **{"reward_funcs": ["tests.support.runs:longer"], "output_dir": str(tmp_path / "out")},
        **{"eval_dataset": str(tmp_path / "rows.jsonl"), "study": {**plan, "save_rounds": 2}},
    }
    file.write_text(yaml.safe_dump(run))
    play, folder = Study.play_round, str(tmp_path / "out")

    def play_round(self):
        if self.round == 1:
            assert main(["study", "clone", "rl", "--to", "slow", "--study", folder, "learning_rate=1e-3"]) == 0
        play(self)

    monkeypatch.setattr(Study, "play_round", play_round)
    assert main(["study", str(file)]) == 0
    assert main(["study", "show", "--study", folder]) == 0
    shown = capsys.readouterr().out
    assert "learning_rate=1e-2,r=2 | finished | 3" in shown and "&nbsp;&nbsp;slow | finished | 3" in shown
    assert shown.count("| difference to ") == 2 and not list((tmp_path / "out/commands").glob("*.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 1}, "max_staleness=1 is not possible in a study"),
        ({"bf16": True}, "all share one model"),
        ({"peft": {"use_dora": True}}, "it is a DoRA"),
        ({"peft": {"target_modules": ["embed_tokens", "q_proj"]}}, "it changes embeddings"),
        ({"peft": {"init_lora_weights": "pissa"}}, "'pissa' changes weights of the model, which all variants share"),
        ({"learning_rat": 1}, "learning_rat"),
        ({"save_steps": 5}, "save_rounds"),
        ({"eval_steps": 5}, "`eval_steps` is set for the study as a whole"),
        ({"output_dir": "elsewhere"}, "each variant has a folder of its name"),
        ({"max_concurrent_completions": 2}, "share one model and engine"),
        ({"save_only_model": True}, "from whole checkpoints"),
        ({"eval_on_start": True}, "`eval_steps` of the study"),
    ],
)
def test_settings_that_a_study_cannot_have_are_named(tmp_path, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        study(tmp_path, {"a": changes})


@pytest.mark.slow
def test_commands_that_cannot_be_carried_out_end_nothing(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {}}, max_steps=2)

    def ask(study):
        if study.round == 1:
            study.change("b", reward_funcs="no_such_module:reward")
            study.resume("a", learning_rate=1.0)
        return []

    made.halving = ask
    a, b = made.train().values()
    assert [(one.status, one.step, one.changes) for one in (a, b)] == [("finished", 2, {})] * 2
    assert "failed: a is running already" in a.history[0] and "no_such_module" in b.history[0]


WRONG = [
    ({"learnig_rate": 1e-3}, "no .*`learnig_rate`. Did you mean `learning_rate`"),
    ({"learning_rate": [1]}, r"learning_rate=\[1\] must be a number"),
    ({"temperature": -1.0}, "temperature=-1.0 is out of range"),
    ({"loss_type": "nonsense"}, "loss_type='nonsense' is not known"),
    ({"peft": {"r": 2}}, "peft=.* does not fit the checkpoint"),
    ({"num_iterations": 2}, "num_iterations=2 does not fit"),
    ({"num_ppo_epochs": 2}, "num_ppo_epochs=2 does not fit"),  # its old name
    ({"bf16": True}, "all share one model"),
    ({"max_staleness": 1}, "max_staleness=1 is not possible in a study"),
]


@pytest.mark.slow
def test_a_wrong_setting_is_refused_where_it_is_given(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {"temperature": 0.5}}, max_steps=2)
    tried = []

    def ask(study):
        if study.round == 1:
            before = {**GradientState._shared_state}, {**PartialState._shared_state}
            for changes, message in WRONG:
                for act in (lambda c: study.change("b", **c), lambda c: study.clone("b", "c", **c)):
                    with pytest.raises(ValueError, match=message):
                        act(changes)
                with pytest.raises(ValueError, match=message):
                    commands.send(tmp_path, Command("change", "b", changes))
                tried.append(changes)
            with pytest.raises(ValueError, match=r"no variant 'bb'; there are a, b\. Did you mean 'b'"):
                commands.send(tmp_path, Command("stop", "bb"))
            assert before == ({**GradientState._shared_state}, {**PartialState._shared_state})
        return []

    made.halving = ask
    ended = made.train()
    assert len(tried) == len(WRONG) and not any(one.history for one in ended.values())


@pytest.mark.slow
def test_commands_on_what_is_queued_are_known(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {}}, max_steps=3)

    def ask(study):
        if study.round == 1:
            commands.send(tmp_path, Command("clone", "a", {"learning_rate": 1e-3}, "c"))
            commands.send(tmp_path, Command("change", "c", {"temperature": 0.5}))
            for name, message in (("c", "there is a variant 'c' already"), ("a/c", "cannot be called")):
                with pytest.raises(ValueError, match=message):
                    commands.send(tmp_path, Command("clone", "b", {}, name))
        return []

    made.halving = ask
    ended = made.train()
    assert ended["c"].changes == {"learning_rate": 1e-3, "temperature": 0.5} and ended["c"].step == 3


@pytest.mark.slow
def test_a_study_that_has_ended_takes_no_command(tmp_path):
    study(tmp_path, {"a": {}}, max_steps=1).train()
    for kind in ("stop", "resume", "clone"):
        with pytest.raises(ValueError, match=f"has ended, so nothing would carry out `{kind} a`. From Python"):
            commands.send(tmp_path, Command(kind, "a"))
    assert not list(tmp_path.glob("commands/*"))
    made = study(tmp_path, {"a": {}}, max_steps=2)
    made.resume("a")
    assert made.train(resume=True)["a"].step == 2


def test_only_a_clone_has_a_new_name_and_optimizer():
    for further in ({"to": "b"}, {"fresh": True}):
        with pytest.raises(ValueError, match="`change` takes no new name"):
            Command("change", "a", {"beta": 0.1}, **further)


SAME = {"a": {"learning_rate": 1e-3}, "b": {}}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """`ended()` -> the folder of a study of `SAME` that has ended, which tests leave as it is."""

    @functools.cache
    def run():
        folder = tmp_path_factory.mktemp("ended")
        study(folder, SAME, max_steps=1).train()
        return folder

    return run


@pytest.mark.parametrize(
    ("variants", "base", "resume", "message"),
    [
        (
            {"x": {}, "b": {}},
            {},
            False,
            "holds another study: variant a=.* there and None here; variant x=None there and {} here",
        ),
        ({"x": {}}, {}, True, "variant x=None there and {} here. Give another `output_dir`"),
        ({**SAME, "new": {}}, {}, False, "study: variant new=None there and {} here. Give"),
        ({"a": {}, "b": {}}, {}, False, r"variant a={'learning_rate': 0.001} there and {} here"),
        (SAME, {"learning_rate": 0.5}, False, "learning_rate=0.01 there and 0.5 here"),
        (SAME, {"learning_rate": 0.5}, True, "learning_rate=0.01 there and 0.5 here"),
    ],
)
def test_the_folder_of_another_study_is_refused(ended, variants, base, resume, message):
    folder = ended()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        study(folder, variants, max_steps=1, **base).train(resume)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_further_setting_is_that_of_another_study(tmp_path, monkeypatch):
    study(tmp_path, SAME, max_steps=1).train()
    for name, value in {"temperature": 1.0, "log_completions": True}.items():  # the default, and what is shown
        monkeypatch.setitem(COMMON, name, value)
    study(tmp_path, SAME, max_steps=1).train(resume=True)
    monkeypatch.setitem(COMMON, "temperature", 0.5)
    with pytest.raises(ValueError, match=r"another study: temperature=1\.0 there and 0\.5 here\. Give"):
        study(tmp_path, SAME, max_steps=1).train()


@pytest.mark.slow
def test_the_same_study_goes_on_without_resume(tmp_path):
    kill_after(study(tmp_path, SAME, max_steps=3, save_rounds=1), 2)
    made = study(tmp_path, SAME, max_steps=3, save_rounds=1)
    play, played = made.play_round, []
    made.play_round = lambda: (played.append(made.round), play())
    with pytest.warns(UserWarning, match="holds this study: it continues after round 2"):
        ended = made.train()
    assert played == [2] and {variant.step for variant in ended.values()} == {3}


@pytest.mark.slow
def test_a_command_acts_once_where_variants_take_turns(tmp_path, monkeypatch):
    made = study(tmp_path, {"a": {}, "b": {}}, max_steps=6, eval_dataset=tiny.rows(1), eval_steps=1)
    asked, play, unlink, save = 4, made.play_round, commands.Path.unlink, made._save

    def at_checkpoints():  # so that a killed study continues in the same rounds
        assert all(v.checkpoint == f"{v.name}/checkpoint-{v.step}" for v in made._live() if v.step)
        save()

    made._save = at_checkpoints

    def play_round():
        if made.round == 0:  # b samples for its step while a evaluates
            made._proceed(made.variants["a"])
            [outcome] = made._sample().values()
            made._proceed(made.variants["a"], outcome)
        if made.round == asked:
            commands.send(tmp_path, commands.Command("clone", "a"))
        play()

    def killed(path, **own):
        if path.parent.name == commands.QUEUE:
            raise Killed
        unlink(path, **own)

    made.play_round = play_round
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(commands.Path, "unlink", killed)
        made.train()
    assert made.round <= asked + 2  # each has saved a checkpoint within the two rounds of its step
    resumed = study(tmp_path, {"a": {}, "b": {}}, max_steps=6, eval_dataset=tiny.rows(1), eval_steps=1)
    assert list(resumed.train(resume=True)) == ["a", "b", "a-2"]


@pytest.mark.slow
def test_new_variants_begin_when_a_study_goes_on(tmp_path):
    study(tmp_path, {"a": {}}, max_steps=1).train()
    with pytest.warns(UserWarning, match=r"'learning_rate': 1.0\} has no effect. Use `change`"):
        ended = study(tmp_path, {"a": {"learning_rate": 1.0}, "new": {}}, max_steps=1).train(resume=True)
    assert {name: (one.step, one.changes) for name, one in ended.items()} == {"a": (1, {}), "new": (1, {})}


@pytest.mark.slow
def test_all_commands_of_a_round_are_carried_out_in_order(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {}}, max_steps=2)

    def ask(study):
        if study.round == 1:
            study.change("a", learning_rate=1.0)
            study.change("a", temperature=0.5)
            study.change("b", learning_rate=1.0)
            study.stop("b")
        return []

    made.halving = ask
    a, b = made.train().values()
    assert (a.changes, a.status) == ({"learning_rate": 1.0, "temperature": 0.5}, "finished")
    assert (b.changes, b.status, b.step) == ({"learning_rate": 1.0}, "stopped", 1)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-a", "commands", "study.json", "x" * 201, 1])
def test_names_that_cannot_be_folders_are_refused(name):
    from covey_tools.study.commands import check_name

    with pytest.raises(ValueError, match="cannot be called"):
        check_name(name)


@pytest.mark.slow
def test_a_stopped_variant_stays_so_if_its_change_fails(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {}, "c": {}}, max_steps=4)

    def ask(study):
        if study.round == 1:
            study.stop("a")
            study.change("a", reward_funcs="no_such_module:reward")
            study.stop("b")
        if study.round == 2:
            study.change("b", reward_funcs="no_such_module:reward")
        return []

    made.halving = ask
    ended = made.train()
    assert [(one.status, one.step) for one in ended.values()] == [("stopped", 1), ("stopped", 1), ("finished", 4)]


@pytest.mark.slow
def test_a_fresh_clone_may_have_another_optimizer(tmp_path):
    made = study(tmp_path, {"a": {}}, max_steps=2)
    made.halving = lambda study: study.clone("a", "b", fresh=True, optim="sgd") or [] if study.round == 1 else []
    clone = made.train()["b"]
    assert (clone.status, clone.step) == ("finished", 2), clone.reason


def test_a_reward_that_is_not_named_is_refused_at_the_call(tmp_path):
    made = study(tmp_path, {"a": {}})
    with pytest.raises(ValueError, match=r"cannot be written to study\.json.*Name functions"):
        made.change("a", reward_funcs=runs.longer)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "change"])
def test_a_whole_model_obeys_as_its_turn_comes(tmp_path, kind):
    made = study(tmp_path, {"whole": {"peft": None}}, max_steps=2)
    made.stop("whole") if kind == "stop" else made.change("whole", learning_rate=1e-3)
    whole = made.train()["whole"]
    assert (whole.status, whole.step) == (("stopped", 1) if kind == "stop" else ("finished", 2))
    assert whole.history[0].startswith(f"step 1: {kind}")
    assert "covey-whole" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.slow
def test_a_kill_after_the_last_of_several_steps_loses_nothing(tmp_path):
    def make():
        return study(tmp_path, {"two": {"num_iterations": 2}, "a": {"max_steps": 5}}, max_steps=4, save_rounds=1)

    made = make()
    save = made._save

    def killed():
        if made.variants["two"].status == "finished":  # in a round of two steps, each with a checkpoint
            raise Killed
        save()

    made._save = killed
    with pytest.raises(Killed):
        made.train()
    assert [(one.status, one.reason) for one in make().train(resume=True).values()] == [("finished", "")] * 2


def test_points_of_a_grid_do_not_share_mappings():
    from covey_tools.study.plan import variants_of

    points = variants_of({"grid": {"peft": [{"lora_alpha": 4}], "peft.r": [2, 8]}}).values()
    assert [point["peft"] for point in points] == [{"lora_alpha": 4, "r": 2}, {"lora_alpha": 4, "r": 8}]


def test_rows_to_compare_on_are_asked_for(tmp_path):
    from covey_tools.study.plan import Halving

    with pytest.raises(ValueError, match="`eval_dataset` has 0 rows"):
        study(tmp_path, {"a": {}}, eval_steps=2)
    with pytest.raises(ValueError, match="give `eval_steps`"):
        study(tmp_path, {"a": {}}, eval_dataset=tiny.rows(2), halving=Halving())
    with pytest.raises(ValueError, match="compared by the study's rewards"):
        own = {"a": {"reward_funcs": "tests.support.runs:digits"}}
        study(tmp_path, own, eval_dataset=tiny.rows(2), reward_funcs=None)
    with pytest.raises(ValueError, match="eval_steps=0 must be a whole number"):
        study(tmp_path, {"a": {}}, eval_dataset=tiny.rows(2), eval_steps=0)


def test_rewards_named_in_the_settings_of_all_are_used(tmp_path, monkeypatch):
    monkeypatch.setitem(COMMON, "reward_funcs", ["tests.support.runs:digits"])
    made = study(tmp_path, {"a": {}, "b": {"reward_funcs": "tests.support.runs:longer"}})
    assert [variant.trainer.rewards.names for variant in made.variants.values()] == [["digits"], ["longer"]]


def test_changed_settings_reach_a_loaded_optimizer():
    from types import SimpleNamespace

    from covey_tools.study.variants import adopt_settings

    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias]}], lr=1.0, weight_decay=0.0)
    args = SimpleNamespace(learning_rate=0.5, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-3)
    adopt_settings(args, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    names = ("lr", "weight_decay", "betas", "eps")
    found = [tuple(group[name] for name in names) for group in optimizer.param_groups]
    assert found == [(0.5, 0.1, (0.8, 0.9), 1e-3), (0.5, 0.0, (0.8, 0.9), 1e-3)]


@pytest.mark.slow
def test_whole_models_are_trained_after_the_others(tmp_path):
    variants = {"whole": {"peft": None}, "a": {}, "rloo": {"peft": None, "method": "rloo", "seed": 1}}
    made = study(tmp_path, variants, max_steps=2, save_rounds=1)
    kill_after(made, 3)
    assert [variant.status for variant in made.variants.values()] == ["running", "finished", "waiting"]
    ended = study(tmp_path, variants, max_steps=2, save_rounds=1).train(resume=True)
    assert [(variant.status, variant.step) for variant in ended.values()] == [("finished", 2)] * 3
    for name, method, seed in (("whole", "grpo", 42), ("rloo", "rloo", 1)):
        alone = runs.trainer(tmp_path / f"alone-{name}", method, **{**COMMON, "max_steps": 2, "seed": seed})
        alone.train()
        alone.save_model()
        one, other = (load_file(tmp_path / folder / "model.safetensors") for folder in (name, f"alone-{name}"))
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_a_scale_that_overflows_ends_its_variant_alone(tmp_path):
    ended = study(tmp_path, {"good": {}, "bad": {"peft": {"lora_alpha": 1e40}}}, max_steps=2).train()
    assert [(one.status, one.step) for one in ended.values()] == [("finished", 2), ("failed", 0)]


@pytest.mark.slow
def test_a_variant_that_cannot_resume_stays_stopped(tmp_path):
    made = study(tmp_path, {"a": {}, "b": {}}, max_steps=3)

    def ask(study):
        if study.round in (1, 2):
            study.stop("b") if study.round == 1 else study.resume("b", reward_funcs="no_such_module:reward")
        return []

    made.halving = ask
    a, b = made.train().values()
    assert (a.status, b.status, b.step, b.changes) == ("finished", "stopped", 1, {})
    assert "no_such_module" in b.history[-1]


SERVER = {"use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False, "peft": {"r": 4}}


def test_with_a_server_whole_models_use_the_built_in_engine(tmp_path):
    common = {**SERVER, "vllm_server_port": 8001, "vllm_importance_sampling_mode": "token_truncate"}
    assert settings_of(common, {}, tmp_path)[2].use_vllm
    whole = settings_of(common, {"peft": None}, tmp_path)[2]
    assert not whole.use_vllm and whole.vllm_server_port == 8000


@pytest.mark.parametrize(
    ("common", "changes", "words"),
    [
        ({"vllm_mode": "colocate"}, {}, "Set vllm_mode='server'"),
        ({"vllm_lora_sync": "merged"}, {}, "Set vllm_lora_sync='adapter'"),
        ({}, {"vllm_server_port": 8001}, "all share one model and engine"),
        ({}, {"temperature": 0.7}, "all share one model and engine"),
    ],
)
def test_settings_that_one_server_cannot_have_are_refused(tmp_path, common, changes, words):
    with pytest.raises(ValueError, match=words):
        settings_of({**SERVER, **common}, changes, tmp_path)
