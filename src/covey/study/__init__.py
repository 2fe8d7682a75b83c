"""Public names of studies, as in `from covey.study import Study`; the code in `covey_tools` is imported on use."""

from importlib import import_module
from typing import Any

PLACES = {"Study": "study", "Halving": "plan", "Variant": "variants", "comparison": "report", "table": "report"}
PLACES |= {"Table": "tables"}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(PLACES)}")
    return getattr(import_module(f"covey_tools.study.{PLACES[name]}"), name)
