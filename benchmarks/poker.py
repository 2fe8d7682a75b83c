"""Kuhn poker (1950) exactly: payoffs, the value of a policy, and what best replies to it win.

Three cards, jack < queen < king, one for each of two seats; each puts 1 into the pot. The first seat passes or bets 1.
After a pass the second seat passes (the higher card wins 1) or bets, and the first one folds or calls; after a bet the
second one folds or calls.

A policy is 12 probabilities of a bet or a call: of four decisions, three cards each. In every equilibrium the first
seat wins -1/18. Values are exact where the probabilities are fractions.
"""

import itertools
from collections.abc import Sequence
from typing import Any

CARDS = "JQK"
DEALS = list(itertools.permutations(range(3), 2))
FIRST, CALLS, AFTER_PASS, AFTER_BET = range(0, 3), range(3, 6), range(6, 9), range(9, 12)
"""Decisions by card (jack, queen, king): the first seat bets, it calls, the second seat bets after a pass, it calls."""
VALUE = -1 / 18  # of every equilibrium, for the first seat
EVEN = [0.5] * 6  # of a seat that tosses a coin at each decision


def winnings(cards: tuple[int, int], opens: bool, calls: bool, replies: bool) -> int:
    """Chips of the first seat: it `opens` with a bet, `calls` a bet after its pass; the second one `replies` with one.

    Example:
        >>> winnings((2, 0), opens=True, calls=False, replies=True)
        2
    """
    higher = 1 if cards[0] > cards[1] else -1
    if opens:
        return 2 * higher if replies else 1
    if replies:
        return 2 * higher if calls else -1
    return higher


def value_of(policy: Sequence[Any]) -> Any:
    """Expected payoff of the first seat."""
    total = 0
    for one, two in DEALS:
        for opens, calls, replies in itertools.product((False, True), repeat=3):
            answer = policy[(AFTER_BET if opens else AFTER_PASS)[two]]
            chance = _chance(policy[FIRST[one]], opens) * _chance(policy[CALLS[one]], calls) * _chance(answer, replies)
            total += chance * winnings((one, two), opens, calls, replies)
    return total / len(DEALS)


def _chance(probability: Any, happens: bool) -> Any:
    return probability if happens else 1 - probability


def best_replies(policy: Sequence[Any]) -> tuple[Any, Any]:
    """Payoff of the first seat if it replies best to the second, and if the second replies best to it."""
    pure = list(itertools.product((0, 1), repeat=6))
    first = max(value_of([*reply, *policy[6:]]) for reply in pure)
    second = min(value_of([*policy[:6], *reply]) for reply in pure)
    return first, second


def nash_conv(policy: Sequence[Any]) -> Any:
    """Chips that best replies of both seats win against the policy together: 0 at an equilibrium."""
    first, second = best_replies(policy)
    return first - second


def against_even(policy: Sequence[Any]) -> Any:
    """Mean chips of both seats against opponents who toss a coin at each decision."""
    return (value_of([*policy[:6], *EVEN]) - value_of([*EVEN, *policy[6:]])) / 2
