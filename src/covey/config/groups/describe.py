"""Shorthands for declaring config fields: a default and one sentence of help."""

import dataclasses
from typing import Any


def described(default: Any, help: str) -> Any:
    """A dataclass field with its default and its only description (argparse treats `%` specially: write `%%`)."""
    return dataclasses.field(default=default, metadata={"help": help})


def redefault(owner: type, name: str, default: Any) -> Any:
    """Field `name` of `owner` with another default and the same description."""
    inherited = next(field for field in dataclasses.fields(owner) if field.name == name)
    return dataclasses.field(default=default, metadata=dict(inherited.metadata))
