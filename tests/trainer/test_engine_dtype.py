"""Runs whose engine rounds: what is corrected, what `auto` chooses and when, and what cannot round."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from covey.core.findings import CheckError, CheckWarning
from covey.engines.native import number_formats
from covey.engines.native.number_formats import FloatProduct
from covey.trainer.engines import rounding
from covey.trainer.engines.rounding import (
    LARGEST_DIFFERENCE,
    MeasuredFormat,
    decision,
    first_prompts,
    gains,
    logprob_difference,
    measure,
    rounded_share,
)
from tests.support import runs, tiny
from tests.support.engines import CopyEngine

GAP = "sampling/sampling_logp_difference/mean"
OFF_POLICY = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
SLOW = pytest.mark.filterwarnings("ignore:engine_dtype=.* does not make decoding faster")
pytestmark = SLOW


class AsFast(FloatProduct):
    """A product that this machine is said to be faster with."""

    name = "as fast"


@pytest.fixture
def fast(monkeypatch):
    """A machine with fast products of int8 and of bfloat16."""
    for name in ("int8", "bfloat16"):
        monkeypatch.setitem(number_formats.FAST, ("cpu", name), (lambda: True, AsFast))


def measuring(monkeypatch, difference=0.01, **gains):
    """A machine on which formats have these gains, and a model whose log-probs they change by `difference`."""
    monkeypatch.setattr(rounding, "gains", lambda run, engine: gains)
    monkeypatch.setattr(rounding, "logprob_difference", lambda engine, dtype, *given: difference)


def by_format(**pairs):
    return {name: MeasuredFormat(*pair) for name, pair in pairs.items()}


# ---- correction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "float8", "bfloat16"])
def test_samples_of_a_rounded_policy_are_corrected(tmp_path, dtype):
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.01}
    trainer = runs.trainer(tmp_path, engine_dtype=dtype, max_steps=1, **settings, **OFF_POLICY)
    kept = runs.scored(trainer)
    trainer.train()
    (batch, scored), *_ = kept
    torch.testing.assert_close(batch.mismatch_weights, (scored - batch.engine_logprobs).exp().clamp(max=1.01))
    gap = (scored - batch.engine_logprobs).abs().mean().item()
    assert gap > 1e-4
    assert runs.history(trainer, GAP) == [pytest.approx(gap, rel=1e-3)]


def test_without_rounding_nothing_is_corrected(tmp_path):
    trainer = runs.trainer(tmp_path)
    assert trainer.run.algorithm.objective.correction is None
    assert trainer.collector.engine.traits.samples_policy


def test_an_uncorrected_rounded_run_is_warned_about(tmp_path):
    with pytest.warns(CheckWarning) as found:
        trainer = runs.trainer(tmp_path, engine_dtype="int8", vllm_importance_sampling_correction=False)
    assert "engine-dtype-uncorrected" in [one.message.finding.code for one in found]
    assert trainer.run.algorithm.objective.correction is None


def test_evaluations_and_single_prompts_are_sampled_from_the_rounded_policy(tmp_path):
    parts = {"eval_dataset": tiny.rows(4)}
    settings = {"per_device_eval_batch_size": 4, "engine_parity": "off"}
    trainer = runs.trainer(tmp_path, parts=parts, engine_dtype="int8", **settings)
    assert trainer.evaluate()[f"eval_{GAP}"] > 1e-4
    assert isinstance(trainer.generate("1+1="), str)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"speculative_reuse": "exact"}, {"top_k": 5, "keep_sampling_mask": True}])
def test_it_goes_with_drafts_and_masks(tmp_path, settings):
    trainer = runs.trainer(tmp_path, engine_dtype="int8", max_steps=4, **settings)
    trainer.train()
    assert all(0 < gap < 0.3 for gap in runs.history(trainer, GAP))


@pytest.mark.slow
def test_it_goes_with_an_adapter(tmp_path):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    trainer = runs.trainer(tmp_path, parts={"peft_config": config}, engine_dtype="int8")
    trainer.train()
    assert all(0 < gap < 0.3 for gap in runs.history(trainer, GAP))


def test_opponents_are_not_rounded(tmp_path):
    async def play(row, engine):
        episode = engine.begin()
        await episode.sample()
        return episode.done()

    parts = {"rollout_func": play, "seats": {"other": "frozen"}}
    trainer = runs.trainer(tmp_path, parts=parts, engine_dtype="int8")
    seat = trainer.collector.spec.seats["other"]
    assert trainer.collector.engine.dtype == "int8" and seat._engine.dtype is None


# ---- resuming, recording, replaying ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, OFF_POLICY], ids=["on-policy", "off-policy"])
def test_resuming_is_exact(tmp_path, settings):
    settings = {"engine_dtype": "int8", "max_steps": 4, **settings}
    straight = runs.trainer(tmp_path, save_strategy="steps", save_steps=2, **settings)
    straight.train()
    resumed = runs.trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))
    assert runs.history(straight, GAP) == runs.history(resumed, GAP)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "later"), [({"int8": 2.0}, {"int8": 1.0}), ({"int8": 1.0}, {"int8": 2.0})])
def test_a_resumed_run_takes_the_format_of_its_checkpoint(tmp_path, monkeypatch, first, later):
    """Whatever is measured when it is resumed, as on a machine that is busy."""
    settings = {"engine_dtype": "auto", "max_steps": 4}
    measuring(monkeypatch, **first)
    straight = runs.trainer(tmp_path, save_strategy="steps", save_steps=2, **settings)
    straight.train()
    chosen = straight.collector.engine.dtype
    measuring(monkeypatch, **later)
    resumed = runs.trainer(tmp_path, **settings)
    assert resumed.collector.engine.dtype != chosen
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.collector.engine.dtype == chosen
    assert resumed.behaviour.engine_check.tolerance == straight.behaviour.engine_check.tolerance
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))
    assert runs.history(straight, GAP) == runs.history(resumed, GAP)


def test_a_replay_of_a_rounded_run_is_corrected(tmp_path):
    first = runs.trainer(tmp_path / "first", engine_dtype="int8", record="tokens")
    first.train()
    described = json.loads(next((tmp_path / "first").rglob("run.json")).read_text())
    assert described["engine"]["rounded_to"] == "int8"
    again = runs.trainer(tmp_path / "again", replay_from=str(tmp_path / "first"))
    again.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(first), runs.weights(again), strict=True))


# ---- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([{}], None),
        ([by_format(int8=(1.19,), bfloat16=(1.0,))], None),
        ([by_format(int8=(1.21, 0.04), bfloat16=(1.0,))], "int8"),
        ([by_format(int8=(1.3, 0.04), bfloat16=(1.4, 0.01))], "bfloat16"),
        ([by_format(int8=(2.0, 0.01)), by_format(int8=(1.1,))], None),  # every process has to gain
        ([by_format(int8=(2.0, 0.01)), {}], None),
        ([by_format(int8=(2.0, 0.05))], "int8"),
        ([by_format(int8=(2.0, 0.051))], None),  # as fast as can be, and other samples
        ([by_format(int8=(2.0, 0.16), bfloat16=(1.3, 0.014))], "bfloat16"),  # as SmolLM2 measures
        ([by_format(int8=(2.0, 0.01)), by_format(int8=(2.0, 0.06))], None),  # the largest difference counts
        ([by_format(int8=(2.0, float("nan")))], None),
        ([by_format(int8=(2.0, 0.01)), by_format(int8=(2.0, float("nan")))], None),
    ],
)
def test_auto_rounds_where_a_step_is_a_fifth_faster_and_log_probs_are_close_in_every_process(found, chosen):
    assert decision(found)[0] == chosen


@pytest.mark.parametrize(
    ("gain", "difference", "chosen"),
    [(1.5, 0.02, "int8"), (1.1, 0.02, None), (1.5, 2 * LARGEST_DIFFERENCE, None)],
)
def test_auto_decides_by_what_was_measured_and_says_so(tmp_path, monkeypatch, gain, difference, chosen):
    measuring(monkeypatch, difference, int8=gain)
    trainer = runs.trainer(tmp_path, engine_dtype="auto")
    assert trainer.collector.engine.dtype == chosen == trainer.rounding.state_dict()["rounded_to"]
    assert (trainer.run.algorithm.objective.correction is not None) == (chosen is not None)
    said = trainer.rounding.reason
    assert f"auto: {chosen or 'not rounded'}" in said and f"{gain:.2f} times as fast" in said
    assert (f"{difference:.2g} apart" in said) == (gain > 1.2)
    assert "at least 1.2 times" in said and "at most 0.05" in said


@pytest.mark.usefixtures("fast")
def test_log_probs_are_compared_only_of_formats_that_gain(tmp_path, monkeypatch):
    trainer, asked = runs.trainer(tmp_path), []
    monkeypatch.setattr(rounding, "gains", lambda run, engine: {"bfloat16": 1.1, "int8": 1.4})
    monkeypatch.setattr(rounding, "logprob_difference", lambda engine, dtype, *given: asked.append((dtype, *given)))
    found = measure(trainer.run, trainer.collector.engine, lambda: [[5, 6, 7]])
    assert found == by_format(bfloat16=(1.1, None), int8=(1.4, None))
    assert asked == [("int8", [[5, 6, 7]], trainer.args.max_completion_length, 1.0)]
    assert trainer.collector.engine.dtype is None


@pytest.mark.slow
def test_the_difference_is_that_between_the_rounded_engine_and_the_policy(tmp_path):
    """Without rounding the engine samples from the policy, and there is none."""
    trainer = runs.trainer(tmp_path)
    engine, prompts = trainer.collector.engine, [[5, 6, 7], [8, 9]]
    found = {name: logprob_difference(engine, name, prompts) for name in (None, "bfloat16", "int8", "float8")}
    assert found[None] < 1e-5 < found["bfloat16"] < found["int8"] < found["float8"] < 1
    assert logprob_difference(engine, "int8", prompts, temperature=0.5) > 1.5 * found["int8"]
    assert engine.dtype is None


def test_log_probs_are_compared_after_the_dataset_s_first_prompts(tmp_path):
    rows = [{"prompt": "1+1="}, {"prompt": 3}, {"prompt": "2+2="}]
    codec = runs.trainer(tmp_path).collector.codec
    assert first_prompts(codec, rows) == [codec.read_row(rows[number]).ids for number in (0, 2)]
    assert first_prompts(codec, iter(rows)) == first_prompts(codec, None) == []


def test_no_more_rows_are_read_than_compared_and_random_numbers_are_drawn_again(tmp_path):
    read = []

    class Augmented:
        def __len__(self):
            return 16

        def __getitem__(self, number):
            read.append(number)
            return {"prompt": f"{random.randrange(9)}+{torch.randint(9, ()).item()}={number}"}

    codec = runs.trainer(tmp_path).collector.codec
    before = random.getstate(), torch.get_rng_state()
    prompts = first_prompts(codec, Augmented())
    after = random.getstate(), torch.get_rng_state()
    assert len(prompts) == 4 and read == [0, 1, 2, 3]
    assert after[0] == before[0] and torch.equal(after[1], before[1])


def test_auto_measures_nothing_where_no_format_is_faster(tmp_path, monkeypatch):
    for name in ("int8", "bfloat16"):
        monkeypatch.setitem(number_formats.FAST, ("cpu", name), (lambda: False, AsFast))
    monkeypatch.setattr(rounding, "step_seconds", lambda *given: pytest.fail("measured"))
    assert runs.trainer(tmp_path, engine_dtype="auto").collector.engine.dtype is None


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_a_measurement_samples_the_run_s_own_steps_and_changes_nothing(tmp_path):
    trainer = runs.trainer(tmp_path, max_concurrent_completions=6)
    engine, before = trainer.collector.engine, torch.get_rng_state()
    found = gains(trainer.run, engine)
    assert set(found) == {"int8", "bfloat16"} and all(gain > 0 for gain in found.values())
    assert engine.dtype is None and torch.equal(torch.get_rng_state(), before)
    assert not any("forward" in vars(module) for module in trainer.model.modules())
    other = runs.trainer(tmp_path, max_concurrent_completions=6)
    for one in (trainer, other):
        one.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(trainer), runs.weights(other), strict=True))


@pytest.mark.usefixtures("fast")
def test_a_gain_that_is_near_the_bound_is_measured_three_times(tmp_path, monkeypatch):
    trainer, asked = runs.trainer(tmp_path), []

    def seconds(engine, dtype, size, group, tokens):
        asked.append((dtype, size, group))
        return {None: 1.3, "int8": 1.0, "bfloat16": 0.2}[dtype]

    monkeypatch.setattr(rounding, "step_seconds", seconds)
    assert gains(trainer.run, trainer.collector.engine) == {"int8": 1.3, "bfloat16": 6.5}
    assert [dtype for dtype, *_ in asked] == [None, "bfloat16"] + [None, "int8"] * 3
    assert {one[1:3] for one in asked} == {(8, 4)}  # 4 * 2 completions of a rollout batch, in groups of 4


@pytest.mark.usefixtures("fast")
def test_formats_no_narrower_than_the_model_s_are_not_measured(tmp_path):
    half = runs.trainer(tmp_path, parts={"model": tiny.model().bfloat16()}, model_init_kwargs=None)
    assert rounding.candidates(half.run) == ["int8"]


# ---- what cannot round -----------------------------------------------------------------------------------------------


def checked(settings, model=None, in_step=False, sharding="", device="cpu"):
    args = runs.config("unused", **settings)
    return [
        (one.code, one.level) for one in rounding.check_rounding(args, model or tiny.model(), device, in_step, sharding)
    ]


def test_weights_that_are_spread_out_are_not_rounded():
    assert checked({"engine_dtype": "int8"}, in_step=True) == [("engine-dtype", "error")]
    assert ("setting-unread", "warning") in checked({"engine_dtype": "auto"}, sharding="FSDP2")


def test_a_model_without_linear_layers_is_refused_or_warned_about():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=104, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = GPT2LMHeadModel(config)
    assert 0 < rounded_share(model) < 0.5  # the head alone: other layers are of a class of transformers
    assert checked({"engine_dtype": "int8"}, model) == [("engine-dtype", "warning")]
    assert rounded_share(tiny.model()) == 1.0


def test_slow_formats_are_pointed_out(monkeypatch):
    monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda: False, AsFast))
    for name in ("int8", "float8"):
        assert checked({"engine_dtype": name}) == [("engine-dtype-slow", "warning")]
    monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda: True, AsFast))
    assert checked({"engine_dtype": "int8"}) == []


def test_an_engine_that_is_given_does_not_read_it(tmp_path):
    with pytest.warns(CheckWarning) as found:
        trainer = runs.trainer(tmp_path, parts={"engine": CopyEngine(tiny.model())}, engine_dtype="int8")
    assert "setting-unread" in [one.message.finding.code for one in found]
    assert trainer.collector.engine.dtype is None and trainer.rounding.reason == ""


# ---- other engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "flags"), [("float8", {"quantization": "fp8"}), ("bfloat16", {"dtype": "bfloat16"})])
def test_vllm_in_this_process_is_started_with_it(tmp_path, dtype, flags):
    from covey.trainer.engines.colocated import engine_arguments

    args = runs.config(tmp_path, use_vllm=True, engine_dtype=dtype)
    accelerator = SimpleNamespace(device=torch.device("cpu"), mixed_precision="no", num_processes=1)
    made = engine_arguments(args, tiny.model(), str(tmp_path), accelerator)
    usual = {"dtype": "float32"}
    assert {name: made.get(name) for name in {**usual, **flags}} == {**usual, **flags}


@pytest.mark.parametrize(
    ("dtype", "flag", "value"), [("float8", "--quantization", "fp8"), ("bfloat16", "--dtype", "bfloat16")]
)
def test_an_sglang_server_is_started_with_it(tmp_path, monkeypatch, dtype, flag, value):
    from covey.trainer.engines import servers

    started = []

    class Process:
        def __init__(self, command, *given, **named):
            started.extend(command)

        def start(self):
            return self

    monkeypatch.setattr(servers, "ServerProcess", Process)
    model = tiny.model()
    model.config._name_or_path = "a"
    args = runs.config(tmp_path, use_sglang=True, sglang_device="cpu", engine_dtype=dtype)
    servers.start_sglang(args, model, SimpleNamespace(num_processes=1), "k" * 16)
    assert started[started.index(flag) + 1] == value


@pytest.mark.parametrize("settings", [{"use_vllm": True}, {"use_sglang": True, "sglang_device": "cuda:1"}])
@pytest.mark.parametrize("dtype", ["int8", "auto"])
def test_formats_that_these_engines_do_not_offer_are_refused(tmp_path, settings, dtype):
    with pytest.raises(CheckError) as found:
        runs.config(tmp_path, engine_dtype=dtype, **settings)
    assert found.value.codes == ["engine-dtype"]


@pytest.mark.parametrize(
    "settings", [{"use_vllm": True, "vllm_mode": "server"}, {"use_sglang": True}, {"max_staleness": 1}, {"bf16": True}]
)
def test_it_is_pointed_out_where_nothing_reads_it(tmp_path, settings):
    with pytest.warns(CheckWarning, match="engine_dtype") as found:
        runs.config(tmp_path, engine_dtype="bfloat16", **settings)
    assert "setting-unread" in [getattr(one.message, "finding", SimpleNamespace(code="")).code for one in found]
