"""The built-in engine: samples from the policy itself, in the trainer's process, on any hardware.

A prompt is computed once and its cache shared by its siblings; rows that finish leave at once and waiting ones take
their place; drafts are verified in one pass. It shares the policy's memory, so there are no weights to load. Not here:
tools, rewards, training; how rows are kept (`rows`), caches (`forked_cache`, `row_cache`), drafts (`drafts`).
"""

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from covey.core.engine import EngineTraits, SampleRequest
from covey.core.model_architecture import decoder_of, name_of
from covey.core.model_mode import inference_mode_of
from covey.core.rollout import Completion
from covey.core.weights import WeightUpdate
from covey.engines.native.attention import attention_of, own_attention
from covey.engines.native.chunked_prefill import compute_dtype, extend, logit_tiles
from covey.engines.native.cuda_graph import NotRecorded, RecordedStep, Recorder, record_cuda_graph
from covey.engines.native.draft_verification import verify
from covey.engines.native.mkl_linear import packed_linears
from covey.engines.native.prefix_store import PrefixStore
from covey.engines.native.requests import budget_of, check_request
from covey.engines.native.row_cache import RowCache
from covey.engines.native.sampling import describe
from covey.engines.native.sequences import Batch, SequenceState, apply_moves, closing_moves, steps_per_look
from covey.engines.native.shared_prefix_cache import FORKED_ATTENTION, ForkedCache
from covey.runtime.out_of_memory import is_out_of_memory

PREFILL_TOKENS = 4096
"""Most (padded) tokens in one prefill or verification pass."""


class NativeEngine:
    """Samples from a transformers causal language model.

    Args:
        model: returns the unwrapped model to sample from.
        eos_token_ids: tokens that end a completion.
        pad_token_id: fills the gaps of a prefill batch; any id of the vocabulary will do.
        max_rows: most completions decoded at once.
        max_context: prompt and completion together stay within this; None when unlimited.
        forward_context: entered around sampling (mixed precision, gathered parameters).
        steps_per_look: decoding steps between two looks at which rows have ended; None: 1 on a CPU, 8 elsewhere.
        device: where the model's inputs belong; None: where its weights are.
        whole_calls: only ever call the model as a whole, as some wrappers need; drafts cannot be verified then.
    """

    traits = EngineTraits(shares_policy=True)

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        eos_token_ids: set[int],
        pad_token_id: int,
        max_rows: int = 64,
        max_context: int | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        steps_per_look: int | None = None,
        device: torch.device | None = None,
        whole_calls: bool = False,
    ):
        self._model = model
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.max_context = max_context
        self._forward_context = forward_context
        self._steps_per_look = steps_per_look
        self._waiting: deque[SequenceState] = deque()
        self._admitted: list[SequenceState] = []
        self._rows: list[SequenceState] = []
        self._batch: Batch | None = None
        self._cache: ForkedCache | RowCache | None = None
        self._kept = PrefixStore()
        self._forks: bool | None = None
        self._device_of_inputs = device
        self._whole_calls = whole_calls
        self._records: bool | None = False if whole_calls else None  # None: on CUDA
        self._recorder: Recorder = record_cuda_graph
        self._recorded: RecordedStep | None = None
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt.

        Raises:
            ValueError: settings this engine does not know, images, or drafts that do not fit the seeds.
        """
        check_request(request)
        loop = asyncio.get_running_loop()
        budget = budget_of(request, self.max_context)
        rows = [
            SequenceState(request, i, budget, self.eos_token_ids, loop.create_future())
            for i in range(len(request.seeds))
        ]
        self._waiting.extend(rows)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return list(await asyncio.gather(*(row.done for row in rows)))

    def score(
        self, prompt_ids: list[int], completions: list[list[int]], temperature: float = 1.0
    ) -> list[tuple[list[float], list[float]]]:
        """Log-probs and entropies of given tokens, as sampling them would have reported; within `awake()`.

        The prompt is computed once for all completions, their positions in parallel. For whoever holds tokens that the
        engine did not sample and judges them before it does (rules of reuse, another model's answers). A training step
        has no need of it: drafts are verified as part of sampling, and `TokenScorer` scores what is trained on.

        Args:
            prompt_ids: what they continue.
            completions: given tokens, each list maybe empty.
            temperature: divides the logits.

        Returns:
            Two lists per completion, one number per token.
        """
        scores: list[tuple[list[float], list[float]]] = [([], []) for _ in completions]
        model = self._model()
        prefilled = self._compute_prompts([prompt_ids])
        for places in _within(PREFILL_TOKENS, {i: len(tokens) for i, tokens in enumerate(completions) if tokens}):
            mine = [completions[place] for place in places]
            hidden, _ = extend(model, prefilled, [prompt_ids], [0] * len(mine), mine)
            given = torch.tensor([token for tokens in mine for token in tokens], device=hidden.device)
            parts = [describe(logits, given[part], temperature) for part, logits in logit_tiles(model, hidden)]
            _, logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
            lengths = [len(tokens) for tokens in mine]
            for place, a, b in zip(places, logprobs.split(lengths), entropies.split(lengths), strict=True):
                scores[place] = (a.tolist(), b.tolist())
        return scores

    def load_weights(self, update: WeightUpdate) -> None:
        """Nothing to do: the engine samples from the policy's own parameters."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Put the model into inference mode for the duration, and back as it was."""
        model = self._model()
        try:
            with (
                inference_mode_of(model),
                torch.no_grad(),
                self._forward_context(),
                packed_linears(model),
                attention_of(model, own_attention(model)),  # not a packed layout's: rows are masked one by one
            ):
                yield
        finally:
            self._kept.clear()
            self._cache = self._recorded = None  # the policy is about to change, and training needs the memory

    @property
    def _device(self) -> torch.device:
        return self._device_of_inputs or next(self._model().parameters()).device

    async def _drive(self) -> None:
        """Decode until nothing is left; between steps other coroutines run."""
        try:
            await asyncio.sleep(0)  # let every caller of this moment queue its request
            while self._waiting or self._rows:
                self._admit()
                self._decode()
                await asyncio.sleep(0)
        except BaseException as error:
            for row in [*self._rows, *self._admitted, *self._waiting]:
                if not row.done.done():
                    row.done.set_exception(error)
            for rows in (self._rows, self._admitted, self._waiting):
                rows.clear()
            self._cache = self._batch = self._recorded = None
            if not isinstance(error, Exception):
                raise

    # ---- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefill waiting rows into free places; wait for several places at once, since each prefill is a full pass."""
        free = self.max_rows - len(self._rows)
        if not self._waiting or (self._rows and free < min(len(self._waiting), max(1, self.max_rows // 4))):
            return
        self._settle()
        if self._cache is None:
            self._cache = self._new_cache()
        groups: dict[tuple[int, ...], list[SequenceState]] = {}
        for _ in range(min(free, len(self._waiting))):
            self._admitted.append(row := self._waiting.popleft())
            if not row.leaves:
                groups.setdefault(tuple(row.request.prompt_ids), []).append(row)
        going_on = [rows[0] for rows in groups.values() if len(rows) == 1 and self._goes_on(rows[0])]
        if going_on:
            self._continue(going_on)
        admitted = [rows for rows in groups.values() if rows[0] not in going_on]
        widths = {i: len(rows[0].request.prompt_ids) for i, rows in enumerate(admitted)}
        for places in _within(PREFILL_TOKENS, widths):
            self._prefill([admitted[place] for place in places])
        self._cache.move([], len(self._rows))  # prompts whose rows are all answered already are forgotten
        self._admitted.clear()

    def _prefill(self, groups: list[list[SequenceState]]) -> None:
        """Compute each group's prompt once and start its rows, those with a draft behind what they take of it."""
        assert self._cache is not None, "made on admission"
        prompts = [group[0].request.prompt_ids for group in groups]
        prefilled = self._compute_prompts(prompts)
        for place, group in enumerate(groups):
            self._kept.keep(tuple(prompts[place][: group[0].request.shared]), prefilled, place)
        handles = self._cache.add_groups(prefilled, [len(prompt) - 1 for prompt in prompts])
        owned = [(owner, row) for owner, group in enumerate(groups) for row in group]
        plain = [(owner, row) for owner, row in owned if not row.draft]
        if plain:
            self._cache.add_rows([handles[owner] for owner, _ in plain])
            self._rows += [row for _, row in plain]
        drafted: dict[tuple[int, bool], list[tuple[int, SequenceState]]] = {}
        for owner, row in owned:
            if row.draft:
                kind = (id(row.request.params), row.request.draft_lenience is None)
                drafted.setdefault(kind, []).append((owner, row))
        for alike in drafted.values():
            for places in _within(PREFILL_TOKENS, {i: len(row.draft) for i, (_, row) in enumerate(alike)}):
                self._verify(prefilled, prompts, handles, [alike[place] for place in places])

    def _goes_on(self, row: SequenceState) -> bool:
        """Whether only the end of a row's prompt is left to compute."""
        shared, prompt = row.request.shared, row.request.prompt_ids
        return shared < len(prompt) and not row.draft and tuple(prompt[:shared]) in self._kept

    def _continue(self, rows: list[SequenceState]) -> None:
        """Start rows whose prompts begin with kept ones: only what follows these is computed."""
        assert self._cache is not None, "made on admission"
        begins = [tuple(row.request.prompt_ids[: row.request.shared]) for row in rows]
        rests = [row.request.prompt_ids[row.request.shared :] for row in rows]
        kept = list(dict.fromkeys(begins))
        prefilled = self._kept.prefilled(kept)
        handles = dict(zip(kept, self._cache.add_groups(prefilled, [len(one) - 1 for one in kept]), strict=True))
        for places in _within(PREFILL_TOKENS, {i: len(rest) for i, rest in enumerate(rests)}):
            some = [rests[place] for place in places]
            owners = [kept.index(begins[place]) for place in places]
            _, computed = extend(self._model(), prefilled, [list(one) for one in kept], owners, some)
            self._cache.add_rows([handles[begins[place]] for place in places], computed.own, [len(one) for one in some])
            self._rows += [rows[place] for place in places]

    def _verify(
        self,
        prefilled: Cache | None,
        prompts: list[list[int]],
        handles: list[int],
        owned: list[tuple[int, SequenceState]],
    ) -> None:
        """Let rows take from their drafts; the unfinished are decoded on from there."""
        assert self._cache is not None, "made on admission"
        owners, rows = [owner for owner, _ in owned], [row for _, row in owned]
        computed, lengths = verify(self._model(), prefilled, prompts, owners, rows)
        going = [place for place, row in enumerate(rows) if row.finish is None]
        for row in rows:
            if row.finish is not None:
                row.resolve()
        if going:
            self._cache.add_rows(
                [handles[owners[place]] for place in going],
                [(keys[going], values[going]) for keys, values in computed.own],
                [lengths[place] for place in going],
            )
            self._rows += [rows[place] for place in going]

    def _compute_prompts(self, prompts: list[list[int]]) -> Cache | None:
        """All of each prompt but its last token, right-padded; None if nothing is left.

        The last prompt token is each row's first decoding step, so that sampling happens in one place. Padding stands
        on the right, where causal attention never looks back at it.
        """
        model = self._model()
        device = self._device
        kept = [prompt[:-1] for prompt in prompts]
        width = max(len(p) for p in kept)
        if not width:
            return None
        cache = DynamicCache()
        lengths = torch.tensor([len(p) for p in kept], device=device)
        ids = torch.tensor([p + [self.pad_token_id] * (width - len(p)) for p in kept], device=device)
        positions = torch.arange(width, device=device).expand(len(kept), -1)
        visible = (positions < lengths[:, None]) | (positions == 0)  # an empty row attends to something
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": visible, "past_key_values": cache}
        if self._whole_calls:
            model(**inputs, use_cache=True, logits_to_keep=1)
        else:
            decoder_of(model)(**inputs, use_cache=True)
        return cache

    def _new_cache(self) -> ForkedCache | RowCache:
        """A cache whose rows share their prompts, if this model's attention can read it; tried once."""
        model = self._model()
        dtype = compute_dtype(model)
        softcap = model.config._attn_implementation == "eager"  # transformers' SDPA ignores it
        if self._forks is None:
            # Rounding is no objection; but weights of two types, as those gathered from shares, need autocast.
            uniform = len({one.dtype for one in model.parameters() if one.is_floating_point()}) == 1
            with torch.autocast(self._device.type, enabled=False) if uniform else nullcontext():
                objection = self._objection_to_forking(ForkedCache(model.dtype if uniform else dtype, softcap), dtype)
            self._forks = objection is None
            if objection is not None:
                warnings.warn(
                    f"{name_of(model)} decodes with a copy of the prompt for every completion, because"
                    f" {objection}. Samples are the same, for more memory and time the longer prompts are.",
                    stacklevel=2,
                )
        if not self._forks:
            return RowCache(dtype)
        cache = ForkedCache(dtype, softcap)
        if self._records if self._records is not None else self._device.type == "cuda":
            self._recorded = RecordedStep(
                cache, partial(self._run, cache), model.config.get_text_config(), self._recorder
            )
        return cache

    def _objection_to_forking(self, cache: ForkedCache, dtype: torch.dtype) -> str | None:
        """Why two rows would not see a shared prompt as an ordinary pass, in `dtype`, sees it; None: they do."""
        model = self._model()
        if not getattr(model, "_supports_attention_backend", False):
            return "its attention is of its own make"
        tokens = [token % model.config.get_text_config().vocab_size for token in (2, 3, 5, 7)]
        cache.add_rows(cache.add_groups(self._compute_prompts([tokens[:3]]), [2]) * 2)
        device = self._device
        expected = model(input_ids=torch.tensor([tokens], device=device), use_cache=False).logits[:, 2:].float()
        try:
            got = [
                self._forward(cache, torch.full((2,), tokens[at], device=device), torch.full((2,), at, device=device))
                for at in (2, 3)
            ]
        except (TypeError, AttributeError, RuntimeError) as error:  # no such keyword, no number of its layer, latents
            if is_out_of_memory(error):
                raise
            return f"its attention cannot be told of a shared one ({type(error).__name__}: {error})"
        difference = (torch.stack(got, dim=1).float() - expected).abs().max()
        allowed = 0.05 if dtype.itemsize >= 4 else 0.2  # bfloat16 alone moves logits by a tenth of the largest
        if not cache.attended or not difference <= allowed * expected.abs().max():
            return f"its attention does not read a shared one as it should (logits differ by {difference.item():.2g})"
        return None

    # ---- decoding --------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every row in progress; rows that are finished leave."""
        if not self._rows:
            return
        assert self._cache is not None, "admission comes first"
        if self._batch is None:
            period = self._steps_per_look or steps_per_look(self._device)
            self._batch = Batch(self._rows, self.eos_token_ids, self._device, period)
        self._batch.draw(self._forward(self._cache, self._batch.last, self._batch.positions))
        if self._batch.has_ended():
            self._settle()

    def _forward(self, cache: ForkedCache | RowCache, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed every row of the cache its newest token; logits [rows, V]."""
        if self._recorded is not None and self._recorded.cache is cache:
            try:
                return self._recorded(tokens, positions)
            except NotRecorded as error:
                self._stop_recording(error)
        masks = cache.begin_step(positions, self._model().config.get_text_config())
        return self._run(cache, tokens[:, None], positions[:, None], masks)

    def _stop_recording(self, error: NotRecorded) -> None:
        """Decode step by step: until the engine sleeps where memory ran out, else for good."""
        self._recorded = None
        if not error.for_want_of_memory:
            self._records = False
        warnings.warn(
            f"decoding runs step by step{' in this generation' if error.for_want_of_memory else ''}:"
            f" {self._model().config.model_type} could not be recorded as a CUDA graph ({error}). Samples are the same,"
            " more slowly.",
            stacklevel=2,
        )

    def _run(self, cache: ForkedCache | RowCache, tokens: Tensor, positions: Tensor, masks: Any) -> Tensor:
        """The model's forward pass over one token per row: [rows, 1] -> [rows, V]."""
        model = self._model()
        forked = isinstance(cache, ForkedCache)
        with attention_of(model, FORKED_ATTENTION) if forked else nullcontext():
            output = model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks,
                past_key_values=cache,
                use_cache=True,
                **({"forked": cache} if forked else {}),
            )
        return output.logits[:, -1]

    def _settle(self) -> None:
        """Hand the rows what was drawn for them, answer the finished and close the gaps they leave."""
        if self._batch is None:
            return
        assert self._cache is not None, "a batch has a cache"
        self._batch.settle()
        self._batch = None
        finished = [row.leaves for row in self._rows]
        for row in [row for row in self._rows if row.finish is not None]:
            row.resolve()
        moves = closing_moves(finished)
        self._cache.move(moves, finished.count(False))
        self._rows = apply_moves(self._rows, moves, finished.count(False))


def _within(most: int, sizes: dict[int, int]) -> Iterator[list[int]]:
    """Keys in batches of like sizes, the padded total of each at most `most` (or one key)."""
    batch: list[int] = []
    for key in sorted(sizes, key=lambda key: sizes[key]):
        if batch and (len(batch) + 1) * sizes[key] > most:
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch
