"""Runs in which the policy plays several seats: credit by role, records, resuming and metrics."""

from dataclasses import replace

import pytest
import torch

from covey.core.findings import CheckError
from covey.core.records import FinishReason
from covey.observability.record_files import FOLDER, files, read_rows
from covey.trainer.resuming import check_same_sizes
from tests.support import runs


async def play(row, engine, n):
    """Two-player games: each says something, and the longer answer takes a point from the other."""
    rollouts = []
    for game in range(n // 2):
        seats = []
        for role in ("first", "second"):
            episode = engine.begin(f"{row['prompt']} {role}:")
            await episode.sample()
            seats.append((role, episode))
        sizes = [len(episode.completion_ids) for _, episode in seats]
        points = (sizes[0] > sizes[1]) - (sizes[0] < sizes[1])
        outcome = "draw" if not points else "won"
        for sign, (role, episode) in zip((1, -1), seats, strict=True):
            rollouts.append(episode.done(role=role, game=game, points=sign * points + 0.1 * sizes[0], outcome=outcome))
    return rollouts


def points(points, **columns):
    return points


GAMES = {"parts": {"rollout_func": play, "reward_funcs": points}}


def trained(folder, resume=None, **changes):
    trainer = runs.trainer(folder, **{**GAMES, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def by_role(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("by_role"), compare="role", scale_rewards="none", record="tokens")


@pytest.mark.slow
def test_advantages_of_a_role_add_up_to_zero_within_a_prompt(by_role):
    rows = read_rows(files(by_role.recorder.folder)[0])
    assert {(row["role"], row["game"]) for row in rows} == {
        (role, game) for role in ("first", "second") for game in (0, 1)
    }
    for group in {row["group"] // 2 for row in rows}:
        for role in ("first", "second"):
            own = [row for row in rows if row["group"] // 2 == group and row["role"] == role]
            rewards = [row["reward/points"] for row in own]
            expected = [reward - sum(rewards) / len(rewards) for reward in rewards]
            assert [row["advantage"] for row in own] == pytest.approx(expected, abs=1e-6)


def test_metrics_are_logged_by_role(by_role):
    log = by_role.state.log_history[0]
    for role in ("first", "second"):
        for name in ("reward", "reward_std", "mean_length", "truncated", "failures", "advantage_zero"):
            assert f"roles/{role}/{name}" in log
    both = (log["roles/first/reward"] + log["roles/second/reward"]) / 2
    assert log["reward"] == pytest.approx(both)
    assert log["games/length"] == 2 and 0 <= log["games/draws"] <= 1 and log["roles/alone"] == 0
    assert not any(name.startswith("roles//") for name in log)


def test_a_replay_of_games_gives_the_same_weights(by_role, tmp_path):
    replayed = runs.trainer(
        tmp_path, **GAMES, compare="role", scale_rewards="none", replay_from=by_role.args.output_dir
    )
    replayed.train()
    assert all(map(torch.equal, runs.weights(replayed), runs.weights(by_role)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_resumed_run_knows_the_running_means(tmp_path, method):
    settings = {"method": method, "compare": "role_average", "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = trained(tmp_path / "whole", **settings)
    assert {role for _, role in whole.credit.averages.means} == {"first", "second"}
    assert [count for _, count in whole.credit.averages.means.values()] == [12, 12]
    resumed = trained(tmp_path / "whole", resume=str(tmp_path / "whole" / "checkpoint-2"), **settings)
    assert resumed.credit.averages.means == whole.credit.averages.means
    assert all(map(torch.equal, runs.weights(resumed), runs.weights(whole)))


@pytest.mark.slow
def test_the_first_advantages_of_running_means_are_the_rewards(tmp_path):
    trainer = trained(tmp_path, compare="role_average", max_steps=2)
    first, second = (read_rows(path) for path in files(tmp_path / FOLDER))
    assert [row["advantage"] for row in first] == pytest.approx([row["reward/points"] for row in first], abs=1e-6)
    assert [row["advantage"] for row in second] != pytest.approx([row["reward/points"] for row in second])
    assert trainer.state.log_history[1]["roles/first/baseline"] != 0


def test_one_rollout_of_a_prompt_is_enough_for_running_means(tmp_path):
    async def alone(row, engine):
        episode = engine.begin()
        await episode.sample()
        return episode.done(role="first", points=float(len(episode.completion_ids)))

    parts = {"rollout_func": alone, "reward_funcs": points}
    trained(tmp_path, parts=parts, compare="role_average", num_generations=1, max_steps=1)


@pytest.mark.parametrize(
    ("compare", "code"),
    [("role", "roles-missing"), ("role_average", "roles-missing"), ({"a": "role"}, "roles-missing")],
)
def test_rollouts_without_roles_are_not_compared_by_them(tmp_path, compare, code):
    async def plain(row, engine):
        episode = engine.begin()
        await episode.sample()
        return episode.done(points=1.0)

    trainer = runs.trainer(tmp_path, parts={"rollout_func": plain, "reward_funcs": points}, compare=compare)
    with pytest.raises(CheckError) as refused:
        trainer.train()
    assert refused.value.codes == [code]


def test_completions_have_no_roles(tmp_path):
    with pytest.raises(CheckError) as refused:
        runs.trainer(tmp_path, compare="role")
    assert refused.value.codes == ["roles-missing"]


def test_every_seat_alone_is_refused_before_an_update(tmp_path):
    trainer = runs.trainer(tmp_path, **GAMES, compare="episode")
    with pytest.raises(CheckError) as refused:
        trainer.train()
    assert refused.value.codes == ["roles-alone"]
    assert trainer.state.global_step == 0


def test_a_role_is_a_name(tmp_path):
    async def spaced(row, engine):
        episode = engine.begin()
        await episode.sample()
        return episode.done(role="the first", points=1.0)

    trainer = runs.trainer(tmp_path, parts={"rollout_func": spaced, "reward_funcs": points})
    with pytest.raises(ValueError, match="'the first'"):
        trainer.train()


@pytest.mark.pages
def test_the_page_shows_roles_and_games(by_role):
    from covey.observability.page.runs import RecordedRun

    run = RecordedRun(by_role.recorder.folder.parent)
    (block,) = run.blocks([run.state()["blocks"][0][0]]).values()
    assert set(block["columns"]["role"]) == {"first", "second"} and set(block["columns"]["game"]) == {0, 1}


def test_a_failed_seat_fails_its_game_alone(tmp_path):
    async def one_seat_fails(row, engine, n):
        first, second, *others = await play(row, engine, n)
        return [replace(first, finish=FinishReason.ERROR, error="resigned"), second, *others]

    trained(tmp_path, parts={"rollout_func": one_seat_fails, "reward_funcs": points}, max_steps=1)
    rows = read_rows(files(tmp_path / FOLDER)[0])
    assert all((row["reward/points"] is None) == (row["game"] == 0) for row in rows)
    assert {row["fate"] for row in rows if row["game"] == 0} == {"failed", "no signal"}


@pytest.mark.slow
def test_a_failed_group_has_no_seats(tmp_path):
    calls = []

    async def fails_once(row, engine, n):
        calls.append(n)
        if len(calls) == 2:
            raise RuntimeError("no board")
        return await play(row, engine, n)

    trainer = trained(tmp_path, parts={"rollout_func": fails_once, "reward_funcs": points}, compare="role")
    rows = [row for path in files(tmp_path / FOLDER) for row in read_rows(path)]
    failed = [row for row in rows if row["finish"] == str(FinishReason.ERROR)]
    assert len(failed) == 4 and {row["role"] for row in failed} == {""}
    assert trainer.state.global_step == 2


def test_a_checkpoint_from_before_games_is_resumed():
    """Version 0.1 wrote no `rollouts_per_game`, which was 1; another number now is refused."""
    saved = {"num_generations": 4, "per_device_train_batch_size": 2}
    check_same_sizes("old", saved, {**saved, "rollouts_per_game": 1})
    with pytest.raises(ValueError, match=r"rollouts_per_game=1 \(now 2\)"):
        check_same_sizes("old", saved, {**saved, "rollouts_per_game": 2})
    with pytest.raises(ValueError, match=r"num_generations=4 \(now 8\)"):
        check_same_sizes("old", saved, {**saved, "num_generations": 8})
