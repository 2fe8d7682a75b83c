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
        (r"model='\./no/such/folder'", "there is no such folder", "which holds config.json, or a hub id"),
        kind=OSError,
    ),
    Mistake(
        "Gave a hub id that does not exist, or is not downloaded and there is no network",
        lambda b: b.build(model="someone/no-such-model"),
        ("model='someone/no-such-model'", "no folder here", "was not downloaded before", "Give a folder"),
        kind=OSError,
    ),
    Mistake(
        "Gave something that is no model",
        lambda b: b.build(model=42),
        ("got int: 42", "hub id, a folder or a transformers causal language model", "from_pretrained"),
    ),
    Mistake(
        "Gave something that is no model",
        lambda b: b.build(model=42, args=None),
        ("got int: 42", "hub id, a folder or a transformers causal language model", "from_pretrained"),
    ),
    Mistake(
        "Gave a model's class instead of a model",
        lambda b: b.build(model=LlamaForCausalLM),
        ("got the class LlamaForCausalLM", "must be a hub id, a folder or", r"Load one with \S+from_pretrained"),
    ),
    Mistake(
        "Gave a base model without a language-modelling head",
        lambda b: b.build(model=LlamaModel(tiny.config())),
        ("LlamaModel has no language-modelling head", "cannot generate", "Load it with AutoModelForCausalLM"),
    ),
    Mistake(
        "Gave a base model without a language-modelling head",
        lambda b: b.build(model=LlamaForSequenceClassification(tiny.config())),
        ("LlamaForSequenceClassification has no", "cannot generate", "Load it with AutoModelForCausalLM"),
    ),
    Mistake(
        "Gave the folder of a classifier or of a model saved without its head",
        lambda b: b.build(model=headless_folder(b)),
        ("no trained weights for lm_head.weight", "would be random", "saved as a causal language model"),
    ),
    Mistake(
        "Gave an encoder-decoder model",
        lambda b: b.build(model=T5ForConditionalGeneration(T5Config(**T5))),
        ("T5ForConditionalGeneration is an encoder-decoder", "only decoder-only", "AutoModelForCausalLM"),
    ),
    Mistake(
        "Gave the folder of a model that is no causal language model",
        lambda b: b.build(model=b.save("t5", T5ForConditionalGeneration(T5Config(**T5)))),
        (r"folder '.*t5'", CANNOT_LOAD, "T5Config"),
    ),
    Mistake(
        "Gave a model that comes with code of its own",
        lambda b: b.build(model=with_own_code(b)),
        ("comes with code of its own", "Read it, then set trust_remote_code=True"),
    ),
    Mistake(
        "Put an argument into model_init_kwargs that the model does not know",
        lambda b: b.build({"model_init_kwargs": {"flash": True}}, model=b.folder),
        (CANNOT_LOAD, r"model_init_kwargs=\{'flash': True\}", "unexpected keyword argument 'flash'"),
    ),
    Mistake(
        "Misspelt a dtype",
        lambda b: b.build({"model_init_kwargs": {"dtype": "float33"}}, model=b.folder),
        ("dtype='float33'", "no floating-point type", "choose one of: float32, bfloat16"),
    ),
    Mistake(
        "Misspelt a dtype",
        lambda b: b.build({"model_init_kwargs": {"torch_dtype": "int8"}}, model=b.folder),
        ("dtype='int8'", "no floating-point type", "choose one of: float32, bfloat16"),
    ),
    Mistake(
        "Gave model_init_kwargs or quantization_config with a loaded model",
        lambda b: b.build({"model_init_kwargs": {"dtype": "bfloat16"}}),
        (
            "`model_init_kwargs=",
            r"loaded model was given \(LlamaForCausalLM\)",
            "Pass the model's id or folder, or drop",
        ),
        kind=UserWarning,
    ),
    Mistake(
        "Gave model_init_kwargs or quantization_config with a loaded model",
        lambda b: b.build(quantization_config=QUANTISED, peft_config=lora()),
        ("`quantization_config`", r"loaded model was given \(LlamaForCausalLM\)", "Pass the model's id or folder"),
    ),
    Mistake(
        "Quantised the model without an adapter",
        lambda b: b.build(model=b.folder, quantization_config=QUANTISED),
        ("`quantization_config` without `peft_config`", "cannot be trained", "Pass a `peft_config`"),
    ),
    Mistake(
        "Quantised the model without an adapter",
        lambda b: b.build({"model_init_kwargs": {"quantization_config": {"load_in_4bit": True}}}, model=b.folder),
        ("`quantization_config` without `peft_config`", "cannot be trained", "Pass a `peft_config`"),
    ),
    Mistake(
        "Gave a quantised model without an adapter",
        lambda b: b.build(model=marked_quantised()),
        ("weights of this LlamaForCausalLM are quantised and cannot be trained", "Pass a `peft_config`"),
    ),
    Mistake(
        "Gave a model whose generation config names a temperature and does not sample",
        lambda b: b.build(model=with_generation_config(do_sample=False, temperature=0.6)),
        ("sets how to sample, and do_sample=False", "saved with do_sample=True", "Set `model.generation_config`"),
        kind=UserWarning,
    ),
    Mistake(
        "Gave a model whose generation config is invalid",
        lambda b: b.build(model=with_generation_config(max_new_tokens=-1)),
        ("the model could not be saved: `max_new_tokens` must be", "is -1", r"Correct `model\.generation_config`"),
    ),
    Mistake(
        "Quantised a mixture of experts",
        with_quantised_experts,
        ("leaves .*% of the weights unquantised", "fused experts", "take their full memory"),
        kind=UserWarning,
    ),
    Mistake(
        "Gave quantization_config twice",
        lambda b: b.build(
            {"model_init_kwargs": {"quantization_config": QUANTISED}},
            model=b.folder,
            quantization_config=QUANTISED,
            peft_config=lora(),
        ),
        ("`quantization_config` was given twice", "Keep one"),
    ),
    Mistake(
        "Quantised the model without bitsandbytes installed",
        without_bitsandbytes,
        ("needs bitsandbytes", r"pip install bitsandbytes"),
        kind=ImportError,
    ),
    Mistake(
        "Gave a PeftModel and a peft_config",
        lambda b: b.build(model=peft.get_peft_model(tiny.model(), lora()), peft_config=lora()),
        ("a PeftModel and a `peft_config` were both given", "pass the base model with the config, or the PeftModel"),
    ),
    Mistake(
        "Gave a dictionary as peft_config",
        lambda b: b.build(peft_config={"r": 16}),
        ("got dict: {'r': 16}", "must be a PEFT config", r"peft\.LoraConfig\("),
    ),
    Mistake(
        "Gave a peft_config whose target modules the model does not have",
        lambda b: b.build(peft_config=lora(target_modules=["query"])),
        ("does not fit LlamaForCausalLM", "query", "check the target modules"),
    ),
    Mistake(
        "Gave a peft_config for a classifier",
        lambda b: b.build(peft_config=lora(task_type="SEQ_CLS")),
        ("task_type='SEQ_CLS'", "causal language model", "use task_type='CAUSAL_LM'"),
    ),
    Mistake(
        "Gave an adapter of virtual tokens",
        lambda b: b.build(peft_config=peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        ("`peft_config` is a PromptTuningConfig", "virtual tokens before the prompt", "Use LoRA"),
    ),
    Mistake(
        "Gave an adapter of virtual tokens",
        lambda b: b.build(
            model=peft.get_peft_model(tiny.model(), peft.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=3))
        ),
        ("the adapter of the model is a PrefixTuningConfig", "virtual tokens before the prompt", "Use LoRA"),
    ),
    Mistake(
        "Gave an adapter that needs other inputs, such as Poly or X-LoRA",
        lambda b: b.build(peft_config=peft.PolyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)),
        ("`peft_config` is a PolyConfig", "needs more than tokens", "Use LoRA"),
    ),
    Mistake(
        "Gave an AdaLoraConfig",
        lambda b: b.build(
            peft_config=peft.AdaLoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1, init_r=4
            )
        ),
        ("`update_and_allocate`", "keeps its first rank, init_r=4", "on_optimizer_step"),
        kind=UserWarning,
    ),
    Mistake(
        "Gave a model with adapters that is no PeftModel",
        lambda b: b.build(model=with_adapter_added()),
        ("LlamaForCausalLM holds adapters without being a PeftModel", "`peft_config`, or make it with peft"),
    ),
    Mistake(
        "Loaded an adapter for inference, or froze the model",
        lambda b: b.build(model=frozen_adapter(b)),
        ("every weight of the adapter is frozen", "nothing would be trained", "is_trainable=True"),
    ),
    Mistake(
        "Loaded an adapter for inference, or froze the model",
        lambda b: b.build(model=adapter_folder(b)),
        ("every weight of the adapter is frozen", "nothing would be trained", "PeftModel.from_pretrained"),
    ),
    Mistake(
        "Loaded an adapter for inference, or froze the model",
        lambda b: b.build(model=tiny.model().requires_grad_(False)),
        ("every weight of the model is frozen", "nothing would be trained", r"requires_grad_\(True\)"),
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
    Mistake(
        "Loaded the weights to train in bfloat16, at a small learning rate",
        lambda b: b.build({"learning_rate": 1e-6}, model=tiny.model().to(torch.bfloat16)),
        ("held in bfloat16", "learning_rate=1e-06 rounds back", "Load the model in float32"),
        kind=UserWarning,
    ),
    Mistake(
        "Loaded the weights to train in float16",
        lambda b: b.build(model=tiny.model().to(torch.float16)),
        ("weights to train are float16", "small updates vanish", "in float32 "),
        kind=UserWarning,
    ),
    Mistake(
        "Used sync_ref_model with an adapter",
        lambda b: b.build({"beta": 0.1, "sync_ref_model": True}, peft_config=lora()),
        ("sync_ref_model=True with an adapter", "cannot follow it", "Set sync_ref_model=False or train the whole"),
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
        ("RwkvForCausalLM returns a cache without `reorder_cache`", "cannot be copied", "Sample from a server"),
        TRAINING,
    ),
    Mistake(
        "Left gradient_checkpointing on for a model that cannot recompute its layers",
        lambda b: b.build({"gradient_checkpointing": True}, model=without_recomputing()),
        ("gradient_checkpointing=True has no effect", "LlamaForCausalLM", "set gradient_checkpointing=False"),
        kind=UserWarning,
    ),
    Mistake(
        "Gave a model whose weights are NaN or infinite",
        lambda b: b.build(model=with_weight(math.inf)),
        ("weights that are NaN or infinite: model.norm.weight", "load an earlier checkpoint"),
    ),
    Mistake(
        "Trained into numbers that are NaN or infinite",
        lambda b: diverging(b).train(),
        ("step 1: the loss is nan, so the run ends", "Weights that are not finite: model.norm.weight", "Common causes"),
        TRAINING,
        NotFiniteError,
    ),
    Mistake(
        "Asked for the load-balancing loss of a model without experts",
        lambda b: b.build({"router_aux_loss_coef": 0.1}),
        (r"router_aux_loss_coef=0\.1: LlamaForCausalLM has no load-balancing loss", "Leave the field unset"),
    ),
    Mistake(
        "Asked for the load-balancing loss of a model without experts",
        lambda b: b.build({"router_aux_loss_coef": 0.1}, model=mixtures.model("DeepseekV3")),
        ("DeepseekV3ForCausalLM has no load-balancing loss", "Leave the field unset"),
    ),
    Mistake(
        "Asked for the load-balancing loss of a model that returns no router logits",
        lambda b: b.train(
            {"router_aux_loss_coef": 0.1}, model=tiny.model(router_aux_loss_coef=0.1, num_experts_per_tok=2)
        ),
        ("LlamaForCausalLM returns no router logits", "Set router_aux_loss_coef=0"),
        TRAINING,
    ),
    Mistake(
        "Trained with a load-balancing loss and reentrant checkpointing",
        lambda b: b.train(
            {
                "router_aux_loss_coef": 0.1,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": True},
            },
            model=mixtures.model("Mixtral"),
        ),
        ("the routers give no gradient", "use_reentrant': False", "router_aux_loss_coef=0"),
        TRAINING,
    ),
    Mistake(
        "Asked for an attention whose package is not installed",
        lambda b: b.build({"model_init_kwargs": {"attn_implementation": "flash_attention_2"}}, model=b.folder),
        ("needs a package that is missing here", "attn_implementation", "leave that out"),
        kind=ImportError,
    ),
    checked(
        "Asked for flex_attention on a CPU",
        lambda b: b.build({"model_init_kwargs": {"attn_implementation": "flex_attention"}}, model=b.folder),
        "attention-cpu",
        "'sdpa' or 'eager'",
    ),
    Mistake(
        "Gave a model whose head does more than Covey knows",
        lambda b: b.train(model=of_other_logits()),
        ("the logits of LlamaForCausalLM differ by", "Supported: a linear head"),
        TRAINING,
    ),
    Mistake(
        "Gave a model that answers otherwise with a cache than without",
        lambda b: b.train(model=of_other_logits(when=lambda asked: asked.get("use_cache"))),
        ("differ from the model's own by", "LlamaForCausalLM is not sampled from as it is", "please report the model"),
        TRAINING,
    ),
    Mistake(
        "Put an adapter on the head with cast_lm_head_to_fp32",
        lambda b: b.train(
            {"cast_lm_head_to_fp32": True},
            model=tiny.model(tie_word_embeddings=False),
            peft_config=lora(target_modules=["lm_head"]),
        ),
        ("this model's is a Linear", "Set cast_lm_head_to_fp32=False, or keep the head out of the adapter"),
        TRAINING,
    ),
]

ARGUMENTS = [
    Mistake(
        "Gave the config of another trainer, a dictionary or plain TrainingArguments",
        with_config_of(lambda b: b.config("rloo")),
        ("got RLOOConfig", "must be a GRPOConfig", r"Make one with GRPOConfig\("),
        kind=TypeError,
    ),
    Mistake(
        "Gave the config of another trainer, a dictionary or plain TrainingArguments",
        with_config_of(lambda b: {"beta": 0.1}),
        ("got dict", "must be a GRPOConfig", r"Make one with GRPOConfig\("),
        kind=TypeError,
    ),
    Mistake(
        "Gave the config of another trainer, a dictionary or plain TrainingArguments",
        with_config_of(lambda b: TrainingArguments(str(b.output_dir), report_to="none", use_cpu=True)),
        ("got TrainingArguments", "must be a GRPOConfig", r"Make one with GRPOConfig\("),
        kind=TypeError,
    ),
    *(
        Mistake(
            "Launched with tensor or context parallelism, Megatron-LM or on TPUs",
            lambda b, set_up=set_up: b.build(trainer=launched_with(**set_up)),
            (f"set up with {name}, which Covey does not train with", "DDP, FSDP2 or DeepSpeed's ZeRO"),
        )
        for name, set_up in {
            "MEGATRON_LM": {"distributed_type": DistributedType.MEGATRON_LM},
            "a parallelism_config": {"parallelism_config": SimpleNamespace(sp_backend=None)},
        }.items()
    ),
    Mistake(
        "Launched with FSDP in its first version",
        lambda b: b.build(trainer=launched_with(distributed_type=DistributedType.FSDP, is_fsdp2=False)),
        ("FSDP is on in its first version", "fsdp_version: 2", "--accelerate_config fsdp2"),
    ),
    Mistake(
        "Launched with DeepSpeed and ZeRO stage 0",
        lambda b: b.build(
            trainer=launched_with(
                distributed_type=DistributedType.DEEPSPEED,
                state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=0)),
            )
        ),
        ("ZeRO stage 0, which shards nothing", "from 1 to 3"),
    ),
    Mistake(
        "Launched one CPU process with ZeRO-3",
        alone_under_zero3,
        ("ZeRO-3 was asked for", "a run of one CPU process", "--num_processes 2"),
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
    Mistake(
        "Quantised the model and spread it over processes in a way that does not know its numbers",
        lambda b: quantised_and_sharded(b, {}, load_in_8bit=True),
        (
            "FSDP2 cannot spread weights over processes that are quantised to 8 bits",
            "load_in_4bit=True",
            "DDP or ZeRO-2",
        ),
    ),
    Mistake(
        "Stored 4 bits as other numbers than FSDP2 computes in",
        lambda b: quantised_and_sharded(b, {"bf16": True}, load_in_4bit=True, bnb_4bit_quant_storage="float32"),
        ("bnb_4bit_quant_storage='float32' does not go with computing in bfloat16", "='bfloat16'"),
    ),
    Mistake(
        "Gave a model that calls its head several times to FSDP or DeepSpeed",
        lambda b: b.train(
            trainer=launched_with(distributed_type=DistributedType.FSDP, is_fsdp2=True), model=calls_its_head_twice()
        ),
        ("calls its head 2 times in a forward pass", "Train it with DDP"),
        when=TRAINING,
    ),
    Mistake(
        "Called evaluate() before train() under ZeRO-3",
        lambda b: evaluated_alone(b).train(),
        (r"evaluate\(\) was called before train\(\)", "eval_on_start=True"),
        when=TRAINING,
    ),
    Mistake(
        "Named an --accelerate_config that does not exist",
        lambda b: launch_command("grpo", ["run.yaml", "--accelerate_config", "zero_3"]),
        ("'zero_3' is neither a file nor a config that comes with Covey", "cpu_2proc, fsdp2", "Did you mean 'zero3'"),
        when=CONFIG,
    ),
    Mistake(
        "Explained a run with an accelerate config of a way that is not trained with",
        lambda b: take_flags(["--accelerate_config", str(b.write("distributed_type: MEGATRON_LM", "own.yaml"))]),
        ("shares the model as 'megatron_lm', which Covey does not train with", "multi_gpu, .*zero3"),
        when=CONFIG,
    ),
    Mistake(
        "Explained a run with an accelerate config that cannot be read",
        lambda b: take_flags(["--accelerate_config", str(b.write("processes: 8", "own.yaml"))]),
        ("own.yaml' cannot be read as a config of accelerate", "distributed_type", "`accelerate config` makes one"),
        when=CONFIG,
    ),
    Mistake(
        "Explained a run on a GPU whose figures are not known",
        lambda b: take_flags(["--gpu", "h10"]),
        ("--gpu: 'h10' is not known; it is one of a100, h100, h200", "Did you mean 'h100'"),
        when=CONFIG,
    ),
    Mistake(
        "Gave the size of an image to `covey explain` in another form",
        lambda b: take_flags(["--image_size", "640,480"]),
        ("--image_size: '640,480' is not width x height in pixels, as in 640x480",),
        when=CONFIG,
    ),
    Mistake(
        "Gave --accelerate_config to a process that torchrun has started",
        lambda b: call_by_a_launcher(["run.yaml", "--accelerate_config", "zero3"]),
        ("one of several already", "Use one of the two"),
        when=CONFIG,
    ),
    checked(
        "Gave an optimizer of weights that are not trained, as of the model that a peft_config freezes",
        optimizer_under_an_adapter,
        "optimizer-weights",
        " SGD ",
        "optimizer_cls_and_kwargs",
    ),
    Mistake(
        "Chose an output_dir that is a file or cannot be written to",
        lambda b: b.build(args=runs.config(b.write("", "taken"))),
        ("output_dir='.*taken'", "not a folder that can be written to", "Choose another"),
    ),
]

TOKENIZERS = [
    Mistake(
        "Trained a model whose folder holds no tokenizer",
        lambda b: b.build(model=b.save("bare", tiny.model()), processing_class=None),
        ("loaded from '.*bare'", "Save it there", "pass `processing_class=tokenizer`"),
    ),
    Mistake(
        "Gave a model made from a config and no tokenizer",
        lambda b: b.build(processing_class=None),
        ("does not name its source", "tokenizer cannot be found", "Pass `processing_class=tokenizer`"),
    ),
    Mistake(
        "Gave a name or another object as processing_class",
        lambda b: b.build(processing_class="some/tokenizer"),
        ("got str: 'some/tokenizer'", "must be a tokenizer", r"AutoTokenizer\.from_pretrained, or leave it out"),
    ),
    Mistake(
        "Gave a name or another object as processing_class",
        lambda b: b.build(processing_class=object()),
        ("got object", "must be a tokenizer", r"AutoTokenizer\.from_pretrained, or leave it out"),
    ),
    Mistake(
        "Gave a processor to a model that sees no images",
        lambda b: b.build(processing_class=Processor()),
        ("is the processor Processor", "LlamaForCausalLM sees no images", r"Pass `processor\.tokenizer`"),
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
    Mistake(
        "Used the tokenizer of another, smaller model",
        lambda b: b.build(model=tiny.model(vocab_size=500)),
        ("has 104 tokens but the model embeds 500", "another model's", "Pass the model's own tokenizer"),
        kind=UserWarning,
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
