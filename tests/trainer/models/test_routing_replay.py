"""Runs of mixtures of experts that replay routes: those of the engine (R3), or of the old policy (R2)."""

import warnings

import pytest
import torch
from peft import LoraConfig

from covey.config.base import OnlineConfig
from covey.core.engine import EngineTraits
from covey.core.findings import CheckError
from covey.core.routes import are_known, differing
from covey.core.routing import routing_of
from covey.observability.record import files, read_rows
from tests.support import mixtures, runs, tiny
from tests.support.engines import CopyEngine
from tests.support.players import PLAYERS

DIFFERENCE = "sampling/sampling_logp_difference/max"
OFF_POLICY = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4}
BF16 = {"correct_built_in_engine": True, "engine_parity": "off"}


def mixture(name="Mixtral", **changes):
    return mixtures.model(name, **changes)


def other(model):
    """The same model with other routers, so that it chooses other experts."""
    with torch.no_grad():
        for router in routing_of(model).routers:
            router.weight.add_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(5)))
    return model


def make(folder, replay="R3", model=None, parts=None, **settings):
    given = {"model": model or mixture(), **(parts or {})}
    return runs.trainer(folder, parts=given, routing_replay=replay, router_aux_loss_coef=0.0, **settings)


def trained(folder, *args, **settings):
    trainer = make(folder, *args, **settings)
    trainer.train()
    return trainer


class Disagrees(CopyEngine):
    """An engine whose routers are others, as those of other kernels are now and then, and which reports its experts."""

    def __init__(self, model, **traits):
        super().__init__(other(model))
        self.traits = EngineTraits(returns_routes=True, batch_invariant=True, **traits)

    def load_weights(self, update):
        self.version = update.version  # its weights stay, which a small learning rate does not tell


def disagreeing(**traits):
    return {"engine": Disagrees(mixture(), **traits)}


def assert_routes_are_the_engines(trainer, batch):
    own = trainer.batch_scorer.routes(batch)
    assert are_known(batch.routes).any()
    assert not differing(batch.routes, own).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", mixtures.SETTINGS)
def test_no_route_differs_with_r3(tmp_path, name):
    with warnings.catch_warnings(action="ignore"):
        trainer = make(tmp_path, model=mixture(name), parts={"engine": None} if name else {}, learning_rate=1e-5)
        found = runs.experiences(trainer)
        trainer.train()
    assert runs.history(trainer, "routing/differing") == [0.0, 0.0]
    assert max(runs.history(trainer, "routing/replaced")) < 1e-3, "float32 ties alone"
    assert all(batch.routes is not None for batch in found)


@pytest.mark.slow
def test_an_engine_with_other_routers_is_replayed(tmp_path):
    settings = {"engine_parity": "warn", "learning_rate": 1e-5}
    with warnings.catch_warnings(action="ignore"):
        free = trained(tmp_path / "free", None, parts=disagreeing(), **settings)
        replaying = make(tmp_path / "r3", parts=disagreeing(), **settings)
        found = runs.experiences(replaying)
        replaying.train()
    assert runs.history(free, "routing/differing")[0] > 0.2
    assert runs.history(replaying, "routing/differing")[0] == 0
    assert 0.2 < runs.history(replaying, "routing/replaced")[0] < 1
    assert not runs.history(free, "routing/replaced")
    for batch in found:
        assert_routes_are_the_engines(replaying, batch)


@pytest.mark.slow
def test_r2_replays_what_the_old_policy_chose(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        trainer = make(tmp_path, "R2", learning_rate=3e-2, **OFF_POLICY)
        found = runs.experiences(trainer)
        compute, ratios = trainer.updates.compute_loss, []
        first = {}

        def computing(model, batch, plan, number):
            assert batch.routes is not None
            ratios.append(trainer.batch_scorer.logprobs(trainer.policy, batch) - batch.old_logprobs)
            first.setdefault(id(plan), torch.equal(ratios[-1], torch.zeros_like(ratios[-1])))
            return compute(model, batch, plan, number)

        trainer.updates.compute_loss = computing
        trainer.train()
    assert ratios[0].abs().max() < 1e-5, "before any update the ratio is 1"
    assert ratios[-1].abs().max() > 1e-4
    replaced = runs.history(trainer, "routing/replaced")
    assert replaced[0] == 0 and max(replaced) > 0, "later updates have routers that would choose others"
    assert all(batch.routes.shape[1:] == (2, 2) for batch in found)


def test_r2_in_an_on_policy_run_is_pointed_out():
    with pytest.warns(UserWarning, match="routing_replay"):
        runs.config("/tmp/x", routing_replay="R2")


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_cut(tmp_path):
    gradients = []
    cuts = (
        {"max_tokens_per_micro_batch": 10**6},
        {"max_tokens_per_micro_batch": 30},
        {"attn_layout": "padded"},
        {"attn_layout": "packed", "gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    )
    for number, cut in enumerate(cuts):
        with warnings.catch_warnings(action="ignore"):
            trainer = make(
                tmp_path / str(number), parts=disagreeing(), engine_parity="off", max_steps=1, optim="sgd", **cut
            )
            before = runs.weights(trainer)
            trainer.train()
        gradients.append(torch.cat([(a - b).flatten() for a, b in zip(before, runs.weights(trainer), strict=True)]))
    assert gradients[0].abs().max() > 1e-4
    for one in gradients[1:]:
        torch.testing.assert_close(one, gradients[0], atol=2e-6, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["R2", "R3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1},
        {"beta": 0.1, "kl_in_reward": True},
        {"entropy_coef": 0.01, "log_entropy": True},
        {"top_entropy_quantile": 0.5, "dynamic_sample": True},
        {"top_p": 0.8, "keep_sampling_mask": True},
        {"demonstrations": "tests/support/demonstrations.jsonl"},
        {"teacher": "start"},
        {"parts": {"rollout_func": PLAYERS["one rollout"]}, "max_completion_length": 12},
        {"parts": {"rollout_func": PLAYERS["a group"]}, "max_completion_length": 12},
        {"speculative_reuse": "exact", "max_steps": 8, "learning_rate": 1e-3},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 8, "max_steps": 2},
        {"parts": {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}},
        {"router_aux_loss_coef": 0.1},
        {"eval_strategy": "steps", "eval_steps": 2, "parts": {"eval_dataset": tiny.rows()[:2]}},
    ],
    ids=lambda settings: ",".join(settings),
)
def test_it_goes_with_other_settings(tmp_path, replay, settings):
    given = {**OFF_POLICY, "per_device_eval_batch_size": 8, "engine_parity": "off", **settings}
    parts = {"model": mixture(), **given.pop("parts", {})}
    with warnings.catch_warnings(action="ignore"):
        trainer = runs.trainer(tmp_path, parts=parts, routing_replay=replay, **{"router_aux_loss_coef": 0.0, **given})
        found = runs.experiences(trainer)
        trainer.train()
    assert all(torch.isfinite(weight).all() for weight in runs.weights(trainer))
    off_policy = not trainer.run.algebra.on_policy
    if replay == "R3" or off_policy:
        assert found and all(are_known(batch.routes).sum() > 0 for batch in found if batch.num_tokens)
        assert runs.history(trainer, "routing/replaced")


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_resuming_in_the_middle_of_a_rollout_batch_is_exact(tmp_path, replay):
    with warnings.catch_warnings(action="ignore"):
        straight = trained(tmp_path / "a", replay, save_strategy="steps", save_steps=1, **OFF_POLICY)
        resumed = make(tmp_path / "b", replay, **OFF_POLICY)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))


@pytest.mark.slow
def test_a_replay_of_the_record_has_the_same_routes(tmp_path):
    settings = {"engine_parity": "off", "max_steps": 2}
    with warnings.catch_warnings(action="ignore"):
        first = trained(tmp_path / "a", parts=disagreeing(), record="tokens", **settings)
        second = trained(tmp_path / "b", replay_from=str(tmp_path / "a"), **settings)
        plain = trained(tmp_path / "c", None, parts=disagreeing(), record="tokens", **settings)
        with pytest.raises(ValueError, match="without the experts of their tokens"):
            trained(tmp_path / "d", replay_from=str(tmp_path / "c"), **settings)
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(first), runs.weights(second), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(runs.weights(first), runs.weights(plain), strict=True))
    assert "routes" in read_rows(files(tmp_path / "a" / "record")[0])[0]
    assert "routes" not in read_rows(files(tmp_path / "a" / "record")[0], of_tokens=False)[0]


@pytest.mark.slow
def test_rollouts_sampled_ahead_keep_their_routes(tmp_path):
    settings = {"max_staleness": 1, "engine_parity": "off", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    with warnings.catch_warnings(action="ignore"):
        trainer = make(tmp_path, parts=disagreeing(), **settings)
        found = runs.experiences(trainer)
        trainer.train()
        resumed = make(tmp_path / "b", parts=disagreeing(), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(are_known(batch.routes).any() for batch in found)
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(trainer), runs.weights(resumed), strict=True))


def bf16_gap(folder, replay):
    """Mean k3 of engine and trainer in bfloat16 over a few rollout batches, whose weights hardly move."""
    model = mixture("Qwen3Moe", num_experts=16, num_experts_per_tok=4, num_hidden_layers=4).bfloat16()
    with warnings.catch_warnings(action="ignore"):
        trainer = make(folder, replay, model=model, learning_rate=1e-12, max_steps=2, max_completion_length=12, **BF16)
        found = runs.experiences(trainer)
        trainer.train()
    ks = []
    for batch in found:
        logs = (trainer.batch_scorer.logprobs(trainer.policy, batch) - batch.engine_logprobs)[batch.sampled].double()
        ks.append((logs.exp() - 1 - logs).mean().item())
    return sum(ks) / len(ks), trainer


@pytest.mark.slow
def test_engine_and_trainer_are_closer_in_bf16_with_r3(tmp_path):
    without, free = bf16_gap(tmp_path / "free", None)
    with_it, _ = bf16_gap(tmp_path / "r3", "R3")
    assert with_it < without / 2, (with_it, without)
    assert free.run.args.routing_replay is None


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_dense_model_is_refused_with_advice(tmp_path):
    for replay in ("R2", "R3"):
        with warnings.catch_warnings(action="ignore"), pytest.raises(CheckError) as caught:
            make(tmp_path, replay, model=tiny.model())
        assert caught.value.codes == ["model-routes"]


@pytest.mark.parametrize(
    "settings",
    [
        {"routing_replay": "R3", "torch_compile": True},
        {"routing_replay": "R3", "use_vllm": True, "vllm_mode": "colocate"},
    ],
    ids=str,
)
def test_settings_that_cannot_replay_are_refused(tmp_path, settings):
    with warnings.catch_warnings(action="ignore"), pytest.raises(CheckError) as caught:
        runs.config(tmp_path, **settings)
    assert "routing-replay" in caught.value.codes


def test_an_engine_that_returns_no_routes_is_refused(tmp_path):
    with pytest.raises(CheckError) as caught:
        make(tmp_path, parts={"engine": CopyEngine(mixture())})
    assert caught.value.codes == ["routing-replay"]


def test_rollouts_without_routes_are_refused(tmp_path):
    trainer = make(tmp_path, parts={"rollout_func": PLAYERS["a rollout batch"]})
    with pytest.raises(ValueError, match="has no `routes`"):
        trainer.train()


def test_other_words_are_refused(tmp_path):
    with pytest.raises(CheckError) as caught:
        runs.config(tmp_path, routing_replay="R1")
    assert caught.value.codes == ["setting-word"]


def test_the_default_is_off():
    assert OnlineConfig.__dataclass_fields__["routing_replay"].default is None
