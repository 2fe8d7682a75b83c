"""The training step of group-relative reinforcement learning: sample, score, assign credit, update.

This is the one place where engines, rewards, the policy and the algorithm meet. What they are is decided in
`covey.trainer.build`; the outer loop (epochs, optimizer, schedule, checkpoints) is Hugging Face's `Trainer`.
`GRPOTrainer` and `RLOOTrainer` differ by the `Algorithm` they hand in.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import set_seed

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.credit import Credit, assign_credit, step_stats
from covey.config.base import OnlineConfig
from covey.config.legacy_arguments import accepts_old_names
from covey.core.batch import TrainBatch, collate
from covey.core.engine import traits_of
from covey.core.metrics import Max, Mean, Stat
from covey.core.objective import policy_loss
from covey.core.ragged import segment_sum
from covey.data.dynamic_sampling import ScoredRollouts, Selection
from covey.data.sampler import train_loader
from covey.data.validation import check_dataset
from covey.observability.metrics import MetricLog, generation_stats
from covey.observability.timeline import PhaseTimer, Timeline
from covey.policy.loading import has_dropout
from covey.rollout.collector import PromptSample
from covey.runtime.process_memory import reuse_freed_memory
from covey.trainer import build
from covey.trainer.build_rollouts import FailureMonitor
from covey.trainer.distributed.sharding import shard_on_cpu, sharding_of
from covey.trainer.engine_check.correction import build_engine_check, corrected
from covey.trainer.evaluation.suites import EvalSuite, rows_of
from covey.trainer.finite import check_model
from covey.trainer.generation_log import GlobalBatch, RankShard, describe, sampling_entropy
from covey.trainer.integrations.hub import OnTheHub
from covey.trainer.integrations.search import HyperparameterSearch, made_model
from covey.trainer.moe_balance import ExpertBalance
from covey.trainer.rollout_buffer import RolloutBuffer, weigh
from covey.trainer.rollout_phase import SampledGenerations
from covey.trainer.staleness import check_fresh_enough, fresh_rows, oldest
from covey.trainer.validation import check_fit


class OnlineTrainer(SampledGenerations, HyperparameterSearch, OnTheHub):
    """Trains a causal language model on its own completions.

    Args:
        model: hub id, folder, transformers model or PEFT model.
        reward_funcs: one or a list of functions, model ids or paths, or sequence classifiers (`covey.rewards`).
        args: the config; defaults if None.
        train_dataset: rows with a `prompt` column (text or messages); other columns go to the reward functions. Those
            called `image` and `images` are shown to vision-language models.
        eval_dataset: the same, or an `EvalSuite` with sampling of its own, or a dictionary of such by name.
        processing_class: the tokenizer, or the processor of a vision-language model; loaded with the model if None.
        reward_processing_classes: tokenizers of reward models, aligned with `reward_funcs`.
        callbacks: `transformers.TrainerCallback`s.
        optimizers: an optimizer and a scheduler instead of the config's.
        quantization_config: loads the policy in fewer bits; needs `peft_config`.
        peft_config: trains an adapter instead of the whole model.
        tools: functions that the policy may call; their type hints and docstrings describe them to it.
        rollout_func: plays rollouts in the place of the built-in loop: `async (row, engine) -> Rollout` for one, or
            `(prompts, trainer) -> dict` for a whole generation (`covey.rollout.user_functions`).
        environment_factory: makes the environments that rollouts act in, one for each: a class or a function without
            arguments, or an adapter (`covey.environments`).
        engine: samples in the place of the one that the config names (`covey.core.engine.RolloutEngine`).
        optimizer_cls_and_kwargs: class of the optimizer and its arguments, in the place of `args.optim`.
        model_init: makes the model, in the place of `model`; `hyperparameter_search` makes one for each trial with it.

    Raises:
        ValueError: arguments that cannot work, each with what to do about it.
    """

    config_class: ClassVar[type[OnlineConfig]]
    make_algorithm: ClassVar[Any]
    """config -> `covey.algorithms.Algorithm`."""

    args: Any
    model: Any
    eval_dataset: Any

    @accepts_old_names
    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        engine: Any = None,
        optimizer_cls_and_kwargs: tuple[type[Any], dict[str, Any]] | None = None,
        model_init: Any = None,
    ):
        model = model if model_init is None else made_model(model, model_init)
        args = build.resolve_args(args, model, self.config_class)
        build.check_engine_choice(args, engine)
        self._prompts_required = environment_factory is None
        self._check_data(args, train_dataset, eval_dataset)
        set_seed(args.seed)  # before an adapter is initialised
        model = build.build_policy(args, model, quantization_config, peft_config)
        if args.process_index == 0:  # others may have empty weights still, which FSDP fills from here
            check_model(model)
        processing_class = build.load_processing_class(
            processing_class, model, trust_remote_code=args.trust_remote_code, init_kwargs=args.model_init_kwargs
        )
        tokenizer = build.tokenizer_of(processing_class)
        vision = build.build_vision(processing_class, model)
        super().__init__(
            model=model,
            args=args,
            data_collator=_as_is,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.sharding = sharding_of(self.accelerator)
        self.collectives = build.build_collectives(self)
        if self.accelerator.device.type == "cpu":
            reuse_freed_memory()
        self.compute_loss_func = policy_loss  # never called: it tells Trainer that the loss is already normalised
        self.algorithm: Algorithm = self.make_algorithm(args)
        self.algebra = args.algebra(args.world_size)
        self.scorer = build.build_scorer(args, tokenizer, self.accelerator, vision)
        self.balance = ExpertBalance.of(args, model)
        self.reference = build.build_reference(args, self.algorithm, model, self.accelerator, peft_config)
        self.collector = build.build_collector(
            self, model, tokenizer, engine, tools, rollout_func, environment_factory, vision
        )
        if vision is not None and self.sharding.weights:
            self.scorer.blank = build.blank_row(self.collector.codec)
        engine = self.collector.engine
        self.weight_sync = build.build_weight_sync(args, engine, lambda: self.policy, self.collectives)
        self.sampling = build.sampling_params(args)
        self.algorithm = corrected(self.algorithm, args, traits_of(engine), self.sampling)
        self.speculation = build.build_speculation(args, train_dataset)
        self.rewards = build.build_rewards(self, reward_funcs, reward_processing_classes)
        self._unread = build.unread_settings(args)
        self.entropy = build.entropy_controller(args)
        self.passes = build.build_passes(args, self.scorer, self.accelerator, lambda: self.policy, self.collectives)
        self.experience = RolloutBuffer()
        gather = self.collectives.named
        self.rollout_watch = FailureMonitor(gather("count failed rollouts"))
        self.metrics = MetricLog(gather("put the metrics together"))
        self.timeline = Timeline()
        self.phases = PhaseTimer(notice=self.collectives.note, span=self.timeline.phase)
        self.completions = build.build_completions(args, self.is_world_process_zero())
        self.num_tokens = 0
        self._generations = {"train": 0, "eval": 0}
        self._entropy_known = False
        self._forget_step()
        self.engine_check = build_engine_check(self, gather("compare engine and trainer"), self._rescore)
        check_fit(self)
        self.chooser = build.build_chooser(self)
        build.add_callbacks(self)
        given = {id(callback) for callback in callbacks or ()} | {c for c in callbacks or () if isinstance(c, type)}
        handled = self.callback_handler.callbacks
        self._own_callbacks = frozenset(id(c) for c in handled if id(c) not in given and type(c) not in given)

    # ---- one step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_experience(self, draws: list[PromptSample]) -> TrainBatch:
        """Sample, score, assign credit: dataset rows in, training tokens out."""
        flight = self._sampled_ahead(draws)
        draws, key = (flight.draws, flight.key) if flight is not None else (draws, self._generation_key())
        sample = partial(self._sample, key, flight=flight)
        chosen = self.chooser.choose(draws, sample) if self.chooser is not None and self.model.training else None
        sampled = sample(draws, 0) if chosen is None else chosen.kept
        masked = self.args.mask_truncated_completions
        batch = collate(sampled.rollouts, mask_truncated=masked).to(self.accelerator.device)
        entropy = sampling_entropy(sampled.rollouts, batch)
        self._entropy_known = bool(entropy)
        self.metrics.add(entropy, self.mode)
        with self.phases("score"):
            self._settle_layout(batch)
            self._check_engine(batch, sampled)
            kl = self.score_behaviour(batch)
        generation = self._share(key, sampled, batch, kl)
        check_fresh_enough(generation.oldest, self.args.max_staleness)
        credit = self._credit(generation)
        batch.advantages = credit.of_tokens(generation.mine).to(batch.lengths.device)
        self._weigh(batch, generation)
        self.metrics.add(chosen.stats if chosen is not None else {}, self.mode)
        self._record(generation, credit, chosen)
        return batch

    # ---- parts of a step -------------------------------------------------------------------------------------------

    def score_behaviour(self, batch: TrainBatch) -> Tensor | None:
        """Score the batch under the old and the reference policy where needed; returns the KL penalty [B], if any."""
        penalised = self.algorithm.kl_in_reward and self.algorithm.beta != 0
        off_policy = self.model.training and not self.algebra.on_policy
        old = None
        if off_policy or penalised or self._dropout_hides(batch):
            entropies: list[Stat] | None = None if self._entropy_known else []
            old = self._score(self.policy, batch, entropies)
            for entropy in entropies or ():
                self.metrics.add({"entropy": entropy}, self.mode)
            self._entropy_known = True
            self._weigh_mismatch(batch, old)
        if self.reference is not None:
            with self.reference.model(self.policy) as reference:
                batch.ref_logprobs = self._score(reference, batch)
        batch.old_logprobs = old if off_policy else None
        if not penalised:
            return None
        assert old is not None and batch.ref_logprobs is not None, "a penalty needs both"
        kl = torch.where(batch.sampled, old - batch.ref_logprobs, 0.0)
        self.metrics.add({"kl": Mean(kl.sum().item(), batch.sampled.sum().item())}, self.mode)
        return segment_sum(kl, batch.lengths).cpu()

    def _dropout_hides(self, batch: TrainBatch) -> bool:
        """Whether training passes see other log-probs than the engine should have, so that scoring must compare."""
        compared = self.algorithm.objective.correction is not None and batch.engine_logprobs is not None
        return compared and self.model.training and has_dropout(self.policy)

    def _weigh_mismatch(self, batch: TrainBatch, old: Tensor) -> None:
        """Set the weights that correct the engine's distribution, where log-probs to compare with are at hand."""
        correction = self.algorithm.objective.correction
        if correction is not None and batch.engine_logprobs is not None:
            batch.mismatch_weights, stats = correction(old, batch.engine_logprobs, batch.sampled, batch.lengths)
            self.metrics.add(stats, self.mode)

    def _check_engine(self, batch: TrainBatch, sampled: ScoredRollouts) -> None:
        """On the first samples: the engine and the scorer must agree on how probable they are."""
        self.engine_check(batch, fresh_rows(sampled.rollouts, self.state.global_step).to(batch.lengths.device))
        if not self.engine_check.comparable:
            batch.engine_logprobs = None  # of another distribution than the trainer scores: nothing may compare them

    def _rescore(self, batch: TrainBatch, temperature: float) -> Tensor:
        with self.scorer.at_temperature(temperature):
            return self._score(self.policy, batch)

    def _share(
        self, key: tuple[str, int], sampled: ScoredRollouts, batch: TrainBatch, kl: Tensor | None
    ) -> GlobalBatch:
        """Let every process know what the others sampled."""
        mine = RankShard(
            scores=sampled.scores,
            kl=kl,
            tokens=batch.sampled_lengths.tolist(),
            parts=-(-len(sampled.rollouts) // self._rows_per_part),
            lengths=[rollout.num_sampled for rollout in sampled.rollouts],
            truncated=[rollout.truncated for rollout in sampled.rollouts],
            prompt_lengths=[len(rollout.prompt_ids) for rollout in sampled.rollouts],
            oldest=oldest(sampled.rollouts, self.state.global_step),
            table=describe(sampled.draws, sampled.rollouts, sampled.columns, self.args.log_multimodal),
        )
        what = "gather the rewards of {} generation {}".format(*key)
        return GlobalBatch(self.collectives.gather(mine, what), self.accelerator.process_index)

    def _credit(self, generation: GlobalBatch) -> Credit:
        """What every token of all processes' rollouts answers for.

        Siblings are G rollouts in the order of sampling, whatever prompts they continue: `TrainBatch.groups` is about
        forward passes alone.
        """
        self._unread.look(generation.scores)
        return assign_credit(self.algorithm, self.rewards.weights, generation.scores, self._group_size, generation.kl)

    def _weigh(self, batch: TrainBatch, generation: GlobalBatch) -> None:
        training = self.model.training
        weigh(
            batch,
            self.algorithm.weighting,
            rows_per_part=self._rows_per_part,
            total_rows=len(generation),
            total_tokens=generation.total_tokens,
            total_parts=generation.total_parts,
            updates=self.args.steps_per_generation / self.args.gradient_accumulation_steps if training else 1.0,
            max_completion_length=self.args.max_completion_length,
            entropy_bonus=self.entropy.enabled,
        )

    def _record(self, generation: GlobalBatch, credit: Credit, chosen: Selection | None) -> None:
        if self.mode == "train":
            self.num_tokens += (chosen or generation).processed_tokens
            self.metrics.set("num_tokens", self.num_tokens)
        drawn = generation if chosen is None else chosen.first  # groups kept for their rewards would mislead
        stats = generation_stats(
            lengths=drawn.lengths,
            truncated=drawn.truncated,
            rewards_NF=drawn.scores.rewards,
            weights_F=self.rewards.weights,
            names=self.rewards.names,
            num_generations=self._group_size,
        )
        of_steps = step_stats(drawn.scores, self.rewards.weights, self.rewards.names, self._group_size)
        self.metrics.add({**stats, **of_steps}, self.mode)
        log = self.completions if self.mode == "train" else self.eval_completions
        if log is not None and log.enabled:
            log.add(self.state.global_step, **generation.table(self.rewards.names, credit.of_completions()))

    # ---- processes, data, logs, checkpoints ------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Called by `Trainer` when it is made."""
        super().create_accelerator_and_postprocess()
        shard_on_cpu(self)

    def _check_data(self, args: Any, train_dataset: Any, eval_dataset: Any) -> None:
        if train_dataset is not None:
            check_dataset(train_dataset, "train_dataset", self._prompts_required)
        evaluations = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        for dataset in evaluations:
            if dataset is not None:
                check_dataset(rows_of(dataset), "eval_dataset", self._prompts_required)
                algebra = args.algebra(args.world_size)
                (dataset.batches(algebra) if isinstance(dataset, EvalSuite) else algebra).check_eval()

    def get_train_dataloader(self) -> Any:
        """Micro-steps over the training prompts."""
        if self.train_dataset is None:
            raise ValueError("training needs a `train_dataset`; this trainer was made without one.")
        return train_loader(
            self.train_dataset,
            self.algebra,
            self.accelerator.process_index,
            shuffle=bool(self.args.shuffle_dataset),
            seed=self.args.seed,
            workers=self.args.dataloader_num_workers,
            timeout=self.args.ddp_timeout,
            starts=self.args.max_staleness > 0 or (self.chooser is not None and self.chooser.history is not None),
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the window's metrics to what Hugging Face logs, and write down its completions."""
        if "loss" in logs:
            self.metrics.add({f"phase/{name}": Max(s) for name, s in self.phases.drain().items()}, "train")
            self.metrics.add({f"overlap/{name}": Max(s) for name, s in self.timeline.drain().items()}, "train")
            logs = {**logs, **self.metrics.drain("train")}
            self.completions.publish(self.state.global_step)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated here: prompts are shared and tokens without signal skipped, so a formula would mislead."""
        return 0

    def method_state(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on as if it had not stopped."""
        kept = self.reference is not None and (self.args.sync_ref_model or self.reference.keeps_adapter)
        return {
            "experience": self.experience.state_dict(),
            "ahead": None if self.ahead is None else self.ahead.state_dict(),
            "metrics": self.metrics.state_dict(),
            "entropy": self.entropy.state_dict(),
            "reference": self.reference.state_dict() if self.reference is not None and kept else None,
            "prompts": None if self.chooser is None else self.chooser.state_dict(),
            "num_tokens": self.num_tokens,
            "generations": self._generations,
            "pass_limit": self.passes.limit,
            "speculation": self.speculation.state_dict() if self.speculation else None,
        }

    def load_method_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.experience.load_state_dict(
            state["experience"], self.accelerator.device, self.collectives.rank, self.collectives.size
        )
        self.metrics.load_state_dict(state["metrics"])
        self.entropy.load_state_dict(state["entropy"])
        if state["reference"] is not None and self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        if self.chooser is not None and state.get("prompts") is not None:
            self.chooser.load_state_dict(state["prompts"])
        self.num_tokens = state["num_tokens"]
        self._generations = dict(state["generations"])
        self._ahead_state = state.get("ahead")
        if self._ahead_state is not None and self.args.max_staleness == 0:  # what was sampled ahead is sampled again
            self._generations["train"] -= len(self._ahead_state["flights"])
        self.passes.limit = state["pass_limit"]
        if self.speculation is not None and state.get("speculation") is not None:
            self.speculation.load_state_dict(state["speculation"])


def _as_is(draws: Any) -> Any:
    return draws
