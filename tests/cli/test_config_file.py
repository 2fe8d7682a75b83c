"""Run files and flags: what is read, in which type, and who wins."""

import json

import pytest

from covey.cli.config_file import load_run, parse_flags
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig


@pytest.fixture
def write(tmp_path):
    def written(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


def test_a_file_names_the_run_and_its_settings(write):
    run = load_run(
        write(
            "method: rloo\nmodel: my/model\ndataset: data.jsonl\nreward_funcs: [a.b, c]\npeft: {r: 8}\n"
            "quantization: {load_in_4bit: true}\n"
            "learning_rate: 1e-5\neval_strategy: no\nnum_generations: 4\n"
        )
    )
    assert isinstance(run.args, RLOOConfig)
    assert (run.method, run.model, run.dataset, run.dataset_split) == ("rloo", "my/model", "data.jsonl", "train")
    assert (run.reward_funcs, run.peft) == (["a.b", "c"], {"r": 8})
    assert run.quantization == {"load_in_4bit": True}
    assert run.args.learning_rate == 1e-5
    assert run.args.eval_strategy == "no"


def test_json_files_are_read_too(write):
    run = load_run(write(json.dumps({"beta": 0.5, "reward_funcs": "one"}), "run.json"))
    assert isinstance(run.args, GRPOConfig)
    assert (run.args.beta, run.reward_funcs) == (0.5, ["one"])


def test_flags_win_over_the_file(write):
    run = load_run(
        write("beta: 0.5\nmodel: a\nlog_completions: true\n"),
        ["--beta", "0.25", "--model", "b", "--no_shuffle_dataset", "--reward_funcs", "x", "y"],
    )
    assert (run.args.beta, run.model, run.reward_funcs) == (0.25, "b", ["x", "y"])
    assert run.args.log_completions is True
    assert run.args.shuffle_dataset is False


def test_flags_take_the_type_of_their_field():
    flags = ["--beta", "1", "--num-generations", "4", "--log_completions", "--reward_weights", "1", "2", "--top_k=5"]
    given = parse_flags(flags)
    assert given == {
        "beta": 1.0,
        "num_generations": 4,
        "log_completions": True,
        "reward_weights": ["1", "2"],
        "top_k": 5,
    }


@pytest.mark.parametrize("where", ["file", "flag"])
def test_old_names_work_in_files_and_flags(write, where):
    path, flags = (write("kl_coef: 3e-1\n"), []) if where == "file" else (None, ["--kl_coef", "3e-1"])
    with pytest.warns(FutureWarning, match="`kl_coef` is called `beta` here"):
        assert load_run(path, flags).args.beta == 0.3


@pytest.mark.parametrize(
    ("file", "flags", "name", "value"),
    [
        ({}, ["--reward_weights", "1,2"], "reward_weights", [1.0, 2.0]),
        ({}, ["--reward-weights=[1, 2e-1]"], "reward_weights", [1.0, 0.2]),
        ({"reward_weights": "1 2"}, [], "reward_weights", [1.0, 2.0]),
        ({"reward_weights": ["1e-1", 2]}, [], "reward_weights", [0.1, 2.0]),
        ({}, ["--no-log-completions"], "log_completions", False),
        ({"bf16": True}, ["--no_bf16"], "bf16", False),
        ({}, ["--report_to", "wandb", "mlflow"], "report_to", ["wandb", "mlflow"]),
        ({"report_to": "wandb"}, ["--report_to", "none"], "report_to", []),
        ({"kl_coef": 0.3}, ["--beta", "0.1"], "beta", 0.1),
        ({"beta": 0.3}, ["--kl_coef", "0.1"], "beta", 0.1),
        ({"optim": "galore_adamw"}, ["--optim_target_modules", "attn", "mlp"], "optim_target_modules", ["attn", "mlp"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_lists_switches_and_old_names_as_flags(file, flags, name, value):
    assert getattr(load_run(file, flags).args, name) == value


@pytest.mark.parametrize(
    ("file", "flags", "adapter"),
    [
        ({}, ["--use_peft", "--lora_target_modules", "q_proj,v_proj"], {"target_modules": ["q_proj", "v_proj"]}),
        ({}, ["--use_peft", "--lora_target_modules", "all-linear"], {"target_modules": "all-linear"}),
        ({"peft": {"r": 4}}, ["--lora_r", "8"], {"r": 8}),
        ({"peft": {"r": 4}}, ["--use_peft"], {"r": 4, "lora_alpha": 32}),
    ],
)
def test_flags_of_adapters_go_before_the_file(file, flags, adapter):
    assert adapter.items() <= load_run(file, flags).peft.items()


def test_a_flag_given_twice_is_pointed_out():
    with pytest.warns(UserWarning, match=r"`--beta` is given 2 times; the last one is used"):
        assert parse_flags(["--beta", "0.1", "--beta=0.2"]) == {"beta": 0.2}


def test_names_of_other_run_files_are_understood(write):
    run = load_run(write("model_name_or_path: m\ndataset_name: d\ndataset_train_split: test\n"))
    assert (run.model, run.dataset, run.dataset_split) == ("m", "d", "test")


def test_advantage_estimator_chooses_the_method(write):
    with pytest.warns(FutureWarning, match="called `method`"):
        assert load_run(write("advantage_estimator: rloo\n")).method == "rloo"


def test_names_of_ms_swift_choose_the_method(write):
    with pytest.warns(FutureWarning, match="`rlhf_type` is called `method`"):
        assert load_run(write("rlhf_type: rloo\n")).method == "rloo"
    with pytest.warns(FutureWarning, match="`advantage_estimator` is called `method`"):
        assert load_run(write("rlhf_type: grpo\nadvantage_estimator: rloo\n")).method == "rloo"


def test_all_unknown_names_are_listed_under_the_method(write):
    with pytest.raises(TypeError) as caught:
        load_run(write("lora_rank: 8\n"), ["--learnig_rate", "1", "--modle=x"], method="grpo")
    assert str(caught.value) == (
        "`lora_rank` is no setting of a GRPO run: `lora_rank` is called `r` there: it belongs to the adapter: "
        "`peft: {r: ...}` in a run file, "
        "`peft_config=LoraConfig(r=...)` in a script. `learnig_rate` is no setting of a GRPO run. Did you mean "
        "`learning_rate`? `modle` is no setting of a GRPO run. Did you mean `model`?"
    )


def test_world_size_is_planned_for(write):
    # 2 completions in each of 4 processes make one group of 8; in 1 process they would not
    path = write("per_device_train_batch_size: 2\n")
    assert load_run(path, world_size=4).args.generation_batch_size == 8
    with pytest.raises(ValueError, match="cannot be cut into groups"):
        load_run(path)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("- a\n- b\n", ValueError, "must hold `field: value` lines, but holds a list"),
        ("a: [1\n", ValueError, "cannot be read"),
        ("", ValueError, "holds a NoneType"),
        ("modle: x\n", TypeError, "Did you mean `model`"),
        ("method: ppo\n", ValueError, "choose one of: grpo, rloo"),
        ("beta: high\n", ValueError, "beta='high' cannot be read"),
        ("reward_weights: [1, high]\n", ValueError, r"reward_weights=\[1, 'high'\]: give a list"),
        ("peft: 3\n", ValueError, "peft=3 must be a mapping"),
    ],
)
def test_mistakes_in_a_file_are_named(write, text, error, message):
    with pytest.raises(error, match=message):
        load_run(write(text))


def test_the_command_and_the_file_must_agree_on_the_method(write):
    with pytest.raises(ValueError, match="use `covey rloo`"):
        load_run(write("method: rloo\n"), method="grpo")


@pytest.mark.parametrize("flags", [["0.3"], ["--", "--beta", "0.3"]])
def test_a_stray_word_is_no_flag(flags):
    with pytest.raises(TypeError, match=rf"'{flags[0]}' stands where a flag should"):
        parse_flags(flags)


def test_missing_keys_are_named():
    (found,) = load_run(None, ["--model", "m"]).missing("model", "dataset")
    assert found.code == "run-incomplete"
    assert "--dataset" in found.fix


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.yaml", "beta: 0.1".encode("utf-16"), "not UTF-8 text"),
        ("run.yaml", "# café\nbeta: 0.1".encode("latin-1"), "not UTF-8 text"),
        ("run.json", b'{"beta": 0.1, "beta": 0.2}', "`beta` is a duplicate key"),
        ("run.yaml", b"output_dir: 2024-01-01", "output_dir: 2024-01-01 is read as a date"),
        ("run.yaml", b"output_dir: 7", "put it in quotes"),
        ("run.yaml", b"model: a\nmodel_name_or_path: b", "two names of one setting"),
        ("run.yaml", b"max_steps: yes", "max_steps=True"),
        ("run.yaml", b"beta: 0.1\nnum_generations: 010", "010 in line 2 would be 8"),
        ("run.yaml", b"max_steps: 1:30", "1:30 in line 1 would be 90"),
        ("run.yaml", b"on: 3", "has a key True"),
        ("run.yaml", b"5: 3", "has a key 5"),
        ("run.yaml", b"dataset: [a, b]", "dataset=['a', 'b'] must be text, not a list"),
        ("run.json", b'{"system_prompt": 5}', "system_prompt=5 must be text"),
        ("run.yaml", b"dataset_split: 5", "dataset_split=5 must be text"),
        ("run.yaml", b"peft: 'r: ['", "peft='r: [' cannot be read"),
        ("run.yaml", b"logging_steps: .inf", "logging_steps=inf is out of range"),
    ],
)
def test_a_file_that_would_be_misread_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_run(tmp_path / name)
    assert said in str(error.value)


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "run.yaml").write_text("beta: 0.1", encoding="utf-8-sig")
    assert load_run(tmp_path / "run.yaml").args.beta == 0.1


def test_flags_of_trls_example_scripts_are_read():
    flags = "--model_name_or_path m --dataset_name d --dataset_config main --dtype bfloat16 --use_peft --lora_r 8"
    flags += " --lora_target_modules q_proj, v_proj --reward_model_name_or_path r --load_in_4bit --report_to none"
    run = load_run(None, flags.split(), method="grpo")
    assert (run.model, run.dataset, run.reward_funcs) == ("m", "d:main", ["r"])
    assert run.peft == {"r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert (run.args.model_init_kwargs, run.quantization) == ({"dtype": "bfloat16"}, {"load_in_4bit": True})
    with pytest.raises(ValueError, match=r"r of an adapter, but no `use_peft`"):
        load_run(None, ["--lora_r", "8"], method="grpo")


def test_flags_may_be_written_with_dashes():
    flags = "--dataset-name d --dataset-config main --use-peft --lora-r 8 --load-in-4bit --reward-funcs a b"
    run = load_run(None, [*flags.split(), "--kl-coef=0.1", "--exp-name", "a-b"], method="grpo")
    assert (run.dataset, run.reward_funcs, run.args.beta, run.args.run_name) == ("d:main", ["a", "b"], 0.1, "a-b")
    assert (run.peft["r"], run.quantization) == (8, {"load_in_4bit": True})


def test_a_subset_without_a_dataset_names_none():
    assert load_run(None, ["--dataset_config", "main"]).dataset is None


def test_script_settings_that_are_off_are_not_given(write):
    run = load_run(write("use_peft: false\nload_in_4bit: false\n"))
    assert (run.peft, run.quantization) == (None, None)


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("modules_to_save", "lm_head", ["lm_head"]),
        ("target_parameters", "mlp.experts.down_proj", ["mlp.experts.down_proj"]),
        ("target_modules", "q_proj", ["q_proj"]),
        ("target_modules", "all-linear", "all-linear"),
        ("target_modules", r".*\.q_proj", r".*\.q_proj"),
    ],
)
def test_one_name_is_a_list_for_an_adapter(write, name, value, read):
    """Of a text peft takes each letter for the end of a module's name."""
    assert load_run(None, ["--use_peft", f"--lora_{name}", value]).peft[name] == read
    assert load_run(write(f"peft: {{{name}: '{value}'}}\n")).peft == {name: read}


def test_an_estimator_that_is_no_method_is_named(write):
    with pytest.raises(ValueError, match=r"advantage_estimator='reinforce_plus_plus' is not known; .*`advantages`"):
        load_run(write("rlhf_type: grpo\nadvantage_estimator: reinforce_plus_plus\n"))
