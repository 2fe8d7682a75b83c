"""Variants that play each other at a table: what they must have in common, and commands that concern them all."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from covey.core.findings import Finding
from covey.rollout.table import Table
from covey_tools.study.commands import Command

PLACES = {"environment_factory": "a class of games", "rollout_func": "a function of games"}
"""Arguments of trainers that may be a table, and what it then plays."""


class PartnerLost(ValueError):
    """A variant cannot continue, because one that it plays with has ended."""


def table_of(parts: Mapping[str, Any]) -> Table | None:
    """The table among arguments of trainers."""
    given = (parts.get(name) for name in PLACES)
    return next((one for one in given if isinstance(one, Table)), None)


def seated(parts: Mapping[str, Any], variant: str, rollouts_per_game: int) -> dict[str, Any]:
    """Arguments of one variant's trainer: its seat in the table's place, and opponents of the other roles alone."""
    table = table_of(parts)
    if table is None:
        return dict(parts)
    places = [name for name in PLACES if parts.get(name) is table]
    changed = {name: table.seat(variant, rollouts_per_game) for name in places}
    own = table.roles_of(variant)
    others = {role: seat for role, seat in (parts.get("eval_seats") or {}).items() if role not in own}
    return {**parts, **changed, **({"eval_seats": others} if parts.get("eval_seats") else {})}


def check_table(
    table: Table, parts: Mapping[str, Any], players: Mapping[str, Any], evaluates: bool
) -> Iterator[Finding]:
    """Errors of a table of variants, whose configs are `players`; `evaluates` if the study compares variants."""
    for place, plays in PLACES.items():
        if parts.get(place) is table and table.is_game != (place == "environment_factory"):
            other = next(name for name in PLACES if name != place)
            evidence = f"`{place}` is a table of {PLACES[other]}, and {plays} belongs there."
            yield Finding.error("study-table", evidence, f"Give it as `{other}`.")
    names = ", ".join(map(repr, table.variants))
    missing = [name for name in table.variants if name not in players]
    others = [name for name in players if name not in table.variants]
    if missing or others:
        wrong = f"there is no variant {missing[0]!r}" if missing else f"the variant {others[0]!r} plays no role"
        evidence = f"{wrong}: the table seats {names}, and the variants are {', '.join(map(repr, players))}."
        yield Finding.error("study-table", evidence, "Name each variant at the table, and no other one.")
        return
    if taken := [role for role in parts.get("seats") or {} if role in table.players]:
        evidence = f"`seats` gives an opponent the role {taken[0]!r}, which {table.players[taken[0]]!r} plays."
        yield Finding.error("study-table", evidence, "Leave one of the two out.")
    evaluated = [role for role in parts.get("eval_seats") or {} if role in table.players]
    if evaluated and not (table.is_game and len(evaluated) == len(table.players)):
        yield Finding.error(
            "study-table",
            f"`eval_seats` has opponents for {', '.join(map(repr, evaluated))}, and the table's roles are"
            f" {', '.join(map(repr, table.players))}. A variant plays its own role in evaluations, too, against the"
            " opponents of all others.",
            "With a class of games, give an opponent for each role; else leave `eval_seats` out.",
        )
    yield from _check_pace(players, evaluates)


def _check_pace(players: Mapping[str, Any], evaluates: bool) -> Iterator[Finding]:
    """Errors of variants that would not play the same games at the same time."""
    found: dict[str, dict[str, Any]] = {}
    for name, args in players.items():
        algebra = args.algebra()
        games = algebra.num_generations // args.rollouts_per_game
        found[name] = {
            "games of each prompt (num_generations / rollouts_per_game)": games,
            "prompts of a rollout batch": algebra.prompts_per_rollout_batch,
            "updates of a rollout batch": algebra.updates_per_rollout_batch,
            "max_steps": args.max_steps,
            "num_train_epochs": args.num_train_epochs,
            "data_seed": args.resolved_data_seed,
            "shuffle_dataset": bool(args.shuffle_dataset),
        }
        if evaluates:
            found[name]["rollouts_per_game (variants are compared by equal numbers)"] = args.rollouts_per_game
    (first, expected), *rest = found.items()
    for name, own in rest:
        for what, value in own.items():
            if value != expected[what]:
                evidence = f"{what}: {expected[what]} of {first!r} and {value} of {name!r}, who play each other."
                yield Finding.error("study-table", evidence, "Set it to the same for all players of a table.")
    for name, args in players.items():
        chosen = {"dynamic_sample": False, "gates": None, "prompt_sampler": "uniform"}
        for setting, usual in chosen.items():
            if (value := getattr(args, setting)) != usual and value:
                yield Finding.error(
                    "study-table",
                    f"{setting}={value!r} of {name!r} selects prompts by its own rewards, and all players of a table"
                    " play the same prompts.",
                    f"Leave {setting} out.",
                )


def for_all_players(table: Table | None, command: Command) -> list[Command]:
    """The commands that follow from one: players stop and resume together."""
    if table is None or command.kind not in ("stop", "resume"):
        return [command]
    return [
        replace(command, name=name, changes=command.changes if name == command.name else {}) for name in table.variants
    ]
