"""The algorithm's arithmetic: typed records, flat token vectors and pure functions over them.

Pure torch. Nothing here knows transformers, accelerate, files, configs or processes; everything else imports this
package and it imports nothing of Covey's.

Letters used throughout: N trained (completion) tokens of a batch, B rollouts, P prompts (groups), G rollouts per
prompt, F reward functions.
"""
