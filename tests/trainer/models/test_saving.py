"""Saving."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import runs


def test_a_saved_model_loads_and_speaks_alike(tmp_path):
    trained = runs.trainer(tmp_path)
    trained.train()
    trained.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    trained.model.eval()
    torch.testing.assert_close(loaded(ids).logits, trained.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*api_key")
def test_the_servers_keys_are_in_no_file(tmp_path):
    keys = {"vllm_server_api_key": "s3cret-1", "sglang_api_key": "s3cret-2"}
    trained = runs.trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1, **keys)
    trained.train()
    trained.save_model()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "optimizer.pt"} <= {path.name for path in written}
    assert not [path for path in written if b"s3cret" in path.read_bytes()]
    assert trained.args.vllm_server_api_key == "s3cret-1"
