"""Built-in engine: samples from the policy itself, in the trainer's process, on any hardware.

A prompt is computed once and its cache shared by its completions; finished sequences leave the batch at once and
waiting ones are admitted; drafts are verified in one forward pass. The engine shares the policy's memory, so there are
no weights to load. See also `recurrent_engine`, for models with a recurrent state and for images.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from covey.core.engine import SampleRequest
from covey.core.model import cache_argument, compute_dtype, decoder_of, name_of
from covey.core.records import Completion
from covey.core.routing import RouteReading, check_routing
from covey.engines.native.cuda_graph import Capture, CaptureError, GraphStep, capture_cuda_graph
from covey.engines.native.fused_step import FusedStep, find_fused_step
from covey.engines.native.inference_contexts import PolicyEngine, attention_implementation, fused_operations
from covey.engines.native.invariance import AttentionShape, AttentionSizes, InvariantFunctions
from covey.engines.native.per_sequence_cache import PerSequenceCache
from covey.engines.native.prefill import (
    ALONE_ATTENTION,
    PrefixStore,
    Rows,
    additive_masks,
    continue_prompts,
    verify_drafts,
)
from covey.engines.native.sampling import Batch, SequenceState, compaction_moves, sequences_of
from covey.engines.native.shared_prefix_cache import SHARED_PREFIX_ATTENTION, SharedPrefixCache
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.user_code import warn

CAPTURED_TOKENS = 256  # with CUDA graphs: tokens per completion, at most, that the cache has room for from the start
PREFILL_TOKENS = 4096  # most (padded) tokens in one forward pass over prompts or drafts

Item = TypeVar("Item")


@dataclass(eq=False, kw_only=True)
class NativeEngine(PolicyEngine):
    """Samples from a transformers causal language model."""

    pad_token_id: int  # pads prompts of a prefill batch; any id of the vocabulary will do
    check_interval: int | None = None  # steps between checks for ended sequences; None: 1 on a CPU, 8 elsewhere
    whole_calls: bool = False  # call only the whole model, never its parts, as some wrappers need; disables drafts

    def __post_init__(self, model: Callable[[], Any]) -> None:
        super().__post_init__(model)
        self._waiting: deque[SequenceState] = deque()
        self._admitted: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._batch: Batch | None = None
        self._cache: SharedPrefixCache | None = None
        self._prefixes = PrefixStore()
        self._shares_prefixes: bool | None = None  # None: not tried yet
        self._softcap = False  # while it is awake: attention soft-caps where the model does
        self._shapes: set[AttentionShape] = set()  # of the attention layers, found by the trial of shared prefixes
        self._fuses: bool | None = False if self.whole_calls else None  # None: not tried yet
        self._fused_step: FusedStep | None = None
        self._use_graphs: bool | None = False if self.whole_calls else None  # None: on CUDA
        self._capture: Capture = capture_cuda_graph
        self._graph_step: GraphStep | None = None
        self._driver: asyncio.Task[None] | None = None
        self._keeps_routes = False  # a sequence of the next forward pass keeps the experts of its tokens
        self._step_routes: Tensor | None = None  # [S, L, k] experts of the last decoding step, run or replayed

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; ValueError for unknown settings, images or unfit drafts."""
        sequences = sequences_of(request, self.eos_token_ids, self.max_context, tokenizer=self.tokenizer)
        if request.params.keep_routes:
            check_routing(self._model(), "keep_routes=True")
        self._waiting.extend(sequences)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        return list(await asyncio.gather(*map(attrgetter("done"), sequences)))

    @contextmanager
    def awake(self) -> Iterator[None]:
        try:
            with super().awake():
                self._softcap = self._model().config._attn_implementation == "eager"  # transformers' SDPA ignores it
                yield
        finally:
            self._prefixes.clear()
            self._drop_cache()  # the policy is about to change, and training needs the memory

    def _drop_cache(self) -> None:
        self._cache = self._fused_step = None
        if self._graph_step is not None:
            self._graph_step.begin(None)

    async def _drive(self) -> None:
        """Decode until no sequence is left; between steps other coroutines run."""
        try:
            await asyncio.sleep(0)  # callers that are ready now queue their requests first
            while self._waiting or self._running:
                self._admit()
                self._decode()
                await asyncio.sleep(0)
        except BaseException as error:
            for sequences in (self._running, self._admitted, self._waiting):
                for sequence in sequences:
                    if not sequence.done.done():
                        sequence.done.set_exception(error)
                sequences.clear()
            self._batch = None
            self._drop_cache()
            if not isinstance(error, Exception):
                raise

    def _admit(self) -> None:
        """Prefill waiting sequences once several can be admitted together: each prefill is a full forward pass."""
        free = self.max_sequences - len(self._running)
        if not self._waiting or (self._running and free < min(len(self._waiting), max(1, self.max_sequences // 4))):
            return
        self._settle()
        if self._cache is None:
            self._cache = self._new_cache()
        groups: dict[tuple[str | None, tuple[int, ...], int], list[SequenceState]] = {}
        for _ in range(min(free, len(self._waiting))):
            self._admitted.append(sequence := self._waiting.popleft())
            if not sequence.needs_no_tokens:
                request = sequence.request
                key = request.adapter, tuple(request.prompt_ids), _computed_before(sequence)
                groups.setdefault(key, []).append(sequence)
        whole = [(prompt, group) for (_, prompt, before), group in groups.items() if not before]
        for batch in self._batches(whole, [len(prompt) for prompt, _ in whole]):
            self._prefill([group for _, group in batch])
        continued = [sequence for (_, _, before), group in groups.items() if before for sequence in group]
        if continued:
            self._continue_prefixes(continued)
        self._prefixes.trim()
        self._cache.move([], len(self._running))  # drops prompts whose sequences have all finished
        self._admitted.clear()

    def _batches(self, items: list[Item], sizes: list[int]) -> Iterator[list[Item]]:
        """Batches of forward passes; one item each if rows cannot attend alone, as padding would change them."""
        return _batches(items, sizes) if self._shares_prefixes else ([item] for item in items)

    def _prefill(self, groups: list[list[SequenceState]]) -> None:
        """Compute each group's prompt once and start its sequences, those with drafts after the accepted tokens."""
        assert self._cache is not None, "made on admission"
        prompts = [group[0].request.prompt_ids for group in groups]
        prefilled, routes = self._compute_routed_prompts(prompts, [x for group in groups for x in group])
        handles = self._cache.add_groups(prefilled, [len(prompt) - 1 for prompt in prompts])
        handles_without_draft: list[int] = []
        drafted: dict[tuple[int, bool], list[tuple[int, SequenceState]]] = {}
        for index, group in enumerate(groups):
            if any(sequence.request.shared == len(prompts[index]) for sequence in group):
                self._prefixes.add(tuple(prompts[index]), prefilled, index, routes[index] if routes else None)
            for sequence in group:
                if routes and sequence.request.params.keep_routes:
                    sequence.routes.append(routes[index])
                if sequence.draft:
                    settings = (id(sequence.request.params), sequence.request.draft_lenience is None)
                    drafted.setdefault(settings, []).append((index, sequence))
                else:
                    handles_without_draft.append(handles[index])
                    self._running.append(sequence)
        if handles_without_draft:
            self._cache.add_sequences(handles_without_draft)
        for alike in drafted.values():
            for batch in self._batches(alike, [len(sequence.draft) for _, sequence in alike]):
                self._verify_drafts(prefilled, prompts, handles, batch)

    def _continue_prefixes(self, sequences: list[SequenceState]) -> None:
        """Start sequences whose prompts begin with tokens that other requests share (`SampleRequest.shared`).

        The shared tokens are taken from the store, or computed first, and the rest of the prompt is computed after
        them in either case, so that the bits do not depend on the store.
        """
        assert self._cache is not None, "made on admission"
        parts = [(tuple(x.request.prompt_ids[: x.request.shared]), x) for x in sequences]
        keeping = {prefix for prefix, x in parts if x.request.params.keep_routes}
        missing = [
            prefix
            for prefix in dict.fromkeys(prefix for prefix, _ in parts)
            if not self._prefixes.has(prefix, with_routes=prefix in keeping)
        ]
        for computed in self._batches(missing, [*map(len, missing)]):
            keeps = [x for prefix, x in parts if prefix in computed]
            prefilled, routes = self._compute_routed_prompts([*map(list, computed)], keeps)
            for index, prefix in enumerate(computed):
                self._prefixes.add(prefix, prefilled, index, routes[index] if routes else None)
        for batch in self._batches(parts, [len(x.request.prompt_ids) - len(prefix) for prefix, x in parts]):
            prefixes = list(dict.fromkeys(prefix for prefix, _ in batch))
            tokens = [x.request.prompt_ids[x.request.shared :] for _, x in batch]
            owners = [prefixes.index(prefix) for prefix, _ in batch]
            stored = self._prefixes.prefilled(prefixes)
            handles = self._cache.add_groups(stored, [len(prefix) - 1 for prefix in prefixes])
            with self._computing_rows(), self._reading([x for _, x in batch]) as read:
                _, cache = continue_prompts(
                    self._model(), stored, [*map(list, prefixes)], owners, tokens, self._row_softcap
                )
            for (prefix, x), own in zip(batch, routes_of_rows(read, [*map(len, tokens)]), strict=True):
                if x.request.params.keep_routes:
                    x.routes += [self._prefixes.routes[prefix], own]
            self._cache.add_sequences([handles[owner] for owner in owners], cache.own, [*map(len, tokens)])
            self._running += [x for _, x in batch]

    def _verify_drafts(
        self,
        prefilled: Cache | None,
        prompts: list[list[int]],
        handles: list[int],
        owned: list[tuple[int, SequenceState]],
    ) -> None:
        """Append the accepted tokens of drafts; unfinished sequences are decoded from there."""
        assert self._cache is not None, "made on admission"
        owners, sequences = [owner for owner, _ in owned], [sequence for _, sequence in owned]
        with self._computing_rows(), self._reading(sequences) as read:
            computed, lengths = verify_drafts(self._model(), prefilled, prompts, owners, sequences, self._row_softcap)
        for sequence, own in zip(sequences, routes_of_rows(read, [len(x.draft) for x in sequences]), strict=True):
            if sequence.request.params.keep_routes:
                sequence.routes.append(own[: len(sequence.token_ids)])
        unfinished = [i for i, sequence in enumerate(sequences) if sequence.finish is None]
        for sequence in sequences:
            sequence.resolve()
        if unfinished:
            self._cache.add_sequences(
                [handles[owners[i]] for i in unfinished],
                [(keys[unfinished], values[unfinished]) for keys, values in computed.own],
                [lengths[i] for i in unfinished],
            )
            self._running += [sequences[i] for i in unfinished]

    def _reading(self, sequences: Iterable[SequenceState]) -> AbstractContextManager[RouteReading | None]:
        """Context of a forward pass that reads the experts of its tokens, if one of the sequences keeps them."""
        if not any(sequence.request.params.keep_routes for sequence in sequences):
            return nullcontext()
        return check_routing(self._model(), "keep_routes=True").passing()

    def _compute_routed_prompts(
        self, prompts: list[list[int]], sequences: Iterable[SequenceState]
    ) -> tuple[Cache | None, list[Tensor]]:
        """`_compute_prompts`, and the experts of each prompt's tokens [t, L, k] if one of the sequences keeps them."""
        keeps = any(sequence.request.params.keep_routes for sequence in sequences)
        computed = [len(prompt) - 1 for prompt in prompts]
        if not any(computed):
            shape = check_routing(self._model(), "keep_routes=True").shape if keeps else None
            return None, [] if shape is None else [shape.unknown(0) for _ in prompts]
        with self._reading(sequences) as read:
            prefilled = self._compute_prompts(prompts)
        return prefilled, routes_of_rows(read, computed) if keeps else []

    def _compute_prompts(self, prompts: list[list[int]]) -> Cache | None:
        """Compute all tokens of each prompt except the last, which the first decoding step takes; None without any.

        Padding is on the right, where causal attention never sees it.
        """
        model = self._model()
        device = self.input_device
        width = max(map(len, prompts)) - 1
        if not width:
            return None
        cache = DynamicCache()
        computed = [len(prompt) - 1 for prompt in prompts]
        lengths = torch.tensor(computed, device=device)
        pad = [self.pad_token_id]
        ids = torch.tensor([prompt[:-1] + pad * (width + 1 - len(prompt)) for prompt in prompts], device=device)
        positions = torch.arange(width, device=device).expand(len(prompts), -1)
        visible = (positions < lengths[:, None]) | (positions == 0)  # an empty prompt attends to something
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": True}
        called = model if self.whole_calls else decoder_of(model)
        if self._row_softcap is None:
            inputs["attention_mask"] = visible
        else:
            config = model.config.get_text_config()
            inputs["attention_mask"] = additive_masks(positions, visible, positions, config, compute_dtype(model))
            inputs["rows"] = Rows([0] * len(prompts), computed, self._row_softcap)
        with self._computing_rows():
            called(**inputs, **{cache_argument(called): cache}, **({"logits_to_keep": 1} if self.whole_calls else {}))
        return cache

    @property
    def _row_softcap(self) -> bool | None:
        """True if attention computed row by row soft-caps; None if rows of a forward pass cannot attend alone."""
        return self._softcap if self._shares_prefixes and not self.whole_calls else None

    @contextmanager
    def _computing_rows(self) -> Iterator[None]:
        """Context in which each row of a forward pass is computed as if it were the only one."""
        model = self._model()
        alone = attention_implementation(model, ALONE_ATTENTION) if self._row_softcap is not None else nullcontext()
        with alone, self._invariant_functions():
            yield

    def _invariant_functions(self) -> AbstractContextManager[Any]:
        return InvariantFunctions() if self.input_device.type == "cpu" else nullcontext()

    def _new_cache(self) -> SharedPrefixCache:
        """A cache whose sequences share their prompts, if this model's attention can read it (tried once)."""
        model = self._model()
        dtype = compute_dtype(model)
        softcap = self._softcap
        if self._shares_prefixes is None:
            objection = self._objection_to_sharing(dtype, softcap)
            self._shares_prefixes = objection is None
            if objection is not None:
                warn(
                    f"{name_of(model)} decodes with a copy of the prompt for every completion, because"
                    f" {objection}. Samples are the same; long prompts take more memory and time.",
                )
        if not self._shares_prefixes:
            return PerSequenceCache(dtype)
        self._fused_step = self._new_fused_step(softcap)
        cache = SharedPrefixCache(
            dtype, softcap, AttentionSizes(self._shapes, dtype) if self.input_device.type == "cpu" else None
        )
        if self._use_graphs if self._use_graphs is not None else self.input_device.type == "cuda":
            config = model.config.get_text_config()
            cache.least_capacity = min(CAPTURED_TOKENS, max(sequence.budget for sequence in self._waiting))
            self._graph_step = self._graph_step or GraphStep(self._run, config, self._capture)
            self._graph_step.begin(cache)
        return cache

    def _objection_to_sharing(self, dtype: torch.dtype, softcap: bool) -> str | None:
        """Reason why decoding with a shared prompt differs from an ordinary forward pass; None if it does not."""
        model, device = self._model(), self.input_device
        if not getattr(model, "_supports_attention_backend", False):
            return "its attention is its own implementation"
        # Without autocast, so that rounding is small; but weights of two dtypes, as gathered ones have, need it.
        uniform = len({weight.dtype for weight in model.parameters() if weight.is_floating_point()}) == 1
        autocast = torch.autocast(device.type, enabled=False) if uniform else nullcontext()
        with autocast, self._packed.unrounded():
            ids = torch.tensor([self._trial_tokens()], device=device)
            expected = model(input_ids=ids, use_cache=False).logits[:, 2:].float()
            fuses = self._fuses
            if uniform and self._new_fused_step(softcap, expected) is not None:
                return None  # steps are fused ones, which attend to shared prompts
            self._fuses, self._fused_step = fuses, None
            try:
                attended, logits = self._trial(model.dtype if uniform else dtype, softcap)
            except (TypeError, AttributeError, RuntimeError) as error:  # no such keyword, no layer index, latents
                if is_out_of_memory(error):
                    raise
                return f"its attention does not accept a shared prompt ({type(error).__name__}: {error})"
            difference = (logits - expected).abs().max()
        allowed = 0.05 if dtype.itemsize >= 4 else 0.2  # bfloat16 alone moves logits by a tenth of the largest
        if not attended or not difference <= allowed * expected.abs().max():
            return f"its attention reads a shared prompt wrongly (logits differ by {difference.item():.2g})"
        return None

    def _trial(self, dtype: torch.dtype, softcap: bool) -> tuple[int, Tensor]:
        """Decode two tokens of two sequences that share a prompt: number of layers that attended, logits [2, 2, V]."""
        cache, tokens, device = SharedPrefixCache(dtype, softcap), self._trial_tokens(), self.input_device
        cache.add_sequences(cache.add_groups(self._compute_prompts([tokens[:3]]), [2]) * 2)
        steps = [self._forward(cache, *(torch.full((2,), x, device=device) for x in (tokens[i], i))) for i in (2, 3)]
        self._shapes = cache.shapes
        return cache.attended, torch.stack(steps, dim=1).float()

    def _trial_tokens(self) -> list[int]:
        return [token % self._model().config.get_text_config().vocab_size for token in (2, 3, 5, 7)]

    def _new_fused_step(self, softcap: bool, expected: Tensor | None = None) -> FusedStep | None:
        """A `FusedStep`, if the model is built so that one can be made and computes the same (tried once).

        `expected` are the logits to compare with, by default those of plain steps.
        """
        in_float32 = self.input_device.type == "cpu" and compute_dtype(self._model()) == torch.float32
        step = find_fused_step(self._model()) if in_float32 and self._fuses is not False else None
        if step is None or self._fuses:
            return step
        if expected is None:
            with self._packed.unrounded():
                _, expected = self._trial(torch.float32, softcap)
        self._fused_step = step
        try:
            with self._packed.unrounded():
                _, logits = self._trial(torch.float32, softcap)
            self._fuses = bool((logits - expected).abs().max() <= 1e-3 * expected.abs().max())
        except (TypeError, AttributeError, RuntimeError) as error:  # rotations of another kind, say
            if is_out_of_memory(error):
                raise
            self._fuses = False
        return step if self._fuses else None

    def _decode(self) -> None:
        """Sample one token for every running sequence; finished ones leave."""
        if not self._running:
            return
        assert self._cache is not None, "admission comes first"
        if self._batch is None:
            self._batch = Batch(self._running, self.input_device, self.check_interval)
        keeps = any(sequence.request.params.keep_routes for sequence in self._running)
        if keeps != self._keeps_routes:
            self._keeps_routes = keeps
            if self._graph_step is not None:
                self._graph_step.begin(self._graph_step.cache)  # a captured step does what it did when captured
        logits = self._forward(self._cache, self._batch.last, self._batch.positions)
        routes = None if self._step_routes is None else self._step_routes[: len(logits)].clone()
        self._batch.sample(logits, routes)
        if self._batch.has_ended():
            self._settle()

    def _forward(self, cache: SharedPrefixCache, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed every sequence of the cache its newest token; logits [S, V]."""
        if self._graph_step is not None and self._graph_step.cache is cache:
            try:
                return self._graph_step(tokens, positions)
            except CaptureError as error:
                self._stop_capturing(error)
        masks = cache.begin_step(positions, self._model().config.get_text_config())
        return self._run(cache, tokens[:, None], positions[:, None], masks)

    def _stop_capturing(self, error: CaptureError) -> None:
        """Stop using graphs: until the engine sleeps if memory was short, else for the rest of the run."""
        assert self._graph_step is not None, "it has failed"
        self._graph_step.begin(None)
        if not error.out_of_memory:
            self._use_graphs = False
        warn(
            f"decoding runs without a CUDA graph{' in this rollout batch' if error.out_of_memory else ''}: capturing a"
            f" step of {self._model().config.model_type} failed ({error}). Samples are the same; decoding is slower.",
        )

    def _run(self, cache: SharedPrefixCache, tokens: Tensor, positions: Tensor, masks: Any) -> Tensor:
        """Forward pass over one token per sequence: [S, 1] -> [S, V]; it also sets `_step_routes`."""
        model, shared = self._model(), cache.shares_prompts
        self._step_routes = None
        reading: AbstractContextManager[RouteReading | None] = nullcontext()
        if self._keeps_routes:
            reading = check_routing(model, "keep_routes=True").passing()
        if self._fused_step is not None and isinstance(masks, Tensor):
            return self._fused_step(cache, tokens[:, 0], positions[:, 0], masks)
        fused = cache.fused and self.input_device.type == "cuda"
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": masks, "use_cache": True}
        inputs |= {cache_argument(model): cache, **({"prefix_cache": cache} if shared else {})}
        with (
            attention_implementation(model, SHARED_PREFIX_ATTENTION) if shared else nullcontext(),
            fused_operations(model, compute_dtype(model)) if fused else nullcontext(),
            self._invariant_functions(),
            reading as read,
        ):
            logits: Tensor = model(**inputs).logits[:, -1]
        self._step_routes = None if read is None else read.taken
        return logits

    def _settle(self) -> None:
        """Append the sampled tokens to their sequences, resolve the finished ones and close the gaps in the cache."""
        if self._batch is None:
            return
        assert self._cache is not None, "a batch has a cache"
        self._batch.flush()
        self._batch = None
        finished = []
        for sequence in self._running:
            sequence.resolve()
            finished.append(sequence.needs_no_tokens)
        moves, remaining = compaction_moves(finished), finished.count(False)
        self._cache.move(moves, remaining)
        for source, target in moves:
            self._running[target] = self._running[source]
        del self._running[remaining:]


def routes_of_rows(read: RouteReading | None, lengths: Sequence[int]) -> list[Tensor]:
    """Experts [t, L, k] of each row's tokens in a padded forward pass; empty tensors if none were read."""
    if read is None or read.taken is None:
        return [torch.zeros(0, 0, 0, dtype=torch.uint8)] * len(lengths)
    rows = read.taken.unflatten(0, (len(lengths), -1)).cpu()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _computed_before(sequence: SequenceState) -> int:
    """Number of the prompt's first tokens that are computed before the others; it depends on the request only."""
    shared = sequence.request.shared
    return shared if 1 < shared < len(sequence.request.prompt_ids) and not sequence.draft else 0


def _batches(items: list[Item], sizes: list[int]) -> Iterator[list[Item]]:
    """Items in batches of similar sizes, with at most `PREFILL_TOKENS` padded tokens each (or one item)."""
    batch: list[Item] = []
    for index in sorted(range(len(items)), key=sizes.__getitem__):
        if batch and (len(batch) + 1) * sizes[index] > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(items[index])
    if batch:
        yield batch
