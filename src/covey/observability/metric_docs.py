"""Descriptions of all metrics and how to interpret them, for the report and the documentation.

Keys are metric names; `{name}` stands for the name of a reward function or a phase. During an evaluation the same names
carry the prefix `eval_`.
"""

import re

METRIC_MEANINGS: dict[str, str] = {
    "reward": "Mean total reward of the sampled completions: each function's reward times its weight, added up. The "
    "curve to watch. With dynamic_sample, this and all metrics of rewards and completions describe the first round of "
    "sampling, before groups were refilled: those kept for their rewards would mislead.",
    "reward_std": "Standard deviation of the total reward over all completions of a rollout batch. Near 0 there is "
    "little left to learn from.",
    "frac_reward_zero_std": "Share of groups whose completions all got the same reward (whose steps did, where steps "
    "are rewarded). Such a group gives no gradient; a high share means that the prompts are too easy or too hard, or "
    "that the reward is too coarse.",
    "rewards/{name}/mean": "Mean reward of one function, before its weight; abstentions (None) are left out. Where it "
    "rewards steps, the reward of a completion is the sum of theirs.",
    "rewards/{name}/std": "Standard deviation of that function's reward over a rollout batch.",
    "reward/{name}/mean": "The same as rewards/{name}/mean, under its other name.",
    "reward/{name}/std": "The same as rewards/{name}/std, under its other name.",
    "steps/per_completion": "Mean number of rewarded steps (or turns) per completion, where a reward function rewards "
    "steps; a number among them counts as one.",
    "steps/{name}/mean": "Mean reward of a step of that function, before its weight. Unlike rewards/{name}/mean it "
    "does not grow with the number of steps.",
    "rewards/{name}/failures": "Samples for which that function raised an error or returned nonsense. They get no "
    "reward from it.",
    "rewards/{name}/timeouts": "Samples that function had not scored when its time was up.",
    "rewards/{name}/seconds": "Seconds per call of that function; where it scores rollouts as they end, of its calls "
    "for a whole rollout batch added up.",
    "environment/{name}": "Mean of a reward or metric that an environment of verifiers gives in addition to its "
    "weighted sum.",
    "dynamic_sampling/first_signal": "Share of groups with a signal (an advantage other than 0) as first sampled, "
    "before any refilling, with dynamic_sample.",
    "dynamic_sampling/trained_signal": "Share of the groups trained on that have a signal; 1 when every group without "
    "one could be replaced.",
    "dynamic_sampling/rounds": "Mean number of rounds of refilling per rollout batch, at most max_resample_times.",
    "dynamic_sampling/unfilled_groups": "Mean number of groups per rollout batch that were trained on without a "
    "signal, because the rounds ran out. They give no gradient.",
    "dynamic_sampling/cost": "Completions sampled for each one trained on. When it comes near 1 + max_resample_times "
    "with trained_signal below 1, the prompts are too easy or too hard for refilling to help.",
    "difficulty/seen_fraction": "Share of the prompts whose difficulty is known, with prompt_sampler difficulty.",
    "difficulty/chance": "Mean chance with which a pass over the dataset takes a prompt whose difficulty is known. Its "
    "inverse is about how many of them are examined for each one sampled.",
    "difficulty/settled_fraction": "Share of these prompts that are always or never solved: they come at the rate of "
    "difficulty_floor.",
    "pass@{name}": "Chance that at least one of so many completions of a prompt is right, estimated without bias from "
    "all that were sampled, mean over prompts. In evaluation suites with pass_at.",
    "maj@{name}": "Chance that the most frequent answer among so many completions of a prompt is right, estimated "
    "without bias from all that were sampled, mean over prompts. In evaluation suites with maj_at.",
    "pass@{name}_low": "Lower end of its 95% confidence interval, which is about other prompts of the same kind.",
    "pass@{name}_high": "Upper end of that interval.",
    "maj@{name}_low": "Lower end of its 95% confidence interval.",
    "maj@{name}_high": "Upper end of that interval.",
    "reward_low": "Lower end of the 95% confidence interval of the mean reward over prompts, in evaluation suites.",
    "reward_high": "Upper end of that interval.",
    "prompts": "Prompts that an evaluation suite used.",
    "completions/mean_length": "Mean number of tokens that the model wrote per completion; tokens of tool results are "
    "not counted.",
    "completions/min_length": "Length of the shortest completion.",
    "completions/max_length": "Length of the longest completion.",
    "completions/clipped_ratio": "Share of completions that were cut off rather than ended by the model. When it "
    "rises, raise max_completion_length or reward brevity.",
    "completions/mean_terminated_length": "Mean length of the completions that the model ended itself; 0 if there are "
    "none.",
    "completions/min_terminated_length": "Length of the shortest completion that the model ended itself; 0 if there "
    "are none.",
    "completions/max_terminated_length": "Length of the longest completion that the model ended itself; 0 if there are "
    "none.",
    "rollouts/turns": "Mean number of turns that the model took in a rollout, with tools, an environment or a "
    "rollout_func.",
    "rollouts/seconds": "Mean seconds from the beginning of a rollout to its end, waiting for other rollouts and for "
    "tools included.",
    "rollouts/failed": "Share of rollouts in which an environment or a rollout function failed, or whose images could "
    "not be shown. They get no reward and advantage 0; the column error of the completions says what happened.",
    "rollouts/tool_budget": "Share of rollouts that ended because max_tool_calling_iterations was used up and the "
    "model called once more.",
    "tools/call_frequency": "Mean number of tool calls per rollout, those that could not be read included.",
    "tools/failure_frequency": "Share of tool calls that were answered with an error, for any of the reasons below.",
    "tools/failures/{name}": "Share of tool calls that failed in one way: malformed (not to be read), unknown_tool, "
    "wrong_argument, exception (raised by the tool), timeout (longer than tool_timeout), too_many (beyond those that "
    "one turn may make).",
    "tools/seconds": "Mean seconds that a rollout waited for its tools. Compare with rollouts/seconds: while a rollout "
    "waits, others are sampled, as long as there are enough of them.",
    "num_tokens": "Tokens processed since the run began: prompts and what the model wrote, of all processes, what "
    "dynamic_sample did not keep included; tokens of tool results are not counted.",
    "step_time": "Seconds per optimizer step, sampling and scoring included.",
    "sync/seconds": "Seconds it took to bring an engine of its own to the policy's weights.",
    "sync/bytes": "Bytes of weights that were sent to it: all of the model's, or an adapter's, and the model's under "
    "it where a server lacked that.",
    "phase/{name}": "Seconds between two logs spent on one phase: sync (sending weights to an engine), generate "
    "(sampling), reward (reward functions: of those that score rollouts as they end, only what is left when everything "
    "is sampled), score (log-probabilities under the old and the reference policy), train (forward, backward and "
    "optimizer), wait (with max_staleness: for samples that are not there yet; near 0 when training is what takes the "
    "time).",
    "overlap/reward": "Seconds between two logs in which reward functions worked while rollouts of the same rollout "
    "batch were still under way: time that phase/reward would have cost in addition. With functions marked "
    "per_completion, or stream_rewards.",
    "passes/count": "Forward and backward passes per optimizer step in one process. Unlike gradient_accumulation_steps "
    "it follows from the tokens there are to train on.",
    "updates/skipped_nonfinite": "Optimizer steps between two logs that were not taken, because a loss or the gradient "
    "was NaN or infinite; the third in a row ends the run. Logged only where there were any.",
    "passes/tokens": "Mean number of tokens in such a pass, prompts included; max_tokens_per_micro_batch bounds it.",
    "passes/skipped_rollouts": "Share of rollouts that were not run because their advantage, and so their gradient, is "
    "0.",
    "loss": "Value of the objective. It hovers around 0 whether or not the model learns, because advantages are "
    "centred in each group: judge a run by its reward.",
    "grad_norm": "Norm of the gradient before clipping. Spikes call for a lower learning rate.",
    "learning_rate": "Learning rate of the optimizer's latest step.",
    "epoch": "Passes over the training prompts.",
    "entropy": "Mean entropy (nats) of the policy's next-token distribution, at the sampling temperature, over the "
    "tokens that it wrote. In an update on new completions it covers all of them, with the built-in engine or where "
    "they are scored off-policy; with servers on-policy, and in later updates on the same completions, those that the "
    "update runs, which have a signal. A fall towards 0 means that samples become alike and exploration ends.",
    "entropy/threshold": "Entropy that a token needs in order to count, with top_entropy_quantile below 1.",
    "entropy_coef": "Weight of the entropy bonus in force, with entropy_coef above 0 or use_adaptive_entropy.",
    "policy_loss": "The loss without the entropy bonus.",
    "aux_loss": "The load-balancing loss of a mixture of experts over an optimizer step, before router_aux_loss_coef: "
    "experts per token where the load is even, more where some experts get most tokens.",
    "kl": "Mean divergence per token of the policy from the reference model, with beta above 0. How far the model has "
    "moved.",
    "kept_token_fraction": "Share of tokens that pass the filters off_policy_mask_threshold and top_entropy_quantile.",
    "clip_ratio/low_mean": "Share of tokens (sequences, with sequence-level ratios) with a negative advantage whose "
    "ratio fell below 1 - epsilon and gives no gradient.",
    "clip_ratio/low_min": "Smallest clip_ratio/low_mean of a completion.",
    "clip_ratio/high_mean": "Share of tokens (or sequences) with a positive advantage whose ratio rose above 1 + "
    "epsilon_high and gives no gradient.",
    "clip_ratio/high_max": "Largest clip_ratio/high_mean of a completion.",
    "clip_ratio/region_mean": "Share clipped on either side. Exactly 0 while every rollout batch is used for one "
    "update.",
    "cispo_clip_ratio": "Share of tokens with a positive advantage whose weight is capped, with loss_type cispo.",
    "vespo/phi_seq_mean": "Mean weight that loss_type vespo gives to a sequence.",
    "sampling/sampling_logp_difference/mean": "Mean absolute difference (nats) of a token's log-probability between "
    "the engine that sampled it and the trainer. Around 0.01 is usual in half precision; when it grows, the engine "
    "runs other weights or settings. With max_staleness above 0 it holds what the policy has learned since, too.",
    "sampling/sampling_logp_difference/max": "Largest such difference of a token.",
    "sampling/staleness/mean": "Optimizer steps by which the weights that sampled a token were older than those that "
    "its rollout batch's training begins with, mean over sampled tokens, with max_staleness above 0.",
    "sampling/staleness/max": "Largest staleness of a token; at most max_staleness.",
    "sampling/reused_token_fraction": "Share of sampled tokens that were taken from a prompt's completions of an "
    "earlier epoch instead of being decoded one by one, with speculative_reuse. 0 while prompts are new.",
    "sampling/importance_sampling_ratio/min": "Smallest importance weight, trainer over engine probability, of a token "
    "(a sequence, in a sequence_ mode), after its bounds.",
    "sampling/importance_sampling_ratio/mean": "Mean of these weights; 1 when engine and trainer agree.",
    "sampling/importance_sampling_ratio/max": "Largest of these weights.",
    "sampling/importance_sampling_ratio/outside": "Share of tokens (or sequences) whose ratio lay outside the bounds, "
    "so that they were dropped (a _mask mode) or count as the bound (a _truncate mode).",
}

_PATTERNS = {
    re.compile(re.escape(key).replace(r"\{name\}", r"(\d+)" if "@" in key else "(.+)")): text
    for key, text in METRIC_MEANINGS.items()
}


def is_taken(name: str) -> bool:
    """True for a name that the trainer or Hugging Face's loop logs itself, rather than rewards and environments."""
    return (name == "step" or meaning(name) is not None) and not name.startswith("environment/")


def meaning(name: str) -> str | None:
    name = name.removeprefix("eval_")
    return METRIC_MEANINGS.get(name) or next((text for key, text in _PATTERNS.items() if key.fullmatch(name)), None)
