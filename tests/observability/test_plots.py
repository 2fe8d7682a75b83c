"""The picture of the curves, and the order and the meanings of metrics."""

import pytest
from matplotlib.figure import Figure

from covey.observability.metric_docs import meaning, meanings
from covey.observability.page.runs import meanings_of
from covey.observability.plots import PHASES_PANEL, _draw_panel, _panels, drawn_panels, plot_curves, series, smooth

HISTORY = [
    {
        "step": step,
        "loss": 0.1,
        "reward": step / 10,
        "reward_std": 0.2,
        "phase/generate": 1.0,
        "phase/train": 2.0,
        "rewards/a/mean": 0.1,
        "rewards/b/mean": 0.2,
        "entropy": float("nan"),
    }
    for step in range(1, 41)
]


@pytest.mark.slow
def test_curves_are_a_png(tmp_path):
    path = plot_curves(HISTORY, tmp_path / "new" / "curves.png", title="A run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_one_log_is_enough_for_a_picture(tmp_path):
    assert plot_curves([{"step": 1, "reward": 0.5}], tmp_path / "one.png").exists()


def test_nothing_to_draw_is_no_picture(tmp_path):
    assert plot_curves([{"step": 1, "mine": 2.0}], tmp_path / "none.png") is None


def test_a_series_leaves_out_what_is_missing_or_undefined():
    logs = [{"step": 1, "kl": 0.5}, {"step": 2}, {"step": 3, "kl": float("nan")}, {"step": 4, "kl": 1.0}]
    assert series(logs, "kl") == ([1.0, 4.0], [0.5, 1.0])


def test_lengths_have_a_gap_where_no_completion_ended():
    name, cut = "completions/mean_terminated_length", "completions/clipped_ratio"
    logs = [{"step": 1, name: 3.0, cut: 0.5}, {"step": 2, name: 0.0, cut: 1.0}, {"step": 3, name: 0.0, cut: 0.5}]
    assert series(logs, name) == ([1.0, 3.0], [3.0, 0.0])  # in the third those that ended were empty


def test_smoothing_keeps_ends_and_straight_lines():
    assert smooth([0.0, 1.0, 2.0, 3.0, 4.0], 3) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert smooth([0.0, 3.0, 0.0], 3) == [0.0, 1.0, 0.0]


def test_a_long_run_has_no_more_bars_and_the_same_seconds():
    logs = [{"step": 2.0 * number, "phase/generate": float(number % 7)} for number in range(1, 1002)]
    _draw_panel(axis := Figure().add_subplot(), logs, PHASES_PANEL)
    bars = axis.patches
    assert len(bars) == 167 and bars[-1].get_x() + bars[-1].get_width() == 2002  # 1001 logs / 6 in each
    area = sum(bar.get_height() * bar.get_width() for bar in bars)
    assert area == pytest.approx(sum(log["phase/generate"] for log in logs))


def test_meanings_know_families_and_evaluations():
    assert meaning("eval_reward") == meanings()["reward"]
    assert meaning("phase/generate") == meanings()["phase/{name}"]
    assert meaning("my_metric") is None


def test_named_evaluation_sets_have_a_curve_each():
    history = [*HISTORY, {"step": 40, "eval_easy_reward": 0.5, "eval_easy_loss": 0.1, "kl": 0.0}]
    assert _panels(history)[0].curves == {"reward": "training", "eval_easy_reward": "evaluation easy"}


def test_metrics_are_explained_in_the_order_of_the_docs():
    """Evaluations stand behind training, own metrics last; of two spellings of a metric one is shown."""
    evaluated = [{f"eval_{name}{metric}": 1.0 for metric in ("reward", "runtime")} for name in ("", "easy_")]
    line = {**HISTORY[0], "step": 1, "time": 5.0, "mine": 2.0, "reward/a/mean": 0.1}
    found = dict(meanings_of([line, *evaluated, {"step": 2, "event": "end"}]))
    assert [*found][:3] == ["reward", "reward_std", "rewards/a/mean"] and "reward/a/mean" not in found
    assert [*found].index("mine") < [*found].index("eval_reward") and not {"step", "time", "event"} & found.keys()
    assert found["rewards/a/mean"] == meanings()["rewards/{name}/mean"] and found["mine"] == ""
    assert found["eval_reward"] == found["eval_easy_reward"] == meanings()["reward"]


def test_panels_of_zeros_and_rounding_are_left_out():
    """With one update per rollout batch nothing clips, and the loss is 0 but for rounding."""
    history = [
        {"step": step, "reward": 0.0, "loss": 1e-8, "clip_ratio/low_mean": 0.0, "grad_norm": 1.0} for step in (1, 2)
    ]
    assert [panel.title.split()[0] for panel in drawn_panels(history)] == ["Reward", "Gradient"]


@pytest.mark.slow
def test_titles_may_hold_dollars(tmp_path):
    assert plot_curves(HISTORY, tmp_path / "a.png", "a$\\frac$").exists()
