"""Text that may be shown: without control characters of terminals and without secrets."""

import re
from typing import Any

_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *_DIRECTIONS, *range(0xD800, 0xE000), 0xFEFF]
ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"
}
"""How control characters (ASCII, C1, those of lines and directions) and halves of surrogate pairs are shown."""

SECRET = re.compile(
    r"(.*[_\- ])?((api|access|auth|bearer)?(token|key)|tokens|secret|credential|cookie|password|passwd|pwd"
    r"|passphrase|jwt|pat|auth(orization)?|bearer)s?"
)
"""Names of entries that hold a secret, where they hold more than a number; in lower case with underscores."""


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that what a model or a server wrote cannot steer a terminal.

    Example:
        >>> printable("\x1b[2Jgone")
        '\\x1b[2Jgone'
    """
    return text.translate(ESCAPES)


def without_secrets(value: Any) -> Any:
    """A dictionary, and those within, without entries of tokens and keys; URLs without users, passwords and keys."""
    if isinstance(value, str):
        public = re.sub(r"(?<=://)[^/@\s]+@", "", value)
        return re.sub(r"(?<=[?&])([^=&?\s]+)=[^&#\s]+", lambda m: f"{m[1]}=..." if is_secret(m[1]) else m[0], public)
    if type(value) in (list, tuple):
        return type(value)(map(without_secrets, value))
    if not isinstance(value, dict):
        return value
    return {
        name: without_secrets(entry)
        for name, entry in value.items()
        if isinstance(entry, int | float | None) or not is_secret(str(name))
    }


def is_secret(name: str) -> bool:
    return SECRET.fullmatch(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).strip().lower()) is not None
