"""A run says at its start whether a repeated or resumed one equals it to the bit."""

from types import SimpleNamespace

import pytest
import torch

from covey.core.engine import EngineTraits
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


@pytest.mark.parametrize(("parts", "expected"), [({}, TO_THE_BIT), ({"engine": "scripted"}, ROUNDED)])
def test_a_run_says_it_once(tmp_path, capsys, parts, expected):
    parts = {name: scripted() for name in parts}
    trainer = runs.trainer(tmp_path, parts=parts, disable_tqdm=False, max_steps=1, engine_parity="off")
    trainer.train()
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("exactness: ") == 1
    assert expected in " ".join((shown.out + shown.err).split())
