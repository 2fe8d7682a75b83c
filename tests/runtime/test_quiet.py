"""Bars of libraries are off inside, and as they were outside."""

import logging

import datasets
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

import covey  # noqa: F401
from covey.runtime.quiet import without_bars


def bars():
    shown = transformers_logging.is_progress_bar_enabled(), not datasets.are_progress_bars_disabled()
    return (*shown, not are_progress_bars_disabled())


def test_bars_but_those_of_downloads_are_off_and_come_back():
    was = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    transformers_logging.enable_progress_bar()
    with without_bars():
        with without_bars():
            pass
        assert bars() == (False, False, True)
    assert bars() == (True, True, True)
    if was:
        datasets.disable_progress_bars()


def test_one_warning_of_bitsandbytes_is_left_out(caplog):
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "none")
    logger.warning("another")
    assert caplog.messages == ["another"]


def test_new_special_tokens_are_said_once():
    logger, handled = logging.getLogger("transformers.trainer_utils"), []
    handler = logging.Handler()
    handler.emit = lambda record: handled.append(record.getMessage())
    logger.addHandler(handler)
    text = "The tokenizer has new PAD/BOS/EOS tokens (of this test)"
    for message in (text, text, "another", "another"):
        logger.warning(message)
    logger.removeHandler(handler)
    assert handled == [text, "another", "another"]
