"""`OnlineTrainer`: a `transformers.Trainer` of group-relative reinforcement learning, with the parts of a step.

The loop is `covey.trainer.loop`; `covey.trainer.build` makes the parts. The other hooks of Hugging Face's are here.
"""

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint.stateful import Stateful
from transformers import TrainerCallback, set_seed
from transformers.trainer_utils import EvalLoopOutput

from covey.config.aliases import accepts_old_names
from covey.config.base import OnlineConfig
from covey.core.engine import EngineTraits, RolloutEngine, SamplingParams
from covey.core.model import unwrapped
from covey.core.records import Experience, MicroStep, PromptSample
from covey.core.routing import routing_of
from covey.core.stats import Max
from covey.data.sampler import train_loader
from covey.observability.completions import CompletionLog
from covey.policy.loading import load_processing_class, set_up_to_train, use_cache_as_it_is
from covey.rollout.seats import Seats
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.vision import tokenizer_of
from covey.runtime.data_files import refusing_objects
from covey.runtime.definitions import refuse_while_loading
from covey.runtime.files import locked
from covey.runtime.interrupts import interruptible
from covey.runtime.process_memory import reuse_freed_memory
from covey.runtime.quiet import show_own_warnings_plainly, without_bars
from covey.runtime.user_code import call_all, report
from covey.trainer import build
from covey.trainer.asking import Metrics, describe, generate
from covey.trainer.batch_scorer import BatchScorer
from covey.trainer.checkpoint import STAGING, Checkpointer, resume_from
from covey.trainer.checks import (
    FiniteCheck,
    determine_best_metric,
    foreign_loader,
)
from covey.trainer.distributed.sharding import ready_to_evaluate, ready_to_train, shard_on_cpu, sharding_of
from covey.trainer.distributed.stopping import Finished, StopAtStep, set_random_state
from covey.trainer.engine_check.parity import EngineCheck, corrected
from covey.trainer.engines.rounding import choose_rounding, first_prompts
from covey.trainer.engines.weight_sync import WeightSync
from covey.trainer.evaluation.phase import EvaluationPhase, recommending_optimizer
from covey.trainer.evaluation.suites import as_of_sources
from covey.trainer.experience import BehaviourScorer, CreditAssigner
from covey.trainer.integrations import hub, search
from covey.trainer.integrations.attributes import ABSENT, warn_of_unused_methods
from covey.trainer.integrations.report import named_parts
from covey.trainer.loop import TrainingLoop
from covey.trainer.loss_terms import EntropyController, ExpertBalance, token_energies
from covey.trainer.microbatches import MicroBatchRunner
from covey.trainer.optimizers import optimizer_of
from covey.trainer.prepare import build_parts, read_arguments
from covey.trainer.resuming import describe_run
from covey.trainer.rollout_phase import RolloutPhase
from covey.trainer.run import Method, make_run
from covey.trainer.teacher_weights import planned_teacher_bytes
from covey.trainer.unread import check_callbacks, check_unread
from covey.trainer.update_phase import UpdatePhase


class OnlineTrainer(TrainingLoop):
    """Trains a causal language model on its own completions.

    Args:
        model: hub id, folder, transformers model or PEFT model.
        reward_funcs: one or a list of functions, model ids or paths, or sequence classifiers (`covey.rewards`).
        args: the config; defaults if None.
        train_dataset: rows with a `prompt` column (text or messages); other columns go to the reward functions. Those
            called `image` and `images` are shown to vision-language models. Or a dictionary of datasets by name:
            sources, each of which has a share of the prompts.
        eval_dataset: rows as above, an `EvalSuite` with sampling settings of its own, or a dictionary of these by name.
        processing_class: the tokenizer, or the processor of a vision-language model; loaded with the model if None.
        reward_processing_classes: tokenizers of reward models, aligned with `reward_funcs`.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: an optimizer and a scheduler instead of the config's.
        quantization_config: loads the policy in fewer bits; needs `peft_config`.
        peft_config: trains an adapter instead of the whole model.
        tools: functions that the policy may call; their type hints and docstrings describe them to it.
        rollout_func: plays rollouts instead of the built-in loop: `async (row, engine) -> Rollout` for one, or
            `(prompts, trainer) -> dict` for a whole rollout batch (`covey.rollout.user_functions`).
        environment_factory: makes the environments that rollouts act in, one for each: a class or a function without
            arguments, an adapter (`covey.rollout.environments`), or several by name, `{name: factory}`, each for the
            rows with its name in the column `environment`.
        agent: a program that plays rollouts: a command, `async (row, base_url, api_key) -> reward` or a
            `covey.rollout.agents.AgentProgram`. The policy answers its requests to the URL.
        engine: samples instead of the engine that the config names (`covey.core.engine.RolloutEngine`).
        optimizer_cls_and_kwargs: class of the optimizer and its arguments, instead of `args.optim`.
        seats: opponents that rollout functions and programs play with, by name, which are not trained: "frozen" (the
            policy as it is now), "policy:n" (as it was n optimizer steps ago), a `covey.rollout.seats.Seat` with a URL,
            or a function of messages.
        eval_seats: seats in evaluations; each replaces the one of the same name.
        sources: settings of sources by name: fields of `covey.data.sources.SourceSettings`.
        model_init: function that makes the model, instead of `model`; `hyperparameter_search` calls it for each trial.

    Raises:
        TypeError: an unknown argument, or neither `model` nor `model_init`.
        ValueError: arguments that cannot work; the message says what to do about it.
    """

    config_class: ClassVar[type[OnlineConfig]]
    make_algorithm: ClassVar[Any]  # config -> `covey.algorithms.Algorithm`

    args: OnlineConfig
    model: Any
    eval_dataset: Any
    made_of: dict[str, Any]  # the constructor's arguments, by name
    report: Any  # `covey.trainer.integrations.report.RunReport`
    own_callbacks: frozenset[int]  # ids of those that the user has not given
    loss_is_scaled_for_ga = True  # an average over the accumulation window is in the weights already
    teacher_model: Any = None  # a model that was given in the place of `args.teacher`
    evaluates_alone = False  # the policy was sharded for an evaluation without training
    generations_asked = 0  # calls of `generate`
    on_evaluated: Callable[[dict[str, float], int], bool] | None = None  # of a search: metrics, step -> stop training

    @accepts_old_names
    @interruptible
    def __init__(
        self,
        model: build.ModelLike | None = None,
        reward_funcs: build.RewardLike | Sequence[build.RewardLike] | None = None,
        args: OnlineConfig | None = None,
        train_dataset: build.DataLike | dict[str, build.DataLike] | None = None,
        eval_dataset: build.EvalLike | dict[str, build.EvalLike] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        engine: RolloutEngine | None = None,
        optimizer_cls_and_kwargs: tuple[type[Any], dict[str, Any]] | None = None,
        model_init: Callable[..., Any] | None = None,
        agent: Any = None,
        seats: Seats | None = None,
        eval_seats: Seats | None = None,
        sources: dict[str, dict[str, Any]] | None = None,
    ):
        refuse_while_loading(f"a {type(self).__name__} was made")
        if model is not None and model_init is not None:
            raise ValueError("`model` and `model_init` were both given: give the model, or the function that makes it.")
        model = model if model_init is None else search.make_model(model_init)
        given = read_arguments(
            self.config_class,
            args,
            model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_funcs=reward_funcs,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            agent=agent,
            engine=engine,
            seats=seats,
            eval_seats=eval_seats,
            sources=sources,
        )
        args = given.args
        set_seed(args.seed)  # before an adapter is initialised
        model = build.build_policy(args, model, quantization_config, peft_config)
        init_kwargs: Any = args.model_init_kwargs  # a config parses JSON
        processing_class = load_processing_class(
            processing_class, model, trust_remote_code=args.trust_remote_code, init_kwargs=init_kwargs
        )
        tokenizer, vision = tokenizer_of(processing_class), build.build_vision(processing_class, model)
        with use_cache_as_it_is(model):
            super().__init__(
                model=model,  # type: ignore[arg-type] # loaded by now
                args=args,
                data_collator=lambda batch: batch,  # type: ignore[arg-type, return-value]
                train_dataset=given.train_dataset,
                eval_dataset=given.eval_dataset,
                processing_class=processing_class,
                callbacks=build.as_callbacks(callbacks),
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            )
        if self.accelerator.device.type == "cpu":
            reuse_freed_memory()
        show_own_warnings_plainly()
        method, policy = Method(args, self.make_algorithm, given.by_source), unwrapped(self.model)
        shards = self.accelerator.num_processes if sharding_of(self.accelerator).weights else 1
        copies = given.opponents, planned_teacher_bytes(args, policy, shards, self.teacher_model)
        self.run = run = make_run(args, method, policy, self.accelerator, lambda: self.state, given.sources, *copies)
        self.sharding, self.collectives = run.sharding, run.collectives
        self.metrics, self.timeline = run.metrics, run.timeline
        self.scorer = build.build_scorer(args, tokenizer, self.accelerator, vision)
        self.balance = ExpertBalance(args, model)
        self.reference = build.build_reference(args, run.algorithm, model, self.accelerator, peft_config)
        parts = build_parts(
            run, given, model, processing_class, engine, reward_processing_classes, self.optimizer, trainer=self
        )
        self.collector, self.rewards = parts.collector, parts.rewards
        if vision is not None and self.sharding.weights:
            self.scorer.blank = build.blank_row(self.collector.codec)
        report(check_unread(self))
        self._build_step(parts.sampling, given.prompts_required, peft_config)
        build.add_callbacks(self, build.as_callbacks(callbacks))

    def _build_step(self, sampling: SamplingParams, prompts_required: bool, peft_config: Any) -> None:
        args, run, engine, rows = self.args, self.run, self.collector.engine, self.train_dataset
        own = engine if self.made_of.get("engine") is None else None
        prompts = functools.partial(first_prompts, self.collector.codec, rows)
        self.rounding = choose_rounding(run, own, prompts, lambda traits: self._expect(traits, sampling))
        replay, traits = build.build_replay(run, self.collector, self.rewards)
        entropy = EntropyController(args) if args.entropy_coef or args.use_adaptive_entropy else None
        run.method.correct(lambda algorithm: corrected(algorithm, args, traits, sampling))
        runner = MicroBatchRunner(run, self.scorer)
        scorer = self.batch_scorer = BatchScorer(run, self.scorer, runner)
        routes_of = None if self.scorer.vision or routing_of(run.policy) is None else scorer.routes
        check = EngineCheck(run, self.collector, sampling, traits, scorer.rescore, routes_of)
        teachers = build.build_teachers(
            run,
            self.model,
            self.collector,
            self.rewards,
            scorer,
            peft_config,
            self.reference,
            given=self.teacher_model,
            loaded=isinstance(self.made_of.get("model"), str | os.PathLike),
        )
        self.behaviour = BehaviourScorer(run, scorer, self.reference, check, teachers)
        energies = functools.partial(token_energies, scorer) if run.algorithm.token_baseline else None
        judge_of, unread = build.build_judges(run, self.rewards), build.unread_settings(args)
        self.credit = CreditAssigner(run, self.rewards, judge_of, entropy is not None, unread, energies)
        self.completions = build.build_completions(args, self.is_world_process_zero())
        sync = self.weight_sync = WeightSync(engine, lambda: self.policy, self.collectives, args.vllm_lora_sync)
        reuse, chooser = build.build_speculation(args, rows), build.build_chooser(run, rows, judge_of)
        self.rollouts = RolloutPhase(
            run,
            self.collector,
            sampling,
            self.rewards,
            sync,
            reuse,
            chooser,
            rows,
            replay,
            wants_routes=lambda: check.wants_routes,
        )
        self.finite = FiniteCheck(
            run,
            self.credit.describe_rewards,
            optimizer=lambda: self.optimizer,
            earlier=lambda: self.checkpoints.earlier,
        )
        described = functools.cache(lambda: describe_run(args, self.train_dataset, self.rewards))
        self.recorder = build.build_recorder(run, self.collector, self.rewards, described, lambda: named_parts(self))
        self.updates = UpdatePhase(
            run,
            self.scorer,
            scorer,
            runner,
            entropy,
            self.balance if self.balance.coef else None,
            self.finite,
            compute_loss=self.loss_of,
            backward=self.backward,
            demonstrations=build.build_demonstrations(run, self.collector.codec),
            teachers=None if teachers is None else teachers.heads,
            updates=None if self.recorder is None else self.recorder.updates,
        )
        self.evaluation = EvaluationPhase(
            run,
            self.rollouts,
            experience=self._evaluated,
            loss_of=lambda experience: self.updates.evaluate(self.model, experience),
            prompts_required=prompts_required,
            recorder=self.recorder,
        )
        stateful = ("updates", "rollouts", "behaviour", "credit", "metrics", "finite", "rewards")
        parts: dict[str, Stateful] = {n: getattr(self, n) for n in stateful} | {"failures": self.rollouts.failures}
        parts["rounding"] = self.rounding
        self.checkpoints = Checkpointer(run, parts, self.finite.check_weights, described, self.reference)
        self.pushes = hub.ModelPushes(args)
        alone = self.collectives.size == 1
        self.stop = StopAtStep(
            self.collectives.gather, args.save_strategy != "no", lambda: self.report.farewell(), alone
        )

    def _expect(self, traits: EngineTraits, sampling: SamplingParams) -> None:
        """Correct and check the engine's samples by `traits`, other ones than it had when the trainer was made."""
        self.run.method.correct(lambda algorithm: corrected(algorithm, self.args, traits, sampling))
        self.behaviour.engine_check.expect(traits)

    def generate_completions(self, prompts: Sequence[Any], **changes: Any) -> list[dict[str, Any]]:
        """For a `rollout_func(prompts, trainer)`, while it runs: one completion of each prompt.

        Args:
            prompts: texts, messages or lists of tokens.
            changes: settings that differ from the config's: `max_tokens`, `temperature`, `top_k`, `top_p`, ...

        Returns:
            For each a dictionary with `prompt_ids`, `completion_ids`, `logprobs` and `text`.

        Raises:
            ValueError: called at another time, or with a setting that does not exist.
        """
        play = self.collector.spec and self.collector.spec.play
        if not isinstance(play, BatchFunction):
            raise ValueError(
                "`generate_completions` is for a `rollout_func(prompts, trainer)`, and there is none. Use `generate`."
            )
        return play.generate_completions(prompts, **changes)

    @interruptible
    @torch.no_grad()
    def generate(self, prompts: Any, num_generations: int = 1, seed: int | None = None, **changes: Any) -> Any:
        """Completions by the model as it is now, sampled by the engine and with the settings of training.

        Args:
            prompts: a text or a conversation (a list of messages), or a list of these; with `prompts_as_messages` each
                text becomes a message of the user.
            num_generations: completions of each prompt.
            seed: the same one gives the same completions; by default every call gives others.
            changes: settings that differ from the config's: `max_tokens`, `temperature`, `top_k`, `top_p`, ...

        Returns:
            The completion of a prompt, as a text, or a list of them where `num_generations` is above 1; for several
            prompts a list with the completions of each.

        Raises:
            ValueError: a setting that does not exist.

        Example:
            trainer.generate([{"role": "user", "content": "What is 2 + 3?"}], temperature=0.0)
        """
        return generate(self, prompts, num_generations, seed, changes)

    def __repr__(self) -> str:
        return describe(self)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, from the start or from a checkpoint, also after an interrupted call.

        Args:
            resume_from_checkpoint: a checkpoint's folder, True for the last one in `output_dir`, or "auto" for the
                last one that is whole, if there is any; None: `args.resume_from_checkpoint`.
            trial: of a hyperparameter search.
            ignore_keys_for_eval: without effect, as evaluation returns no model outputs.

        Returns:
            A `transformers.trainer_utils.TrainOutput`: the last step, the mean loss, and metrics of speed.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged or of a run with another model or other batch sizes;
                or another run works in `output_dir`.
        """
        ready_to_train(self)
        warn_of_unused_methods(self.policy)
        self.updates.buffer.clear()
        self.rollouts.cancel()
        own = locked(Path(self.args.output_dir or ".")) if self.args.should_save and trial is None else nullcontext()
        with (
            self.stop.listening(),
            self.collectives.ending_all(),
            own,
            without_bars(),
            refusing_objects(),
            set_up_to_train(self.policy, self.args.gradient_checkpointing),
        ):
            try:
                if (optimizer := recommending_optimizer(self.optimizer)) is not None:
                    optimizer.train()  # of an earlier call
                if resume_from_checkpoint is None and trial is None:
                    resume_from_checkpoint = resume_from(self.args.resume_from_checkpoint)
                if resume_from_checkpoint not in (None, False):
                    resume_from_checkpoint = self.checkpoints.find(resume_from_checkpoint, self.args.output_dir or ".")
                result = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
                self.finite.check_weights()
                if (optimizer := recommending_optimizer(self.optimizer)) and not self.args.load_best_model_at_end:
                    optimizer.eval()
                return result
            except BaseException:
                if (finished := self.stop.leave()) is not None:
                    self._save_finished(finished, trial)
                raise
            finally:
                call_all(self.report.end, self.rollouts.cancel, self.rollouts.close, self.pushes.settle)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self)

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise ValueError("training needs a `train_dataset`; this trainer was made without one.")
        return train_loader(
            self.train_dataset,
            self.run.algebra,
            self.collectives.rank,
            shuffle=bool(self.args.shuffle_dataset),
            seed=self.args.resolved_data_seed,
            workers=self.args.dataloader_num_workers,
            context=self.args.dataloader_multiprocessing_context,
            timeout=self.args.ddp_timeout,
            choose_late=self.rollouts.chooses_prompts,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the window's metrics to what Hugging Face logs, and write its completions."""
        if "loss" in logs:
            for kind, times in (("phase", self.run.phases.drain()), ("overlap", self.timeline.drain())):
                self.metrics.add({f"{kind}/{name}": Max(seconds) for name, seconds in times.items()}, "train")
            logs = {**logs, **self.metrics.drain("train"), "num_tokens": self.credit.num_tokens}
            self.completions.publish(self.state.global_step)
        super().log(logs, start_time)

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, or one of a class, behind those that are there."""
        report(check_callbacks([callback]))
        super().add_callback(callback)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: prompts are shared and tokens without signal skipped, so a formula would mislead."""
        return 0

    if not TYPE_CHECKING:  # to a type checker it would mean that there is every attribute

        def __getattr__(self, name: str) -> Any:
            advice = f": {ABSENT[name]}." if name in ABSENT else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    @property
    def policy(self) -> Any:
        """The transformers (or PEFT) model inside its wrappers."""
        return self.run.policy

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self.evaluation.loader(self.eval_dataset, eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.get_eval_dataloader(test_dataset)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Sample and score an evaluation dataset, or each of several; log metrics, and with them completions."""
        if "eval_dataset" in kwargs:
            args, kwargs = (kwargs["eval_dataset"], *args), {k: v for k, v in kwargs.items() if k != "eval_dataset"}
        args = (*(as_of_sources(self.run.sources, given) for given in args[:1]), *args[1:])
        metrics = interruptible(super().evaluate)(*args, **kwargs)
        self.evaluation.send_completions()
        return Metrics(metrics)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Sample and score the given dataset; returns metrics and no predictions."""
        output = interruptible(super().predict)(*args, **kwargs)
        self.evaluation.send_completions()
        return output

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample and score every prompt of a dataset; the metrics are those of training, prefixed."""
        ready_to_evaluate(self)
        if not hasattr(dataloader, "suite"):
            raise foreign_loader(dataloader, "get_eval_dataloader")
        self.callback_handler.eval_dataloader = dataloader  # callbacks are given it
        optimizer, called = self.optimizer, self._on_prediction_step
        return self.evaluation.evaluate(dataloader, metric_key_prefix, called, optimizer, self.is_in_train)

    def _evaluated(self, samples: list[PromptSample], log: CompletionLog) -> Experience:
        return self.gather_experience(self.rollouts.next(MicroStep(samples=samples), "eval"), "eval", log)

    def _on_prediction_step(self) -> None:
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        if self.on_evaluated is not None and self.on_evaluated(metrics, step):
            self.control.should_training_stop = True

    get_optimizer_cls_and_kwargs = staticmethod(optimizer_of)
    hyperparameter_search = search.hyperparameter_search
    _determine_best_metric = determine_best_metric
    create_model_card = hub.create_model_card  # type: ignore[assignment] # its first arguments are those of TRL's
    init_hf_repo = hub.init_hf_repo

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = super()._get_output_dir(trial)
        return str(Path(run_dir, STAGING)) if self.checkpoints.staging else run_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        write = functools.partial(super()._save_checkpoint, model, trial)
        final = self.stop.uncut(self.checkpoints.save, self._get_output_dir(trial), write)
        if self.checkpoints.delayed_pushes:
            self._push_from_checkpoint(final)

    def _save_finished(self, finished: Finished, trial: Any) -> None:
        """Save a checkpoint of the last finished step during an unfinished one.

        The weights have not changed since; random state and the state of the method are put back first.
        """
        set_random_state(finished.random)
        with self.checkpoints.as_of(finished.method):
            self._save_checkpoint(self.model, trial)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.remember_step()
        with self.stop.evaluating():
            return super()._evaluate(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.checkpoints.staging:
            self.checkpoints.delayed_pushes.append(checkpoint_folder)  # uploaded from its final place
            return
        if not self.is_world_process_zero() or self.args.hub_strategy == "end":
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.create_model_card()
        hub.place_model(Path(checkpoint_folder), self.args, self.processing_class)
        by_steps = self.args.save_strategy == "steps"
        done = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        self.pushes.push(self.hub_model_id or "", Path(checkpoint_folder), f"Training in progress, {done}")

    def _finish_current_push(self) -> None:
        self.pushes.finish(self.hub_model_id)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it, however its weights are sharded. Collective."""
        if not _internal_call:
            self.finite.check_weights(together=self.sharding.weights)  # else one process may save alone
        with self.balance.config_as_loaded(self.policy), without_bars():
            if not self.sharding.weights:
                super().save_model(output_dir, _internal_call)
                return
            folder = output_dir or self.args.output_dir or "."
            self.checkpoints.save_sharded_model(self.model_wrapped, folder, self.processing_class)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with self.checkpoints.writing(output_dir) as new:
            super()._save(str(new), state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load = functools.partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self.checkpoints.load_model(model or self.model, resume_from_checkpoint, load)

    def _load_best_model(self) -> None:
        self.checkpoints.load_best(self.model, self.state.best_model_checkpoint, super()._load_best_model)
