"""Tiny models are decoded as large ones are."""

import pytest

from covey.engines.native import inference_contexts


@pytest.fixture(autouse=True)
def pack_tiny_models(monkeypatch):
    monkeypatch.setattr(inference_contexts, "WORTH_PACKING", 0)
