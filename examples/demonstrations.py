"""Demonstrations next to rewards: a run begins as fine-tuning on written answers and ends as learning from rewards."""

import json
from pathlib import Path

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": row["prompt"], "completion": f" {row['answer']}"} for row in SUMS]
    path = folder / "demonstrations.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = GRPOConfig(
        **settings(options),
        demonstrations=str(path),
        demonstrations_per_step=4,
        demonstrations_schedule={"warmup": 0, "peak": 0.9, "decay": 50, "valley": 0.05},
    )
    trainer = GRPOTrainer(options.model, numeric_match_reward, args, train_dataset=SUMS)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
