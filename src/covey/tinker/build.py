"""Construction of a service from a model: loading, the engine, names."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.engines.native.adapter_engine import AdapterEngine
from covey.policy.adapters import with_shared_weights
from covey.policy.loading import end_token_ids, load_policy, load_processing_class, max_context, sees_images
from covey.policy.scoring import TokenScorer
from covey.runtime.files import locked
from covey.tinker.checkpoints import CheckpointStore
from covey.tinker.errors import Refusal
from covey.tinker.journal import FOLDER, DurableJournal
from covey.tinker.keys import checked_key
from covey.tinker.learner import Base
from covey.tinker.server import served
from covey.tinker.service import Settings, TinkerService
from covey.tinker.work import Worker

NO_LIMIT = 1 << 20  # tokens of a sequence where the model names no limit


def names_of(model: str, also: Sequence[str] = ()) -> tuple[str, ...]:
    """Names that a model is served under: the chosen ones, `model` itself, and a folder's absolute path and name."""
    own = [model]
    if os.path.isdir(os.path.expanduser(model)):
        path = Path(model).expanduser().resolve()
        own += [str(path), path.name]
    return tuple(dict.fromkeys([*also, *own]))


def tokenizer_place(model: str) -> str | None:
    """A folder's path in a form that clients read the tokenizer from; None for a hub id.

    Clients take a path with exactly two slashes for a hub id, so `/./` makes it longer.
    """
    folder = os.path.expanduser(model)
    if not os.path.isdir(folder):
        return None
    path = os.path.abspath(folder)
    return path if path.count("/") != 2 else path.replace("/", "/./", 1)


@contextmanager
def opened(
    model: Any,
    settings: Settings,
    checkpoints: str | Path,
    *,
    tokenizer: Any = None,
    token_budget: int = 2048,
    max_tokens: int | None = None,
    device: str | None = None,
    durable: int | None = None,
    log: Callable[[str], None] = lambda line: None,
    say: Callable[[str], None] | None = None,
) -> Iterator[TinkerService]:
    """Load a model and give its service within the context.

    Args:
        model: hub id, folder, or a loaded transformers model.
        settings: limits and names.
        checkpoints: folder for saved states.
        tokenizer: by default the model's own.
        token_budget: tokens of a micro-batch.
        max_tokens: most tokens of a sequence; None: as many as the model allows.
        device: by default the one that the model is on.
        durable: optimizer steps between two writings of weights. The sessions then survive a kill; None: they do not.
        log: gets a line for each operation.
        say: called with messages for the person who starts the server.

    Raises:
        Refusal: another server uses the folder, or a model or setting that cannot be served.
    """
    if durable is not None and durable < 1:
        raise Refusal(f"durable={durable} must be 1 or more: the optimizer steps between two writings of weights.")
    model = load_policy(os.path.expanduser(model) if isinstance(model, str) else model)
    if sees_images(model.config):
        raise Refusal(f"{type(model).__name__} sees images, and this server reads only text. Give a language model.")
    tokenizer = load_processing_class(tokenizer, model)
    model.requires_grad_(False).eval()
    if device is not None:
        model.to(torch.device(device))
    ends = end_token_ids(model, tokenizer)
    limit = min(max_context(model) or NO_LIMIT, max_tokens or NO_LIMIT)
    scorer = TokenScorer(lambda inner: inner, temperature=1.0, pad_token_id=tokenizer.pad_token_id)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    base = Base(with_shared_weights(model), scorer, vocabulary, limit, token_budget)
    make_engine = partial(
        AdapterEngine,
        lambda: model,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_ids=ends,
        max_context=limit,
        tokenizer=tokenizer,
    )
    folder = Path(checkpoints).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder))
        except ValueError as error:
            raise Refusal(f"another server has --checkpoints {folder}: choose another folder. ({error})") from error
        store = CheckpointStore(folder)
        store.recover()
        journal = None
        if durable is not None:
            numbers = sum(parameter.numel() for parameter in model.parameters())
            server = {
                "model": settings.names[0],
                "parameters": numbers,
                "seed": settings.seed,
                "substitute": dict(settings.substitute),
            }
            journal = DurableJournal(folder / FOLDER, durable, server, log)
            stack.callback(journal.close)
        elif (folder / FOLDER).exists():
            (say or log)(f"{folder / FOLDER} has sessions of an earlier server, which --durable continues")
        worker = Worker(make_engine)
        stack.callback(worker.close)
        yield TinkerService(settings, base, worker, store, ends, log, say, journal)


@contextmanager
def serve(
    model: Any,
    *,
    names: Sequence[str] = (),
    checkpoints: str | Path = "tinker-checkpoints",
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    settings: Settings | None = None,
    **options: Any,
) -> Iterator[str]:
    """Serve a model within the context; gives the address, for `TINKER_BASE_URL`.

    Args:
        model: hub id, folder, or a loaded transformers model (then with `tokenizer` and `names`).
        names: further names that the model answers to.
        checkpoints: folder for saved states.
        host, port: address to listen at; port 0 is any that is free.
        key: what clients send as TINKER_API_KEY; None for any on this machine.
        settings: limits and the like; its `names` are the names that the model answers to.
        options: `token_budget`, `max_tokens`, `device`, `tokenizer`, `durable`, `log` and `say` of `opened`.

    Raises:
        ValueError: another machine can reach `host` and there is no key, or the key does not begin with tml-; or a
            Refusal of `opened`.
    """
    key = checked_key(key, host)
    own = names_of(model, names) if isinstance(model, str) else tuple(names)
    place = tokenizer_place(model) if isinstance(model, str) else None
    settings = replace(settings or Settings(own), names=own, tokenizer_id=place)
    with opened(model, settings, checkpoints, **options) as service, served(service, host, port, key) as url:
        yield url
