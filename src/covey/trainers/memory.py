"""What a run keeps in memory, by part: an estimate from the model's config and the training arguments.

Weights, gradients and optimizer state are counted exactly (the model is built on PyTorch's meta device, which holds
shapes but no numbers). Activations, caches and logits are formulas for decoder-only transformers with fused attention;
they are upper bounds for completions of full length. Nothing is sharded here: FSDP and ZeRO divide the first three
parts by the number of processes. Not counted: CUDA's own context, fragmentation, reward models.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from covey.policy.lm_head_linear import TILE_BYTES
from covey.trainers.passes import derived_budget

ASSUMED_PROMPT_TOKENS = 256
"""Length of a prompt where nobody says."""

LOGIT_COPIES = 4
"""float32 copies of a tile's logits alive at once in its backward pass, at most."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process, by part.

    Attributes:
        weights: parameters P in the type they are loaded in: P * bytes.
        reference: a second copy of the parameters when there is a KL penalty; 0 with adapters, which are switched off
            instead.
        gradients: one number per trainable parameter.
        optimizer: `optimizer_states(optim)` numbers per trainable parameter.
        activations: what the backward pass needs of one pass of T tokens (`max_tokens_per_micro_batch`, or what is
            derived in its place, but a rollout of full length at least, as none is cut), with L layers, H hidden units,
            Q query, K key/value and I intermediate channels per token:
            T * L * (4H + 3Q + 3K + 4I) * bytes, or with checkpointing T * (L * H + 4H + 3Q + 3K + 4I) * bytes.
        logits: `LOGIT_COPIES` tiles of min(T, logprob_chunk_size) * vocabulary float32 numbers, or smaller ones of
            `TILE_BYTES` on a plain linear head.
        kv_cache: (rows decoded at once * completion tokens + their prompts, one for each group) * L * 2K * bytes;
            sampling only, and with the built-in engine.
        packed: the weights of linear layers once more, in the order in which MKL multiplies a few rows; only while
            the built-in engine samples, in float32 and on a CPU.
        parameters: all parameters.
        trainable: those that are updated.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    packed: int
    parameters: int
    trainable: int

    @property
    def training(self) -> int:
        """Bytes at the height of a training step."""
        return self.resident + self.gradients + self.activations + self.logits

    @property
    def sampling(self) -> int:
        """Bytes at the height of a generation."""
        return self.resident + self.kv_cache + self.packed

    @property
    def peak(self) -> int:
        """The larger of the two: they take turns."""
        return max(self.training, self.sampling)

    @property
    def resident(self) -> int:
        """Bytes that are there all the time."""
        return self.weights + self.reference + self.optimizer


def estimate(
    config: Any,
    args: Any,
    *,
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS,
    peft: dict[str, Any] | None = None,
    counts: "Counts | None" = None,
) -> MemoryEstimate:
    """Estimate the memory of a run.

    Args:
        config: a transformers model config.
        args: a `GRPOConfig` or `RLOOConfig`.
        prompt_tokens: length of a prompt.
        peft: arguments of `peft.LoraConfig`, when adapters are trained.
        counts: the model's parameters, where they are known; otherwise it is built to count them.

    Raises:
        ValueError: the config belongs to no causal language model.
    """
    text = config.get_text_config()
    parameters, trainable, linear = counts or count_parameters(config, peft)
    stored = _stored_bytes(config, args)
    computed = 2 if args.bf16 or args.fp16 else stored
    completion_tokens = args.max_completion_length or (text.max_position_embeddings - prompt_tokens)
    sequence = prompt_tokens + completion_tokens
    device = args.device.type
    group = prompt_tokens + args.num_generations * completion_tokens
    derived = derived_budget(args.per_device_train_batch_size, sequence, group, device)
    tokens = max(args.max_tokens_per_micro_batch or derived, sequence)
    rows = min(args.max_concurrent_completions, args.per_device_train_batch_size * args.steps_per_generation)
    cached = rows * completion_tokens + -(-rows // args.num_generations) * prompt_tokens
    packs = device == "cpu" and computed == 4 and torch.backends.mkl.is_available() and not args.samples_elsewhere
    tile = min(min(tokens, args.logprob_chunk_size) * text.vocab_size * 4, TILE_BYTES.get(device, TILE_BYTES["cuda"]))
    return MemoryEstimate(
        weights=parameters * stored,
        reference=parameters * stored if args.beta and peft is None else 0,
        gradients=trainable * stored,
        optimizer=int(trainable * stored * optimizer_states(str(args.optim))),
        activations=tokens * activation_width(text, bool(args.gradient_checkpointing)) * computed,
        logits=LOGIT_COPIES * tile,
        kv_cache=0 if args.samples_elsewhere else cached * cache_bytes_per_token(text, computed),
        packed=linear * 4 if packs else 0,
        parameters=parameters,
        trainable=trainable,
    )


def cache_bytes_per_token(text: Any, number: int) -> int:
    """Bytes of a token's keys and values in all layers, `number` bytes each."""
    return text.num_hidden_layers * 2 * _key_width(text) * number


class Counts(NamedTuple):
    """Parameters of a model: all, those that are updated, and the weights of its plain linear layers, head included."""

    parameters: int
    trainable: int
    linear: int


def count_parameters(config: Any, peft: dict[str, Any] | None = None) -> Counts:
    """Parameters of a causal language model, and of its LoRA adapter if there is one; exact.

    Raises:
        ValueError: transformers has no causal language model for this config.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if peft is not None:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **peft}))
    linear = sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear)
    return Counts(model.num_parameters(), model.num_parameters(only_trainable=True), linear)


def activation_width(text: Any, checkpointing: bool) -> int:
    """Numbers per token that the backward pass keeps (the formula is in `MemoryEstimate`)."""
    hidden, keys = text.hidden_size, _key_width(text)
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = experts * (getattr(text, "intermediate_size", None) or 4 * hidden)
    layer = 4 * hidden + 3 * text.num_attention_heads * _head_width(text) + 3 * keys + 4 * inner
    layers = text.num_hidden_layers
    return layers * hidden + layer if checkpointing else layers * layer


def optimizer_states(optim: str) -> float:
    """Numbers per trainable parameter that an optimizer keeps, in units of the parameter's own size (float32).

    Adam keeps two, in 8-bit form two quarters; Lion and RMSprop one; plain SGD none; Adafactor next to none.
    Unknown optimizers are taken to be like Adam.
    """
    name = optim.lower().rsplit(".", 1)[-1]
    if name.startswith(("sgd", "adafactor")):
        return 0.0
    states = 1.0 if "lion" in name or "rmsprop" in name or "adagrad" in name else 2.0
    return states / 4 if "8bit" in name else states


def readable(size: int) -> str:
    """Bytes as people write them: 1536 -> '1.5 KiB'."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _head_width(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _key_width(text: Any) -> int:
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return heads * _head_width(text)


def _stored_bytes(config: Any, args: Any) -> int:
    """Bytes of one weight: the policy is loaded in float32 unless `model_init_kwargs` says otherwise."""
    wanted = (args.model_init_kwargs or {}).get("dtype", torch.float32)
    if wanted == "auto":
        wanted = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, wanted.removeprefix("torch.")) if isinstance(wanted, str) else wanted
    return dtype.itemsize
