"""Mistakes that show while a run computes: layouts, attention, memory, devices."""

import math

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, StableLmConfig, StableLmForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from covey.core.engine import EngineTraits
from covey.core.findings import CheckWarning
from covey.core.model import decoder_of
from tests.support import tiny
from tests.support.engines import CopyEngine, scripted
from tests.support.foreign import sample_from
from tests.support.mistakes.cases import SIZES, TRAINING, Mistake, checked


def stable_lm():
    """A model whose attention does not know where the sequences of a row end."""
    torch.manual_seed(0)
    return StableLmForCausalLM(StableLmConfig(**SIZES))


def of_other_attention():
    """A model that was given an attention of the user's own."""
    AttentionInterface.register("my_attention", sdpa_attention_forward)
    AttentionMaskInterface.register("my_attention", sdpa_mask)
    model = tiny.model()
    model.set_attn_implementation("my_attention")
    return model


def short_of_memory(bench, fits, recomputing=False):
    """Trains where only passes of `fits` rollouts fit into memory; `recomputing`: if no layer keeps its activations."""
    trainer = bench.build({"gradient_checkpointing": recomputing})
    compute, layers = trainer.compute_loss, decoder_of(trainer.model).layers

    def compute_loss(model, inputs, *args, **kwargs):
        if len(inputs.lengths) > fits or (recomputing and not all(layer.gradient_checkpointing for layer in layers)):
            raise torch.OutOfMemoryError("injected")
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return trainer.train()


class KeepsItsWeights(CopyEngine):
    """An engine that takes the first weights it is sent and no others."""

    def __init__(self):
        super().__init__(tiny.model())

    def load_weights(self, update):
        if self.version is None:
            super().load_weights(update)


def two_engines(bench):
    """Names an engine in the config and gives the trainer another."""
    args = bench.config()
    args.use_vllm = True
    return bench.build(args=args, engine=scripted())


def without_cuda_graphs(bench):
    """Samples where decoding steps are recorded, by a device that cannot."""

    def fail(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    trainer = bench.build()
    engine = trainer.collector.engine
    engine._use_graphs, engine._capture = True, fail
    return trainer.train()


def without_kernels(bench):
    """Asks for the LM head's kernels on a device that has none."""
    pytest.importorskip("triton")
    from covey.policy.lm_head.torch_tiles import Curve
    from covey.policy.lm_head.triton_tiles import Case, fastest_tiles

    fastest_tiles.cache_clear()
    return fastest_tiles(Case((2, 7), torch.float32, Curve(), entropy=False, targets=1, device=torch.device("cpu")))


def with_engine(settings=None, **engine):
    """Trains with an engine of another make in the place of the built-in one."""

    def make(bench):
        trainer = bench.build(settings)
        return sample_from(trainer, **engine).train()

    return make


OTHER_LOG_PROBS = "Sampled with an engine whose log-probs are not the trainer's"


RUNTIME = [
    Mistake(
        "Set what is about steps where no steps are rewarded",
        lambda b: b.train({"max_steps": 4, "step_discount": 0.5, "step_baseline": "turn"}),
        ("step_discount=0.5", "step_baseline='turn'"),
        when=TRAINING,
        kind=UserWarning,
    ),
    checked(
        "Insisted on an attn_layout that the model cannot use",
        lambda b: b.train({"attn_layout": "packed"}, model=stable_lm()),
        "model-layout",
        "attn_layout='packed'",
        "StableLmForCausalLM",
        "attn_layout='auto'",
        "'padded'",
        when=TRAINING,
    ),
    Mistake(
        "Trained a model that cannot use the packed layouts",
        lambda b: b.train(model=stable_lm()),
        ("attn_layout='padded'", "StableLmForCausalLM"),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Trained a model whose attention cannot share a prompt",
        lambda b: b.train(model=stable_lm()),
        ("StableLmForCausalLM decodes with a copy of the prompt",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Chose another attention implementation",
        lambda b: b.train(model=of_other_attention()),
        ("attn_implementation='my_attention'",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Chose batch sizes for which memory does not suffice",
        lambda b: short_of_memory(b, fits=1),
        ("max_tokens_per_micro_batch",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Left layers their activations where memory does not suffice for them",
        lambda b: short_of_memory(b, fits=4, recomputing=True),
        ("in which 2 layers kept their activations; it is repeated with 1",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Sampled completions of which a single one does not fit into memory",
        lambda b: short_of_memory(b, fits=0),
        ("gradient_checkpointing=True", "max_completion_length"),
        when=TRAINING,
        kind=torch.OutOfMemoryError,
    ),
    checked(
        "Rounded the engine's weights where that takes no less time",
        lambda b: b.build({"engine_dtype": "float8"}),
        "engine-dtype-slow",
        "engine_dtype='float8'",
        "'auto'",
        kind=CheckWarning,
    ),
    checked(
        "Sampled ahead of training with the built-in engine",
        lambda b: b.build({"max_staleness": 1}),
        "async-sampling",
        "max_staleness=1",
        "use_vllm=True",
    ),
    checked(
        "Gave the trainer an engine and named another in the config",
        two_engines,
        "engines-several",
        r"ScriptedEngine.*use_vllm=True",
    ),
    Mistake(
        "Sampled ahead with an engine that kept older weights than it was sent",
        lambda b: b.train({"max_staleness": 1, "max_steps": 4, "engine_parity": "off"}, engine=KeepsItsWeights()),
        ("max_staleness=1",),
        when=TRAINING,
        kind=RuntimeError,
    ),
    Mistake(
        OTHER_LOG_PROBS,
        with_engine({"temperature": 0.7}, temperature=1.0),
        (
            "rounding explains 0.01",
            r"temperature 1 instead of 0\.7",
            "Have it report those",
            "set engine_parity='warn'",
        ),
        TRAINING,
    ),
    Mistake(
        OTHER_LOG_PROBS,
        with_engine({"engine_parity": "warn"}, model=tiny.model(seed=1)),
        ("another model or checkpoint", "Continuing because engine_parity='warn'"),
        TRAINING,
        UserWarning,
    ),
    Mistake(
        "Sampled with an engine that reports NaN or other nonsense",
        with_engine(report=lambda logprobs: [math.nan for _ in logprobs]),
        ("NaN", "engine_parity='warn'"),
        when=TRAINING,
    ),
    Mistake(
        "Sampled with an engine that reports no log-probs",
        with_engine(report=lambda logprobs: None),
        ("vllm_importance_sampling_correction=False",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Cut the distribution of an engine that reports log-probs after the cut",
        with_engine({"top_p": 0.9}, traits=EngineTraits(reports_after_cut=True)),
        ("top_p",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Trained on a GPU whose decoding steps cannot be recorded",
        without_cuda_graphs,
        ("capturing a step of llama failed",),
        when=TRAINING,
        kind=UserWarning,
    ),
    Mistake(
        "Trained where the LM head's Triton kernels do not run",
        without_kernels,
        ("Triton kernels are not used", "torch's operations are used"),
        TRAINING,
        UserWarning,
    ),
]
