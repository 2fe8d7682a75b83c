"""The sentences of `covey explain`: each function turns numbers of a run into one paragraph.

Statements about formulas hold for the objective in `covey.core` and `covey.algorithms`; change them together.
"""

import math
from fractions import Fraction
from typing import Any

from covey.config.algebra import BatchAlgebra
from covey.config.rules.objective import BUILT_IN, CLIPPED
from covey.sizing.memory import MemoryEstimate


def updates_per_generation(per_generation: Fraction) -> str:
    """How many optimizer updates one generation feeds."""
    if per_generation == 1:
        return "One optimizer update per generation."
    if per_generation.denominator == 1:
        return f"{per_generation} optimizer updates per generation."
    if per_generation.numerator == 1:
        return f"One optimizer update spans {per_generation.denominator} generations."
    return f"{per_generation} optimizer updates per generation: some updates mix two generations."


def total_updates(args: Any, a: BatchAlgebra, rows: int | None = None) -> str:
    """How long the run is, exactly where the rows of the dataset are known."""
    if rows is not None and rows >= a.prompts_per_generation:
        return _updates_of_rows(args, a, rows)
    if args.max_steps > 0:
        generations = args.max_steps / a.updates_per_generation
        return (
            f"max_steps={args.max_steps} updates are {float(generations):g} generations, "
            f"{float(generations * a.prompts_per_generation):g} prompts in all."
        )
    updates = Fraction(1000, a.prompts_per_generation) * a.updates_per_generation
    return (
        f"Every 1,000 prompts of the dataset are about {float(updates):.4g} updates; num_train_epochs="
        f"{args.num_train_epochs:g} goes through the dataset so many times. A last, incomplete generation is left out."
    )


def _updates_of_rows(args: Any, a: BatchAlgebra, rows: int) -> str:
    generations = rows // a.prompts_per_generation
    updates = math.ceil(generations * a.updates_per_generation)
    epoch = f"The dataset's {count(rows, 'prompt')} make {count(generations, 'generation')} per epoch"
    left = rows - generations * a.prompts_per_generation
    others = ", others each time" if args.shuffle_dataset else ""
    rest = f" ({count(left, 'prompt')} left over{others})" if left else ""
    if args.max_steps > 0:
        epochs = f"{args.max_steps / updates:.3g}"
        length = f"max_steps={args.max_steps} is {epochs} epoch{'' if epochs == '1' else 's'}"
    else:
        total = math.ceil(args.num_train_epochs * updates)
        length = f"num_train_epochs={args.num_train_epochs:g} makes {count(total, 'update')} in all"
    return f"{epoch}{rest} and {count(updates, 'update')}; {length}."


def choice_of_prompts(args: Any, a: BatchAlgebra) -> list[str]:
    """What rewards have to say about which prompts are trained on."""
    lines = []
    if args.prompt_sampler == "difficulty":
        lines.append(
            "Prompts of intermediate difficulty come more often (prompt_sampler=difficulty): in an epoch some prompts "
            "come several times and others not at all. One that is always or never solved comes about "
            f"{args.difficulty_floor:g} times as often as one that is solved half of the time."
        )
    if args.dynamic_sample:
        most = (1 + args.max_resample_times) * a.generation_batch_size
        lines.append(
            "Groups without a signal are replaced before training (dynamic_sample), in up to "
            f"{count(args.max_resample_times, 'round')} (max_resample_times): a generation samples at most {most} "
            f"completions and trains on {a.generation_batch_size}."
        )
    return lines


def streaming(args: Any) -> list[str]:
    """How rewards and sampling overlap."""
    if not args.stream_rewards:
        return []
    return [
        "Each group is scored as soon as it is sampled (stream_rewards): reward functions see one group at a time and "
        f"have {args.reward_timeout:g} seconds (reward_timeout) for each; phase/reward is only what they still take "
        "when everything is sampled."
    ]


def reuse(args: Any) -> list[str]:
    """What becomes of a prompt's earlier completions when it comes again."""
    if args.speculative_reuse is None:
        return []
    what = (
        f"When a prompt comes again, its last completions are drafts (speculative_reuse={args.speculative_reuse}): "
        "they are checked in one pass, and decoded on only from where they no longer hold. "
    )
    metric = " sampling/reused_token_fraction says what share of the tokens was not decoded."
    if args.speculative_reuse == "exact":
        how = (
            "A draft holds as far as sampling afresh with the same seed would give the same tokens, so no "
            "completion depends on it; to that end a prompt keeps its seeds from epoch to epoch."
        )
    else:
        how = (
            "A token of a draft stays with probability min(1, lenience * p_now / p_then), with "
            f"speculative_lenience={args.speculative_lenience:g}; tokens that stay are a little off-policy and are "
            "trained on as if they were not."
        )
    return [what + how + metric]


def vllm_servers(args: Any, a: BatchAlgebra) -> list[str]:
    """Which servers sample, how much each gets at once, and what is waited for."""
    if not args.use_vllm or args.vllm_mode != "server":
        return []
    urls, most = args.vllm_urls, args.vllm_server_concurrency
    each = min(most, math.ceil(a.generation_batch_size / len(urls)))
    share = "gets all of them" if len(urls) == 1 else f"gets about {each} of them"
    lines = [
        f"Completions come from {count(len(urls), 'vLLM server')}: {', '.join(urls)}. A generation asks for "
        f"{a.generation_batch_size} at once; each {share}, at most {most} at a time (vllm_server_concurrency).",
        "Each server is sent the weights before a generation whenever they have changed; completions under way are "
        "continued with the new ones. That may take "
        f"{args.vllm_server_sync_timeout:g} s (vllm_server_sync_timeout).",
        f"The weights travel {weight_way(args)} (vllm_weight_transfer={args.vllm_weight_transfer!r}).",
        "A server that fails is left out, its prompts are sampled by the others, and it takes part again once it is "
        f"up and has the weights. When all have failed, the run waits {args.vllm_server_timeout:g} s for one "
        "(vllm_server_timeout) and then ends; a prompt may take "
        f"{args.vllm_server_request_timeout:g} s (vllm_server_request_timeout).",
    ]
    if each == most and a.generation_batch_size > most * len(urls):
        lines.append(
            "More are asked for than the servers are given at once: raise vllm_server_concurrency if they idle."
        )
    if args.temperature != 1.0:
        lines.append(
            f"At temperature {args.temperature:g} the servers must report log-probabilities of what they sample from: "
            "--logprobs-mode processed_logprobs, as `covey vllm-serve` has it."
        )
    return lines


def weight_way(args: Any) -> str:
    """How weights get to vLLM servers, and what that asks of the machines."""
    port = f"port {args.vllm_group_port}" if args.vllm_group_port else "a port that is free then"
    group = f"over a group that servers join by connecting to this machine at {port} (vllm_group_port)"
    folder = args.vllm_weight_folder or "a temporary folder, which servers on other machines do not see"
    disk = f"as files in {folder} (vllm_weight_folder)"
    return {
        "auto": f"{group}, or, where a server was not started for that, {disk}",
        "group": group,
        "ipc": "nowhere: servers on the same GPU open the trainer's memory",
        "disk": disk,
    }[args.vllm_weight_transfer]


def sglang_servers(args: Any, a: BatchAlgebra) -> list[str]:
    """Which SGLang servers sample, and what is waited for."""
    if not args.use_sglang:
        return []
    urls = args.sglang_urls
    where = (
        f"{count(len(urls), 'SGLang server')}: {', '.join(urls)}"
        if urls
        else f"an SGLang server that the run starts on {args.sglang_device} and ends with (sglang_device); its log is "
        "sglang-server.log in output_dir"
    )
    return [
        f"Completions come from {where}. A generation asks for {a.generation_batch_size} at once; a server is given at "
        f"most {args.sglang_concurrency} at a time (sglang_concurrency).",
        "Before a generation whose weights have changed, servers get the new ones by "
        f"sglang_weight_transfer={args.sglang_weight_transfer!r}, within {args.sglang_sync_timeout:g} s "
        "(sglang_sync_timeout).",
        "A server that fails is left out until it is up and has the weights. When all have failed, the run waits "
        f"{args.sglang_server_timeout:g} s for one (sglang_server_timeout) and then ends.",
    ]


def mismatch(args: Any, on_policy: bool) -> list[str]:
    """What is done about the engine's own idea of how probable its samples are."""
    if not args.corrects_mismatch:
        return []
    mode = args.resolved_mismatch_mode
    level, _, action = mode.partition("_")
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    bounds = [text for bound, text in ((low, f"below {low}"), (high, f"above {high}")) if bound is not None]
    fate = "is dropped" if action == "mask" else "counts as the bound"
    beyond = f"; {' or '.join(bounds)} it {fate}" if bounds else ""
    if not on_policy or (args.method == "rloo" and args.beta):
        cost = "That reads the log-probabilities of the pass just mentioned."
    else:
        cost = "That compares log-probabilities of the training passes: no extra pass, except for a model with dropout."
    return [
        f"Each {level} is weighed by trainer probability over engine probability ({mode}){beyond}. {cost} Watch "
        "sampling/*."
    ]


def ahead(args: Any, a: BatchAlgebra) -> list[str]:
    """What is sampled while something else is trained on, and how old it is then."""
    if not args.max_staleness:
        return []
    steps, per_generation = args.max_staleness, a.updates_per_generation
    if per_generation > steps:
        overlap = (
            f"A generation feeds {per_generation} updates, so the next is sampled during the last "
            f"{count(steps, 'update')} of them alone; max_staleness={math.ceil(per_generation)} would overlap them all."
        )
    else:
        most = int(steps / per_generation)
        more = "the next one is" if most == 1 else f"up to {most} more are"
        overlap = f"While one generation is trained on, {more} sampled."
    correction = (
        "The ratio of trainer to engine probability corrects for that."
        if args.corrects_mismatch
        else "Nothing corrects for that (vllm_importance_sampling_correction=False)."
    )
    advice = ""
    if args.corrects_mismatch and args.resolved_mismatch_mode.startswith("sequence"):
        advice = (
            " Ratios of whole sequences leave their bounds soon; vllm_importance_sampling_mode=token_truncate keeps "
            "more. sampling/importance_sampling_ratio/outside says how much is lost."
        )
    return [
        f"Sampling runs ahead (max_staleness={steps}): weights that sample are up to {count(steps, 'optimizer step')} "
        f"older than those a generation's training begins with. {overlap} {correction}{advice}"
    ]


def clipping(args: Any) -> str:
    """What becomes of ratios that drift away from 1."""
    low, high = args.epsilon, args.resolved_epsilon_high
    if args.loss_type == "cispo":
        return f"Ratios above {high:g} are cut to {high:g} and keep their gradient; watch cispo_clip_ratio."
    if args.loss_type == "sapo":
        return "sapo has no hard clip: a smooth gate closes as a ratio leaves 1."
    if args.loss_type == "vespo":
        return "vespo has no hard clip: a smooth weight of the sequence's ratio falls off; watch vespo/phi_seq_mean."
    unit = "sequences" if args.loss_type == "rloo" or args.importance_sampling_level != "token" else "tokens"
    if args.loss_type == "gmpo":
        return f"Token log-ratios are clipped at -{low:g} and +{high:g}, then averaged over the completion."
    text = (
        f"{unit.capitalize()} whose ratio has left [{1 - low:g}, {1 + high:g}] in the direction of their advantage "
        "stop contributing; clip_ratio/* says how many. A few percent is healthy, tens of percent mean too many or too "
        "large updates per generation."
    )
    return text + (f" With a negative advantage, ratios are cut at delta={args.delta:g}." if args.delta else "")


def loss_value(args: Any, a: BatchAlgebra) -> str:
    """What value the loss takes, and why."""
    kind = args.loss_type
    if kind in ("cispo", "vespo"):
        return (
            f"{kind} logs advantage times log-probability, so its value follows how probable completions are; its size "
            "and sign mean little. Watch `reward`."
        )
    if kind not in BUILT_IN:
        return f"What values {kind!r}, a registered loss, takes is its author's to say. Watch `reward`."
    why = "with ratios of 1 it is minus the mean advantage, and the advantages of a group add up to 0"
    if not a.on_policy:
        value = "starts near 0 on each generation and may be negative"
        why += " (an update sees a part of the groups)"
    elif kind in CLIPPED - {"grpo"}:
        value = "is close to 0 and may be negative"
        why += (
            " over completions, though not over tokens: what is left shows whether longer or shorter completions did "
            "better"
        )
    else:
        value = "is 0 up to " + ("the difference of sapo's two temperatures" if kind == "sapo" else "rounding")
    return f"The loss {value}: {why}. Its gradient is not 0, and the model learns."


def loss_trend(args: Any, a: BatchAlgebra) -> str:
    """How the loss develops."""
    text = "So a loss that hovers around 0 and does not fall is normal here; `reward` is what should rise."
    if not a.on_policy:
        text += " Within a generation the loss falls below 0 as the policy moves towards the better completions."
    if args.beta and args.method == "grpo":
        text += f" The KL term adds {args.beta:g} * kl, so over time the loss creeps upwards."
    return text


def kl_penalty(args: Any) -> str:
    """What the KL penalty does."""
    if args.beta == 0:
        return "beta=0: no KL penalty, no reference model in memory, no kl metric."
    where = "subtracted from the reward" if args.method == "rloo" else f"added to the loss ({args.kl_estimator})"
    synced = f"; the reference moves towards the policy every {args.ref_model_sync_steps} updates" * args.sync_ref_model
    return (
        f"beta={args.beta:g}: {args.beta:g} * KL to the reference model is {where}{synced}. kl starts at 0. Set beta=0 "
        "to do without, which also frees the reference model."
    )


def truncation(args: Any) -> str:
    """What becomes of completions that reach the length limit."""
    if args.max_completion_length is None:
        return "Completions end by themselves or when the context is full."
    if args.mask_truncated_completions:
        return (
            f"Completions cut off at {args.max_completion_length} tokens are left out of the loss, kl and clip_ratio. "
            "If all of an update are cut off, there is nothing to average: the loss is 0 and kl is not logged "
            "(elsewhere that shows as NaN). Keep completions/clipped_ratio well below 1."
        )
    return (
        f"Completions cut off at {args.max_completion_length} tokens are trained on like others; "
        "completions/clipped_ratio says how many. Set mask_truncated_completions to leave them out."
    )


def largest_part(m: MemoryEstimate, args: Any) -> str:
    """What takes the most memory, and how to shrink it."""
    advice = {
        "activations": "max_tokens_per_micro_batch"
        + ("" if args.gradient_checkpointing else " or gradient_checkpointing=True"),
        "logits": "logprob_chunk_size",
        "kv_cache": "max_concurrent_completions",
        "optimizer": "peft, or an 8-bit optim",
        "weights": _smaller_weights(m),
        "reference": "beta=0 or peft",
        "gradients": "peft",
    }
    part = max(advice, key=lambda name: getattr(m, name))
    title = {"kv_cache": "KV cache", "reference": "reference model"}.get(part, part)
    return f"The largest part is the {title}; to shrink it: {advice[part]}."


def _smaller_weights(m: MemoryEstimate) -> str:
    if m.unpacked:
        return "--accelerate_config fsdp2, or a smaller model"
    if m.stored_bytes < 4:
        return "--accelerate_config fsdp2, or quantization beside peft"
    return "model_init_kwargs with dtype=bfloat16"


def count(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: `1 prompt`, `2 prompts`."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"
