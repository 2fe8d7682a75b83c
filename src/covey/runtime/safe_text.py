"""Text that is safe to show: without control characters of terminals and without secrets."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

_DIRECTIONS = [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), *_DIRECTIONS, *range(0xD800, 0xE000), 0xFEFF]
ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"
}
"""Replacements of control characters (ASCII, C1, lines, text direction) and of halves of surrogate pairs."""

_NAME = (
    r"(?:(?:api|access|auth|bearer)?(?:token|key)|tokens|secret|credential|cookie|password|passwd|pwd"
    r"|passphrase|jwt|pat|sig|signature|auth(?:orization)?|bearer)s?"
)
SECRET = re.compile(rf"(.*[_\- ])?{_NAME}")
"""Names of entries that hold a secret, unless the value is a number; in lower case with underscores."""
_QUOTE = r"""(?:\\?["'])?"""
IN_TEXT = (
    re.compile(
        rf"(?<![a-z])({_NAME}{_QUOTE}\s?[:=]\s?{_QUOTE}(?:(?:basic|bearer|token)\s)?)"
        r"(?:(?<!:\s)|(?=\S*[\d_+/=$@#%^*]))[^\s\"',;&(){}[\]<>\\]{8,}",  # no word of a sentence, as in `key: remember`
        re.IGNORECASE,
    ),
    re.compile(rf"((?<![\w-])--(?:[\w-]*[-_])?{_NAME}{_QUOTE},?\s{_QUOTE})[^\s\"'-][^\s\"']*", re.IGNORECASE),
    re.compile(r"(\bBearer )[\w.~+/=-]{16,}"),
    re.compile(r"(?<![\w-])(hf_|sk-|gh[a-z]_|github_pat_|glpat-|AKIA)[\w-]{16,}"),
)
"""Secrets in a text: values of a named entry (8 characters or more) or flag, and keys in the form of services."""


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that text from a model or a server cannot control the terminal.

    Example:
        >>> printable("\x1b[2Jgone")
        '\\x1b[2Jgone'
    """
    return text.translate(ESCAPES)


def without_secrets(value: Any) -> Any:
    """A copy of a value with secrets hidden: entries, pairs and flags named after a token or key, and parts of texts.

    Containers are copied, at every depth; a dataclass or named tuple that holds a secret becomes a dictionary.
    """
    if isinstance(value, str):
        public = re.sub(r"(?<=://)[^/@\s]+@", "", value)
        public = re.sub(r"(?<=[?&])([^=&?\s]+)=[^&#\s]+", lambda m: f"{m[1]}=..." if is_secret(m[1]) else m[0], public)
        return functools.reduce(lambda text, pattern: pattern.sub(r"\1...", text), IN_TEXT, public)
    if type(value) in (list, tuple):
        return type(value)(map(_public_item, ("", *value), value))
    if isinstance(value, Mapping):
        return {
            name: without_secrets(entry)
            for name, entry in value.items()
            if isinstance(entry, int | float | None) or not is_secret(str(name))
        }
    if not (dataclasses.is_dataclass(value) or hasattr(value, "_asdict")) or isinstance(value, type):
        return value
    names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
    entries = {name: getattr(value, name) for name in names}
    return value if (public := without_secrets(entries)) == entries else public


def _public_item(before: Any, item: Any) -> Any:
    """An item of a list without secrets, such as `("token", "x")` or `"x"` after `"--token"`."""
    if isinstance(before, str) and before.startswith("-") and is_secret(before.strip("-")):
        return "..."
    named = type(item) in (list, tuple) and len(item) == 2 and isinstance(item[0], str) and is_secret(item[0])
    if named and not isinstance(item[1], int | float | None):
        return type(item)((item[0], "..."))
    return without_secrets(item)


def is_secret(name: str) -> bool:
    return SECRET.fullmatch(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).strip().lower()) is not None


def shorten(text: str, width: int) -> str:
    """At most `width` characters: the beginning and the end, with an ellipsis in between."""
    if len(text) <= width:
        return text
    head = width // 2
    tail = width - head - 1
    return text[:head] + "…" + (text[-tail:] if tail > 0 else "")
