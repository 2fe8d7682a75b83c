"""Rewards of steps through a trainer: advantages against plain loops after the papers, and what must not change."""

import math
import statistics
import warnings
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from covey.core.objective import policy_loss
from covey.rewards import CharEnd, TurnEnd
from tests.support import runs, tiny
from tests.support.engines import CopyEngine

EPSILON = 1e-4


# ---- reward functions, and a trainer that says what it made of them --------------------------------------------------


def places(completion_ids, **kwargs):
    """A step for every token whose id 3 divides, worth 0 to 7 eighths: many in some completions, none in others."""
    return [[(t, (id % 8) / 8) for t, id in enumerate(ids) if id % 3 == 0] for ids in completion_ids]


def by_turns(completion_ids, **kwargs):
    return [[(TurnEnd(0), float(sum(ids) % 4))] for ids in completion_ids]


def halves(completion_ids, **kwargs):
    """Steps of the halves of long completions, a number for middling ones, nothing for short ones."""

    def judge(ids):
        if len(ids) < 4:
            return None
        if sum(ids) % 2:
            return float(len(ids) % 3)
        return [(len(ids) // 2, None if ids[0] % 4 == 0 else 1.0), (len(ids) - 1, -0.5)]

    return [judge(ids) for ids in completion_ids]


def sums(completion_ids, **kwargs):
    """An outcome; some abstain."""
    return [None if sum(ids) % 7 == 0 else float(sum(ids) % 5) for ids in completion_ids]


class Probe:
    """One optimizer step of a tiny model, and all that went into its advantages; `change` may give other training data.

    Attributes:
        returned: [F][N], what each function returned.
        lengths: [N] tokens of completions.
        kl: [N] or None.
        advantages: [N] lists of each token's advantage.
    """

    def __init__(self, path, method, functions, change=lambda batch: batch, **settings):
        self.returned = [[] for _ in functions]
        self.lengths, self.kl = [], None

        def kept(place, function):
            def reward(completion_ids, completions):
                values = function(completion_ids=completion_ids, completions=completions)
                self.returned[place] += values
                if place == 0:
                    self.lengths += [len(ids) for ids in completion_ids]
                return values

            reward.__name__ = function.__name__
            return reward

        settings = {"max_steps": 1, "num_generations": 4, "temperature": 2.0, "max_completion_length": 9, **settings}
        model = tiny.model()
        model.generation_config.eos_token_id = [1, *range(4, 24)]  # completions of all lengths
        functions = [kept(place, function) for place, function in enumerate(functions)]
        parts = {"reward_funcs": functions, "model": model}
        self.trainer = runs.trainer(path, method, parts=parts, **settings)
        score = self.trainer.behaviour.with_logprobs

        def scoring(*given, **named):
            batch, kl, *rest = score(*given, **named)
            self.kl = None if kl is None else kl.tolist()
            return batch, kl, *rest

        self.trainer.behaviour.with_logprobs = scoring
        batches = runs.experiences(self.trainer, change)
        self.trainer.train()
        self.batch = batches[-1]
        self.advantages = [part.tolist() for part in self.batch.advantages.split(self.batch.lengths.tolist())]


# ---- against loops ---------------------------------------------------------------------------------------------------


def deviation(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def expected(probe, method, weights, o, size=4):
    """One completion, one function, one step, one token at a time; nothing here knows the code that is tested."""
    count = len(probe.lengths)
    out = [[0.0] * length for length in probe.lengths]
    process = [f for f, values in enumerate(probe.returned) if any(isinstance(v, list) for v in values)]
    # every completion's steps by function, and the tokens at which anything ends
    steps = {f: [steps_of(probe.returned[f][i], probe.lengths[i]) for i in range(count)] for f in process}
    outcome = outcomes(probe, method, weights, process, o, size)
    for i in range(count):
        length = probe.lengths[i]
        ends = sorted({end for f in process for end, _ in steps[f][i]} | {length - 1})
        for t in range(length):
            total = o.get("outcome_weight", 1.0) * gamma(o, ends, t, length - 1) * outcome[i]
            for f in process:
                for number, (end, reward) in enumerate(steps[f][i]):
                    if end >= t and reward is not None:
                        relative = step_advantage(steps[f], i, number, reward, method, o, size)
                        total += o.get("process_weight", 1.0) * weights[f] * gamma(o, ends, t, end) * relative
            out[i][t] = total
    return out


def steps_of(returned, length):
    if returned is None:
        return []
    return sorted(returned, key=lambda pair: pair[0]) if isinstance(returned, list) else [(length - 1, returned)]


def gamma(o, ends, token, end):
    """A discount for each end from the token's own step up to, and not with, this one."""
    return o.get("step_discount", 1.0) ** sum(token <= other < end for other in ends)


def step_advantage(steps, i, number, reward, method, o, size):
    """steps[j] are those of completion j by this function."""
    turn = o.get("step_baseline") == "turn"
    siblings = range(i // size * size, i // size * size + size)
    rewards = {
        (j, m): r for j in siblings for m, (_, r) in enumerate(steps[j]) if r is not None and (not turn or m == number)
    }
    if method == "rloo":
        others = [r for (j, _), r in rewards.items() if j != i]
        return reward - statistics.fmean(others) if others else 0.0
    scale = o.get("scale_rewards", "group")
    if scale == "group":
        divisor = deviation(list(rewards.values())) + EPSILON
    elif scale == "batch":
        divisor = deviation([r for pairs in steps for _, r in pairs if r is not None]) + EPSILON
    else:
        divisor = 1.0
    return (reward - statistics.fmean(rewards.values())) / divisor


def outcomes(probe, method, weights, process, o, size):
    """Advantages of whole completions by the functions that reward no steps."""
    count = len(probe.lengths)
    totals = []
    for i in range(count):
        values = [
            weights[f] * probe.returned[f][i]
            for f in range(len(weights))
            if f not in process and probe.returned[f][i] is not None
        ]
        totals.append(sum(values) if values else None)
    if method == "rloo" and probe.kl is not None:
        scored = [any(values[i] is not None for values in probe.returned) for i in range(count)]
        for start in range(0, count, size):
            group = range(start, start + size)
            if all(totals[i] is None for i in group):
                for i in group:
                    totals[i] = 0.0 if scored[i] else None
        totals = [None if total is None else total - o["beta"] * probe.kl[i] for i, total in enumerate(totals)]
    out = []
    for i, total in enumerate(totals):
        group = [totals[j] for j in range(i // size * size, i // size * size + size)]
        known = [value for value in group if value is not None]
        if total is None:
            out.append(0.0)
        elif method == "rloo":
            out.append(total - (sum(known) - total) / (len(known) - 1) if len(known) > 1 else 0.0)
        else:
            everyone = [value for value in totals if value is not None]
            scale = o.get("scale_rewards", "group")
            divisor = {"group": deviation(known) + EPSILON, "batch": deviation(everyone) + EPSILON, "none": 1.0}[scale]
            out.append((total - statistics.fmean(known)) / divisor)
    return out


CASES = {
    "DeepSeekMath's formula": ("grpo", [places], [1.0], {}),
    "steps by the batch's deviation": ("grpo", [places], [1.0], {"scale_rewards": "batch"}),
    "steps against the mean alone": ("grpo", [places], [1.0], {"scale_rewards": "none", "step_discount": 0.5}),
    "turns against the same turns": ("grpo", [places], [1.0], {"step_baseline": "turn", "step_discount": 0.9}),
    "numbers among steps": ("grpo", [halves], [2.0], {"step_discount": 0.25}),
    "two process functions and an outcome": (
        "grpo",
        [places, sums, halves],
        [0.5, 2.0, 1.5],
        {"process_weight": 0.7, "outcome_weight": 1.3, "step_discount": 0.8},
    ),
    "steps without later ones": ("grpo", [halves, sums], [1.0, 1.0], {"step_discount": 0.0}),
    "the outcome left out": ("grpo", [halves, sums], [1.0, 1.0], {"outcome_weight": 0.0}),
    "steps left out": ("grpo", [halves, sums], [1.0, 1.0], {"process_weight": 0.0}),
    "rloo": ("rloo", [places], [1.0], {"beta": 0.0}),
    "rloo by turns": ("rloo", [places, sums], [2.0, 0.5], {"beta": 0.0, "step_baseline": "turn", "step_discount": 0.5}),
    "rloo with a penalty": ("rloo", [sums, halves], [1.0, 3.0], {"beta": 0.5, "num_iterations": 2}),
    "rloo with steps and a penalty alone": ("rloo", [places], [1.0], {"beta": 0.5, "step_discount": 0.9}),
}


@pytest.mark.parametrize("case", CASES)
def test_advantages_equal_loops_over_steps_and_tokens(tmp_path, case):
    method, functions, weights, options = CASES[case]
    probe = Probe(tmp_path, method, functions, reward_weights=weights, **options)
    assert len(probe.lengths) == 8 and len(set(probe.lengths)) > 1
    assert any(len(set(tokens)) > 1 for tokens in probe.advantages) or options.get("process_weight") == 0
    for got, want in zip(probe.advantages, expected(probe, method, weights, options), strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6)


# ---- invariances -----------------------------------------------------------------------------------------------------


def at_the_end(completion_ids, **kwargs):
    """`runs.longer`, as one step that ends with the completion."""
    return [[(len(ids) - 1, reward)] for ids, reward in zip(completion_ids, runs.longer(completion_ids), strict=True)]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("grpo", {}),
        ("grpo", {"scale_rewards": "batch"}),
        ("grpo", {"scale_rewards": "none"}),
        ("grpo", {"step_baseline": "turn"}),
        ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
        ("rloo", {"beta": 0.0}),
        ("rloo", {"beta": 0.0, "normalize_advantages": True}),
        ("rloo", {"beta": 0.0, "reward_clip_range": (3.0, 5.0)}),
    ],
)
def test_one_step_at_the_last_token_is_the_outcome(tmp_path, method, settings):
    outcome = Probe(tmp_path / "outcome", method, [runs.longer], **settings)
    process = Probe(tmp_path / "process", method, [at_the_end], **settings)
    assert any(any(tokens) for tokens in outcome.advantages)
    for one, other in zip(outcome.advantages, process.advantages, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7)
    for one, other in zip(runs.weights(outcome.trainer), runs.weights(process.trainer), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_two_functions_of_single_steps_are_gdpo_of_outcomes(tmp_path):
    """Normalised one by one, added up, normalised once more: with steps at the last token exactly as with numbers."""
    settings = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.3]}

    def few(completion_ids, **kwargs):
        return [float(sum(ids) % 3) for ids in completion_ids]

    def few_at_the_end(completion_ids, **kwargs):
        return [[(len(ids) - 1, float(sum(ids) % 3))] for ids in completion_ids]

    outcome = Probe(tmp_path / "outcome", "grpo", [runs.longer, few], **settings)
    process = Probe(tmp_path / "process", "grpo", [at_the_end, few_at_the_end], **settings)
    for one, other in zip(outcome.advantages, process.advantages, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_equal_steps_give_no_gradient_whatever_their_rewards_are(tmp_path, method):
    def same(completion_ids, **kwargs):
        return [[(t, 0.1) for t in range(0, len(ids), 2)] for ids in completion_ids]

    probe = Probe(tmp_path, method, [same], beta=0.0)
    assert not any(any(tokens) for tokens in probe.advantages)
    before, after = tiny.model().parameters(), probe.trainer.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_characters_and_turns_are_the_tokens_they_end_with(tmp_path):
    """The tiny tokenizer has a token a character; what is special has none."""

    def by_token(completion_ids, completions, **kwargs):
        return [[(min(2, len(ids) - 1), 1.0 + ids[0] % 2), (len(ids) - 1, 2.0)] for ids in completion_ids]

    def by_name(completion_ids, completions, **kwargs):
        out = []
        for ids, text in zip(completion_ids, completions, strict=True):
            characters = len(tiny.tokenizer().decode(ids[:3], skip_special_tokens=True))
            exact = len(ids) > 2 and ids[2] > 3 and characters < len(text)  # a character, and not the last one
            first = CharEnd(characters) if exact else min(2, len(ids) - 1)
            out.append([(first, 1.0 + ids[0] % 2), (TurnEnd(0), 2.0)])
        return out

    probes = [Probe(tmp_path / f.__name__, "grpo", [f]) for f in (by_token, by_name)]
    assert any(isinstance(end, CharEnd) for steps in probes[1].returned[0] for end, _ in steps)
    assert probes[0].advantages == probes[1].advantages


# ---- what the rest of a run makes of it ------------------------------------------------------------------------------


def only_first(completion_ids, **kwargs):
    """Steps of which only those at the first token differ: all credit is with the first token."""
    return [[(0, float(ids[0] % 2))] for ids in completion_ids]


def test_a_policy_learns_only_from_tokens_that_answer_for_a_step(tmp_path):
    """Tokens after the last step have advantage 0; with them masked out the update is the same."""

    def first_tokens_alone(batch):
        first = torch.zeros_like(batch.sampled)
        first[batch.lengths.cumsum(0) - batch.lengths] = True
        return replace(batch, sampled=batch.sampled & first, weights=batch.weights * first)

    settings = {"optim": "sgd", "learning_rate": 0.1}
    plain = Probe(tmp_path / "a", "grpo", [only_first], **settings)
    assert all(not any(tokens[1:]) for tokens in plain.advantages) and any(tokens[0] for tokens in plain.advantages)
    masked = Probe(tmp_path / "b", "grpo", [only_first], first_tokens_alone, **settings)
    for one, other in zip(runs.weights(plain.trainer), runs.weights(masked.trainer), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_each_token_is_moved_by_its_own_advantage(tmp_path, method):
    """RLOO's ratio is of the whole completion, but credit for the first token must not move the others' log-probs."""
    probe = Probe(tmp_path, method, [only_first])
    batch = probe.batch
    logprobs = torch.zeros(batch.num_tokens, requires_grad=True)
    policy_loss(batch, logprobs, None, probe.trainer.run.algorithm.objective).loss.backward()
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.lengths.cumsum(0) - batch.lengths] = True
    assert logprobs.grad[first].any() and not logprobs.grad[~first].any()


def test_truncated_completions_are_left_out_with_their_steps(tmp_path):
    probe = Probe(tmp_path, "grpo", [places], mask_truncated_completions=True, max_completion_length=4)
    cut = [not row.any() for row in probe.batch.sampled.split(probe.batch.lengths.tolist())]
    assert any(cut) and not all(cut)
    want = expected(probe, "grpo", [1.0], {})  # they take part in the baseline all the same
    for got, tokens in zip(probe.advantages, want, strict=True):
        assert got == pytest.approx(tokens, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_rollouts_are_skipped_if_no_token_has_an_advantage(tmp_path):
    def one_group(completion_ids, **kwargs):
        return [[(0, float(i == 1)), (len(ids) - 1, 0.5)] for i, ids in enumerate(completion_ids[:4])] + [
            [(0, 0.25)] for _ in completion_ids[4:]
        ]

    trained = runs.trainer(tmp_path, parts={"reward_funcs": one_group}, max_steps=1)
    trained.train()
    assert runs.history(trained, "micro_batches/skipped_rollouts") == [0.5]


@pytest.mark.parametrize("settings", [{"top_entropy_quantile": 0.5}, {"entropy_coef": 0.01}, {"stream_rewards": True}])
def test_steps_go_with_other_options(tmp_path, settings):
    trained = runs.trainer(tmp_path, parts={"reward_funcs": [places, runs.longer]}, **settings)
    trained.train()
    assert all(math.isfinite(loss) for loss in runs.history(trained, "loss"))
    assert max(runs.history(trained, "grad_norm")) > 0


@pytest.mark.parametrize("settings", [{"loss_type": "gmpo"}, {"importance_sampling_level": "sequence"}])
def test_losses_that_would_lose_the_credit_are_refused(tmp_path, settings):
    trained = runs.trainer(tmp_path, parts={"reward_funcs": places}, **settings)
    with pytest.raises(
        ValueError, match="rewards steps, but this loss gives all tokens of a completion the same credit"
    ):
        trained.train()


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("cispo", "token"), ("vespo", "sequence_token"), ("sapo", "token"), ("dapo", "sequence_token")],
)
def test_losses_that_keep_it_are_not(tmp_path, loss_type, level):
    settings = {"loss_type": loss_type, "importance_sampling_level": level, "max_steps": 1, "epsilon_high": 5.0}
    runs.trainer(tmp_path, parts={"reward_funcs": places}, **settings).train()


def test_logs_have_sums_and_the_table_has_steps(tmp_path):
    parts = {"reward_funcs": [places, runs.longer]}
    trained = runs.trainer(tmp_path, parts=parts, max_steps=1, export_completions=True)
    trained.train()
    row = trained.state.log_history[0]
    table = pq.read_table(next(tmp_path.rglob("completions_*.parquet"))).to_pylist()
    rewards = [[reward for _, reward in one["places_steps"]] for one in table]
    flat = [reward for steps in rewards for reward in steps]
    assert row["steps/per_completion"] == pytest.approx(len(flat) / 8)
    assert row["steps/places/mean"] == pytest.approx(statistics.fmean(flat))
    assert row["rewards/places/mean"] == pytest.approx(statistics.fmean(map(sum, rewards)))
    assert [one["places"] for one in table] == pytest.approx([sum(steps) for steps in rewards])
    assert row["reward"] == pytest.approx(statistics.fmean(one["places"] + one["longer"] for one in table))


def test_without_steps_nothing_about_them_is_logged(tmp_path):
    trained = runs.trainer(tmp_path, max_steps=1)
    trained.train()
    assert not [name for name in trained.state.log_history[0] if name.startswith("steps/")]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_credit_it_had(tmp_path):
    """Stopped in the middle of a rollout batch that is used for two updates: advantages are in the checkpoint."""
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
    parts = {"reward_funcs": [places, runs.longer]}
    whole = runs.trainer(tmp_path / "whole", parts=parts, **settings)
    whole.train()
    saved = {"save_strategy": "steps", "save_steps": 1}
    runs.trainer(tmp_path / "cut", parts=parts, **{**settings, **saved}).train()
    again = runs.trainer(tmp_path / "cut", parts=parts, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-1"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(whole), runs.weights(again), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_steps_of_async_rollouts_survive_a_checkpoint(tmp_path, streamed):
    """What is under way is saved as rollouts, and scored when its turn comes, or before it: the same either way."""

    def make(folder, **saving):
        engine = CopyEngine(tiny.model())
        settings = {"max_staleness": 2, "max_steps": 5, "num_generations": 4, "step_discount": 0.5, **saving}
        parts = {"reward_funcs": [places, by_turns], "engine": engine}
        return runs.trainer(tmp_path / folder, parts=parts, stream_rewards=streamed, engine_parity="off", **settings)

    straight = make("a")
    straight.train()
    make("b", save_strategy="steps", save_steps=2).train()
    resumed = make("b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert runs.history(resumed, "steps/per_completion") == runs.history(straight, "steps/per_completion")
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))


# ---- which prompts ---------------------------------------------------------------------------------------------------


def moved(prompts, completion_ids, **kwargs):
    """Sums are always 1. Prompts of even numbers earn it in two equal steps, those of odd ones in one of the two."""
    out = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        odd, early = int(prompt.split("+")[0]) % 2, sum(ids) % 2
        first = (1.0 if early else 0.0) if odd else 0.5
        out.append([(0, first), (len(ids) - 1, 1.0 - first)])
    return out


def test_equal_sums_of_different_steps_are_a_signal(tmp_path):
    parts = {"train_dataset": tiny.rows(16), "reward_funcs": moved}
    settings = {"dynamic_sample": True, "max_resample_times": 8, "max_steps": 3, "step_discount": 0.5}
    trained = runs.trainer(tmp_path, parts=parts, **settings)
    trained.train()
    assert runs.history(trained, "rewards/moved/std") == [0.0] * 3
    assert runs.history(trained, "dynamic_sampling/trained_signal") == [1.0] * 3
    assert max(runs.history(trained, "dynamic_sampling/rounds")) > 0


def test_prompts_whose_steps_do_not_differ_are_settled(tmp_path):
    parts = {"train_dataset": tiny.rows(8), "reward_funcs": moved}
    trained = runs.trainer(tmp_path, parts=parts, prompt_sampler="difficulty", max_steps=4, learning_rate=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody advises that rewards do not differ
        trained.train()
    chances = [trained.rollouts.chooser.choices[0].history.chance(row) for row in range(8)]
    assert chances == [pytest.approx(0.1), 1.0] * 4


def test_credit_is_the_same_when_it_is_sampled_with_refills(tmp_path):
    """Refills in which every group has a signal change nothing."""
    settings = {"max_steps": 2, "step_discount": 0.5}
    plain = runs.trainer(tmp_path / "a", parts={"reward_funcs": places}, **settings)
    refilled = runs.trainer(tmp_path / "b", parts={"reward_funcs": places}, dynamic_sample=True, **settings)
    for one in (plain, refilled):
        one.train()
    assert runs.history(refilled, "dynamic_sampling/rounds") == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(plain), runs.weights(refilled), strict=True))
