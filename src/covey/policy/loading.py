"""Loading the policy and its tokenizer, from a hub id, a folder, an object or a GGUF file.

Models are loaded in float32 unless told otherwise: that is what the optimizer updates. Not here: wrapping for many
processes (accelerate's job).
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch


def load_policy(
    model: Any,
    *,
    init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    peft_config: Any = None,
) -> Any:
    """The model to train.

    Args:
        model: hub id or folder; or a transformers or PEFT model, taken as it is.
        init_kwargs: further arguments of `from_pretrained`; only with an id or folder.
        trust_remote_code: run the code that comes with the model.
        quantization_config: loads the base in fewer bits; only with an id or folder, and with `peft_config`.
        peft_config: adds a trainable adapter.

    Raises:
        ValueError: the arguments contradict one another, or the model cannot be a policy.
        OSError: the model cannot be found.
    """
    if isinstance(model, (str, os.PathLike)):
        model = _from_pretrained(os.fspath(model), init_kwargs or {}, trust_remote_code, quantization_config)
    elif init_kwargs or quantization_config is not None:
        raise ValueError(
            "`model_init_kwargs` and `quantization_config` say how to load a model, but a loaded model was given"
            f" ({type(model).__name__}). Pass the model's id or folder, or drop them."
        )
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise ValueError(
            f"`model` must be a hub id, a folder or a transformers causal language model, got {type(model).__name__}."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} has no language-modelling head and cannot generate text. Load it with"
            " AutoModelForCausalLM."
        )
    return _with_adapter(model, peft_config) if peft_config is not None else model


def _from_pretrained(name: str, init_kwargs: dict[str, Any], trust_remote_code: bool, quantization: Any) -> Any:
    from transformers import AutoModelForCausalLM

    kwargs = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, **init_kwargs}
    if isinstance(kwargs["dtype"], str) and kwargs["dtype"] != "auto":
        kwargs["dtype"] = getattr(torch, kwargs["dtype"])
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def _with_adapter(model: Any, peft_config: Any) -> Any:
    try:
        from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise ImportError("`peft_config` needs PEFT: pip install 'covey[peft]'") from error
    if isinstance(model, PeftModel):
        raise ValueError(
            "a PeftModel and a `peft_config` were both given; pass the base model with the config, or the PeftModel"
            " alone."
        )
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, peft_config)


def load_tokenizer(processing_class: Any, model: Any, *, trust_remote_code: bool = False) -> Any:
    """The policy's tokenizer, with a padding token.

    Args:
        processing_class: a tokenizer, or None to load the one that belongs to `model`.
        model: the loaded policy; its name says where its tokenizer is.

    Raises:
        ValueError: no tokenizer can be found, or it has no end-of-sequence token.
    """
    if processing_class is None:
        from transformers import AutoTokenizer

        name = getattr(model.config, "_name_or_path", "")
        if not name:
            raise ValueError(
                "the model does not say where it was loaded from, so its tokenizer cannot be found. Pass"
                " `processing_class=tokenizer`."
            )
        processing_class = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    if not hasattr(processing_class, "decode") or not callable(processing_class):
        raise ValueError(f"`processing_class` must be a tokenizer, got {type(processing_class).__name__}.")
    if not end_token_ids(model, processing_class):
        raise ValueError(
            "neither the tokenizer nor the model's generation config names an end-of-sequence token, so completions"
            " could never end. Set `tokenizer.eos_token`."
        )
    if processing_class.pad_token is None:
        processing_class.pad_token = processing_class.eos_token or processing_class.convert_ids_to_tokens(
            min(end_token_ids(model, processing_class))
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(processing_class) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(processing_class)} tokens but the model embeds only {vocabulary}: they do not"
            " belong together. Pass the model's own tokenizer, or call `model.resize_token_embeddings(len(tokenizer))`."
        )
    return processing_class


def end_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a completion: those of the generation config and of the tokenizer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {named} if isinstance(named, int) else set(named or [])
    return ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


def max_context(model: Any) -> int | None:
    """Most tokens the model has positions for, or None when it does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def disable_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability to 0."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def convert_gguf(path: str | Path, folder: str | Path) -> Path:
    """Turn a GGUF file into a float32 model folder that loads in seconds; done once, then reused.

    Args:
        path: the .gguf file.
        folder: where the converted model goes; nothing happens if it is complete already.

    Returns:
        `folder`. It appears complete or not at all.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the `gguf` package is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, folder = Path(path), Path(folder)
    if (folder / "config.json").is_file():
        return folder
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {path}")
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    # A model that remembers having been GGUF refuses to be saved, so its weights move into a clean one.
    clean = AutoModelForCausalLM.from_config(type(quantised.config)(**config))
    clean.load_state_dict(quantised.state_dict())
    clean.generation_config = quantised.generation_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        clean.save_pretrained(staging)
        AutoTokenizer.from_pretrained(**source).save_pretrained(staging)
        shutil.copytree(staging, folder.with_suffix(".partial"), dirs_exist_ok=True)
    folder.with_suffix(".partial").rename(folder)
    return folder
