"""Names of reward functions on command lines and in YAML files."""

import ast
import difflib
import inspect
import os
from collections.abc import Callable

from covey.rewards import accuracy, format, length, matching
from covey.rewards.judge import LLMJudge
from covey.runtime.import_path import is_reference, resolve

BUILT_IN: dict[str, Callable] = {
    name: value
    for module in (accuracy, format, length, matching)
    for name, value in vars(module).items()
    if name.startswith("get_") or name.endswith("_reward")
} | {"LLMJudge": LLMJudge}  # functions that need no import path
FORMS = "a built-in name, 'module:function', 'module.function', 'path/to/file.py:function', or a model's id or path"


def resolve_reward(text: str) -> Callable | str:
    """Look up a reward function by name; the id or path of a reward model is returned unchanged.

    A factory is called with the literal arguments in parentheses.

    Args:
        text: a built-in name, `module:function`, `module.function`, `path/to/file.py:function`, or a model. Modules may
            be in the working directory.

    Raises:
        ValueError: a module, file or function that does not exist, a factory without parentheses, or arguments that
            are not literals.

    Example:
        >>> resolve_reward("think_format_reward")(completions=["<think></think>4"])
        [1.0]
        >>> resolve_reward("get_repetition_penalty_reward(ngram_size=2)").__name__
        'repetition_penalty_reward'
        >>> resolve_reward("operator:neg")(3)
        -3
        >>> resolve_reward("org/reward-model")
        'org/reward-model'
    """
    text = text.strip()
    reference, call, arguments = text.partition("(")
    if reference in BUILT_IN:
        found = BUILT_IN[reference]
    elif not os.path.isdir(reference) and is_reference(reference):
        found = resolve(reference, "reward", FORMS)
    else:
        close = difflib.get_close_matches(reference, BUILT_IN, n=1)
        if close and "/" not in reference and not os.path.isdir(reference):
            raise ValueError(f"reward {reference!r} is unknown; did you mean {close[0]!r}? A reward is {FORMS}.")
        return text
    if call:
        return _call(found, text, arguments)
    _refuse_factory(found, reference)
    return found


def _refuse_factory(found: Callable, reference: str) -> None:
    is_factory = getattr(found, "__name__", "").startswith("get_") and inspect.isfunction(found)
    if not (is_factory or found is LLMJudge):
        return
    parameters = inspect.signature(found).parameters
    if "completions" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [p.name for p in parameters.values() if p.default is p.empty]
    call = f"{reference}({', '.join(f'{parameter}=...' for parameter in missing)})"
    raise ValueError(
        f"reward {reference!r} is a factory: it makes a reward function, so write its call, as in {call!r}. It takes:"
        f" {', '.join(parameters)}."
    )


def _call(factory: Callable, text: str, arguments: str) -> Callable:
    """Call a factory with the literals between the parentheses."""
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
        assert isinstance(call, ast.Call), "f(...) parses to a call"
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"reward {text!r}: arguments must be literals, as in 'get_cosine_scaled_reward(max_len=512)'."
        ) from error
    try:
        return factory(*positional, **named)
    except TypeError as error:
        raise ValueError(f"reward {text!r}: {error}.") from error
