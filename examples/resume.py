"""Stop and resume: a resumed run ends with the same weights as an uninterrupted one, bit for bit.

A checkpoint holds, besides the usual, the completions that were sampled and not yet used up, so it may be taken in the
middle of a rollout batch, as here. It appears under its name only when complete.
"""

from transformers import TrainerCallback

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


class Interrupt(TrainerCallback):
    """Stands for whatever ends a run too early."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def make_trainer(options, callbacks=None):
    return GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(
            **{**settings(options), "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2},
            num_iterations=2,
        ),
        train_dataset=SUMS,
        callbacks=callbacks,
    )


def main():
    options = parser(__doc__).parse_args()
    make_trainer(options, callbacks=[Interrupt(max(1, options.max_steps // 2))]).train()
    trainer = make_trainer(options)
    trainer.train(resume_from_checkpoint=True)
    return trainer


if __name__ == "__main__":
    main()
