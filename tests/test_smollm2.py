"""The real model, SmolLM2-135M-Instruct: what holds for tiny models holds for it."""

import pytest
import torch

pytestmark = pytest.mark.slow
pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def real():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from covey.cli.demo import model_folder

    folder = model_folder()
    torch.set_num_threads(2)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def collected(real, max_sequences, prompts=4, group=4):
    from covey.cli.demo import sums
    from covey.core.engine import SamplingParams
    from covey.engines.native.engine import NativeEngine
    from covey.rollout.collector import Collector, PromptSample
    from covey.rollout.prompts import PromptCodec

    model, tokenizer = real
    engine = NativeEngine(lambda: model, eos_token_ids={2}, pad_token_id=2, max_sequences=max_sequences)
    rows = sums(seed=0)[0][:prompts]
    draws = [PromptSample(row, i, g) for i, row in enumerate(rows) for g in range(group)]
    collector = Collector(engine, PromptCodec(tokenizer, None, None), seed=0)
    return collector.collect(draws, SamplingParams(max_tokens=24), ("test", 0))


def test_samples_do_not_depend_on_the_batch_size(real):
    reference = [r.completion_ids for r in collected(real, 16)]
    assert [r.completion_ids for r in collected(real, 3)] == reference
    assert [r.completion_ids for r in collected(real, 1)] == reference


def test_the_engines_logprobs_are_the_scorers(real):
    from covey.core.batch import collate
    from covey.policy.scoring import TokenScorer

    rollouts = collected(real, 16)
    batch = collate(rollouts)
    for layout in ("shared_prefix", "packed", "padded"):
        scorer = TokenScorer(lambda m: m, temperature=1.0, layout=layout)
        with torch.no_grad():
            scores = scorer(real[0], batch, entropy=True)
        torch.testing.assert_close(scores.logprobs, batch.engine_logprobs, rtol=0, atol=1e-4)
        entropies = torch.tensor([e for r in rollouts for e in r.entropies])
        torch.testing.assert_close(scores.entropies, entropies, rtol=0, atol=1e-3)


@pytest.mark.pages
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_demo_learns(tmp_path, real):
    from covey.cli.demo import run

    summary = run(tmp_path, seed=0, max_steps=10, minutes=20)
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
    for name in ("report.html", "summary.json", "record/generation_00000.parquet"):
        assert (tmp_path / name).exists()


def test_eight_variants_of_a_study_are_their_solo_runs(tmp_path, real):
    from benchmarks.study import ADAPTER, PROMPTS, SETTINGS, VARIANTS, reward
    from peft import LoraConfig

    from covey import GRPOConfig, GRPOTrainer
    from covey.cli.demo import model_folder
    from covey_tools.study.study import Study
    from tests.support.studies import adapters, completions

    settings = {**SETTINGS, "max_steps": 2, "max_completion_length": 16}
    variants = {f"v{number}": changes for number, changes in enumerate(VARIANTS[:8])}
    together = {**settings, "peft": ADAPTER, "output_dir": str(tmp_path / "study")}
    Study(model_folder(), variants, together, reward_funcs=reward, train_dataset=PROMPTS).train()
    for name, changes in variants.items():
        own = {**settings, "learning_rate": changes["learning_rate"], "output_dir": str(tmp_path / name)}
        adapter = LoraConfig(task_type="CAUSAL_LM", **{**ADAPTER, **changes["peft"]})
        alone = GRPOTrainer(model_folder(), reward, GRPOConfig(**own, save_strategy="no"), PROMPTS, peft_config=adapter)
        alone.train()
        alone.save_model()
        assert completions(tmp_path / "study" / name) == completions(tmp_path / name)
        ours = adapters(tmp_path / "study" / name)
        for key, weight in adapters(tmp_path / name).items():
            torch.testing.assert_close(ours[key], weight, rtol=0, atol=1e-5)
