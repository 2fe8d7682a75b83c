"""Variants of a study: settings, descent and state, as `study.json` holds them; the engine and evaluation of each."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from covey.config.aliases import ALIASES
from covey.config.engines import CORRECTION
from covey.config.messages import closest
from covey.config.objective import EntropyFields, KLFields, LossFields
from covey.config.sampling import AgentFields, GenerationFields, PromptFields
from covey.config.training import BatchFields
from covey.core.advantages import weighted_total
from covey.core.engine import EngineTraits, SampleRequest, WeightUpdate
from covey.core.findings import CheckError
from covey.core.records import Completion, PromptSample
from covey.policy.adapters import base_model, why_not_alone
from covey.policy.stored_adapters import LEAVES_BASE
from covey.rollout.agents import with_agent
from covey.runtime.user_code import preserve_process_state
from covey.trainer.build import build_collector, build_rewards, sampling_params
from covey.trainer.engines.rounding import AUTO
from covey.trainer.rollout_phase import RolloutPhase
from covey.trainer.trainers import GRPOTrainer, RLOOTrainer
from covey_tools.study.commands import check_public
from covey_tools.study.turns import Turn

if TYPE_CHECKING:
    from covey_tools.study.study import Study

TRAINERS: dict[str, Any] = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}
REFUSED = {  # settings that a study cannot have, and why
    "use_sglang": "variants are sampled by the built-in engine, or by a vLLM server",
    "use_transformers_continuous_batching": "variants are sampled by the built-in engine, or by a vLLM server",
    "max_staleness": "variants are sampled together, between their steps",
    "load_best_model_at_end": "`eval_steps` of the study evaluates, and its table names the best",
    "push_to_hub": "each variant's adapter is in its folder, to be uploaded by hand",
    "deepspeed": "a study is one process",
    "fsdp": "a study is one process",
    "replay_from": "variants are sampled together",
    "save_only_model": "variants continue from whole checkpoints",
    "eval_on_start": "`eval_steps` of the study evaluates",
    "resume_from_checkpoint": "`train(resume=True)` resumes all variants",
}
# settings of the shared model and engine
OF_ALL = (
    *("bf16", "fp16", "use_cpu", "model_init_kwargs", "trust_remote_code"),
    *("max_concurrent_completions", "engine_dtype"),
)
NOT_HERE = {"save_strategy": "no", "eval_strategy": "no", "save_total_limit": None, "disable_tqdm": True}
NOT_HERE |= {"model_init_kwargs": None}  # the study has loaded the model
KEPT = 3  # checkpoints of a variant, as the last one that all variants have must be among them
SHAPES = ("seed", *(one.name for kind in (GenerationFields, AgentFields) for one in fields(kind)))  # of rollouts
LEARNING = {"per_device_train_batch_size", "gradient_accumulation_steps", "advantages", "pass_at_k"} | {
    one.name for kind in (BatchFields, EntropyFields, KLFields, LossFields, PromptFields) for one in fields(kind)
}  # not read by evaluations; they need to fit a variant's settings only
PARTS = ("tools", "rollout_func", "environment_factory", "agent")


@dataclass
class Variant:
    """One configuration of a study."""

    name: str
    changes: dict[str, Any]  # settings that differ from the study's; `peft` and `method` among them
    parent: str | None = None  # the variant that it is a clone of
    status: str = "running"  # or "waiting", "stopped", "failed", "finished"
    reason: str = ""  # of its status
    step: int = 0  # optimizer steps taken
    checkpoint: str | None = None  # its last, relative to the study's folder
    resumed_at: int = -1  # step of its last `resume`; halving compares it at later ones
    adopts: bool = False  # settings of the optimizer are the config's, not the checkpoint's
    history: list[str] = field(default_factory=list)  # what was done to it, with the step
    evaluations: dict[int, list[float]] = field(default_factory=dict)  # step: mean reward of each evaluation prompt
    curve: list[dict[str, float]] = field(default_factory=list)  # logged metrics

    def __post_init__(self) -> None:
        self.evaluations = {int(step): rewards for step, rewards in self.evaluations.items()}
        self.trainer: Any = None
        self.turn: Turn | None = None
        self.must_save = self.must_stop = False  # at the end of the step

    @property
    def live(self) -> bool:
        return self.turn is not None and not self.turn.ended


def settings_of(
    common: Mapping[str, Any], changes: Mapping[str, Any], folder: Path
) -> tuple[str, dict[str, Any] | None, Any]:
    """Method, adapter (None: the whole model) and config of a variant; CheckError for what a study cannot have."""
    own = {field_of(name) for name in changes}  # also under an old name
    values = {**{name: value for name, value in common.items() if field_of(name) not in own}, **changes}
    check_public(changes)
    if given := [name for name in ("eval_strategy", "eval_steps") if values.get(name, "no") not in ("no", None)]:
        raise CheckError.of(
            "study-setting", f"`{given[0]}` is set for the study as a whole: give it `eval_steps` and `eval_dataset`."
        )
    if "output_dir" in changes:
        raise CheckError.of(
            "study-setting",
            "`output_dir` is set for the study as a whole: each variant has a folder of its name in it.",
        )
    if values.get("save_strategy", "no") != "no" or "save_steps" in values:
        raise CheckError.of(
            "study-setting", "`save_strategy` and `save_steps` are replaced by `save_rounds` of the study."
        )
    for name in changes:
        of_all = name in OF_ALL or _names_server(name)
        if (of_all or (name == "temperature" and values.get("use_vllm"))) and changes[name] != common.get(name):
            evidence = f"{name}={changes[name]!r} for one variant: all share one model and engine."
            raise CheckError.of("study-setting", evidence, "Set it for the study.")
    method = values.pop("method", "grpo")
    if method not in TRAINERS:
        raise CheckError.of("setting-word", f"method={method!r} is not known; choose one of: {', '.join(TRAINERS)}.")
    own = changes.get("peft", common.get("peft"))
    if not isinstance(own, Mapping | None):
        raise CheckError.of(
            "setting-type", f"peft={own!r} must be a mapping, such as {{'r': 8}}, or None for the whole model."
        )
    adapter = None if own is None else {**(common.get("peft") or {}), **own}
    if adapter is not None and (start := adapter.get("init_lora_weights", True)) not in LEAVES_BASE:
        evidence = f"init_lora_weights={start!r} changes weights of the model, which all variants share."
        raise CheckError.of("study-adapter", evidence, f"Use one of {', '.join(map(repr, LEAVES_BASE))}.")
    if adapter is not None:
        from peft import LoraConfig

        known = [one.name for one in fields(LoraConfig)]
        if unknown := [name for name in adapter if name not in known]:
            evidence = f"`peft` has no field {unknown[0]!r}.{closest(unknown[0], known)}"
            raise CheckError.of("setting-word", evidence, "See peft.LoraConfig.")
        if not isinstance(rank := adapter.get("r", 8), int):
            raise CheckError.of(
                "setting-type", f"peft: r={rank!r} must be a whole number (in `random`, draw it from a list)."
            )
    for name in ("peft", "reward_funcs", "system_prompt"):
        values.pop(name, None)
    if adapter is None and values.get("use_vllm"):  # the server's weights are those under the adapters
        values = {name: value for name, value in values.items() if not _names_server(name)}
    try:
        args = TRAINERS[method].config_class(**{**values, **NOT_HERE, "output_dir": str(folder)})
    except TypeError as error:
        names = f"settings of {method.upper()}Config, `peft`, `method`, `reward_funcs` and `system_prompt`"
        raise CheckError.of("setting-word", str(error), f"A variant changes {names}.") from None
    args.save_total_limit = KEPT
    for name, why in REFUSED.items():
        if getattr(args, name, None):
            evidence = f"{name}={getattr(args, name)!r} is not possible in a study: {why}."
            raise CheckError.of("study-setting", evidence, "Leave it out.")
    if args.engine_dtype == AUTO:
        evidence = (
            "engine_dtype='auto' measures a run's own engine, and one engine samples for all variants of a study."
        )
        raise CheckError.of("study-setting", evidence, "Name a format, such as engine_dtype='int8', or leave it unset.")
    for name, value in {"vllm_mode": "server", "vllm_lora_sync": "adapter"}.items():
        if args.use_vllm and getattr(args, name) not in ("auto", value):
            raise CheckError.of(
                "study-setting",
                f"{name}={getattr(args, name)!r} with use_vllm=True: one server samples for all variants of a study,"
                " each from its adapter.",
                f"Set {name}={value!r}.",
            )
    if args.world_size > 1:
        evidence = f"a study is one process, and {args.world_size} were started."
        raise CheckError.of("study-setting", evidence, "Start it without a launcher.")
    return method, adapter, args


def field_of(setting: str) -> str:
    """The field's present name, for a setting by its present or an earlier name."""
    return (ALIASES[setting].new if setting in ALIASES else None) or setting


def _names_server(setting: str) -> bool:
    return setting.startswith(("use_vllm", "vllm_")) and setting not in CORRECTION


def check_adapter(model: Any) -> None:
    obstacle = why_not_alone(model)
    head = base_model(model).get_output_embeddings()
    if obstacle is None and hasattr(head, "lora_A"):
        obstacle = "it changes the language-modelling head"
    if obstacle is None and any(len(getattr(module, "lora_embedding_A", ())) for module in model.modules()):
        obstacle = "it changes embeddings"
    if obstacle is not None:
        evidence = f"this adapter cannot be sampled together with others: {obstacle}."
        raise CheckError.of("study-adapter", evidence, "Use a plain LoRA.")


class VariantEngine:
    """The study's engine as one variant sees it: requests name the variant's adapter."""

    in_place_of = "use_vllm"  # setting that names the server behind it

    def __init__(self, study: "Study", adapter: str, rounded_to: str | None = None):
        self.study, self.adapter, self.rounded_to = study, adapter, rounded_to
        self._version: int | None = None  # that the server holds; the built-in engine reads the parameters themselves

    @property
    def traits(self) -> EngineTraits:
        if self.study.server is None:
            return EngineTraits(shares_policy=True, returns_masks=True, rounded_to=self.rounded_to)
        return replace(self.study.server.traits, updates_in_flight=False)

    async def generate(self, request: SampleRequest) -> list[Completion]:
        engine = self.study.server or self.study.engine
        assert engine is not None, "made with the first trainer"
        completions = await engine.generate(replace(request, adapter=self.adapter))
        if self._version is None:
            return completions
        return [replace(one, versions=[self._version] * len(one.token_ids)) for one in completions]

    def load_weights(self, update: WeightUpdate) -> None:
        """Send the adapter to the study's server, whose versions are numbered across all variants."""
        assert self.study.server is not None and update.adapter is not None, "checked when the study is made"
        numbered = replace(update, version=next(self.study.updates), adapter_name=self.adapter)
        self.study.server.load_weights(numbered)
        self._version = update.version

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()  # the study wakes the engine, for all variants at once


@dataclass(eq=False)
class CommonEvaluation:
    """Mean rewards by prompt of one variant, by the rewards and the settings of the study, whatever it trains with."""

    args: Any  # config of the study, without the variant's changes
    rows: Sequence[dict[str, Any]]
    reward_funcs: Any
    has_own_rewards: bool  # the variant is trained with others
    phase: RolloutPhase | None = None  # made at the first evaluation

    @torch.no_grad()
    def __call__(self, trainer: Any) -> list[float]:
        """The mean reward of each prompt, over as many completions as the study's groups have, with the same seeds."""
        if self.phase is None:
            with preserve_process_state():  # environments that are made for it may draw random numbers
                self.phase = self._phase(trainer)
        phase = self.phase
        model, was_training, count = trainer.model, trainer.model.training, self.args.num_generations
        samples = [PromptSample(row, number, sample) for number, row in enumerate(self.rows) for sample in range(count)]
        model.eval()
        try:
            scored = phase.sample(("study", 0), samples, "eval")
            totals = weighted_total(scored.rewards.double(), phase.rewards.weights.double())
        finally:
            model.train(was_training)
        return totals.view(len(self.rows), count).nanmean(dim=1).tolist()

    def _phase(self, trainer: Any) -> RolloutPhase:
        run, collector = replace(trainer.run, args=self.args), trainer.collector
        tokenizer, rewards = collector.codec.tokenizer, trainer.rewards
        if any(getattr(self.args, name) != getattr(trainer.args, name) for name in SHAPES):
            tools, function, factory, agent = map(trainer.made_of.get, PARTS)
            factory = with_agent(agent, factory, tools, function)
            functions = self.reward_funcs if self.has_own_rewards else trainer.made_of.get("reward_funcs")
            collector = build_collector(
                *(run, trainer.model, tokenizer, collector.engine, tools, function, factory),
                reward_funcs=functions,
                trainer=trainer,
                seats=trainer.made_of.get("seats"),
                eval_seats=trainer.made_of.get("eval_seats"),
            )
            collector.run_by(trainer.collector.run)
        if self.has_own_rewards:
            rewards = build_rewards(run, collector, self.reward_funcs, None)
        params = sampling_params(self.args, tokenizer)
        return replace(trainer.rollouts, run=run, collector=collector, params=params, rewards=rewards)

    def close(self, trainer: Any) -> None:
        """End what the evaluation has started, in addition to the trainer's own."""
        if self.phase is None:
            return
        if self.phase.rewards is not trainer.rewards:
            self.phase.rewards.close()
        if (spec := self.phase.collector.spec) is not None and spec is not trainer.collector.spec:
            spec.close()


@dataclass(eq=False)
class FollowsStudy(TrainerCallback):
    """Evaluates, saves and stops at the end of a step, on the trainer's thread, and notes its progress.

    After an evaluation it pauses, so that the study can compare the variants and stop some at this very step.
    """

    variant: Variant
    evaluate: CommonEvaluation | None
    is_due: Callable[[int], bool]
    pauses: Callable[[], bool]

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.variant.adopts:
            adopt_settings(args, parts["optimizer"], parts["lr_scheduler"])

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        variant, self.variant.step = self.variant, state.global_step
        last = state.global_step >= state.max_steps
        if self.evaluate is not None and (last or self.is_due(state.global_step)):
            variant.evaluations[state.global_step] = self.evaluate(variant.trainer)
            if self.pauses() and not last and variant.turn is not None:
                variant.turn.wait_for(asyncio.sleep(0))
        control.should_save |= variant.must_save or last
        control.should_training_stop |= variant.must_stop

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self.evaluate is not None:
            self.evaluate.close(self.variant.trainer)

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.variant.must_save = self.variant.adopts = False
        self.variant.checkpoint = f"{self.variant.name}/checkpoint-{state.global_step}"

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:
        kept = ("loss", "reward", "reward_std", "kl", "entropy", "completions/mean_length", "learning_rate")
        point = {name: float(logs[name]) for name in kept if name in (logs or {})}
        if not point:
            return  # the summary at the end
        self.variant.curve = [old for old in self.variant.curve if old["step"] < state.global_step]
        self.variant.curve.append({"step": state.global_step, **point})


def adopt_settings(args: Any, optimizer: Any, scheduler: Any) -> None:
    """Give a loaded optimizer and schedule the config's settings in the place of the checkpoint's."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] = args.learning_rate
        if group.get("weight_decay") or group is optimizer.param_groups[0]:  # the others are of biases and norms
            group["weight_decay"] = args.weight_decay
        if "betas" in group:
            group["betas"] = (args.adam_beta1, args.adam_beta2)
            if "eps" in group:
                group["eps"] = args.adam_epsilon
    if lambdas := getattr(scheduler, "lr_lambdas", None):
        scheduler.base_lrs = [args.learning_rate] * len(lambdas)
        for group, factor in zip(optimizer.param_groups, lambdas, strict=True):
            group["lr"] = args.learning_rate * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
