"""RLOO in a few lines: the baseline is the mean of the group's other completions, KL is part of the reward.

Only the names differ from `quickstart_grpo.py`. The reward needs `pip install math-verify`.
"""

from datasets import Dataset

from common import parser
from covey import RLOOConfig, RLOOTrainer
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
    trainer = RLOOTrainer(
        model=options.model,
        reward_funcs=accuracy_reward,
        args=RLOOConfig(
            output_dir=str(options.output_dir),
            max_steps=options.max_steps,
            num_generations=4,
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
