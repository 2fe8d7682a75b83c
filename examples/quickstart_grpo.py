"""GRPO in a few lines: a model, a dataset of prompts with solutions, a reward function.

The reward asks math-verify whether the boxed answer equals the `solution` column (`pip install math-verify`).
"""

from datasets import Dataset

from common import parser
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import accuracy_reward

QUESTIONS = [("What is 3 + 4?", "7"), ("What is 6 * 7?", "42"), ("What is 20 - 4?", "16"), ("What is 81 / 9?", "9")]


def main():
    options = parser(__doc__).parse_args()
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": rf"{question} End with \boxed{{answer}}."}], "solution": solution}
            for question, solution in QUESTIONS
        ]
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=accuracy_reward,
        args=GRPOConfig(
            output_dir=str(options.output_dir),
            max_steps=options.max_steps,
            max_completion_length=64,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=dataset,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
