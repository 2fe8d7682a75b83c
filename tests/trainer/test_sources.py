"""Runs on several data sets: whose prompts come, what scores them, how they weigh, and that a run continues exactly."""

import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from covey import EvalSuite
from covey.algorithms import grpo
from covey.algorithms.credit import Judge, assign_credit, credit_by_source
from covey.core.findings import CheckError
from covey.core.records import GameSeat, Scores
from covey.data import gates
from covey.data.sources import Source, Sources, SourceSettings, check_groups, check_sources
from covey.observability.record_files import read_rows
from covey.rewards import per_completion
from covey.trainer.experience import SourceShares
from covey_tools.doctor.examined import ExaminedRun
from tests.support import runs, tiny

pytestmark = pytest.mark.filterwarnings("ignore:the prompts are text", "ignore:source ")

EIGHT = {"num_generations": 2, "generation_batch_size": 16, "gradient_accumulation_steps": 4}
THREE = {"sums": {"weight": 5}, "code": {"weight": 2}, "few": {"weight": 1}}


def rows(*counts, first=0):
    """Rows for each count, all different."""
    taken = tiny.rows(first + sum(counts))
    found = []
    for count in counts:
        found.append(taken[first : first + count])
        first += count
    return found


def three(*counts):
    return dict(zip(THREE, rows(*counts), strict=True))


def recorded(folder):
    """Rows of the record, by rollout batch."""
    return [read_rows(path) for path in sorted(Path(folder, "record").glob("generation_*.parquet"))]


@pytest.mark.slow
def test_every_rollout_batch_has_exactly_its_shares(tmp_path):
    parts = {"train_dataset": three(9, 4, 2), "sources": THREE}
    run = runs.trainer(tmp_path, parts=parts, max_steps=4, **EIGHT)
    run.train()
    batches = recorded(tmp_path)
    assert [Counter(row["source"] for row in batch) for batch in batches] == [{"sums": 10, "code": 4, "few": 2}] * 4
    for batch in batches:
        assert all(row["data"]["source"] == row["source"] for row in batch)
    first = [row["row"] for row in batches[0] + batches[1] if row["source"] == "code"]
    assert sorted(set(first)) == [9, 10, 11, 12]  # an epoch of four rows, each once with two completions
    for name, share in (("sums", 5 / 8), ("code", 2 / 8), ("few", 1 / 8)):
        assert runs.history(run, f"source/{name}/prompts") == [share] * 4
    assert runs.history(run, "source/few/epoch") == [0.5, 1.0, 1.5, 2.0]  # one prompt of two rows in each batch
    shares = [sum(runs.history(run, f"source/{name}/{of}")[0] for name in THREE) for of in ("tokens", "weight")]
    assert shares == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("stream", [False, True])
def test_functions_score_rows_of_their_own_sources(tmp_path, stream):
    seen = {name: Counter() for name in ("usual", "coded", "each")}

    def noting(name):
        def score(completion_ids, source, **columns):
            seen[name].update(source)
            return [float(len(ids)) for ids in completion_ids]

        score.__name__ = name
        return score

    each = per_completion(noting("each"))
    parts = {"train_dataset": three(9, 4, 2), "reward_funcs": [noting("usual"), each]}
    parts["sources"] = {**THREE, "code": {"weight": 2, "reward_funcs": [noting("coded"), each]}}
    parts["sources"]["code"]["reward_weights"] = [0.5, 2.0]
    run = runs.trainer(tmp_path, parts=parts, max_steps=1, stream_rewards=stream, **EIGHT)
    assert run.rewards.names == ["usual", "each", "coded"]  # a function that is shared is one
    run.train()
    assert seen == {
        "usual": {"sums": 10, "few": 2},
        "coded": {"code": 4},
        "each": {"sums": 10, "code": 4, "few": 2},
    }
    assert run.rewards.weights_of("code").tolist() == [1.0, 2.0, 0.5]
    lengths = {name: runs.history(run, f"source/{name}/mean_length")[0] for name in THREE}
    for name, weight in (("sums", 2.0), ("few", 2.0), ("code", 2.5)):
        assert runs.history(run, f"source/{name}/reward")[0] == pytest.approx(weight * lengths[name])


@pytest.mark.slow
def test_a_run_continues_in_the_middle_of_epochs(tmp_path):
    """Killed after three batches: in the first epoch of one source, the second and the fourth of the others."""
    sources = {
        "sums": {"weight": 5, "sampler": "difficulty", "gates": {"signal": True}},
        "code": {"weight": [[0, 2], [6, 3]]},
        "few": {"weight": 1, "scale_rewards": "batch"},
    }

    def run(folder, steps, resume=None, **save):
        parts = {"train_dataset": three(24, 4, 2), "sources": sources}
        made = runs.trainer(tmp_path / folder, parts=parts, max_steps=steps, **save, **EIGHT)
        made.train(resume_from_checkpoint=resume)
        return made

    straight = run("straight", 6)
    run("cut", 3, save_strategy="steps", save_steps=3)
    resumed = run("cut", 6, str(tmp_path / "cut" / "checkpoint-3"))
    assert all(torch.equal(one, two) for one, two in zip(*map(runs.weights, (straight, resumed)), strict=True))
    kept = ("row", "sample", "source", "completion", "advantage")
    whole, parts = (
        [[{k: row[k] for k in kept} for row in b] for b in recorded(tmp_path / n)] for n in ("straight", "cut")
    )
    assert whole == parts


def resumed_with(tmp_path, sources=None, data=None, **settings):
    before = {"train_dataset": three(8, 8, 8), "sources": THREE}
    small = {"max_steps": 1, **EIGHT, "gradient_accumulation_steps": 4}
    runs.trainer(tmp_path, parts=before, save_strategy="steps", save_steps=1, **small).train()
    after = {"train_dataset": data or three(8, 8, 8), "sources": sources or THREE}
    made = runs.trainer(tmp_path, parts=after, **{**small, "max_steps": 2}, **settings)
    with warnings.catch_warnings(record=True, action="always") as caught:
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    return made, [str(one.message) for one in caught]


@pytest.mark.slow
def test_weights_samplers_and_gates_may_change_and_are_named(tmp_path):
    changed = {**THREE, "code": {"weight": 4, "sampler": "difficulty", "gates": {"signal": True}}}
    _, said = resumed_with(tmp_path, changed)
    (line,) = [text for text in said if "sources.code.weight" in text]
    assert "4 (was 2)" in line and "sources.code.sampler" in line and "sources.code.gates" in line


def test_a_source_may_join(tmp_path):
    new = {**three(8, 8, 8), "more": rows(8, first=24)[0]}
    made, _ = resumed_with(tmp_path, {**THREE, "more": {"weight": 8}}, new, resume_sources=True)
    assert runs.history(made, "source/more/prompts")[-1] == 0.5
    assert runs.history(made, "source/more/epoch")[-1] == 0.5


@pytest.mark.parametrize(
    "other", [{"sums": 8, "code": 8}, {"sums": 8, "code": 8, "less": 8}, {"sums": 8, "code": 8, "few": 9}]
)
def test_other_sources_and_other_rows_are_refused(tmp_path, other):
    with pytest.raises(ValueError, match="few"):
        resumed_with(tmp_path, {}, dict(zip(other, rows(*other.values()), strict=True)))


# ---- what a source has of its own ------------------------------------------------------------------------------------


def weights_of(run, name):
    """Sum of the weights of each source's tokens in the first rollout batch, and its trained tokens."""
    batches, seen = runs.experiences(run), []
    sample = run.rollouts.sample

    def sampling(key, samples, *given, **named):
        seen.extend(one.source for one in samples)
        return sample(key, samples, *given, **named)

    run.rollouts.sample = sampling
    run.train()
    batch, found = batches[0], {}
    for source, weights in zip(seen, batch.weights.split(batch.lengths.tolist()), strict=False):
        total, tokens, rollouts = found.get(source, (0.0, 0, 0))
        found[source] = total + weights.sum().item(), tokens + len(weights), rollouts + 1
    return found


def test_limits_of_length_and_their_denominators(tmp_path):
    """dr_grpo: each token weighs 1 / (16 rollouts * the most tokens of its source)."""
    sources = {**THREE, "code": {"weight": 2, "max_completion_length": 2}}
    parts = {"train_dataset": three(9, 4, 2), "sources": sources}
    run = runs.trainer(tmp_path, parts=parts, max_steps=1, loss_type="dr_grpo", **EIGHT)
    found = weights_of(run, "code")
    for source, limit in (("sums", 6), ("code", 2), ("few", 6)):
        total, tokens, _ = found[source]
        assert total == pytest.approx(tokens / (16 * limit))
    assert {row["source"]: max(r["length"] for r in recorded(tmp_path)[0] if r["source"] == row["source"])
            for row in recorded(tmp_path)[0]}["code"] == 2  # fmt: skip
    assert runs.history(run, "source/code/truncated")[0] > 0


@pytest.mark.parametrize(("own", "weights"), [({}, [10, 4, 2]), ({"loss_weight": 3.0}, [10, 48, 2])])
def test_an_average_of_its_own(tmp_path, own, weights):
    """The token mean of code by itself, times its share of 4 in 16 or its weight; the others have a mean together."""
    sources = {**THREE, "code": {"weight": 2, "max_completion_length": 2, "average": "own", **own}}
    parts = {"train_dataset": three(9, 4, 2), "sources": sources}
    run = runs.trainer(tmp_path, parts=parts, max_steps=1, loss_type="dapo", **EIGHT)
    found = weights_of(run, "code")
    assert found["code"][0] * 16 == pytest.approx(weights[1])
    both = found["sums"][0] + found["few"][0]
    assert both * 16 == pytest.approx(12)
    assert found["sums"][0] / both == pytest.approx(found["sums"][1] / (found["sums"][1] + found["few"][1]))


@pytest.mark.parametrize(("loss_type", "steps"), [("dapo", 1), ("dapo", 4), ("grpo", 1), ("dr_grpo", 1)])
def test_an_average_of_its_own_over_several_rollout_batches_of_an_update(tmp_path, loss_type, steps):
    """Two rollout batches of 16, or a quarter of each, in one update: the denominators are of the whole update."""
    sources = {**THREE, "code": {"weight": 2, "max_completion_length": 2, "average": "own", "loss_weight": 3.0}}
    shape = {"num_generations": 2, "per_device_train_batch_size": 16 // steps, "steps_per_generation": steps}
    datasets = three(20, 8, 4)
    run = runs.trainer(
        tmp_path,
        parts={"train_dataset": datasets, "sources": sources},
        max_steps=1,
        loss_type=loss_type,
        gradient_accumulation_steps=2 * steps,
        beta=0.1,  # every rollout has a gradient
        **shape,
    )
    ids = {tuple(tiny.tokenizer()(row["prompt"])["input_ids"]): name for name in datasets for row in datasets[name]}
    plans, make = [], run.updates.plan
    run.updates.plan = lambda *given: plans.append(make(*given)) or plans[-1]
    run.train()
    found = {name: [0.0, 0.0, 0] for name in datasets}  # weight, sum of what the average counts, rollouts
    for batch in (one for step in plans[0].micro_steps for one in step):
        prompts = [tuple(prompt.tolist()) for prompt in batch.prompts()]
        each = zip(batch.groups.tolist(), batch.weights.split(batch.lengths.tolist()), strict=True)
        for group, weights in each:
            name = ids[prompts[group]]
            counted = {"dapo": len(weights), "grpo": 1.0, "dr_grpo": len(weights) / (2 if name == "code" else 6)}
            found[name][0] += weights.sum().item()
            found[name][1] += counted[loss_type]
            found[name][2] += 1
    assert [found[name][2] for name in THREE] == [20, 8, 4]
    code, sums, few = found["code"], found["sums"], found["few"]
    denominator = {"dapo": code[1], "grpo": 8, "dr_grpo": 8}[loss_type]
    assert code[0] == pytest.approx(3.0 * code[1] / denominator)
    others = {"dapo": sums[1] + few[1], "grpo": 24, "dr_grpo": 24}[loss_type]
    assert sums[0] + few[0] == pytest.approx(24 / 32 * (sums[1] + few[1]) / others)
    assert sums[0] / few[0] == pytest.approx(sums[1] / few[1])


def test_truncated_completions_of_one_source_are_masked(tmp_path):
    sources = {**THREE, "code": {"weight": 2, "max_completion_length": 1, "mask_truncated_completions": True}}
    run = runs.trainer(tmp_path, parts={"train_dataset": three(9, 4, 2), "sources": sources}, max_steps=1, **EIGHT)
    run.train()
    fates = {source: {row["fate"] for row in recorded(tmp_path)[0] if row["source"] == source} for source in THREE}
    assert "masked" in fates["code"] and "masked" not in fates["sums"] | fates["few"]
    assert runs.history(run, "source/code/tokens")[0] < 0.1


def walks(name):
    class Walk:
        def reset(self, **row):
            return f"Where to? {name}"

        def step(self, text):
            return "on", float(len(text)), True, {}

    Walk.__name__ = name
    return Walk


@pytest.mark.slow
def test_environments_by_source_are_those_of_a_column(tmp_path):
    """Unshuffled, the rows of both runs come in the same order."""
    near, far = ([{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(4)] for _ in range(2))
    factories = {"near": walks("Near"), "far": walks("Far")}
    usual = {"environment_factory": factories, "reward_funcs": None}
    settings = {"shuffle_dataset": False, "max_steps": 1, **EIGHT}
    sources = {"a": {"environment": "near"}, "b": {"environment": "far"}}
    mixed = runs.trainer(
        tmp_path / "m", parts={**usual, "train_dataset": {"a": near, "b": far}, "sources": sources}, **settings
    )
    column = [row for pair in zip(*([{**row, "environment": name} for row in some] for name, some in
              (("near", near), ("far", far))), strict=True) for row in pair]  # fmt: skip
    alone = runs.trainer(tmp_path / "c", parts={**usual, "train_dataset": column}, **settings)
    for run in (mixed, alone):
        run.train()
    one, two = (recorded(tmp_path / name)[0] for name in ("m", "c"))
    assert [row["data"]["environment"] for row in one] == [row["data"]["environment"] for row in two]
    assert runs.history(mixed, "environment/near/reward") and runs.history(alone, "environment/near/reward")


def test_an_evaluation_set_with_a_sources_name_is_scored_like_it(tmp_path):
    def one(completion_ids, **columns):
        return [1.0] * len(completion_ids)

    def two(completion_ids, **columns):
        return [2.0] * len(completion_ids)

    parts = {
        "train_dataset": three(9, 4, 2),
        "sources": {**THREE, "code": {"weight": 2, "reward_funcs": two, "max_completion_length": 2}},
        "reward_funcs": one,
        "eval_dataset": {
            "code": tiny.rows(4),
            "few": EvalSuite(tiny.rows(4), num_generations=2, pass_at=(1,), success_threshold=1.0),
            "others": tiny.rows(4),
        },
    }
    run = runs.trainer(tmp_path, parts=parts, max_steps=1, per_device_eval_batch_size=8, **EIGHT)
    metrics = run.evaluate()
    assert [metrics[f"eval_{name}_reward"] for name in ("code", "few", "others")] == [2.0, 1.0, 1.0]
    assert metrics["eval_few_pass@1"] == 1.0
    assert metrics["eval_code_completions/max_length"] == 2 < metrics["eval_others_completions/max_length"]


# ---- shares of the weight --------------------------------------------------------------------------------------------


def drowned(lengths, batches=3, average="joint"):
    """Names in warnings about two sources with one prompt each in a batch, and tokens of one weight."""
    some = [Source(name, [{}], SourceSettings(average=average)) for name in lengths]
    shares = SourceShares()
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(batches):
            shares.observe(list(lengths), [float(length) for length in lengths.values()], Sources(some))
    return [one.message.finding.code for one in caught]


def test_a_source_that_others_drown_is_pointed_out_once():
    # shares of the weight 20 / 420 = 4.8% and 95.2%, of the prompts 50% each
    assert drowned({"short": 20, "long": 400}, batches=9) == ["source-drowned"]
    assert drowned({"short": 20, "long": 400}, batches=2) == []
    assert drowned({"short": 20, "long": 140}) == []  # 1/8 is exactly a fourth of 1/2
    assert drowned({"short": 20, "long": 400}, average="own") == []


def test_splits_and_columns_are_no_sources(tmp_path):
    for given in ({"prompt": ["a", "b"]}, {"a": tiny.rows(8), "b": ["text"]}):
        with pytest.raises(CheckError) as raised:
            runs.trainer(tmp_path, parts={"train_dataset": given})
        assert raised.value.codes == ["dataset-type"]


# ---- replay and doctor -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_is_replayed_to_the_same_weights(tmp_path):
    sources = {**THREE, "code": {"weight": 2, "scale_rewards": "batch", "average": "own"}}
    parts = {"train_dataset": three(9, 4, 2), "sources": sources}
    made = [runs.trainer(tmp_path / "first", parts=parts, record="tokens", **EIGHT)]
    made[0].train()
    made.append(runs.trainer(tmp_path / "again", parts=parts, replay_from=str(tmp_path / "first"), **EIGHT))
    made[1].train()
    assert all(torch.equal(one, two) for one, two in zip(*map(runs.weights, made), strict=True))
    assert runs.history(made[1], "source/code/prompts") == [0.25, 0.25]


def test_the_doctor_looks_at_every_source(tmp_path):
    run = runs.trainer(tmp_path, parts={"train_dataset": three(60, 30, 2), "sources": THREE}, **EIGHT)
    seen = ExaminedRun(run, run.train_dataset)
    places = seen._places(5, 0)
    assert Counter(seen.taken[place]["source"] for place in places) == {"sums": 2, "code": 2, "few": 1}
    assert [seen.rows[number] for number in seen.numbers] == seen.taken


def test_gates_of_a_source_need_advantages_of_groups(tmp_path):
    async def play(row, engine, n):
        return [(await _sampled(engine)).done(role="a", game=number) for number in range(n)]

    async def _sampled(engine):
        episode = engine.begin()
        await episode.sample()
        return episode

    def made(**code):
        parts = {"train_dataset": three(9, 4, 2), "sources": {**THREE, "code": code}, "rollout_func": play}
        return runs.trainer(tmp_path, parts=parts, compare="role_average", **EIGHT)

    with pytest.raises(CheckError) as raised:
        made(gates={"signal": True})
    assert [finding.code for finding in raised.value.findings] == ["roles-unfiltered"]
    made(gates={"reward_range": {"above": 0}})


# ---- sources of games ------------------------------------------------------------------------------------------------


async def seats(row, engine, n):
    """Games of two seats."""
    rollouts = []
    for number in range(n):
        episode = engine.begin(f"{row['prompt']} {number % 2}")
        await episode.sample()
        rollouts.append(episode.done(role=("first", "second")[number % 2], game=number // 2))
    return rollouts


def games(folder, own, **changes):
    """A run of two sources of games, of which "b" has settings of its own; one prompt of each in a rollout batch."""
    first, second = rows(4, 4)
    parts = {"train_dataset": {"a": first, "b": second}, "sources": {"b": own}, "rollout_func": seats}
    return runs.trainer(folder, parts=parts, **changes)


@pytest.mark.parametrize(
    ("own", "code"), [({"compare": {"frist": "role"}}, "roles-unknown"), ({"compare": "episode"}, "roles-alone")]
)
def test_seats_of_a_source_are_checked_by_its_own_comparison(tmp_path, own, code):
    run = games(tmp_path, own)
    with pytest.raises(CheckError) as raised:
        run.train()
    assert raised.value.codes == [code] and "sources: b: compare=" in str(raised.value)
    assert run.state.global_step == 0


@pytest.mark.slow
def test_running_means_are_of_the_sources_that_are_compared_with_them(tmp_path):
    """Each of 2 batches has 2 rollouts of a role in "a", compared with means, and 2 in "b", compared by role."""
    run = games(tmp_path, {"compare": "role"}, compare="role_average", scale_rewards="none", max_steps=2)
    run.train()
    assert [count for _, count in run.credit.averages.means.values()] == [2 * 2] * 2
    own = [[row for row in batch if row["source"] == "a" and row["role"] == "first"] for batch in recorded(tmp_path)]
    x, y = (row["reward/longer"] for row in own[0])
    mean = (0.95 * 0.05 * x + 0.05 * y) / (1 - 0.95**2)
    assert [row["advantage"] for row in own[1]] == pytest.approx([r["reward/longer"] - mean for r in own[1]], abs=1e-5)
    assert runs.history(run, "roles/first/baseline") == pytest.approx([0, mean])


# ---- groups of different sizes ---------------------------------------------------------------------------------------

UNEQUAL = {"small": {"weight": 1, "num_generations": 4}, "large": {"weight": 1}}
OF_EIGHT = {"num_generations": 8, "per_device_train_batch_size": 8, "generation_batch_size": 16}
CUTS = {"max_tokens_per_micro_batch": 64}  # the same for both, as sums round by the cuts


def unequal(tmp_path, folder="run", **changes):
    """Two prompts in a rollout batch, one with four completions and one with eight."""
    parts = {"train_dataset": dict(zip(UNEQUAL, rows(3, 3), strict=True)), "sources": UNEQUAL}
    settings = {**OF_EIGHT, "max_steps": 3, **changes}
    return runs.trainer(tmp_path / folder, parts=parts, **settings)


def test_groups_of_four_and_of_eight_have_the_advantages_of_runs_of_their_own(tmp_path):
    run = unequal(tmp_path)
    run.train()
    batches = recorded(tmp_path / "run")
    assert [Counter((row["source"], row["finish"] == "absent") for row in batch) for batch in batches] == [
        {("small", False): 4, ("small", True): 4, ("large", False): 8}
    ] * 3
    for batch in batches:
        for source, size in (("small", 4), ("large", 8)):
            own = [row for row in batch if row["source"] == source and row["finish"] != "absent"]
            scores = Scores(
                torch.tensor([[row["reward/longer"]] for row in own], dtype=torch.float64),
                [{}] * size,
                [row["length"] for row in own],
            )
            alone = assign_credit(run.run.algorithm, torch.ones(1), scores, size).of_completions()
            assert alone.tolist() == pytest.approx([row["advantage"] for row in own], abs=1e-6)
        assert not any(row["length"] for row in batch if row["finish"] == "absent")
    assert runs.history(run, "source/small/prompts") == [0.5] * 3
    shortest = [min(row["length"] for row in batch if row["finish"] != "absent") for batch in batches]
    assert runs.history(run, "completions/min_length") == shortest and min(shortest) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": "group"},
        {"scale_rewards": "batch"},
        {"scale_rewards": "none", "compare": "role"},
        {"advantages": "maxrl"},
        {"advantages": "pass_at_k", "pass_at_k": 2},
        {"advantages": "reinforce_plus_plus"},
    ],
)
def test_credit_in_groups_of_two_sizes_is_exactly_that_of_each_alone(settings):
    algorithm, ones = grpo.algorithm(runs.config("unused", **{**OF_EIGHT, **settings})), torch.ones(1)
    rewards = torch.tensor([1.0, 0, 0, 1, *[0] * 4, 1, 0, 0, 0, 1, 1, 0, 0])[:, None]
    absent = [False] * 4 + [True] * 4 + [False] * 8
    rewards[absent] = torch.nan
    seats = [GameSeat("" if gone else ("first", "second")[place % 2]) for place, gone in enumerate(absent)]
    lengths, sources = [0 if gone else 3 for gone in absent], ["small"] * 8 + ["large"] * 8
    scores = Scores(rewards, [{}] * 16, lengths, seats, sources, absent)
    credit = credit_by_source(lambda name: Judge(algorithm, ones), scores, 8).of_completions()
    for place, size in ((0, 4), (8, 8)):
        own = slice(place, place + size)
        alone = Scores(rewards[own], [{}] * size, lengths[own], seats[own])
        assert torch.equal(credit[own], assign_credit(algorithm, ones, alone, size).of_completions())
        assert credit[own].any()
    assert not credit[4:8].any()


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_source_of_smaller_groups_alone_trains_as_a_run_of_that_size(tmp_path, loss_type, steps):
    """Equal bit by bit, in one update of a rollout batch and in several rollout batches of an update."""
    settings = {"loss_type": loss_type, "max_steps": 2, "gradient_accumulation_steps": 2 * steps, **CUTS}
    alone = {"train_dataset": {"small": rows(4)[0]}}
    padded = runs.trainer(
        tmp_path / "padded", parts={**alone, "sources": {"small": UNEQUAL["small"]}}, **{**OF_EIGHT, **settings}
    )
    padded.train()
    small = {"num_generations": 4, "per_device_train_batch_size": 4, "generation_batch_size": 8}
    plain = runs.trainer(tmp_path / "plain", parts=alone, **small, **settings)
    plain.train()
    assert all(torch.equal(one, two) for one, two in zip(*map(runs.weights, (padded, plain)), strict=True))
    kept = ("reward", "completions/mean_length", "completions/clipped_ratio", "source/small/reward", "num_tokens")
    for name in (*kept, "frac_reward_zero_std", "completions/distinct", "reward_std", "loss"):
        assert runs.history(padded, name) == runs.history(plain, name), name


@pytest.mark.slow
def test_a_run_with_unequal_groups_continues(tmp_path):
    straight = unequal(tmp_path, "straight", max_steps=4)
    straight.train()
    unequal(tmp_path, "cut", max_steps=2, save_strategy="steps", save_steps=2).train()
    resumed = unequal(tmp_path, "cut", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert all(torch.equal(one, two) for one, two in zip(*map(runs.weights, (straight, resumed)), strict=True))


def test_gates_see_the_completions_of_a_smaller_group(tmp_path):
    seen = []
    small = {**UNEQUAL["small"], "gates": {"max_truncated": 0.5}}
    with mock.patch.object(gates, "max_truncated", lambda group, share: seen.append(len(group.truncated)) or True):
        parts = {"train_dataset": dict(zip(UNEQUAL, rows(3, 3), strict=True)), "sources": {**UNEQUAL, "small": small}}
        runs.trainer(tmp_path, parts=parts, **{**OF_EIGHT, "max_steps": 1}).train()
    assert set(seen) == {4}


@pytest.mark.parametrize(
    ("own", "run", "words"),
    [
        ({"num_generations": 16}, {}, "is above the run's 8"),
        ({"num_generations": 3}, {"rollouts_per_game": 2}, "is not a multiple of rollouts_per_game=2"),
        ({"num_generations": 2, "advantages": "pass_at_k", "pass_at_k": 3}, {}, "below pass_at_k=3"),
        ({"num_generations": 0}, {}, "whole number, 1 or more"),
    ],
)
def test_sizes_of_groups_that_cannot_be(own, run, words):
    source = Sources([Source("small", [{}] * 3, SourceSettings(**own))])
    args = runs.config("unused", **{**OF_EIGHT, **run})
    found = [*check_groups(source, args), *check_sources({"small": [{}]}, {"small": own}, None)]
    assert words in " ".join(one.sentence for one in found)
