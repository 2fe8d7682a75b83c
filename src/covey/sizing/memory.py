"""Memory of a run by part: an estimate from the model's config and the training arguments.

Weights, gradients and optimizer state are counted exactly. Activations, caches and logits are formulas for Llama-like
decoders with fused attention and for encoders of images, for completions of full length; `benchmarks/memory.py`
compares them with measurements. Excluded: Python, CUDA and libraries without a model, fragmentation, reward models.
"""

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from covey.config.optimizers import STOCHASTIC, name_of
from covey.core.packing import ActivationRoom, derived_budget
from covey.core.routes import RouteShape
from covey.engines.native.number_formats import FAST, FORMATS
from covey.policy.adapters import base_model, has_adapter
from covey.policy.lm_head.linear import KEPT_BYTES, TILE_BYTES
from covey.policy.loading import sees_images
from covey.rollout.seats import FROZEN, past_steps
from covey.runtime.process_memory import available_memory
from covey.sizing.model_spec import (
    DecoderWidths,
    ModelSpec,
    SavedActivations,
    VisionEncoderSpec,
    count_parameters,
    spec_of,
    unit_parameters,
)

ASSUMED_PROMPT_TOKENS = 256  # default length of a prompt
LOGIT_COPIES = 2  # tiles of float32 numbers that the head holds at once: logits and probabilities

FILLED = {"cpu": 0.5, "cuda": 0.8}
"""Share of a process's available memory up to which micro-batches grow and layers keep their activations."""

FUSED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Decoders whose norms and MLPs are known to be fused on a CPU; for others the estimate assumes that they are not."""

SHARDED = {
    "multi_gpu": (False, False, False),
    "cpu_2proc": (False, False, False),
    "fsdp2": (True, True, True),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    "zero3": (True, True, True),
}
"""By accelerate config shipped with Covey: whether weights, gradients and optimizer state are sharded."""


@dataclass(frozen=True)
class ShardCounts:
    """Number of processes over which each part is sharded; 1: each process has all of it."""

    name: str = "multi_gpu"  # a key of `SHARDED`
    processes: int = 1
    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    @classmethod
    def of(cls, name: str, processes: int) -> "ShardCounts":
        if name not in SHARDED:
            raise ValueError(f"sharding {name!r} is not known; it is one of {', '.join(SHARDED)}.")
        return cls(name, processes, *(processes if sharded else 1 for sharded in SHARDED[name]))


class Images(NamedTuple):
    """Images of a prompt: their tokens in the language model, patches in the encoder, and numbers in the pixels."""

    tokens: int = 0
    patches: int = 0
    pixels: int = 0


class Opponents(NamedTuple):
    """Most copies of the policy that play seats of a game: of the first policy, and of earlier optimizer steps."""

    frozen: int = 0
    past: int = 0

    @classmethod
    def of(cls, seats: Iterable[Any], kept: int) -> "Opponents":
        """Copies for seats: "frozen" seats share one; each n of "policy:n" has the `kept` ones and the next."""
        named = {seat for seat in seats if isinstance(seat, str)}
        steps = {n for seat in named if (n := past_steps(seat)) is not None}
        return cls(int(FROZEN in named), len(steps) * (kept + 1))


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process, by part.

    Letters: T tokens of a micro-batch, L layers; per token H hidden units, Q query, K key/value and I MLP channels;
    c bytes of a number in matrix products, s of a stored weight.
    """

    weights: int  # in their type, quantised ones with scales, or the shard; adapters and what is not quantised: float32
    # Copies of the policy for a KL penalty and teachers; 0 with adapters, which are switched off or swapped.
    reference: int
    gradients: int  # one number per trainable parameter of the shard
    optimizer: int  # `optimizer_states(optim)` numbers per trainable parameter of the shard
    # Saved for the backward pass, T * L * ((2Q + 2K + 4I) * c + H * h), with h in `layer_bytes`; of layers that
    # recompute one, and H numbers at each border. And the temporaries of a layer on the way back, T * (3I * c + 8H).
    activations: int
    # `LOGIT_COPIES` tiles of min(T, logprob_chunk_size) * vocabulary float32 numbers, at most `TILE_BYTES` each on a
    # plain linear head; on a CPU in full precision also those of all learned tokens, up to `KEPT_BYTES`.
    logits: int
    kv_cache: int  # (sequences decoded at once * completion tokens + a prompt for each group) * L * 2K * c, if built-in
    packed: int  # linear layers again in an order for few sequences, or rounded; float32 on a CPU, or engine_dtype
    parameters: int  # a number, not bytes
    trainable: int  # number of those that are updated
    encoder: int = 0  # saved activations of the image encoder (`encoder_bytes`)
    head_gradient: int = 0  # of the output head's weight, whole, which is there before that of the embedding
    # On a CPU, excess of the gradients of embedding and head at the end of a backward pass: memory of activations is
    # reused, but in smaller pieces than these. And gaps between the tensors of layers: the C library aligns, so a freed
    # product's place fits no other tensor of its size.
    late_gradient: int = 0
    gaps: int = 0
    unpacked: int = 0  # the largest of the quantised weights, in the type of products
    # Weights in the type of products: trained ones, which autocast keeps for a micro-batch, and frozen ones, which the
    # backward pass needs; with checkpointing those of one layer.
    casts: int = 0
    # Of casts and activations, bytes that are not there at once: casts of layers that recompute end with the forward
    # pass, and what they compute again comes after it.
    apart: int = 0
    # Of sharded weights, the outermost unit and two layers whole, and the gradients of the first and of one layer.
    gathered: int = 0
    copy: int = 0  # of sharded weights, all of them while the built-in engine samples
    opponents: int = 0  # copies of the policy in seats of a game; of earlier policies with adapters, the adapters
    teachers: int = 0  # whole models that are loaded as teachers
    sent: int = 0  # on a CPU, a copy of the weights last sent to servers, for sending differences
    # Experts of the tokens of a rollout batch, with `routing_replay`: prompts once for each group, a byte or two for
    # each layer and expert of a token.
    routes: int = 0
    # With `teacher_top_k=-1`, hidden states of a teacher for a rollout batch's completions, as wide as the policy's.
    teacher_states: int = 0
    micro_batches: int = 2  # of an optimizer step; with several, gradients are there in addition to activations
    micro_batch_tokens: int = 0  # T
    room: int = 0  # tokens of a micro-batch that fit into a GPU's memory; 0 if unknown
    layers: int = 0  # L
    kept_layers: int = 0  # layers that keep their activations in a micro-batch of T tokens; others recompute
    activation_room: ActivationRoom | None = None  # to decide it for other micro-batches; None: all layers or none
    completion_tokens: int = 0  # of the longest completion
    stored_bytes: int = 4  # s
    computed_bytes: int = 4  # c

    @property
    def training(self) -> int:
        """Peak bytes of a training step: at the start of the last backward pass, or when all gradients exist."""
        saved = self.activations + self.gaps + self.encoder + self.logits
        backward = saved + self.casts - self.apart + self.gathered + self.unpacked
        height = max(backward + self.gradients * (self.micro_batches > 1), self.gradients - self.head_gradient)
        return self.resident + self.head_gradient + self.late_gradient + height

    @property
    def sampling(self) -> int:
        return self.resident + self.kv_cache + self.packed + self.copy + self.unpacked

    @property
    def peak(self) -> int:
        """Peak bytes: the larger of training and sampling, which alternate."""
        return max(self.training, self.sampling)

    @property
    def resident(self) -> int:
        kept = self.reference + self.teachers + self.teacher_states + self.opponents + self.sent + self.routes
        return self.weights + self.optimizer + kept


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
    device_bytes: int = 0,
    opponents: Opponents | None = None,
    teachers: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of a run.

    Args:
        config: a transformers model config.
        args: a `GRPOConfig` or `RLOOConfig`.
        prompt_tokens: length of a prompt without its images.
        images: images of a prompt; None for a model that sees none, or prompts without images.
        peft, quantization: arguments of `peft.LoraConfig`, if adapters are trained, and a `BitsAndBytesConfig`, if the
            weights under them are quantised.
        counts: the model's sizes, if known; otherwise it is built on the meta device to count them.
        spread: sharding of the model; None: each process has all of it.
        device: "cpu" or "cuda"; None: this machine's.
        device_bytes: memory that the process can get, up to which micro-batches grow (on a GPU) and layers keep their
            activations; 0: unknown.
        opponents: copies of the policy that play seats of a game.
        teachers: bytes of models that are loaded as teachers.
    """
    spread, images, device = spread or ShardCounts(), images or Images(), device or args.device.type
    counts = counts or count_parameters(config, peft, quantization, args.frozen_parts())
    given = (
        config,
        args,
        prompt_tokens,
        images,
        peft is None,
        counts,
        spread,
        device,
        opponents or Opponents(),
        teachers,
    )
    found = _estimate(*given)
    shared = args.use_vllm and args.vllm_mode == "colocate"  # vLLM takes what the trainer leaves
    if device not in FILLED or not device_bytes or shared or sees_images(config) or spread.gradients > 1:
        return found
    fixed = found.resident + found.gradients + found.casts + LOGIT_COPIES * TILE_BYTES[device]
    size = int(FILLED[device] * device_bytes) - fixed
    per_token = found.activations // found.micro_batch_tokens
    room = max(0, size) // per_token // 1024 * 1024  # in multiples of 1024, so that repeated runs on one machine agree
    keeps = _activation_room(config, args, counts, peft is None, device, size, found) if may_keep(args) else None
    return _estimate(*given, room=room if device == "cuda" else 0, keeps=keeps)


def may_keep(args: Any) -> bool:
    """True if only layers that do not fit recompute; with `gradient_checkpointing_kwargs` every layer does."""
    # Padded rows may be under an attention that keeps its weights, and compiled layers would be compiled again.
    given = args.gradient_checkpointing_kwargs or getattr(args, "activation_checkpointing_kwargs", None)
    return bool(args.gradient_checkpointing and not given and not args.torch_compile and args.attn_layout != "padded")


def _activation_room(
    config: Any, args: Any, counts: ModelSpec, whole: bool, device: str, size: int, found: MemoryEstimate
) -> ActivationRoom:
    """Room by which a micro-batch decides; on a CPU, kept activations may at most double the memory of the run."""
    text = config.get_text_config()
    precision = _precision(config, args, counts, device, sharded=False, whole=whole)
    size -= _cast_numbers(counts, precision, found.layers, found.layers) * precision.computed - found.casts
    gap = precision.saved.passing * precision.computed if device == "cpu" else 0
    recomputed = activation_bytes(text, precision, kept=0) + gap
    kept = layer_bytes(text, precision) - text.hidden_size * precision.residual + gap
    if device == "cpu":
        size = min(size, found.peak + recomputed * found.micro_batch_tokens)
    return ActivationRoom(size, recomputed, kept, found.layers)


def _estimate(
    config: Any,
    args: Any,
    prompt_tokens: int,
    images: Images,
    whole: bool,
    counts: ModelSpec,
    spread: ShardCounts,
    device: str,
    opponents: Opponents,
    teachers: int,
    room: int = 0,
    keeps: ActivationRoom | None = None,
) -> MemoryEstimate:
    """The estimate with micro-batches of up to `room` tokens; `whole`: all weights are trained, no adapter."""
    text, vision = config.get_text_config(), sees_images(config)
    precision = _precision(config, args, counts, device, sharded=spread.weights > 1, whole=whole)
    prompt = prompt_tokens + images.tokens
    completion = args.max_completion_length or (text.max_position_embeddings - prompt)
    tokens, count = largest_micro_batch(args, prompt, completion, device, padded=vision, room=room)
    rollouts = tokens // (prompt + completion)
    shown = rollouts if args.torch_compile else -(-rollouts // args.num_generations)
    trainable = counts.trainable
    stored, computed, updated, sharded, *_ = precision
    weights = (weight_bytes(counts, stored) + trainable * (updated - stored)) // spread.weights
    head, late = (0, 0) if sharded else _vocabulary_gradients(text, counts, updated, count, whole, device)
    chunk = min(tokens, args.logprob_chunk_size) * text.vocab_size * 4
    shared = args.num_generations if args.attn_layout in ("auto", "shared_prefix") and not vision else 1
    learned = tokens - tokens * prompt // (prompt + shared * completion)
    kept_logits = 4 * learned * text.vocab_size
    fits = learned <= args.logprob_chunk_size and kept_logits <= KEPT_BYTES.get(device, 0)
    keeps_logits = fits and head > 0 and computed == 4
    checkpointing, layers = bool(args.gradient_checkpointing), text.num_hidden_layers
    kept = (keeps.kept(tokens) if keeps else 0) if checkpointing else layers
    patches = shown * images.patches * (1 if checkpointing else counts.vision.layers)
    outer, layer = unit_parameters(config) if sharded else (0, 0)
    sampled = MemoryEstimate(
        weights=weights,
        reference=weights * _copies_of_policy(args) if whole else 0,
        gradients=trainable * updated // spread.gradients,
        optimizer=_optimizer_bytes(args, counts, text, updated) // spread.optimizer,
        activations=tokens * activation_bytes(text, precision, kept),
        logits=LOGIT_COPIES * min(chunk, TILE_BYTES.get(device, TILE_BYTES["cuda"])) + kept_logits * keeps_logits,
        kv_cache=_cached_tokens(args, prompt, completion, vision) * cache_bytes_per_token(text, computed),
        packed=_packed_bytes(args, device, computed, counts, images),
        parameters=counts.parameters,
        trainable=trainable,
        encoder=encoder_bytes(counts.vision, precision, images, checkpointing, rows=rollouts, shown=shown),
        head_gradient=head,
        late_gradient=late,
        gaps=_gaps(counts, precision, tokens * max(kept, 1), patches) if device == "cpu" else 0,
        unpacked=counts.quantised.largest * computed,
        casts=_cast_numbers(counts, precision, kept, layers) * computed,
        apart=_apart(text, precision, trainable, tokens, kept),
        gathered=(outer + 2 * layer + (outer + layer) * whole) * computed,
        copy=counts.parameters * computed if sharded and args.ds3_gather_for_generation else 0,
        opponents=opponents.frozen * weights + opponents.past * (weights if whole else trainable * updated),
        teachers=teachers,
        sent=counts.parameters * stored if device == "cpu" and _keeps_sent(args, whole) else 0,
        routes=_route_bytes(args, text, prompt, completion),
        teacher_states=_teacher_state_bytes(args, text, completion, computed),
        micro_batches=count,
        micro_batch_tokens=tokens,
        room=room,
        layers=layers,
        kept_layers=kept,
        activation_room=keeps,
        completion_tokens=completion,
        stored_bytes=stored,
        computed_bytes=computed,
    )
    return replace(sampled, kv_cache=0, packed=0, copy=0) if args.samples_elsewhere else sampled


def weight_bytes(counts: ModelSpec, stored: int) -> int:
    """Bytes of a model's weights: of `stored` bytes each, and of quantised ones with their scales."""
    return (counts.parameters - counts.quantised.numbers) * stored + counts.quantised.size


def estimate_of(args: Any, model: Any, opponents: Opponents | None = None, teachers: int = 0) -> MemoryEstimate:
    """Estimate the memory of a run with the parameters of its loaded model, in the dtype that they have.

    `teachers` are bytes of models that have been loaded as teachers.
    """
    base = base_model(model)
    if getattr(base, "is_quantized", False):  # quantised weights are counted as float32
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        counts = ModelSpec(sum(p.numel() for p in model.parameters()), trainable, packed=0)
    else:
        args = copy.copy(args)
        args.model_init_kwargs = {"dtype": base.dtype}
        counts = spec_of(model, base)
    adapter: dict[str, Any] | None = {} if has_adapter(model) else None
    loaded = sum(p.numel() * p.element_size() for p in model.parameters()) if args.device.type == "cpu" else 0
    available = available_bytes(args) + loaded
    return estimate(
        base.config, args, peft=adapter, counts=counts, device_bytes=available, opponents=opponents, teachers=teachers
    )


def available_bytes(args: Any) -> int:
    """Bytes of its device that this process can get, on a CPU in addition to those it has; 0 if unknown."""
    if args.device.type == "cpu":
        return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def _cast_numbers(counts: ModelSpec, precision: "Precision", kept: int, layers: int) -> int:
    frozen = counts.parameters - counts.quantised.numbers - counts.trainable
    if precision.sharded or precision.computed >= precision.stored:
        frozen = 0
    return counts.trainable * precision.casts + frozen * max(kept, 1) // layers


def _apart(text: Any, precision: "Precision", trainable: int, tokens: int, kept: int) -> int:
    layers = text.num_hidden_layers
    casts = trainable * precision.casts * precision.computed * (layers - max(kept, 1)) // layers
    return min(casts, tokens * (layer_temporaries(text, precision) + layer_bytes(text, precision) * (kept == 0)))


def _packed_bytes(args: Any, device: str, computed: int, counts: ModelSpec, images: Images) -> int:
    """Bytes of the built-in engine's copies of linear layers; for `auto` as if nothing is rounded.

    Rounded numbers for which a CPU has no products are multiplied in float32.
    """
    numbers = counts.packed + counts.vision.packed * (images.patches > 0)
    if args.rounds_engine and args.engine_dtype in FORMATS:
        suits, _ = FAST.get((device, args.engine_dtype), (None, None))
        as_numbers = device == "cpu" and not (suits is not None and suits())
        return numbers * (4 if as_numbers else FORMATS[args.engine_dtype].dtype.itemsize)
    return 4 * numbers if device == "cpu" and computed == 4 and torch.backends.mkl.is_available() else 0


def _gaps(counts: ModelSpec, precision: "Precision", tokens: int, patches: int) -> int:
    """Bytes between what layers save; tokens and patches count once for each layer that saves."""
    of_patches = patches * counts.vision.passing * (counts.vision.channels > 0)
    return (tokens * precision.saved.passing + of_patches) * precision.computed


def _keeps_sent(args: Any, whole: bool) -> bool:
    """True if the trainer keeps a copy of the weights that servers were sent; adapters sent alone need none."""
    to_servers = args.use_vllm and args.vllm_mode == "server" and args.vllm_weight_transfer != "disk"
    return bool(args.vllm_weight_differences and to_servers and (whole or args.vllm_lora_sync == "merged"))


def _copies_of_policy(args: Any) -> int:
    """Number of frozen copies: the reference, which is also the teacher "start" unless it moves, and followers."""
    kinds = [*args.teachers.values()]
    first = bool(args.beta) + kinds.count("start")
    return (min(first, 1) if not args.sync_ref_model else first) + kinds.count("follower")


def _route_bytes(args: Any, text: Any, prompt: int, completion: int) -> int:
    """Bytes of the routes of a rollout batch's tokens on a process; 0 if none are replayed."""
    top_k = getattr(text, "num_experts_per_tok", None)
    if getattr(args, "routing_replay", None) is None or not top_k:
        return 0
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((number for name in names if (number := getattr(text, name, None))), 1)
    shape = RouteShape(tuple(range(text.num_hidden_layers)), text.num_hidden_layers, int(experts), int(top_k))
    rollouts = _rollouts(args)
    return shape.nbytes * (rollouts * completion + -(-rollouts // (args.num_generations or 1)) * prompt)


def _teacher_state_bytes(args: Any, text: Any, completion: int, number: int) -> int:
    """Bytes of hidden states that stand for a teacher's log-probs of the whole vocabulary; 0 for named tokens."""
    if args.teacher_loss != "divergence" or args.teacher_top_k >= 0:
        return 0
    return _rollouts(args) * completion * text.hidden_size * number


def _rollouts(args: Any) -> int:
    """Rollouts of a rollout batch on a process."""
    algebra = args.algebra()
    return algebra.per_device_train_batch_size * algebra.steps_per_generation


def _cached_tokens(args: Any, prompt: int, completion: int, vision: bool) -> int:
    """Tokens in the built-in engine's cache at once; with images, of one group, with the prompt in each completion."""
    group = args.num_generations
    if vision:
        return min(args.max_concurrent_completions, group) * (prompt + completion)
    rows = min(args.max_concurrent_completions, args.per_device_train_batch_size * args.steps_per_generation)
    return rows * completion + -(-rows // group) * prompt


def _vocabulary_gradients(
    text: Any, counts: ModelSpec, number: int, micro_batches: int, whole: bool, device: str
) -> tuple[int, int]:
    """Bytes of the head's gradient at the start of a backward pass, and of further gradients of embedding and head.

    A tied weight has two gradients until they are added up. A later micro-batch adds to existing gradients.
    """
    each = text.vocab_size * text.hidden_size * number
    trained = int(whole) if counts.embeddings is None else counts.embeddings
    tied = whole and trained == 1 and text.tie_word_embeddings
    at_end = 2 if tied or (trained == 2 and micro_batches == 1) else min(trained, 1)
    head = int(trained > 0 and counts.head)
    return each * head, each * (at_end - head) if device == "cpu" else 0


def largest_micro_batch(
    args: Any, prompt: int, completion: int, device: str, padded: bool = False, room: int = 0
) -> tuple[int, int]:
    """Tokens of the largest micro-batch, and micro-batches of a step; images are `padded`, without sharing."""
    group, sequence = args.num_generations, prompt + completion
    shares_prompts = args.attn_layout in ("auto", "shared_prefix") and not padded
    whole = prompt + group * completion if shares_prompts else sequence
    derived = derived_budget(args.per_device_train_batch_size, sequence, whole, device, room)
    budget = max(args.max_tokens_per_micro_batch or derived, sequence)
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps
    total = rows * whole // group if shares_prompts else rows * sequence
    if budget >= total:
        return total, 1
    if shares_prompts and budget < whole:  # a part of a group: its prompt, and as many completions as fit
        whole = prompt + (budget - prompt) // completion * completion
        total = -(-group // ((whole - prompt) // completion)) * whole * (rows // group or 1)
    tokens = budget // whole * whole
    count = -(-total // tokens)
    if padded or args.attn_layout == "padded":
        return tokens, count
    return -(-total // (whole * count)) * whole, count  # packed micro-batches have even sizes


def cache_bytes_per_token(text: Any, number: int) -> int:
    """Bytes of a token's keys and values in all layers, with `number` bytes each."""
    return text.num_hidden_layers * 2 * DecoderWidths.of(text).keys * number


class Precision(NamedTuple):
    """Bytes of the numbers in a micro-batch."""

    stored: int  # bytes of a weight
    computed: int  # bytes of a number in matrix products
    updated: int  # bytes of a weight that is trained
    sharded: bool  # weights are gathered in the dtype of matrix products
    saved: SavedActivations
    fused: bool = False  # norms and MLPs run as `fused_layers` in `covey.policy.fused`

    @property
    def casts(self) -> bool:
        """True if autocast or an adapter copies the input of each trained linear layer."""
        return self.computed < self.updated and not self.sharded

    @property
    def residual(self) -> int:
        """Bytes of a number between layers."""
        return self.stored if self.computed < self.stored and not self.sharded else self.computed


def layer_bytes(text: Any, precision: Precision) -> int:
    """Bytes per token that the backward pass of one layer needs.

    Each of its two norms (or four, and those of queries and keys) saves its input in float32 and, if trained, the
    factor of its weight; linear layers that are trained save their inputs: two, or with casts one copy for each of the
    five that read a norm. Queries, attention's result, keys, values, and four of the MLP's width (three if its last
    layer is not trained): with all trained h = 8 + 2 * residual + 2c (or 5c) for H, 2c each for Q and K, 4c for I. Of
    a mixture, each expert's copy of the token, and its output before and after it is weighed. Fused norms save their
    input alone, fused MLPs two numbers of their width.
    """
    c, saved = precision.computed, precision.saved
    queries, keys, inner, experts = DecoderWidths.of(text)
    reading = saved.attention + saved.mlp if precision.casts else (saved.attention > 0) + (saved.mlp > 0)
    norm = 4 + precision.residual * saved.norms * (not precision.fused)
    fused_mlp = precision.fused and not (saved.ranks and (saved.mlp or saved.down))
    wide = 2 * queries + 2 * keys + (2 if fused_mlp else 3 + saved.down) * inner + saved.ranks
    wide += experts * (2 + saved.down) * text.hidden_size * (experts > 1)
    return text.hidden_size * (saved.wide * norm + reading * c) + (queries + keys) * saved.heads * norm + wide * c


def activation_bytes(text: Any, precision: Precision, kept: int) -> int:
    """Bytes per token that a micro-batch saves if `kept` layers do not recompute, with a layer's temporaries."""
    layers, hidden = text.num_hidden_layers, text.hidden_size
    last = 3 * hidden * 4  # of the last norm, and the input of the head
    layer = layer_bytes(text, precision)
    saved = max(kept, 1) * layer + (layers - kept) * hidden * precision.residual
    return saved + last + layer_temporaries(text, precision)


def layer_temporaries(text: Any, precision: Precision) -> int:
    return 3 * DecoderWidths.of(text).inner * precision.computed + 2 * text.hidden_size * 4


def encoder_bytes(
    vision: VisionEncoderSpec, precision: Precision, images: Images, checkpointing: bool, *, rows: int, shown: int
) -> int:
    """Bytes that encoding the images of a micro-batch of `rows` rollouts saves; a group's are encoded once (`shown`).

    Per patch and block `VisionEncoderSpec.channels`, and the inputs and outputs of two norms.
    """
    c = precision.computed
    norms = vision.hidden * (2 * precision.residual + (vision.readers if precision.casts else 2) * c)
    block = (vision.channels * c + norms) * (vision.channels > 0)
    borders = vision.layers * vision.hidden * precision.residual * (vision.channels > 0)
    patch = borders + block if checkpointing else vision.layers * block
    encoded = images.patches * patch + images.tokens * vision.merger * c
    return shown * encoded + rows * (images.tokens * vision.aligner * c + images.pixels * 4)


def _optimizer_bytes(args: Any, counts: ModelSpec, text: Any, updated: int) -> int:
    """State of the optimizer, whose numbers have the type of the weights that are updated, `updated` bytes each."""
    name, whole = name_of(args), counts.trainable == counts.parameters
    if name == STOCHASTIC:
        return 8 * counts.trainable  # two moments in float32
    if name == "muon":  # a momentum for each weight, and AdamW's second moment for embeddings and head; vectors are few
        matrices = (1 if text.tie_word_embeddings else 2) * whole if counts.embeddings is None else counts.embeddings
        return (counts.trainable + matrices * text.vocab_size * text.hidden_size) * updated
    return int(counts.trainable * updated * optimizer_states(str(args.optim)))


def optimizer_states(optim: str) -> float:
    """Numbers per trainable parameter in an optimizer's state; unknown optimizers are counted like Adam."""
    name = optim.lower().rsplit(".", 1)[-1]
    if name.startswith(("sgd", "adafactor")):
        return 0.0
    states = 1.0 if "lion" in name or "rmsprop" in name or "adagrad" in name else 2.0
    return states / 4 if "8bit" in name else states


def readable(size: int) -> str:
    """Bytes with a unit: 1536 -> '1.5 KiB'."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _precision(config: Any, args: Any, counts: ModelSpec, device: str, *, sharded: bool, whole: bool) -> Precision:
    """Dtype of the policy's weights: float32 unless `model_init_kwargs` has another one, or weights are quantised."""
    wanted = (args.model_init_kwargs or {}).get("dtype", torch.float32)
    if wanted == "auto":
        wanted = getattr(config, "dtype", None) or torch.float32
    dtype = getattr(torch, wanted.removeprefix("torch.")) if isinstance(wanted, str) else wanted
    stored = 4 if counts.quantised.numbers else dtype.itemsize
    computed = 2 if args.bf16 or args.fp16 else stored
    saved = counts.saved or SavedActivations(norms=whole)
    plain = device == "cpu" and computed == stored >= 4 and not sharded and not args.torch_compile
    text = config.get_text_config()
    known = text.model_type in FUSED and not getattr(text, "mlp_bias", False) and not counts.quantised.numbers
    return Precision(stored, computed, stored if whole else 4, sharded, saved, plain and known)
