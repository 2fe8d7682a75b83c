"""A reward model: a sequence classifier with one label, scored through its own tokenizer and chat template.

    python examples/reward_model.py --judge org/reward-model

Without `--judge`, a tiny random classifier stands in, so that the example runs anywhere; its scores mean nothing.
"""

from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer


def random_judge(tokenizer_of, folder):
    """Save a classifier of random weights, with a copy of a tokenizer, and return its folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main():
    options = parser(__doc__)
    options.add_argument("--judge", help="Hub id or folder of a sequence classifier with one label.")
    options = options.parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=options.judge or random_judge(options.model, options.output_dir / "judge"),
        args=GRPOConfig(**settings(options)),
        train_dataset=SUMS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
