"""What a run keeps in memory, by part: an estimate from the model's config and the training arguments.

Weights, gradients and optimizer state are counted exactly (the model is built on PyTorch's meta device, which holds
shapes but no numbers). Activations, caches and logits are formulas for Llama-like decoders with fused attention, for
completions of full length; `benchmarks/memory.py` compares them with what runs take. Not counted: what Python, CUDA
and libraries hold without a model, fragmentation, reward models.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from covey.policy.lm_head_linear import TILE_BYTES
from covey.trainers.passes import derived_budget
from covey.trainers.spread import Spread

ASSUMED_PROMPT_TOKENS = 256
"""Length of a prompt where nobody says."""

LOGIT_COPIES = 2
"""Tiles of logits in float32 that the head works with at once, and what it makes of them."""

PACKED_ROWS = (512, 128)
"""MKL's packed copy of a weight [n, k] takes (n rounded up to a multiple of the first + the second) * k numbers; read
off the copies that it makes."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process, by part.

    Letters: T tokens of a pass, L layers; per token H hidden units, Q query, K key/value and I intermediate channels;
    c bytes of a number in matrix products, s of a stored weight.

    Attributes:
        weights: parameters in the type they are loaded in, or this process's share of them.
        reference: a second copy of the parameters when there is a KL penalty; 0 with adapters, which are switched off
            instead.
        gradients: one number per trainable parameter, or per one of the share.
        optimizer: `optimizer_states(optim)` numbers per trainable parameter, or per one of the share.
        activations: what the backward pass of one pass needs, T * L * ((2Q + 2K + 4I) * c + H * h), with h in
            `layer_bytes`; with checkpointing one layer of that and H numbers at each border. And what passes through a
            layer on the way back, T * (3I * c + 8H).
        logits: `LOGIT_COPIES` tiles of min(T, logprob_chunk_size) * vocabulary float32 numbers, or smaller ones of
            `TILE_BYTES` on a plain linear head.
        kv_cache: (rows decoded at once * completion tokens + their prompts, one for each group) * L * 2K * c;
            sampling only, and with the built-in engine.
        packed: the weights of linear layers once more, in the order in which MKL multiplies a few rows; only while
            the built-in engine samples, in float32 and on a CPU.
        parameters: all parameters.
        trainable: those that are updated.
        head_gradient: of the output head's weight, whole, which waits for the embedding's (if tied) or is added to what
            earlier passes left.
        casts: weights in the type of products, as autocast keeps them in a pass.
        gathered: where weights are shared out: the outermost unit and two layers whole, and the gradients of the first
            and of one layer, in c bytes each.
        copy: where weights are shared out, all of them while the built-in engine samples.
        passes: forward and backward passes of an optimizer step; with several, gradients are there beside activations.
        pass_tokens: T.
        completion_tokens: of the longest completion.
        stored_bytes: s.
        computed_bytes: c.
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
    head_gradient: int = 0
    casts: int = 0
    gathered: int = 0
    copy: int = 0
    passes: int = 2
    pass_tokens: int = 0
    completion_tokens: int = 0
    stored_bytes: int = 4
    computed_bytes: int = 4

    @property
    def training(self) -> int:
        """Bytes at the height of a training step: where the last backward pass begins, or where all gradients are."""
        backward = self.activations + self.logits + self.casts + self.gathered
        return self.resident + self.head_gradient + max(backward + self.gradients * (self.passes > 1), self.gradients)

    @property
    def sampling(self) -> int:
        """Bytes at the height of a generation."""
        return self.resident + self.kv_cache + self.packed + self.copy

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
    spread: Spread | None = None,
    device: str | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a run.

    Args:
        config: a transformers model config.
        args: a `GRPOConfig` or `RLOOConfig`.
        prompt_tokens: length of a prompt.
        peft: arguments of `peft.LoraConfig`, when adapters are trained.
        counts: the model's parameters, where they are known; otherwise it is built to count them.
        spread: over processes; None: each has all of everything.
        device: "cpu" or "cuda", which the run is for; None: what this machine has.

    Raises:
        ValueError: the config belongs to no causal language model.
    """
    text = config.get_text_config()
    spread = spread or Spread()
    parameters, trainable, packed = counts or count_parameters(config, peft)
    stored = _stored_bytes(config, args)
    computed = 2 if args.bf16 or args.fp16 else stored
    completion_tokens = args.max_completion_length or (text.max_position_embeddings - prompt_tokens)
    device, shares = device or args.device.type, spread.weights > 1
    tokens, passes = tokens_of_passes(args, prompt_tokens, completion_tokens, device)
    rows = min(args.max_concurrent_completions, args.per_device_train_batch_size * args.steps_per_generation)
    cached = rows * completion_tokens + -(-rows // args.num_generations) * prompt_tokens
    packs = device == "cpu" and computed == 4 and torch.backends.mkl.is_available() and not args.samples_elsewhere
    tile = min(min(tokens, args.logprob_chunk_size) * text.vocab_size * 4, TILE_BYTES.get(device, TILE_BYTES["cuda"]))
    precision = Precision(stored, computed, trained=peft is None, shares=shares)
    return MemoryEstimate(
        weights=parameters * stored // spread.weights,
        reference=parameters * stored // spread.weights if args.beta and peft is None else 0,
        gradients=trainable * stored // spread.gradients,
        optimizer=int(trainable * stored * optimizer_states(str(args.optim))) // spread.optimizer,
        activations=tokens * activation_bytes(text, precision, bool(args.gradient_checkpointing)),
        logits=LOGIT_COPIES * tile,
        kv_cache=0 if args.samples_elsewhere else cached * cache_bytes_per_token(text, computed),
        packed=packed * 4 if packs else 0,
        parameters=parameters,
        trainable=trainable,
        head_gradient=0 if peft is not None or shares else text.vocab_size * text.hidden_size * stored,
        casts=parameters * computed if computed < stored and not shares else 0,
        gathered=_gathered(config, computed, trained=peft is None) if shares else 0,
        copy=parameters * computed if shares and not args.samples_elsewhere and args.ds3_gather_for_generation else 0,
        passes=passes,
        pass_tokens=tokens,
        completion_tokens=completion_tokens,
        stored_bytes=stored,
        computed_bytes=computed,
    )


def tokens_of_passes(args: Any, prompt: int, completion: int, device: str) -> tuple[int, int]:
    """Tokens of the largest pass, and how many passes an optimizer step has, at one process.

    Groups are kept whole where they fit; a layout that shares prompts counts each once.
    """
    group, sequence = args.num_generations, prompt + completion
    shares_prompts = args.attn_layout in ("auto", "shared_prefix")
    whole = prompt + group * completion if shares_prompts else sequence
    derived = derived_budget(args.per_device_train_batch_size, sequence, whole, device)
    budget = max(args.max_tokens_per_micro_batch or derived, sequence)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    total = rows * whole // group if shares_prompts else rows * sequence
    if budget >= total:
        return total, 1
    if shares_prompts and budget < whole:  # a part of a group: its prompt, and as many completions as fit
        whole = prompt + (budget - prompt) // completion * completion
        total = -(-group // ((whole - prompt) // completion)) * whole * (rows // group or 1)
    tokens = budget // whole * whole
    return tokens, -(-total // tokens)


def cache_bytes_per_token(text: Any, number: int) -> int:
    """Bytes of a token's keys and values in all layers, `number` bytes each."""
    return text.num_hidden_layers * 2 * _key_width(text) * number


class Counts(NamedTuple):
    """Numbers in a model: all parameters, those that are updated, and in MKL's packed copies of its linear layers."""

    parameters: int
    trainable: int
    packed: int


def count_parameters(config: Any, peft: dict[str, Any] | None = None) -> Counts:
    """Parameters of a causal language model, and of its LoRA adapter if there is one; exact.

    Raises:
        ValueError: transformers has no causal language model for this config.
    """
    model = _shapes(config)
    if peft is not None:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **peft}))
    linear = (module for module in model.modules() if type(module) is nn.Linear)
    step, more = PACKED_ROWS
    packed = sum((-(-one.out_features // step) * step + more) * one.in_features for one in linear)
    return Counts(model.num_parameters(), model.num_parameters(only_trainable=True), packed)


class Units(NamedTuple):
    """Parameters that are gathered together: those outside of the layers, and those of the largest layer."""

    outer: int
    layer: int


def unit_parameters(config: Any) -> Units:
    """What FSDP2 wraps: each decoder layer, and around them embedding, last norm and head."""
    model = _shapes(config)
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [sum(p.numel() for p in m.parameters()) for m in model.modules() if type(m).__name__ in kinds]
    return Units(model.num_parameters() - sum(layers), max(layers, default=0))


class Precision(NamedTuple):
    """What numbers of a pass are made of.

    Attributes:
        stored: bytes of a weight.
        computed: bytes of a number in matrix products.
        trained: norms have gradients.
        shares: weights are shared out, and put together in the type of products.
    """

    stored: int
    computed: int
    trained: bool
    shares: bool

    @property
    def casts(self) -> bool:
        """Autocast makes a copy of its input for each linear layer."""
        return self.computed < self.stored and not self.shares

    @property
    def residual(self) -> int:
        """Bytes of a number between layers."""
        return self.stored if self.casts else self.computed


def layer_bytes(text: Any, precision: Precision) -> int:
    """Bytes per token that the backward pass of one layer needs.

    Of its two norms each keeps its input in float32 and, when trained, what it multiplies with its weight; linear
    layers their inputs: two, or with autocast one copy for each of the five that read a norm. Queries, attention's
    result, keys, values, and four of the MLP's width: h = 8 + 2 * residual + 2c (or 5c) for H, 2c each for Q and K, 4c
    for I.
    """
    hidden, c = text.hidden_size, precision.computed
    norms = 8 + 2 * precision.residual * precision.trained + (5 if precision.casts else 2) * c
    queries = text.num_attention_heads * _head_width(text)
    return hidden * norms + (2 * queries + 2 * _key_width(text) + 4 * _inner_width(text)) * c


def activation_bytes(text: Any, precision: Precision, checkpointing: bool) -> int:
    """Bytes per token that one pass keeps, with what passes through a layer on the way back."""
    layers, hidden = text.num_hidden_layers, text.hidden_size
    last = 3 * hidden * 4  # of the last norm, and the input of the head
    passing = 3 * _inner_width(text) * precision.computed + 2 * hidden * 4
    layer = layer_bytes(text, precision)
    kept = layers * hidden * precision.residual + layer if checkpointing else layers * layer
    return kept + last + passing


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


def _shapes(config: Any) -> Any:
    """The causal language model of a config, without numbers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _gathered(config: Any, computed: int, trained: bool) -> int:
    outer, layer = unit_parameters(config)
    return (outer + 2 * layer + (outer + layer) * trained) * computed


def _inner_width(text: Any) -> int:
    """Intermediate channels of a token; of a mixture, in all experts that it goes through."""
    experts = getattr(text, "num_experts_per_tok", None) or 1
    inner = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
    return experts * (inner or getattr(text, "intermediate_size", None) or 4 * text.hidden_size)


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
