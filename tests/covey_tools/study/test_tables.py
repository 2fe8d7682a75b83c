"""Tables: two adapters that are trained against each other, and what they must have in common."""

import pytest
import torch

from covey.core.findings import CheckError
from covey.observability.record_files import FOLDER, files, read_rows
from covey.rollout.table import Table
from covey.rollout.user_functions import RolloutError
from tests.support import runs, tiny
from tests.support.studies import adapters, study
from tests.support.table_games import Recorded, duel, points

PLAYERS = {"first": "white", "second": "black"}
BOTH = {"white": {}, "black": {"learning_rate": 3e-2, "peft": {"r": 2}}}
SETTINGS = {"reward_funcs": points, "max_completion_length": 48, "settings": {"record": "tokens"}}


def met(folder, variants=BOTH, players=PLAYERS, parts=None, game=duel, place="rollout_func", **changes):
    table = Table(game, players)
    return study(folder, variants, parts={place: table, **(parts or {})}, **{**SETTINGS, **changes})


def rows_of(folder):
    return [row for path in files(folder / FOLDER) for row in read_rows(path)]


@pytest.mark.slow
def test_variants_play_each_other_and_each_is_trained_on_its_own_seat(tmp_path):
    done = met(tmp_path, max_steps=2).train()
    assert [one.status for one in done.values()] == ["finished", "finished"]
    white, black = rows_of(tmp_path / "white"), rows_of(tmp_path / "black")
    assert {row["role"] for row in white} == {"first"} and {row["role"] for row in black} == {"second"}
    assert [row["game"] for row in white[:4]] == [0, 1, 2, 3]
    for one, other in zip(white, black, strict=True):
        assert (one["row"], one["game"], one["reward/points"]) == (other["row"], other["game"], -other["reward/points"])
        assert one["prompt"] == f"first of {one['data']['prompt']}: "
    heard = [row["completion"] for row in white if "[" in row["completion"]]
    assert heard and len({row["reward/points"] for row in white}) > 1


@pytest.mark.slow
def test_each_is_the_run_in_which_the_other_repeats_its_recorded_moves(tmp_path):
    """Bit for bit: the partner's learning is no part of one's own but through what it says."""
    met(tmp_path / "both", max_steps=3).train()
    end = tiny.tokenizer().eos_token_id
    for name, role, other, seat in (("white", "first", "black", "second"), ("black", "second", "white", "first")):
        seats = {seat: Recorded(tmp_path / "both" / other, end)}
        alone = {name: BOTH[name]}
        met(tmp_path / name, alone, {role: name}, {"seats": seats}, max_steps=3).train()
        kept, again = adapters(tmp_path / "both" / name), adapters(tmp_path / name / name)
        assert kept.keys() == again.keys() and all(torch.equal(kept[key], again[key]) for key in kept)
        ids = [
            [row["token_ids"] for row in rows_of(folder)]
            for folder in (tmp_path / "both" / name, tmp_path / name / name)
        ]
        assert ids[0] == ids[1]


@pytest.mark.slow
def test_players_do_not_draw_the_same_numbers(tmp_path):
    """Equal policies with equal prompts: with one seed for both, they would say the same."""

    async def alike(row, players):
        talks = {role: engine.begin("say ") for role, engine in players.items()}
        for talk in talks.values():
            await talk.sample()
        return {role: talk.done(points=len(talk.completion_ids)) for role, talk in talks.items()}

    met(tmp_path, {"white": {}, "black": {}}, game=alike, max_steps=1).train()
    said = [[row["token_ids"] for row in rows_of(tmp_path / name)] for name in ("white", "black")]
    assert all(one != other for one, other in zip(*said, strict=True))


class Takes:
    """Two moves; the roles learn what the other said."""

    roles = ("first", "second")

    def reset(self, **row):
        self.said = []

    def turn(self):
        return None if len(self.said) == 2 else self.roles[len(self.said)]

    def observe(self, role):
        return f"{role}: {' '.join(self.said)}"

    def move(self, role, text):
        self.said.append(text)

    def rewards(self):
        return {"first": 1.0, "second": -1.0}


@pytest.mark.slow
def test_a_class_of_games_is_played_by_two_variants(tmp_path):
    rows = {"train_dataset": tiny.rows(8, conversational=True), "reward_funcs": None}
    made = met(tmp_path, {"white": {}, "black": {}}, game=Takes, place="environment_factory", max_steps=1, **rows)
    made.train()
    for name, role, reward in (("white", "first", 1), ("black", "second", -1)):
        rows = rows_of(tmp_path / name)
        assert {(row["role"], row["reward/Takes"]) for row in rows} == {(role, reward)}
    assert sorted({row["game"] for row in rows}) == [0, 1, 2, 3]


@pytest.mark.slow
def test_evaluations_may_be_against_fixed_opponents(tmp_path):
    rows = tiny.rows(8, conversational=True)
    heard = []

    def fixed(messages):
        heard.append(messages[-1]["content"])
        return "7"

    parts = {"eval_seats": {"first": fixed, "second": fixed}}
    more = {"train_dataset": rows, "eval_dataset": rows[:1], "reward_funcs": None, "eval_steps": 1}
    made = met(
        tmp_path, {"white": {}, "black": {}}, parts=parts, game=Takes, place="environment_factory", max_steps=1, **more
    )
    done = made.train()
    assert done["white"].evaluations == {1: [1.0]} and done["black"].evaluations == {1: [-1.0]}
    assert 4 <= len(heard) <= 8  # four games of each, of which those of white may end before the second move


@pytest.mark.slow
def test_teams_of_unequal_size_meet(tmp_path):
    """One proposes, and another solves twice: 2 games of each prompt for both."""

    async def solve(row, players):
        proposed = players["proposer"].begin("propose ")
        task = (await proposed.sample(max_tokens=4)).text
        solved = [players["solver"].begin(f"solve {task}: ") for _ in range(2)]
        for one in solved:
            await one.sample(max_tokens=4)
        return {"proposer": proposed.done(points=1.0), "solver": [one.done(points=2.0) for one in solved]}

    variants = {"a": {"num_generations": 2}, "b": {"rollouts_per_game": 2, "per_device_train_batch_size": 8}}
    met(tmp_path, variants, {"proposer": "a", "solver": "b"}, game=solve, max_steps=1).train()
    assert [row["game"] for row in rows_of(tmp_path / "a")[:4]] == [0, 1, 0, 1]
    assert [row["game"] for row in rows_of(tmp_path / "b")[:8]] == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.slow
def test_a_game_that_fails_fails_for_both(tmp_path):
    async def play(row, players):
        if players["first"].sibling == 1:
            raise OSError("no luck")
        return await duel(row, players)

    done = met(tmp_path, {"white": {}, "black": {}}, game=play, max_steps=1).train()
    assert {one.status for one in done.values()} == {"finished"}
    for name in ("white", "black"):
        failed = [row for row in rows_of(tmp_path / name) if row["fate"] == "failed"]
        assert {row["sample"] for row in failed} == {1} and all("no luck" in row["error"] for row in failed)
        role = {"white": "first", "black": "second"}[name]
        assert {(row["role"], row["game"]) for row in failed} == {(role, 1)}  # as the table declares


def test_games_do_not_wait_for_a_variant_whose_sampling_has_failed():
    table = Table(duel, PLAYERS)
    first, second = table.variants
    meeting = table._meeting(first, (0,))
    table.leave(second, ValueError("gone"))
    for future in (meeting.arrived[second], meeting.played):
        assert isinstance(future.exception(timeout=0), RolloutError)
    with pytest.raises(RolloutError):
        table._meeting(first, (1,))
    table.open()
    assert not table._meeting(first, (1,)).played.done()


@pytest.mark.slow
def test_a_partner_that_ends_ends_the_others_with_its_reason(tmp_path):
    from transformers import TrainerCallback

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **parts):
            if "black" in args.output_dir:
                raise RuntimeError("out of luck")

    made = met(tmp_path, {"white": {}, "black": {}}, max_steps=3)
    made.variants["black"].trainer.add_callback(Fails())
    ended = made.train()
    assert ended["black"].status == ended["white"].status == "failed"
    assert "black has failed (RuntimeError: out of luck" in ended["white"].reason


@pytest.mark.slow
def test_players_stop_and_resume_together_to_the_same_bits(tmp_path):
    met(tmp_path / "whole", max_steps=4).train()
    made = met(tmp_path / "parts", max_steps=4)
    made.play_round()
    made.stop("white")
    stopped = made.train()
    assert [(one.status, one.step) for one in stopped.values()] == [("stopped", 2)] * 2
    made.resume("black")
    ended = made.train(resume=True)
    assert [(one.status, one.step) for one in ended.values()] == [("finished", 4)] * 2
    for name in BOTH:
        kept, again = (adapters(tmp_path / folder / name) for folder in ("whole", "parts"))
        assert all(torch.equal(kept[key], again[key]) for key in kept)
    with pytest.raises(ValueError, match="clone has no place"):
        made.clone("white", "third")


@pytest.mark.parametrize(
    ("variants", "changes"),
    [
        ({"white": {}}, {}),
        ({**BOTH, "third": {}}, {}),
        ({"white": {}, "black": {"num_generations": 2}}, {}),
        ({"white": {}, "black": {"max_steps": 7}}, {}),
        ({"white": {}, "black": {"seed": 3}}, {}),
        ({"white": {}, "black": {"peft": None}}, {}),
        ({"white": {"dynamic_sample": True}, "black": {}}, {}),
        (BOTH, {"halving": lambda study: []}),
        (BOTH, {"parts": {"seats": {"first": "frozen"}}}),
        (BOTH, {"parts": {"eval_seats": {"first": "frozen"}}}),
        (BOTH, {"game": Takes}),
    ],
)
def test_variants_that_cannot_play_each_other_are_refused(tmp_path, variants, changes):
    with pytest.raises(CheckError) as refused:
        met(tmp_path, variants, **changes)
    assert set(refused.value.codes) == {"study-table"}


def test_a_change_that_parts_the_players_is_refused(tmp_path):
    made = met(tmp_path, {"white": {}, "black": {}})
    with pytest.raises(CheckError):
        made.change("white", max_steps=9)
    made.change("white", learning_rate=1e-4)


@pytest.mark.slow
def test_a_seed_of_its_own_is_possible_with_the_order_of_prompts_in_common(tmp_path):
    met(tmp_path, {"white": {}, "black": {"seed": 3, "data_seed": 42}}, max_steps=1).train()
    rows = [[row["row"] for row in rows_of(tmp_path / name)] for name in ("white", "black")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("game", "players"),
    [(len, PLAYERS), (duel, {}), (duel, {"first": 1}), (Takes, {"third": "white"}), (None, PLAYERS)],
)
def test_what_is_no_table_is_refused(game, players):
    with pytest.raises(ValueError):
        Table(game, players)


def test_a_trainer_alone_has_no_table(tmp_path):
    for parts in ({"rollout_func": Table(duel, PLAYERS)}, {"environment_factory": Table(Takes, PLAYERS)}):
        with pytest.raises(CheckError) as refused:
            runs.trainer(tmp_path, parts=parts)
        assert refused.value.codes == ["player-type"]
