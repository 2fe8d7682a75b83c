"""vLLM as an engine inside the trainer's process.

Requests of all coroutines go into one vLLM engine and one task steps it; whatever is finished is answered at once, so
that rewards and other rollouts go on meanwhile. Several trainer processes may split the model between them (tensor
parallelism): then each step begins by telling one another what is new, all sample everybody's prompts in step, and
each keeps its own completions. Weights come as a `WeightUpdate`, tensor by tensor. Not here: starting vLLM
(`vllm_process`), prompts as it takes them (`vllm_prompts`), how much memory it takes and what makes room for it
(`covey.trainers`), servers (`remote`).
"""

import asyncio
import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import EngineTraits, SampleRequest
from covey.core.records import Completion, FinishReason
from covey.core.weights import TensorSpec, WeightUpdate
from covey.engines.vllm_colocate.cpu_heads import repack_heads
from covey.engines.vllm_colocate.process import is_running
from covey.engines.vllm_colocate.prompts import otherwise_expanded, prompt_of

OWN = frozenset(
    {
        "detokenize",
        "ignore_eos",
        "logprobs",
        "max_tokens",
        "min_p",
        "n",
        "output_kind",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""Settings of vLLM's `SamplingParams` that follow from fields of the config, and so have no place in its extras."""

FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

LEAVING, FAILED = "leaving", "failed"
"""What processes that share a model tell one another besides their requests."""

Fresh = tuple[str, dict[str, Any], dict[str, Any]]
"""A request that vLLM does not know yet: its id, its prompt as vLLM takes them, and its sampling settings."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A completion that is waited for.

    Attributes:
        done: gets it.
        prompt_ids: of a prompt with images, which vLLM must expand to just these; None of text, which comes as it is.
    """

    done: "asyncio.Future[Completion]"
    prompt_ids: list[int] | None


class Peers:
    """The processes that share one model, or this process alone.

    Args:
        group: their `torch.distributed` group on the CPU; None for this process alone.

    Attributes:
        rank: which of them this one is.
        broken: one of them has failed, so that no further message may be waited for.
    """

    def __init__(self, group: Any = None):
        self._group = group
        self.rank: int = 0 if group is None else torch.distributed.get_rank(group)
        self.size: int = 1 if group is None else torch.distributed.get_world_size(group)
        self.broken = False

    def exchange(self, message: Any) -> list[Any]:
        """Everybody's messages by rank; all of them call this together.

        Raises:
            RuntimeError: one of them has failed.
        """
        if self._group is None:
            return [message]
        everyone: list[Any] = [None] * self.size
        try:
            torch.distributed.all_gather_object(everyone, message, group=self._group)
        except Exception:
            self.broken = True
            raise
        failed = [rank for rank, said in enumerate(everyone) if said[0] == FAILED]
        if failed:
            self.broken = True
            raise RuntimeError(
                f"process {failed[0]} of the {self.size} that share vLLM's model failed while sampling; its own error"
                " says why."
            )
        return everyone


class VllmColocateEngine:
    """Samples with vLLM in this process.

    Args:
        vllm: a `vllm.LLMEngine` whose worker lives in this process (`vllm_process.start_vllm`).
        eos_token_ids: tokens that end a completion.
        regex: what every completion must match, if anything.
        sleep_level: None never sleeps. 1 keeps the weights in host memory while the policy trains, 2 forgets them, so
            that every waking takes them from the last update again.
        batches: None takes weights one by one; otherwise they are gathered in this many batches before each is loaded.
        make_room: entered before the engine wakes, left after it is asleep again: moves other things out of the way.
        peers: the processes that share the model, this one among them.
    """

    def __init__(
        self,
        vllm: Any,
        *,
        eos_token_ids: set[int],
        regex: str | None = None,
        sleep_level: int | None = None,
        batches: int | None = None,
        make_room: Callable[[], AbstractContextManager[Any]] = nullcontext,
        peers: Peers | None = None,
    ):
        self._vllm = vllm
        self._ends = sorted(eos_token_ids)
        self._regex = regex
        self._sleep_level = sleep_level
        self._batches = batches
        self._make_room = make_room
        self._peers = peers or Peers()
        self._asleep: set[str] = set()
        self._update: WeightUpdate | None = None
        self._arrived = False
        self._forgotten = False
        self._has_base = False
        self._adapter: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._adapters = itertools.count(1)
        self._names = itertools.count()
        self._new: list[Fresh] = []
        self._waiting: dict[str, _Asked] = {}
        self._driver: asyncio.Task[None] | None = None
        self._leaving = False
        config = vllm.vllm_config.model_config
        self.max_context: int = config.max_model_len
        processed = str(config.logprobs_mode) == "processed_logprobs"
        self.traits = EngineTraits(
            reports_after_cut=processed or regex is not None,
            dtype=config.dtype,
            takes_adapters=vllm.vllm_config.lora_config is not None,
            expands_images=True,
        )
        self._fall_asleep()

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt; drafts are left unused, which changes no sample.

        Raises:
            ValueError: settings that vLLM does not know, or a prompt that fills the context.
            RuntimeError: the weights never arrived, sampling failed, or vLLM makes other tokens of images.
        """
        settings = self._settings(request)
        loop = asyncio.get_running_loop()
        waiting = []
        prompt, expanded = prompt_of(request), request.prompt_ids if request.media else None
        for seed in request.seeds:
            name = f"covey-{next(self._names)}"
            self._new.append((name, prompt, {**settings, "seed": seed % (1 << 63)}))
            waiting.append(loop.create_future())
            self._waiting[name] = _Asked(waiting[-1], expanded)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return list(await asyncio.gather(*waiting))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Wake vLLM for the duration; with several processes, until the last of them has what it asked for."""
        with self._make_room():
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
        """vLLM's sampling settings of a request, but for the seed."""
        params = request.params
        if not is_running(self._vllm):
            raise RuntimeError(
                "this engine's vLLM was stopped: another one was started in this process, where there is one at a time."
                " Make the trainer that is to sample last."
            )
        if not self._arrived:
            raise RuntimeError("vLLM has no weights: the policy's must be loaded before anything is sampled.")
        if len(request.prompt_ids) >= self.max_context:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens leaves no room for a completion in vLLM's context of"
                f" {self.max_context}. Raise vllm_max_model_length, give vLLM more memory, or drop prompts so long."
            )
        taken = sorted(OWN & set(params.extra))
        if taken:
            raise ValueError(
                f"generation_kwargs may not hold {', '.join(map(repr, taken))}: fields of the config say so already."
            )
        settings = {
            "max_tokens": request.token_budget(self.max_context),
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p or 0.0,
            "repetition_penalty": params.repetition_penalty,
            "stop_token_ids": self._ends,
            "ignore_eos": True,  # the end tokens are all named above: vLLM's own idea of them is one of another config
            "logprobs": 0,
            "detokenize": "stop" in params.extra or "bad_words" in params.extra,
            **params.extra,
        }
        if "logit_bias" in params.extra:  # JSON has no numbers for keys
            settings["logit_bias"] = {int(token): bias for token, bias in params.extra["logit_bias"].items()}
        if self._regex is not None:
            settings["structured_outputs"] = {"regex": self._regex}
        return settings

    async def _drive(self) -> None:
        """Step until nobody waits; between steps other coroutines run."""
        try:
            await asyncio.sleep(0)  # let every caller of this moment queue its request
            while not self._leaving and (self._waiting or self._peers.size > 1):
                self._turn()
                await asyncio.sleep(0)
        except BaseException as error:
            self._give_up(error)
            if not isinstance(error, Exception):
                raise

    def _turn(self, message: str = "") -> bool:
        """Take in what is new, make one step, answer what is finished; whether nobody needs another.

        Args:
            message: what the other processes are to know: "" (nothing), `LEAVING` or `FAILED`.
        """
        given_up = [name for name, asked in self._waiting.items() if asked.done.done()]
        for name in given_up:
            del self._waiting[name]
        fresh, self._new = self._new, []
        everyone = self._peers.exchange((message, fresh, given_up))
        for owner, (_, fresh, dropped) in enumerate(everyone):
            for name, prompt, settings in fresh:
                self._add(f"{owner}-{name}", prompt, settings)
            if dropped:
                self._vllm.abort_request([f"{owner}-{name}" for name in dropped])
        if self._vllm.has_unfinished_requests():
            for output in self._vllm.step():
                self._answer(output)
        return all(said == LEAVING for said, _, _ in everyone) and not self._vllm.has_unfinished_requests()

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
        self._vllm.add_request(name, dict(prompt), params, lora_request=self._adapter)

    def _answer(self, output: Any) -> None:
        """Hand a finished completion to whoever waits for it."""
        owner, _, name = output.request_id.partition("-")
        if int(owner) != self._peers.rank or not output.finished or name not in self._waiting:
            return
        asked = self._waiting.pop(name)
        if asked.done.done():  # its caller was cancelled
            return
        if asked.prompt_ids is not None and (error := otherwise_expanded(asked.prompt_ids, output.prompt_token_ids)):
            asked.done.set_exception(error)
            return
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        finish = FINISHES.get(completion.finish_reason, FinishReason.ERROR)
        versions = None if self._update is None else [self._update.version] * len(tokens)
        asked.done.set_result(Completion(tokens, logprobs, finish, versions=versions))

    def _leave(self, failed: bool = False) -> None:
        """Stop stepping, once the other processes need this one no longer; what is unfinished is dropped."""
        self._leaving = True
        if self._peers.size > 1 and not self._peers.broken:
            if failed:
                with contextlib.suppress(Exception):  # the error that brought us here is the one to report
                    self._peers.exchange((FAILED, [], []))
            else:
                while not self._turn(LEAVING):
                    pass
        if self._waiting or self._vllm.has_unfinished_requests():
            self._give_up(RuntimeError("the engine was put to sleep before this completion was finished."))

    def _give_up(self, error: BaseException) -> None:
        """Fail whoever waits, and leave nothing in vLLM that a later generation would go on with."""
        for asked in self._waiting.values():
            if not asked.done.done():
                asked.done.set_exception(error)
                asked.done.exception()  # looked at: whoever waited may be gone
        self._waiting.clear()
        self._new.clear()
        with contextlib.suppress(Exception):
            unfinished = list(self._vllm.output_processor.request_states)
            self._vllm.abort_request(unfinished, internal=True)

    # ---- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, update: WeightUpdate) -> None:
        """Take a version of the policy's weights; nothing that older weights computed is used again.

        Raises:
            RuntimeError: vLLM refuses a tensor, or something is in flight.
        """
        if self._vllm.has_unfinished_requests():
            raise RuntimeError(f"weights of version {update.version} came while vLLM was sampling with older ones.")
        self._arrived = self._forgotten = False
        self._wake_up({"weights"})
        self._update = update
        if update.adapter is None:
            self._load_all(update)
            self._drop_adapter()
        else:
            self._load_adapter(update)
        self._vllm.reset_prefix_cache()
        self._vllm.reset_encoder_cache()  # what older weights made of images
        self._arrived = True

    def _load_all(self, update: WeightUpdate) -> None:
        self._has_base = False
        at = "its first tensor"

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal at
            for spec, tensor in update.checked() if self._batches is None else in_batches(update, self._batches):
                at = repr(spec.name)
                yield spec.name, tensor

        try:
            self._reload(tensors())
        except Exception as error:
            with contextlib.suppress(Exception):
                self._vllm.collective_rpc(_end_reload)
            raise RuntimeError(f"vLLM did not take weights of version {update.version} at {at}: {error}") from error

    def _reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Linear weights are repacked for their kernels, so they cannot be copied over: vLLM loads layer by layer."""
        with torch.no_grad():
            self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
            self._vllm.apply_model(repack_heads)

    def _load_adapter(self, update: WeightUpdate) -> None:
        """An adapter travels as the small files that vLLM reads, under a name of its own for each version.

        The weights under it come before the first one, and again where vLLM has forgotten them.
        """
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        if not self._has_base:
            if update.base is None:
                raise RuntimeError(
                    "the adapter's base is quantised and cannot be handed to vLLM in this process. Run vLLM as a server"
                    " that loads the same quantised model (vllm_mode='server')."
                )
            self._load_all(update.base)
            self._has_base = True
        number = next(self._adapters)
        folder = tempfile.TemporaryDirectory(prefix="covey-adapter-")
        try:
            tensors = {spec.name: tensor.detach().cpu().contiguous().clone() for spec, tensor in update.checked()}
            save_file(tensors, Path(folder.name) / "adapter_model.safetensors")
            (Path(folder.name) / "adapter_config.json").write_text(json.dumps(update.adapter))
            self._drop_adapter()
            request = LoRARequest(f"policy-{update.version}-{number}", number, folder.name)
            if not self._vllm.add_lora(request):
                raise RuntimeError("it answered that it did not load it.")
        except Exception as error:
            raise RuntimeError(
                f"vLLM did not take the adapter of version {update.version}: {error} Adapters other than plain LoRA on"
                " linear layers have to be merged into the weights."
            ) from error
        self._adapter, self._folder = request, folder  # vLLM may read it again; the last one is removed by now

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self._vllm.remove_lora(self._adapter.lora_int_id)
            self._adapter = None

    # ---- sleep -----------------------------------------------------------------------------------------------------

    def _fall_asleep(self) -> None:
        if self._sleep_level is None or self._asleep:
            return
        self._vllm.sleep(level=self._sleep_level)
        self._asleep = {"weights", "kv_cache"}
        self._has_base = self._has_base and self._sleep_level != 2
        self._forgotten = self._sleep_level == 2 and self._arrived
        self._arrived = self._arrived and not self._forgotten

    def _wake_up(self, parts: set[str]) -> None:
        """Give these parts of vLLM their memory back; forgotten weights are taken from the last update again."""
        sleeping = sorted(parts & self._asleep, reverse=True)  # weights before the cache
        if sleeping:
            self._vllm.wake_up(sleeping)
            self._asleep -= parts
        if "kv_cache" in parts and self._forgotten and self._update is not None:
            self.load_weights(self._update)


def in_batches(update: WeightUpdate, batches: int) -> Iterator[tuple[TensorSpec, Tensor]]:
    """A checked pass over an update that gathers one part of about equal size after the other before handing it on."""
    limit = -(-update.nbytes // batches)
    held: list[tuple[TensorSpec, Tensor]] = []
    for spec, tensor in update.checked():
        held.append((spec, tensor.clone()))  # it is ours only until the next is asked for
        if sum(spec.nbytes for spec, _ in held) >= limit:
            yield from held
            held.clear()
    yield from held


def _end_reload(worker: Any) -> None:
    """After an update that broke off: let a vLLM worker's layers go, so that they can take another."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_config)
