"""The check of an engine's first samples: each usual mistake is told from the others by the numbers it makes."""

import math
import re
import warnings
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from covey.core.batch import TrainBatch
from covey.core.engine import EngineTraits, SamplingParams
from covey.policy.scoring import TokenScorer
from covey.trainer.distributed.sharding import Sharding
from covey.trainer.engine_check.parity import Comparison, EngineCheck, likely_cause, tolerance
from tests.support import runs, tiny
from tests.support.foreign import perturbed, sample_from

BOS = 2
MODEL = tiny.model()
LENGTHS = [16, 12]


def batch(prompt=(10, 11, 12)):
    """Two completions of one prompt, of tokens that say nothing."""
    generator = torch.Generator().manual_seed(0)
    return TrainBatch(
        token_ids=torch.randint(4, 100, (sum(LENGTHS),), generator=generator),
        lengths=torch.tensor(LENGTHS),
        sampled=torch.ones(sum(LENGTHS), dtype=torch.bool),
        prompt_ids=torch.tensor(prompt),
        prompt_lengths=torch.tensor([len(prompt)]),
        groups=torch.tensor([0, 0]),
    )


@cache
def scorer(temperature, model):
    """One for each, since a new one tries layouts before it scores."""
    return TokenScorer(lambda wrapped: wrapped, temperature=temperature, layout="padded")


@torch.no_grad()
def score(rollouts, temperature=1.0, model=MODEL):
    return scorer(temperature, model)(model, rollouts).logprobs


def alternating(size):
    """A difference of that size, up and down by turns."""
    return size * (-1.0) ** torch.arange(sum(LENGTHS))


def early(size):
    """A difference in the first tokens of each completion and hardly any after."""
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    return torch.where(places < 4, alternating(size), alternating(0.02))


def one_off():
    """Each token's log-prob at the token before."""
    return torch.cat([part.roll(-1) for part in score(batch()).split(LENGTHS)])


CAUSES = [
    ("from before the temperature", score(batch(), 1.0), {"temperature": 0.7}, "temperature 1 instead of 0.7.*before"),
    ("divided twice", score(batch(), 0.7**2), {"temperature": 0.7}, "at temperature 0.49 instead of 0.7"),
    ("a default of the engine's", score(batch(), 0.6), {}, "temperature 0.6 instead of 1.*generation_config"),
    ("next to another", score(batch(), 0.95), {"temperature": 0.9}, "at temperature 0.95 instead of 0.9"),
    ("one token off", one_off(), {}, "one token off"),
    ("one <bos> too many", score(batch((BOS, 10, 11, 12))), {}, "with one beginning-of-text token more"),
    ("cut before it is reported", score(batch()) + 0.3, {}, "none is below the trainer's.*top-k, top-p or min-p"),
    ("half precision", score(batch()) + alternating(0.05), {}, "different dtypes"),
    ("another prompt", score(batch()) + early(1.5), {}, "largest at the beginning.*chat template"),
    ("other weights", score(batch(), model=perturbed(MODEL)), {}, "another model or checkpoint"),
    ("stale weights", score(batch(), model=perturbed(MODEL)), {"agreed": True}, "stale weights"),
]


def comparison(engine, *, rollouts=None, temperature=1.0, agreed=False):
    rollouts = rollouts or batch()
    rollouts.engine_logprobs = engine
    return Comparison(rollouts, score(rollouts, temperature), score, temperature, 0.01, BOS, agreed)


@pytest.mark.parametrize(("engine", "settings", "says"), [case[1:] for case in CAUSES], ids=[c[0] for c in CAUSES])
def test_each_cause_is_named(engine, settings, says):
    compared = comparison(engine, **settings)
    assert compared.gap > 0.01
    assert re.search(says, likely_cause(compared))


@pytest.mark.parametrize(("engine", "settings", "says"), [case[1:] for case in CAUSES], ids=[c[0] for c in CAUSES])
def test_each_cause_is_named_whatever_unsampled_tokens_hold(engine, settings, says):
    rollouts = batch()
    rollouts.sampled[7:10] = False
    compared = comparison(torch.where(rollouts.sampled, engine, 50.0), rollouts=rollouts, **settings)
    assert compared.gap == pytest.approx((engine - score(batch(), compared.temperature))[rollouts.sampled].abs().mean())
    assert re.search(says, likely_cause(compared))


def test_a_lost_beginning_of_text_is_named():
    rollouts = batch((BOS, 10, 11, 12))
    assert "with no beginning-of-text token" in likely_cause(comparison(score(batch()), rollouts=rollouts))


@pytest.mark.parametrize(
    ("value", "says"),
    [(math.nan, "1 of 28 are NaN or infinite.*float16"), (0.5, r"some are above 0 \(0\.5\)")],
)
def test_what_is_no_log_prob_is_refused_whatever_its_size(value, says):
    engine = score(batch())
    engine[3] = value
    with pytest.raises(ValueError, match=rf"log-probs are not usable: {says}.*engine_parity='warn'"):
        check()(reporting(engine))


@pytest.mark.parametrize(
    ("temperature", "dtypes", "allowed"),
    [
        (1.0, (torch.float32, None, None), 0.01),
        (1.5, (torch.float64,), 0.01),
        (1.0, (torch.float32, torch.bfloat16, None), 0.1),
        (1.0, (torch.float32, None, torch.float16), 0.1),
        (1.0, (torch.bfloat16, None, torch.float8_e4m3fn), 0.3),
        (0.05, (torch.bfloat16,), 2.0),
    ],
)
def test_the_narrowest_number_and_temperature_explain_rounding(temperature, dtypes, allowed):
    assert tolerance(temperature, *dtypes) == allowed


# ---- the check -------------------------------------------------------------------------------------------------------


def check(action="raise", gather=lambda mine: [mine], traits=None, rescore=score, spec=None, top_k=0):
    run = SimpleNamespace(
        args=runs.config("unused", engine_parity=action),
        accelerator=SimpleNamespace(mixed_precision="no"),
        policy=MODEL,
        collectives=SimpleNamespace(named=lambda what: gather),
        sharding=Sharding(),
        algorithm=SimpleNamespace(objective=SimpleNamespace(correction=None)),
    )
    codec = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=BOS))
    params = SamplingParams(max_tokens=16, top_k=top_k)
    made = EngineCheck(run, SimpleNamespace(codec=codec, spec=spec), params, traits or EngineTraits(), rescore)
    made.stale_weights = None  # the first comparisons alone
    return made


def reporting(engine):
    rollouts = batch()
    rollouts.engine_logprobs = engine
    return rollouts


def counting():
    calls = []

    def rescore(rollouts, temperature):
        calls.append(temperature)
        return score(rollouts, temperature)

    return calls, rescore


def test_two_rollout_batches_are_looked_at_and_no_more():
    calls, rescore = counting()
    look = check(rescore=rescore)
    for _ in range(4):
        look(reporting(score(batch())))
    assert calls == [1.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [{"action": "off"}, {"traits": EngineTraits(reports_after_cut=True), "top_k": 4}],
    ids=["off", "not-comparable"],
)
def test_nothing_is_scored_where_nothing_is_asked(settings):
    calls, rescore = counting()
    check(rescore=rescore, **settings)(reporting(score(batch()) - 1))
    assert calls == []


def test_the_refusal_gives_size_tolerance_cause_and_a_way_on():
    with pytest.raises(ValueError, match=r"by 0\.3 nats on average") as error:
        check()(reporting(score(batch()) + 0.3))
    message = str(error.value)
    assert "(at most 0.3, over 28 tokens), and rounding explains 0.01: none is below" in message
    assert message.endswith("To train all the same, set engine_parity='warn'.")


def test_a_warning_is_given_once_and_the_run_goes_on():
    look = check("warn")
    with pytest.warns(UserWarning, match="none is below .* Continuing because"):
        look(reporting(score(batch()) + 0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look(reporting(score(batch()) + 0.3))


def test_what_another_process_finds_stops_this_one_too():
    with pytest.raises(ValueError, match="what the other found"):
        check(gather=lambda mine: [mine, "what the other found"])(reporting(score(batch())))


def test_a_process_without_tokens_takes_part_and_waits_for_some():
    asked = []

    def gather(mine):
        asked.append(mine)
        return [mine]

    look = check(gather=gather)
    empty = batch()
    empty.sampled[:] = False
    empty.engine_logprobs = score(batch())
    for rollouts in (empty, empty, reporting(score(batch())), reporting(score(batch())), empty):
        look(rollouts)
    assert asked == [None, None, "", ""]


@pytest.mark.parametrize("untold", [0, 1])
def test_unsampled_and_unreported_tokens_are_not_compared(untold):
    """Results of tools have log-prob 0.0; a rollout of the user's own making may come without any."""
    engine = score(batch())
    rollouts = reporting(engine.clone())
    rollouts.sampled[5:8] = False
    rollouts.engine_logprobs[5:8] = 0.0
    rollouts.engine_logprobs.split(LENGTHS)[untold].fill_(math.nan)
    look, asked = counting_check()
    look(rollouts)
    assert asked == [[LENGTHS[1 - untold]]]
    rollouts.engine_logprobs += 0.3
    with pytest.raises(ValueError, match=r"differ from the trainer's by 0\.3 nats"):
        check()(rollouts)


def test_comparable_rollouts_are_found_among_others():
    five = rollouts_of_one_token(5)
    five.sampled[:2], five.sampled[3:] = False, False
    look, asked = counting_check()
    look(five)
    assert asked == [[1]]


def counting_check():
    """A check, and the completions' lengths of all that it has scored."""
    asked = []

    def rescore(rollouts, temperature):
        asked.append(rollouts.lengths.tolist())
        return score(rollouts, temperature)

    return check(rescore=rescore), asked


def rollouts_of_one_token(count):
    made = TrainBatch(
        token_ids=torch.arange(4, 4 + count),
        lengths=torch.ones(count, dtype=torch.long),
        sampled=torch.ones(count, dtype=torch.bool),
        prompt_ids=torch.tensor([10]),
        prompt_lengths=torch.tensor([1]),
        groups=torch.zeros(count, dtype=torch.long),
    )
    made.engine_logprobs = score(made)
    return made


def test_a_broken_policy_is_not_blamed_on_the_engine():
    check(rescore=lambda rollouts, temperature: score(rollouts) * math.nan)(reporting(score(batch())))


def test_the_built_in_engine_is_said_to_misread_the_model():
    with pytest.raises(ValueError, match="LlamaForCausalLM is not sampled from as it is"):
        check(traits=EngineTraits(shares_policy=True))(reporting(score(batch()) + 0.3))


def test_a_rollout_function_at_another_temperature_is_named():
    warm = check(traits=EngineTraits(shares_policy=True))
    with pytest.raises(ValueError, match=r"not sampled from as it is: .* at temperature 0\.5 .* a rollout function"):
        warm(reporting(score(batch(), 0.5)))


def test_rollouts_that_were_rewritten_are_told_from_attention():
    changed = score(batch()) + torch.where(torch.arange(sum(LENGTHS)) < 20, alternating(0.01), alternating(1.5))
    with pytest.raises(ValueError, match=r"not as they were sampled.*lower-cases.*return the ids") as error:
        check(traits=EngineTraits(shares_policy=True), spec=object())(reporting(changed))
    assert "attention" not in str(error.value)


# ---- in a run --------------------------------------------------------------------------------------------------------


def test_another_temperature_ends_the_run_before_any_training(tmp_path):
    trainer = sample_from(runs.trainer(tmp_path, temperature=0.7), temperature=1.0)
    before = runs.weights(trainer)
    with pytest.raises(ValueError, match=r"temperature 1 instead of 0\.7"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, runs.weights(trainer), strict=True))
    assert trainer.scorer.temperature == 0.7


def test_an_engine_with_old_weights_is_detected_after_one_update(tmp_path):
    trainer = runs.trainer(tmp_path, learning_rate=0.1)
    sample_from(trainer, model=perturbed(trainer.model, 0.0))
    with pytest.raises(ValueError, match="stale weights"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.filterwarnings("ignore:the engine's log-probs differ")
def test_with_a_warning_the_correction_takes_care_of_it(tmp_path):
    trainer = runs.trainer(tmp_path, engine_parity="warn")
    sample_from(trainer, model=perturbed(trainer.model)).train()
    assert trainer.state.global_step == 2
    assert runs.history(trainer, "sampling/sampling_logp_difference/mean")[0] > 0.01
