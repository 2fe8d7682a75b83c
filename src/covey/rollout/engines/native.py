"""The built-in engine: samples from the policy itself, in the trainer's process, on any hardware.

A prompt is computed once and its cache copied to its siblings; rows that finish leave at once and waiting ones take
their place. It shares the policy's memory, so there are no weights to load. Not here: tools, rewards, training.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from covey.core.modes import inference_mode_of
from covey.core.rollout import Completion, FinishReason
from covey.rollout.engine import SampleRequest, SamplingParams
from covey.rollout.engines.row_cache import RowCache
from covey.rollout.sampling import draw

PREFILL_TOKENS = 4096
"""Most (padded) prompt tokens in one prefill pass."""


@dataclass(slots=True, eq=False)
class _Row:
    """One completion in progress.

    `generator` is the row's own random stream, made from its seed when it is admitted.
    """

    request: SampleRequest
    seed: int
    done: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    generator: torch.Generator | None = None

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def last_token(self) -> int:
        """The token the next one follows."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]


class NativeEngine:
    """Samples from a transformers causal language model.

    Args:
        model: returns the unwrapped model to sample from.
        eos_token_ids: tokens that end a completion.
        pad_token_id: fills the gaps of a prefill batch; any id of the vocabulary will do.
        max_rows: most completions decoded at once.
        max_context: prompt and completion together stay within this; None when unlimited.
        forward_context: entered around sampling (mixed precision, gathered parameters).
    """

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        eos_token_ids: set[int],
        pad_token_id: int,
        max_rows: int = 64,
        max_context: int | None = None,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self._model = model
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.max_context = max_context
        self._forward_context = forward_context
        self._waiting: deque[_Row] = deque()
        self._admitted: list[_Row] = []
        self._rows: list[_Row] = []
        self._cache: RowCache | None = None
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt.

        Raises:
            ValueError: settings this engine does not know, or images.
        """
        if request.params.extra:
            raise ValueError(
                f"the native engine does not know the generation settings {sorted(request.params.extra)}; it knows"
                " temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens."
            )
        if request.images:
            raise ValueError("the native engine samples text only; images need a vision-language engine.")
        loop = asyncio.get_running_loop()
        rows = [_Row(request, seed, loop.create_future()) for seed in request.seeds]
        self._waiting.extend(rows)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return list(await asyncio.gather(*(row.done for row in rows)))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Nothing to do: the engine samples from the policy's own parameters."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Put the model into inference mode for the duration, and back as it was."""
        model = self._model()
        attention = model.config._attn_implementation
        if attention not in ("sdpa", "eager"):  # decoding masks per row: an explicit mask, not a packed layout
            model.set_attn_implementation("sdpa")
        try:
            with inference_mode_of(model), torch.no_grad(), self._forward_context():
                yield
        finally:
            if attention not in ("sdpa", "eager"):
                model.set_attn_implementation(attention)
            self._cache = None  # the policy is about to change, and training needs the memory

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
            self._cache = None
            if not isinstance(error, Exception):
                raise

    # ---- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefill waiting rows into free places; wait for several places at once, since each prefill is a full pass."""
        free = self.max_rows - len(self._rows)
        if not self._waiting or (self._rows and free < min(len(self._waiting), max(1, self.max_rows // 4))):
            return
        groups: dict[int, list[_Row]] = {}
        for _ in range(min(free, len(self._waiting))):
            self._admitted.append(row := self._waiting.popleft())
            groups.setdefault(id(row.request), []).append(row)
        batch: list[list[_Row]] = []
        for group in sorted(groups.values(), key=lambda rows: len(rows[0].request.prompt_ids)):
            if batch and (len(batch) + 1) * len(group[0].request.prompt_ids) > PREFILL_TOKENS:
                self._prefill(batch)
                batch = []
            batch.append(group)
        self._prefill(batch)
        self._admitted.clear()

    def _prefill(self, groups: list[list[_Row]]) -> None:
        """Compute each group's prompt once, all but its last token, and give every row a copy of its cache.

        The last prompt token is each row's first decoding step, so that sampling happens in one place.
        """
        model = self._model()
        device = next(model.parameters()).device
        prompts = [group[0].request.prompt_ids[:-1] for group in groups]
        width = max(len(p) for p in prompts)
        cache = None
        if width:
            cache = DynamicCache()
            lengths = torch.tensor([len(p) for p in prompts], device=device)
            ids = torch.tensor([p + [self.pad_token_id] * (width - len(p)) for p in prompts], device=device)
            # Padding stands on the right, where causal attention never looks back at it.
            positions = torch.arange(width, device=device).expand(len(prompts), -1)
            visible = (positions < lengths[:, None]) | (positions == 0)  # an empty row attends to something
            model.get_decoder()(
                input_ids=ids, position_ids=positions, attention_mask=visible, past_key_values=cache, use_cache=True
            )
        rows = [row for group in groups for row in group]
        for row in rows:
            row.generator = torch.Generator(device).manual_seed(row.seed)
        if self._cache is None:
            self._cache = RowCache(_compute_dtype(model))
        owners = torch.tensor([place for place, group in enumerate(groups) for _ in group], device=device)
        self._cache.append(cache, owners, width)
        self._rows.extend(rows)

    def _budget(self, row: _Row) -> int:
        """Tokens this row may sample."""
        wanted = row.request.params.max_tokens
        if self.max_context is None:
            return wanted
        return max(1, min(wanted, self.max_context - len(row.request.prompt_ids)))

    # ---- decoding --------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for every row in progress; rows that are finished leave."""
        assert self._cache is not None and self._rows, "admission comes first"
        model = self._model()
        parameter = next(model.parameters())
        last = torch.tensor([[row.last_token] for row in self._rows], device=parameter.device)
        positions = torch.tensor([[row.length - 1] for row in self._rows], device=parameter.device)
        masks = self._cache.begin_step(positions[:, 0], model.config.get_text_config())
        output = model(
            input_ids=last,
            position_ids=positions,
            attention_mask=masks,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._draw(output.logits[:, -1])
        for place in reversed(range(len(self._rows))):
            row = self._rows[place]
            if row.token_ids[-1] in self.eos_token_ids:
                self._release(place, FinishReason.STOP)
            elif len(row.token_ids) >= self._budget(row):
                self._release(place, FinishReason.LENGTH)

    def _draw(self, logits: Tensor) -> None:
        """Sample with each row's own settings; rows with equal settings are drawn together."""
        by_params: dict[int, list[int]] = {}
        for place, row in enumerate(self._rows):
            by_params.setdefault(id(row.request.params), []).append(place)
        for places in by_params.values():
            rows = [self._rows[place] for place in places]
            params = rows[0].request.params
            generators = [row.generator for row in rows if row.generator is not None]
            mine = logits if len(by_params) == 1 else logits[torch.tensor(places, device=logits.device)]
            drawn = draw(mine, generators, params, self._seen(rows, params, mine))
            for row, token, logprob, entropy in zip(rows, *(column.tolist() for column in drawn), strict=True):
                row.token_ids.append(token)
                row.logprobs.append(logprob)
                row.entropies.append(entropy)

    @staticmethod
    def _seen(rows: list[_Row], params: SamplingParams, logits: Tensor) -> Tensor | None:
        if params.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for i, row in enumerate(rows):
            seen[i, torch.tensor(row.request.prompt_ids + row.token_ids, device=logits.device)] = True
        return seen

    def _release(self, place: int, reason: FinishReason) -> None:
        """Answer a finished row and give its place to the last one."""
        assert self._cache is not None, "a row in progress has a cache"
        row = self._rows[place]
        self._cache.move(source=len(self._rows) - 1, target=place)
        self._rows[place] = self._rows[-1]
        self._rows.pop()
        if not row.done.done():  # its caller may have been cancelled
            row.done.set_result(Completion(row.token_ids, row.logprobs, reason, row.entropies))


def _compute_dtype(model: Any) -> torch.dtype:
    """What the model multiplies in here and now."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
