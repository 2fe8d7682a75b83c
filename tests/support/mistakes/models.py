"""Mistakes with models, adapters, tokenizers, launchers and other arguments of a trainer."""

import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
from accelerate.utils import DistributedType
from transformers import (
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    ProcessorMixin,
    RwkvConfig,
    RwkvForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)

from covey import GRPOTrainer
from covey.cli.explain.command import take_flags
from covey.cli.launch import launch_command, launch_if_asked
from covey.core.findings import CheckWarning
from covey.trainer.checks import NotFiniteError
from covey.trainer.distributed.sharding import Sharding
from tests.support import hybrids, mixtures, runs, tiny
from tests.support.mistakes.cases import CONFIG, TRAINING, Bench, Mistake, checked

QUANTISED = BitsAndBytesConfig(load_in_4bit=True)
T5 = {"vocab_size": 104, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"  # without the opening of an answer


def lora(**changes):
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **changes})


def optimizer_under_an_adapter(bench):
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return bench.build(model=model, peft_config=lora(), optimizers=(optimizer, None))


def frozen_adapter(bench):
    folder = bench.save("adapter", peft.get_peft_model(tiny.model(), lora()))
    return peft.PeftModel.from_pretrained(tiny.model(), folder)


def adapter_folder(bench):
    base = LlamaForCausalLM.from_pretrained(bench.folder)
    return bench.save("adapter", peft.get_peft_model(base, lora()))


def headless_folder(bench):
    return bench.save("classifier", LlamaForSequenceClassification(tiny.config(tie_word_embeddings=False)))


def with_own_code(bench):
    folder = Path(bench.save("own", tiny.model()))
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": code}))
    (folder / "own.py").write_text("class OwnConfig: pass")
    return str(folder)


def marked_quantised():
    """A model that says what transformers says of one that it has quantised."""
    model = tiny.model()
    model.is_quantized, model.quantization_method = True, "bitsandbytes"
    return model


def without_recomputing():
    """A model that says what JetMoe says of itself."""
    model = tiny.model()
    model.supports_gradient_checkpointing = False
    return model


def with_adapter_added():
    model = tiny.model()
    model.add_adapter(lora())
    return model


def with_quantised_experts(bench):
    pytest.importorskip("bitsandbytes")
    folder = bench.save("experts", mixtures.model("Qwen3Moe"))
    bench.build(model=folder, quantization_config=QUANTISED, peft_config=lora())


def with_weight(value):
    """A model one of whose weights is this."""
    model = tiny.model()
    with torch.no_grad():
        model.model.norm.weight[0] = value
    return model


def with_generation_config(**settings):
    model = tiny.model()
    vars(model.generation_config).update(settings)  # its own `update` validates
    return model


def diverging(bench):
    """A trainer whose model becomes NaN after the first samples."""
    trainer = bench.build({"max_steps": 1})
    gather = trainer.gather_experience

    def gathering(*given):
        experience = gather(*given)
        trainer.model.model.norm.weight.data[0] = math.nan
        return experience

    trainer.gather_experience = gathering
    return trainer


def without_bitsandbytes(bench):
    find_spec = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))
        bench.build(model=bench.folder, quantization_config=QUANTISED, peft_config=lora())


def tokenizer(**changes):
    made = tiny.tokenizer()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def without_an_end(bench):
    model = tiny.model(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return bench.build(model=model, processing_class=tokenizer(eos_token=None))


def with_more_tokens():
    made = tiny.tokenizer()
    made.add_tokens(["<think>", "</think>"])
    return made


class Processor(ProcessorMixin):
    """A tokenizer with a processor for images in addition to it, as vision-language models have."""

    def __init__(self):
        self.tokenizer = tiny.tokenizer()


def of_other_logits(when=lambda asked: True):
    """A model that doubles its logits in the calls that `when` picks by their keyword arguments."""

    def double(module, args, asked, output):
        if when(asked):
            output.logits = 2 * output.logits
        return output

    model = tiny.model()
    model.register_forward_hook(double, with_kwargs=True)
    return model


def launched_with(**set_up):
    """A trainer class whose accelerator says that it was set up otherwise than it was."""

    class SetUp:
        def __init__(self, accelerator):
            self.accelerator = accelerator

        def __getattr__(self, name):
            return set_up[name] if name in set_up else getattr(self.accelerator, name)

    class Launched(GRPOTrainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator = SetUp(self.accelerator)

    return Launched


def quantised_and_sharded(bench, settings, **bits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        bench.build(settings, model=bench.folder, quantization_config=BitsAndBytesConfig(**bits), peft_config=lora())


def calls_its_head_twice():
    class Twice(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            self.lm_head(torch.zeros(1, 1, 32))
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    return Twice(tiny.config())


def alone_under_zero3(b):
    """As where accelerate's config says ZeRO-3, which transformers has then heard of."""
    with mock.patch("covey.trainer.distributed.sharding.is_deepspeed_zero3_enabled", lambda: True):
        return b.build()


def evaluated_alone(bench):
    """A trainer after an evaluation under ZeRO-3."""
    trainer = bench.build()
    trainer.sharding = Sharding("ZeRO-3", weights=True, gradients=True, deepspeed=True)
    trainer.evaluates_alone = True
    return trainer


def call_by_a_launcher(argv):
    """A training command in a process that torchrun has started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        launch_if_asked("grpo", argv)


def with_config_of(cls):
    def make(bench: Bench):
        return bench.build(args=cls(bench))

    return make


CHATS = tiny.rows(conversational=True)
CANNOT_LOAD = r"cannot be loaded as a causal language model"

MODELS = [
    Mistake(
        "Gave a model folder that does not exist",
        lambda b: b.build(model="./no/such/folder"),
        (r"model='\./no/such/folder'",),
        kind=OSError,
    ),
    Mistake(
        "Gave a hub id that does not exist, or is not downloaded and there is no network",
        lambda b: b.build(model="someone/no-such-model"),
        ("model='someone/no-such-model'",),
        kind=OSError,
    ),
    checked("Gave something that is no model", lambda b: b.build(model=42), "model-type", "42", "from_pretrained"),
    checked(
        "Gave something that is no model", lambda b: b.build(model=42, args=None), "model-type", "42", "from_pretrained"
    ),
    checked(
        "Gave a model's class instead of a model",
        lambda b: b.build(model=LlamaForCausalLM),
        "model-type",
        "LlamaForCausalLM",
        "from_pretrained",
    ),
    checked(
        "Gave a base model without a language-modelling head",
        lambda b: b.build(model=LlamaModel(tiny.config())),
        "model-type",
        "LlamaModel",
        "AutoModelForCausalLM",
    ),
    checked(
        "Gave a base model without a language-modelling head",
        lambda b: b.build(model=LlamaForSequenceClassification(tiny.config())),
        "model-type",
        "LlamaForSequenceClassification",
        "AutoModelForCausalLM",
    ),
    checked(
        "Gave the folder of a classifier or of a model saved without its head",
        lambda b: b.build(model=headless_folder(b)),
        "model-weights",
        "lm_head",
    ),
    checked(
        "Gave an encoder-decoder model",
        lambda b: b.build(model=T5ForConditionalGeneration(T5Config(**T5))),
        "model-type",
        "T5ForConditionalGeneration",
        "AutoModelForCausalLM",
    ),
    Mistake(
        "Gave the folder of a model that is no causal language model",
        lambda b: b.build(model=b.save("t5", T5ForConditionalGeneration(T5Config(**T5)))),
        ("'.*t5'", "T5Config"),
    ),
    Mistake(
        "Gave a model that comes with code of its own",
        lambda b: b.build(model=with_own_code(b)),
        ("trust_remote_code=True",),
    ),
    Mistake(
        "Put an argument into model_init_kwargs that the model does not know",
        lambda b: b.build({"model_init_kwargs": {"flash": True}}, model=b.folder),
        (r"model_init_kwargs=\{'flash': True\}",),
    ),
    checked(
        "Misspelt a dtype",
        lambda b: b.build({"model_init_kwargs": {"dtype": "float33"}}, model=b.folder),
        "model-dtype",
        "dtype='float33'",
        "float32",
        "bfloat16",
    ),
    checked(
        "Misspelt a dtype",
        lambda b: b.build({"model_init_kwargs": {"torch_dtype": "int8"}}, model=b.folder),
        "model-dtype",
        "dtype='int8'",
        "float32",
        "bfloat16",
    ),
    checked(
        "Gave model_init_kwargs or quantization_config with a loaded model",
        lambda b: b.build({"model_init_kwargs": {"dtype": "bfloat16"}}),
        "model-arguments",
        "model_init_kwargs",
        "LlamaForCausalLM",
        kind=CheckWarning,
    ),
    checked(
        "Gave model_init_kwargs or quantization_config with a loaded model",
        lambda b: b.build(quantization_config=QUANTISED, peft_config=lora()),
        "model-arguments",
        "`quantization_config`",
        "LlamaForCausalLM",
    ),
    checked(
        "Quantised the model without an adapter",
        lambda b: b.build(model=b.folder, quantization_config=QUANTISED),
        "quantised-weights",
        "`quantization_config`",
        "`peft_config`",
    ),
    checked(
        "Quantised the model without an adapter",
        lambda b: b.build({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, model=b.folder),
        "quantised-weights",
        "`quantization_config`",
        "`peft_config`",
    ),
    checked(
        "Gave a quantised model without an adapter",
        lambda b: b.build(model=marked_quantised()),
        "quantised-weights",
        "LlamaForCausalLM",
        "`peft_config`",
    ),
    checked(
        "Gave a model whose generation config names a temperature and does not sample",
        lambda b: b.build(model=with_generation_config(do_sample=False, temperature=0.6)),
        "model-generation",
        "do_sample=False",
        "do_sample=True",
        "`model.generation_config`",
        kind=CheckWarning,
    ),
    checked(
        "Gave a model whose generation config is invalid",
        lambda b: b.build(model=with_generation_config(max_new_tokens=-1)),
        "model-generation",
        "`max_new_tokens`",
        r"`model\.generation_config`",
    ),
    Mistake(
        "Quantised a mixture of experts",
        with_quantised_experts,
        ("leaves .*% of the weights unquantised",),
        kind=UserWarning,
    ),
    checked(
        "Gave quantization_config twice",
        lambda b: b.build(
            {"model_init_kwargs": {"quantization_config": QUANTISED}},
            model=b.folder,
            quantization_config=QUANTISED,
            peft_config=lora(),
        ),
        "quantised-weights",
        "`quantization_config`",
    ),
    Mistake(
        "Quantised the model without bitsandbytes installed",
        without_bitsandbytes,
        ("pip install bitsandbytes",),
        kind=ImportError,
    ),
    checked(
        "Gave a PeftModel and a peft_config",
        lambda b: b.build(model=peft.get_peft_model(tiny.model(), lora()), peft_config=lora()),
        "adapter-type",
        "PeftModel",
        "`peft_config`",
    ),
    checked(
        "Gave a dictionary as peft_config",
        lambda b: b.build(peft_config={"r": 16}),
        "adapter-type",
        "'r'",
        "16",
        "PEFT",
        "LoraConfig",
    ),
    checked(
        "Gave a peft_config whose target modules the model does not have",
        lambda b: b.build(peft_config=lora(target_modules=["query"])),
        "adapter-type",
        "LlamaForCausalLM",
    ),
    checked(
        "Gave a peft_config for a classifier",
        lambda b: b.build(peft_config=lora(task_type="SEQ_CLS")),
        "adapter-type",
        "task_type='SEQ_CLS'",
        "task_type='CAUSAL_LM'",
    ),
    checked(
        "Gave an adapter of virtual tokens",
        lambda b: b.build(peft_config=peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "adapter-type",
        "`peft_config`",
        "PromptTuningConfig",
        "LoRA",
    ),
    checked(
        "Gave an adapter of virtual tokens",
        lambda b: b.build(
            model=peft.get_peft_model(tiny.model(), peft.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=3))
        ),
        "adapter-type",
        "PrefixTuningConfig",
        "LoRA",
    ),
    checked(
        "Gave an adapter that needs other inputs, such as Poly or X-LoRA",
        lambda b: b.build(peft_config=peft.PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)),
        "adapter-type",
        "`peft_config`",
        "PolyConfig",
        "LoRA",
    ),
    checked(
        "Gave an AdaLoraConfig",
        lambda b: b.build(
            peft_config=peft.AdaLoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1, init_r=4
            )
        ),
        "adapter-type",
        "`update_and_allocate`",
        "init_r=4",
        "on_optimizer_step",
        kind=CheckWarning,
    ),
    checked(
        "Gave a model with adapters that is no PeftModel",
        lambda b: b.build(model=with_adapter_added()),
        "adapter-type",
        "LlamaForCausalLM",
        "PeftModel",
        "`peft_config`",
    ),
    checked(
        "Loaded an adapter for inference, or froze the model",
        lambda b: b.build(model=frozen_adapter(b)),
        "model-frozen",
        "is_trainable=True",
    ),
    checked(
        "Loaded an adapter for inference, or froze the model",
        lambda b: b.build(model=adapter_folder(b)),
        "model-frozen",
        "PeftModel.from_pretrained",
    ),
    checked(
        "Loaded an adapter for inference, or froze the model",
        lambda b: b.build(model=tiny.model().requires_grad_(False)),
        "model-frozen",
        "requires_grad",
    ),
    checked(
        "Gave a callback with a method that no event calls",
        lambda b: b.build(callbacks=[type("Mine", (TrainerCallback,), {"on_step_ended": print})()]),
        "callback-event",
        r"Mine\.on_step_ended",
        "'on_step_end'",
        kind=CheckWarning,
    ),
    checked(
        "Gave a reward function twice",
        lambda b: b.build(reward_funcs=[runs.longer, runs.longer]),
        "reward-twice",
        "'longer.*'",
        kind=CheckWarning,
    ),
    checked(
        "Loaded the weights to train in bfloat16, at a small learning rate",
        lambda b: b.build({"learning_rate": 1e-6}, model=tiny.model().to(torch.bfloat16)),
        "weights-rounded",
        "learning_rate=1e-06",
        kind=CheckWarning,
    ),
    checked(
        "Loaded the weights to train in float16",
        lambda b: b.build(model=tiny.model().to(torch.float16)),
        "model-dtype",
        "float16",
        "float32",
        kind=CheckWarning,
    ),
    checked(
        "Asked for speculative_reuse with linear attention, state-space or convolution layers",
        lambda b: b.build({"speculative_reuse": "exact"}, model=hybrids.model("Lfm2")),
        "draft-reuse",
        "speculative_reuse='exact' .*Lfm2ForCausalLM",
    ),
    Mistake(
        "Sampled with the built-in engine from a model whose state cannot be copied",
        lambda b: b.train(model=RwkvForCausalLM(RwkvConfig(vocab_size=104, hidden_size=32, num_hidden_layers=2))),
        ("RwkvForCausalLM", "`reorder_cache`"),
        when=TRAINING,
    ),
    Mistake(
        "Left gradient_checkpointing on for a model that cannot recompute its layers",
        lambda b: b.build({"gradient_checkpointing": True}, model=without_recomputing()),
        ("gradient_checkpointing=True", "LlamaForCausalLM", "gradient_checkpointing=False"),
        kind=UserWarning,
    ),
    Mistake("Gave a model whose weights are NaN or infinite", lambda b: b.build(model=with_weight(math.inf)), ("NaN",)),
    Mistake(
        "Trained into numbers that are NaN or infinite",
        lambda b: diverging(b).train(),
        ("nan",),
        when=TRAINING,
        kind=NotFiniteError,
    ),
    Mistake(
        "Asked for the load-balancing loss of a model without experts",
        lambda b: b.build({"router_aux_loss_coef": 0.1}),
        (r"router_aux_loss_coef=0\.1", "LlamaForCausalLM"),
    ),
    Mistake(
        "Asked for the load-balancing loss of a model without experts",
        lambda b: b.build({"router_aux_loss_coef": 0.1}, model=mixtures.model("DeepseekV3")),
        ("DeepseekV3ForCausalLM",),
    ),
    checked(
        "Asked for the load-balancing loss of a model that returns no router logits",
        lambda b: b.train(
            {"router_aux_loss_coef": 0.1}, model=tiny.model(router_aux_loss_coef=0.1, num_experts_per_tok=2)
        ),
        "model-experts",
        "LlamaForCausalLM",
        "router_aux_loss_coef=0",
        when=TRAINING,
    ),
    checked(
        "Trained with a load-balancing loss and reentrant checkpointing",
        lambda b: b.train(
            {
                "router_aux_loss_coef": 0.1,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            model=mixtures.model("Mixtral"),
        ),
        "model-experts",
        "use_reentrant",
        "router_aux_loss_coef=0",
        when=TRAINING,
    ),
    checked(
        "Asked for routing replay of a model without experts",
        lambda b: b.build({"routing_replay": "R3"}),
        "model-routes",
        "routing_replay='R3'",
        "LlamaForCausalLM",
    ),
    Mistake(
        "Asked for an attention whose package is not installed",
        lambda b: b.build({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, model=b.folder),
        ("attn_implementation",),
        kind=ImportError,
    ),
    checked(
        "Asked for flex_attention on a CPU",
        lambda b: b.build({"model_init_kwargs": {"attn_implementation": "flex_attention"}}, model=b.folder),
        "attention-cpu",
        "'sdpa' or 'eager'",
    ),
    checked(
        "Gave a model whose head does more than Covey knows",
        lambda b: b.train(model=of_other_logits()),
        "model-head",
        "LlamaForCausalLM",
        when=TRAINING,
    ),
    Mistake(
        "Gave a model that answers otherwise with a cache than without",
        lambda b: b.train(model=of_other_logits(when=lambda asked: asked.get("use_cache"))),
        ("LlamaForCausalLM",),
        when=TRAINING,
    ),
    checked(
        "Put an adapter on the head with cast_lm_head_to_fp32",
        lambda b: b.train(
            {"cast_lm_head_to_fp32": True},
            model=tiny.model(tie_word_embeddings=False),
            peft_config=lora(target_modules=["lm_head"]),
        ),
        "model-head",
        "cast_lm_head_to_fp32=False",
        when=TRAINING,
    ),
]

ARGUMENTS = [
    Mistake(
        "Gave the config of another trainer, a dictionary or plain TrainingArguments",
        with_config_of(lambda b: b.config("rloo")),
        ("RLOOConfig", "GRPOConfig"),
        kind=TypeError,
    ),
    Mistake(
        "Gave the config of another trainer, a dictionary or plain TrainingArguments",
        with_config_of(lambda b: {"beta": 0.1}),
        ("dict", "GRPOConfig"),
        kind=TypeError,
    ),
    Mistake(
        "Gave the config of another trainer, a dictionary or plain TrainingArguments",
        with_config_of(lambda b: TrainingArguments(str(b.output_dir), report_to="none", use_cpu=True)),
        ("TrainingArguments",),
        kind=TypeError,
    ),
    *(
        Mistake(
            "Launched with tensor or context parallelism, Megatron-LM or on TPUs",
            lambda b, set_up=set_up: b.build(trainer=launched_with(**set_up)),
            (name, "DDP", "FSDP2", "ZeRO"),
        )
        for name, set_up in {
            "MEGATRON_LM": {"distributed_type": DistributedType.MEGATRON_LM},
            "a parallelism_config": {"parallelism_config": SimpleNamespace(sp_backend=None)},
        }.items()
    ),
    Mistake(
        "Launched with FSDP in its first version",
        lambda b: b.build(trainer=launched_with(distributed_type=DistributedType.FSDP, is_fsdp2=False)),
        ("FSDP", "fsdp_version", "--accelerate_config fsdp2"),
    ),
    Mistake(
        "Launched with DeepSpeed and ZeRO stage 0",
        lambda b: b.build(
            trainer=launched_with(
                distributed_type=DistributedType.DEEPSPEED,
                state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=0)),
            )
        ),
        ("ZeRO",),
    ),
    Mistake(
        "Launched one CPU process with ZeRO-3",
        alone_under_zero3,
        ("ZeRO", "CPU", "--num_processes 2"),
    ),
    checked(
        "Asked for speculative_reuse with ds3_gather_for_generation=False",
        lambda b: b.build(
            {"speculative_reuse": "exact", "ds3_gather_for_generation": False},
            trainer=launched_with(distributed_type=DistributedType.FSDP, is_fsdp2=True),
        ),
        "draft-reuse",
        "speculative_reuse='exact' .*ds3_gather_for_generation=False",
    ),
    checked(
        "Quantised the model and spread it over processes in a way that does not know its numbers",
        lambda b: quantised_and_sharded(b, {}, load_in_8bit=True),
        "quantised-weights",
        "FSDP2",
        "load_in_4bit=True",
        "DDP",
        "ZeRO",
    ),
    checked(
        "Stored 4 bits as other numbers than FSDP2 computes in",
        lambda b: quantised_and_sharded(b, {"bf16": True}, load_in_4bit=True, bnb_4bit_quant_storage="float32"),
        "quantised-weights",
        "bnb_4bit_quant_storage='float32'",
        "'bfloat16'",
    ),
    checked(
        "Gave a model that calls its head several times to FSDP or DeepSpeed",
        lambda b: b.train(
            trainer=launched_with(distributed_type=DistributedType.FSDP, is_fsdp2=True), model=calls_its_head_twice()
        ),
        "model-head",
        "DDP",
        when=TRAINING,
    ),
    Mistake(
        "Called evaluate() before train() under ZeRO-3",
        lambda b: evaluated_alone(b).train(),
        ("eval_on_start=True",),
        when=TRAINING,
    ),
    Mistake(
        "Named an --accelerate_config that does not exist",
        lambda b: launch_command("grpo", ["run.yaml", "--accelerate_config", "zero_3"]),
        ("'zero_3'", "cpu_2proc", "fsdp2", "'zero3'"),
        when=CONFIG,
    ),
    Mistake(
        "Explained a run with an accelerate config of a way that is not trained with",
        lambda b: take_flags(["--accelerate_config", str(b.write("distributed_type: MEGATRON_LM", "own.yaml"))]),
        ("'megatron_lm'", "multi_gpu", "zero3"),
        when=CONFIG,
    ),
    Mistake(
        "Explained a run with an accelerate config that cannot be read",
        lambda b: take_flags(["--accelerate_config", str(b.write("processes: 8", "own.yaml"))]),
        ("distributed_type", "`accelerate config`"),
        when=CONFIG,
    ),
    Mistake(
        "Explained a run on a GPU whose figures are not known",
        lambda b: take_flags(["--gpu", "h10"]),
        ("--gpu", "'h10'", "a100", "h200", "'h100'"),
        when=CONFIG,
    ),
    Mistake(
        "Gave the size of an image to `covey explain` in another form",
        lambda b: take_flags(["--image_size", "640,480"]),
        ("--image_size", "'640,480'", "640x480"),
        when=CONFIG,
    ),
    Mistake(
        "Gave --accelerate_config to a process that torchrun has started",
        lambda b: call_by_a_launcher(["run.yaml", "--accelerate_config", "zero3"]),
        ("accelerate_config",),
        when=CONFIG,
    ),
    checked(
        "Gave an optimizer of weights that are not trained, as of the model that a peft_config freezes",
        optimizer_under_an_adapter,
        "optimizer-weights",
        " SGD ",
        "optimizer_cls_and_kwargs",
    ),
    checked(
        "Chose an output_dir that is a file or cannot be written to",
        lambda b: b.build(args=runs.config(b.write("", "taken"))),
        "setting-format",
        "output_dir='.*taken'",
    ),
]

TOKENIZERS = [
    checked(
        "Trained a model whose folder holds no tokenizer",
        lambda b: b.build(model=b.save("bare", tiny.model()), processing_class=None),
        "tokenizer-missing",
        "'.*bare'",
        "`processing_class=tokenizer`",
    ),
    checked(
        "Gave a model made from a config and no tokenizer",
        lambda b: b.build(processing_class=None),
        "tokenizer-missing",
        "`processing_class=tokenizer`",
    ),
    checked(
        "Gave a name or another object as processing_class",
        lambda b: b.build(processing_class="some/tokenizer"),
        "tokenizer-type",
        "'some/tokenizer'",
        "AutoTokenizer",
        "from_pretrained",
    ),
    checked(
        "Gave a name or another object as processing_class",
        lambda b: b.build(processing_class=object()),
        "tokenizer-type",
        "AutoTokenizer",
        "from_pretrained",
    ),
    checked(
        "Gave a processor to a model that sees no images",
        lambda b: b.build(processing_class=Processor()),
        "tokenizer-type",
        "LlamaForCausalLM",
        r"`processor\.tokenizer`",
    ),
    checked(
        "Used a tokenizer and a model that both name no end-of-sequence token",
        without_an_end,
        "never-ends",
        r"`tokenizer\.eos_token`",
    ),
    checked(
        "Used a tokenizer with more tokens than the model embeds",
        lambda b: b.build(processing_class=with_more_tokens()),
        "tokenizer-drift",
        " 106 tokens .* 104:",
        "resize_token_embeddings",
    ),
    checked(
        "Used the tokenizer of another, smaller model",
        lambda b: b.build(model=tiny.model(vocab_size=500)),
        "tokenizer-drift",
        "104",
        "500",
        kind=CheckWarning,
    ),
    checked(
        "Gave prompts of text to a model with a chat template",
        lambda b: b.build(),
        "prompt-text",
        "prompts_as_messages=True",
        kind=CheckWarning,
    ),
    checked(
        "Gave conversations to a tokenizer without a chat template",
        lambda b: b.build(processing_class=tokenizer(chat_template=None), train_dataset=CHATS),
        "template",
        "row 0 of `train_dataset`",
        r"`tokenizer\.chat_template`",
    ),
    checked(
        "Gave conversations that the chat template refuses, or a broken template",
        lambda b: b.build(processing_class=tokenizer(chat_template="{{ raise_exception('no') }}"), train_dataset=CHATS),
        "template",
        "row 0 of `train_dataset`",
        "TemplateError: no",
    ),
    checked(
        "Gave conversations that the chat template refuses, or a broken template",
        lambda b: b.build(processing_class=tokenizer(chat_template="{% for m in messages %}"), train_dataset=CHATS),
        "template",
        "row 0 of `train_dataset`",
        "TemplateSyntaxError",
    ),
    checked(
        "Used a chat template without a generation prompt, or one that leaves out or rewrites messages",
        lambda b: b.build(processing_class=tokenizer(chat_template=TURNS), train_dataset=CHATS),
        "template",
        "row 0 of `train_dataset`",
        "add_generation_prompt",
        kind=CheckWarning,
    ),
    checked(
        "Used a chat template without a generation prompt, or one that leaves out or rewrites messages",
        lambda b: b.build(processing_class=tokenizer(chat_template="{{ messages | length }}"), train_dataset=CHATS),
        "template",
        "row 0 of `train_dataset`",
        "'user'",
        kind=CheckWarning,
    ),
]
