"""`Study`: trains many LoRA configurations over one frozen model, side by side in one process.

Each variant has a trainer of its own, with its optimizer, schedule, random numbers, metrics and checkpoints. A round
samples for all of them in one batch of the engine; then each takes its step. While they train, variants are stopped,
cloned, changed and resumed (`covey.study.commands`).
"""

import asyncio
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState

from covey.core.engine import EngineTraits, SampleRequest
from covey.core.records import Completion
from covey.engines.native.adapter_engine import AdapterEngine
from covey.engines.native.recurrent_engine import needs_recurrent_engine
from covey.observability.dashboard import ProgressDisplay
from covey.policy.adapters import low_rank_matrices
from covey.policy.loading import end_token_ids, load_policy, load_processing_class, max_context
from covey.rewards import resolve_reward
from covey.rollout.collector import run_async
from covey.rollout.vision import is_processor
from covey.runtime.files import locked, seal
from covey.runtime.process_memory import share_one_heap
from covey.study import commands
from covey.study.commands import Command
from covey.study.plan import Halving
from covey.study.report import write_report
from covey.study.turns import Cancelled, Turn, set_shared_state, shared_state
from covey.study.variants import (
    TRAINERS,
    FollowsStudy,
    Variant,
    check_adapter,
    check_name,
    settings_of,
    with_shared_weights,
)
from covey.trainer.checkpoint import numbered_checkpoints

INIT = {"init_kwargs": "model_init_kwargs", "trust_remote_code": "trust_remote_code"}


class Study:
    """Many configurations over one frozen model.

    Args:
        model: hub id, folder or transformers model, without an adapter.
        variants: by name, the settings that differ from `args`: fields of the method's config, `peft` (fields of
            `peft.LoraConfig`), `method` ("grpo" or "rloo"), `reward_funcs` (names, as in a run file).
        args: settings of all variants, in the same words; `output_dir` is the study's folder.
        reward_funcs: as the trainers take them.
        train_dataset: rows with a `prompt`, in the same order for all variants of one seed.
        eval_dataset: rows that variants are compared on.
        processing_class: the tokenizer; loaded with the model if None.
        eval_steps: steps between evaluations; None evaluates at the end alone.
        save_rounds: rounds between checkpoints of all variants, from which `train(resume=True)` goes on.
        halving: stops variants at every evaluation, as `covey.study.plan.Halving` says.
        parts: further arguments of the trainers, such as `tools` and `environment_factory`.

    Raises:
        ValueError: a variant that cannot work, or a setting that a study cannot have.
    """

    def __init__(
        self,
        model: Any,
        variants: Mapping[str, Mapping[str, Any]],
        args: Mapping[str, Any],
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Sequence[dict[str, Any]] = (),
        processing_class: Any = None,
        eval_steps: int | None = None,
        save_rounds: int | None = None,
        halving: Callable[["Study"], list[str]] | None = None,
        parts: Mapping[str, Any] | None = None,
    ):
        if not variants:
            raise ValueError("`variants` is empty: give at least one, such as {'base': {}}.")
        share_one_heap()
        self.common = {name: value for name, value in args.items() if name != "output_dir"}
        self.folder = Path(args.get("output_dir") or "study")
        self.eval_rows = [dict(row) for row in eval_dataset] if eval_dataset else []
        if not self.eval_rows and (eval_steps or isinstance(halving, Halving)):
            raise ValueError("`eval_steps` and `halving` need rows to compare variants on: give `eval_dataset`.")
        if isinstance(halving, Halving) and not eval_steps:
            raise ValueError("`halving` stops variants at evaluations: give `eval_steps`, the steps between these.")
        if isinstance(halving, Halving) and any(
            {"reward_funcs", "reward_weights"} & {*one} for one in variants.values()
        ):
            raise ValueError(
                "`halving` cannot compare variants by different rewards: give all the same, or leave it out."
            )
        self.eval_steps, self.save_rounds, self.halving, self.round = eval_steps, save_rounds, halving, 0
        self.variants: dict[str, Variant] = {}
        for name, changes in variants.items():
            check_name(name)
            self.variants[name] = Variant(name, dict(changes))
            settings_of(self.common, changes, self.folder / name)
        init: dict[str, Any] = {name: self.common[key] for name, key in INIT.items() if key in self.common}
        self.base = load_policy(model, **init)
        if hasattr(self.base, "peft_config"):
            raise ValueError("`model` has an adapter already, and each variant gets one: give the model without it.")
        self.processing_class = load_processing_class(processing_class, self.base, **init)
        if needs_recurrent_engine(self.base) or is_processor(self.processing_class):
            raise ValueError(
                f"{type(self.base).__name__} has a running state or sees images, and adapters of such models cannot be"
                " mixed in one batch. Train the variants one after another."
            )
        self.base.requires_grad_(False)
        self.given = {"train_dataset": train_dataset, "reward_funcs": reward_funcs, **(parts or {})}
        self.engine: AdapterEngine | None = None
        self._requested: list[Command] = []
        self._asked: list[Command] = []  # what is carried out at the end of the step
        self._taken: list[Path] = []  # files that it came from
        self._sampled: list[str] = []  # variants whose adapters the engine holds
        self._cut = False  # all variants save a checkpoint at the end of their step
        for variant in self.variants.values():
            self._begin(variant)

    def train(self, resume: bool = False) -> dict[str, Variant]:
        """Train all variants to their ends, from the start or, with `resume`, from the last common checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "since .* was saved, this run has changed")  # as it was asked to
            if resume:
                self._load()
            self._save()
            try:
                while self._live() or self._requested or commands.waiting(self.folder):
                    self.play_round()
            finally:
                for variant in self._live():
                    assert variant.turn is not None
                    variant.turn.cancel()
            self._save()
        return self.variants

    def play_round(self) -> None:
        """Sample for all variants in one batch, then let each take its step; carry out what was asked for."""
        self.round += 1
        if not self._cut:
            self._begin_cut()
        for variant in self._live():
            if variant.turn is not None and variant.turn.pending is None:
                self._go_on(variant)  # it begins, and samples with the others at once, as after a kill
        for name, outcome in self._sample().items():
            self._go_on(self.variants[name], outcome)
        if not self._cut or any(variant.must_save for variant in self._live()):
            return
        self._cut = False
        for command in self._asked:
            self._carry_out(command)
        self._save()
        for path in self._taken:
            path.unlink(missing_ok=True)

    def stop(self, name: str) -> None:
        """End a variant after the step that runs; `resume` lets it go on."""
        self._requested.append(Command("stop", self._known(name)))

    def resume(self, name: str, **changes: Any) -> None:
        """Let a variant that was stopped, failed or has finished go on from its last checkpoint."""
        self._requested.append(Command("resume", self._known(name), changes))

    def change(self, name: str, **changes: Any) -> None:
        """Train a variant with other settings after the step that runs."""
        self._requested.append(Command("change", self._known(name), changes))

    def clone(self, name: str, to: str, fresh: bool = False, **changes: Any) -> None:
        """Begin a variant from another's weights, optimizer (or a `fresh` one) and place in the data."""
        check_name(to, list(self.variants))
        self._requested.append(Command("clone", self._known(name), changes, to, fresh))

    def _known(self, name: str) -> str:
        if name not in self.variants:
            raise ValueError(f"there is no variant {name!r}; there are {', '.join(self.variants)}.")
        return name

    def _live(self) -> list[Variant]:
        return [variant for variant in self.variants.values() if variant.live]

    def _begin_cut(self) -> None:
        """If anything is asked for, or it is time, let all save a checkpoint when their step ends; later ones wait."""
        halved = [Command("stop", name) for name in (self.halving(self) if self.halving is not None else [])]
        queued, requested, self._requested = commands.waiting(self.folder), self._requested, []
        self._asked, self._taken = [*halved, *requested, *(one for _, one in queued)], [path for path, _ in queued]
        self._cut = bool(self._asked or (self.save_rounds and self.round % self.save_rounds == 0))
        stopped = [one.name for one in self._asked if one.kind in ("stop", "change")]
        for variant in self._live() if self._cut else ():
            variant.must_save = True
            variant.must_stop |= variant.name in stopped

    def _carry_out(self, command: Command) -> None:
        """One that cannot be carried out is written down and ends nothing."""
        variant = self.variants.get(command.name)
        said = " ".join([command.kind, *(f"{key}={value!r}" for key, value in command.changes.items())])
        shared = [(one._shared_state, dict(one._shared_state)) for one in (AcceleratorState, PartialState)]
        try:
            if variant is None:
                raise ValueError(f"there is no variant {command.name!r}; there are {', '.join(self.variants)}.")
            if command.kind == "clone":
                variant = self._clone(variant, command)
                said += f" of {variant.parent}"
            elif command.kind == "resume" and variant.live:
                raise ValueError(f"{variant.name} is running already. Use `change` for other settings.")
            elif command.kind != "stop":
                self._restart(variant, command.changes)
            elif variant.live:  # by an earlier command of this round
                variant.trainer, variant.turn, variant.status = None, None, "stopped"
            variant.history.append(f"step {variant.step}: {said}")
        except Exception as error:
            for current, before in shared:
                current.update(before)  # a config that fails has cleared what all trainers use
            if variant is not None:
                variant.history.append(f"step {variant.step}: {said} failed: {error}")
                if command.kind == "change" and variant.must_stop and variant.status == "stopped":
                    self._begin(variant)  # it was stopped for this alone
            warnings.warn(f"{said} {command.name}: {error}", stacklevel=2)

    def _clone(self, parent: Variant, command: Command) -> Variant:
        check_name(name := command.to or f"{parent.name}-{len(self.variants)}", list(self.variants))
        if parent.checkpoint is None:
            raise ValueError(f"{parent.name} has taken no step yet, so there is nothing to clone.")
        _check_same_adapter(parent, command.changes)
        child = Variant(name, _merged(parent.changes, command.changes), parent=parent.name, adopts=not command.fresh)
        child.step, child.history = parent.step, [f"step {parent.step}: cloned from {parent.name}"]
        child.checkpoint = f"{name}/{Path(parent.checkpoint).name}"
        folder = self.folder / child.checkpoint
        settings_of(self.common, child.changes, folder.parent)
        shutil.rmtree(folder, ignore_errors=True)  # of a study that was killed here
        shutil.copytree(self.folder / parent.checkpoint, folder)
        if command.fresh:
            for file in ("optimizer.pt", "scheduler.pt"):
                (folder / file).unlink(missing_ok=True)
            seal(folder)
        self._begin(child)
        self.variants[name] = child
        return child

    def _restart(self, variant: Variant, changes: Mapping[str, Any]) -> None:
        _check_same_adapter(variant, changes)
        changed = _merged(variant.changes, changes)
        settings_of(self.common, changed, self.folder / variant.name)
        before = variant.changes, variant.adopts
        variant.changes, variant.adopts = changed, bool(changes)
        try:
            self._begin(variant)
        except Exception:
            variant.changes, variant.adopts = before
            raise

    def _begin(self, variant: Variant) -> None:
        """Make a variant's trainer, which starts with its first turn."""
        outside = shared_state()
        method, adapter, args = settings_of(self.common, variant.changes, self.folder / variant.name)
        from peft import LoraConfig

        try:
            peft_config = LoraConfig(**{"task_type": "CAUSAL_LM", **adapter})
        except TypeError as error:
            raise ValueError(f"peft={adapter!r}: {error}. See peft.LoraConfig for what it takes.") from error
        arguments = dict(self.given)
        if named := variant.changes.get("reward_funcs", self.common.get("reward_funcs")):
            named = [named] if isinstance(named, str) or callable(named) else named
            arguments["reward_funcs"] = [resolve_reward(one) if isinstance(one, str) else one for one in named]
        follows = FollowsStudy(variant, self.folder, self.eval_rows, self.eval_steps)
        trainer = variant.trainer = TRAINERS[method](
            model=with_shared_weights(self.base),
            args=args,
            processing_class=self.processing_class,
            peft_config=peft_config,
            engine=VariantEngine(self, variant.name),
            callbacks=[follows],
            **arguments,
        )
        check_adapter(trainer.model)
        trainer.remove_callback(ProgressDisplay)
        if self.engine is None:
            self.base.to(trainer.accelerator.device)  # its buffers; variants have moved the weights
            self.engine = AdapterEngine(
                lambda: self.base,
                adapters=self._adapters,
                pad_token_id=self.processing_class.pad_token_id,
                eos_token_ids=end_token_ids(self.base, self.processing_class),
                max_sequences=max(args.max_concurrent_completions, 1),
                max_context=max_context(self.base),
                forward_context=trainer.accelerator.autocast,
                tokenizer=self.processing_class,
            )
        checkpoint = None if variant.checkpoint is None else str(self.folder / variant.checkpoint)
        turn = variant.turn = Turn(partial(self._train, trainer, checkpoint), variant.name)
        trainer.collector.run = turn.wait_for
        variant.status, variant.reason, variant.must_save, variant.must_stop = "running", "", False, False
        set_shared_state(outside)

    def _go_on(self, variant: Variant, outcome: Any = None) -> None:
        assert variant.turn is not None, "it is live"
        variant.turn.go_on(outcome)
        if variant.turn.ended:
            self._end(variant, variant.turn.error)

    def _train(self, trainer: Any, checkpoint: str | None) -> None:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()

    def _sample(self) -> dict[str, Any]:
        """Results of all coroutines that variants wait for, or their errors."""
        paused = {v.name: v.turn.pending for v in self._live() if v.turn is not None and v.turn.pending is not None}
        outcomes: dict[str, Any] = dict.fromkeys(paused)
        broken = {name for name in paused if not _is_finite(low_rank_matrices(self.variants[name].trainer.model))}
        for name in broken:
            paused.pop(name).close()
            outcomes[name] = FloatingPointError(f"the adapter of {name} holds NaN or infinite weights.")
        if not paused:
            return outcomes

        async def together() -> list[Any]:
            return list(await asyncio.gather(*paused.values(), return_exceptions=True))

        assert self.engine is not None, "made with the first trainer"
        self._sampled = list(paused)
        with self.engine.awake():
            outcomes |= zip(paused, run_async(together()), strict=True)
        return outcomes

    def _adapters(self) -> dict[str, Any]:
        return {name: low_rank_matrices(self.variants[name].trainer.model) for name in self._sampled}

    def _end(self, variant: Variant, error: BaseException | None) -> None:
        variant.must_save = False
        if error is not None and not isinstance(error, Exception | Cancelled):
            raise error
        if error is not None:
            notes = " ".join(getattr(error, "__notes__", ()))
            variant.status, variant.reason = "failed", f"{type(error).__name__}: {error} {notes}".strip()
        elif variant.must_stop and variant.step < variant.trainer.state.max_steps:
            variant.status = "stopped"
        else:
            variant.status = "finished"
        variant.trainer = variant.turn = None  # its optimizer takes memory

    def _save(self) -> None:
        """Write down where all variants are, from which a killed study goes on."""
        records = {name: variant.record() for name, variant in self.variants.items()}
        requested = [asdict(command) for command in self._requested]
        taken = [path.name for path in self._taken]
        state = {"round": self.round, "requested": requested, "taken": taken, "variants": records}
        commands.write_json(self.folder / commands.STATE, state)
        write_report(self.folder, self.round, self.variants)

    def _load(self) -> None:
        """Go back to the last common checkpoint; later ones of single variants are deleted."""
        path = self.folder / commands.STATE
        if not path.is_file():
            return
        state = json.loads(path.read_text())
        self.round, self._requested = state["round"], [Command(**one) for one in state["requested"]]
        for name in state.get("taken", ()):  # carried out before the kill
            (self.folder / commands.QUEUE / name).unlink(missing_ok=True)
        given, self.variants = self.variants, {name: Variant.of(one) for name, one in state["variants"].items()}
        for variant in self.variants.values():
            asked = given.get(variant.name, variant).changes
            if not variant.history and json.loads(json.dumps(asked)) != variant.changes:
                warnings.warn(
                    f"{variant.name} goes on with {variant.changes}; {asked} has no effect. Use `change`.", stacklevel=3
                )
            kept = int(variant.checkpoint.rpartition("-")[2]) if variant.checkpoint else -1
            for later in numbered_checkpoints(str(self.folder / variant.name)):
                if int(later.name.rpartition("-")[2]) > kept:
                    shutil.rmtree(later)
            if variant.status == "running":
                self._begin(variant)
        self.variants = {**self.variants, **{name: one for name, one in given.items() if name not in self.variants}}


class VariantEngine:
    """The study's engine as one variant sees it: requests name the variant's adapter."""

    traits = EngineTraits(shares_policy=True, returns_masks=True)

    def __init__(self, study: Study, adapter: str):
        self.study, self.adapter = study, adapter

    async def generate(self, request: SampleRequest) -> list[Completion]:
        assert self.study.engine is not None, "made with the first trainer"
        return await self.study.engine.generate(replace(request, adapter=self.adapter))

    def load_weights(self, update: Any) -> None:
        """Do nothing: the study's engine reads the variant's own parameters."""

    def awake(self) -> AbstractContextManager[None]:
        return nullcontext()  # the study wakes the engine, for all variants at once


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    adapter = {**(old.get("peft") or {}), **(new.get("peft") or {})}
    return {**old, **new, **({"peft": adapter} if adapter else {})}


def _check_same_adapter(variant: Variant, changes: Mapping[str, Any]) -> None:
    if peft := changes.get("peft"):
        raise ValueError(
            f"peft={peft!r} would change the shape or scale of {variant.name}'s adapter, which its checkpoint holds."
            " Begin a new variant for another adapter."
        )


def _is_finite(adapter: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return all(bool(matrix.isfinite().all()) for matrices in adapter.values() for matrix in matrices)
