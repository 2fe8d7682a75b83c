"""Curves of several runs in one panel of a picture: mean over runs, and a band from the lowest to the highest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Curve = tuple[Sequence[float], Sequence[float]]  # x and y


def draw_bands(axes: Any, curves: Mapping[str, Sequence[Curve]]) -> None:
    """A line and a band for each name, over the length of its shortest curve; the legend has the number of runs."""
    for number, (name, runs) in enumerate(curves.items()):
        length = min(len(x) for x, _ in runs)
        values = np.array([y[:length] for _, y in runs])
        x = runs[0][0][:length]
        axes.fill_between(x, values.min(0), values.max(0), color=f"C{number}", alpha=0.15, lw=0)
        axes.plot(x, values.mean(0), color=f"C{number}", linewidth=1.6, label=f"{name} ({len(runs)})")
    axes.grid(alpha=0.3)
