"""Train a policy inside an unmodified program: `python examples/agents/train.py openai_agents --python PYTHON`.

The agent is a module of this folder, and PYTHON has its libraries (`requirements.txt`); `calculator` needs none.
"""

import argparse
import random
import sys
from pathlib import Path

from covey import GRPOConfig, GRPOTrainer

HERE = Path(__file__).parent
OPENING = [  # chat templates that do not show tools leave it to the prompt
    {"role": "system", "content": "Use the tools add, subtract and multiply. Answer with the number only."},
    {"role": "user", "content": "What is 345 times 12?"},
    {"role": "assistant", "content": '{"name": "multiply", "arguments": {"a": 345, "b": 12}}'},
    {"role": "tool", "content": "4140"},
    {"role": "assistant", "content": "4140"},
]


def rows(count):
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    asked = [{"role": "user", "content": f"What is {a} plus {b}?"} for a, b in pairs]
    return [{"prompt": [*OPENING, one], "answer": a + b} for one, (a, b) in zip(asked, pairs, strict=True)]


def main(model="HuggingFaceTB/SmolLM2-135M-Instruct", agent="calculator", python=sys.executable, reward=None, **more):
    settings = {"output_dir": f"runs/{agent}", "max_steps": 16, "max_completion_length": 160, "num_generations": 8}
    trainer = GRPOTrainer(
        model=model,
        agent=[python, str(HERE / "run.py"), agent],
        reward_funcs=reward,  # None: the agent's own
        train_dataset=rows(256),
        args=GRPOConfig(**(settings | more)),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", nargs="?", default="calculator")
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    main(agent=given.agent, python=given.python)
