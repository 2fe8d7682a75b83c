"""Starting vLLM in this process: with room for adapters, in vain, and one after the other."""

import gc

import pytest
import torch

from tests.real_vllm import colocated
from tests.real_vllm.colocated import greedy, request, sample, scored

pytest.importorskip("vllm.sampling_params")

from covey.policy.weights import weight_update

pytestmark = pytest.mark.vllm

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(10, 60))


def test_an_adapter_changes_samples_as_it_changes_the_policy(tmp_path):
    from peft import LoraConfig, get_peft_model

    vllm = colocated.start(tmp_path, enable_lora=True, max_loras=1, max_cpu_loras=1, max_lora_rank=8)
    engine = colocated.engine(vllm)
    policy = get_peft_model(colocated.model(), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    seen = set()
    for version in range(3):
        generator = torch.Generator().manual_seed(version)
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(0, 0.1, generator=generator)
        update = weight_update(policy, version, adapter_only=True)
        engine.load_weights(update)
        [[best], drawn] = sample(engine, request(PROMPT, [0], 16, temperature=0.0), request(LONG, [1, 2], 16))
        assert best.token_ids == greedy(policy, PROMPT, 16)
        for completion in drawn:
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), scored(policy, LONG, completion), atol=1e-4, rtol=0
            )
        seen.add(tuple(best.token_ids))
    assert len(seen) == 3


def test_what_vllm_says_when_it_does_not_start_is_passed_on(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)did not start in this process.*max_model_len.*VLLM_LOGGING_LEVEL"):
        colocated.start(tmp_path, max_model_len=10**6)
    with pytest.raises(ValueError, match=r"does not take these arguments.*colour.*vllm_engine_kwargs"):
        colocated.start(tmp_path, colour="blue")


def test_the_process_group_outlives_the_last_started_vllm(tmp_path):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # as a trainer has it
    try:
        policy = colocated.model()
        first = colocated.engine(colocated.start(tmp_path))
        first.load_weights(weight_update(policy, 1))
        [before] = sample(first, request(PROMPT, [1], 8))
        second = colocated.engine(colocated.start(tmp_path))
        second.load_weights(weight_update(policy, 1))
        with pytest.raises(RuntimeError, match="was started in this process"):
            sample(first, request(PROMPT, [1], 8))
        del first
        gc.collect()
        assert sample(second, request(PROMPT, [1], 8)) == [before]
        del second
        gc.collect()
        assert torch.distributed.is_initialized()
        torch.distributed.all_reduce(torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()
