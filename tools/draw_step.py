"""Draw docs/step.svg, the picture of a training step in docs/architecture.md.

Usage: python tools/draw_step.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROLLOUT, SCORE, UPDATE, TEXT = "#dbe9f6", "#e3f1dd", "#fbe5d0", "#222222"
WIDTH, HEIGHT = 2.15, 1.0

STAGES = [
    (0, 1, ROLLOUT, "sync weights", "when the policy\nhas changed"),
    (1, 1, ROLLOUT, "sample", "groups of completions,\ntools, environments"),
    (2, 1, ROLLOUT, "reward", "functions, models;\nNone = no reward"),
    (3, 1, ROLLOUT, "select", "groups with signal\n(dynamic sampling)"),
    (3, 0, SCORE, "score", "old and reference\nlog-probs, if needed"),
    (2, 0, SCORE, "assign credit", "advantages and\ntoken weights"),
    (1, 0, UPDATE, "pack", "micro-batches\nof equal tokens"),
    (0, 0, UPDATE, "update", "loss, gradients,\noptimizer step"),
]
"""Column, row, colour, name and explanation, in the order in which they run."""


def draw(file: Path) -> None:
    plt.rcParams |= {"svg.hashsalt": "covey", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(9.2, 3.3))
    centers = []
    for column, row, color, name, text in STAGES:
        x, y = column * 2.75, row * 1.65
        axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, "round,pad=0.06", facecolor=color, edgecolor="#777777"))
        axes.text(x + WIDTH / 2, y + 0.82, name, ha="center", va="center", weight="bold", color=TEXT, fontsize=11)
        axes.text(x + WIDTH / 2, y + 0.33, text, ha="center", va="center", color=TEXT, fontsize=8.5)
        centers.append((x, y))
    for (x, y), (to_x, to_y) in zip(centers, [*centers[1:], centers[0]], strict=True):
        if y == to_y:
            side = WIDTH + 0.08 if to_x > x else -0.08
            begin, end = (x + side, y + HEIGHT / 2), (to_x + (-0.08 if to_x > x else WIDTH + 0.08), y + HEIGHT / 2)
        else:
            up = to_y > y
            begin = (x + WIDTH / 2, y + (HEIGHT + 0.08 if up else -0.08))
            end = (to_x + WIDTH / 2, to_y + (-0.08 if up else HEIGHT + 0.08))
        axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=13, color="#555555"))
    labels = (("rollout phase", 2.9, "#2f6ea5"), ("update phase", -0.38, "#b36a21"))
    for label, y, color in labels:
        axes.text(4.125 + WIDTH / 2, y, label, ha="center", color=color, style="italic", fontsize=10)
    axes.set_xlim(-0.2, 10.6)
    axes.set_ylim(-0.5, 3.1)
    axes.axis("off")
    figure.savefig(
        file, bbox_inches="tight", metadata={"Date": None} if file.suffix == ".svg" else None, facecolor="white"
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1] / "docs" / "step.svg")
