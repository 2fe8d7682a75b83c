"""Validation of rollouts that a user's code has made, so that they can be trained on.

Their values may be anything: lists that are changed later, objects instead of text, NaN. `RolloutValidator.checked`
makes a copy with plain values or raises. It runs the code of these values (`__str__`, `__float__`), so call it under
the deadline of the user's code.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from covey.core.records import FinishReason, Message, Rollout

MAX_LOGPROB = 1e-3
"""A log-prob is at most 0, up to rounding."""


class RolloutError(ValueError):
    """A user's function, environment or tools gave no rollouts that can be trained on."""


@dataclass(frozen=True)
class RolloutValidator:
    """Limits of the tokens of a rollout."""

    vocabulary: int
    context: int | None

    def checked(self, rollout: Rollout) -> Rollout:
        """A copy of the rollout with plain values; those of `extras` are shared."""
        try:
            own = _plain_rollout(rollout)
        except (TypeError, ValueError, OverflowError) as error:
            raise RolloutError(f"a rollout is not what it should be: {error}.") from error
        self._check(own)
        return own

    def _check(self, rollout: Rollout) -> None:
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        wrong = next((one for one in ids if type(one) is not int or not 0 <= one < self.vocabulary), None)
        if wrong is not None:
            raise RolloutError(f"token {wrong!r} of a rollout is no token of the model, which has {self.vocabulary}.")
        if not rollout.prompt_ids:
            raise RolloutError("a rollout has an empty prompt; its prompt_ids need one token at least.")
        if self.context is not None and len(ids) > self.context:
            raise RolloutError(f"a rollout of {len(ids)} tokens exceeds the model's context of {self.context}.")
        reported = [rollout.logprobs, rollout.entropies, rollout.versions]
        if any(len(one) != len(rollout.completion_ids) for one in (rollout.sampled, *reported) if one is not None):
            raise RolloutError("a rollout's sampled, logprobs, entropies and versions need one value a token.")
        if any(not math.isfinite(one) for one in (*(rollout.logprobs or ()), *(rollout.entropies or ()))):
            raise RolloutError("a rollout has log-probs that are not finite; leave `logprobs` None if there are none.")
        most = max(rollout.logprobs or (), default=0.0)
        if most > MAX_LOGPROB:
            raise RolloutError(f"a rollout has a log-prob of {most:g}, and probabilities are at most 1.")


def _plain_rollout(rollout: Rollout) -> Rollout:
    finish = FinishReason(rollout.finish)
    error = None if rollout.error is None else _text(rollout.error)
    return replace(
        rollout,
        prompt_ids=list(rollout.prompt_ids),
        completion_ids=list(rollout.completion_ids),
        sampled=[bool(one) for one in rollout.sampled],
        logprobs=_each(float, rollout.logprobs),
        completion=_text_or_messages(rollout.completion, "completion"),
        finish=finish,
        entropies=_each(float, rollout.entropies),
        media=tuple(rollout.media),
        extras={_text(name): value for name, value in rollout.extras.items()},
        reused=int(rollout.reused),
        versions=_each(int, rollout.versions),
        turn_ends=[int(one) for one in rollout.turn_ends],
        calls={_text(outcome): int(count) for outcome, count in rollout.calls.items()},
        error=error or ("the rollout function returned it as failed" if finish is FinishReason.ERROR else None),
        tool_seconds=float(rollout.tool_seconds),
        prompt=None if rollout.prompt is None else _text_or_messages(rollout.prompt, "prompt"),
    )


def _each(kind: Callable[[Any], Any], values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else [kind(one) for one in values]


def _text_or_messages(value: Any, name: str) -> str | list[Message]:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list | tuple) and all(isinstance(one, dict) and "role" in one for one in value):
        return [_plain(one) for one in value]
    raise TypeError(f"its {name} must be text or a list of messages with a 'role', not {type(value).__name__}")


def _plain(value: Any) -> Any:
    """A copy with plain values, as chat templates and logs need; images stay, other objects become text."""
    if isinstance(value, dict):
        return {_text(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if type(value) in (int, float, bool, NoneType) or type(value).__module__.startswith("PIL."):
        return value
    return _text(value)


def _text(value: Any) -> str:
    """Text without lone surrogates, which tokenizers and files cannot hold."""
    return str.__str__(str(value)).encode("utf-8", "replace").decode()
