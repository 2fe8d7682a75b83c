"""Pictures and the report show what was logged, escaped and self-contained."""

import re
from html.parser import HTMLParser

import pytest

from covey.observability.metric_docs import meaning, meanings
from covey.observability.metrics import Timeline
from covey.observability.plots import PHASES_PANEL, _panels, draw_panel, drawn_panels, plot_curves, series, smooth
from covey.observability.report import Sample, write_report

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
    bars = draw_panel(logs, PHASES_PANEL).axes[0].patches
    assert len(bars) == 167 and bars[-1].get_x() + bars[-1].get_width() == 2002  # 1001 logs / 6 in each
    area = sum(bar.get_height() * bar.get_width() for bar in bars)
    assert area == pytest.approx(sum(log["phase/generate"] for log in logs))


class Page(HTMLParser):
    """Tags, links to other files, and whether every tag is closed."""

    VOID = ("meta", "img")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(tmp_path) -> str:
    timeline = Timeline()
    timeline.begin(0.0)
    timeline.phase("generate", 0.0, 1.0)
    nasty = "<script>alert('1')</script>"
    path = write_report(
        tmp_path / "summary.html",
        title=f"Run {nasty}",
        config={"model": nasty, "beta": 0.0},
        log_history=HISTORY,
        timeline=timeline,
        group=[{"prompt": nasty, "completion": "4", "reward": 1.0, "advantage": 0.5, "error": None}],
        provenance={"seed": 4711},
        before=[Sample("2+2?", nasty, 0.0, "stop"), Sample("3+3?", "")],
        after=[Sample("2+2?", "4", 1.0)],
        summary={"reward": 0.123456, "steps": 12000},
    )
    return path.read_text()


def test_the_report_stands_alone_and_escapes_everything(page):
    parsed = Page(page)
    assert parsed.open == [] and "script" not in parsed.tags
    assert parsed.links == []
    assert page.count("&lt;script&gt;") == 5  # title twice, setting, completion, prompt of the group


def test_figures_have_colours_of_the_page_and_reward_is_first(page):
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 5  # reward, rewards by function, loss, seconds by phase, lanes of the latest rollout batch
    assert "Reward (shaded" in drawings[0] and "Seconds per step" in drawings[-2]
    assert "var(--ink)" in drawings[0] and not re.search("#1f2933|#e4e7eb", drawings[0])
    assert "<text" in drawings[0]  # letters, not their outlines


def test_one_group_and_the_provenance_are_shown(page):
    assert "<th>reward</th><th>advantage</th><th>completion</th>" in page and "<td>0.5</td>" in page
    assert "<th>seed</th><td>4711</td>" in page


def test_the_report_pairs_samples_and_rounds_figures(page):
    assert page.count("2+2?") == 1 and page.count("3+3?") == 1
    assert "0.1235" in page and "12,000" in page and "(empty)" in page


def test_the_report_explains_its_metrics(page):
    row = re.search(r"<tr><th>rewards/a/mean</th>.*?</tr>", page).group()
    assert meanings()["rewards/{name}/mean"] in row
    assert "entropy</th>" not in page  # never had a value


def test_the_report_explains_sets_with_and_without_a_name(tmp_path):
    logs = [{"step": 1, **{f"eval_{name}{metric}": 1.0 for metric in ("reward", "runtime")}} for name in ("", "maths_")]
    page = write_report(tmp_path / "x.html", title="T", config={}, log_history=logs).read_text()
    rows = [re.search(rf"<tr><th>{name}</th>.*?</tr>", page).group() for name in ("eval_reward", "eval_maths_reward")]
    assert rows[0].partition("</th>")[2] == rows[1].partition("</th>")[2] and "<td></td>" not in rows[0]


def test_the_report_sets_calls_and_errors_of_a_conversation_off(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "<b>"}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "Error: argument 'a' must be of type integer"},
        {"role": "assistant", "content": "No idea."},
    ]
    path = write_report(tmp_path / "x.html", title="T", config={}, log_history=[], after=[Sample("2+2?", messages)])
    text = path.read_text()
    assert Page(text).open == []
    assert '<span class="call">  → add(a=&quot;&lt;b&gt;&quot;)</span>' in text
    assert '<span class="failure">  ✗ add: Error: argument' in text


def test_an_empty_run_still_makes_a_page(tmp_path):
    text = write_report(tmp_path / "x.html", title="Nothing", config={}, log_history=[]).read_text()
    assert Page(text).open == []


def test_meanings_know_families_and_evaluations():
    assert meaning("eval_reward") == meanings()["reward"]
    assert meaning("phase/generate") == meanings()["phase/{name}"]
    assert meaning("my_metric") is None


def test_named_evaluation_sets_have_a_curve_and_a_meaning_each(tmp_path):
    history = [*HISTORY, {"step": 40, "eval_easy_reward": 0.5, "eval_easy_loss": 0.1, "kl": 0.0}]
    panel = _panels(history)[0]
    assert panel.curves == {"reward": "training", "eval_easy_reward": "evaluation easy"}
    text = write_report(tmp_path / "x.html", title="T", config={}, log_history=history).read_text()
    assert meanings()["loss"][:20] in re.search(r"<tr><th>eval_easy_loss</th>.*?</tr>", text).group()
    places = [text.index(f"<th>{name}</th>") for name in ("reward", "rewards/a/mean", "loss", "eval_easy_reward")]
    assert places == sorted(places)  # in the order of docs/metrics.md, evaluations behind training
    assert "0 in all logs: kl." in text and "<th>kl</th>" not in text


def test_panels_of_zeros_and_rounding_are_left_out():
    """With one update per rollout batch nothing clips, and the loss is 0 but for rounding."""
    history = [
        {"step": step, "reward": 0.0, "loss": 1e-8, "clip_ratio/low_mean": 0.0, "grad_norm": 1.0} for step in (1, 2)
    ]
    assert [panel.title.split()[0] for panel in drawn_panels(history)] == ["Reward", "Gradient"]


def test_the_report_begins_with_advice_and_merges_spellings(tmp_path):
    history = [{"step": 1, "rewards/a/mean": 0.1, "reward/a/mean": 0.1, "phase/a": 1.0, "phase/b": 1.0}]
    text = write_report(
        tmp_path / "x.html", title="T", config={}, log_history=history, advice=["Mind <it>"]
    ).read_text()
    assert ">rewards/a/mean<" in text and ">reward/a/mean<" not in text
    assert text.count(meanings()["phase/{name}"]) == 1
    assert "Mind &lt;it&gt;" in text


def test_a_column_with_text_in_some_rows_is_none_of_numbers(tmp_path):
    rows = [{"prompt": "2+2=", "completion": "4", "reward": 1.0, "seen": seen} for seen in (None, "<script>")]
    page = write_report(tmp_path / "a.html", title="Run", config={}, log_history=[], group=rows).read_text()
    assert "<script>" not in page and "<th>reward</th>" in page


@pytest.mark.slow
def test_names_with_dollars_or_half_characters_are_written(tmp_path):
    name = "a$\\frac$ \udcff"
    page = write_report(tmp_path / "a.html", title="Run", config={"model": name}, log_history=HISTORY)
    assert r"a$\frac$ \udcff" in page.read_text()
    assert plot_curves(HISTORY, tmp_path / "a.png", "a$\\frac$").exists()


def test_a_page_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    def fills(path, content):
        path.open("wb").close()
        raise OSError("the disk is full")

    write_report(tmp_path / "a.html", title="First", config={}, log_history=[])
    monkeypatch.setattr("pathlib.Path.write_bytes", fills)
    with pytest.raises(OSError, match="full"):
        write_report(tmp_path / "a.html", title="Second", config={}, log_history=[])
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"] and "First" in (tmp_path / "a.html").read_text()
