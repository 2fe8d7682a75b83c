"""LoRA: train a small adapter and leave the model's own weights alone (`pip install peft`).

The engine samples with the adapter on; with `beta` above 0 the reference is the same model with the adapter off, so it
costs no second copy. Adapters want a larger learning rate than full training. With `--four_bits` the weights under the
adapter are held in 4 bits (QLoRA; `pip install peft bitsandbytes`).
"""

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def four_bits():
    """Quantisation of QLoRA. Layers multiply in bfloat16 where that is fast."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    )


def main():
    options = parser(__doc__)
    options.add_argument("--four_bits", action="store_true", help="Hold the model's own weights in 4 bits.")
    options = options.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**{**settings(options), "learning_rate": 1e-4, "beta": 0.01}),
        train_dataset=SUMS,
        quantization_config=four_bits() if options.four_bits else None,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(options.output_dir / "adapter"))
    return trainer


if __name__ == "__main__":
    main()
