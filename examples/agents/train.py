"""Train a policy inside an unmodified program: `python examples/agents/train.py`."""

import random
import sys
from pathlib import Path

from covey import GRPOConfig, GRPOTrainer

HERE = Path(__file__).parent


def rows(count):
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    return [{"prompt": None, "question": f"{a} + {b} = ?", "answer": a + b} for a, b in pairs]


def main(model="HuggingFaceTB/SmolLM2-135M-Instruct", **changes):
    settings = {"output_dir": "runs/agent", "max_steps": 16, "max_completion_length": 64, "num_generations": 8}
    trainer = GRPOTrainer(
        model=model,
        agent=[sys.executable, str(HERE / "calculator.py")],
        train_dataset=rows(256),
        args=GRPOConfig(**(settings | changes)),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
