"""A run before it starts: its model, which is not loaded, its processes, the memory it needs, and what it lacks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from covey.cli.config_file import RunConfig
from covey.cli.data import evaluation_sets, is_function, is_local, load_evaluations, load_rows
from covey.cli.explain.tryout import prompt_lines, reward_lines, trainer_parts
from covey.cli.train import agent_of, environments, named, quantisation, rewards
from covey.config.algebra import BatchAlgebra
from covey.config.base import OnlineConfig
from covey.data.sampler import check_enough
from covey.policy.loading import sees_images
from covey.rollout.agents import with_agent
from covey.rollout.tools.tool import Tool
from covey.runtime.process_memory import available_memory
from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, Images, MemoryEstimate, ShardCounts, estimate
from covey.sizing.step_cost import MACHINES
from covey.sizing.vllm_memory import EngineMemory, engine_memory


@dataclass(frozen=True)
class ModelPlan:
    """A model that is not loaded."""

    config: Any = None  # of transformers; None: unknown
    missing: str = "no model config was given"  # the reason for None
    peft: dict[str, Any] | None = None  # arguments of `peft.LoraConfig`, if an adapter is trained
    quantization: Any = None  # a `BitsAndBytesConfig`, if the weights under it are quantised
    images: Images = field(default_factory=Images)  # of each prompt
    notes: list[str] = field(default_factory=list)  # sentences for the section on memory


@dataclass(frozen=True)
class Cluster:
    """Training processes and their machines."""

    spread: ShardCounts
    machine: str | None = None  # a key of `MACHINES`; None: no time is estimated
    gpus_of_node: int = 8


def gpu_bytes() -> int | None:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


@dataclass
class Start:
    """Findings about the start of a run, as far as it can be checked offline."""

    rows: int | None = None  # training prompts, if known
    problems: list[str] = field(default_factory=list)  # reasons that the run would not start
    missing: list[str] = field(default_factory=list)  # required keys that are not given
    unchecked: list[str] = field(default_factory=list)  # parts that only a start can check
    prompts: list[str] = field(default_factory=list)  # sentences about prompts and rewards
    prompt_tokens: int | None = None  # of the longest prompt, if known

    def lines(self) -> list[str]:
        lines = [f"will fail: {problem}" for problem in self.problems]
        if self.rows is not None and not self.problems:
            lines = [f"The dataset was read: {self.rows:,} prompt(s)."]
        if self.missing:
            lines.append(f"still to be named: {', '.join(self.missing)}.")
        return [*lines, *(f"not checked: {thing}." for thing in self.unchecked)]

    @contextmanager
    def reporting(self, users_code: str | None = None) -> Iterator[None]:
        """Collect what is raised as a problem: our errors, and any of the user's code, which is named."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ValueError) or (users_code is None and isinstance(error, (OSError, ImportError))):
                self.problems.append(str(error))
            elif users_code is not None:
                self.problems.append(f"{users_code}: {error!r}")
            else:
                raise


@dataclass(frozen=True)
class ExplainedRun:
    """Facts that `covey explain` states; None: unknown, or not part of the run."""

    args: OnlineConfig
    model: ModelPlan = field(default_factory=ModelPlan)
    world_size: int | None = None  # None: the processes that are running
    prompt_tokens: int = ASSUMED_PROMPT_TOKENS  # without images
    gpu: int | None = field(default_factory=gpu_bytes)  # bytes of a GPU
    cluster: Cluster | None = None  # None: each process has all of the model
    start: Start | None = None
    evaluations: Mapping[str, Any] = field(default_factory=dict)  # by name: settings of a suite, or a plain data set

    @cached_property
    def algebra(self) -> BatchAlgebra:
        return self.args.algebra(self.world_size)

    @property
    def scores_old(self) -> bool:
        return not self.algebra.on_policy or self.args.penalises_reward

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        if self.model.config is None:
            return None
        machine = self.cluster.machine if self.cluster else None
        available = int(MACHINES[machine].memory) if machine else self.gpu or 0
        if machine is None and self.args.device.type == "cpu":
            available = available_memory() // self.algebra.world_size
        return estimate(
            self.model.config,
            self.args,
            prompt_tokens=self.prompt_tokens,
            images=self.model.images,
            peft=self.model.peft,
            quantization=self.model.quantization,
            spread=self.cluster.spread if self.cluster else None,
            device="cuda" if machine else None,
            device_bytes=available,
        )

    @property
    def engine(self) -> EngineMemory | None:
        """Memory of vLLM in the trainer's process."""
        if self.memory is None or not self.args.use_vllm or self.args.vllm_mode != "colocate":
            return None
        return engine_memory(self.memory, self.model.config, self.args, self.prompt_tokens)


def model_plan(run: RunConfig, images: int, image_size: tuple[int, int]) -> ModelPlan:
    """The model of a run, if it is on this machine, with so many images in each prompt if it sees them."""
    if run.model is None:
        return ModelPlan(missing="the run names no model")
    from transformers import AutoConfig, AutoProcessor

    try:
        config = AutoConfig.from_pretrained(run.model, local_files_only=True)
    except (OSError, ValueError) as error:
        return ModelPlan(missing=f"the config of {run.model!r} is not on this machine ({str(error).splitlines()[0]})")
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        reason = "has no attention, and the formulas are for layers with attention"
        return ModelPlan(missing=f"{config.model_type} {reason}")
    quantization = _quantization(run, config) if run.peft is not None else None
    if not sees_images(config):
        return ModelPlan(config, "", run.peft, quantization)
    counted, note = Images(), "No images are counted (--images 0)."
    if images:
        try:
            processor = AutoProcessor.from_pretrained(run.model, local_files_only=True)
            counted = processed(processor, config, images, image_size)
            note = (
                f"A prompt has {images} image(s) of {image_size[0]} x {image_size[1]} pixels (--images, --image_size),"
                f" which are {counted.tokens:,} tokens and {counted.patches:,} patches for its processor."
            )
        except Exception as error:  # processors of other people's raise anything
            reason = str(error).strip().partition("\n")[0][:200]
            note = f"Images are not counted: its processor cannot be used here ({type(error).__name__}: {reason})."
    return ModelPlan(config, "", run.peft, quantization, counted, [note])


def _quantization(run: RunConfig, config: Any) -> Any:
    """Quantization by the run, or as the weights were saved; None: none, or of an unknown kind."""
    saved = getattr(config, "quantization_config", None) or {}
    as_saved = {name: value for name, value in saved.items() if name != "quant_method" and not name.startswith("_")}
    given = run.quantization or (as_saved if "bitsandbytes" in str(saved.get("quant_method")) else None)
    try:
        return quantisation(given)
    except ValueError:
        return None  # the section about the start reports it


def processed(processor: Any, config: Any, number: int, size: tuple[int, int]) -> Images:
    from PIL import Image

    from covey.core.model import placeholder_ids
    from covey.rollout.vision import Vision

    content = [{"type": "image"}] * number + [{"type": "text", "text": "?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    encoded = Vision(processor, placeholder_ids(config)).encode(text, [Image.new("RGB", size, "white")] * number)
    (media,) = encoded.media
    pixels = media.tensors["pixel_values"]
    tokens = len(encoded.ids) - len(media.short_ids) + number
    if pixels.dim() < 4:  # a row for each patch, by tiles or not
        return Images(tokens, pixels.shape[:-1].numel(), pixels.numel())
    side = config.vision_config.patch_size
    side = side[0] if isinstance(side, list | tuple) else side
    tiles = pixels.shape[:-3].numel()
    return Images(tokens, tiles * (pixels.shape[-2] // side) * (pixels.shape[-1] // side), pixels.numel())


def check_start(run: RunConfig, algebra: BatchAlgebra) -> Start:
    start = Start(missing=[name for name in run.needed if not getattr(run, name)])
    given = _check_data(run, algebra, start) | {"reward_funcs": [], "tools": []}
    for name in run.reward_funcs:
        with start.reporting(f"reward {name!r}"):
            given["reward_funcs"] += rewards([name])
            if isinstance(one := given["reward_funcs"][-1], str) and not Path(one).is_dir():
                start.unchecked.append(f"reward {one!r}, which names no function and so is a reward model from the hub")
    for tool in run.tools:
        with start.reporting(f"tool {tool!r}"):
            given["tools"].append(named(tool, "tool"))
            Tool.of(given["tools"][-1])
    for kind, read in (("rollout_func", named), ("environment_factory", environments)):
        with start.reporting(f"{kind} {getattr(run, kind)!r}"):
            given[kind] = read(getattr(run, kind), kind)
    if run.agent:
        with start.reporting(f"agent {run.agent!r}"):
            played = (given[name] for name in ("environment_factory", "tools", "rollout_func"))
            given["environment_factory"] = with_agent(agent_of(run.agent), *played)
    if run.quantization:
        with start.reporting():
            quantisation(run.quantization)
        if run.peft is None:
            start.problems.append("`quantization` without `peft`: quantised weights cannot be trained.")
    if run.model and not Path(run.model).is_dir():
        start.unchecked.append(f"model {run.model!r}, which is no folder here and so comes from the hub")
    if not (start.problems or start.missing) and (rows := given["train_dataset"]) is not None:
        with start.reporting("a check of the trainer"):
            if parts := trainer_parts(run, algebra, given):
                collector, suite = parts
                if collector:
                    longest = run.args.max_completion_length
                    start.prompts, start.prompt_tokens = prompt_lines(collector.codec, rows, longest)
                start.prompts += reward_lines(suite, collector, rows[0])
    return start


def _check_data(run: RunConfig, algebra: BatchAlgebra, start: Start) -> dict[str, Any]:
    """The data sets that are on this machine, as arguments of a trainer."""
    given: dict[str, Any] = {"train_dataset": None, "eval_dataset": None}
    renamed = (run.columns, run.system_prompt)
    evaluations = [
        str(entry.get("dataset", entry) if isinstance(entry, dict) else entry)
        for entry in evaluation_sets(run.eval_dataset).values()
    ]
    far = [spec for spec in [run.dataset, *evaluations] if spec and not is_local(spec)]
    start.unchecked += [f"dataset {spec!r}, which is no file or folder here and so comes from the hub" for spec in far]
    if run.dataset and run.dataset not in far:
        with start.reporting(f"dataset {run.dataset!r}" if is_function(run.dataset) else None):
            given["train_dataset"] = load_rows(run.dataset, run.dataset_split, *renamed)
            start.rows = len(given["train_dataset"])
    if evaluations and not set(evaluations) & set(far):
        with start.reporting():
            given["eval_dataset"] = load_evaluations(run.eval_dataset, *renamed)
    if start.rows is not None:
        with start.reporting():
            check_enough(start.rows, algebra)
    return given
