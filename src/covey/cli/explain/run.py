"""A run before it starts: its model, which is not loaded, its processes, the memory it needs, and what it lacks."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor, TrainerState

from covey.cli.config_file import RunConfig
from covey.cli.data import load_evaluations, load_rows
from covey.cli.run_file import evaluation_sets, is_function, is_local
from covey.cli.train import adapter, agent_of, environments, named, quantisation, rewards, seats_of, sources_of
from covey.config.algebra import BatchAlgebra
from covey.config.base import OnlineConfig
from covey.core.findings import CheckError
from covey.core.model import placeholder_ids
from covey.core.records import FinishReason, Rollout
from covey.data.sources import Sources, most_of_a_batch, parts_of
from covey.policy.adapters import check_adapter_config
from covey.policy.loading import check_loading, load_processing_class, sees_images
from covey.rewards.functions import FunctionReward, RewardContext
from covey.rewards.suite import RewardSuite
from covey.rollout.collector import Collector
from covey.rollout.prompts import PromptCodec
from covey.rollout.tools.tool import Tool
from covey.rollout.vision import Vision
from covey.runtime.process_memory import available_memory
from covey.runtime.safe_text import printable
from covey.runtime.user_code import parameters_of, report
from covey.sizing.memory import ASSUMED_PROMPT_TOKENS, Images, MemoryEstimate, Opponents, ShardCounts, estimate
from covey.sizing.model_spec import meta_model
from covey.sizing.step_cost import MACHINES
from covey.sizing.vllm_memory import EngineMemory, engine_memory
from covey.trainer.build_rollouts import EnvironmentReward, plays_functions
from covey.trainer.checks import check_evaluations
from covey.trainer.prepare import Arguments, build_parts, read_arguments
from covey.trainer.teacher_weights import PolicyWeights, teacher_bytes

MOST_ROWS = 1000  # whose prompts are counted, evenly over the data set
SHOWN_LINES = 12  # of the first prompt
NOT_PLAYED = (
    "Environments are not played here: what they add to prompts, by `reset` or by `observe` of a game, is neither shown"
    " nor counted; `--prompt_tokens` sets the length with it."
)
SOLUTIONS = ("solution", "answer", "target", "label")  # columns that hold a correct completion


@dataclass(frozen=True)
class ModelPlan:
    """The model of a run, known by its config; its weights are not loaded."""

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
    problems: list[str] = field(default_factory=list)  # reasons that the run would not start, with codes of findings
    missing: list[str] = field(default_factory=list)  # required keys that are not given
    unchecked: list[str] = field(default_factory=list)  # parts that only a start can check
    prompts: list[str] = field(default_factory=list)  # sentences about prompts and rewards
    prompt_tokens: int | None = None  # of the longest prompt, if known
    sources: list[str] = field(default_factory=list)  # sentences about several data sets
    group_sizes: dict[str, int] = field(default_factory=dict)  # completions of a prompt, where a source has its own

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
        except CheckError as error:
            self.problems += [f"{finding.sentence} [{finding.code}]" for finding in error.findings]
        except Exception as error:
            ours = (ValueError, TypeError, OSError, ImportError) if users_code is None else ValueError
            if isinstance(error, ours):
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
    seats: Sequence[Any] = ()  # of games and of evaluations, as the run names them
    rewarded: bool = True  # False: a teacher alone decides what is learnt

    @cached_property
    def algebra(self) -> BatchAlgebra:
        return self.args.algebra(self.world_size)

    @property
    def scores_old(self) -> bool:
        return not self.algebra.on_policy or self.args.penalises_reward

    @property
    def device(self) -> str:
        """Type of device that the run is planned for: of another machine if one is named."""
        named = self.args.planned.gpu or (self.cluster is not None and self.cluster.machine is not None)
        return "cuda" if named else self.args.device.type

    @property
    def policy_weights(self) -> PolicyWeights:
        eight_bits = bool(getattr(self.model.quantization, "load_in_8bit", False))
        shards = self.cluster.spread.weights if self.cluster else 1
        return PolicyWeights(self.model.config, self.model.peft, eight_bits, shards)

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        if self.model.config is None:
            return None
        machine = self.cluster.machine if self.cluster else None
        available = int(MACHINES[machine].memory) if machine else self.gpu or 0
        if self.device == "cpu":
            available = available_memory() // self.algebra.world_size
        return estimate(
            self.model.config,
            self.args,
            prompt_tokens=self.prompt_tokens,
            images=self.model.images,
            peft=self.model.peft,
            quantization=self.model.quantization,
            spread=self.cluster.spread if self.cluster else None,
            device=self.device,
            device_bytes=available,
            opponents=Opponents.of(self.seats, self.args.opponents_kept),
            teachers=self._teacher_bytes(),
        )

    def _teacher_bytes(self) -> int:
        with suppress(ValueError, TypeError):  # of settings that the section about the start reports
            return teacher_bytes(self.args, self.policy_weights)
        return 0

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
    """Findings about the start of a run: what is missing, what would fail, and what only a start can check."""
    start = Start(missing=[name for name in run.needed if not getattr(run, name)])
    given = _check_data(run, start) | {"reward_funcs": [], "tools": []}
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
    with start.reporting(f"agent {run.agent!r}"):
        given["agent"] = agent_of(run.agent) if run.agent else None
    for kind in ("seats", "eval_seats"):
        with start.reporting(kind):
            given[kind] = seats_of(getattr(run, kind))
    if run.quantization:
        with start.reporting():
            quantisation(run.quantization)
        with start.reporting():
            report(check_loading(str(run.model or ""), {}, run.quantization, run.peft))
    with start.reporting():
        report(check_adapter_config(adapter(run.peft)))
    if run.model and not Path(run.model).is_dir():
        start.unchecked.append(f"model {run.model!r}, which is no folder here and so comes from the hub")
    if not (start.problems or start.missing) and given["train_dataset"] is not None:
        with start.reporting("a check of the trainer"):
            arguments = read_arguments(type(run.args), run.args, run.model, **given)
            if parts := offline_parts(arguments, run.model, algebra):
                (collector, suite), rows = parts, arguments.train_dataset
                if collector:
                    longest = run.args.max_completion_length
                    start.prompts, start.prompt_tokens = prompt_lines(collector.codec, rows, longest)
                    if arguments.environment_factory is not None:
                        start.prompts.append(NOT_PLAYED)
                for name, part in parts_of(rows, "source"):
                    start.prompts += [f"Rewards of {name}:"] if arguments.sources else []
                    start.prompts += reward_lines(suite, collector, part[0])
                if arguments.sources is not None:
                    start.sources = source_lines(run.args, algebra, arguments.sources)
                    start.group_sizes = arguments.sources.group_sizes
    return start


def _check_data(run: RunConfig, start: Start) -> dict[str, Any]:
    """The data sets that are on this machine, as arguments of a trainer."""
    given: dict[str, Any] = {"train_dataset": None, "eval_dataset": None}
    renamed = (run.columns, run.system_prompt)
    evaluations = [
        str(entry.get("dataset", entry) if isinstance(entry, dict) else entry)
        for entry in evaluation_sets(run.eval_dataset).values()
    ]
    named = [str(one.get("dataset")) for one in (run.sources or {}).values() if isinstance(one, dict)]
    far = [spec for spec in [run.dataset, *named, *evaluations] if spec and not is_local(spec)]
    start.unchecked += [f"dataset {spec!r}, which is no file or folder here and so comes from the hub" for spec in far]
    if run.dataset and run.dataset not in far:
        with start.reporting(f"dataset {run.dataset!r}" if is_function(run.dataset) else None):
            given["train_dataset"] = load_rows(run.dataset, run.dataset_split, *renamed)
            start.rows = len(given["train_dataset"])
    if run.sources and not set(named) & set(far):
        with start.reporting("a data set of `sources`"):
            given |= sources_of(run)
            start.rows = sum(map(len, given["train_dataset"].values()))
    if evaluations and not set(evaluations) & set(far):
        with start.reporting():
            given["eval_dataset"] = load_evaluations(run.eval_dataset, *renamed)
    return given


def offline_parts(given: Arguments, name: Any, algebra: Any) -> tuple[Collector | None, RewardSuite] | None:
    """Parts of a trainer of the model's config without its weights; None where models would be loaded.

    Without that config there is no collector: rewards and evaluations are checked alone. Whatever would keep the run
    from starting is raised, with the trainer's words.
    """
    args, functions = given.args, given.reward_funcs
    if any(isinstance(one, str) for one in functions or ()):
        return None  # reward models, which are not loaded
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError):
        if functions and not (given.tools or given.rollout_func or given.environment_factory):
            suite = RewardSuite(functions, weights=args.reward_weights)
            report(check_evaluations(args, suite, given.eval_dataset))
            return None, suite
        return None
    model = meta_model(config)
    here = {"local_files_only": True}
    processing = load_processing_class(None, model, trust_remote_code=args.trust_remote_code, init_kwargs=here)
    services = {"device": args.device, "policy": model, "state": TrainerState, "sources": given.sources}
    planned: Any = SimpleNamespace(args=args, algebra=algebra, **services)
    no_engine = object()  # in the place of one that would be started
    parts = build_parts(planned, given, model, processing, no_engine)
    return parts.collector, parts.rewards


def source_lines(args: OnlineConfig, algebra: BatchAlgebra, sources: Sources) -> list[str]:
    """A table of the shares of sources, and sentences on what each has of its own."""
    prompts, steps = algebra.prompts_per_rollout_batch, float(algebra.updates_per_rollout_batch)
    most = most_of_a_batch(sources, prompts, 100, steps)
    total = sources.weights_at(0), sources.shares_at(0)
    lines = [f"   {'source':<16}{'rows':>8}{'weight':>10}{'share':>9}{'prompts':>10}{'most':>7}{'epoch in':>11}"]
    for one, weight, share, largest in zip(sources.sources, *total, most, strict=True):
        batches = len(one.rows) / (share * prompts) if share else math.inf
        epoch = "never" if not share else f"{batches * steps:.3g}"
        lines.append(
            f"   {one.name:<16}{len(one.rows):>8,}{weight:>10.4g}{share:>9.1%}{share * prompts:>10.3g}"
            f"{largest:>7}{epoch:>11}"
        )
    lines.append(
        "Shares hold over every number of prompts to less than one prompt; `prompts` and `most` are of one rollout"
        " batch, `epoch in` counts optimizer steps until the rows of a source begin again, by the weights of step 0."
    )
    averages = {one.name: one.settings for one in sources.sources if one.settings.average == "own"}
    for name, settings in averages.items():
        factor = (
            "its share of the prompts" if settings.loss_weight is None else f"{settings.loss_weight:g} (loss_weight)"
        )
        lines.append(f"{name} is averaged by itself (average=own), times {factor}.")
    if joint := [name for name in sources.names if name not in averages]:
        lines.append(f"Averaged together, over one denominator (average=joint): {', '.join(joint)}.")
    for one in sources.sources:
        given = {
            field.name: value
            for field in dataclasses.fields(one.settings)
            if field.name not in ("weight", "average", "loss_weight", "reward_funcs")
            and (value := getattr(one.settings, field.name)) is not None
        }
        if given:
            shown = ", ".join(f"{name}={value!r:.60}" for name, value in given.items())
            lines.append(f"{one.name} has settings of its own: {shown}.")
    return lines


def prompt_lines(codec: PromptCodec, dataset: Any, max_completion_length: int | None) -> tuple[list[str], int]:
    """Sentences about prompts as the model reads them, and the tokens of the longest."""
    count = min(len(dataset), 16 if codec.vision else MOST_ROWS)
    rows = [dataset[number * len(dataset) // count] for number in range(count)]
    read = [codec.read_row(row).ids for row in rows if row.get("prompt") is not None]
    if not read:
        return [], 0  # environments give them
    shown = printable(codec.tokenizer.decode(read[0])).splitlines()
    rest = [f"   ({len(shown) - SHOWN_LINES} more lines)"] if len(shown) > SHOWN_LINES else []
    lengths, of = [*map(len, read)], "" if count == len(dataset) else f" (of {len(dataset):,}, evenly)"
    lines = ["The first one, as the model reads it:", *(f"   | {line}" for line in shown[:SHOWN_LINES]), *rest]
    lines.append(
        f"Tokens of {len(lengths):,} prompts{of}: from {min(lengths)} to {max(lengths)}, median"
        f" {statistics.median_low(lengths)}."
    )
    room = (codec.max_context or math.inf) - (max_completion_length or 1)
    if crowded := sum(length > room for length in lengths):
        lines.append(
            f"{crowded:,} of them leave less room than max_completion_length={max_completion_length} in the model's"
            f" context of {codec.max_context} tokens: their completions end there."
        )
    return lines, max(lengths)


def reward_lines(suite: RewardSuite, collector: Collector | None, row: dict[str, Any]) -> Iterator[str]:
    """A table of the rewards of an empty completion and of the row's solution; `RewardError` if both fail."""
    if suite.abstains:
        yield "None: the policy learns from its teacher alone."
        return
    if (collector and plays_functions(collector.spec)) or row.get("prompt") is None:
        return  # completions have arguments of the user's own, or prompts are an environment's
    if all(isinstance(one, FunctionReward) and isinstance(one.function, EnvironmentReward) for one in suite.functions):
        return  # an environment rewards what was played in it
    column, tried = _solution_column(suite, row), []
    for text in (str(row[column]) if column else "?", ""):
        if collector:
            codec = collector.codec
            ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
            shown, prompt = codec.decode(row["prompt"], ids), codec.read_row(row).ids
        else:  # no tokenizer: each byte is a token
            ids, prompt = list(text.encode()), [0]
            shown = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        tried.append(Rollout(prompt, ids, [True] * len(ids), None, shown, FinishReason.STOP))
    context = RewardContext(TrainerState(), lambda name, values: None, lambda name, value: None)
    right, empty = suite([row] * 2, tried, context).rewards.tolist()
    table = [("reward of a completion", "empty", "solution")]
    table += [(name, _cell(one), _cell(other)) for name, one, other in zip(suite.names, empty, right, strict=True)]
    yield from (f"   {name:<30}{one:>10}" + (f"{other:>12}" if column else "") for name, one, other in table)
    if column:
        yield f"The solution is the text of the first row's {column!r}: {printable(str(row[column]))[:80]!r}."
        if collector:
            yield _tokens_of_solution(collector, str(row[column]))


def _tokens_of_solution(collector: Collector, text: str) -> str:
    """The length that an answer needs: the solution and the token that ends it."""
    tokens = len(collector.codec.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
    return (
        f"It takes {tokens} tokens with the one that ends it: max_completion_length must leave room for that, and for"
        " whatever else an answer says."
    )


def _solution_column(suite: RewardSuite, row: dict[str, Any]) -> str | None:
    """The column that holds a correct completion: one of `SOLUTIONS`, or one that a reward asks for, best of text."""
    functions = [one.function for one in suite.functions if isinstance(one, FunctionReward)]
    asked = [parameter.name for function in functions for parameter in parameters_of(function) or ()]
    usual = [name for name in SOLUTIONS if isinstance(row.get(name), str | int | float)]
    asked = [name for name in asked if name != "prompt" and isinstance(row.get(name), str | int | float)]
    return next(iter(usual + sorted(asked, key=lambda name: not isinstance(row[name], str))), None)


def _cell(value: float) -> str:
    return "none" if math.isnan(value) else f"{value + 0.0:.3f}"  # no -0
