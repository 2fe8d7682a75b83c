"""The fields of the configs: names, types, defaults, and what construction does to them."""

import ast
import dataclasses
import json
import pickle
import re
import socket
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
import pytest
from transformers import HfArgumentParser, TrainingArguments

from covey.config import fields, hardware
from covey.config.base import OLD, OnlineConfig
from covey.config.fields import describe_fields, limited
from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig

INTERFACE = json.loads((Path(__file__).parents[1] / "data" / "interface.json").read_text())
CLASSES = {"GRPOConfig": GRPOConfig, "RLOOConfig": RLOOConfig}
PROMISED = [(cls, name) for cls in CLASSES for name in INTERFACE[cls]]


@pytest.mark.parametrize(("cls", "name"), PROMISED)
def test_promised_field_has_its_name_type_and_default(cls, name):
    promised = INTERFACE[cls][name]
    field = {f.name: f for f in dataclasses.fields(CLASSES[cls])}[name]
    assert field.default == ast.literal_eval(promised["default"])
    if "type" in promised:
        hint = str(get_type_hints(CLASSES[cls])[name]).replace("typing.", "")
        assert hint == promised["type"]


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_own_field_is_described(cls):
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    own = [f for f in dataclasses.fields(cls) if f.name not in inherited]
    assert len(own) > 80
    assert all(f.metadata.get("help") for f in own)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_help_describes_every_own_field(cls):
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    own = {f.name for f in dataclasses.fields(cls)} - inherited - OLD
    assert own <= set(re.findall(r"^    (\w+)(?: \(.*?\))?: .", cls.__doc__, re.MULTILINE))


def test_limits_are_known_without_source_files(monkeypatch):
    def no_source(module):
        raise OSError("could not get source code")

    @dataclasses.dataclass
    class Group:
        a_number: int = limited(1, ge=1)

    monkeypatch.setattr("inspect.getsource", no_source)
    monkeypatch.setattr("covey.config.fields.LIMITS", {})
    module = ModuleType(__name__)
    module.Group = Group
    monkeypatch.setitem(sys.modules, __name__, module)
    describe_fields(__name__)
    assert fields.LIMITS["a_number"].ge == 1
    assert Group.__dataclass_fields__["a_number"].metadata == {"help": ""}  # argparse is given all of it


WITHOUT_EFFECT = {
    "cache_implementation",
    "transformers_continuous_batching_config",
    "use_transformers_paged",
    "vllm_importance_sampling_cap",
}
"""Fields that are accepted for scripts that set them."""


@pytest.mark.slow
def test_every_own_field_is_read_somewhere():
    """A rule about a field is not a reader."""
    config = Path(hardware.__file__).parent
    outside = [path for path in config.parent.rglob("*.py") if path.parent != config]
    source = "".join(path.read_text() for path in [*outside, config / "base.py"])
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    own = {f.name for f in dataclasses.fields(RLOOConfig)} - inherited
    assert {name for name in own - OLD if not re.search(rf'\.{name}\b|"{name}"', source)} == WITHOUT_EFFECT


def test_rloo_has_every_field_of_grpo():
    grpo, rloo = ({f.name for f in dataclasses.fields(cls)} for cls in (GRPOConfig, RLOOConfig))
    assert grpo <= rloo
    assert rloo - grpo == {"normalize_advantages", "reward_clip_range"}


@pytest.mark.parametrize("cls", CLASSES.values())
def test_defaults_work_without_a_warning(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls()


@pytest.mark.parametrize("cls", CLASSES.values())
def test_round_trip_through_a_dict(cls):
    first = cls(steps_per_generation=4, num_generations=4, beta=0.1, generation_kwargs='{"seed": 1}', report_to="none")
    again = cls(**first.to_dict())
    assert again.to_dict() == first.to_dict()


def test_configs_can_be_pickled_and_replaced():
    args = GRPOConfig(num_generations=4)
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()
    assert dataclasses.replace(args, beta=0.5).beta == 0.5


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("lr_scheduler_kwargs", '{"power": "2"}', {"power": 2}),
        ("gradient_checkpointing_kwargs", ' {"use_reentrant": "false"}', {"use_reentrant": False}),
        ("deepspeed", "", None),
        ("optim_args", "", ""),
        ("deepspeed", False, False),
        ("hub_token", True, True),
        ("torch_compile_backend", "INDUCTOR", "inductor"),
        ("log_completions", np.True_, True),
    ],
)
def test_values_of_scripts_are_read_as_transformers_does(name, given, read):
    assert getattr(GRPOConfig(**{name: given}), name) == read


@pytest.mark.parametrize(("kind", "default"), [(str, None), (float, None), (Any, 3), (list[Any], (1,))])
def test_fields_of_a_subclass_are_not_checked(kind, default):
    own = dataclasses.make_dataclass("Own", [("extra", kind, default)], bases=(GRPOConfig,))
    assert own().extra == default


def test_argument_parser_of_transformers_reads_the_config():
    flags = [
        "--beta",
        "0.1",
        "--scale_rewards",
        "false",
        "--no_shuffle_dataset",
        "--reward_weights",
        "1",
        "2",
        "--log_completions",
    ]
    parser = HfArgumentParser(GRPOConfig)
    (args,) = parser.parse_args_into_dataclasses(
        [*flags, "--log_completions", "--generation_kwargs", '{"seed": 1}'], look_for_args_file=False
    )
    assert (args.beta, args.scale_rewards, args.reward_weights) == (0.1, "none", [1.0, 2.0])
    assert args.shuffle_dataset is False
    assert args.log_completions is True
    assert args.generation_kwargs == {"seed": 1}


def test_repr_shows_what_was_given_or_assigned(tmp_path):
    args = GRPOConfig(output_dir="out", num_generations=4, hub_token="secret", beta=0.1, use_cpu=True, bf16=False)
    args.temperature = 0.7
    names = [part.partition("=")[0] for part in repr(args).removeprefix("GRPOConfig(").split(", ")]
    assert sorted(names) == ["beta", "bf16", "hub_token", "num_generations", "output_dir", "temperature", "use_cpu"]
    assert "secret" not in repr(args) + str(args)
    assert "logprob_chunk_size=1024" in str(args)


def test_the_config_of_a_script_hides_keys_too():
    @dataclasses.dataclass
    class Mine(GRPOConfig):
        extra: int = 3

    args = Mine(output_dir="out", hub_token="secret", extra=4, use_cpu=True, bf16=False)
    assert "extra=4" in repr(args) and "secret" not in repr(args) + str(args) and "max_steps" not in repr(args)


def test_argument_parser_help_can_be_shown():
    assert "--reward_clip_range" in HfArgumentParser(RLOOConfig).format_help()


@pytest.mark.parametrize("written", [(-1, 1), [-1.0, 1.0], "-1,1", "[-1, 1]", tuple("-1,1")])
def test_reward_clip_range_is_read_from_pairs_and_text(written):
    assert RLOOConfig(reward_clip_range=written).reward_clip_range == (-1.0, 1.0)


def test_reward_clip_range_of_one_number_is_refused():
    with pytest.raises(ValueError, match=r"reward_clip_range='5' is not a pair"):
        RLOOConfig(reward_clip_range="5")


@pytest.mark.parametrize(
    ("written", "word"),
    [(True, "group"), (False, "none"), ("True", "group"), ("false", "none"), ("batch", "batch"), ("group", "group")],
)
def test_scale_rewards_becomes_a_word(written, word):
    assert GRPOConfig(scale_rewards=written).scale_rewards == word


@pytest.mark.parametrize("name", ["model_init_kwargs", "generation_kwargs", "chat_template_kwargs"])
def test_json_fields_take_dicts_and_text(name):
    assert getattr(GRPOConfig(**{name: '{"a": 1}'}), name) == {"a": 1}
    assert getattr(GRPOConfig(**{name: {"a": 1}}), name) == {"a": 1}
    with pytest.raises(ValueError, match=f"{name}='a=1' is not JSON"):
        GRPOConfig(**{name: "a=1"})
    with pytest.raises(ValueError, match=f"{name}=.* must be a dict.* list"):
        GRPOConfig(**{name: "[1]"})


def test_json_that_cannot_be_read_shows_no_secret():
    for value in ("{'api_key': 'K-1'}", [{"token": "K-1"}], '{"hf_token": "K-1", "hf_token": "K-1"}'):
        with pytest.raises(ValueError, match="model_init_kwargs") as error:
            GRPOConfig(output_dir="unused", model_init_kwargs=value)
        assert "K-1" not in str(error.value)


def test_a_name_given_twice_in_json_is_refused():
    with pytest.raises(ValueError, match=r"generation_kwargs=.*`top_p` is a duplicate key"):
        GRPOConfig(output_dir="unused", generation_kwargs='{"top_p": 0.5, "top_p": 0.9}')


@pytest.mark.parametrize(
    ("loss", "given", "resolved"), [("dapo", None, 0.2), ("dapo", 0.28, 0.28), ("cispo", 4.0, 4.0)]
)
def test_upper_clip_range_falls_back_to_epsilon(loss, given, resolved):
    args = GRPOConfig(loss_type=loss, epsilon_high=given, num_iterations=2)
    assert args.resolved_epsilon_high == resolved


@pytest.mark.parametrize("able", [True, False])
def test_bf16_follows_the_hardware_and_works_either_way(monkeypatch, able):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: able)
    args = GRPOConfig()
    assert args.bf16 is able
    assert args.use_cpu is able


@pytest.mark.parametrize("able", [True, False])
def test_bf16_that_is_asked_for_on_a_cpu_is_taken_with_a_warning_where_it_is_emulated(monkeypatch, able, recwarn):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: able)
    args = GRPOConfig(bf16=True)
    assert args.bf16 is True and args.use_cpu is True
    assert len([one for one in recwarn if "bf16=True" in str(one.message)]) == (not able)


def test_asking_for_fp16_or_float32_is_heeded():
    assert GRPOConfig(bf16=False).bf16 is False
    assert OnlineConfig.__dataclass_fields__["bf16"].default is None


@pytest.mark.parametrize(
    ("flags", "able"),
    [("fpu sse avx2", False), ("fpu avx512f avx512_bf16", True), ("fpu amx_bf16 amx_tile", True), ("", False)],
)
def test_cpu_flags_tell_whether_bf16_is_multiplied(tmp_path, monkeypatch, flags, able):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    assert hardware.cpu_multiplies_bf16(str(cpuinfo)) is able
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx2")  # as on a processor without them
    assert hardware.cpu_multiplies_bf16(str(cpuinfo)) is False
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert hardware.cpu_multiplies_bf16(str(cpuinfo)) is able


def test_a_system_without_cpuinfo_counts_as_unable(tmp_path):
    assert hardware.cpu_multiplies_bf16(str(tmp_path / "none")) is False


def test_old_checkpointing_name_is_in_force():
    assert GRPOConfig().gradient_checkpointing is True
    assert GRPOConfig(gradient_checkpointing=False).gradient_checkpointing is False


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"WORLD_SIZE": "2", "RANK": "1"},
            "covey: WORLD_SIZE=2, RANK=1, MASTER_ADDR=a, MASTER_PORT=1 in the environment",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ""),
        ({}, ""),
    ],
)
def test_variables_of_a_launch_are_named_before_it_is_waited_for(monkeypatch, capsys, given, says):
    """They may be left over from an earlier one, and the wait is as long as torch's."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    hardware.announce_meeting(use_cpu=True)
    said = capsys.readouterr().err
    assert said.startswith(says) and bool(said) == bool(says)
    assert not says or said.endswith("unset WORLD_SIZE RANK MASTER_ADDR MASTER_PORT\n")


def test_generation_kwargs_that_are_fields_set_them():
    given = {"top_k": 5, "temperature": 0.5, "max_new_tokens": 12, "stop": ["x"]}
    args = GRPOConfig(generation_kwargs=given, temperature=0.5, report_to="none")
    assert (args.top_k, args.temperature, args.max_completion_length) == (5, 0.5, 12)
    assert args.generation_kwargs == {"stop": ["x"]} and len(given) == 4


@pytest.mark.slow
def test_others_are_waited_for_as_long_as_ddp_timeout(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TimeoutError, match=r"2 processes did not join within ddp_timeout=1 s .* unset WORLD_SIZE"):
        hardware.meet_on_cpu(1)


@pytest.mark.parametrize("given", [{"WORLD_SIZE": ""}, {"WORLD_SIZE": "1", "RANK": "two"}, {"LOCAL_RANK": "x"}])
def test_variables_of_a_launch_are_numbers(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}='{value}' in the environment is not a whole number.*unset "):
        GRPOConfig(output_dir="unused", use_cpu=True)


LAUNCH = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc' in the environment is no port, a number from 1 to 65535"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT='99999'"),
        ({"MASTER_PORT": ""}, "but not MASTER_PORT: a launcher sets all of WORLD_SIZE, RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": None}, "RANK=0, .* in the environment, but not WORLD_SIZE"),
        ({"LOCAL_RANK": None, "MASTER_ADDR": None}, "but not MASTER_ADDR"),
        ({"RANK": "2"}, "RANK=2 in the environment is none of WORLD_SIZE=2 processes"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "1", "RANK": "3"}, "RANK=3"),
    ],
)
def test_variables_of_a_launch_that_cannot_work(monkeypatch, changes, says):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {**LAUNCH, **changes}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{says}.* For a run of one process: unset "):
        hardware.announce_meeting(use_cpu=True)


@pytest.mark.parametrize("port", [None, "0", "29500"])
def test_a_launch_of_one_process_needs_no_port(monkeypatch, port):
    for name, value in {**LAUNCH, "WORLD_SIZE": "1", "MASTER_PORT": port}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    hardware.announce_meeting(use_cpu=True)
