"""Dynamic sampling, and prompts sampled by difficulty: train on groups with a signal.

A group whose completions all get the same reward gives no gradient. With `dynamic_sample` such groups are replaced by
groups of further prompts before training (DAPO, arXiv 2503.14476); with prompt_sampler="difficulty", prompts that are
always or never solved come less often in the first place. The one works at once and costs samples, the other needs to
have seen the prompts and costs nothing.
"""

from common import SUMS, parser, settings
from covey import GRPOConfig, GRPOTrainer
from covey.rewards import numeric_match_reward


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=numeric_match_reward,
        args=GRPOConfig(
            **settings(options),
            dynamic_sample=True,
            max_resample_times=2,
            prompt_sampler="difficulty",
        ),
        train_dataset=SUMS,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "dynamic_sampling/cost" in entry:
            drawn, trained = (entry[f"dynamic_sampling/{name}_signal"] for name in ("first", "trained"))
            print(f"step {entry['step']}: {drawn:.0%} of groups had a signal at first, {trained:.0%} as trained on")
    return trainer


if __name__ == "__main__":
    main()
