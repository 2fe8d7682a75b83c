"""Samplers and gates of prompts as settings: what `prompt_sampler` and `gates` may be, for a run or for one source.

Their functions are in `covey.data.samplers` and `covey.data.gates`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from covey.config.messages import closest
from covey.core.findings import Finding
from covey.runtime.import_path import FORMS, is_reference

SAMPLERS = ("uniform", "difficulty")
SAMPLER_FORMS = ("pools", "order")
POOLS = '{"pools": {"hard": [0.25, 0.2], "normal": [0.75, 1.0], "easy": [null, 0.2]}}'
GATES = ("signal", "reward_range", "advantage_range", "max_truncated")
BY_ADVANTAGES = ("signal", "advantage_range")
BY_REWARDS = (*BY_ADVANTAGES, "reward_range")
BOUNDS = ("above", "below", "from", "to")


def chooses_by_reward(sampler: Any) -> bool:
    """True for a sampler that reads the rewards that prompts have earned."""
    return sampler != "uniform" and not (isinstance(sampler, Mapping) and "order" in sampler)


def gates_among(given: Any, names: Sequence[str]) -> list[str]:
    """The gates among `names` that a setting switches on."""
    gates = given if isinstance(given, Mapping) else {}
    return [name for name in names if gates.get(name, False) is not False]


def unfiltered(named: str) -> Finding:
    """Error of a setting that selects groups by their advantages, with compare='role_average'."""
    return Finding.error(
        "roles-unfiltered",
        f"{named} replaces groups whose advantages are all 0 or small, and with compare='role_average' hardly any"
        " advantage is: a reward is compared with a running mean.",
        "Leave one of the two out.",
    )


def check_sampler(given: Any, name: str = "prompt_sampler") -> Iterator[Finding]:
    """Errors of a sampler of prompts, of a run or of one source."""
    if callable(given) or given in SAMPLERS or (isinstance(given, str) and is_reference(given)):
        return
    if isinstance(given, str) or not isinstance(given, Mapping) or len(given) != 1:
        forms = f"choose one of: {', '.join(SAMPLERS)}; or give {POOLS}, {{'order': column}}, or a function as {FORMS}."
        yield Finding.error("setting-word", f"{name}={given!r} is not known; {forms}{closest(given, SAMPLERS)}")
        return
    ((form, value),) = given.items()
    if form not in SAMPLER_FORMS:
        known = f"{name} has {form!r}, and a sampler is one of: {', '.join((*SAMPLERS, *SAMPLER_FORMS))}."
        yield Finding.error("setting-word", f"{known}{closest(form, SAMPLER_FORMS)}")
    elif form == "order" and not isinstance(value, str):
        evidence = f"{name}={given!r}: `order` must be the name of a column, as in {{'order': 'level'}}."
        yield Finding.error("setting-type", evidence)
    elif form == "pools":
        yield from _check_pools(value, name)


def _check_pools(pools: Any, name: str) -> Iterator[Finding]:
    well_formed = isinstance(pools, Mapping) and bool(pools) and all(map(_is_pool, pools.values()))
    if not well_formed:
        yield Finding.error(
            "setting-type",
            f"{name}: pools={pools!r} must give each pool the largest mean reward of its prompts (null: no limit) and a"
            f" weight, as in {POOLS}.",
        )
        return
    tops = [math.inf if top is None else top for top, _ in pools.values()]
    if tops != sorted(set(tops)) or tops[-1] != math.inf:
        yield Finding.error(
            "setting-range",
            f"{name}: the largest mean rewards of pools must rise and end with null, and are {tops}.",
            "List the pools from hard to easy.",
        )
    if not all(0 < weight < math.inf for _, weight in pools.values()):
        weights = [weight for _, weight in pools.values()]
        yield Finding.error(
            "setting-range",
            f"{name}: the weights of pools are {weights}, and a pool of weight 0 would never be sampled.",
            "Give numbers above 0.",
        )


def _is_pool(pool: Any) -> bool:
    pair = isinstance(pool, list | tuple) and len(pool) == 2
    return pair and (pool[0] is None or _is_number(pool[0])) and _is_number(pool[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def check_gates(given: Any, name: str = "gates", *, stored: bool = False) -> Iterator[Finding]:
    """Errors of gates, of a run or of one source; a config is `stored` with its run, as text and in checkpoints."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        evidence = f"{name}={given!r} must give each gate its setting, as in {{'max_truncated': 0.5}}."
        yield Finding.error("setting-type", evidence)
        return
    for gate, setting in given.items():
        place = f"{name}: {gate}={setting!r}"
        if stored and callable(setting) and gate not in GATES:
            yield Finding.error(
                "setting-type",
                f"{place} is a function, and a config is stored with its run.",
                f"Write the function into a file and name it, as in {{{str(gate)!r}: 'gates.py:{gate}'}}.",
            )
        else:
            yield from _check_gate(gate, setting, place)


def _check_gate(gate: Any, setting: Any, place: str) -> Iterator[Finding]:
    if gate == "signal":
        if not isinstance(setting, bool):
            yield Finding.error("setting-type", f"{place} must be True or False.")
    elif gate == "reward_range":
        if not isinstance(setting, Mapping) or not setting or not all(map(_is_number, setting.values())):
            evidence = f"{place} must name bounds of the mean reward, as in {{'above': 0, 'below': 1}}."
            yield Finding.error("setting-type", evidence)
        elif unknown := [bound for bound in setting if bound not in BOUNDS]:
            known = f"{place} has {unknown[0]!r}; a bound is one of: {', '.join(BOUNDS)}."
            yield Finding.error("setting-word", f"{known}{closest(unknown[0], BOUNDS)}")
    elif gate == "advantage_range":
        pair = isinstance(setting, list | tuple) and len(setting) == 2 and all(map(_is_number, setting))
        if not pair or setting[0] > setting[1]:
            evidence = f"{place} must be the smallest and the largest advantage, as in [0, 0]."
            yield Finding.error("setting-range", evidence)
    elif gate == "max_truncated":
        if not _is_number(setting) or not 0 <= setting < 1:
            yield Finding.error("setting-range", f"{place} must be a share of completions, 0 or more and below 1.")
    elif not callable(setting) and not (isinstance(setting, str) and is_reference(setting)):
        known = f"{place}: there is no such gate; there are {', '.join(GATES)}, and functions as {FORMS}."
        yield Finding.error("setting-word", f"{known}{closest(gate, GATES)}")
