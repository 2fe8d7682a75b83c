"""A run that was recorded: its course, then its first rollout batches with its model and rewards, as far as there are.

Nothing is written into the run's folder, and its script is not run again.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from covey.cli.config_file import config_of, load_run, parts_of_record, settings_of
from covey.cli.data import load_evaluations
from covey.cli.train import build_trainer
from covey.core.advantages import weighted_total
from covey.core.engine import EngineTraits
from covey.core.findings import DIAGNOSED, Finding
from covey.core.records import FinishReason, Rollout, RolloutBatch
from covey.observability.diagnostics import advice
from covey.observability.findings import read_findings
from covey.observability.record import as_scored, rollout_of
from covey.observability.record_files import (
    FOLDER,
    REWARD,
    WARNINGS,
    all_files,
    count_rows,
    number_of,
    read_data,
    read_metrics,
    read_rows,
    read_run,
)
from covey.rewards.functions import FunctionReward
from covey.rewards.suite import no_reward
from covey.runtime.definitions import script_of_run
from covey.runtime.user_code import parameters_of
from covey_tools.doctor import course, data, reward_values
from covey_tools.doctor.data import sets_of
from covey_tools.doctor.examined import MOST_ROWS, ExaminedRun, SampleBatch, quiet
from covey_tools.doctor.learning import Trials

ELSEWHERE = (
    *("vllm_", "sglang_", "use_vllm", "use_sglang", "max_staleness", "replay_from", "report_to", "record", "eval_"),
    *("save_", "load_best_model_at_end", "metric_for_best_model", "push_to_hub", "hub_", "resume_from_checkpoint"),
    *("deepspeed", "fsdp", "torch_compile", "logging_", "do_eval", "accelerator_config", "ddp_", "output_dir"),
)
"""Prefixes of settings that are left out when the parts of a run are made again."""

FIRST = 4  # rollout batches that are looked at together, as far as they have few prompts
ALONE = (
    *("reward-failing", "signal-sparse", "groups-small", "reward-scale", "weights-frozen"),
    *("prompt-empty", "data-contradicts", "data-repeated", "answer-in-prompt"),
)
"""Causes that are found without experiments."""
OF_THE_COURSE = ("collapse", "reward-lost")
OF_REWARDS = ("reward-failing", "signal-sparse", "groups-small", "reward-scale")
SLOW_TO_LEARN = (
    *("signal-sparse", "groups-small", "learning-rate-low", "reward-unreachable", "reward-saturated", "kl-scale"),
    *("temperature-low", "completions-cut", "reward-order"),
)
"""Causes of learning nothing: no errors in a run whose reward rose."""

FEW_TRAINED = 0.01  # of the weights, as few as an adapter has
LEAST_MOVED = 1e-6  # nats a token, by which an update shows in weights of 32 bits
MOST_TENSORS = 24
OF_LOGS = ("tools-", "teacher-")
SEEN_IN_LOGS = ("completions-cut", "engine-mismatch", *(code for code in DIAGNOSED if code.startswith(OF_LOGS)))
"""Causes that logs of a whole run show better than a few samples do."""

Staged = Callable[..., Iterator[Finding]]


def examine(run: Path, seconds: float, summary: dict[str, Any], staged: Staged) -> Iterator[Finding]:
    """Findings from a record; where the run's parts can be made again, with the experiments of a run file."""
    began = time.perf_counter()
    described = read_run(run)
    read = PastRun(run, described)
    summary["rollout_batches"] = len(read.rollout_batches)
    trainer = rebuilt(described, read)
    examined = None
    if trainer is not None:
        read.weights = trainer.rewards.weights  # of environments, too
        left = max(seconds - (time.perf_counter() - began), seconds / 10)  # of what loading has left
        examined = examined_again(read, trainer, left, summary)
    try:
        found = [*course.findings(read, examined)]
        grave = any(one.grave for one in found)
        destroyed = any(one.grave and one.code == "learning-rate-high" for one in found)
        if len(read.points) < course.LEAST:
            missing = {code: f"{len(read.points)} rollout batches" for code in OF_THE_COURSE}
            summary["too_short_for"] = missing
        if examined is not None:
            stages = staged(examined, 1 if destroyed else None)  # else what the untrained policy shows may be the cause
            found += (one for one in stages if one.code != "learning-rate-high" or read.has_fallen)
            if "reward-order" not in {one.code for one in found}:
                found += scored_otherwise(read, examined)
        else:
            summary |= {"rebuilt": False, "problem": read.problem}
            seen = {*ALONE, *OF_THE_COURSE, *(one.code for one in found)}
            for code in DIAGNOSED:
                if code not in seen and not code.startswith(OF_LOGS) and code != "memory":
                    summary.setdefault("not_examined", {}).setdefault(code, "part")
            found += alone(read, summary) if not grave else ()
        found += (
            *frozen(read),
            *(unmoved(read, examined) if examined is not None else ()),
            *(one for one in advice(read.metrics, read.args, ended=True) if one.code in SEEN_IN_LOGS),
        )
    finally:
        if trainer is not None:
            trainer.rollouts.close()
    if not (found or read.has_learned):
        found += warned(run)
    summary["signal"] = summary.get("signal", False) or any(point.signal for point in read.points)
    if read.has_learned:
        found = [
            replace(one, level="warning") if one.level == "error" and one.code in SLOW_TO_LEARN else one
            for one in found
        ]
    yield from found


def warned(run: Path) -> Iterator[Finding]:
    """Findings that the run itself warned of while it trained."""
    for one in read_findings(run / FOLDER / WARNINGS):
        if one["code"] in DIAGNOSED:
            yield Finding(one["code"], "warning", one["evidence"], one["fix"], "The run warned of it while it trained.")


def frozen(read: "PastRun") -> Iterator[Finding]:
    """Few trained weights, by the counts of the record, though no adapter is trained."""
    model = read.described.get("model", {})
    trained, weights = model.get("trained"), model.get("weights")
    if model.get("adapter") or not weights or trained is None or trained > FEW_TRAINED * weights:
        return
    yield Finding(
        "weights-frozen",
        "warning" if read.has_learned else "error",
        f"{trained:,} of the model's {weights:,} weights are trained ({trained / weights:.2%}), and they are no adapter"
        " of peft: the others have requires_grad=False.",
        "Set requires_grad=True for the weights that are to learn before the trainer is made, or train an adapter"
        " (`peft`).",
        "So the record counts them at the start of the run.",
    )


def unmoved(read: "PastRun", examined: ExaminedRun) -> Iterator[Finding]:
    """The saved weights are those that the run began with, though its updates had gradients and a rate to move them."""
    norms = [line["grad_norm"] for line in read.metrics if line.get("grad_norm")]
    start = Path(str(parts_of_record(read.described).get("model")))
    if not norms or read.described.get("model", {}).get("adapter") or not (compared := equal_weights(start, read.run)):
        return
    moved = Trials(examined).update(examined.args.learning_rate).moved
    if moved < LEAST_MOVED:  # too low a rate, which is another finding
        return
    yield Finding(
        "weights-frozen",
        "error",
        f"the weights in {str(read.run)!r} equal those in {str(start)!r}, bit by bit, after {len(read.metrics)} logs"
        f" with gradient norms of up to {max(norms):.3g}: the updates did not stay.",
        "Look for what copies or loads weights while the run trains: a callback, an average, a reset of the model; and"
        " check that the optimizer updates the parameters of the model that is saved.",
        f"{compared} tensors were compared. A single update at learning_rate={examined.args.learning_rate:g} changes"
        f" log-probs by {moved:.2g} nats a token.",
    )


def equal_weights(one: Path, other: Path) -> int:
    """Number of tensors of two model folders that were compared, if all are equal; 0 if any differs or is missing."""
    files = [{path.name for path in folder.glob("*.safetensors")} for folder in (one, other)]
    if not all(files):
        return 0
    with ExitStack() as opened:
        held: list[dict[str, Any]] = []
        for folder, names in zip((one, other), files, strict=True):
            readers = [opened.enter_context(safe_open(folder / name, "pt")) for name in sorted(names)]
            held.append({key: reader for reader in readers for key in reader.keys()})  # noqa: SIM118
        common = sorted(held[0].keys() & held[1].keys())
        chosen = common[:: max(1, len(common) // MOST_TENSORS)]
        same = (torch.equal(*(reader[key].get_tensor(key) for reader in held)) for key in chosen)
        return len(chosen) if all(same) else 0


def scored_otherwise(read: "PastRun", examined: ExaminedRun) -> Iterator[Finding]:
    """The last rollout batch on record has other rewards than the functions give the same completions now."""
    functions = examined.suite.functions
    by_text = all(
        isinstance(one, FunctionReward)
        and not {"completion_ids", "trainer_state"} & {p.name for p in parameters_of(one.function) or ()}
        for one in functions
    )
    if not examined.rescores or examined.failure is not None or not by_text or len(read.points) < 2:
        return
    scored = read.points[-1].scored
    now = examined.score(scored.samples, scored.rollouts)[0]
    then = scored.rewards
    scale = max((then.nan_to_num().max() - then.nan_to_num().min()).item(), 1e-9)
    changed = ((then - now).abs() > 0.02 * scale) | (then.isnan() != now.isnan())
    count = int(changed.any(1).sum())
    if examined.failure is not None or count <= len(then) / 10:
        return
    totals = [weighted_total(one.double(), read.weights.double()).nanmean().item() for one in (then, now)]
    yield Finding(
        "reward-order",
        "error",
        f"of {len(then)} completions of step {read.points[-1].step} {count} get other rewards now than the record has:"
        f" {totals[1]:.3g} on average instead of {totals[0]:.3g}.",
        "Find what the functions depend on besides the completion and its row: earlier calls, time, a file or a service"
        " that has changed, chance. Where code was changed since the run, the record shows the old one.",
        "They were called again, with the rows of the record.",
    )


def examined_again(read: "PastRun", trainer: Any, seconds: float, summary: dict[str, Any]) -> ExaminedRun:
    """The run with the completions on record, where their tokens are there; else with new samples."""
    base = read.batch() if read.tokens else None
    parts, place = parts_of_record(read.described), str(read.run)
    examined = ExaminedRun(trainer, trainer.train_dataset, seconds, summary, base, place=place)
    with suppress(Exception):  # files of an evaluation that are gone, or a user's function
        renamed = (parts.get("columns"), parts.get("system_prompt"))
        examined.evaluations = sets_of(load_evaluations(parts.get("eval_dataset"), *renamed))
    cuts = any(name in read.settings for name in ("top_k", "top_p", "min_p", "repetition_penalty"))
    if read.tokens and not (cuts and read.traits.reports_after_cut):  # else scores are of another distribution
        examined.others = read.load(read.rollout_batches[-1]).rollouts if len(read.rollout_batches) > 1 else []
        examined.own_engine = not read.traits.shares_policy
    return examined


def rebuilt(described: dict[str, Any], read: "PastRun") -> Any:
    """The run's trainer, as it was before its first step; None where a part has no name, or is gone."""
    parts = parts_of_record(described)
    tokenizer, unnamed, script = parts.pop("tokenizer", None), parts.pop("unnamed", []), parts.pop("script", None)
    if None in parts.get("reward_funcs", ()) or None in parts.get("tools", ()):
        unnamed = [*unnamed, "reward_funcs" if None in parts.get("reward_funcs", ()) else "tools"]
    if unnamed:
        read.problem = f"{', '.join(unnamed)}: no function or class at the top level of a file"
        return None
    if not parts.get("model") or not Path(parts["model"]).is_dir():
        read.problem = f"there is no folder {parts['model']!r}" if parts.get("model") else "its model has no name"
        return None
    kept = {name: value for name, value in read.settings.items() if not name.startswith(ELSEWHERE)}
    kept |= {name: value for name, value in parts.items() if name not in ("eval_dataset", "agent")}
    if described["processes"] > 1 and "generation_batch_size" not in kept:
        kept["per_device_train_batch_size"] = described["processes"] * kept.get("per_device_train_batch_size", 8)
    if kept.get("engine_dtype") == "auto":  # what was measured then
        kept["engine_dtype"] = described["engine"].get("rounded_to")
    further: dict[str, Any] = {}
    try:
        with quiet(), script_of_run(script), tempfile.TemporaryDirectory(prefix="covey-doctor-") as place:
            if (own := own_tokenizer(tokenizer or str(parts["model"]), described)) is not None:
                further["processing_class"] = own
            if "dataset" not in parts:
                further["train_dataset"] = datasets.Dataset.from_list(list(read_data(read.folder).values()))
            again = load_run({**kept, "output_dir": place, "report_to": "none", "record": "off"})
            trainer = build_trainer(again, **further)
    except Exception as error:  # the code of a run that is over may raise anything
        read.problem = f"{type(error).__name__}: {error}"
        return None
    if list(trainer.rewards.names) != read.names:
        read.problem = f"its rewards are {', '.join(trainer.rewards.names)} now, and were {', '.join(read.names)}"
        trainer.rollouts.close()
        return None
    return trainer


def own_tokenizer(place: str, described: dict[str, Any]) -> Any:
    """The tokenizer of a folder with the chat template that the run had.

    None for a folder without one, or with a processor of images: the trainer loads these.
    """
    if not any(
        (Path(place) / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ):
        return None
    if (Path(place) / "preprocessor_config.json").exists() or (Path(place) / "processor_config.json").exists():
        return None
    tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
    if "chat_template" in described and tokenizer.chat_template != described["chat_template"]:
        tokenizer.chat_template = described["chat_template"]
    return tokenizer


class PastRun:
    """The record of a run, read rank by rank, by whatever columns it has."""

    def __init__(self, run: Path, described: dict[str, Any]):
        self.run, self.settings, self.problem = run, settings_of(described), ""
        self.described = described
        self.folder = run / FOLDER
        self.by_number: dict[int, list[Path]] = {}
        for path in all_files(self.folder):
            self.by_number.setdefault(number_of(path), []).append(path)
        self.rollout_batches = sorted(n for n, paths in self.by_number.items() if all(map(count_rows, paths)))
        if not self.rollout_batches:
            raise ValueError(f"{str(run)!r} has a record without rollout batches: the run ended before its first step.")
        self.traits = EngineTraits(**described["engine"])
        first = self._rows(self.rollout_batches[0])
        self.names = [name.removeprefix(REWARD) for name in first[0] if name.startswith(REWARD)]
        self.abstains = self.names == [no_reward.__name__]
        self.tokens = "token_ids" in first[0] and not any(row["images"] for row in first)
        self.config = config_of(parts_of_record(described)["method"])
        self.size = int(self.args.num_generations or 8)
        if len(first) % self.size:
            self.size = Counter(Counter(row["row"] for row in first).values()).most_common(1)[0][0]
        weights = self.settings.get("reward_weights")
        known = weights if weights and len(weights) == len(self.names) else [1.0] * len(self.names)
        self.weights = torch.tensor(known, dtype=torch.float64)
        self.metrics = read_metrics(self.folder)

    @cached_property
    def args(self) -> Any:
        """Settings by name, those that the record does not name as they are by default."""
        defaults = {one.name: one.default for one in fields(self.config)}  # a config is not made: it would set up torch
        own = {**defaults, **self.settings, "output_dir": str(self.run), "method": self.config.method}
        return SimpleNamespace(**own, resolved_mismatch_mode="token_mask")

    def _rows(self, number: int) -> list[dict[str, Any]]:
        """Rollouts of all processes; none where a file cannot be read."""
        try:
            return [row for path in self.by_number[number] for row in read_rows(path)]
        except (OSError, ValueError):  # a disk that was full; arrow's errors are of these types
            return []

    @property
    def data(self) -> dict[int, dict[str, Any]]:
        """Rows of the dataset that are on record, by their number, of the files that can be read."""
        found: dict[int, dict[str, Any]] = {}
        for number in self.rollout_batches:
            found |= {row["row"]: row["data"] for row in self._rows(number)}
            if len(found) >= MOST_ROWS:
                break
        return dict(sorted(found.items()))

    def load(self, number: int) -> RolloutBatch:
        """Rollouts of a batch, in whole groups; without tokens where the record has none."""
        rows = self._rows(number)
        rows = rows[: len(rows) // self.size * self.size]
        return as_scored(rows, self.names, [(rollout_of if self.tokens else _without_tokens)(row) for row in rows])

    def batch(self) -> SampleBatch:
        """The first rollout batch; further ones where it has few prompts."""
        loaded: list[RolloutBatch] = []
        for number in self.rollout_batches[:FIRST]:
            if sum(len(one.rollouts) for one in loaded) < 24:
                loaded.append(self.load(number))
        return self.together(loaded)

    def together(self, loaded: Sequence[RolloutBatch]) -> SampleBatch:
        rollouts = [rollout for one in loaded for rollout in one.rollouts]
        samples = [sample for one in loaded for sample in one.samples]
        limit = int(self.args.max_completion_length or 512)
        given = torch.cat([one.rewards for one in loaded])
        return SampleBatch(samples, rollouts, given, self.weights, self.size, limit, fresh=len(loaded[0].rollouts))

    @cached_property
    def points(self) -> list["course.Point"]:
        """Some rollout batches, from the first to the last, as points of curves."""
        count = len(self.rollout_batches)
        taken = sorted({self.rollout_batches[n * (count - 1) // (course.MOST - 1)] for n in range(course.MOST)})
        return [one for number in taken if (one := self._point(number)) is not None]

    def _point(self, number: int) -> "course.Point | None":
        rows = self._rows(number)
        if not (rows := rows[: len(rows) // self.size * self.size]):
            return None
        scored = as_scored(rows, self.names, [_without_tokens(row) for row in rows])
        totals = weighted_total(scored.rewards.double(), self.weights.double())
        step = rows[0]["step"]
        logged = next((line["entropy"] for line in self.metrics if line["step"] >= step and "entropy" in line), None)
        entropy = _entropy(rows)
        norms = [line["grad_norm"] for line in self.metrics if line["step"] == step and "grad_norm" in line]
        return course.Point(
            number, step, totals.view(-1, self.size), scored, logged if entropy is None else entropy, *norms[:1]
        )

    @property
    def has_fallen(self) -> bool:
        """True if the reward fell from the first batch to the last third by more than chance, or few are on record.

        The first batch was sampled before any update.
        """
        return len(self.points) < course.LEAST or course.fell(self.points[:1], course.thirds(self.points)[1])

    @property
    def has_learned(self) -> bool:
        """True if the reward rose from the first to the last third by more than chance and a tenth of its range."""
        return course.rose(self.points)


def _without_tokens(row: dict[str, Any]) -> Rollout:
    ids = [0] * row["length"]
    return Rollout([0], ids, [True] * len(ids), None, row["completion"], FinishReason(row["finish"]), row["group"])


def _entropy(rows: Sequence[dict[str, Any]]) -> float | None:
    """Mean entropy of sampled tokens, by the engine or by their log-probs; None where the record has neither."""
    found = []
    for row in rows:
        values = row.get("entropies") or row.get("logprobs") or ()
        pairs = zip(values, row.get("sampled") or (), strict=False)
        found += [abs(value) for value, sampled in pairs if sampled and value is not None]
    return fmean(found) if found else None


def alone(read: PastRun, summary: dict[str, Any]) -> Iterator[Finding]:
    """Findings from what is on record, without experiments."""
    loaded = [one for number in read.rollout_batches[:FIRST] if (one := read.load(number)).rollouts]
    if not loaded:
        return
    base = read.together(list(islice(loaded, FIRST)))
    suite = SimpleNamespace(names=read.names, abstains=read.abstains)
    rows, parts = read.data, parts_of_record(read.described)
    played = any(parts.get(name) for name in ("environment_factory", "rollout_func", "agent", "unnamed"))
    run: Any = SimpleNamespace(base=base, args=read.args, suite=suite, group=read.size)
    run.taken, run.numbers, run.rescores = [*rows.values()], [*rows], not played
    summary.update(reward_values.summary_of(run))
    errors = sum(one.finish is FinishReason.ERROR for one in base.rollouts)
    missing = int(base.unscored.sum()) - errors
    if read.abstains:
        summary.setdefault("not_examined", {}).update(dict.fromkeys(OF_REWARDS, "taught"))
    elif missing > len(base.present) / 2:
        evidence = f"no function gave a reward for {missing} of {len(base.present)} completions."
        yield Finding("reward-failing", "error", evidence, "Let one return a number for every row.")
    elif not base.spread.any() and not any(point.signal for point in read.points):
        value = f"{base.known.max().item():g}" if len(base.known) else "none"
        yield Finding(
            "signal-sparse",
            "error",
            f"all of {len(base.known)} completions of {base.prompts} prompts get equal rewards in their group (at most"
            f" {value}), {base.cut:.0%} are cut and {errors} failed.",
            "Read the completions (`covey view`), and try the reward function on them (`covey rewards test --run`);"
            " easier prompts, or a reward that grades parts of an answer, give a signal.",
            f"All {len(read.points)} rollout batches that were read are so.",
        )
    for check in (reward_values.scale, reward_values.signal) if not read.abstains else ():
        yield from check(run)
    for check in (data.empty, data.contradicting, data.repeated, data.answer_in_prompt):
        yield from check(run)
