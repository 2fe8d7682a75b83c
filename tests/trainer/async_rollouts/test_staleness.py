"""Training while the next rollout batches are sampled: equal content, no staler than allowed, corrected, resumable."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.engines.scripted import ScriptedEngine
from tests.support import runs, tiny
from tests.support.engines import CopyEngine, scripted

CYCLE = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
QUIET = pytest.mark.filterwarnings("ignore:the engine reported no log-probs")
pytestmark = QUIET


def ahead(folder, max_staleness, engine=None, method="grpo", parts=None, **settings):
    engine = scripted() if engine is None else engine
    settings = {"max_steps": 6, "max_staleness": max_staleness, **settings}
    if isinstance(engine, ScriptedEngine):
        settings["engine_parity"] = "off"  # a script has no log-probs
    return runs.trainer(folder, method, parts={"engine": engine, **(parts or {})}, **settings)


def noted(trainer):
    """What the trainer trains on, rollout batch by rollout batch: (step, draws, completions, versions)."""
    share, found = trainer.credit.gather, []

    def noting(rollouts, behaviour, mode):
        sampled = rollouts
        if mode == "train":
            slots = [(draw.prompt, draw.sample) for draw in sampled.samples]
            completions = [tuple(rollout.completion_ids) for rollout in sampled.rollouts]
            versions = sorted({v for rollout in sampled.rollouts for v in rollout.versions or ()})
            found.append((trainer.state.global_step, slots, completions, versions))
        return share(rollouts, behaviour, mode)

    trainer.credit.gather = noting
    return found


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("covey-sampling")]


# ---- order, content, staleness ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, CYCLE, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}])
def test_samples_are_those_of_the_synchronous_run(tmp_path, cut):
    found = {}
    for staleness in (0, 1, 4):
        trainer = ahead(tmp_path / str(staleness), staleness, max_steps=5, **cut)
        found[staleness] = noted(trainer)
        trainer.train()
    for staleness in (1, 4):
        assert [each[:3] for each in found[staleness]] == [each[:3] for each in found[0]]
        for step, _, _, versions in found[staleness]:
            assert len(versions) == 1 and 0 <= step - versions[0] <= staleness


@pytest.mark.slow
def test_one_step_ahead_is_one_step_old_but_for_the_first(tmp_path):
    trainer = ahead(tmp_path, 1)
    found = noted(trainer)
    trainer.train()
    assert [step - versions[0] for step, _, _, versions in found] == [0, 1, 1, 1, 1, 1]
    assert runs.history(trainer, "sampling/staleness/mean") == [0, 1, 1, 1, 1, 1]
    assert runs.history(trainer, "sampling/staleness/max") == [0, 1, 1, 1, 1, 1]


@pytest.mark.slow
def test_staleness_counts_optimizer_steps_of_one_rollout_batch_too(tmp_path):
    # four steps a rollout batch: with 1, the next one is launched at the last of them; with 4, at the first
    for staleness, launched in ((1, [0, 3, 7]), (4, [0, 0, 4])):
        trainer = ahead(tmp_path, staleness, max_steps=12, **CYCLE)
        found = noted(trainer)
        trainer.train()
        assert [(step, versions) for step, _, _, versions in found] == [
            (0, [launched[0]]),
            (4, [launched[1]]),
            (8, [launched[2]]),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 4])
def test_two_runs_are_equal(tmp_path, staleness):
    first, second = (ahead(tmp_path / str(i), staleness, CopyEngine(tiny.model())) for i in range(2))
    first.train()
    second.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(first), runs.weights(second), strict=True))
    assert runs.history(first, "reward") == runs.history(second, "reward")


@pytest.mark.slow
def test_an_engine_of_ones_own_gets_the_weights_of_every_step(tmp_path):
    model = tiny.model()
    engine = CopyEngine(model)
    trainer = ahead(tmp_path, 0, engine, parts={"model": model})
    built_in = runs.trainer(tmp_path / "own", max_steps=6)
    trainer.train()
    built_in.train()
    assert runs.history(trainer, "reward") == runs.history(built_in, "reward")
    assert engine.version == 5 and runs.history(trainer, "sampling/staleness/max") == []


def test_weights_that_an_engine_did_not_take_end_the_run(tmp_path):
    engine = CopyEngine(tiny.model())
    trainer = ahead(tmp_path, 1, engine, engine_parity="off")
    take = engine.load_weights
    engine.load_weights = lambda update: take(update) if update.version == 0 else None
    with pytest.raises(RuntimeError, match=r"2 optimizer steps older .* max_staleness=1 allows 1"):
        trainer.train()


# ---- overlap ---------------------------------------------------------------------------------------------------------


def test_a_rollout_batch_is_sampled_while_the_last_is_trained_on(tmp_path):
    # Each waits for the other: the training of step n until the requests of rollout batch n + 1 have come, and
    # these, from rollout batch 1 on, until the training of step n has begun. In turns, neither would ever continue.
    engine, waited = scripted(), []
    trainer = ahead(tmp_path, 1, engine, max_steps=4)
    training = [threading.Event() for _ in range(4)]
    answer, compute = engine.generate, trainer.compute_loss

    async def generate(request):
        import asyncio

        rollout_batch = len(engine.served) // 2  # two prompts each
        answered = await answer(request)
        while rollout_batch and not training[rollout_batch - 1].is_set():
            await asyncio.sleep(0.001)
        return answered

    def compute_loss(*args, **kwargs):
        step = trainer.state.global_step
        training[step].set()
        until = time.monotonic() + 30
        while step < 3 and len(engine.served) < 2 * (step + 2) and time.monotonic() < until:
            time.sleep(0.001)
        waited.append((step, len(engine.served) // 2))
        return compute(*args, **kwargs)

    engine.generate, trainer.compute_loss = generate, compute_loss
    trainer.train()
    assert dict(waited) == {0: 2, 1: 3, 2: 4, 3: 4}


def test_waiting_for_samples_is_a_phase_of_its_own(tmp_path):
    trainer = ahead(tmp_path, 1, scripted(seconds=0.05))
    trainer.train()
    assert sum(runs.history(trainer, "phase/wait")) > 0
    assert runs.history(trainer, "phase/generate") == []


@pytest.mark.slow
def test_rewards_can_be_worked_out_ahead_too(tmp_path):
    found, lanes = [], []

    def on_which_thread(completion_ids, **kwargs):
        lanes.append(threading.current_thread().name)
        return runs.longer(completion_ids)

    for streamed in (False, True):
        parts = {"reward_funcs": on_which_thread}
        trainer = ahead(tmp_path / str(streamed), 2, CopyEngine(tiny.model()), parts=parts, stream_rewards=streamed)
        trainer.train()
        found.append((runs.history(trainer, "reward"), runs.weights(trainer)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    # a call per rollout batch in the main thread, then one per group beside it
    assert lanes[:6] == ["MainThread"] * 6 and len(lanes) == 18 and "MainThread" not in lanes[6:]


def test_gradients_are_off_for_the_engine_and_on_for_rewards(tmp_path):
    modes = {}
    for staleness in (0, 1):
        engine, seen = scripted(), set()
        answer = engine.generate

        async def generate(request, answer=answer, seen=seen):
            seen.add(("engine", torch.is_grad_enabled()))
            return await answer(request)

        def reward(completion_ids, seen=seen, **kwargs):
            seen.add(("reward", torch.is_grad_enabled()))
            return runs.longer(completion_ids)

        engine.generate, modes[staleness] = generate, seen
        parts = {"reward_funcs": reward}
        ahead(tmp_path / str(staleness), staleness, engine, parts=parts, stream_rewards=True, max_steps=3).train()
    assert modes[0] == modes[1] == {("engine", False), ("reward", True)}


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "method"), [({}, "grpo"), (CYCLE, "rloo")], ids=["on-policy", "several updates"])
def test_stale_tokens_weigh_training_over_sampling_weights(tmp_path, cut, method):
    model = tiny.model()
    settings = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5}
    trainer = ahead(tmp_path, 1, CopyEngine(model), method, {"model": model}, **settings, **cut)
    kept, used = runs.scored(trainer), []
    surrogate = trainer.run.algorithm.objective.surrogate

    def watching(x):
        used.append((x.log_ratio.detach(), x.mismatch_weights, trainer.state.global_step))
        return surrogate(x)

    objective = replace(trainer.run.algorithm.objective, surrogate=watching)
    trainer.run.method.algorithm = replace(trainer.run.algorithm, objective=objective)
    trainer.train()
    batch, scored = kept[1]  # the second rollout batch: sampled with weights that were trained since
    begins = 4 if cut else 1
    expected = (scored - batch.engine_logprobs).exp()
    assert (expected - 1).abs().max() > 0.05
    first = [(ratio, rho) for ratio, rho, step in used if step == begins]
    rho = torch.cat([rho for _, rho in first])
    # what is clipped is the policy against itself at the rollout batch's beginning: there it has not moved yet
    assert all(ratio.abs().max() < 1e-5 for ratio, _ in first)
    assert rho.max() <= 1.5 and rho.std() > 0.01
    if not cut:
        torch.testing.assert_close(rho.sort().values, expected.clamp(max=1.5).sort().values, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_engine_and_trainer_are_compared_on_fresh_samples_alone(tmp_path):
    engine = CopyEngine(tiny.model())
    trainer = ahead(tmp_path, 1, engine, learning_rate=0.3)  # stale samples differ by far more than rounding
    trainer.train()
    assert max(runs.history(trainer, "sampling/sampling_logp_difference/mean")) > 0.1
    assert trainer.behaviour.engine_check._left == 0  # both checks were made, the second with samples of its own


def test_an_engine_that_ignores_weights_is_detected(tmp_path):
    class Pretends(CopyEngine):
        def load_weights(self, update):
            if self.version is None:
                super().load_weights(update)
            self.version = update.version

    trainer = ahead(tmp_path, 1, Pretends(tiny.model()), learning_rate=0.3)
    with pytest.raises(ValueError, match="agreed before the last update, so the engine has stale weights"):
        trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.slow
def test_a_run_may_end_before_the_second_check(tmp_path):
    # resumed at its last step, whose rollout batch the checkpoint holds: nothing is launched, so nothing is sampled
    parts = {"eval_dataset": tiny.rows(2)}
    looks = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "max_steps": 3}
    saving = {"save_strategy": "steps", "save_steps": 1}
    ahead(tmp_path, 2, CopyEngine(tiny.model()), parts=parts, **looks, **saving).train()
    resumed = ahead(tmp_path, 2, CopyEngine(tiny.model()), parts=parts, **looks)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3


@pytest.mark.slow
def test_the_samples_for_the_check_change_nothing_about_the_run(tmp_path):
    found = []
    for parity in ("raise", "off"):
        trainer = ahead(tmp_path / parity, 2, CopyEngine(tiny.model()), engine_parity=parity)
        trainer.train()
        found.append(runs.weights(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- evaluation, checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [3])
def test_an_evaluation_has_current_weights_and_no_effect(tmp_path, staleness):
    engine = CopyEngine(tiny.model())
    parts = {"eval_dataset": tiny.rows(2)}
    looks = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    straight = ahead(tmp_path / "a", staleness, CopyEngine(tiny.model()))
    straight.train()
    evaluated = ahead(tmp_path / "b", staleness, engine, parts=parts, **looks)
    sample, seen = evaluated.rollouts.sample, []

    def watching(key, samples, mode, *more, **named):
        sampled = sample(key, samples, mode, *more, **named)
        if mode == "eval":
            seen.append((evaluated.state.global_step, {v for r in sampled.rollouts for v in r.versions}))
        return sampled

    evaluated.rollouts.sample = watching
    evaluated.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(evaluated), strict=True))
    assert runs.history(straight, "sampling/staleness/mean") == runs.history(evaluated, "sampling/staleness/mean")
    assert len(seen) == 12 and all(versions == {step} for step, versions in seen)  # two batches after each step


def sometimes_equal(prompts, completion_ids, **kwargs):
    """Prompts of even numbers give no signal."""
    return [float(sum(ids) % 7 * (int(p[0]) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)]


VARIANTS = {
    "one step ahead": (1, {}),
    "several steps ahead": (3, {}),
    "in the middle of a rollout batch": (2, CYCLE),
    "with rollout batches that share a step": (1, {"gradient_accumulation_steps": 4, "steps_per_generation": 2}),
    "with refills": (1, {"dynamic_sample": True}),
    "with prompts by difficulty": (2, {"prompt_sampler": "difficulty", "dynamic_sample": True}),
    "with a stream": (2, {"shuffle_dataset": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_resuming_is_exact(tmp_path, variant):
    staleness, settings = VARIANTS[variant]

    class Stream:
        def __iter__(self):
            return iter(tiny.rows(6))

    data = {"train_dataset": Stream()} if "stream" in variant else {}
    parts = {"reward_funcs": sometimes_equal, **data}

    def make(folder, **saving):
        engine = CopyEngine(tiny.model())
        return ahead(tmp_path / folder, staleness, engine, parts=parts, **{"max_steps": 8, **settings, **saving})

    straight = make("a")
    straight.train()
    make("b", save_strategy="steps", save_steps=3).train()
    resumed = make("b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))
    for name in ("loss", "reward", "num_tokens", "grad_norm", "sampling/staleness/mean", "dynamic_sampling/cost"):
        assert runs.history(straight, name) == runs.history(resumed, name)


@pytest.mark.slow
def test_a_checkpoint_of_a_run_ahead_can_go_on_by_turns(tmp_path):
    ahead(tmp_path, 2, save_strategy="steps", save_steps=3).train()
    resumed = ahead(tmp_path, 0)
    found = noted(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    straight = ahead(tmp_path / "straight", 0)
    expected = noted(straight)
    straight.train()
    assert [each[:3] for each in found] == [each[:3] for each in expected[3:]]


@pytest.mark.slow
def test_a_checkpoint_of_a_run_ahead_can_go_on_less_far_ahead(tmp_path):
    ahead(tmp_path, 4, save_strategy="steps", save_steps=3, max_steps=8).train()
    resumed = ahead(tmp_path, 1, max_steps=8)
    found = noted(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    straight = ahead(tmp_path / "straight", 0, max_steps=8)
    expected = noted(straight)
    straight.train()
    assert [each[:3] for each in found] == [each[:3] for each in expected[3:]]
    # rollout batches 3 to 7 were sampled with weights 0, 0, 1, 2 and 3: too old for this run, or launched too early
    assert [(step, versions) for step, _, _, versions in found] == [(3, [3]), (4, [3]), (5, [4]), (6, [5]), (7, [6])]


@pytest.mark.slow
def test_a_run_resumed_from_weights_alone_begins_its_schedule(tmp_path):
    ahead(tmp_path, 2, save_strategy="steps", save_steps=3, save_only_model=True).train()
    resumed = ahead(tmp_path, 2)
    found = noted(resumed)
    with pytest.warns(UserWarning, match="holds weights but not Covey's state"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [(step, versions) for step, _, _, versions in found] == [(3, [3]), (4, [3]), (5, [3])]


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_thread_is_left_when_training_has_ended(tmp_path):
    trainer = ahead(tmp_path, 4)
    trainer.train()
    assert trainer.rollouts.async_rollouts is None and threads() == []
    trainer.train()  # and it can be begun again
    assert trainer.state.global_step == 6 and threads() == []


def test_a_lost_server_ends_the_run_once_its_samples_are_needed(tmp_path):
    def gone(number):
        if number >= 6:  # the fourth rollout batch
            raise ConnectionError("the server at http://localhost:8000 is gone")
        return 0.0

    trainer = ahead(tmp_path, 2, scripted(seconds=gone))
    with pytest.raises(ConnectionError, match=r"the server at http://localhost:8000 is gone"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert threads() == []


class Interrupts(TrainerCallback):
    def __init__(self, error):
        self.error = error

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of a callback")])
def test_an_error_in_the_main_thread_does_not_wait_for_sampling(tmp_path, error):
    def at_last_for_ever(number):
        return 0.0 if number < 6 else 3600.0

    trainer = ahead(tmp_path, 1, scripted(seconds=at_last_for_ever), parts={"callbacks": [Interrupts(error)]})
    with pytest.raises(type(error)):
        trainer.train()
    assert threads() == []


def test_a_run_that_is_stopped_early_leaves_nothing_behind(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer = ahead(tmp_path, 4, parts={"callbacks": [Stops()]})
    trainer.train()
    assert trainer.state.global_step == 2 and threads() == []


# ---- which engines ---------------------------------------------------------------------------------------------------


def test_the_built_in_engine_cannot_sample_during_training(tmp_path):
    with pytest.raises(
        ValueError, match=r"max_staleness=1 with the built-in engine.*cannot be trained at the same time"
    ):
        runs.trainer(tmp_path, max_staleness=1)


def test_an_engine_that_shares_the_policy_cannot_either(tmp_path):
    built_in = runs.trainer(tmp_path).collector.engine
    with pytest.raises(ValueError, match="max_staleness=2 with NativeEngine"):
        runs.trainer(tmp_path, parts={"engine": built_in}, max_staleness=2)


def test_an_engine_is_an_argument_of_the_trainers(tmp_path):
    engine = scripted()
    trainer = GRPOTrainer(
        tiny.model(),
        reward_funcs=runs.longer,
        args=runs.config(tmp_path),
        train_dataset=tiny.rows(),
        processing_class=tiny.tokenizer(),
        engine=engine,
    )
    trainer.train()
    assert len(engine.served) == 4 and engine.version == 1
