"""Steps of fixed shapes, as CUDA graphs need them: the same samples, recorded seldom."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.engines.native.shared_prefix_cache import SharedPrefixCache
from tests.engines.native.test_native_engine import PROMPTS, configs, engine_of, sample, tokens
from tests.support import tiny

EOS = frozenset({1, 40, 41, 42, 43, 44})


def replay_by_running(step):
    """A recording that runs the step again: what a CUDA graph does, on any device."""
    result = step().clone()
    return lambda: result.copy_(step()), result


def recording(engine, recorder=replay_by_running):
    engine._use_graphs, engine._capture = True, recorder
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(("max_sequences", "steps_per_look"), [(1, 5), (4, 1), (16, 5)])
def test_replayed_steps_sample_the_same(tiny_model, max_sequences, steps_per_look):
    reference = tokens(sample(engine_of(tiny_model, eos=EOS)))
    engine = recording(engine_of(tiny_model, eos=EOS, max_sequences=max_sequences))
    engine.check_interval = steps_per_look
    assert tokens(sample(engine)) == reference


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.model_type)
def test_replayed_steps_of_other_decoders_sample_the_same(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert tokens(sample(recording(engine_of(model)))) == tokens(sample(engine_of(model)))


@pytest.mark.slow
def test_recording_is_reused_after_sequences_leave(tiny_model):
    counts = []

    def counting(step):
        counts.append(1)
        return replay_by_running(step)

    settings = {"n": 8, "max_tokens": 60}
    reference = sample(engine_of(tiny_model, eos=EOS, max_sequences=64), **settings)
    assert len({len(c.token_ids) for group in reference for c in group}) > 10
    got = sample(recording(engine_of(tiny_model, eos=EOS, max_sequences=64), counting), **settings)
    assert tokens(got) == tokens(reference)
    assert len(counts) < 16  # for 60 steps, most of which see rows leave


def test_failed_capture_falls_back_to_ordinary_steps(tiny_model):
    def failing(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = recording(engine_of(tiny_model), failing)
    with pytest.warns(UserWarning, match="not permitted"):
        got = sample(engine)
    assert tokens(got) == tokens(sample(engine_of(tiny_model)))


def test_wrong_replay_falls_back_to_ordinary_steps(tiny_model):
    def wrong(step):
        result = step().clone()
        return lambda: result.zero_(), result

    with pytest.warns(UserWarning, match="differ"):
        got = sample(recording(engine_of(tiny_model), wrong))
    assert tokens(got) == tokens(sample(engine_of(tiny_model)))


def out_of_memory():
    raise torch.OutOfMemoryError("injected")


def broken_off():
    try:
        out_of_memory()
    finally:
        raise RuntimeError("the capture was ended early")


@pytest.mark.parametrize("fail", [out_of_memory, broken_off])
def test_capture_is_retried_after_memory_ran_out(tiny_model, fail):
    attempts = []

    def short_at_first(step):
        attempts.append(1)
        return fail() if len(attempts) == 1 else replay_by_running(step)

    expected = tokens(sample(engine_of(tiny_model)))
    engine = recording(engine_of(tiny_model), short_at_first)
    with pytest.warns(UserWarning, match="in this rollout batch"):
        assert tokens(sample(engine)) == expected
    assert len(attempts) == 1
    assert tokens(sample(engine)) == expected and len(attempts) > 1


def test_out_of_memory_in_the_cache_is_raised(tiny_model, monkeypatch):
    engine = recording(engine_of(tiny_model))
    engine._shares_prefixes = True
    monkeypatch.setattr(SharedPrefixCache, "open_columns", lambda cache: out_of_memory())
    with pytest.raises(torch.OutOfMemoryError):
        sample(engine)
    monkeypatch.undo()
    assert tokens(sample(engine)) == tokens(sample(engine_of(tiny_model)))


@pytest.mark.gpu
def test_cuda_graphs_sample_the_same():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = tiny.model().cuda()
    eager = engine_of(model, eos=EOS)
    eager._use_graphs = False
    engine = engine_of(model, eos=EOS)
    assert tokens(sample(engine)) == tokens(sample(eager))
    assert engine._use_graphs is None  # it did not fall back
    on_cpu = tokens(sample(engine_of(tiny.model(), eos=EOS)))
    same = [a == b for x, y in zip(on_cpu, tokens(sample(engine)), strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(same) >= 0.9 * len(PROMPTS) * 3  # the same noise; rounding alone differs
