"""One of two processes that train with vLLM in them; run by test_colocate_processes through torch's launcher.

Its arguments are an output folder and `vllm_tensor_parallel_size`. The first process prints what it logged.
"""

import json
import sys

import torch

from covey import GRPOConfig, GRPOTrainer
from tests.real_vllm import colocated
from tests.support import tiny


def longer(completion_ids, **kwargs):
    return [len(ids) + sum(ids) % 7 / 10 for ids in completion_ids]


def main(folder: str, size: str) -> None:
    trainer = GRPOTrainer(
        model=colocated.model(scale=2.0),
        reward_funcs=longer,
        train_dataset=tiny.rows(32),
        processing_class=tiny.tokenizer(),
        args=GRPOConfig(
            output_dir=folder,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_tensor_parallel_size=int(size),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=10,
            max_steps=3,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        history = trainer.state.log_history
        names = ("reward", "sampling/sampling_logp_difference/max")
        print("LOGGED " + json.dumps({name: [e[name] for e in history if name in e] for name in names}), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
