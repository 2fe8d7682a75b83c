"""Sequence classifiers as reward functions, with their own tokenizers: text in, one logit per sample out."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from covey.core.findings import CheckError
from covey.core.special_tokens import added_prefix, without_second
from covey.core.transcript import without_none
from covey.rewards.contract import RewardError
from covey.rewards.functions import FailedReward, Log, RewardBatch
from covey.rewards.text import completion_text
from covey.runtime.deadlines import LateCalls
from covey.runtime.hub import NotFound, look_up
from covey.runtime.user_code import warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Device = torch.device | str | None


def is_reward_model(candidate: Any) -> bool:
    return isinstance(candidate, nn.Module) and hasattr(candidate, "config")


def model_name(model_id: str) -> str:
    return model_id.replace("\\", "/").rstrip("/").rpartition("/")[2] or model_id


def load_reward_model(model_id: str, init_kwargs: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    import covey.rewards

    model_id = os.path.expanduser(model_id)
    if model_id in covey.rewards.__all__:
        advice = f"Give the function, `covey.rewards.{model_id}`."
        raise CheckError.of("reward-type", f"{model_id!r} names no model.", advice)
    asked = {name: init_kwargs[name] for name in ("revision", "token", "cache_dir") if name in init_kwargs}
    try:
        if not look_up(model_id, called=f"reward model {model_id!r}", **asked):
            init_kwargs = {**init_kwargs, "local_files_only": True}
    except NotFound as error:
        raise CheckError.of(
            "reward-model",
            str(error),
            "A reward *function* is given as an object, or by import path on the command line.",
        ) from error
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            model_id, **{"num_labels": 1, **init_kwargs}, output_loading_info=True
        )
    except Exception as error:  # of half a dozen libraries
        raise CheckError.of(
            "reward-model",
            f"reward model {model_id!r} could not be loaded as a sequence classifier with one label.",
            "It must be the hub id or the folder of a model trained with num_labels=1 (a reward *function* is given as"
            f" an object, or by import path on the command line). transformers says: {error}",
        ) from error
    if info["missing_keys"]:
        warn(
            f"reward model {model_id!r} has no trained weights for {', '.join(sorted(info['missing_keys']))}: they are "
            "random, and so are its rewards. Is it a reward model?",
        )
    return model


class ModelReward:
    """A sequence classifier with its tokenizer.

    Prompt and completion are joined as text. Messages are rendered by the tokenizer's chat template and get no further
    special tokens; other text gets the tokens that the tokenizer adds, such as [CLS], once. Samples are padded on the
    right and scored in micro-batches of similar length; padding does not change a score. A sample longer than the
    model's context fails, because neither its beginning (the question) nor its end (the answer) can be cut off.
    """

    def __init__(self, model: nn.Module, processing_class: Any, name: str, batch_size: int = 8, device: Device = None):
        self.name, self.batch_size = name, batch_size
        self.late = LateCalls(f"reward model {name!r}", 1)
        self.config: Any = model.config
        num_labels = getattr(self.config, "num_labels", None)
        if num_labels != 1:
            raise CheckError.of(
                "reward-model",
                f"reward model {name!r} ({type(model).__name__}) has num_labels={num_labels}; a reward model is a "
                "sequence classifier with num_labels=1.",
            )
        self.tokenizer = self._prepare_tokenizer(processing_class)
        self._own_pad_id = self._pad_id_of_config()
        self.model = model if device is None else model.to(device)
        self.model.eval().requires_grad_(False)
        self._prefix = added_prefix(self.tokenizer)
        self._context = self._longest()

    def _prepare_tokenizer(self, processing_class: Any) -> "PreTrainedTokenizerBase":
        if processing_class is None:
            processing_class = self._load_tokenizer()
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if tokenizer.pad_token is None:
            raise CheckError.of(
                "reward-model",
                f"the tokenizer of reward model {self.name!r} has no pad, eos or unk token to pad with.",
                "Set `tokenizer.pad_token`.",
            )
        return tokenizer

    def _load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        source = getattr(self.config, "_name_or_path", "")
        try:
            if not source:
                raise OSError("the model was not loaded from anywhere")
            return AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckError.of(
                "reward-model",
                f"no tokenizer for reward model {self.name!r}: {reason}.",
                "Give one in `reward_processing_classes`.",
            ) from error

    def __call__(self, batch: RewardBatch, trainer_state: Any, log: Log) -> list[float | None]:
        pairs = zip(batch.rows, batch.rollouts, strict=True)
        inputs = [
            self.encode(self.text(row["prompt"], rollout.completion), rendered=not isinstance(row["prompt"], str))
            for row, rollout in pairs
        ]
        return self._score(inputs)

    def text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion_text(completion)
        if not self.tokenizer.chat_template:
            raise RewardError(
                f"the prompts are messages, but the tokenizer of reward model {self.name!r} has no chat template; set "
                "`tokenizer.chat_template`, or pass a tokenizer that has one in `reward_processing_classes`."
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        messages = [without_none(message) for message in (*prompt, *completion)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        assert isinstance(text, str), "one conversation, not tokenized"
        return text

    def encode(self, text: str, rendered: bool = False) -> list[int]:
        """Tokens of a text; one that a chat template has `rendered` holds its special tokens already."""
        ids = list(self.tokenizer(text, add_special_tokens=not rendered)["input_ids"])
        return ids if rendered else without_second(ids, self._prefix)

    def score(self, texts: list[str]) -> list[float | None]:
        """Scores of plain texts, which no chat template has rendered."""
        return self._score([self.encode(text) for text in texts])

    def _score(self, inputs: list[list[int]]) -> list[float | None]:
        fitting = [index for index, ids in enumerate(inputs) if len(ids) <= self._context]
        rewards: list[float | None] = [self._too_long(len(ids)) for ids in inputs]
        by_length = sorted(fitting, key=lambda index: len(inputs[index]))
        for start in range(0, len(by_length), self.batch_size):
            chosen = by_length[start : start + self.batch_size]
            for index, reward in zip(chosen, self._score_batch([inputs[index] for index in chosen]), strict=True):
                rewards[index] = reward
        return rewards

    @torch.inference_mode()
    def _score_batch(self, inputs: list[list[int]]) -> list[float]:
        ids, device = [torch.tensor(one, dtype=torch.long) for one in inputs], next(self.model.parameters()).device
        pad_id = self._pad_id(inputs)
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad_id)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
        with self._padding_with(pad_id):
            logits = self.model(input_ids=padded.to(device), attention_mask=mask.to(device)).logits
        if logits.shape != (len(inputs), 1):
            raise RewardError(
                f"reward model {self.name!r} returned logits of shape {tuple(logits.shape)} for {len(inputs)} texts, "
                f"instead of ({len(inputs)}, 1); only sequence classifiers can be reward models."
            )
        return logits[:, 0].float().tolist()

    def _pad_id_of_config(self) -> int | None:
        pad_id = getattr(self.config.get_text_config(), "pad_token_id", None)
        return pad_id if isinstance(pad_id, int) else None

    def _pad_id(self, inputs: list[list[int]]) -> int:
        """Token to pad with. A classifier scores the last token that is not its config's padding token.

        If the config has none, it was trained to score the last token of all, which may be the tokenizer's padding
        token, as the end of a turn often is. Then a token is taken with which none of these texts ends.
        """
        if self._own_pad_id is not None and self._is_token(self._own_pad_id):
            return self._own_pad_id
        ends = {ids[-1] for ids in inputs if ids}
        tokens = (self.tokenizer.pad_token_id, *range(len(ends) + 1))
        return next(token for token in tokens if token not in ends and self._is_token(token))

    def _is_token(self, token: int) -> bool:
        embeddings: Any = getattr(self.model, "get_input_embeddings", lambda: None)()
        return token >= 0 and (embeddings is None or token < len(embeddings.weight))

    @contextmanager
    def _padding_with(self, pad_id: int) -> Iterator[None]:
        configs = (self.config.get_text_config(), self.config)  # some classifiers read the one, some the other
        before = [getattr(config, "pad_token_id", None) for config in configs]
        for config in configs:
            config.pad_token_id = pad_id
        try:
            yield
        finally:
            for config, own in zip(configs, before, strict=True):
                config.pad_token_id = own

    def _longest(self) -> float:
        """Most tokens that the model can read, according to its config and its tokenizer."""
        limits = [math.inf, getattr(self.tokenizer, "model_max_length", None)]
        limits.append(getattr(self.config.get_text_config(), "max_position_embeddings", None))
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
                offset = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's begin after it
                limits.append(module.num_embeddings - offset)
        return min(limit for limit in limits if limit is not None and limit > 0)

    def _too_long(self, tokens: int) -> FailedReward:
        text = (
            f"prompt and completion have {tokens} tokens, and the context of reward model {self.name!r} has"
            f" {self._context:g}: they are longer than it was made for. Lower max_completion_length, leave long prompts"
            " out, or take a model with a longer context (if it reads more, raise its tokenizer's `model_max_length`"
            " and its config's `max_position_embeddings`)"
        )
        return FailedReward(RewardError(text), text)
