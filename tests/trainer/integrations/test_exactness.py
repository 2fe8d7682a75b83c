"""A run says at its start whether a repeated or resumed one equals it to the bit."""

from types import SimpleNamespace

import pytest
import torch

from covey.core.engine import EngineTraits
from covey.engines.native.engine import NativeEngine
from covey.engines.native.recurrent_engine import RecurrentEngine
from covey.trainer.integrations.report import exactness
from tests.support import runs, tiny
from tests.support.engines import CopyEngine, scripted

TO_THE_BIT, ROUNDED = "exactness: bit by bit", "exactness: up to rounding"


class Linear8bitLt(torch.nn.Linear):
    """Named as bitsandbytes' layer."""


def of(engine, device="cpu", layer=torch.nn.Linear, replay=None):
    return exactness(
        SimpleNamespace(
            model=layer(2, 2, device=device),
            collector=SimpleNamespace(engine=engine),
            args=SimpleNamespace(replay_from=replay),
        )
    )


def test_it_follows_engine_device_and_weights():
    copy = CopyEngine(tiny.model())
    assert of(copy).startswith(TO_THE_BIT)
    assert of(copy, device="meta").startswith(ROUNDED)
    assert of(copy, layer=Linear8bitLt).startswith(ROUNDED)
    assert of(scripted()).startswith(ROUNDED)  # it does not say so
    assert of(SimpleNamespace(traits=EngineTraits())).startswith(ROUNDED)
    assert of(copy, replay="a record") == ""


@pytest.mark.parametrize(("threads", "expected"), [(1, TO_THE_BIT), (2, ROUNDED)])
def test_models_with_a_state_are_exact_on_one_thread(threads, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert of(RecurrentEngine(tiny.model, eos_token_ids=set())).startswith(expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "expected"), [(6, ROUNDED), (8, TO_THE_BIT)])
def test_sizes_of_heads_decide(size, expected):
    """Rows of 6 numbers begin at places in memory for which libraries have other kernels."""
    model = tiny.model(head_dim=size)
    trainer = SimpleNamespace(
        model=model,
        collector=SimpleNamespace(engine=NativeEngine(lambda: model, eos_token_ids=set(), pad_token_id=0)),
        args=SimpleNamespace(replay_from=None),
    )
    assert exactness(trainer).startswith(expected)


@pytest.mark.parametrize(("parts", "expected"), [({}, TO_THE_BIT), ({"engine": "scripted"}, ROUNDED)])
def test_a_run_says_it_once(tmp_path, capsys, parts, expected):
    parts = {name: scripted() for name in parts}
    trainer = runs.trainer(tmp_path, parts=parts, disable_tqdm=False, max_steps=1, engine_parity="off")
    trainer.train()
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("exactness: ") == 1
    assert expected in " ".join((shown.out + shown.err).split())
