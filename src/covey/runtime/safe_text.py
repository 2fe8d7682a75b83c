"""Text that may be shown: without control characters of terminals and without secrets."""

import re
from typing import Any

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"
}
"""Control characters (ASCII, C1 and those that change the direction of text), and how they are shown."""

SECRET = re.compile(r"(.*[_-])?(token|key|secret|password|authorization)")
"""Names of entries that hold a secret, where they hold text."""


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that what a model or a server wrote cannot steer a terminal.

    Example:
        >>> printable("\x1b[2Jgone")
        '\\x1b[2Jgone'
    """
    return text.translate(ESCAPES)


def without_secrets(value: Any) -> Any:
    """A dictionary, and those within, without text under names of tokens and keys."""
    if not isinstance(value, dict):
        return value
    return {
        name: without_secrets(entry)
        for name, entry in value.items()
        if not (isinstance(entry, str) and SECRET.fullmatch(str(name).lower()))
    }
