"""Parts of a trainer, built from its config and arguments."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.comparison import ROLE_AVERAGE
from covey.algorithms.credit import Judge, JudgeOf, UnreadSettings
from covey.config.base import OnlineConfig, fill_unset
from covey.config.choosing import BY_REWARDS, gates_among
from covey.config.messages import ignored, is_set
from covey.config.rules import check_fields
from covey.config.teacher_sources import is_server
from covey.core.distillation import split_names
from covey.core.engine import EngineTraits, SamplingParams, traits_of
from covey.core.findings import CheckError, Finding
from covey.core.model import placeholder_ids, unwrapped
from covey.core.records import FinishReason, Rollout
from covey.data.dynamic_sampling import PromptChooser, SourceChoice
from covey.data.gates import gates_of
from covey.data.samplers import PromptHistory, PromptStream, order_of, sampler_of
from covey.data.sources import Source, Sources
from covey.engines.native.settings import read_settings
from covey.observability.completions import CompletionLog
from covey.observability.dashboard import ProgressDisplay
from covey.observability.diagnostics import Advice, LogEnds
from covey.observability.record import FOLDER, GIGABYTE, Recorder, Replay
from covey.policy.adapters import base_model, with_shared_weights
from covey.policy.loading import disable_dropout, load_policy, load_teacher, max_context, whole_models
from covey.policy.precision import held_in_half
from covey.policy.quantization import check_shardable, quantization_method
from covey.policy.replicas import Reference, starts_as_identity
from covey.policy.scoring import TokenScorer
from covey.policy.stored_adapters import StoredAdapter, has_weights_of, shared_base, stored_adapter, with_stored_adapter
from covey.rewards import RewardSuite
from covey.rewards.functions import FunctionReward
from covey.rewards.marks import named_tokens
from covey.rewards.suite import no_reward
from covey.rollout.collector import Collector
from covey.rollout.prompts import PromptCodec
from covey.rollout.speculation import Speculation
from covey.rollout.vision import Vision, is_processor
from covey.runtime.quiet import without_bars
from covey.runtime.user_code import report, warn
from covey.runtime.waiting import CHOSEN
from covey.trainer.batch_scorer import BatchScorer
from covey.trainer.build_rollouts import RewardPlan, build_rollout_spec, check_reward_sources, reward_plan
from covey.trainer.checks import MovedWeights, check_model, check_rounding
from covey.trainer.demonstrations import Demonstrations, load_demonstrations
from covey.trainer.distributed.sharding import prepare_frozen, sharding_of, weights_sharded_by
from covey.trainer.engines.build import build_engine
from covey.trainer.engines.opponents import PastPolicies, build_seats
from covey.trainer.engines.servers import generation_extras
from covey.trainer.evaluation.suites import SAMPLING, EvalSuite
from covey.trainer.integrations.attributes import as_list
from covey.trainer.integrations.first_step import FirstStep, OtherPrograms, planned_bytes
from covey.trainer.integrations.hub import PushCompletions
from covey.trainer.integrations.report import RunReport, changed, provenance
from covey.trainer.integrations.trackers import OpensSwanLab, check_trackers, guard_trackers
from covey.trainer.rollout_reports import logs_completions
from covey.trainer.run import Run
from covey.trainer.served_teachers import build_server_scorer
from covey.trainer.teachers import (
    Teacher,
    TeacherScorer,
    check_heads,
    loaded_teacher,
    policy_teacher,
    prompt_maker,
    served_teacher,
)

if TYPE_CHECKING:
    from covey.trainer.trainer import OnlineTrainer

ModelLike: TypeAlias = str | os.PathLike[str] | torch.nn.Module
RewardLike: TypeAlias = str | torch.nn.Module | Callable[..., Any]
DataLike: TypeAlias = Dataset | IterableDataset | Sequence[dict[str, Any]]
EvalLike: TypeAlias = DataLike | EvalSuite

NOTEBOOK_CALLBACK = "NotebookProgressCallback"  # of transformers, which only has it where IPython is
UNLIMITED = 2**31  # `max_completion_length=None`: only the model's context ends a completion


def resolve_args(args: Any, model: Any, config_class: type[OnlineConfig]) -> OnlineConfig:
    """The config, or its defaults with an output folder named after the model.

    Raises TypeError for a config of another class, CheckError (a ValueError) for a field or an output folder that
    cannot work.
    """
    if args is None:
        loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
        name = model if isinstance(model, (str, os.PathLike)) else loaded_from
        short = os.path.basename(os.fspath(name).rstrip("/")) or "model"
        return config_class(output_dir=f"{short}-{config_class.method.upper()}")
    if not isinstance(args, config_class):
        trainer = config_class.__name__.replace("Config", "Trainer")
        raise TypeError(
            f"`args` must be a {config_class.__name__}, got {type(args).__name__}: {trainer} has options that no other"
            f" config holds. Make one with {config_class.__name__}(output_dir=..., ...)."
        )
    folder = args.output_dir or ""
    if not folder.strip() or not _can_be_made(os.path.abspath(folder)):
        raise CheckError.of(
            "setting-format",
            f"output_dir={args.output_dir!r} is not a folder that can be written to, so checkpoints and completions"
            " would be lost.",
            "Choose another folder.",
        )
    check_trackers(args.report_to)
    fill_unset(args)
    report(check_fields(args))  # scripts may have assigned some since
    return args


def _can_be_made(folder: str) -> bool:
    try:
        while not os.path.lexists(folder):  # it is made below one that is there
            if not folder.isprintable() or len(os.fsencode(os.path.basename(folder))) > os.pathconf("/", "PC_NAME_MAX"):
                return False
            folder = os.path.dirname(folder)
        return os.path.isdir(folder) and os.access(folder, os.W_OK)
    except (OSError, ValueError):  # a null byte
        return False


@without_bars()
def build_policy(args: OnlineConfig, model: Any, quantization_config: Any, peft_config: Any) -> Any:
    """The model to train, with dropout and gradient checkpointing as the config says."""
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    policy = load_policy(
        model,
        init_kwargs=args.model_init_kwargs,  # type: ignore[arg-type] # a config parses JSON
        trust_remote_code=args.trust_remote_code,
        quantization_config=quantization_config,
        peft_config=peft_config,
        frozen=args.frozen_parts(),
        check_quantization=partial(check_shardable, sharding=weights_sharded_by(args), computes_in=precision),
    )
    if args.process_index == 0:  # others may have empty weights still, which FSDP fills from here
        check_model(policy)
    base = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    if named := getattr(base, "_no_split_modules", None):  # accelerate refuses names of blocks that are not there
        present = {type(module).__name__ for module in base.modules()}
        base._no_split_modules = type(named)(name for name in named if name in present)
    if args.disable_dropout:
        disable_dropout(policy)
    if args.gradient_checkpointing and not getattr(policy, "supports_gradient_checkpointing", True):
        warn(
            f"gradient_checkpointing=True has no effect: transformers cannot recompute the layers of"
            f" {type(policy).__name__}. Their activations are kept; set gradient_checkpointing=False to silence this.",
        )
        args.gradient_checkpointing = args.activation_checkpointing = False
    return policy


def build_vision(processing_class: Any, model: Any) -> Vision | None:
    return Vision(processing_class, placeholder_ids(model.config)) if is_processor(processing_class) else None


def build_scorer(args: OnlineConfig, tokenizer: Any, accelerator: Accelerator, vision: Vision | None) -> TokenScorer:
    return TokenScorer(
        unwrapped,
        temperature=args.temperature,
        repetition_penalty=args.repetition_penalty if args.keep_sampling_mask else 1.0,
        layout=str(args.attn_layout) if vision is None else "padded",
        pad_token_id=tokenizer.pad_token_id,
        chunk_size=args.logprob_chunk_size,
        float32_head=args.cast_lm_head_to_fp32,
        inside_head_call=sharding_of(accelerator).gradients,
        vision=vision is not None,
    )


def blank_row(codec: PromptCodec) -> Rollout:
    from PIL import Image

    content = [{"type": "image", "image": Image.new("RGB", (64, 64), "white")}, {"type": "text", "text": "?"}]
    encoded = codec.read([{"role": "user", "content": content}])
    return Rollout(encoded.ids, [], [], None, "", FinishReason.STOP, media=encoded.media)


def build_demonstrations(run: Run, codec: PromptCodec) -> Demonstrations | None:
    """The demonstrations that steps learn from, or None."""
    args = run.args
    if args.demonstrations is None:
        return None
    return Demonstrations(
        load_demonstrations(args.demonstrations, codec, args.max_completion_length, bool(args.prompts_as_messages)),
        per_step=args.demonstrations_per_step,
        seed=args.resolved_data_seed,
        processes=run.collectives.size,
        weighting=run.algorithm.weighting,
        rows=args.per_device_train_batch_size,
        max_completion_length=args.max_completion_length,
    )


def build_reference(
    args: OnlineConfig, algorithm: Algorithm, model: Any, accelerator: Any, peft_config: Any = None
) -> Reference | None:
    if algorithm.beta == 0:
        return None
    return make_reference(model, accelerator, peft_config, follows=args.sync_ref_model)


def make_reference(model: Any, accelerator: Any, peft_config: Any, *, follows: bool) -> Reference:
    """The policy as it is now, kept as a reference.

    Under a new adapter that is the model without the adapter, unless the reference `follows` the policy later on.
    """
    is_new = peft_config is not None and starts_as_identity(peft_config) and not follows
    return Reference(model, lambda copy: prepare_frozen(accelerator, copy), adapter_is_new=is_new)


def build_teachers(
    run: Run,
    model: Any,
    collector: Collector,
    rewards: RewardSuite,
    scorer: BatchScorer,
    peft_config: Any = None,
    reference: Reference | None = None,
    given: Any = None,
    loaded: bool = False,
) -> TeacherScorer | None:
    """The teachers that the config names, or the model that was `given`; None without any.

    `reference` is the KL penalty's; where it does not move, it is the teacher "start" as well. `loaded` says that the
    policy was loaded here by its name, not given as a model, whose weights may differ from those under its name.
    """
    args, teachers, bases = run.args, dict[str, Teacher](), dict[Any, Any]()
    as_named = loaded and peft_config is not None and starts_as_identity(peft_config)
    for name, source in sources_of_teachers(args, given).items():
        if source == "policy":
            teachers[name] = policy_teacher(name, source, None, model)
        elif is_server(source):
            top = args.teacher_top_k if args.teacher_loss == "divergence" else 0
            tokenizer = collector.codec.tokenizer
            server = build_server_scorer(args, source, unwrapped(model), tokenizer, top)
            teachers[name] = served_teacher(name, server, server.probe.last)
        elif source in ("start", "follower"):
            shared = reference is not None and source == "start" and not args.sync_ref_model
            own = reference if shared else None
            if own is None:
                own = make_reference(model, run.accelerator, peft_config, follows=source == "follower")
            teachers[name] = policy_teacher(name, source, own, model)
        else:
            teachers[name] = loaded_teacher(
                name, _placed_teacher(run, source, model, bases, as_named), unwrapped(model)
            )
    if not teachers:
        return None
    template = args.teacher_prompt_template or ""
    reads_solutions = "{solution}" in template or (bool(template) and "{" not in template)
    made = TeacherScorer(
        run,
        scorer,
        teachers,
        collector.codec,
        prompt_maker(args),
        reads_solutions,
        rewards.weights,
        column=args.teacher_column,
        success_reward=args.teacher_success_reward,
        alpha=args.teacher_mixup_alpha,
        names=split_names(args.teacher_top_k, args.teacher_beta) if args.teacher_loss == "divergence" else (0, 0),
        beta=run.algorithm.objective.divergence_beta,
    )
    report([*check_heads(made, unwrapped(model), run.algebra.on_policy)])
    return made


def sources_of_teachers(args: OnlineConfig, given: Any) -> dict[str, Any]:
    """Folders, hub ids, words and models of teachers, by name."""
    return dict(args.teachers) if given is None else {"": given}


def teacher_kwargs(args: OnlineConfig) -> dict[str, Any]:
    """Arguments with which teachers are loaded."""
    revision = {} if args.teacher_model_revision is None else {"revision": args.teacher_model_revision}
    own: Any = args.teacher_model_init_kwargs  # a config parses JSON
    return {**revision, **(own or {})}


@without_bars()
def _placed_teacher(run: Run, source: Any, policy: Any, bases: dict[Any, Any], as_named: bool) -> Any:
    """A teacher on the run's device, sharded if the policy is; `bases` keeps models that adapters share."""
    kwargs = teacher_kwargs(run.args)
    with whole_models():
        if not isinstance(source, str):
            source = source.requires_grad_(False).eval()
        elif (adapter := stored_adapter(source, kwargs)) is not None:
            source = with_stored_adapter(_base_of(run, adapter, policy, bases, as_named), adapter, kwargs)
        else:
            source = load_teacher(source, init_kwargs=kwargs, trust_remote_code=run.args.trust_remote_code)
    if not (run.sharding.weights or quantization_method(source)):
        source = source.to(run.device)
    return prepare_frozen(run.accelerator, source)


def _base_of(run: Run, adapter: StoredAdapter, policy: Any, bases: dict[Any, Any], as_named: bool) -> Any:
    """The model that an adapter changes: the policy's own without its adapter, or one that adapters share.

    Sharding replaces the weights of one model, so that then each adapter has a base of its own; so has an adapter that
    changes the base's weights.
    """
    args, key = run.args, (adapter.base, adapter.revision)
    if run.sharding.weights or adapter.changes_weights:
        return _load_base(args, adapter)
    if key not in bases:
        bases[key] = _shared_or_loaded(args, adapter, policy, as_named)
    return with_shared_weights(bases[key])


def _shared_or_loaded(args: OnlineConfig, adapter: StoredAdapter, policy: Any, as_named: bool) -> Any:
    """The model that a teacher's adapter changes: the one under the policy's adapter if it is that one, else loaded.

    Its name proves nothing where the model was given as an object, which may have been merged or trained since it was
    loaded, or where an adapter's start has changed it. Then it is compared with the model of that name.
    """
    config = base_model(policy).config
    if not shares_base(args, adapter, config) or (own := shared_base(policy)) is None:
        return _load_base(args, adapter)
    if as_named:
        return own
    quantization = getattr(config, "quantization_config", None)
    alike = {} if quantization is None else {"quantization_config": quantization, "dtype": own.dtype}
    named = _load_base(args, adapter, **alike)
    if has_weights_of(own, named):
        return own
    if not alike:
        return named
    del named  # before it is loaded as the run asks for it
    return _load_base(args, adapter)


def shares_base(args: OnlineConfig, adapter: StoredAdapter, config: Any) -> bool:
    """True if the adapter of a teacher changes the model of this `config`, and is loaded as the policy is."""
    own: Any = args.model_init_kwargs  # a config parses JSON
    same = adapter.changes(str(getattr(config, "_name_or_path", "")), (own or {}).get("revision"))
    return same and not args.teacher_model_init_kwargs


def _load_base(args: OnlineConfig, adapter: StoredAdapter, **given: Any) -> Any:
    others = {name: value for name, value in teacher_kwargs(args).items() if name not in ("revision", "subfolder")}
    kwargs = {**others, **({} if adapter.revision is None else {"revision": adapter.revision}), **given}
    return load_teacher(adapter.base, init_kwargs=kwargs, trust_remote_code=args.trust_remote_code)


def check_engine_choice(args: OnlineConfig, engine: Any) -> Iterator[Finding]:
    """Errors of the engine choice: one samples, and async rollouts need one with its own copy of the weights."""
    names = {"use_vllm", "use_sglang", "use_transformers_continuous_batching"} - {getattr(engine, "in_place_of", None)}
    named = sorted(name for name in names if getattr(args, name))
    if engine is not None and named:
        yield Finding.error(
            "engines-several",
            f"the trainer was given an `engine` ({type(engine).__name__}) and {named[0]}=True: only one can sample.",
            "Leave one of the two out.",
        )
    if engine is not None and not hasattr(engine, "in_place_of"):
        yield from ignored(
            args, ["engine_dtype"], "it is for the built-in engine, and the trainer was given an `engine`"
        )
    built_in = engine is None and not (args.use_vllm or args.use_sglang)
    shares_policy = built_in or (engine is not None and traits_of(engine).shares_policy)
    if args.max_staleness and args.replay_from is None and shares_policy:
        name = "the built-in engine" if built_in else type(engine).__name__
        yield Finding.error(
            "async-sampling",
            f"max_staleness={args.max_staleness} with {name}, which samples with the very weights that are trained:"
            " they cannot be trained at the same time.",
            "Sample with a server (use_vllm=True with vllm_mode='server', or use_sglang=True), give the trainer an"
            " `engine` of your own, or set max_staleness=0.",
        )


def build_collector(
    run: Run,
    model: Any,
    tokenizer: Any,
    engine: Any = None,
    tools: Any = None,
    rollout_func: Any = None,
    environment_factory: Any = None,
    vision: Vision | None = None,
    reward_funcs: Any = None,
    trainer: Any = None,
    seats: Any = None,
    eval_seats: Any = None,
) -> Collector:
    """The collector with the given engine or the one that the config names, a codec and a rollout spec.

    Special tokens that reward functions name are part of completions' text. A `rollout_func(prompts, trainer)` is given
    `trainer`.
    """
    args, context = run.args, max_context(model)
    report(_check_context(args, context))
    named = named_tokens(as_list(reward_funcs), tokenizer)
    codec = PromptCodec(
        tokenizer,
        args.chat_template_kwargs,  # type: ignore[arg-type]
        context,
        vision=vision,
        allow_control_tokens=args.allow_control_tokens,
        shown_tokens=named,
    )
    if shown := sorted(token for token in named if tokenizer.convert_tokens_to_ids(token) in codec.text_of.shown):
        tokens = f"reward functions look for {', '.join(map(repr, shown))}, which are special tokens of the tokenizer:"
        consequence = "they are part of the text of completions, which other special tokens are left out of."
        report([Finding.warning("reward-tokens", f"{tokens} {consequence}")])
    spec = build_rollout_spec(
        run.args, model, codec, tools, rollout_func, environment_factory, trainer, seats, eval_seats
    )  # before the engine, which is slow to start
    if engine is None:
        engine = build_engine(run, model, tokenizer, lambda: run.policy, context, vision)
    past: list[PastPolicies] = []
    if hasattr(engine, "generate"):  # `covey explain` starts none
        programs = environment_factory.values() if isinstance(environment_factory, dict) else [environment_factory]
        own = [one.seats for one in programs if hasattr(one, "seats")]
        of_trainer = [] if spec is None else [spec.seats, spec.eval_seats]
        past = build_seats([*own, *of_trainer], run, model, tokenizer, context, vision, build_engine)
        if args.keep_sampling_mask and not traits_of(engine).returns_masks:
            raise CheckError.of(
                "sampling-mask",
                f"keep_sampling_mask=True, and {type(engine).__name__} does not say that it returns which tokens it"
                " sampled from (`EngineTraits.returns_masks`).",
                "Sample with the built-in engine, or leave keep_sampling_mask False.",
            )
        if args.routing_replay == "R3" and not traits_of(engine).returns_routes and args.replay_from is None:
            raise CheckError.of(
                "routing-replay",
                f"routing_replay='R3', and {type(engine).__name__} does not say that it returns the experts of its"
                " tokens (`EngineTraits.returns_routes`).",
                "Sample with the built-in engine, start servers of vLLM or SGLang with --enable-return-routed-experts,"
                " or take routing_replay='R2', which needs nothing of the engine.",
            )
    return Collector(engine, codec, args.seed, spec, past)


def _check_context(args: OnlineConfig, context: int | None) -> Iterator[Finding]:
    """Findings about the length of completions in the model's context; None: it names none."""
    longest = args.max_completion_length
    if context is not None and longest is not None and longest >= context:
        yield Finding.warning(
            "context-length",
            f"max_completion_length={longest} is more than the model's context of {context} tokens leaves room for:"
            " completions end where the context does.",
            "Lower it, or take a model with a longer context.",
        )
    if context is None and longest is None:
        yield Finding.error(
            "context-length",
            "max_completion_length=None lets completions grow until the model's context is full, but this model names"
            " no context length (max_position_embeddings).",
            "Set max_completion_length.",
        )


def build_speculation(args: OnlineConfig, train_dataset: Any) -> Speculation | None:
    if args.speculative_reuse is None:
        return None
    if not hasattr(train_dataset, "__len__") and hasattr(train_dataset, "shuffle") and args.shuffle_dataset:
        place = Finding.warning(
            "draft-reuse",
            f"`speculative_reuse={args.speculative_reuse!r}` has little effect: in a stream a prompt is known by its"
            " place, and shuffle_dataset=True gives it another one in every epoch.",
            "Set shuffle_dataset=False, or give a dataset that has a length.",
        )
        report([place])
    lenience = args.speculative_lenience if args.speculative_reuse == "lenient" else None
    return Speculation(args.speculative_max_tokens, lenience=lenience)


def sampling_params(args: OnlineConfig, tokenizer: Any) -> SamplingParams:
    extra = generation_extras(args)
    reshapes = bool(extra) and not args.samples_elsewhere and read_settings(extra, tokenizer).reshapes
    report(_check_reshaping(args, extra) if reshapes else ())
    settings: dict[str, Any] = {name: getattr(args, name) for name in SAMPLING}
    max_tokens = args.max_completion_length or UNLIMITED
    kept = {"keep_mask": args.keep_sampling_mask, "keep_routes": args.routing_replay == "R3"}
    return SamplingParams(max_tokens=max_tokens, extra=extra, **kept, **settings)


def _check_reshaping(args: OnlineConfig, extra: dict[str, Any]) -> Iterator[Finding]:
    """Errors of settings of the built-in engine, `extra`, that change the probabilities of tokens."""
    if args.keep_sampling_mask:
        yield Finding.error(
            "sampling-mask",
            f"keep_sampling_mask=True with generation_kwargs={extra!r}: only the effects of top_p, top_k, min_p and"
            " repetition_penalty are trained on.",
            "Leave out what changes probabilities, or keep_sampling_mask.",
        )
    if args.speculative_reuse:
        yield Finding.error(
            "draft-reuse",
            f"speculative_reuse={args.speculative_reuse!r} with generation_kwargs={extra!r}: it makes tokens depend on"
            " which came before, so earlier completions cannot be checked in one forward pass.",
            "Leave one of the two out.",
        )


def build_rewards(run: Run, collector: Collector, reward_funcs: Any, processing_classes: Any) -> RewardSuite:
    """All reward functions behind one call, also rewards of environments; CheckError where nothing rewards."""
    args, player = run.args, collector.spec and collector.spec.play
    plan = reward_plan(reward_funcs, args.reward_weights, processing_classes, player, run.sources)
    report(check_reward_sources(plan, run.sources, args))
    if plan.functions is None and args.teacher is None:
        raise CheckError.of(
            "reward-missing",
            "`reward_funcs` is missing.",
            "Give a reward function, a reward model or a list of them. Environments with `get_reward` need none, and"
            " neither does a run with a `teacher`.",
        )
    if plan.functions is None:
        report(_check_without_rewards(args, run.sources))
        plan = RewardPlan([no_reward], None, None)
    elif args.num_generations == 1 and args.compare != ROLE_AVERAGE:
        raise CheckError.of(
            "group-of-one",
            "num_generations=1 with rewards: a completion is compared with the others of its prompt, so every advantage"
            " would be 0.",
            "Set num_generations to 2 or more, or leave `reward_funcs` out to learn from the teacher alone.",
        )
    with whole_models():
        suite = RewardSuite(
            plan.functions,
            weights=plan.weights,
            processing_classes=plan.processing_classes,
            model_init_kwargs=args.model_init_kwargs,  # type: ignore[arg-type]
            timeout=args.reward_timeout,
            batch_size=args.per_device_train_batch_size,
            device=run.device,
            tokenizer=collector.codec.tokenizer,
            isolation=args.reward_isolation,
            routes=plan.routes,
        )
    unused = ["stream_rewards=True"] * args.stream_rewards
    unused += ["reward_isolation='process'"] * (args.reward_isolation == "process")
    if unused and not any(isinstance(function, FunctionReward) for function in suite.functions):
        evidence = (
            f"`{'`, `'.join(unused)}` has no effect: every reward is a model, and models score a whole rollout batch"
            " once it is sampled, in this process."
        )
        report([Finding.warning("setting-unread", evidence)])
    return suite


def _check_without_rewards(args: OnlineConfig, sources: Sources | None) -> Iterator[Finding]:
    """Errors of settings that need rewards, in a run that has only a teacher."""
    given = {name: getattr(args, name) for name in ("dynamic_sample", "gates", "prompt_sampler")}
    for source in sources.sources if sources is not None else ():
        own = source.settings
        given |= {f"sources: {source.name}: gates": own.gates, f"sources: {source.name}: sampler": own.sampler}
    for name, value in given.items():
        by_gates = name.endswith("gates") and bool(gates_among(value, BY_REWARDS))
        by_history = value == "difficulty" or (isinstance(value, dict) and "pools" in value)
        if by_gates or by_history or (name == "dynamic_sample" and value):
            yield Finding.error(
                "reward-missing",
                f"{name}={value!r} chooses prompts by their rewards, and there are no `reward_funcs`.",
                "Give a reward function, or leave the setting at its default.",
            )
    names = ["reward_weights", "scale_rewards", "advantages", "reward_timeout", "reward_isolation", "stream_rewards"]
    yield from ignored(args, names, "there are no `reward_funcs`")


def unread_settings(args: OnlineConfig) -> UnreadSettings:
    names = ("process_weight", "step_discount", "step_baseline")
    return UnreadSettings({name: getattr(args, name) for name in names if is_set(args, name)})


def build_completions(args: OnlineConfig, main_process: bool) -> CompletionLog:
    return CompletionLog(
        args.output_dir or ".",
        limit=args.generation_batch_size,
        total_limit=args.log_completions_total_limit,
        export=args.exports_completions,
        show=args.log_completions,
        num_to_print=args.num_completions_to_print,
        unique_prompts=args.log_unique_prompts,
        report_to=args.report_to or (),
        enabled=main_process and logs_completions(args),
    )


def build_recorder(
    run: Run, collector: Collector, rewards: RewardSuite, described: Callable[[], Any], parts: Callable[[], Any]
) -> Recorder | None:
    args, collectives = run.args, run.collectives
    if args.record == "off":
        return None
    tokenizer = collector.codec.tokenizer

    def describe() -> dict[str, Any]:
        traits, policy = traits_of(collector.engine), run.policy
        weights = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in policy.parameters()]
        return {
            **described(),
            "chat_template": getattr(tokenizer, "chat_template", None),
            "model": {
                "path": str(policy.config._name_or_path),
                "weights": sum(count for count, _ in weights),
                "trained": sum(count for count, trained in weights if trained),
                "adapter": hasattr(policy, "peft_config"),
            },
            "engine": {name: getattr(traits, name) for name in ("shares_policy", "reports_after_cut", "rounded_to")},
            "parts": parts(),
            "changed": changed(args),
            "provenance": provenance(args),
        }

    folder, limit = Path(args.output_dir or ".", FOLDER), args.record_max_gb * GIGABYTE
    rank, size, keeps_tokens = collectives.rank, collectives.size, args.record == "tokens"
    return Recorder(folder, rewards.names, describe, rank, size, limit, keeps_tokens, tokenizer, run.timeline)


def build_replay(run: Run, collector: Collector, rewards: RewardSuite) -> tuple[Replay | None, EngineTraits]:
    """Rollouts of an earlier run, where the config asks for them, and the traits of the engine that samples."""
    args, collectives = run.args, run.collectives
    if args.replay_from is None:
        return None, traits_of(collector.engine)
    if args.record != "off" and Path(args.replay_from).resolve() == Path(args.output_dir or ".").resolve():
        evidence = (
            f"replay_from={args.replay_from!r} is the output_dir, whose record would be replaced while it is read:"
        )
        raise CheckError.of("replay-self", evidence, 'choose another output_dir, or record="off".')
    needs_routes = args.routing_replay == "R3"
    replay = Replay(Path(args.replay_from), rewards.names, collectives.rank, collectives.size, needs_routes)
    return replay, replay.traits


def build_judges(run: Run, rewards: RewardSuite) -> JudgeOf:
    """The comparison of the completions of each source."""
    return lambda source: Judge(run.method.of(source), rewards.weights_of(source))


def build_chooser(run: Run, dataset: Any, judge_of: JudgeOf) -> PromptChooser | None:
    """Selection of prompts and groups; None where the dataloader's order decides and every group is trained on."""
    args, sources = run.args, run.sources
    draws = sources is not None or args.prompt_sampler != "uniform"
    if dataset is None or not (draws or args.dynamic_sample or args.gates):
        return None
    whole = [Source("", dataset)] if sources is None else sources.sources
    choices = [_choice(args, one, draws) for one in whole]
    if sources is not None:
        choices = [
            replace(choice, first=first, digest=source.digest())
            for choice, first, source in zip(choices, sources.firsts, whole, strict=False)
        ]
    return PromptChooser(
        dataset,
        run.algebra,
        run.collectives.rank,
        choices,
        judge_of,
        mask_truncated=run.masks_truncated,
        draws=draws,
        max_rounds=args.max_resample_times,
        gather=run.collectives.named("choose the groups to train on"),
        exchange=partial(run.collectives.exchange, what="exchange the groups to train on"),
        takes_new_sources=args.resume_sources,
    )


def _choice(args: OnlineConfig, source: Source, draws: bool) -> SourceChoice:
    """Selection of prompts within a source; without sources, of refills alone where the dataloader draws prompts."""
    own, name = source.settings, f"source {source.name!r}" if source.name else "train_dataset"
    given = args.prompt_sampler if own.sampler is None else own.sampler
    floor = args.difficulty_floor if own.floor is None else own.floor
    sampler, rows = sampler_of(given, floor) if draws else None, source.rows
    history = None
    if sampler is not None:
        history = PromptHistory(len(rows), sampler, floor if given == "difficulty" else None)
    stream = PromptStream(
        len(rows),
        args.resolved_data_seed,
        ("prompts" if draws else "refills") + (f"/{source.name}" if source.name else ""),
        shuffle=bool(args.shuffle_dataset),
        chance=None if history is None else history.chance,
        order=order_of(given, rows, name) if draws else None,
    )
    gates: Any = args.gates if own.gates is None else own.gates  # a config parses JSON
    gates = gates_of(gates, args.dynamic_sample)
    return SourceChoice(stream, name=source.name, history=history, gates=gates)


def as_callbacks(given: Any) -> list[Any]:
    """Callbacks, or their classes, as a list: given in any sequence, or one alone; TypeError for anything else."""
    callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for one in callbacks:
        if not issubclass(one if isinstance(one, type) else type(one), TrainerCallback):
            raise TypeError(
                f"`callbacks` holds {one!r:.80}, a {type(one).__name__}. Give a list of `transformers.TrainerCallback`s"
                " or of subclasses of it."
            )
    return callbacks


def add_callbacks(trainer: "OnlineTrainer", given: Sequence[Any]) -> None:
    """Replace transformers' displays by Covey's callbacks; `own_callbacks` names all that were not `given`."""
    args = trainer.args
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    for callback in [one for one in trainer.callback_handler.callbacks if type(one).__name__ == NOTEBOOK_CALLBACK]:
        trainer.remove_callback(callback)  # its table shows the loss alone, which says nothing here
    if "swanlab" in (args.report_to or ()):
        trainer.callback_handler.callbacks.insert(0, OpensSwanLab())  # before transformers' own
    guard_trackers(trainer.callback_handler.callbacks)
    trainer.add_callback(LogEnds())
    if (repo := args.log_completions_hub_repo) and trainer.is_world_process_zero():
        trainer.add_callback(PushCompletions(repo, trainer.completions.folder, args.hub_token, args.hub_private_repo))
    display = ProgressDisplay(plain=bool(args.disable_tqdm))
    if args.process_index == 0:
        display.follow(trainer.run.activity)
    trainer.add_callback(display)
    trainer.stop.say = display.announce if args.process_index == 0 else lambda line: None
    trainer.add_callback(Advice(lambda: {**trainer.metrics.end_step(), "grad_norm": trainer.finite.norm}))
    if trainer.reference is not None and args.sync_ref_model:
        move = partial(trainer.reference.follow, trainer.policy, args.ref_model_mixup_alpha)
        trainer.add_callback(FollowPolicy(move, args.ref_model_sync_steps))
    if (teachers := trainer.behaviour.teachers) is not None and teachers.follows:
        trainer.add_callback(FollowPolicy(teachers.follow, args.teacher_sync_steps))
    trainer.add_callback(trainer.stop)
    if held_in_half(trainer.policy):
        rounded = [] if trainer.sharding.name else list(check_rounding(args, trainer.policy))
        report(rounded)
        trainer.add_callback(MovedWeights(trainer.run, warned=bool(rounded)))
    if trainer.recorder is not None:
        trainer.add_callback(trainer.recorder)
    if trainer.is_world_process_zero():
        record = None if trainer.recorder is None else trainer.recorder.folder
        of_others = trainer.run.opponents, trainer.run.teacher_bytes
        planned = None if trainer.sharding.gradients else planned_bytes(args, trainer.policy, *of_others)
        trainer.add_callback(FirstStep(planned, args.device, display.tell, record))
        if CHOSEN.late and args.device.type == "cpu" and torch.get_num_threads() > 1:
            trainer.add_callback(OtherPrograms(CHOSEN))
    trainer.report = RunReport(trainer)
    trainer.add_callback(trainer.report)
    known = {id(callback) for callback in given} | {callback for callback in given if isinstance(callback, type)}
    callbacks = trainer.callback_handler.callbacks
    trainer.own_callbacks = frozenset(id(c) for c in callbacks if id(c) not in known and type(c) not in known)


@dataclass(eq=False)
class FollowPolicy(TrainerCallback):
    """Moves a reference or teacher towards the policy every few optimizer steps."""

    move: Callable[[], None]
    every: int

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.move()
