"""Training runs of tiny models: they learn, log what they promise, and do not depend on how work is cut."""

import asyncio
import itertools
import string
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForSequenceClassification

from covey.observability.metric_docs import meaning
from covey.trainer.distributed.exchange import RolloutIndex
from tests.support import runs, tiny
from tests.support.engines import CopyEngine

METRICS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "num_tokens",
    "step_time",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "frac_advantage_zero",
    "entropy",
    "rewards/longer/mean",
    "rewards/longer/std",
    "reward/longer/mean",
    "reward/longer/std",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    *(f"completions/{which}_{what}" for which in ("mean", "min", "max") for what in ("length", "terminated_length")),
    "completions/clipped_ratio",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("grpo", {}),
        ("rloo", {}),
        ("grpo", {"dynamic_sample": True, "log_entropy": True, "entropy_coef": 0.1, "top_entropy_quantile": 0.5}),
    ],
)
def test_every_promised_metric_is_logged(tmp_path, method, changes):
    parts = {"eval_dataset": tiny.rows()}
    trained = runs.trainer(tmp_path, method, parts=parts, beta=0.1, eval_strategy="steps", eval_steps=1, **changes)
    trained.train()
    logged, evaluated = trained.state.log_history[:2]
    assert (METRICS | {"kl"}) - set(logged) == set()
    own = {"step", *(f"eval_{what}" for what in ("runtime", "samples_per_second", "steps_per_second"))}
    assert {name for name in {**logged, **evaluated} if meaning(name) is None} <= own  # metric_docs has all others
    assert logged["num_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_the_reward_rises(tmp_path, method):
    trained = runs.trainer(
        tmp_path,
        method,
        parts={"reward_funcs": runs.digits},
        max_steps=25,
        num_generations=8,
        beta=0.0,
        per_device_train_batch_size=16,
    )
    trained.train()
    rewards = runs.history(trained, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


@pytest.mark.parametrize("loss_type", ["dapo", "gmpo"])  # core/test_objective_invariance.py cuts with every loss
def test_accumulation_does_not_change_the_update(tmp_path, loss_type):
    cuts = [
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    ]
    results = []
    for cut in cuts:
        trained = runs.trainer(
            tmp_path, loss_type=loss_type, epsilon_high=0.2, max_steps=1, optim="sgd", max_grad_norm=0, **cut
        )
        trained.train()
        results.append(runs.weights(trained))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-5, atol=1e-6)


def test_skipping_rollouts_without_signal_changes_no_update(tmp_path, monkeypatch):
    def half(completions, prompts, **kwargs):  # constant within every other group
        return [float(len(c)) if int(p[0]) % 2 else 1.0 for c, p in zip(completions, prompts, strict=True)]

    results, trained_on = [], []
    for keep_all in (False, True):
        trained = runs.trainer(
            tmp_path, parts={"reward_funcs": half}, max_steps=1, optim="sgd", max_grad_norm=0, num_generations=2
        )
        if keep_all:
            monkeypatch.setattr(RolloutIndex, "without_signal_dropped", lambda index: index)
        compute, rollouts = trained.compute_loss, []
        monkeypatch.setattr(
            trained,
            "compute_loss",
            lambda model, inputs, compute=compute, rollouts=rollouts, **kw: (
                rollouts.append(len(inputs.lengths)) or compute(model, inputs, **kw)
            ),
        )
        trained.train()
        trained_on.append(sum(rollouts))
        results.append(runs.weights(trained))
    some, every = trained_on
    assert 0 < some < every == 8  # 4 prompts of 2 completions; those of even prompts carry no signal
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_reward_without_variance_changes_nothing(tmp_path):
    trained = runs.trainer(tmp_path, parts={"reward_funcs": lambda completions, **kw: [0.1] * len(completions)})
    before = runs.weights(trained)
    trained.train()
    assert all(torch.equal(a, b) for a, b in zip(before, runs.weights(trained), strict=True))
    assert runs.history(trained, "frac_reward_zero_std") == [1.0, 1.0]
    assert runs.history(trained, "loss") == [0.0, 0.0]


@pytest.mark.slow
def test_a_step_over_two_rollout_batches_divides_by_its_shares(tmp_path, monkeypatch):
    # Three micro-batches a rollout batch, two a step: the second step takes one micro-batch of each of
    # two rollout batches, and dapo divides by a third of the one's tokens and a third of the other's.
    trained = runs.trainer(tmp_path, steps_per_generation=3, max_steps=3, max_completion_length=30, seed=3)
    weights, plan = [], trained.updates.runner.plan
    batches = runs.experiences(trained)
    monkeypatch.setattr(
        trained.updates.runner,
        "plan",
        lambda batch, *args, **kw: weights.append(batch.weights) or plan(batch, *args, **kw),
    )
    trained.train()
    first, second = (batch.sampled.sum().item() for batch in batches)
    assert [weight.unique().tolist() for weight in weights] == [
        [pytest.approx(1 / divisor)] for divisor in (first * 2 / 3, (first + second) / 3, second * 2 / 3)
    ]


def test_several_updates_per_rollout_batch_are_off_policy(tmp_path):
    trained = runs.trainer(
        tmp_path,
        parts={"reward_funcs": runs.digits},
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=4,
    )
    rollout_batches = []
    collect = trained.collector.collect
    trained.collector.collect = lambda *args: rollout_batches.append(1) or collect(*args)
    trained.train()
    assert len(rollout_batches) == 1
    assert runs.history(trained, "clip_ratio/region_mean")[0] == 0.0  # the first update is on-policy
    assert max(runs.history(trained, "clip_ratio/region_mean")[1:]) > 0.0


def test_every_update_logs_its_entropy(tmp_path):
    cycle = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 5}
    trained = runs.trainer(tmp_path, **cycle)
    trained.train()
    entropies = runs.history(trained, "entropy")
    assert len(entropies) == 5 and all(entropy > 1 for entropy in entropies)


@pytest.mark.parametrize(("cut", "all_of_them"), [({}, False), ({"num_iterations": 2}, True)], ids=["on", "off policy"])
def test_entropies_are_of_all_completions_where_they_are_scored(tmp_path, monkeypatch, cut, all_of_them):
    def half(completions, prompts, **kwargs):  # constant within every other group
        return [float(len(c)) if int(p[0]) % 2 else 1.0 for c, p in zip(completions, prompts, strict=True)]

    engine = CopyEngine(tiny.model())
    settings = {
        "num_generations": 2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
        "max_steps": 1,
    }
    trained = runs.trainer(tmp_path, parts={"reward_funcs": half, "engine": engine}, **settings, **cut)
    generate = engine.generate

    async def without_entropies(request):
        return [replace(one, entropies=None) for one in await generate(request)]

    monkeypatch.setattr(engine, "generate", without_entropies)
    add, counted = trained.metrics.add, []
    trained_on = runs.experiences(trained)

    def counting(stats, mode):
        if "entropy" in stats:
            assert mode == "train"
            counted.append(stats["entropy"].count)
        add(stats, mode)

    monkeypatch.setattr(trained.metrics, "add", counting)
    trained.train()
    tokens = trained_on[0].sampled.sum().item()
    assert sum(counted) == tokens if all_of_them else 0 < sum(counted) < tokens


def test_the_reference_starts_as_the_policy(tmp_path):
    trained = runs.trainer(tmp_path, beta=0.1, max_steps=3)
    trained.train()
    kl = runs.history(trained, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4


def test_a_followed_reference_becomes_the_policy(tmp_path):
    trained = runs.trainer(tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0)
    trained.train()
    with trained.reference.model(trained.policy) as reference:
        for a, b in zip(reference.parameters(), trained.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_abstaining_rewards_are_left_out(tmp_path):
    def even(prompts, **kwargs):
        return [None if int(p[0]) % 2 else 1.0 for p in prompts]

    trained = runs.trainer(tmp_path, parts={"reward_funcs": [runs.longer, even]})
    trained.train()
    assert runs.history(trained, "rewards/even/mean")[0] == 1.0


def test_async_rewards_and_extra_logs_work(tmp_path):
    async def slow(completions, log_metric, log_extra, **kwargs):
        await asyncio.sleep(0.01)
        log_metric("my_metric", 3.0)
        log_extra("shout", [text.upper() for text in completions])
        return [float(len(text)) for text in completions]

    trained = runs.trainer(
        tmp_path, parts={"reward_funcs": [slow, runs.longer]}, reward_weights=[0.5, 2.0], export_completions=True
    )
    trained.train()
    assert runs.history(trained, "my_metric") == [3.0, 3.0]
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00001.parquet")
    assert {"step", "prompt", "completion", "slow", "longer", "shout", "advantage"} <= set(table.column_names)
    assert set(table["step"].to_pylist()) == {1}  # as the file and the terminal call it


def test_a_reward_model_scores(tmp_path):
    torch.manual_seed(0)
    judge = LlamaForSequenceClassification(tiny.config(num_labels=1))
    trained = runs.trainer(
        tmp_path, parts={"reward_funcs": [judge, runs.longer], "reward_processing_classes": [tiny.tokenizer(), None]}
    )
    trained.train()
    assert len(trained.rewards.names) == 2


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_conversations_are_trained_on(tmp_path, method):
    def content(completions, **kwargs):
        return [float(len(c[0]["content"])) for c in completions]

    runs.trainer(
        tmp_path, method, parts={"reward_funcs": content, "train_dataset": tiny.rows(conversational=True)}
    ).train()


def test_rows_may_be_transformed_as_they_are_read(tmp_path):
    from datasets import Dataset

    seen = []

    def reward(completion_ids, prompts, size, **kwargs):
        seen.extend(zip(prompts, size, strict=True))
        return runs.longer(completion_ids)

    rows = Dataset.from_list(tiny.rows())
    rows.set_transform(
        lambda batch: {"prompt": [text + "?" for text in batch["prompt"]], "size": [7] * len(batch["prompt"])}
    )
    runs.trainer(tmp_path, parts={"train_dataset": rows, "reward_funcs": reward}, max_steps=1).train()
    assert len(seen) == 8 and all(prompt.endswith("=?") and size == 7 for prompt, size in seen)


@pytest.mark.slow
def test_iterable_datasets_are_trained_and_evaluated_on(tmp_path):
    from datasets import Dataset

    stream = Dataset.from_list(tiny.rows(16)).to_iterable_dataset()
    trained = runs.trainer(
        tmp_path, parts={"train_dataset": stream, "eval_dataset": stream}, per_device_eval_batch_size=4
    )
    trained.train()
    assert trained.evaluate()["eval_reward"] > 0


def test_named_evaluation_sets_are_evaluated(tmp_path):
    trained = runs.trainer(
        tmp_path,
        parts={"eval_dataset": {"easy": tiny.rows(3), "hard": tiny.rows(5)}},
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        max_steps=1,
    )
    trained.train()
    assert runs.history(trained, "eval_easy_reward") and runs.history(trained, "eval_hard_rewards/longer/mean")
    assert runs.history(trained, "eval_easy_loss")


def test_evaluation_sees_every_prompt_once(tmp_path):
    seen = []

    def spy(prompts, **kwargs):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    trained = runs.trainer(
        tmp_path,
        parts={"reward_funcs": spy, "eval_dataset": tiny.rows(5)},
        per_device_eval_batch_size=4,
        num_generations_eval=2,
    )
    trained.evaluate()
    assert sorted(seen) == sorted(p["prompt"] for p in tiny.rows(5) for _ in range(2))


@pytest.mark.parametrize(
    "options",
    [
        {"top_entropy_quantile": 0.2},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 100.0},
        {"mask_truncated_completions": True},
        {"off_policy_mask_threshold": 0.1, "num_iterations": 2},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        {"importance_sampling_level": "sequence_token", "num_iterations": 2},
        {"scale_rewards": "batch"},
        {"scale_rewards": False},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"repetition_penalty": 1.2, "top_k": 10, "top_p": 0.9, "min_p": 0.01},
        {"gradient_checkpointing": True},
        {"attn_layout": "padded"},
        {"attn_layout": "packed"},
        {"attn_layout": "shared_prefix", "gradient_checkpointing": True},
        {"cast_lm_head_to_fp32": True},
        {"beta": 0.1, "kl_estimator": "k2"},
        {"bf16": True},
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_options_run(tmp_path, options):
    trained = runs.trainer(tmp_path, **options)
    trained.train()
    assert all(torch.isfinite(w).all() for w in runs.weights(trained))


@pytest.mark.slow
def test_the_entropy_bonus_raises_the_entropy(tmp_path):
    ends = []
    for coef in (0.0, 1.0):
        trained = runs.trainer(
            tmp_path,
            parts={"reward_funcs": lambda completions, **kw: [0.0] * len(completions)},
            entropy_coef=coef,
            max_steps=6,
        )
        trained.train()
        ends.append(runs.history(trained, "entropy"))
    assert ends[1][-1] > ends[0][-1] + 0.05


def test_truncated_completions_can_be_left_out(tmp_path):
    trained = runs.trainer(tmp_path, mask_truncated_completions=True, max_completion_length=1)
    before = runs.weights(trained)
    trained.train()
    changed = [not torch.equal(a, b) for a, b in zip(before, runs.weights(trained), strict=True)]
    if runs.history(trained, "completions/clipped_ratio") == [1.0, 1.0]:
        assert not any(changed)


@pytest.mark.slow
def test_an_epoch_goes_through_every_prompt(tmp_path):
    seen = []

    def spy(prompts, **kwargs):
        seen.extend(prompts)
        return list(itertools.islice(itertools.cycle([0.0, 1.0]), len(prompts)))

    trained = runs.trainer(tmp_path, parts={"reward_funcs": spy}, max_steps=-1, num_train_epochs=1)
    trained.train()
    assert sorted(seen) == sorted(row["prompt"] for row in tiny.rows() for _ in range(4))
    assert trained.state.global_step == 4  # 8 prompts x 4 completions / (4 x 2 per update)


def test_the_bonus_is_the_loss_minus_the_policy_loss(tmp_path):
    trained = runs.trainer(tmp_path, entropy_coef=0.1, max_steps=2)
    trained.train()
    for entry in trained.state.log_history[:2]:
        assert entry["entropy_coef"] == 0.1
        assert entry["loss"] == pytest.approx(entry["policy_loss"] - 0.1 * entry["entropy"], abs=1e-4)


def test_the_rollout_batches_of_a_step_have_one_entropy_threshold(tmp_path):
    trained = runs.trainer(
        tmp_path,
        top_entropy_quantile=0.5,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
        max_steps=1,
        max_tokens_per_micro_batch=40,
    )
    thresholds = []
    compute = trained.compute_loss
    trained.compute_loss = lambda model, inputs, **kw: (
        thresholds.append(inputs.entropy_threshold) or compute(model, inputs, **kw)
    )
    trained.train()
    assert len(thresholds) > 1 and len(set(thresholds)) == 1 and None not in thresholds


@pytest.mark.slow
def test_evaluations_of_the_same_weights_agree(tmp_path):
    trained = runs.trainer(tmp_path, parts={"eval_dataset": tiny.rows(4)}, per_device_eval_batch_size=4)
    first, second = trained.evaluate(), trained.evaluate()
    assert first["eval_reward"] == second["eval_reward"] and first["eval_loss"] == second["eval_loss"]
    assert trained.predict(tiny.rows(4)).metrics["test_reward"] == first["eval_reward"]


@pytest.mark.slow
def test_an_engine_that_samples_from_another_policy_is_detected(tmp_path):
    trained = runs.trainer(tmp_path)
    other = tiny.model(seed=1)
    trained.collector.engine._model = lambda: other
    with pytest.raises(ValueError, match="log-probs differ"):
        trained.train()


@pytest.mark.parametrize("rollout_batches", [1, 2], ids=["one rollout batch", "two rollout batches"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo", "rloo"])
def test_the_logged_loss_is_the_formulas(tmp_path, loss_type, rollout_batches):
    method = "rloo" if loss_type == "rloo" else "grpo"
    settings = {"max_completion_length": 30, "max_steps": 1, "seed": 3, "steps_per_generation": 2 // rollout_batches}
    trained = runs.trainer(tmp_path, method, loss_type=loss_type, **settings)
    batches = runs.experiences(trained)
    trained.train()
    lengths = [int(n) for batch in batches for n in batch.lengths]
    credit = [float(a[0]) for batch in batches for a in batch.advantages.split(batch.lengths.tolist())]
    rollouts = len(credit)
    assert len(batches) == rollout_batches and rollouts == 8
    assert sum(lengths[:4]) != sum(lengths[4:])  # two micro-batches of 4
    # On-policy every ratio is 1, so a token's loss is -A; only the average differs.
    losses = [-a * n for a, n in zip(credit, lengths, strict=True)]
    expected = {
        "dapo": sum(losses) / sum(lengths),
        "grpo": -sum(credit) / rollouts,
        "bnpo": (sum(losses[:4]) / sum(lengths[:4]) + sum(losses[4:]) / sum(lengths[4:])) / 2,
        "dr_grpo": sum(losses) / (rollouts * 30),  # max_completion_length
        "luspo": sum(losses) / rollouts,
        "rloo": -sum(credit) / rollouts,
    }[loss_type]
    assert runs.history(trained, "loss")[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_continuous_batching_means_the_built_in_engine(tmp_path):
    with pytest.warns(UserWarning, match="batches continuously itself"):
        asked = runs.trainer(tmp_path / "asked", use_transformers_continuous_batching=True, speculative_reuse="exact")
    usual = runs.trainer(tmp_path / "usual", speculative_reuse="exact")
    asked.train(), usual.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(asked), runs.weights(usual), strict=True))


def test_completions_end_at_stop_texts_and_are_not_truncated(tmp_path):
    """Every completion holds one of these characters sooner or later, and its first is its last token."""
    texts = []

    def reward(completions, **kwargs):
        texts.extend(completions)
        return [float(len(text)) for text in completions]

    stop = [*string.ascii_letters, *string.digits]
    kwargs = {"generation_kwargs": {"stop_strings": stop, "do_sample": True}, "max_completion_length": 40}
    trained = runs.trainer(tmp_path, parts={"reward_funcs": reward}, max_steps=1, **kwargs)
    trained.train()
    assert all(sum(character in stop for character in text) <= 1 for text in texts)
    assert sum(text[-1:] in stop for text in texts) > len(texts) // 2
    assert trained.state.log_history[0]["completions/clipped_ratio"] == 0
    with pytest.raises(ValueError, match=r"'exact' with generation_kwargs=.*cannot be checked in one forward pass"):
        runs.trainer(tmp_path, speculative_reuse="exact", num_train_epochs=2, generation_kwargs={"min_tokens": 2})


class Unmeasured(CopyEngine):
    """An engine that reports no entropies, as servers do."""

    async def generate(self, request):
        return [replace(completion, entropies=None) for completion in await super().generate(request)]


@pytest.mark.slow
@pytest.mark.parametrize("unreported", [0, 1])
def test_the_entropy_of_a_step_is_that_of_all_its_rollout_batches(tmp_path, unreported):
    """Two rollout batches in a step, one of them without entropies of the engine: each token counts once."""
    logged = []
    for name, missing in (("some", {unreported}), ("none", {0, 1})):
        settings = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 1, "logging_steps": 1}
        trained = runs.trainer(tmp_path / name, **settings)
        collect, batches = trained.collector.collect, itertools.count()

        def collecting(*args, collect=collect, batches=batches, missing=missing, **kwargs):
            rollouts, number = collect(*args, **kwargs), next(batches)
            return [replace(one, entropies=None) if number in missing else one for one in rollouts]

        trained.collector.collect = collecting
        trained.train()
        assert next(batches) == 2
        logged.append(trained.state.log_history[0]["entropy"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)


def test_what_ends_a_run_ends_all_of_it(tmp_path, monkeypatch):
    """An error of the report, as of a closed pipe, leaves no sampling thread and no worker process behind."""
    trained = runs.trainer(tmp_path, max_steps=1)
    ended = []

    def fails():
        raise BrokenPipeError

    monkeypatch.setattr(trained.report, "end", fails)
    monkeypatch.setattr(trained.rollouts.weight_sync, "forget", lambda: ended.append("weights"))
    monkeypatch.setattr(trained.rollouts.rewards, "close", lambda: ended.append("rewards"))
    with pytest.raises(BrokenPipeError):
        trained.train()
    assert ended[-2:] == ["weights", "rewards"]


@pytest.mark.parametrize("reported", [True, False])
def test_entropies_of_completions_are_logged(tmp_path, reported):
    """With log_entropy: a column of their means, whose extremes are metrics and whose mean by tokens is `entropy`."""
    import pyarrow.parquet

    rows = [{**row, "solution": row["answer"] + "!"} for row in tiny.rows()]
    parts = {"train_dataset": rows} if reported else {"train_dataset": rows, "engine": Unmeasured(tiny.model())}
    trained = runs.trainer(tmp_path, parts=parts, max_steps=1, export_completions=True, log_entropy=True)
    trained.train()
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00001.parquet").to_pydict()
    assert all(text.endswith("!") for text in table["solution"])
    means, logged = table["entropy"], trained.state.log_history[0]
    assert logged["entropy/min"] == pytest.approx(min(means)) and logged["entropy/max"] == pytest.approx(max(means))
    assert logged["entropy/mean"] == pytest.approx(sum(means) / len(means))
    by_token = sum(mean * length for mean, length in zip(means, table["length"], strict=True)) / sum(table["length"])
    assert logged["entropy"] == pytest.approx(by_token, rel=1e-4)
    assert logged["entropy/min"] < logged["entropy"] < logged["entropy/max"]


def test_entropies_do_not_depend_on_who_measures_them(tmp_path):
    logs = []
    # Truncated completions are measured all the same; with the bias of the end token some end earlier.
    settings = {"mask_truncated_completions": True, "generation_kwargs": {"logit_bias": {"1": 4.0}}}
    for name, parts in (("own", {}), ("scored", {"engine": Unmeasured(tiny.model())})):
        trained = runs.trainer(tmp_path / name, parts=parts, max_steps=1, logging_steps=1, log_entropy=True, **settings)
        trained.train()
        logs.append({key: trained.state.log_history[0][key] for key in ("entropy", "entropy/min", "entropy/max")})
        assert 0 < trained.state.log_history[0]["completions/clipped_ratio"] < 1
    assert logs[0] == pytest.approx(logs[1], rel=1e-4)
