"""Declaration of config fields: default, description and allowed values in one place."""

import dataclasses
import math
from typing import Any

from covey.config.messages import closest


@dataclasses.dataclass(frozen=True)
class Limits:
    """Allowed values of a field; None is always allowed where the field's type has it.

    Attributes:
        ge, gt, le, lt: bounds of a number; `lt=math.inf` asks for a finite one.
        choices: allowed words.
        advice: usual values, the end of the error message.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    advice: str = ""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value of field `name` outside of the limits.

        Raises:
            ValueError: the message names the allowed values.
        """
        if self.choices:
            if value not in self.choices:
                raise ValueError(
                    f"{name}={value!r} is not known; choose one of: {', '.join(self.choices)}."
                    f"{closest(value, self.choices)}"
                )
            return
        inside = (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )
        if not inside:  # NaN is never inside
            raise ValueError(f"{name}={value!r} is out of range: it must be {self}. {self.advice}".rstrip())

    def __str__(self) -> str:
        if self.ge is not None and self.le is not None:
            return f"between {self.ge} and {self.le}"
        lower = f"{self.ge} or more" if self.ge is not None else f"above {self.gt}"
        if self.le is not None:
            return f"{lower} and at most {self.le}"
        return f"{lower}, and finite" if self.lt == math.inf else lower


LIMITS: dict[dataclasses.Field, Limits] = {}
"""Limits of the fields that have some; not in their metadata, all of which `HfArgumentParser` hands to argparse."""


def described(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with its default, its only description and its limits, as keywords of `Limits`.

    argparse treats `%` in the description specially: write `%%`.
    """
    field = dataclasses.field(default=default, metadata={"help": help})
    if limits:
        LIMITS[field] = Limits(**limits)
    return field


def redefault(owner: type, name: str, default: Any) -> Any:
    """Field `name` of `owner` with another default, and the same description and limits."""
    inherited = next(field for field in dataclasses.fields(owner) if field.name == name)
    field = dataclasses.field(default=default, metadata=dict(inherited.metadata))
    if inherited in LIMITS:
        LIMITS[field] = LIMITS[inherited]
    return field
