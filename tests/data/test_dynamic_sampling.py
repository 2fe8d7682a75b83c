"""Groups without a signal make room for others: which, in what order, on which process, and what is logged."""

import math
import threading
from dataclasses import replace
from functools import partial

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.algorithms import grpo, rloo
from covey.algorithms.credit import Judge, Scores, assign_credit
from covey.config.algebra import BatchAlgebra
from covey.core.findings import CheckError
from covey.core.records import FinishReason, Rollout
from covey.data.dynamic_sampling import PromptChooser, RolloutBatch, SourceChoice, kept_groups
from covey.data.gates import facts_of_groups, signal
from covey.data.sampler import MicroStep, rank_share, train_loader
from covey.data.samplers import PromptStream
from covey.rollout.collector import PromptSample
from tests.support import runs, tiny

ALGEBRA = BatchAlgebra(
    per_device_train_batch_size=6,
    gradient_accumulation_steps=1,
    steps_per_generation=1,
    num_iterations=1,
    num_generations=2,
)  # 3 prompts with 2 completions each


def scripted(signals, log, draws, number):
    """Completions whose tokens tell their prompt and sample; prompts in `signals` have rewards that differ."""
    log.append((number, list(dict.fromkeys(draw.prompt for draw in draws))))
    rollouts = [
        Rollout([draw.prompt], [draw.prompt, draw.sample], [True, True], None, "", FinishReason.STOP, group=i // 2)
        for i, draw in enumerate(draws)
    ]
    rewards = [[float(draw.sample)] if draw.prompt in signals else [1.0] for draw in draws]
    columns = {"note": [f"{draw.prompt}/{draw.sample}" for draw in draws]}
    return RolloutBatch(draws, rollouts, torch.tensor(rewards).view(len(draws), 1), columns, [{} for _ in draws])


def chooser(
    algebra=ALGEBRA,
    rank=0,
    rows=10,
    max_rounds=3,
    gather=lambda mine: [mine],
    exchange=lambda sent: sent,
    mask_truncated=False,
):
    algorithm = grpo.algorithm(runs.config("unused"))
    stream = PromptStream(rows, 0, "refills", shuffle=False)
    dataset = [{"prompt": str(i)} for i in range(rows)]
    choice = SourceChoice(stream, gates={"signal": signal})
    given = (dataset, algebra, rank, [choice], lambda source: Judge(algorithm, torch.ones(1)))
    settings = {"mask_truncated": lambda source: mask_truncated, "draws": False, "max_rounds": max_rounds}
    return PromptChooser(*given, **settings, gather=gather, exchange=exchange)


def choose(signals, prompts=(0, 1, 2), **kwargs):
    log = []
    made = chooser(**kwargs)
    draws = [PromptSample({"prompt": str(p)}, p, s) for p, s in rank_share(prompts, 2, ALGEBRA, 0)]
    return go(made, draws, partial(scripted, signals, log)), log


def go(made, draws, sample):
    """One rollout batch, as `RolloutPhase.next` samples it."""
    scored = [sample(draws, 0)]
    rounds = [made.share(scored[0])]
    while (more := made.refill(rounds)) is not None:
        scored.append(sample(more, len(rounds)))
        rounds.append(made.share(scored[-1]))
    return made.select(scored, rounds)


def trained(chosen):
    return [rollout.completion_ids for rollout in chosen.kept.rollouts]


def pairs(*prompts):
    return [[prompt, sample] for prompt in prompts for sample in (0, 1)]


def test_groups_without_signal_are_replaced_by_the_next_prompts():
    chosen, log = choose({1, 5, 6})
    # round 1 refills two groups from rows not drawn yet, round 2 the two that still lack one: 5, and 6 is third in line
    assert log == [(0, [0, 1, 2]), (1, [3, 4]), (2, [5, 6])]
    assert trained(chosen) == pairs(1, 5, 6)
    assert chosen.kept.columns["note"] == ["1/0", "1/1", "5/0", "5/1", "6/0", "6/1"]
    assert [rollout.group for rollout in chosen.kept.rollouts] == [0, 0, 1, 1, 2, 2]
    assert chosen.kept.rewards.tolist() == [[0.0], [1.0]] * 3


def test_groups_keep_sampling_order_and_only_missing_are_sampled():
    chosen, log = choose({0, 2, 4})
    assert log == [(0, [0, 1, 2]), (1, [3]), (2, [4])]
    assert trained(chosen) == pairs(0, 2, 4)


def test_what_stays_unfilled_is_trained_on_as_first_drawn():
    chosen, log = choose({4}, max_rounds=2)
    assert log == [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7])]
    assert trained(chosen) == pairs(0, 1, 4)  # the first two of the original groups, then the one with a signal
    values = {name: stat.value() for name, stat in chosen.stats.items()}
    assert values == {
        "dynamic_sampling/first_signal": 0.0,
        "dynamic_sampling/trained_signal": pytest.approx(1 / 3),
        "dynamic_sampling/rounds": 2.0,
        "dynamic_sampling/unfilled_groups": 2.0,
        "dynamic_sampling/cost": pytest.approx(8 / 3),  # 3 + 3 + 2 groups for 3
    }


def test_no_rounds_leave_the_rollout_batch_as_it_is():
    chosen, log = choose({1}, max_rounds=0)
    assert log == [(0, [0, 1, 2])]
    assert trained(chosen) == pairs(0, 1, 2)


def test_a_rollout_batch_full_of_signal_is_not_refilled():
    chosen, log = choose({0, 1, 2})
    assert len(log) == 1
    assert trained(chosen) == pairs(0, 1, 2)


def test_tokens_of_all_rounds_are_counted():
    chosen, _ = choose({4}, max_rounds=2)
    assert chosen.processed_tokens == 8 * 2 * 3  # groups, completions, tokens of prompt and completion
    assert chosen.first.prompts == [0, 1, 2]


def test_prompts_come_again_only_when_the_dataset_has_no_others():
    _, log = choose(set(), rows=4, max_rounds=2)
    assert log == [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [3, 0, 1])]


@given(
    st.lists(st.lists(st.booleans(), min_size=0, max_size=6), max_size=4),
    st.lists(st.booleans(), min_size=1, max_size=6),
)
def test_whole_batches_are_kept_in_sampling_order(refills, first):
    rounds = [first, *refills]
    kept = kept_groups(rounds, [[""] * len(one) for one in rounds])
    assert len(kept) == len(set(kept)) == len(first)
    assert kept == sorted(kept)
    available = sum(map(sum, rounds))
    assert sum(rounds[number][place] for number, place in kept) == min(available, len(first))
    assert all(number == 0 or rounds[number][place] for number, place in kept)


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_processes_get_equal_shares_of_what_one_would_select(processes):
    """Threads stand for processes; groups lie across them, and some have nothing to refill."""
    algebra = replace(ALGEBRA, world_size=processes, per_device_train_batch_size=6 // processes)
    barrier, board = threading.Barrier(processes, timeout=600), [None] * processes

    def gather(rank, mine):
        barrier.wait()
        board[rank] = mine
        barrier.wait()
        return list(board)

    results, moved = [None] * processes, []

    def exchange(rank, outgoing):
        assert outgoing[rank] is None
        moved.extend(place for places in outgoing for place in places or ())
        return [sent[rank] for sent in gather(rank, outgoing)]

    def work(rank):
        draws = [PromptSample({"prompt": str(p)}, p, s) for p, s in rank_share([0, 1, 2], 2, algebra, rank)]
        results[rank] = go(choosers[rank], draws, partial(scripted, {1, 3, 5}, []))

    # made by one thread, as the state of processes that a config reads is not ready for others while it begins
    choosers = [
        chooser(algebra, rank, gather=partial(gather, rank), exchange=partial(exchange, rank))
        for rank in range(processes)
    ]
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone, _ = choose({1, 3, 5})
    assert [len(trained(one)) for one in results] == [6 // processes] * processes
    assert len(moved) == len(set(moved))  # each completion to one process, its own excepted
    assert [tokens for one in results for tokens in trained(one)] == trained(alone) == pairs(1, 3, 5)
    assert all(one.processed_tokens == alone.processed_tokens for one in results)
    assert all(one.stats == alone.stats for one in results)


# ---- what is a signal ------------------------------------------------------------------------------------------------

NAN = float("nan")


def judged(config, groups, weights=(1.0,), learned=None, algorithm=grpo, steps=None):
    made = algorithm.algorithm(config)
    rewards = torch.tensor(groups)
    count = rewards.shape[0] * rewards.shape[1]
    scores = Scores(rewards.flatten(0, 1), steps or [{}] * count, [3] * count)
    credit = assign_credit(made, torch.tensor(weights), scores, rewards.shape[1])
    others = ([math.nan] * count, [3] * count, [False] * count, learned or [True] * count, [{}] * len(groups))
    return [signal(facts) for facts in facts_of_groups(scores, credit, *others)]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_rewards_that_abstain_are_no_signal(method):
    config = runs.config("unused", method, beta=0.1)
    groups = [[[1.0], [NAN]], [[NAN], [NAN]], [[1.0], [0.0]]]
    assert judged(config, groups, algorithm={"grpo": grpo, "rloo": rloo}[method]) == [False, False, True]


def test_cancelling_rewards_signal_only_if_normalised_apart():
    # Weighted totals are equal (1·1 + 2·0 = 1·0 + 2·0.5), but normalised apart the second counts twice.
    groups, weights = [[[1.0, 0.0], [0.0, 0.5]]], (1.0, 2.0)
    assert judged(runs.config("unused"), groups, weights) == [False]
    apart = runs.config("unused", multi_objective_aggregation="normalize_then_sum")
    assert judged(apart, groups, weights) == [True]


def test_different_steps_with_equal_sums_are_a_signal():
    steps = [{0: [(0, 1.0), (2, 0.0)]}, {0: [(0, 0.0), (2, 1.0)]}, {0: [(0, 0.5)]}, {0: [(2, 0.5)]}]
    assert judged(runs.config("unused"), [[[1.0], [1.0]], [[0.5], [0.5]]], steps=steps) == [True, False]


def test_a_reward_of_weight_0_is_no_signal():
    assert judged(runs.config("unused"), [[[1.0, 1.0], [0.0, 1.0]]], (0.0, 1.0)) == [False]


def test_an_advantage_that_nothing_learns_from_is_no_signal():
    groups = [[[1.0], [0.0], [0.0]]] * 2
    learned = [False, False, False, True, True, False]
    assert judged(runs.config("unused"), groups, learned=learned) == [False, True]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_truncated_completions_signal_unless_they_are_masked(mask_truncated):
    draws = [PromptSample({"prompt": str(p)}, p, s) for p, s in rank_share([0, 1, 2], 2, ALGEBRA, 0)]
    scored = scripted({0, 1}, [], draws, 0)
    scored.rollouts[:2] = [replace(rollout, finish=FinishReason.LENGTH) for rollout in scored.rollouts[:2]]
    assert chooser(mask_truncated=mask_truncated).share(scored).admitted == [not mask_truncated, True, False]


# ---- in a trainer ----------------------------------------------------------------------------------------------------


def odd(prompts, completion_ids, **kwargs):
    """Prompts of odd numbers tell completions apart, the others do not."""
    return [float(sum(ids) % 2) * (int(p.split("+")[0]) % 2) for p, ids in zip(prompts, completion_ids, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_batches_are_full_of_signal_if_enough_prompts_have_one(tmp_path, method):
    parts = {"train_dataset": tiny.rows(16), "reward_funcs": odd}
    settings = {"dynamic_sample": True, "max_resample_times": 8, "max_steps": 4, "beta": 0.05}
    run = runs.trainer(tmp_path, method, parts=parts, export_completions=True, **settings)
    run.train()
    assert runs.history(run, "dynamic_sampling/trained_signal") == [1.0] * 4
    assert min(runs.history(run, "dynamic_sampling/first_signal")) < 1
    table = pq.read_table(sorted(tmp_path.rglob("completions_*.parquet"))[-1]).to_pylist()
    assert len(table) == 8 and all(int(row["prompt"].split("+")[0]) % 2 for row in table)


def test_an_evaluation_never_refills(tmp_path):
    parts = {"eval_dataset": tiny.rows(4), "reward_funcs": lambda completion_ids, **kwargs: [1.0] * len(completion_ids)}
    run = runs.trainer(tmp_path, parts=parts, dynamic_sample=True, per_device_eval_batch_size=8)
    metrics = run.evaluate()
    assert metrics["eval_reward"] == 1.0
    assert not [name for name in metrics if "dynamic_sampling" in name]


@pytest.mark.parametrize("setting", [{"dynamic_sample": True}, {"prompt_sampler": "difficulty"}])
def test_streams_are_refused(tmp_path, setting):
    from datasets import Dataset

    stream = Dataset.from_list(tiny.rows()).to_iterable_dataset()
    with pytest.raises(CheckError, match="IterableDataset") as raised:
        runs.trainer(tmp_path, parts={"train_dataset": stream}, **setting)
    assert raised.value.codes == ["stream-lookup"]


@pytest.mark.slow
def test_only_refills_change_what_is_trained(tmp_path):
    parts = {"train_dataset": tiny.rows(16), "reward_funcs": odd}
    settings = [{}, {"dynamic_sample": True, "max_resample_times": 0}, {"dynamic_sample": True}]
    made = [runs.trainer(tmp_path / str(i), parts=parts, **changes) for i, changes in enumerate(settings)]
    for run in made:
        run.train()
    plain, no_rounds, refilled = map(runs.weights, made)
    assert all(torch.equal(a, b) for a, b in zip(plain, no_rounds, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, refilled, strict=True))


@pytest.mark.slow
def test_logs_are_of_round_0_and_token_counts_of_all_rounds(tmp_path):
    parts = {"train_dataset": tiny.rows(16), "reward_funcs": odd}
    settings = {"learning_rate": 0.0, "max_steps": 3}  # the policy stays the same, so the first draws do
    plain = runs.trainer(tmp_path / "plain", parts=parts, **settings)
    refilled = runs.trainer(tmp_path / "refilled", parts=parts, dynamic_sample=True, **settings)
    for run in (plain, refilled):
        run.train()
    for name in ("reward", "frac_reward_zero_std", "rewards/odd/std", "completions/mean_length"):
        assert runs.history(plain, name) == runs.history(refilled, name), name
    assert runs.history(refilled, "num_tokens")[-1] > runs.history(plain, "num_tokens")[-1]
    silent = runs.history(plain, "frac_reward_zero_std")
    assert runs.history(refilled, "dynamic_sampling/first_signal") == [1 - share for share in silent]


@pytest.mark.slow
def test_logs_of_rewards_go_with_the_kept_completions(tmp_path):
    def noted(prompts, completion_ids, log_extra, **kwargs):
        log_extra("tokens", [len(ids) for ids in completion_ids])
        return odd(prompts, completion_ids)

    parts = {"train_dataset": tiny.rows(16), "reward_funcs": noted}
    settings = {"dynamic_sample": True, "max_steps": 3, "num_iterations": 2, "export_completions": True}
    run = runs.trainer(tmp_path, parts=parts, **settings)
    run.train()
    assert max(runs.history(run, "dynamic_sampling/rounds")) > 0
    exported = sorted(tmp_path.rglob("completions_*.parquet"))
    assert exported
    for file in exported:
        assert all(row["tokens"] == row["length"] for row in pq.read_table(file).to_pylist())


def test_a_process_without_completions_takes_part_in_a_round(tmp_path):
    run = runs.trainer(tmp_path, dynamic_sample=True)
    nothing = run.rollouts.sample(("train", 0, 1), [], "train")
    assert nothing.rollouts == [] and nothing.rewards.shape == (0, 1)


def test_loaders_do_not_read_rows_when_the_trainer_selects():
    class Unread(list):
        def __getitem__(self, index):
            raise AssertionError("rows are looked up when they are drawn")

    algebra = replace(ALGEBRA, steps_per_generation=2, num_iterations=2, per_device_train_batch_size=3)
    loader = train_loader(Unread(range(7)), algebra, 0, shuffle=True, seed=0, choose_late=True)
    pause = [MicroStep()] * 3
    # 7 prompts are two rollout batches of 3, each of 2 micro-batches gone through twice
    assert list(loader) == [MicroStep(0), *pause, MicroStep(1), *pause]


@pytest.mark.slow
def test_prompts_by_difficulty_leave_settled_ones_alone(tmp_path):
    drawn = []

    def noted(prompts, completion_ids, **kwargs):
        drawn.extend(prompts[::4])
        return odd(prompts, completion_ids)

    parts = {"train_dataset": tiny.rows(8), "reward_funcs": noted}
    run = runs.trainer(tmp_path, parts=parts, prompt_sampler="difficulty", max_steps=24, learning_rate=0.0)
    run.train()
    first, rest = drawn[:8], drawn[8:]
    assert sorted(first) == sorted(row["prompt"] for row in tiny.rows(8))  # unseen prompts come first, each once
    settled = sum(int(prompt.split("+")[0]) % 2 == 0 for prompt in rest) / len(rest)
    assert 0 < settled < 0.35  # half of the prompts, but rarely drawn
    assert runs.history(run, "difficulty/seen_fraction")[-1] == 1.0
