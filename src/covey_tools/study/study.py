"""`Study`: trains many LoRA configurations over one frozen model, side by side in one process.

Each variant has a trainer of its own, with its optimizer, schedule, random numbers, metrics and checkpoints. A round
samples for all of them in one batch of the engine; then each takes its step. While they train, variants are stopped,
cloned, changed and resumed (`covey_tools.study.interventions`). Variants without an adapter are trained after the
others, one at a time, each on a copy of the model.
"""

import asyncio
import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, fields
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from covey.config.training import LoggingFields
from covey.core.findings import CheckError, Finding
from covey.data.conversations import as_user_messages, with_system_message
from covey.engines.native.adapter_engine import AdapterEngine
from covey.engines.native.recurrent_engine import needs_recurrent_engine
from covey.engines.servers.errors import RETRIED, NoServerLeft
from covey.observability.dashboard import ProgressDisplay
from covey.observability.page.export import PageWriter
from covey.policy.adapters import has_adapter, low_rank_matrices, with_shared_weights
from covey.policy.loading import end_token_ids, load_policy, load_processing_class, max_context
from covey.rewards import resolve_reward
from covey.rollout.collector import run_async
from covey.rollout.vision import is_processor
from covey.runtime.files import locked
from covey.runtime.process_memory import return_freed_memory, share_one_heap
from covey.runtime.safe_text import without_secrets
from covey.runtime.user_code import report, warn
from covey.trainer.checkpoint import numbered_checkpoints
from covey.trainer.distributed.stopping import StopAtStep
from covey.trainer.engines.rounding import check_rounding, given_dtype
from covey.trainer.integrations.first_step import FirstStep
from covey.trainer.integrations.report import RunReport
from covey.trainer.integrations.report import command as given_command
from covey_tools.study import commands
from covey_tools.study.commands import Command, check_known, check_name
from covey_tools.study.interventions import carry_out, check_changes, merged
from covey_tools.study.plan import Halving
from covey_tools.study.progress import StudyDisplay
from covey_tools.study.report import write_report
from covey_tools.study.tables import PartnerLost, check_table, for_all_players, seated, table_of
from covey_tools.study.turns import Cancelled, Turn, kept_accelerator, set_shared_state, shared_state
from covey_tools.study.variants import (
    LEARNING,
    TRAINERS,
    CommonEvaluation,
    FollowsStudy,
    Variant,
    VariantEngine,
    check_adapter,
    field_of,
    settings_of,
)

SERVER_LOST = (NoServerLeft, *RETRIED)  # errors that end the study, which has one server
ASKED = ("system_prompt", "prompts_as_messages", "chat_template_kwargs")
"""A variant's own in evaluations too: how its policy is to be asked."""
MAY_DIFFER = (
    *(one.name for one in fields(LoggingFields)),
    *("run_name", "max_steps", "num_train_epochs", "logging_steps", "report_to", "disable_tqdm"),
    "max_concurrent_completions",
)
INIT = {"init_kwargs": "model_init_kwargs", "trust_remote_code": "trust_remote_code"}


class Study:
    """Many configurations over one frozen model.

    Args:
        model: hub id, folder or transformers model, without an adapter.
        variants: by name, the settings that differ from `args`: fields of the method's config, `peft` (fields of
            `peft.LoraConfig`; None trains the whole model), `method` ("grpo" or "rloo"), `reward_funcs` (names, as in
            a run file), `system_prompt`.
        args: settings of all variants, in the same words; `output_dir` is the study's folder.
        reward_funcs: as the trainers take them.
        train_dataset: rows with a `prompt`, in the same order for all variants of one seed.
        eval_dataset: rows that variants are compared on.
        processing_class: the tokenizer; loaded with the model if None.
        eval_steps: steps between evaluations, or a list of steps; there is one at the end in any case.
        save_rounds: rounds between checkpoints of all variants, from which `train(resume=True)` continues.
        halving: stops variants at every evaluation, as `covey_tools.study.plan.Halving` says.
        parts: further arguments of the trainers, such as `tools` and `environment_factory`. A `Table` among them seats
            the variants at one game, in which each plays its own roles.

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
        eval_steps: int | Sequence[int] | None = None,
        save_rounds: int | None = None,
        halving: Callable[["Study"], list[str]] | None = None,
        parts: Mapping[str, Any] | None = None,
    ):
        if not variants:
            raise ValueError("`variants` is empty: give at least one, such as {'base': {}}.")
        _check_counts(eval_steps=eval_steps, save_rounds=save_rounds)
        share_one_heap()
        self.common = {name: value for name, value in args.items() if name != "output_dir"}
        self.folder = Path(args.get("output_dir") or "study")
        self._page = PageWriter(self.folder / commands.PAGE)
        self.eval_rows = [dict(row) for row in eval_dataset or ()]
        if len(self.eval_rows) < (2 if isinstance(halving, Halving) else bool(eval_steps)):
            raise ValueError(
                f"`eval_dataset` has {len(self.eval_rows)} rows: `eval_steps` needs 1 to compare variants on, and"
                " `halving` 2 or more. Give more."
            )
        if isinstance(halving, Halving) and not eval_steps:
            raise ValueError("`halving` stops variants at evaluations: give `eval_steps`, the steps between these.")
        self.eval_steps, self.save_rounds, self.halving, self.round = eval_steps, save_rounds, halving, 0
        self.variants: dict[str, Variant] = {}
        ends: list[int] = []  # steps, where they are given
        for name, changes in variants.items():
            check_name(name)
            self.variants[name] = Variant(name, dict(changes))
            with _named(name):
                ends.append(settings_of(self.common, changes, self.folder / name)[2].max_steps)
            if self.eval_rows and "reward_funcs" in changes and not (reward_funcs or self.common.get("reward_funcs")):
                raise ValueError(
                    f"{name} has rewards of its own, and variants are compared by the study's rewards: give"
                    " `reward_funcs` for all, or leave `eval_dataset` out."
                )
        evaluated = eval_steps if isinstance(eval_steps, list | tuple) else [eval_steps]
        if isinstance(halving, Halving) and min(ends) > 0 and min(evaluated) >= max(ends):
            raise ValueError(
                f"eval_steps={eval_steps!r} with max_steps={max(ends)}: `halving` stops variants at evaluations before"
                " the last step, and there is none. Give a smaller number, or leave `halving` out."
            )
        init: dict[str, Any] = {name: self.common[key] for name, key in INIT.items() if key in self.common}
        self.base = load_policy(model, **init)
        if hasattr(self.base, "peft_config"):
            raise ValueError("`model` has an adapter already, and each variant gets one: give the model without it.")
        name = Path(model if isinstance(model, str | Path) else self.base.config._name_or_path).name
        own = {field_of(key): value for key, value in self.common.items() if not key.startswith("vllm_server_")}
        self._base = as_json(without_secrets({"model": name, **own}))  # by which a study is known again
        self.processing_class = load_processing_class(processing_class, self.base, **init)
        if needs_recurrent_engine(self.base) or is_processor(self.processing_class):
            raise ValueError(
                f"{type(self.base).__name__} has a running state or sees images, and adapters of such models cannot be"
                " mixed in one batch. Train the variants one after another."
            )
        self.base.requires_grad_(False)
        self.given = {"train_dataset": train_dataset, "reward_funcs": reward_funcs, **(parts or {})}
        self.table = table_of(self.given)
        self.check_table({})
        self.engine: AdapterEngine | None = None
        self.server: Any = None  # `RemoteEngine` that samples in its place, if a vLLM server is named
        self.updates = count(1)  # versions of the adapters that it is sent
        self._requested: list[Command] = []
        self._asked: list[Command] = []  # what is carried out at the end of the step
        self._taken: list[Path] = []  # files that it came from
        self._sampled: list[str] = []  # variants whose adapters the engine holds
        self._stop = StopAtStep(lambda number, doing: [number], True, self._farewell, steps="the steps of all variants")
        self._display = StudyDisplay(hidden=bool(self.common.get("disable_tqdm")))
        self._stop.say = self._display.say
        self._saved = -1  # round after which the state was written down
        self._cut = False  # all variants save a checkpoint at the end of their step
        for variant in self.variants.values():
            with _named(variant.name):
                self.begin(variant)

    def train(self, resume: bool = False) -> dict[str, Variant]:
        """Train all variants to their ends, from the last common checkpoint if the folder holds this study.

        With `resume`, variants that are not in the folder begin, too; ValueError for a folder of another study.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder), self._stop.listening(), self._display, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "since .* was saved, this run has changed")  # as it was asked to
            if (self.folder / commands.STATE).is_file():
                self._load(resume)
            self._save()
            try:
                while self._unfinished() or self._requested or commands.waiting(self.folder):
                    if self._stop.signal is not None and self._saved == self.round:
                        break
                    self.play_round()
            finally:
                for variant in self._live():
                    assert variant.turn is not None
                    variant.turn.cancel()
            self._save()
        return self.variants

    def check_table(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse (CheckError) variants that cannot play each other; `changed` has other settings of some, by name."""
        if self.table is None:
            return
        settings = {name: changed.get(name, variant.changes) for name, variant in self.variants.items()}
        with kept_accelerator():
            found = {name: settings_of(self.common, one, self.folder / name) for name, one in settings.items()}
        players = {name: args for name, (_, _, args) in found.items()}
        findings = list(check_table(self.table, self.given, players, bool(self.eval_rows)))
        for name, (_, adapter, _) in found.items():
            if adapter is None:
                evidence = f"{name!r} trains the whole model, alone and after the others: it cannot play with them."
                findings.append(Finding.error("study-table", evidence, "Give it `peft`."))
        if self.halving is not None:
            evidence = "`halving` stops variants, and those at a table play each other to the end."
            findings.append(Finding.error("study-table", evidence, "Leave it out."))
        report(findings)

    def play_round(self) -> None:
        """Sample for all variants in one batch, then let each take its step; carry out what was asked for."""
        self.round += 1
        self._display.show_round(self.round, self.variants)
        evaluated = self._evaluated()
        if not self._live() and (waiting := self._unfinished()):
            variant = max(waiting, key=lambda variant: variant.step)
            try:
                self._make_trainer(variant)
            except Exception as error:  # one that cannot begin ends alone
                self._end(variant, error)
        if not self._cut:
            self._begin_cut()
        elif isinstance(self.halving, Halving):  # of evaluations in the step that ends with checkpoints
            for variant in map(self.variants.__getitem__, self.halving(self)):
                if variant.must_save and not variant.must_stop:
                    variant.must_stop = True
                    self._asked.append(Command("stop", variant.name))
        for variant in self._live():
            if variant.turn is not None and variant.turn.pending is None:
                self._proceed(variant)  # it begins, and samples with the others at once, as after a kill
        self._display.doing(f"sampling for {len(self._live())} variants")
        for name, outcome in self._sample().items():
            self._display.doing(f"training {name}")
            self._proceed(self.variants[name], outcome)
        if not self._cut or any(variant.must_save for variant in self._live()):
            due = self._evaluated() > evaluated and self._page.is_due
            write_report(self.folder, self.round, self.variants, self._page if due else None)
            return
        self._cut = False
        for command in self._asked:
            carry_out(self, command)
        self._save()
        for path in self._taken:
            path.unlink(missing_ok=True)

    def _farewell(self) -> str:
        way = "train(resume=True)"
        if "COVEY_COMMAND" in os.environ:
            way = given_command().removesuffix(" --resume") + " --resume"
        kept = f"; round {self._saved} is saved" if self._saved > 0 else ""
        return f"covey: the study stopped in round {self.round}{kept}; continue with: {way}"

    def stop(self, name: str) -> None:
        """End a variant after the step that runs; `resume` lets it continue."""
        self._ask(Command("stop", name))

    def resume(self, name: str, **changes: Any) -> None:
        """Let a variant that was stopped, failed or has finished continue from its last checkpoint."""
        self._ask(Command("resume", name, changes))

    def change(self, name: str, **changes: Any) -> None:
        """Train a variant with other settings after the step that runs."""
        self._ask(Command("change", name, changes))

    def clone(self, name: str, to: str, fresh: bool = False, **changes: Any) -> None:
        """Begin a variant from another's weights, optimizer (or a `fresh` one) and place in the data."""
        check_name(to, list(self.variants))
        self._ask(Command("clone", name, changes, to, fresh))

    def _ask(self, command: Command) -> None:
        check_known(command.name, self.variants)
        variant = self.variants[command.name]
        check_changes(self.common, variant.changes, command, variant.live or variant.checkpoint is not None)
        self.check_players(command)
        self._requested.append(command)

    def check_players(self, command: Command) -> None:
        """Refuse (ValueError) a command that would leave variants of a table without each other."""
        if self.table is not None and command.kind == "clone":
            raise ValueError(
                f"{command.name} plays at a table, where a clone has no place: name it in a Table of another study."
            )
        if command.changes:
            self.check_table({command.name: merged(self.variants[command.name].changes, command.changes)})

    def _live(self) -> list[Variant]:
        return [variant for variant in self.variants.values() if variant.live]

    def _unfinished(self) -> list[Variant]:
        return [variant for variant in self.variants.values() if variant.live or variant.status == "waiting"]

    def _evaluated(self) -> int:
        return sum(len(variant.evaluations) for variant in self.variants.values())

    def _begin_cut(self) -> None:
        """If anything is asked for, or it is time, let all save a checkpoint when their step ends; later ones wait."""
        halved = [Command("stop", name) for name in (self.halving(self) if self.halving is not None else [])]
        queued, requested, self._requested = commands.waiting(self.folder), self._requested, []
        asked = [*halved, *requested, *(one for _, one in queued)]
        self._asked = [one for command in asked for one in for_all_players(self.table, command)]
        self._taken = [path for path, _ in queued]
        due = self._stop.signal is not None or (self.save_rounds and self.round % self.save_rounds == 0)
        self._cut = bool(self._asked or due)
        stopped = [one.name for one in self._asked if one.kind in ("stop", "change")]
        for variant in self._live() if self._cut else ():
            variant.must_save = True
            variant.must_stop |= variant.name in stopped

    def begin(self, variant: Variant) -> None:
        """Make a variant's trainer, which starts with its first turn; one of the whole model waits for the others."""
        if variant.changes.get("peft", self.common.get("peft")) is None:
            variant.status, variant.reason, variant.trainer, variant.turn = "waiting", "", None, None
        else:
            self._make_trainer(variant)

    def _make_trainer(self, variant: Variant) -> None:
        """Make a trainer of an adapter on the shared model, or of the whole model on a copy of it."""
        method, adapter, args = settings_of(self.common, variant.changes, self.folder / variant.name)
        if adapter is None:
            model, peft_config = copy.deepcopy(self.base).requires_grad_(True), None
        else:
            from peft import LoraConfig

            model, peft_config = with_shared_weights(self.base), LoraConfig(**{"task_type": "CAUSAL_LM", **adapter})
        outside = shared_state()
        if args.use_vllm and self.server is None:
            self._connect(args)
        arguments = seated(self._arguments(variant.changes), variant.name, args.rollouts_per_game)
        evaluate = None
        if self.eval_rows:
            own = {name: value for name, value in variant.changes.items() if field_of(name) in ASKED}
            own["peft"] = None if peft_config is None else {}
            common = {name: value for name, value in self.common.items() if field_of(name) not in LEARNING}
            group = {field_of(name): value for name, value in self.common.items()}.get("num_generations")
            group = group or TRAINERS[common.get("method", "grpo")].config_class.num_generations
            common |= {"num_generations": group, "per_device_train_batch_size": group}
            config = settings_of(common, own, self.folder / variant.name)[2]
            shown = as_user_messages(self.eval_rows) if config.prompts_as_messages else self.eval_rows
            rows = with_system_message(own.get("system_prompt", self.common.get("system_prompt")), shown)
            has_own = any(field_of(name).startswith("reward_") for name in variant.changes)
            evaluate = CommonEvaluation(config, rows, self._arguments({}).get("reward_funcs"), has_own)
        follows = FollowsStudy(variant, evaluate, self._is_due, pauses=lambda: self.halving is not None)
        trainer = TRAINERS[method](
            model=model,
            args=args,
            processing_class=self.processing_class,
            peft_config=peft_config,
            engine=VariantEngine(self, variant.name, given_dtype(args)) if peft_config is not None else None,
            callbacks=[follows],
            **arguments,
        )
        if peft_config is not None:
            check_adapter(trainer.model)
        for callback in (ProgressDisplay, RunReport, FirstStep):
            trainer.remove_callback(callback)
        if self.engine is None and self.server is None and peft_config is not None:
            self._make_engine(trainer)
        checkpoint = None if variant.checkpoint is None else str(self.folder / variant.checkpoint)
        turn = Turn(partial(self._train, trainer, checkpoint), variant.name)
        trainer.collector.run_by(turn.wait_for)
        variant.trainer, variant.turn = trainer, turn
        variant.status, variant.reason, variant.must_save, variant.must_stop = "running", "", False, False
        set_shared_state(outside)

    def _arguments(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Rewards, data and further parts of a variant's trainer."""
        arguments = dict(self.given)
        if named := changes.get("reward_funcs", self.common.get("reward_funcs")):
            named = [named] if isinstance(named, str) or callable(named) else named
            arguments["reward_funcs"] = [resolve_reward(one) if isinstance(one, str) else one for one in named]
        system = changes.get("system_prompt", self.common.get("system_prompt"))
        arguments["train_dataset"] = with_system_message(system, arguments["train_dataset"])
        return arguments

    def _make_engine(self, trainer: Any) -> None:
        report(check_rounding(trainer.args, self.base, trainer.accelerator.device.type, in_step=False, sharding=""))
        self.base.to(trainer.accelerator.device)  # its buffers; variants have moved the weights
        self.engine = AdapterEngine(
            lambda: self.base,
            adapters=self._adapters,
            pad_token_id=self.processing_class.pad_token_id,
            eos_token_ids=end_token_ids(self.base, self.processing_class),
            max_sequences=max(trainer.args.max_concurrent_completions, 1),
            max_context=max_context(self.base),
            forward_context=trainer.accelerator.autocast,
            tokenizer=self.processing_class,
            dtype=given_dtype(trainer.args),
        )

    def _connect(self, args: Any) -> None:
        """Find the server that samples for all variants."""
        from covey.trainer.engines.servers import vllm_servers

        limit = max_context(self.base)
        self.server = vllm_servers(args, self.base, self.processing_class, args.distributed_state, limit)
        if not self.server.traits.takes_adapters:
            raise ValueError(
                "the vLLM server takes no adapters, and each variant of a study is one. Start it with `covey vllm-serve"
                f" --enable-lora --max-lora-rank R --max-loras {len(self.variants)} --max-cpu-loras"
                f" {2 * len(self.variants)}`."
            )

    def _is_due(self, step: int) -> bool:
        if isinstance(self.eval_steps, int):
            return step % self.eval_steps == 0
        return step in (self.eval_steps or ())

    def _proceed(self, variant: Variant, outcome: Any = None) -> None:
        assert variant.turn is not None, "it is live"
        variant.turn.proceed(outcome)
        return_freed_memory()  # threads have heaps of their own
        if variant.turn.ended:
            self._end(variant, variant.turn.error)

    def _train(self, trainer: Any, checkpoint: str | None) -> None:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()

    def _sample(self) -> dict[str, Any]:
        """Results of all coroutines that variants wait for, or their errors.

        Variants that have saved wait for the others to do so: what is written down then is where each really is.
        """
        live = [variant for variant in self._live() if variant.must_save or not self._cut]
        paused = {v.name: v.turn.pending for v in live if v.turn is not None and v.turn.pending is not None}
        outcomes: dict[str, Any] = dict.fromkeys(paused)
        for name in [name for name in paused if not _is_finite(self.variants[name].trainer.model)]:
            paused.pop(name).close()
            outcomes[name] = FloatingPointError(f"the trained weights of {name} hold NaN or infinity.")
        if self.table is not None:
            self.table.open()
            if any(name not in paused for name in self.table.variants):
                outcomes |= {name: self._lost(name, outcomes) for name in paused}
                while paused:
                    paused.popitem()[1].close()
        if not paused:
            return outcomes

        async def one(name: str, pending: Any) -> Any:
            try:
                return await pending
            except BaseException as error:
                if self.table is not None and name in self.table.variants:
                    self.table.leave(name, error)
                raise

        async def together() -> list[Any]:
            return list(await asyncio.gather(*(one(*item) for item in paused.items()), return_exceptions=True))

        self._sampled = [name for name in paused if has_adapter(self.variants[name].trainer.model)]
        engine = self.server or self.engine
        with engine.awake() if engine is not None and self._sampled else nullcontext():
            outcomes |= zip(paused, run_async(together()), strict=True)
        return_freed_memory()
        return outcomes

    def _lost(self, name: str, outcomes: Mapping[str, Any]) -> PartnerLost:
        """Why a player cannot continue: which of the players at its table have ended or failed."""
        assert self.table is not None, "checked"
        others = [self.variants[one] for one in self.table.variants if one != name]
        ended = [
            f"{one.name} has {one.status}{f' ({one.reason})' if one.reason else ''}" for one in others if not one.live
        ]
        failed = [f"{one.name} has failed ({error})" for one in others if (error := outcomes.get(one.name))]
        return PartnerLost(f"{name} plays with others at a table, and {'; '.join([*ended, *failed])}.")

    def _adapters(self) -> dict[str, Any]:
        return {name: low_rank_matrices(self.variants[name].trainer.model) for name in self._sampled}

    def _end(self, variant: Variant, error: BaseException | None) -> None:
        variant.must_save = False
        if error is not None and (not isinstance(error, Exception | Cancelled) or isinstance(error, SERVER_LOST)):
            raise error
        if error is not None:
            notes = " ".join(getattr(error, "__notes__", ()))
            variant.status = "failed"
            variant.reason = without_secrets(f"{type(error).__name__}: {error} {notes}".strip())
        elif variant.must_stop and variant.step < variant.trainer.state.max_steps:
            variant.status = "stopped"
        else:
            variant.status = "finished"
        variant.trainer = variant.turn = None  # its optimizer takes memory

    def _save(self) -> None:
        """Write down where all variants are, from which a killed study continues."""
        records = {name: asdict(variant) for name, variant in self.variants.items()}
        requested = [asdict(command) for command in self._requested]
        taken = [path.name for path in self._taken]
        state = {"round": self.round, "base": self._base, "requested": requested, "taken": taken, "variants": records}
        commands.write_json(self.folder / commands.STATE, state)
        write_report(self.folder, self.round, self.variants, self._page)
        self._saved = self.round

    def _load(self, resume: bool) -> None:
        """Go back to the last common checkpoint; later ones of single variants are deleted."""
        state = commands.read_state(self.folder)
        self._check_same(state, resume)
        self.round = state["round"]
        self._requested = [*(Command(**one) for one in state["requested"]), *self._requested]
        for name in state["taken"]:  # carried out before the kill
            (self.folder / commands.QUEUE / name).unlink(missing_ok=True)
        given, self.variants = self.variants, {name: Variant(**one) for name, one in state["variants"].items()}
        for variant in self.variants.values():
            asked = given.get(variant.name, variant).changes
            if not variant.history and as_json(asked) != variant.changes:
                warn(f"{variant.name} continues with {variant.changes}; {asked} has no effect. Use `change`.")
            kept = int(variant.checkpoint.rpartition("-")[2]) if variant.checkpoint else -1
            for later in numbered_checkpoints(str(self.folder / variant.name)):
                if int(later.name.rpartition("-")[2]) > kept:
                    shutil.rmtree(later)
            if variant.status in ("running", "waiting"):
                self.begin(variant)
        self.variants = {**self.variants, **{name: one for name, one in given.items() if name not in self.variants}}
        steps = {name: variant.step for name, variant in self.variants.items()}
        if self.table is not None and len({*steps.values()}) > 1:
            taken = ", ".join(f"{name} {step}" for name, step in steps.items())
            raise ValueError(
                f"all players of a table must continue from the same step; in {self.folder} they took {taken} steps."
            )

    def _check_same(self, state: Mapping[str, Any], resume: bool) -> None:
        """Refuse (ValueError) to continue in the folder of another study; with `resume`, variants may be added."""
        first = {name: one for name, one in state["variants"].items() if one["parent"] is None}
        own = {name: as_json(one.changes) for name, one in self.variants.items()}
        own |= {name: first[name]["changes"] for name in first.keys() & own.keys() if resume or first[name]["history"]}
        base = state["base"]
        default = TRAINERS[self._base.get("method", "grpo")].config_class
        names = {*base, *self._base} - {*MAY_DIFFER}
        there, here = (
            {name: one.get(name, getattr(default, name, None)) for name in names} for one in (base, self._base)
        )
        there |= {f"variant {name}": one["changes"] for name, one in first.items()}
        here |= {f"variant {name}": changes for name, changes in own.items()}
        differ = {name for name in there.keys() | here.keys() if there.get(name) != here.get(name)}
        if resume and first.keys() & own.keys():
            differ = {name for name in differ if not name.startswith("variant ")}
        if differ:
            said = [f"{name}={there.get(name)} there and {here.get(name)} here" for name in sorted(differ)]
            raise ValueError(
                f"{str(self.folder)!r} holds another study: {'; '.join(said)}. Give another `output_dir`, or the same"
                " settings to continue with it (--resume, `train(resume=True)`, adds variants)."
            )
        if not resume:
            warn(f"{str(self.folder)!r} holds this study: it continues after round {state['round']}")


def as_json(value: Any) -> Any:
    """A value as JSON would give it back, with functions by their names."""
    return json.loads(json.dumps(value, default=lambda one: getattr(one, "__qualname__", type(one).__name__)))


def _is_finite(model: Any) -> bool:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if has_adapter(model):  # its scale may be too large, and reaches the rows of others as 0 * infinity
        weights += [b for _, b in low_rank_matrices(model).values()]
    return all(bool(weight.isfinite().all()) for weight in weights)


@contextmanager
def _named(variant: str) -> Iterator[None]:
    """Begin the message of an error with the variant that has it."""
    try:
        yield
    except CheckError as error:
        raise error.within(f"variant {variant}") from error
    except ValueError as error:
        raise ValueError(f"variant {variant}: {error}") from error


def _check_counts(**given: Any) -> None:
    for name, value in given.items():
        counts = value if name == "eval_steps" and isinstance(value, list | tuple) else [value] * (value is not None)
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in counts):
            raise ValueError(
                f"{name}={value!r} must be a whole number, 1 or more (of `eval_steps`, a list is allowed)."
            )
