"""The display shows what the logs hold, on a terminal and off it, and never stands in the way."""

import gc
import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from covey.observability.activity import Activity
from covey.observability.dashboard import (
    FIGURES,
    Board,
    Notebook,
    ProgressDisplay,
    duration,
    folded,
    phase_bar,
    sparkline,
)


def shown(renderable, width=100):
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A display driven as the trainer drives it."""

    def __init__(self, terminal: bool = False, step: int = 0, history=()):
        self.out = io.StringIO()
        self.clock = Clock()
        self.state = TrainerState(max_steps=10, global_step=step, is_world_process_zero=True, log_history=[*history])
        console = Console(file=self.out, force_terminal=terminal, width=100)
        self.display = ProgressDisplay(console, self.clock)
        args = SimpleNamespace(output_dir="runs/x")
        self.display.on_train_begin(args, self.state, TrainerControl())
        self.begin = len(self.out.getvalue())

    def step(self, seconds: float, **logs) -> None:
        self.clock.now += seconds
        self.state.global_step += 1
        self.display.on_step_end(None, self.state, TrainerControl())
        if logs:
            self.display.on_log(None, self.state, TrainerControl(), logs=logs)

    @property
    def lines(self) -> list[str]:
        return self.out.getvalue()[self.begin :].splitlines()


def test_without_a_terminal_a_log_is_one_plain_line():
    run = Run()
    logs = {"completions/mean_length": 12.0, "num_tokens": 300, "entropy": 1.5, "epoch": 0.1, "phase/train": 2.0}
    run.step(2.0, reward=0.25, **logs)
    assert run.lines == ["step  1/10  reward 0.250  length 12.0  entropy 1.500  tok/s 150  ETA 18s"]


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError("I/O operation on closed file.")])
def test_output_that_cannot_be_written_ends_no_run(monkeypatch, error):
    run = Run()
    monkeypatch.setattr(run.display.console.file, "write", lambda text: (_ for _ in ()).throw(error))
    run.step(1.0, reward=0.5)
    monkeypatch.undo()
    run.step(1.0, reward=0.75)
    assert [line.split()[:3] for line in run.lines[-1:]] == [["step", "2/10", "reward"]]


def test_a_long_line_is_not_wrapped():
    run = Run()
    run.step(1.0, **dict.fromkeys(("reward", "reward_std", "entropy", "kl", "loss", "grad_norm", "step_time"), 1.0))
    run.step(1.0, **{"reward": 1.0, "completions/mean_length": 1e6, "num_tokens": 10**9})
    assert len(run.lines) == 2
    assert "\x1b" not in run.out.getvalue()


def test_on_a_terminal_lines_break_between_figures():
    assert folded("eval step 1/2  reward 1.000  loss +0.0265", 32) == "eval step 1/2  reward 1.000\n  loss +0.0265"
    run = Run(terminal=True)
    run.display.on_log(None, run.state, TrainerControl(), logs={f"eval_{name}": 0.5 for name in FIGURES})
    plain = [line for line in run.lines if "\x1b" not in line]  # not of the board
    assert plain[-1].endswith("s/step 0.50") and max(map(len, plain)) <= 100


def test_names_that_only_a_script_logs_print_no_line():
    run = Run()
    run.step(1.0, reward=0.5)
    run.display.on_log(None, run.state, TrainerControl(), logs={"mine": 1.0, "test_reward": 2.0})
    assert len(run.lines) == 1


def test_tokens_per_second_are_those_since_the_last_log():
    run = Run()
    run.step(1.0, **{"num_tokens": 100, "phase/train": 1.0})
    run.step(2.0, **{"num_tokens": 500, "phase/generate": 1.5, "phase/train": 0.5})
    assert "tok/s 200" in run.lines[1]


def test_a_resumed_run_does_not_count_tokens_from_before():
    run = Run(step=5)
    run.step(1.0, **{"num_tokens": 10**6, "phase/train": 1.0})
    assert "tok/s" not in run.lines[0]
    assert "ETA 4s" in run.lines[0]


def test_a_resumed_run_goes_on_with_the_rewards_from_before():
    run = Run(step=2, history=[{"reward": 0.25, "step": 1}, {"reward": 0.5, "step": 2}, {"train_loss": 0.1, "step": 2}])
    run.step(1.0, reward=0.75)
    assert [*run.display.board.rewards] == [0.25, 0.5, 0.75]


def test_missing_and_undefined_metrics_are_left_out():
    run = Run()
    run.step(1.0, reward=math.nan, loss="odd")
    assert run.lines == ["step  1/10    ETA 9s"]


def test_evaluations_and_the_end_are_told():
    run = Run()
    run.step(1.0)
    run.display.on_log(None, run.state, TrainerControl(), logs={"eval_reward": 0.5, "eval_loss": 0.0, "epoch": 1.0})
    run.display.on_log(None, run.state, TrainerControl(), logs={"train_runtime": 75.0})
    assert run.lines == ["eval step  1/10  reward 0.500  loss 0.0000", "trained 1 step in 1m15s"]


def test_named_evaluation_sets_are_told_apart():
    run = Run(terminal=True)
    run.step(1.0)
    for name, reward in (("easy", 1.0), ("very_hard", 0.25)):
        logs = {f"eval_{name}_reward": reward, f"eval_{name}_loss": -0.00001, f"eval_{name}_rewards/x/mean": 1.0}
        run.display.on_log(None, run.state, TrainerControl(), logs=logs)
    assert {name: logs["reward"] for name, logs in run.display.board.evaluations.items()} == {
        "easy": 1.0,
        "very_hard": 0.25,
    }
    assert "eval easy step  1/10  reward 1.000  loss 0.0000" in run.out.getvalue()


def test_a_plain_display_prints_lines_on_a_terminal_too():
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, force_terminal=True), plain=True)
    state = TrainerState(max_steps=2, global_step=1, is_world_process_zero=True)
    display.on_train_begin(SimpleNamespace(output_dir="out"), state, TrainerControl())
    display.on_log(None, state, TrainerControl(), logs={"reward": 0.5})
    first, second = out.getvalue().splitlines()
    assert first == "training the model from step 1 to step 2, output: out"
    assert second.startswith("step 1/2  reward 0.500")


def test_other_processes_say_nothing():
    run = Run()
    run.state.is_world_process_zero = False
    run.step(1.0, reward=1.0)
    assert run.lines == []


def test_a_terminal_gets_bar_sparkline_and_phases():
    run = Run(terminal=True)
    run.step(1.0, **{"reward": 0.1, "phase/generate": 3.0, "phase/train": 1.0})
    run.step(1.0, **{"reward": 0.9, "phase/generate": 3.0, "phase/train": 1.0})
    run.display.on_train_end(None, run.state, TrainerControl())
    text = run.out.getvalue()
    assert "▁█" in text and "generate 75%" in text and "2/10" in text and "ETA 8s" in text


def test_the_display_stops_when_training_fails():
    run = Run(terminal=True)
    finalizer = run.display._stop
    del run.display
    gc.collect()
    assert not finalizer.alive
    assert run.out.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_logs_outside_training_do_not_need_a_beginning():
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out))
    display.on_log(None, TrainerState(is_world_process_zero=True), TrainerControl(), logs={"eval_reward": 0.5})
    assert "reward 0.500" in out.getvalue()


def test_a_sparkline_spans_its_own_range():
    assert sparkline([1.0, 2.0, math.nan, 1.0]) == "▁█ ▁"
    assert sparkline([3.0, 3.0]) == "▄▄"
    assert sparkline([]) == ""


def test_the_phase_bar_is_always_full():
    drawn = shown(phase_bar({"a": 1.0, "b": 1.0, "c": 1.0}))
    # 30 cells and the sign in the legend; signs differ where there are no colours
    assert [drawn.count(sign) for sign in "█▓▒"] == [11, 11, 11]
    assert "█ a 33%" in drawn


def test_updates_of_one_rollout_batch_add_up():
    run = Run()
    run.step(1.0, **{"reward": 0.5, "num_tokens": 100, "grad_norm": 1.0, "phase/generate": 3.0, "phase/train": 1.0})
    run.step(1.0, **{"num_tokens": 100, "grad_norm": 2.0, "phase/train": 1.0})
    assert run.lines[1] == "step  2/10  grad 2  ETA 8s"  # what is new
    assert run.display.board.logs["phase/generate"] == 3.0 and run.display.board.logs["phase/train"] == 2.0
    run.step(1.0, **{"reward": 0.7, "num_tokens": 300, "phase/generate": 3.0})
    assert run.lines[2].endswith("reward 0.700  tok/s 50  ETA 7s")  # 200 tokens in 1 + 3 seconds since the first log
    assert "phase/train" not in run.display.board.logs


def test_tokens_per_second_leave_out_evaluations_and_saves():
    run = Run()
    run.step(1.0, **{"num_tokens": 100, "phase/train": 1.0})
    run.step(9.0, **{"num_tokens": 300, "phase/evaluate": 3.0, "phase/train": 2.0})  # and 4 to save
    assert "tok/s 100" in run.lines[1]


def test_several_rewards_are_told_apart():
    run = Run()
    run.step(1.0, **{"reward": 1.2, "rewards/right/mean": 1.0, "reward/right/mean": 1.0, "entropy": 2.0})
    run.step(1.0, **{"reward": 1.2, "rewards/right/mean": 1.0, "rewards/brief/mean": 0.2, "entropy": 2.0})
    assert run.lines[0].startswith("step  1/10  reward 1.200  entropy")
    assert run.lines[1].startswith("step  2/10  reward 1.200  right 1.000  brief 0.200  entropy")


def test_small_rewards_are_not_shown_as_nothing():
    logs = {"reward": 2.5e-5, "reward_std": 0.0, "rewards/a/mean": -4e-6, "rewards/b/mean": 1.0}
    assert "reward 2.5e-05 a -4.0e-06 b 1.000 std 0.000" in " ".join(shown(Board(logs=logs)).split())


def test_labels_and_values_stay_together_on_a_narrow_screen():
    board = Board(logs=dict.fromkeys(FIGURES, -0.5) | {"phase/generate": 1.0, "phase/train": 2.0})
    lines = [line.rstrip() for line in shown(board, width=40).splitlines()]
    assert all(len(line) <= 40 for line in lines)
    for label, form in FIGURES.values():
        assert any(f"{label} {form.format(-0.5)}" in line for line in lines), label


def test_durations_are_short():
    assert [duration(s) for s in (0.4, 59.6, 3600, 90061)] == ["0s", "1m00s", "1h00m", "25h01m"]


def test_an_evaluation_without_training_names_no_step():
    run = Run()
    state = TrainerState(global_step=0, max_steps=0, is_world_process_zero=True, is_local_process_zero=True)
    run.display.on_log(None, state, TrainerControl(), logs={"eval_reward": 0.5})
    assert run.lines == ["eval  reward 0.500"]


def followed(terminal=False):
    run = Run(terminal)
    activity = Activity(run.clock)
    run.display.follow(activity)
    return run, activity


def test_the_part_of_a_step_that_is_done_is_shown():
    run, activity = followed()
    run.display.board.activity = activity
    activity.begin("generate")
    activity.count(32)
    activity.advance(12)
    run.clock.now += 65.0
    assert "sampling 12 of 32" in shown(run.display.board) and "1m05s" in shown(run.display.board)
    activity.begin("reward")
    activity.count(2, -1)
    activity.advance(1, "right")
    assert "rewards 0 of 2: right" in shown(run.display.board)
    activity.inside("evaluation held 2 of 4")
    activity.begin("generate")
    assert "evaluation held 2 of 4, sampling" in shown(run.display.board)


def test_off_a_terminal_a_long_silence_is_broken_ever_less_often():
    run, activity = followed()
    activity.begin("generate")
    run.display._beats.set()  # its thread asks too, by a clock of its own
    said = []
    for _ in range(100):
        run.clock.now += 1.0
        before = len(run.lines)
        run.display._beat()
        said += [run.clock.now] * (len(run.lines) - before)
    assert said == [20.0, 60.0]  # after 20 s, and 40 s later; the next would be 80 s later
    assert run.lines[-1].endswith("sampling (1m00s)")


def test_a_run_that_logs_often_enough_says_nothing_else():
    run, activity = followed()
    activity.begin("train")
    run.display._beats.set()
    for _ in range(10):
        run.step(15.0, reward=1.0)
        run.display._beat()
    assert len(run.lines) == 10


def test_an_evaluation_alone_is_shown_until_its_end():
    out = io.StringIO()
    display = ProgressDisplay(Console(file=out, force_terminal=True, width=100))
    activity = Activity()
    display.follow(activity)
    activity.begin("evaluate")
    assert display._stop is not None
    display.on_evaluate(None, None, None)
    assert display._stop is None


def test_a_notebook_has_one_output_with_the_rewards(monkeypatch):
    pages = []

    class Handle:
        def update(self, page):
            pages.append(page.data)

    shown_first = []
    monkeypatch.setattr("IPython.display.display", lambda page, display_id: shown_first.append(page.data) or Handle())
    run = Run()
    run.display.notebook = Notebook()
    run.step(1.0, reward=0.25, loss=0.0)
    run.step(1.0, reward=0.5, loss=0.0)
    run.display.on_train_end(None, run.state, TrainerControl())
    assert len(shown_first) == 1 and pages
    assert "<td>0.250</td>" in pages[-1] and "<td>0.500</td>" in pages[-1] and run.lines == []


def test_a_further_update_of_the_same_rollouts_repeats_nothing_of_them():
    run = Run()
    run.step(1.0, reward=0.25, loss=0.5, num_tokens=100, **{"completions/mean_length": 12.0})
    run.step(1.0, loss=0.25, num_tokens=100)
    assert "reward" in run.lines[0] and run.lines[1].split("  ")[2:-1] == ["loss +0.2500"]


def test_a_phase_keeps_its_sign():
    one, other = (shown(phase_bar(times)) for times in ({"train": 2.0, "reward": 1.0}, {"train": 1.0, "reward": 2.0}))
    assert all(one.count(sign) and other.count(sign) for sign in "▓▒")
    assert [line.split("train")[0][-2] for line in (one, other)] == ["▓", "▓"]
