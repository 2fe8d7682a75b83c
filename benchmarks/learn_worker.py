"""One training run of the demo task, in a process of its own, with evaluations that the clock does not see.

Started by `benchmarks.learn`: the first line of standard input is the configuration; the output is a line per
evaluation and a last one with all results.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.worker import Replies

HYPERPARAMETERS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "max_completion_length": 32,
    "loss_type": "dapo",
    "gradient_checkpointing": False,
    "bf16": False,
}
"""The demo's, given to both libraries; everything else is each one's default."""


def make_trainer(library: str, model: str, folder: Path, seed: int, steps: int, rows: list[dict[str, Any]]) -> Any:
    """A trainer of either library for the demo's task."""
    from datasets import Dataset

    from covey.rewards import numeric_match_reward

    if library == "covey":
        from covey import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer
    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **HYPERPARAMETERS,
    )

    def right_number(completions: list[Any], answer: list[Any], **columns: Any) -> list[float | None]:
        return list(numeric_match_reward(completions, answer=answer))

    return GRPOTrainer(model=model, reward_funcs=right_number, args=args, train_dataset=Dataset.from_list(rows))


class Evaluator:
    """Accuracy on held-out sums, sampled at temperature 1 by Covey's engine whatever library trains the model.

    Args:
        model: the transformers model in training.
        tokenizer: its tokenizer.
        rows: held-out rows.
        samples: completions a row; their random streams are the same in every evaluation.
    """

    def __init__(self, model: Any, tokenizer: Any, rows: list[dict[str, Any]], samples: int):
        from covey.core.engine import SamplingParams
        from covey.engines.native.engine import NativeEngine
        from covey.policy.loading import end_token_ids
        from covey.rollout.collector import Collector, PromptSample
        from covey.rollout.prompts import PromptCodec

        engine = NativeEngine(
            lambda: model, eos_token_ids=end_token_ids(model, tokenizer), pad_token_id=tokenizer.pad_token_id
        )
        self.collector = Collector(engine, PromptCodec(tokenizer, None, None), seed=0)
        self.draws = [PromptSample(row, number, sample) for number, row in enumerate(rows) for sample in range(samples)]
        self.params = SamplingParams(max_tokens=HYPERPARAMETERS["max_completion_length"])

    def __call__(self) -> float:
        """Share of right answers now."""
        from covey.rewards import numeric_match_reward

        rollouts = self.collector.collect(self.draws, self.params, ("held out",))
        answers = [draw.row["answer"] for draw in self.draws]
        scores = numeric_match_reward([rollout.completion for rollout in rollouts], answer=answers)
        return sum(bool(score) for score in scores) / len(scores)


def main() -> None:
    """Train once."""
    import torch
    from transformers import AutoTokenizer, TrainerCallback

    from covey.cli.demo import sums

    replies = Replies()
    spec = json.loads(sys.stdin.readline())
    torch.set_num_threads(spec["threads"])
    rows, held_out = sums(spec["seed"])
    trainer = make_trainer(spec["library"], spec["model"], Path(spec["folder"]), spec["seed"], spec["steps"], rows)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    evaluate = Evaluator(trainer.model, tokenizer, held_out[: spec["prompts"]], spec["samples"])

    class Clock(TrainerCallback):
        """Training seconds, stopped during evaluations."""

        def __init__(self) -> None:
            self.seconds = 0.0
            self.since = 0.0
            self.accuracy: list[dict[str, float]] = []
            self.reward: list[dict[str, float]] = []

        def stop(self) -> None:
            self.seconds += time.perf_counter() - self.since

        def look(self, step: int) -> None:
            if step % spec["every"] == 0 or step == spec["steps"]:
                self.accuracy.append({"step": step, "seconds": self.seconds, "accuracy": evaluate()})
                replies.send(**self.accuracy[-1])

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.look(0)
            self.since = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stop()
            self.look(state.global_step)
            self.since = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                seconds = self.seconds + time.perf_counter() - self.since
                self.reward.append({"step": state.global_step, "seconds": seconds, "reward": float(logs["reward"])})

    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    replies.send(done=True, accuracy=clock.accuracy, reward=clock.reward, seconds=clock.seconds)


if __name__ == "__main__":
    main()
