"""What a run keeps in memory, by part: an estimate from the model's config and the training arguments.

Weights, gradients and optimizer state are counted exactly (`covey.sizing.model_spec`). Activations, caches and
logits are formulas for Llama-like decoders with fused attention, and for encoders of images, for completions of full
length; `benchmarks/memory.py` compares them with what runs take. Not counted: what Python, CUDA and libraries hold
without a model, what lies between tensors, reward models.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from covey.core.packing import derived_budget
from covey.engines.native.inference_contexts import MOST_ROWS
from covey.policy.lm_head.linear import TILE_BYTES
from covey.policy.loading import sees_images
from covey.sizing.model_spec import ModelSpec, SavedActivations, VisionEncoderSpec, count_parameters, unit_parameters
from covey.sizing.parallelism import ShardCounts

ASSUMED_PROMPT_TOKENS = 256
"""Length of a prompt where nobody says."""

LOGIT_COPIES = 2
"""Tiles of logits in float32 that the head works with at once, and what it makes of them."""


class Images(NamedTuple):
    """Images of a prompt.

    Attributes:
        tokens: of the language model that stand for them.
        patches: that the encoder computes.
        pixels: numbers that it reads.
    """

    tokens: int = 0
    patches: int = 0
    pixels: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process, by part.

    Letters: T tokens of a pass, L layers; per token H hidden units, Q query, K key/value and I intermediate channels;
    c bytes of a number in matrix products, s of a stored weight.

    Attributes:
        weights: parameters in the type they are loaded in, those that are quantised in fewer bits with their scales, or
            this process's share of them. Adapters, and beside quantised weights all others, are in float32.
        reference: a second copy of the parameters when there is a KL penalty; 0 with adapters, which are switched off
            instead.
        gradients: one number per trainable parameter, or per one of the share.
        optimizer: `optimizer_states(optim)` numbers per trainable parameter, or per one of the share.
        activations: what the backward pass of one pass needs, T * L * ((2Q + 2K + 4I) * c + H * h), with h in
            `layer_bytes`; with checkpointing one layer of that and H numbers at each border. And what passes through a
            layer on the way back, T * (3I * c + 8H).
        encoder: the same of what encodes images (`encoder_bytes`).
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
        late_gradient: on a CPU, what gradients of embedding and head take beyond that when a backward pass ends:
            activations' memory is kept for later tensors then, but in pieces that are smaller than these.
        gaps: on a CPU, between the tensors of layers: where a product that nobody keeps was, no other of its size
            fits, since the C library wants room for alignment besides.
        unpacked: the largest of the quantised weights, in the type of products.
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
    encoder: int = 0
    head_gradient: int = 0
    late_gradient: int = 0
    gaps: int = 0
    unpacked: int = 0
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
        backward = (
            self.activations + self.gaps + self.encoder + self.logits + self.casts + self.gathered + self.unpacked
        )
        height = max(backward + self.gradients * (self.passes > 1), self.gradients - self.head_gradient)
        return self.resident + self.head_gradient + self.late_gradient + height

    @property
    def sampling(self) -> int:
        """Bytes at the height of a generation."""
        return self.resident + self.kv_cache + self.packed + self.copy + self.unpacked

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
    images: Images | None = None,
    peft: dict[str, Any] | None = None,
    quantization: Any = None,
    counts: ModelSpec | None = None,
    spread: ShardCounts | None = None,
    device: str | None = None,
) -> MemoryEstimate:
    """Estimate the memory of a run.

    Args:
        config: a transformers model config.
        args: a `GRPOConfig` or `RLOOConfig`.
        prompt_tokens: length of a prompt, its images aside.
        images: of each prompt.
        peft: arguments of `peft.LoraConfig`, when adapters are trained.
        quantization: a `BitsAndBytesConfig`, where the weights under them are quantised.
        counts: the model's parameters, where they are known; otherwise it is built to count them.
        spread: over processes; None: each has all of everything.
        device: "cpu" or "cuda", which the run is for; None: what this machine has.

    Raises:
        ValueError: the config belongs to no language model.
    """
    text, vision = config.get_text_config(), sees_images(config)
    spread, images = spread or ShardCounts(), images or Images()
    counts = counts or count_parameters(config, peft, quantization, args.frozen_parts())
    parameters, trainable, quantised = counts.parameters, counts.trainable, counts.quantised
    stored = 4 if quantised.numbers else _stored_bytes(config, args)
    computed = 2 if args.bf16 or args.fp16 else stored
    prompt = prompt_tokens + images.tokens
    completion = args.max_completion_length or (text.max_position_embeddings - prompt)
    device, shares = device or args.device.type, spread.weights > 1
    tokens, passes = tokens_of_passes(args, prompt, completion, device, padded=vision)
    packs = device == "cpu" and computed == 4 and torch.backends.mkl.is_available() and not args.samples_elsewhere
    tile = min(min(tokens, args.logprob_chunk_size) * text.vocab_size * 4, TILE_BYTES.get(device, TILE_BYTES["cuda"]))
    updated = 4 if peft is not None else stored
    precision = Precision(stored, computed, updated, shares, counts.kept or SavedActivations(norms=peft is None))
    held = (parameters - quantised.numbers) * stored + quantised.size + trainable * (updated - stored)
    head, late = (0, 0) if shares else _vocabulary_gradients(text, counts, updated, passes, peft is None, device)
    again, rollouts = bool(args.gradient_checkpointing), tokens // (prompt + completion)
    shown = rollouts if args.torch_compile else -(-rollouts // args.num_generations)
    layers = 1 if again else text.num_hidden_layers
    gaps = tokens * layers * precision.kept.passing * computed
    return MemoryEstimate(
        weights=held // spread.weights,
        reference=held // spread.weights if args.beta and peft is None else 0,
        gradients=trainable * updated // spread.gradients,
        optimizer=int(trainable * updated * optimizer_states(str(args.optim))) // spread.optimizer,
        activations=tokens * activation_bytes(text, precision, again),
        logits=LOGIT_COPIES * tile,
        kv_cache=0
        if args.samples_elsewhere
        else _cached_tokens(args, prompt, completion, vision) * cache_bytes_per_token(text, computed),
        packed=_packed_numbers(counts, images) * 4 if packs else 0,
        parameters=parameters,
        trainable=trainable,
        encoder=encoder_bytes(counts.tower, precision, images, again, rows=rollouts, shown=shown),
        head_gradient=head,
        late_gradient=late,
        gaps=(gaps + shown * _encoder_gaps(counts.tower, images, computed, again)) if device == "cpu" else 0,
        unpacked=quantised.largest * computed,
        casts=(parameters - quantised.numbers) * computed if computed < stored and not shares else 0,
        gathered=_gathered(config, computed, trained=peft is None) if shares else 0,
        copy=parameters * computed if shares and not args.samples_elsewhere and args.ds3_gather_for_generation else 0,
        passes=passes,
        pass_tokens=tokens,
        completion_tokens=completion,
        stored_bytes=stored,
        computed_bytes=computed,
    )


def _cached_tokens(args: Any, prompt: int, completion: int, vision: bool) -> int:
    """Tokens whose keys and values the built-in engine holds at once: with images, of one prompt's completions, each
    with a copy of it."""
    group = args.num_generations
    if vision:
        return min(args.max_concurrent_completions, group) * (prompt + completion)
    rows = min(args.max_concurrent_completions, args.per_device_train_batch_size * args.steps_per_generation)
    return rows * completion + -(-rows // group) * prompt


def _packed_numbers(counts: ModelSpec, images: Images) -> int:
    """Of all layers that multiply a few rows at a time, as those of an encoder do with small images."""
    few = 0 < images.patches <= MOST_ROWS
    return counts.packed + (counts.tower.packed if few and counts.tower is not None else 0)


def _vocabulary_gradients(
    text: Any, counts: ModelSpec, number: int, passes: int, whole: bool, device: str
) -> tuple[int, int]:
    """Gradients of the head where a backward pass begins, and what they and those of embeddings take more at its end.

    A tied weight has both, which are added up at the end. In a later pass they are added to what is there.
    """
    each = text.vocab_size * text.hidden_size * number
    trained = int(whole) if counts.embeddings is None else counts.embeddings
    tied = whole and trained == 1 and text.tie_word_embeddings
    at_end = 2 if tied or (trained == 2 and passes == 1) else min(trained, 1)
    head = int(trained > 0 and counts.head)
    return each * head, each * (at_end - head) if device == "cpu" else 0


def tokens_of_passes(args: Any, prompt: int, completion: int, device: str, padded: bool = False) -> tuple[int, int]:
    """Tokens of the largest pass, and how many passes an optimizer step has, at one process.

    Groups are kept whole where they fit; a layout that shares prompts counts each once. With `padded`, as with images,
    there is none.
    """
    group, sequence = args.num_generations, prompt + completion
    shares_prompts = args.attn_layout in ("auto", "shared_prefix") and not padded
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


class Precision(NamedTuple):
    """What numbers of a pass are made of, and which of them are kept.

    Attributes:
        stored: bytes of a weight.
        computed: bytes of a number in matrix products.
        updated: bytes of a weight that is trained.
        shares: weights are shared out, and put together in the type of products.
        kept: inputs that the backward pass of a layer needs.
    """

    stored: int
    computed: int
    updated: int
    shares: bool
    kept: SavedActivations

    @property
    def casts(self) -> bool:
        """Each linear layer that is trained reads a copy of its input, made by autocast or by an adapter."""
        return self.computed < self.updated and not self.shares

    @property
    def residual(self) -> int:
        """Bytes of a number between layers."""
        return self.stored if self.computed < self.stored and not self.shares else self.computed


def layer_bytes(text: Any, precision: Precision) -> int:
    """Bytes per token that the backward pass of one layer needs.

    Of its two norms (or four, and those of queries and keys) each keeps its input in float32 and, when trained, what it
    multiplies with its weight; linear layers that are trained their inputs: two, or with casts one copy for each of the
    five that read a norm. Queries, attention's result, keys, values, and four of the MLP's width (three if its last
    layer is not trained): with all trained h = 8 + 2 * residual + 2c (or 5c) for H, 2c each for Q and K, 4c for I. Of
    a mixture, each expert's copy of the token, and what it gives before and after it is weighed.
    """
    c, kept = precision.computed, precision.kept
    reading = kept.attention + kept.mlp if precision.casts else (kept.attention > 0) + (kept.mlp > 0)
    norm = 4 + precision.residual * kept.norms
    queries, keys = text.num_attention_heads * _head_width(text), _key_width(text)
    wide = 2 * queries + 2 * keys + (3 + kept.down) * _inner_width(text) + kept.ranks
    wide += _experts(text) * (2 + kept.down) * text.hidden_size * (_experts(text) > 1)
    return text.hidden_size * (kept.wide * norm + reading * c) + (queries + keys) * kept.heads * norm + wide * c


def activation_bytes(text: Any, precision: Precision, checkpointing: bool) -> int:
    """Bytes per token that one pass keeps, with what passes through a layer on the way back."""
    layers, hidden = text.num_hidden_layers, text.hidden_size
    last = 3 * hidden * 4  # of the last norm, and the input of the head
    passing = 3 * _inner_width(text) * precision.computed + 2 * hidden * 4
    layer = layer_bytes(text, precision)
    kept = layers * hidden * precision.residual + layer if checkpointing else layers * layer
    return kept + last + passing


def encoder_bytes(
    tower: VisionEncoderSpec | None, precision: Precision, images: Images, checkpointing: bool, *, rows: int, shown: int
) -> int:
    """Bytes that encoding the images of a pass keeps.

    Per patch and block what `VisionEncoderSpec.channels` counts, and of two norms what they read and what is read of
    them.

    Args:
        tower: None: no images.
        precision: bytes of numbers.
        images: of one rollout.
        checkpointing: whether blocks are recomputed.
        rows: rollouts of the pass.
        shown: how many of them show images of their own: siblings' are encoded once (`covey.policy.image_dedup`).
    """
    if tower is None:
        return 0
    c = precision.computed
    norms = tower.hidden * (2 * precision.residual + (tower.readers if precision.casts else 2) * c)
    block = (tower.channels * c + norms) * (tower.channels > 0)
    borders = tower.layers * tower.hidden * precision.residual * (tower.channels > 0)
    patch = borders + block if checkpointing else tower.layers * block
    encoded = images.patches * patch + images.tokens * tower.merger * c
    return shown * encoded + rows * (images.tokens * tower.aligner * c + images.pixels * 4)


def _encoder_gaps(tower: VisionEncoderSpec | None, images: Images, number: int, checkpointing: bool) -> int:
    if tower is None or not tower.channels:
        return 0
    return images.patches * (1 if checkpointing else tower.layers) * tower.passing * number


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


def _gathered(config: Any, computed: int, trained: bool) -> int:
    outer, layer = unit_parameters(config)
    return (outer + 2 * layer + (outer + layer) * trained) * computed


def _inner_width(text: Any) -> int:
    """Intermediate channels of a token; of a mixture, in all experts that it goes through."""
    experts = _experts(text)
    inner = getattr(text, "moe_intermediate_size", None) if experts > 1 else None
    return experts * (inner or getattr(text, "intermediate_size", None) or 4 * text.hidden_size)


def _experts(text: Any) -> int:
    """Experts that a token goes through; 1 without any."""
    return getattr(text, "num_experts_per_tok", None) or 1


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
