"""Loading of the policy (in float32 by default) and its tokenizer: a hub id, a folder, an object or a GGUF file."""

import copy
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from covey.core.findings import CheckError, Finding
from covey.core.model import placeholder_ids, sdpa_suits
from covey.policy.adapters import base_model, check_adapter_config, check_adapters, freeze_parts, with_adapter
from covey.policy.quantization import check_installed, keep_gradients, quantization_method, warn_about_unquantized
from covey.policy.sharded_tensors import full_shape
from covey.runtime.hub import look_up
from covey.runtime.quiet import without_bars
from covey.runtime.safe_text import without_secrets
from covey.runtime.user_code import report, warn

OWN_VOCABULARY = 0.5
"""Smallest number of tokens, as a share of the model's vocabulary, below which a warning says that the tokenizer may be
another model's."""


def load_policy(
    model: Any,
    *,
    init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    peft_config: Any = None,
    frozen: Collection[str] = (),
    check_quantization: Callable[[Any], None] = lambda quantization: None,
) -> Any:
    """Load the model to train: a hub id or folder, or a transformers or PEFT model.

    `init_kwargs`, `trust_remote_code` and `quantization_config` need an id or folder. `peft_config` adds an adapter;
    `frozen` parts ("vit", "aligner", "llm") are not trained. `check_quantization` is called with the model's
    quantization config before weights are loaded, and raises if the run cannot use it.

    Raises:
        CheckError: contradictory arguments, or a model that cannot be a policy.
        ValueError: a model that transformers cannot load.
        OSError, ImportError: the model cannot be found, or a package is missing.
    """
    init_kwargs = init_kwargs or {}
    report(check_loading(model, init_kwargs, quantization_config, peft_config))
    if isinstance(model, (str, os.PathLike)):
        quantization_config = quantization_config or init_kwargs.get("quantization_config")
        name, trust = os.path.expanduser(model), trust_remote_code
        model = _from_pretrained(name, init_kwargs, trust, quantization_config, check_quantization)
    else:
        init_kwargs = {}
    report(_check_generates(model))
    if "attn_implementation" not in init_kwargs:
        keep_soft_caps(base_model(model))
    if (method := quantization_method(base_model(model))) is not None:
        check_quantization(getattr(base_model(model).config, "quantization_config", None) or {"quant_method": method})
    report([*_check_has_parts(model, frozen), *check_adapter_config(peft_config, model)])
    if frozen:
        freeze_parts(model, frozen)
    if peft_config is not None:
        model = with_adapter(model, peft_config, frozen)
    held = [*_check_trains(model)]
    if peft_config is None and not any(finding.grave for finding in held):
        held += check_adapters(model)
    report([*held, *make_generation_config_valid(base_model(model))])
    keep_gradients(model)
    if quantization_method(base_model(model)) == "bitsandbytes":
        warn_about_unquantized(model)
    return model


def check_loading(model: Any, init_kwargs: Any, quantization_config: Any, peft_config: Any) -> Iterator[Finding]:
    """Findings about arguments that say how to load a model, before it is loaded."""
    named = isinstance(model, (str, os.PathLike))
    in_kwargs = (init_kwargs or {}).get("quantization_config")
    if named and quantization_config is not None and in_kwargs is not None:
        yield Finding.error(
            "quantised-weights",
            "`quantization_config` was given twice, as an argument of the trainer and in `model_init_kwargs`.",
            "Keep one.",
        )
    if named and (quantization_config is not None or in_kwargs is not None) and peft_config is None:
        yield Finding.error(
            "quantised-weights",
            "`quantization_config` was given without `peft_config` (in a run file `quantization` without `peft`):"
            " quantised weights cannot be trained.",
            "Give a `peft_config` to train an adapter on top of them, or drop `quantization_config`.",
        )
    if not named and quantization_config is not None:
        yield Finding.error(
            "model-arguments",
            f"`quantization_config` says how to load a model, but a loaded model was given ({type(model).__name__}).",
            "Give the model's id or folder, or drop it.",
        )
    elif not named and init_kwargs:
        yield Finding.warning(
            "model-arguments",
            f"`model_init_kwargs={without_secrets(init_kwargs)!r}` has no effect: it says how to load a model, but a"
            f" loaded model was given ({type(model).__name__}).",
            "Give the model's id or folder, or drop it.",
        )


def load_teacher(name: str, *, init_kwargs: dict[str, Any] | None = None, trust_remote_code: bool = False) -> Any:
    """Load a frozen model that only scores, from a hub id or folder; `init_kwargs` may have a `quantization_config`."""
    init_kwargs, name = init_kwargs or {}, os.path.expanduser(name)
    quantization = init_kwargs.get("quantization_config")
    model = _from_pretrained(name, init_kwargs, trust_remote_code, quantization, lambda config: None)
    report(_check_generates(model))
    if "attn_implementation" not in init_kwargs:
        keep_soft_caps(base_model(model))
    return model.requires_grad_(False).eval()


def tokenizer_of_source(name: str, location: dict[str, Any]) -> Any:
    """The tokenizer of a hub id or folder; None if none can be loaded."""
    with suppress(OSError, ValueError, TypeError, KeyError, ImportError):
        return AutoTokenizer.from_pretrained(os.path.expanduser(name), **located(name, location))
    return None


def config_of_source(name: str, location: dict[str, Any]) -> Any:
    """The config of the model of a hub id or folder; None if none can be loaded."""
    with suppress(OSError, ValueError, TypeError, KeyError, ImportError):
        return AutoConfig.from_pretrained(os.path.expanduser(name), **located(name, location))
    return None


def located(name: str, init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where a hub id or folder is; offline if the hub gives no answer."""
    location = _location(init_kwargs)
    return location if look_up(os.path.expanduser(name), **_asked(location)) else {**location, "local_files_only": True}


@contextmanager
def use_cache_as_it_is(model: Any) -> Iterator[None]:
    """Context that restores `use_cache` in the model's config, which transformers' trainer sets to False.

    Saved as False, it would make the trained model decode without a cache. Forward passes here pass it explicitly.
    """
    config: Any = getattr(model, "config", None)
    there, value = hasattr(config, "use_cache"), getattr(config, "use_cache", None)
    yield
    if there:
        config.use_cache = value
    elif hasattr(config, "use_cache"):
        del config.use_cache


@contextmanager
def set_up_to_train(policy: Any, recomputes: bool | None) -> Iterator[None]:
    """Context of a training run, after which the policy's mode and gradient checkpointing are as they were before.

    `recomputes`: gradient checkpointing will be on, for which the input of a model with adapters must have a gradient.
    """
    modes, layers = policy.training, [m for m in policy.modules() if hasattr(m, "gradient_checkpointing")]
    recomputed = [layer.gradient_checkpointing for layer in layers]
    embeddings = policy.get_input_embeddings()
    hooks = set(embeddings._forward_hooks)
    if recomputes and hasattr(policy, "peft_config") and hasattr(policy, "enable_input_require_grads"):
        policy.enable_input_require_grads()  # checkpointed frozen layers need an input that carries gradient
    try:
        yield
    finally:
        for added in embeddings._forward_hooks.keys() - hooks:  # transformers adds a second one, and removes only one
            del embeddings._forward_hooks[added]
        for layer, value in zip(layers, recomputed, strict=True):
            layer.gradient_checkpointing = value
        policy.train(modes)


def keep_soft_caps(model: Any) -> None:
    """Use eager attention for models with soft-capping (Gemma 2), which SDPA, the default of transformers, ignores."""
    if model.config._attn_implementation == "sdpa" and not sdpa_suits(model):
        model.set_attn_implementation("eager")


def _from_pretrained(
    name: str,
    init_kwargs: dict[str, Any],
    trust_remote_code: bool,
    quantization: Any,
    check_quantization: Callable[[Any], None],
) -> Any:
    kwargs = {"trust_remote_code": trust_remote_code, **init_kwargs}
    if kwargs.get("revision") is not None and os.path.isdir(name):
        warn(f"`revision={kwargs['revision']!r}` has no effect: the model is a folder, {name!r}, without versions.")
    if not look_up(name, **_asked(kwargs)):
        kwargs["local_files_only"] = True  # else each request is repeated for half a minute
    try:
        config = kwargs.get("config") or AutoConfig.from_pretrained(name, **_location(kwargs))
    except (OSError, ValueError, TypeError, KeyError):
        config = None  # loading raises an error that is explained
    check_quantization(quantization or getattr(config, "quantization_config", None))
    auto_class = auto_class_of(config)
    kwargs["dtype"] = as_dtype(kwargs.pop("torch_dtype", None) or kwargs.get("dtype"))
    if quantization is not None:
        kwargs["quantization_config"] = quantization
        check_installed(quantization)
    try:
        loaded: Any = auto_class.from_pretrained(name, **kwargs, output_loading_info=True)
    except ImportError as error:
        raise ImportError(
            f"the model {name!r} needs a package that is missing here, with"
            f" model_init_kwargs={without_secrets(init_kwargs)!r}: {_first_line(error)} Install it; or, for an"
            " attn_implementation, leave that out: packed rows use Covey's own attention."
        ) from error
    except Exception as error:  # of half a dozen libraries
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(without_secrets(_why_not_loaded(name, init_kwargs, error))) from error
    model, report = loaded
    missing = [key for key, _ in model.named_parameters() if key in report["missing_keys"]]
    if missing:
        raise CheckError.of(
            "model-weights",
            f"model={name!r} has no trained weights for {', '.join(missing[:5])}: they would be random. It was saved"
            " without its language-modelling head, or as another kind of model (a classifier, say).",
            "Give a model that was saved as a causal language model.",
        )
    return model


def auto_class_of(config: Any) -> Any:
    return AutoModelForImageTextToText if config is not None and sees_images(config) else AutoModelForCausalLM


def _location(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only", "proxies")
    return {name: init_kwargs[name] for name in names if name in init_kwargs}


def _asked(location: dict[str, Any]) -> dict[str, Any]:
    return {name: location[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in location}


def sees_images(config: Any) -> bool:
    return type(config) in AutoModelForImageTextToText._model_mapping and bool(placeholder_ids(config))


def as_dtype(dtype: Any) -> torch.dtype | str:
    """Dtype for `from_pretrained`: float32 for None, a floating-point dtype, or "auto"; ValueError for others."""
    if dtype is None or dtype == "auto":
        return dtype or torch.float32
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise CheckError.of(
            "model-dtype",
            f"dtype={dtype!r} in `model_init_kwargs` is not a floating-point type.",
            "Choose one of: float32, bfloat16, float16, auto.",
        )
    return named


def _why_not_loaded(name: str, init_kwargs: dict[str, Any], error: Exception) -> str:
    reason = _first_line(error)
    if "trust_remote_code" in str(error):
        return (
            f"model={name!r} comes with code of its own, which runs only where it is trusted. Read it, then set"
            " trust_remote_code=True."
        )
    if os.path.isdir(name):
        options = f" with model_init_kwargs={without_secrets(init_kwargs)!r}" if init_kwargs else ""
        return (
            f"the model in the folder {name!r} cannot be loaded as a causal language model{options}: {reason} Give the"
            " folder of a model that AutoModelForCausalLM loads, and arguments that it takes."
        )
    return (
        f"model={name!r} is not a local folder, and could not be loaded as a hub id: {reason} Check its"
        " revision and files on the hub; without a network, give a folder."
    )


def _first_line(error: Exception, width: int = 300) -> str:
    line = str(error).strip().partition("\n")[0].rstrip(": ")
    return line if len(line) <= width else line[: width - 1] + "…"


def _check_generates(model: Any) -> Iterator[Finding]:
    if isinstance(model, type) or not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__}: {model!r:.80}"
        yield Finding.error(
            "model-type",
            f"`model` must be a hub id, a folder or a transformers causal language model, got {given}.",
            "Load one with AutoModelForCausalLM.from_pretrained.",
        )
        return
    if model.get_output_embeddings() is None:
        yield Finding.error(
            "model-type",
            f"{type(model).__name__} has no language-modelling head and cannot generate text.",
            "Load it with AutoModelForCausalLM.",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        yield Finding.error(
            "model-type",
            f"{type(model).__name__} is an encoder-decoder model; only decoder-only (causal) language models can be"
            " trained.",
            "Load one with AutoModelForCausalLM.",
        )


def make_generation_config_valid(model: Any) -> Iterator[Finding]:
    """Set do_sample=True in a generation config that could not be saved: a warning, or an error if that is not enough.

    Some checkpoints have a temperature without `do_sample`: they can be loaded, but the first save fails.
    """
    config = getattr(model, "generation_config", None)
    if config is None or _invalid(config) is None:
        return
    sampling = copy.deepcopy(config)
    sampling.do_sample = True
    if (why := _invalid(sampling)) is not None:
        yield Finding.error(
            "model-generation",
            f"the generation config of the model is invalid, so the model could not be saved: {why}",
            "Correct `model.generation_config`, or generation_config.json in the model's folder.",
        )
        return
    config.do_sample = True
    yield Finding.warning(
        "model-generation",
        "the generation config of the model has sampling settings and do_sample=False, with which transformers refuses"
        " to save the model; it is saved with do_sample=True.",
        "To save other settings, set `model.generation_config`. It has no effect on sampling in training.",
    )


def _invalid(config: Any) -> str | None:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())
    return None


def _check_trains(model: Any) -> Iterator[Finding]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        part, advice = "model", "Call model.requires_grad_(True), or give a `peft_config` to train an adapter."
        if hasattr(model, "peft_config"):
            part = "adapter"
            advice = "Load the adapter with PeftModel.from_pretrained(base_model, folder, is_trainable=True)."
        yield Finding.error(
            "model-frozen", f"every weight of the {part} is frozen, so nothing would be trained.", advice
        )
    if quantization_method(model) is not None and not hasattr(model, "peft_config"):
        yield Finding.error(
            "quantised-weights",
            f"the weights of this {type(model).__name__} are quantised and cannot be trained.",
            "Give a `peft_config` to train an adapter on top of them, or load the model without `quantization_config`.",
        )
    if any(parameter.dtype == torch.float16 for parameter in trained):
        yield Finding.warning(
            "model-dtype",
            "the weights to train are float16, in which small updates vanish and large ones overflow.",
            "Load the model in float32 (the default here: leave `dtype` out); mixed precision is chosen with fp16=True"
            " or bf16=True.",
        )


def _check_has_parts(model: Any, frozen: Collection[str]) -> Iterator[Finding]:
    if not frozen:
        return
    named = " and ".join(f"freeze_{part}=True" for part in frozen)
    if not sees_images(model.config):
        yield Finding.error(
            "model-part",
            f"{named}: {type(model).__name__} is not a vision-language model, so it has no such part.",
            "Leave it at False; to train a few weights of a language model, use `peft_config`.",
        )
    if hasattr(model, "peft_config"):
        yield Finding.error(
            "model-part",
            f"{named} with a PeftModel: the modules of its adapters are fixed already.",
            "Give the base model and a `peft_config`, or make the PeftModel with adapters in other modules alone"
            " (`target_modules`).",
        )


def load_processing_class(
    processing_class: Any, model: Any, *, trust_remote_code: bool = False, init_kwargs: dict[str, Any] | None = None
) -> Any:
    """Load the policy's tokenizer, or processor of images (None: the model's own), and set its padding token.

    ValueError if none is found, if it has no end-of-sequence token or belongs to another model, or if it is a processor
    of images and the model sees none.
    """
    given = processing_class
    if given is None:
        given = _own_processing_class(model, {"trust_remote_code": trust_remote_code, **_location(init_kwargs or {})})
    tokenizer = given
    if hasattr(given, "tokenizer") and not hasattr(given, "eos_token_id"):
        if not sees_images(model.config):
            raise CheckError.of(
                "tokenizer-type",
                f"`processing_class` is the processor {type(given).__name__}, which contains a tokenizer and image"
                f" or audio parts, and {type(model).__name__} sees no images.",
                "Give `processor.tokenizer`, or a vision-language model.",
            )
        tokenizer = given.tokenizer
    if not hasattr(tokenizer, "eos_token_id") or not callable(tokenizer):
        raise CheckError.of(
            "tokenizer-type",
            f"`processing_class` must be a tokenizer, got {type(tokenizer).__name__}: {tokenizer!r:.80}.",
            "Load one with AutoTokenizer.from_pretrained, or leave it out to use the model's own.",
        )
    report(_check_tokenizer(tokenizer, model))
    if tokenizer.pad_token is None:
        ends = end_token_ids(model, tokenizer)
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(min(ends))
    return given


def _own_processing_class(model: Any, location: dict[str, Any]) -> Any:
    name = getattr(model.config, "_name_or_path", "")
    if not name:
        raise CheckError.of(
            "tokenizer-missing",
            "the model's config does not name its source, so its tokenizer cannot be found.",
            "Give `processing_class=tokenizer`.",
        )
    what = "processor" if sees_images(model.config) else "tokenizer"
    try:
        if not look_up(name, called=f"the {what}'s source {name!r}", **_asked(location)):
            location = {**location, "local_files_only": True}
        auto_class: Any = AutoProcessor if what == "processor" else AutoTokenizer
        return auto_class.from_pretrained(name, **location)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise CheckError.of(
            "tokenizer-missing",
            f"no {what} could be loaded from {name!r}, where the model is from.",
            f"Save it there ({what}.save_pretrained), or give `processing_class={what}`. transformers says:"
            f" {_first_line(error)}",
        ) from error


def _check_tokenizer(tokenizer: Any, model: Any) -> Iterator[Finding]:
    if not end_token_ids(model, tokenizer):
        yield Finding.error(
            "never-ends",
            "neither the tokenizer nor the model's generation config names an end-of-sequence token, so completions"
            " could never end.",
            "Set `tokenizer.eos_token`.",
        )
    vocabulary = full_shape(model.get_input_embeddings().weight)[0]
    if len(tokenizer) > vocabulary:
        yield Finding.error(
            "tokenizer-drift",
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds only {vocabulary}: they do not belong"
            " together.",
            "Give the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))`.",
        )
    if len(tokenizer) < OWN_VOCABULARY * vocabulary:
        yield Finding.warning(
            "tokenizer-drift",
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: is it another model's? Most"
            " of what the model may sample has no text.",
            "Give the model's own tokenizer.",
        )


def end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Ids of the tokens that end a completion, from the generation config and the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {named} if isinstance(named, int) else set(named or [])
    return (ids | {tokenizer.eos_token_id}) - {None}


def max_context(model: Any) -> int | None:
    """Most tokens that the model has positions for, or None if the config has no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if limit and limit > 0 else None  # XLNet has -1


def has_dropout(model: torch.nn.Module) -> bool:
    """True if any dropout probability is above 0, so that forward passes over the same tokens differ in training."""
    return any(True for _ in _dropouts(model))


def disable_dropout(model: torch.nn.Module) -> None:
    for module, name in list(_dropouts(model)):
        setattr(module, name, 0.0)


def _dropouts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    """Modules and attributes with a dropout probability above 0: dropout modules, and numbers in attention modules."""
    for module in model.modules():
        for name, value in vars(module).items():
            named = "dropout" in name or (name == "p" and isinstance(module, torch.nn.Dropout))
            if named and isinstance(value, float) and value > 0:
                yield module, name


@contextmanager
def whole_models() -> Iterator[None]:
    """Let transformers build or load whole models in every process, also where the policy is sharded."""
    from transformers.integrations import deepspeed

    of_deepspeed = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()  # which tells it of ZeRO-3
    try:
        # The variable asks all processes but the first to leave weights out.
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = of_deepspeed


@without_bars()
def convert_gguf(path: str | Path, folder: str | Path) -> Path:
    """Convert a GGUF file into a folder with the model in float32, atomically; a complete folder is reused.

    FileNotFoundError if there is no such file.
    """
    path, folder = Path(path), Path(folder)
    if (folder / "config.json").is_file():
        return folder
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {path}")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    # A model loaded from GGUF refuses to be saved, so its weights move into a new one.
    clean = AutoModelForCausalLM.from_config(type(quantised.config)(**config))
    clean.load_state_dict(quantised.state_dict())
    clean.generation_config = quantised.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        whole = Path(staging, folder.name)
        clean.save_pretrained(whole)
        AutoTokenizer.from_pretrained(**source).save_pretrained(whole)
        try:
            whole.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    return folder
