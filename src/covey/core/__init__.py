"""Records, the engine protocol and pure functions on flat token vectors.

Plain torch: no transformers, accelerate, files, configs, threads or processes. Every other package imports this one,
and it imports no other.

Letters used throughout: N trained (completion) tokens of a batch, B rollouts, P prompts (groups), G rollouts per
prompt, F reward functions.
"""
