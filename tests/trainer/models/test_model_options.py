"""How a model is loaded and run: each setting does what it says, and none but the number format changes the result."""

import json
import shutil
import textwrap
import warnings

import pytest
import torch
from transformers import AutoConfig

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.scoring import TokenScorer
from tests.support import hybrids, runs, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("model") / "tiny")


def trained(output, folder, **changes):
    """A run of two steps on a model that the trainer loads itself."""
    trainer = runs.trainer(output, parts={"model": folder, "processing_class": None}, **changes)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def usual(tmp_path_factory, folder):
    return trained(tmp_path_factory.mktemp("usual"), folder)


def assert_same_run(trainer, usual, **tolerance):
    for ours, theirs in zip(runs.weights(trainer), runs.weights(usual), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


ATTENTION = {"eager": "padded", "sdpa": "shared_prefix"}


@pytest.mark.parametrize("name", ATTENTION)
def test_an_attention_that_is_asked_for_is_used(tmp_path, folder, usual, name):
    """Eager is kept, and with it padded rows; SDPA is what the fast layouts take the place of."""
    trainer = trained(tmp_path, folder, model_init_kwargs={"attn_implementation": name})
    assert trainer.scorer.layout == ATTENTION[name]
    assert trainer.policy.config._attn_implementation == ("eager" if name == "eager" else "covey_packed")
    assert_same_run(trainer, usual, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_layers_are_recomputed_as_asked_and_nothing_changes(tmp_path, folder, usual, reentrant):
    settings = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = runs.trainer(
        tmp_path, parts={"model": folder, "processing_class": None}, gradient_checkpointing=True, **settings
    )
    calls = {"training": 0, "recomputed": 0}
    layer = trainer.policy.model.layers[0]

    def count(module, args):
        if module.training:
            in_a_backward_pass = torch._C._current_graph_task_id() != -1
            calls["recomputed" if in_a_backward_pass else "training"] += 1

    layer.mlp.register_forward_pre_hook(count)  # recomputing stops within it, once nothing more is needed
    trainer.train()
    # without settings of its own, recomputing is for want of memory alone
    assert calls["training"] > 0 and calls["recomputed"] == (0 if reentrant is None else calls["training"])
    assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is bool(reentrant)
    assert_same_run(trainer, usual, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_policy_trains_alike(tmp_path, folder, usual):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer = trained(tmp_path, folder, torch_compile=True, torch_compile_backend="eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_same_run(trainer, usual, rtol=1e-4, atol=5e-5)  # Adam makes much of a rounding where a gradient is small


def test_the_number_format_is_the_one_that_is_asked_for(tmp_path, folder):
    trainer = trained(tmp_path, folder, model_init_kwargs='{"dtype": "bfloat16"}')
    assert {parameter.dtype for parameter in trainer.policy.parameters()} == {torch.bfloat16}
    trainer.save_model(str(tmp_path / "saved"))
    assert AutoConfig.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16


def test_a_tied_embedding_has_the_gradients_of_both_its_uses():
    rollouts = [Rollout([5, 6], ids, [True] * len(ids), None, "", FinishReason.STOP) for ids in ([7, 8, 9], [9])]
    tied, apart = tiny.model(), tiny.model(tie_word_embeddings=False)
    apart.load_state_dict(tied.state_dict())
    for layout in ("shared_prefix", "packed", "padded"):
        for model in (tied, apart):
            model.zero_grad()
            TokenScorer(lambda m: m, temperature=1.0, layout=layout)(model, collate(rollouts)).logprobs.sum().backward()
        both = apart.model.embed_tokens.weight.grad + apart.lm_head.weight.grad
        torch.testing.assert_close(tied.model.embed_tokens.weight.grad, both, rtol=1e-4, atol=1e-4)


# ---- where a model is from ------------------------------------------------------------------------------------------


def hub_cache(path, revisions):
    """A hub's cache as downloading leaves it: a model "me/it" with a snapshot for each revision."""
    home = path / "models--me--it"
    for name, source in revisions.items():
        commit = (name * 40)[:40].encode().hex()[:40]
        shutil.copytree(source, home / "snapshots" / commit)
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / name).write_text(commit)
    return str(path)


def test_a_revision_is_that_of_the_model_and_of_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, seed in (("main", 0), ("older", 1)):
        tiny.model(seed=seed).save_pretrained(tmp_path / name)
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = f"{name}: {{{{ messages[0]['content'] }}}}"
        tokenizer.save_pretrained(tmp_path / name)
    cache = hub_cache(tmp_path / "cache", {name: tmp_path / name for name in ("main", "older")})
    for name, seed in (("main", 0), ("older", 1)):
        asked = {"cache_dir": cache, **({"revision": name} if name != "main" else {})}
        parts = {"model": "me/it", "processing_class": None}
        trainer = runs.trainer(tmp_path / "run", parts=parts, model_init_kwargs=asked)
        assert torch.equal(trainer.policy.model.norm.weight, tiny.model(seed=seed).model.norm.weight)
        expected = tiny.model(seed=seed).model.embed_tokens.weight
        assert torch.equal(trainer.policy.model.embed_tokens.weight, expected)
        assert trainer.processing_class.chat_template.startswith(name)


CODE = """
    from transformers import LlamaConfig, LlamaForCausalLM

    class OwnConfig(LlamaConfig):
        model_type = "own_llama"

    class OwnForCausalLM(LlamaForCausalLM):
        config_class = OwnConfig

        def forward(self, *args, **kwargs):
            self.was_called = True
            return super().forward(*args, **kwargs)
"""


@pytest.fixture
def remote(tmp_path):
    """A model whose code comes with it."""
    path = tmp_path / "own"
    tiny.folder(path)
    (path / "modeling_own.py").write_text(textwrap.dedent(CODE))
    config = AutoConfig.from_pretrained(path).to_dict()
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(config, default=str))
    return str(path)


def test_code_of_a_checkpoint_runs_only_where_it_is_trusted(tmp_path, remote):
    with pytest.raises(ValueError, match=r"code of its own, .* Read it, then set trust_remote_code=True"):
        runs.trainer(tmp_path / "run", parts={"model": remote, "processing_class": None})
    trainer = trained(tmp_path / "run", remote, trust_remote_code=True)
    assert type(trainer.policy).__name__ == "OwnForCausalLM" and trainer.policy.was_called
    assert trainer.scorer.layout == "shared_prefix"


# ---- long contexts --------------------------------------------------------------------------------------------------


def test_a_long_context_is_scored_a_chunk_at_a_time(monkeypatch):
    """No more logits than a chunk's at once: the head never sees more rows, and the result is the same."""
    model = tiny.model(max_position_embeddings=4096)
    model.lm_head.register_forward_hook(lambda module, args, output: None)  # a head that is called, not multiplied out
    ids = torch.randint(4, 100, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = collate([Rollout(ids[:50], ids[50:], [True] * 2950, None, "", FinishReason.LENGTH)])
    seen = []
    with torch.no_grad():
        whole = TokenScorer(lambda m: m, temperature=1.0, chunk_size=4096)(model, batch).logprobs
        model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-2]))
        chunked = TokenScorer(lambda m: m, temperature=1.0, chunk_size=128)(model, batch).logprobs
    assert max(seen) <= 128 and sum(seen) >= 2950
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["Qwen3_5Text"])
def test_newer_hybrids_train_in_padded_rows(tmp_path, name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*cannot use the packed layouts")
        trainer = runs.trainer(tmp_path, parts={"model": hybrids.model(name)})
        trainer.train()
    assert trainer.scorer.layout == "padded"
