"""Worker process that runs a user's function. It is run by path and never imported, and does not itself import torch.

It reads pickles of a mark and a pickle: `(function, {module: file})`, with the script of the run as `__main__` where it
has one, then `(arguments, recorded names)` for each call. Each is answered by a line, the mark and JSON: `{}` when
ready; `{"result": value, "calls": [[name, args, kwargs], ...]}` with the calls of functions that were passed under the
recorded names; or `{"raised": [type, message, traceback]}`.
"""

import contextlib
import importlib.util
import inspect
import json
import numbers
import os
import pickle
import traceback

held = contextlib.ExitStack()
"""Contexts that last as long as the process; without a reference, a generator's context would end."""


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not look like a reply, nor its input be a request
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if own := os.environ.pop("COVEY_PYTHONPATH", ""):  # programs that the function starts have modules of their own
        os.environ["PYTHONPATH"] = own
    else:
        os.environ.pop("PYTHONPATH", None)
    worker = os.getpid()
    function = None
    while True:
        try:
            mark, data = pickle.load(requests)
        except EOFError:
            return
        try:
            first, second = pickle.loads(data)
            if function is None:
                function = load(first, second)
                reply = json.dumps({})
            else:
                reply = json.dumps(call(function, first, second))
        except BaseException as error:  # SystemExit too
            reply = json.dumps({"raised": describe(error)})
        if os.getpid() != worker:  # forked by the function, and it returned here too
            os._exit(0)
        replies.write(mark + reply.encode() + b"\n")
        replies.flush()


def load(function: bytes, files: dict):
    """Unpickle the function; modules that are not found under their names are loaded from their files.

    The training script, among them or imported by them, is not run again.
    """
    from covey.runtime.definitions import definitions_only, load_file, script_of_run

    held.enter_context(definitions_only())
    held.enter_context(script_of_run(files.pop("__main__", None)))
    for name, path in files.items():
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None or os.path.abspath(spec.origin) != path:
            load_file(name, path)
    return pickle.loads(function)


def call(function, arguments: dict, recorded: list) -> dict:
    calls: list = []

    def recorder(name: str):
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    result = function(**arguments, **{name: recorder(name) for name in recorded})
    if inspect.isawaitable(result):
        import asyncio

        async def wait():
            return await result

        result = asyncio.run(wait())
    return {"result": plain(result), "calls": [(name, plain(args), plain(kwargs)) for name, args, kwargs in calls]}


def plain(value):
    """A value for JSON; Covey's own reward classes become `{class: fields}`, and other objects their text."""
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        return value
    if kind.__module__.startswith("covey.rewards.") and not isinstance(value, BaseException):
        return {f"covey.{kind.__name__}": plain(value.__getnewargs__())}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return plain(value.tolist())
    return float(value) if isinstance(value, numbers.Real) else str(value)


def describe(error: BaseException) -> tuple:
    try:
        return type(error).__name__, str(error), "".join(traceback.format_exception(error))
    except BaseException:  # it is the user's code
        return type(error).__name__, "", ""


if __name__ == "__main__":
    main()
