"""vLLM as an engine inside the trainer's process.

One task runs vLLM's steps for the requests of all coroutines. Trainer processes that share the model (tensor
parallelism) exchange new requests before each step and sample all prompts in lockstep; each keeps its own completions.
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import EngineTraits, SampleRequest, TensorSpec, WeightUpdate
from covey.core.media import images_of, unexpanded
from covey.core.records import Completion, FinishReason
from covey.engines.servers.completions import common_settings
from covey.engines.servers.weights.buckets import BUCKET_BYTES
from covey.engines.servers.weights.files import write_folder
from covey.engines.vllm_colocate.process import is_running, repack_heads

# Settings of vLLM's `SamplingParams` that fields of the config determine; generation_kwargs may not have them.
RESERVED = {
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "n", "seed"),
    *("stop_token_ids", "ignore_eos", "logprobs", "detokenize", "output_kind"),
}
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
LEAVING, FAILED = "leaving", "failed"  # messages between processes that share a model
NewRequest = tuple[str, dict[str, Any], dict[str, Any]]  # id, prompt for vLLM, and sampling settings


class ModelGroup:
    """The processes that share one model: a `torch.distributed` group on the CPU, or None for this process alone."""

    def __init__(self, group: Any = None):
        self._group = group
        self.rank: int = 0 if group is None else torch.distributed.get_rank(group)
        self.size: int = 1 if group is None else torch.distributed.get_world_size(group)
        self.broken = False

    def exchange(self, message: Any) -> list[Any]:
        """Gather the messages of all processes by rank. Collective; RuntimeError if a process has failed."""
        if self._group is None:
            return [message]
        messages: list[Any] = [None] * self.size
        self.broken = True  # until the exchange is complete
        torch.distributed.all_gather_object(messages, message, group=self._group)
        failed = [rank for rank, sent in enumerate(messages) if sent[0] == FAILED]
        if failed:
            raise RuntimeError(
                f"process {failed[0]} of the {self.size} that share vLLM's model failed while sampling; see its"
                " own error."
            )
        self.broken = False
        return messages


@dataclass(eq=False)
class VllmColocateEngine:
    vllm: Any  # a `vllm.LLMEngine` with its worker in this process (`process.start_vllm`)
    _: KW_ONLY
    eos_token_ids: set[int]
    regex: str | None = None  # that every completion must match
    sleep_level: int | None = None  # 1: weights move to host memory; 2: they are discarded, and loaded at wake-up
    batches: int | None = None  # number of batches in which weights are gathered and loaded; None: one by one
    make_room: Callable[[], AbstractContextManager[Any]] = nullcontext  # frees memory around waking and sleeping
    group: ModelGroup = field(default_factory=ModelGroup)  # the processes that share the model, including this one

    def __post_init__(self) -> None:
        self._asleep: set[str] = set()
        self._update: WeightUpdate | None = None
        self._has_weights = self._discarded = self._has_base = False
        self._adapter: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._adapters = itertools.count(1)
        self._names = itertools.count()
        self._new: list[NewRequest] = []
        # futures of the requested completions, with the expected tokens of prompts with images (None for text)
        self._waiting: dict[str, tuple[asyncio.Future[Completion], list[int] | None]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._leaving = False
        config = self.vllm.vllm_config.model_config
        self.max_context: int = config.max_model_len
        processed = str(config.logprobs_mode) == "processed_logprobs"
        self.traits = EngineTraits(
            reports_after_cut=processed or self.regex is not None,
            dtype=config.dtype,
            takes_adapters=self.vllm.vllm_config.lora_config is not None,
            expands_images=True,
            rounded_to="float8" if getattr(config, "quantization", None) == "fp8" else None,
        )
        self._fall_asleep()

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are ignored, which does not change the samples."""
        settings = self._settings(request)
        loop = asyncio.get_running_loop()
        waiting = []
        prompt: dict[str, Any] = {"prompt_token_ids": unexpanded(request.prompt_ids, request.media)}
        if request.media:  # vLLM expands the single token of each image with its own processor
            prompt["multi_modal_data"] = {"image": images_of(request.media)}
        expanded = list(request.prompt_ids) if request.media else None
        for seed in request.seeds:
            name = f"covey-{next(self._names)}"
            self._new.append((name, prompt, {**settings, "seed": seed % (1 << 63)}))
            waiting.append(loop.create_future())
            self._waiting[name] = waiting[-1], expanded
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return list(await asyncio.gather(*waiting))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Context in which vLLM is awake; with several processes, it ends when all of them have their completions."""
        with self.make_room():
            self._wake_up({"weights", "kv_cache"})
            self._leaving = False
            try:
                yield
            except BaseException:
                self._leave(failed=True)
                raise
            else:
                self._leave()
            finally:
                self._fall_asleep()

    def _settings(self, request: SampleRequest) -> dict[str, Any]:
        """vLLM's sampling settings of a request, without the seed."""
        params = request.params
        if not is_running(self.vllm):
            raise RuntimeError(
                "this engine's vLLM was stopped, because another was started in this process, which can have only one."
                " Create the trainer that samples last."
            )
        if not self._has_weights:
            raise RuntimeError("vLLM has no weights: load the policy's weights before sampling.")
        if len(request.prompt_ids) >= self.max_context:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a completion in vLLM's context of"
                f" {self.max_context}. Raise vllm_max_model_length, give vLLM more memory, or drop prompts so long."
            )
        if taken := sorted(RESERVED & params.extra.keys()):
            raise ValueError(
                f"generation_kwargs may not contain {', '.join(map(repr, taken))}: fields of the config set them."
            )
        settings = {
            "max_tokens": request.token_budget(self.max_context),
            "top_k": params.top_k,
            **common_settings(params, frozenset(self.eos_token_ids)),
            "ignore_eos": True,  # all end tokens are listed above; vLLM's come from another config
            "logprobs": 0,
            "skip_special_tokens": False,  # or such tokens would not be found as texts that stop
            "detokenize": "stop" in params.extra or "bad_words" in params.extra,
            **params.extra,
        }
        if "logit_bias" in params.extra:  # JSON has no integer keys
            settings["logit_bias"] = {int(token): bias for token, bias in params.extra["logit_bias"].items()}
        if self.regex is not None:
            settings["structured_outputs"] = {"regex": self.regex}
        return settings

    async def _drive(self) -> None:
        """Step until no completion is pending; between steps other coroutines run."""
        try:
            await asyncio.sleep(0)  # callers that are ready now queue their requests first
            while not self._leaving and (self._waiting or self.group.size > 1):
                self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self._fail_pending(error)
            if not isinstance(error, Exception):
                raise

    def _step(self, message: str = "") -> bool:
        """Add new requests, run one step and resolve finished completions; True if no process needs another step."""
        cancelled = [name for name, (done, _) in self._waiting.items() if done.done()]
        for name in cancelled:
            del self._waiting[name]
        new, self._new = self._new, []
        messages = self.group.exchange((message, new, cancelled))
        for owner, (_, new, cancelled) in enumerate(messages):
            for name, prompt, settings in new:
                self._add(f"{owner}-{name}", prompt, settings)
            if cancelled:
                self.vllm.abort_request([f"{owner}-{name}" for name in cancelled])
        if self.vllm.has_unfinished_requests():
            for output in self.vllm.step():
                self._resolve(output)
        return all(sent == LEAVING for sent, _, _ in messages) and not self.vllm.has_unfinished_requests()

    def _add(self, name: str, prompt: dict[str, Any], settings: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        structured = settings.get("structured_outputs")
        if isinstance(structured, dict):
            settings = {**settings, "structured_outputs": StructuredOutputsParams(**structured)}
        try:
            params = SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)
        except TypeError as error:
            raise ValueError(
                f"vLLM does not know all of generation_kwargs: {error}. Its keys are those of vllm.SamplingParams."
            ) from error
        self.vllm.add_request(name, dict(prompt), params, lora_request=self._adapter)

    def _resolve(self, output: Any) -> None:
        owner, _, name = output.request_id.partition("-")
        if int(owner) != self.group.rank or not output.finished or name not in self._waiting:
            return
        done, prompt_ids = self._waiting.pop(name)
        if done.done():  # its caller was cancelled
            return
        if prompt_ids is not None and prompt_ids != list(output.prompt_token_ids):
            done.set_exception(expansion_error(prompt_ids, output.prompt_token_ids))
            return
        sampled = output.outputs[0]
        tokens = list(sampled.token_ids)
        logprobs = [step[token].logprob for step, token in zip(sampled.logprobs, tokens, strict=True)]
        finish = FINISHES.get(sampled.finish_reason, FinishReason.ERROR)
        versions = None if self._update is None else [self._update.version] * len(tokens)
        done.set_result(Completion(tokens, logprobs, finish, versions=versions))

    def _leave(self, failed: bool = False) -> None:
        self._leaving = True
        if self.group.size > 1 and not self.group.broken:
            if failed:
                with contextlib.suppress(Exception):  # the first error is the one to report
                    self.group.exchange((FAILED, [], []))
            else:
                while not self._step(LEAVING):
                    pass
        if self._waiting or self.vllm.has_unfinished_requests():
            self._fail_pending(RuntimeError("the engine was put to sleep before this completion was finished."))

    def _fail_pending(self, error: BaseException) -> None:
        for done, _ in self._waiting.values():
            if not done.done():
                done.set_exception(error)
                done.exception()  # marks it as retrieved: its caller may be gone
        self._waiting.clear()
        self._new.clear()
        with contextlib.suppress(Exception):
            unfinished = list(self.vllm.output_processor.request_states)
            self.vllm.abort_request(unfinished, internal=True)

    def load_weights(self, update: WeightUpdate) -> None:
        if self.vllm.has_unfinished_requests():
            raise RuntimeError(f"weights of version {update.version} were sent while vLLM sampled with older ones.")
        self._has_weights = self._discarded = False
        self._wake_up({"weights"})
        self._update = update
        if update.adapter is None:
            self._load_all(update)
            self._drop_adapter()
        else:
            self._load_adapter(update)
        self.vllm.reset_prefix_cache()
        self.vllm.reset_encoder_cache()  # images encoded with older weights
        self._has_weights = True

    def _load_all(self, update: WeightUpdate) -> None:
        self._has_base = False
        at = "its first tensor"

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal at
            for spec, tensor in update.checked() if self.batches is None else in_batches(update, self.batches):
                at = repr(spec.name)
                yield spec.name, tensor

        try:
            # vLLM repacks linear weights for its kernels layer by layer, so they cannot be copied over.
            with torch.no_grad():
                self.vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
                self.vllm.apply_model(repack_heads)
        except Exception as error:
            with contextlib.suppress(Exception):
                self.vllm.collective_rpc(_end_reload)
            raise RuntimeError(f"vLLM did not take weights of version {update.version} at {at}: {error}") from error

    def _load_adapter(self, update: WeightUpdate) -> None:
        """Load an adapter from files, under a new name for each version; its base first, if vLLM does not have it."""
        from vllm.lora.request import LoRARequest

        if not self._has_base:
            if update.base is None:
                raise RuntimeError(
                    "the adapter's base is quantised and cannot be loaded into vLLM in this process. Run vLLM as a"
                    " server that loads the same quantised model (vllm_mode='server')."
                )
            self._load_all(update.base)
            self._has_base = True
        number, folder = next(self._adapters), tempfile.TemporaryDirectory(prefix="covey-adapter-")
        path = Path(folder.name) / "adapter"
        try:
            write_folder(update, path, BUCKET_BYTES)
            self._drop_adapter()
            request = LoRARequest(f"policy-{update.version}-{number}", number, str(path))
            if not self.vllm.add_lora(request):
                raise RuntimeError("add_lora returned False.")
        except Exception as error:
            raise RuntimeError(
                f"vLLM did not take the adapter of version {update.version}: {error} Adapters other than plain LoRA on"
                " linear layers have to be merged into the weights."
            ) from error
        self._adapter, self._folder = request, folder  # vLLM may read it again; the last one was removed above

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self.vllm.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    def _fall_asleep(self) -> None:
        if self.sleep_level is None or self._asleep:
            return
        self.vllm.sleep(level=self.sleep_level)
        self._asleep = {"weights", "kv_cache"}
        if self.sleep_level == 2:
            self._discarded, self._has_weights, self._has_base = self._has_weights, False, False

    def _wake_up(self, parts: set[str]) -> None:
        """Allocate these parts of vLLM again; weights that were discarded are loaded from the last update."""
        sleeping = sorted(parts & self._asleep, reverse=True)  # weights before the cache
        if sleeping:
            self.vllm.wake_up(sleeping)
            self._asleep -= parts
        if "kv_cache" in parts and self._discarded and self._update is not None:
            self.load_weights(self._update)


def in_batches(update: WeightUpdate, batches: int) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Checked tensors of an update, gathered in batches of about equal size before each is yielded."""
    limit = -(-update.nbytes // batches)
    batch: list[tuple[TensorSpec, Tensor]] = []
    for spec, tensor in update.checked():
        batch.append((spec, tensor.clone()))  # valid only until the next one is requested
        if sum(spec.nbytes for spec, _ in batch) >= limit:
            yield from batch
            batch.clear()
    yield from batch


def _end_reload(worker: Any) -> None:
    """Finish a failed reload in a vLLM worker, so that its layers accept another."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_config)


def expansion_error(ours: Sequence[int], theirs: Sequence[int]) -> RuntimeError:
    """The error for a prompt that vLLM expands to other tokens (`theirs`) than the trainer's processor (`ours`)."""
    first = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
    return RuntimeError(
        f"vLLM expands a prompt with images to {len(theirs)} tokens, and the trainer's processor to {len(ours)};"
        f" they differ from token {first} on. If vllm_engine_kwargs has mm_processor_kwargs, leave them out: vLLM's"
        " processor has the settings of the trainer's."
    )
