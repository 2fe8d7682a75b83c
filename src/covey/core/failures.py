"""Exceptions of other people's code, in words."""

DESCRIBED = 500
"""Characters of a message that are kept."""


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
