"""Exceptions and values of other people's code, in words."""

from typing import Any

DESCRIBED = 500
"""Characters of a message that are kept."""

SHOWN = 120
"""Characters of a value that are kept."""


def describe(error: BaseException) -> str:
    """Kind and message of an exception, even of one that cannot be printed.

    The message is the exception's own code, which may take for ever: where the exception is a stranger's, this belongs
    under the deadline of the code that raised it.

    Example:
        >>> describe(ValueError("no")), describe(KeyError())
        ('ValueError: no', 'KeyError')
    """
    kind = type(error).__name__
    try:
        text = str.__str__(str(error))
    except BaseException:  # whatever that raises, this is about the first one
        return kind
    if len(text) > DESCRIBED:
        text = f"{text[:DESCRIBED]}..."
    return f"{kind}: {text}" if text else kind


def shown(value: Any) -> str:
    """A value and its type, shortened, even of one that cannot be printed.

    Example:
        >>> shown("1")
        "'1' (str)"
    """
    try:
        text = repr(value)
    except Exception as error:
        text = f"what cannot be printed: {describe(error)}"
    return f"{text if len(text) <= SHOWN else text[:SHOWN] + '...'} ({type(value).__name__})"
