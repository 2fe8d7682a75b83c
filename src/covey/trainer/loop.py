"""The training loop: for each optimizer step sample, score and plan; then gradients, clipping and the step.

It takes the place of the loop of Hugging Face's `Trainer`, whose state, callbacks, optimizer, schedule, logs and
checkpoints it uses, and calls callbacks in the same order.
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from accelerate import skip_first_batches
from accelerate.utils.memory import clear_device_cache
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.optimization import GreedyLR
from transformers.training_args import OptimizerNames

from covey.config.base import OnlineConfig
from covey.core.batch import TrainBatch
from covey.core.records import Experience, MicroStep, Mode, Plan, PlannedMicroStep, RolloutBatch
from covey.core.stats import Stat
from covey.observability.completions import CompletionLog
from covey.observability.metrics import MetricLog
from covey.observability.record import Recorder
from covey.runtime.data_files import loading_data_alone
from covey.trainer.checkpoint import Checkpointer
from covey.trainer.checks import FiniteCheck, foreign_loader
from covey.trainer.distributed.stopping import Finished, StopAtStep, random_state
from covey.trainer.experience import BehaviourScorer, CreditAssigner
from covey.trainer.integrations.loss_inputs import LossInputs
from covey.trainer.resuming import follow_schedule
from covey.trainer.rollout_phase import RolloutPhase
from covey.trainer.run import Run
from covey.trainer.update_phase import UpdatePhase


class Step(NamedTuple):
    """An optimizer step, as the dataloader yields it."""

    micro_steps: list[MicroStep]  # one at which a rollout batch begins carries its prompts
    epoch: float  # epochs of the run when it ends


class Training(NamedTuple):
    """One call of `train`: the wrapped model, and the epochs from where it begins."""

    model: Any
    loader: Any  # of micro-steps
    epochs: range
    micro_steps: int  # of an epoch
    skipped: int  # micro-steps of the first epoch that were trained on before
    samples: float  # completions of all epochs, for Hugging Face's metrics of speed
    checkpoint: str | None  # that it resumes from
    trial: Any  # of a hyperparameter search
    ignored: list[str] | None  # keys of model outputs; evaluations have none
    started: float  # seconds since 1970


class Update(NamedTuple):
    """An optimizer step that was taken."""

    stats: list[dict[str, Stat]]
    norm: Any  # of the gradient, before it was clipped
    learning_rate: float


class TrainingLoop(Trainer):
    """A `transformers.Trainer` that trains with Covey's loop; `OnlineTrainer` makes the parts of a step."""

    args: OnlineConfig
    optimizer: Any
    lr_scheduler: Any
    current_flos: Any  # a number
    run: Run
    metrics: MetricLog
    rollouts: RolloutPhase
    behaviour: BehaviourScorer
    credit: CreditAssigner
    updates: UpdatePhase
    finite: FiniteCheck
    checkpoints: Checkpointer
    stop: StopAtStep
    completions: CompletionLog  # of training
    recorder: Recorder | None

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train. `Trainer.train` calls this after it has loaded a checkpoint's weights, unless they are sharded."""
        training = self._begin(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self._call("on_train_begin")
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in training.epochs:
            self._call("on_epoch_begin")
            update = None
            for step in self._steps(training, epoch):
                self._call("on_step_begin")
                began = time.perf_counter()
                plan = self.plan(step)  # sample, reward, score, assign credit; micro-batches of the whole step
                taken = self.optimizer_step(training.model, plan, began)  # forward, backward, clip, step
                if taken is not None:
                    update = taken
                    for stats in update.stats:
                        self.metrics.add(stats, "train")
                    self.state.global_step += 1
                    self.state.epoch = step.epoch
                    self._call("on_step_end")
                    self._log_evaluate_save(training, epoch, update)
                if self._stops():
                    break
            self._call("on_epoch_end")
            self._log_evaluate_save(training, epoch, update)
            if self.control.should_training_stop:
                break
        return self._finalize_training(trial, training.samples, training.started)

    # ---- one step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def plan(self, step: Step) -> Plan:
        """Sample the rollout batches that begin in a step, and plan the micro-batches of the whole step. Collective."""
        self.model_wrapped.train()
        began, launched = list[Experience](), list[dict[str, Stat]]()
        with self.run.phases("train"):
            if self.args.max_staleness:
                launched = self.rollouts.launch(step.micro_steps[0].rollout_batch)
                self.behaviour.probe(self.rollouts.probe(self.behaviour.engine_check.wants_samples))
            for micro_step in step.micro_steps:
                if micro_step.rollout_batch is not None:
                    rollouts = self.rollouts.next(micro_step, "train")  # send weights, sample, reward, select
                    began.append(self.gather_experience(rollouts, "train", self.completions))
                    self.updates.load(began[-1])
            self.state.num_input_tokens_seen = self.credit.num_tokens  # for callbacks with a budget
            plan = self.updates.plan(len(step.micro_steps), began)
        for stats in chain(launched, *(experience.stats for experience in began)):
            self.metrics.add(stats, "train")
        return plan

    @torch.no_grad()
    def gather_experience(self, rollouts: RolloutBatch, mode: Mode, log: CompletionLog | None) -> Experience:
        """Score rollouts, assign credit and weights: training data. `log` gets the completions. Collective."""
        behaviour = self.behaviour.score(rollouts, mode)  # log-probs of the old policy, reference, teachers
        rollouts = replace(rollouts, rollouts=behaviour.rollouts)  # with the entropies that were measured
        experience = self.credit.experience(rollouts, behaviour, mode, log)  # advantages and token weights
        if self.recorder is None:
            return experience
        if mode == "eval":
            assert log is not None, "an evaluation has a log, which has its name"
            self.recorder.add_evaluated(log.name, rollouts, experience.batch)
            return experience
        numbered = self.recorder.add(self.state.global_step + 1, int(rollouts.key[1]), rollouts, experience.batch)
        return replace(experience, batch=numbered)

    def optimizer_step(self, model: Any, plan: Plan, began: float) -> Update | None:
        """Compute the gradients of a plan and take the step; None where a callback ends the epoch or the run before.

        `began` is `time.perf_counter()` at the beginning of the step.
        """
        found: list[dict[str, Stat]] = []
        self.current_gradient_accumulation_steps = len(plan.micro_steps)
        for number in range(len(plan.micro_steps)):
            micro_step = PlannedMicroStep(plan, number)
            self.accelerator.gradient_state._set_sync_gradients(micro_step.is_last)
            with self.run.phases("train"):
                loss = self.training_step(model, micro_step)
            found += micro_step.stats
            self._count(loss, micro_step)
            if not micro_step.is_last:
                self._call("on_substep_end")
                if self._stops():
                    model.zero_grad()
                    return None
        stats = self.updates.step_stats(plan, found, time.perf_counter() - began)
        norm = self._clip(model)
        self._call("on_pre_optimizer_step")
        self.optimizer.step()
        self._call("on_optimizer_step")
        rate = self._get_learning_rate()
        follows_a_metric = isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR)  # after evaluations
        if not (self.accelerator.optimizer_step_was_skipped or follows_a_metric):
            self.lr_scheduler.step()
        model.zero_grad()
        return Update(stats, norm, rate)

    def training_step(self, model: Any, inputs: PlannedMicroStep, num_items_in_batch: Any = None) -> Tensor:  # type: ignore[override]
        """Add up the gradients of one micro-step's micro-batches: several, one or none. Returns their loss.

        Their metrics are appended to `inputs.stats`.
        """
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        loss, stats = self.updates.gradients(model, inputs)
        inputs.stats.extend(stats)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, scaled so that the sum over a step, averaged over ranks, is the step's loss."""
        loss, stats = self.updates.loss(model, inputs.batch, inputs.plan, inputs.number)
        inputs.stats.update(stats)
        return loss

    def loss_of(self, model: Any, batch: TrainBatch, plan: Plan, number: int) -> tuple[Tensor, dict[str, Stat]]:
        """The loss and the metrics of a micro-batch, by `compute_loss` where a script has its own."""
        with self.compute_loss_context_manager():
            if "compute_loss" not in vars(self) and type(self).compute_loss is TrainingLoop.compute_loss:
                return self.updates.loss(model, batch, plan, number)
            inputs = LossInputs(batch, plan, number)
            return self.compute_loss(model, inputs), inputs.stats

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the parameters."""
        args = self.args
        if (every := args.torch_empty_cache_steps) is not None and self.state.global_step % every == 0:
            clear_device_cache()
        kwargs: dict[str, Any] = {}
        if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):  # which step within backward
            kwargs["learning_rate"] = self._get_learning_rate()
        if self.run.sharding.deepspeed:
            kwargs["scale_wrt_gas"] = False
        self.accelerator.backward(loss, **kwargs)

    def _clip(self, model: Any) -> Any:
        """Clip the gradient to `max_grad_norm`, and return its norm before.

        A gradient that is neither sharded nor scaled is checked first: clipping by a NaN norm would make all of it NaN.
        """
        most, scaled = self.args.max_grad_norm, self.finite.scales_loss
        if self.run.sharding.gradients or scaled or self._has_mixed_mesh_grads(model):
            clipped = self._clip_grad_norm(model) if most > 0 else None
            norm = self._get_grad_norm(model, grad_norm=clipped)
            self.finite.check_norm(norm)
            return norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        self.finite.check_norm(norm)
        if most > 0:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, norm)
        return norm

    # ---- Hugging Face's side -----------------------------------------------------------------------------------------

    def _begin(self, checkpoint: str | None, trial: Any, ignored: list[str] | None) -> Training:
        """Wrap the model, make optimizer and schedule, and read a checkpoint."""
        args = self.args
        self.accelerator.free_memory()
        loader = self.get_train_dataloader()
        epochs, steps, _, samples, _, micro_steps, max_steps = self.set_initial_training_values(args, loader)
        first, skipped = self._init_training_state(max_steps, steps, epochs, checkpoint, trial)
        self.state.compute_steps(args, max_steps)  # a checkpoint's state has the save_steps and the like of its run
        if self.state.global_step >= max_steps:
            warnings.warn(
                f"nothing is left to train: the checkpoint is of step {self.state.global_step}, and this run"
                f" ends at step {max_steps}. Raise max_steps or num_train_epochs to continue.",
                stacklevel=2,
            )
            first = epochs
        assert micro_steps is not None, "a run of a stream has a number of steps"
        self.checkpoints.begin(checkpoint)
        if self.accelerator.scaler is None:  # a run in fp16 may continue in another precision
            self._load_scaler = lambda checkpoint: None  # type: ignore[method-assign]
        with loading_data_alone(checkpoint):
            model, loader = self._prepare_for_training(max_steps, loader, checkpoint)
        if checkpoint is not None:
            self.checkpoints.load(checkpoint)
            follow_schedule(self.lr_scheduler)
            if not skipped:  # an epoch begins with a rollout batch, also where its data are not skipped
                self.updates.buffer.clear()
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, device=args.device), 0.0
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        model.zero_grad()
        left = range(first, epochs)
        return Training(model, loader, left, micro_steps, skipped, samples, checkpoint, trial, ignored, time.time())

    def _steps(self, training: Training, epoch: int) -> Iterator[Step]:
        """The optimizer steps of an epoch; those before a checkpoint are skipped, and random states restored."""
        resumes = training.checkpoint is not None and epoch == training.epochs.start
        taken, loader = training.skipped if resumes else 0, training.loader
        if resumes and not taken:
            self._load_rng_state(training.checkpoint)
        if taken:
            loader = skip_first_batches(loader, taken)
        skipping = getattr(loader, "batch_sampler", None)  # of `skip_first_batches`, around the loader's own
        for part in (loader, getattr(skipping, "batch_sampler", None)):
            getattr(part, "set_epoch", lambda epoch: None)(epoch)
        batches = iter(loader)
        while taken < training.micro_steps:
            window = min(self.args.gradient_accumulation_steps, training.micro_steps - taken)
            micro_steps, _ = self.get_batch_samples(batches, window, self.args.device)
            if resumes and training.skipped and taken == training.skipped:
                self._load_rng_state(training.checkpoint)  # after the first samples are read
            if not micro_steps:
                break
            for micro_step in micro_steps:
                if not isinstance(micro_step, MicroStep):
                    raise foreign_loader(micro_step, "get_train_dataloader")
            taken += len(micro_steps)
            yield Step(micro_steps, epoch + taken / training.micro_steps)
        if not taken:
            warnings.warn("the dataloader of training is empty, so the run ends.", stacklevel=2)
            self.control.should_training_stop = True

    def _call(self, event: str) -> None:
        """Call the callbacks of an event."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)

    def _stops(self) -> bool:
        """True if a callback has ended the epoch or the run."""
        return self.control.should_epoch_stop or self.control.should_training_stop

    def _count(self, loss: Tensor, micro_step: PlannedMicroStep) -> None:
        """Add the loss of a micro-step to the logging window's."""
        if self.args.logging_nan_inf_filter and not bool(loss.isfinite()):  # add the window's average instead
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += loss
        self.current_flos += float(self.floating_point_ops(micro_step))  # type: ignore[arg-type]

    def _log_evaluate_save(self, training: Training, epoch: int, update: Update | None) -> None:
        """Log, evaluate and save where the control asks for it; keep what a checkpoint of this step needs."""
        logs = self.control.should_log
        norm, rate = (None, None) if update is None else (update.norm, update.learning_rate)
        run = training.model, training.trial, epoch, training.ignored, training.started
        self._maybe_log_save_evaluate(self._tr_loss, norm, *run, learning_rate=rate)
        if logs:  # also where `Trainer` subtracts NaN from itself
            self._tr_loss.zero_()
        self.remember_step()

    def remember_step(self) -> None:
        """Keep what a checkpoint of the last finished step needs, for a run that is stopped in its next one."""
        args, sharded = self.args, self.run.sharding.weights or self.is_deepspeed_enabled
        if self.stop.enabled and self.stop.alone and not (sharded or args.max_staleness or args.speculative_reuse):
            self.stop.remember(Finished(self.state.global_step, self.checkpoints.method_state(), random_state()))
