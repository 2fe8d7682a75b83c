"""LoRA: train a small adapter and leave the model's own weights alone (`pip install "covey[peft]"`).

The engine samples with the adapter on; with `beta` above 0 the reference is the same model with the adapter off, so it
costs no second copy. Adapters want a larger learning rate than full training.
"""

from peft import LoraConfig

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(**{**settings(options), "learning_rate": 1e-4, "beta": 0.01}),
        train_dataset=SUMS,
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(options.output_dir / "adapter"))
    return trainer


if __name__ == "__main__":
    main()
