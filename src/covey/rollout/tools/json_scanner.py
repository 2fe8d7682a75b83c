"""Reading calls out of text that anyone may have written: in linear time, and without ever raising.

`Scanner` finds where a JSON value ends; `read_python_calls` reads `f(a=1)` without Python's own parser, whose stack and
running time a hostile text can exhaust.
"""

import re
from typing import Any

from covey.rollout.tools.calls import ToolCall, Unreadable, decode_json

# A string literal (to the end of the text if it is not closed), or a bracket. Possessive, so that nothing is retried.
_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_PAIRS = {"]": "[", "}": "{"}
_SCANS = 8


class Scanner:
    """Finds JSON values in one text. All scans together read each character about eight times at most."""

    def __init__(self, text: str):
        self.text = text
        self.budget = _SCANS * len(text)

    def end_of_value(self, start: int) -> int | None:
        """Where the object or list that begins at `start` ends, or None if it never does."""
        open_brackets: list[str] = []
        limit = min(len(self.text), start + self.budget)
        for token in _BRACKETS.finditer(self.text, start, limit):
            bracket = token[0]
            if bracket in "[{":
                open_brackets.append(bracket)
            elif bracket in _PAIRS:
                if not open_brackets or open_brackets.pop() != _PAIRS[bracket]:
                    self.budget -= token.end() - start
                    return None
                if not open_brackets:
                    self.budget -= token.end() - start
                    return token.end()
        self.budget -= limit - start
        return None

    def value(self, start: int) -> tuple[Any, int] | None:
        """The value at `start` (or `Unreadable`) and where it ends; None if no object or list begins and ends there."""
        if self.text[start : start + 1] not in ("{", "["):
            return None
        end = self.end_of_value(start)
        return None if end is None else (decode_json(self.text[start:end]), end)

    def skip_space(self, start: int) -> int:
        """The first position from `start` on that is no white space."""
        found = _SPACE.match(self.text, start)
        return found.end() if found else start


class Finder:
    """`text.find(mark, start)` that reads the text once, however often it is asked for positions further on."""

    def __init__(self, text: str, mark: str):
        self.text, self.mark = text, mark
        self.asked, self.found = 0, text.find(mark)

    def __call__(self, start: int) -> int:
        """The first place of the mark from `start` on; the length of the text if there is none."""
        if start < self.asked or 0 <= self.found < start:
            self.asked, self.found = start, self.text.find(self.mark, start)
        return self.found if self.found >= 0 else len(self.text)


_SPACE = re.compile(r"\s*+")

_TOKEN = re.compile(
    r"""\s*+(?:
        (?P<text>'''(?:[^\\]|\\.)*?(?:'''|\\?\Z)
               | \"\"\"(?:[^\\]|\\.)*?(?:\"\"\"|\\?\Z)
               | '[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'
               | "[^"\\\n]*+(?:\\.[^"\\\n]*+)*+")
      | (?P<number>[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?)
      | (?P<name>[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+)
      | (?P<sign>[()\[\]{},:=;])
    )""",
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_DEPTH = 50
_LONGEST_NUMBER = 400


def read_python_calls(text: str) -> list[ToolCall] | Unreadable:
    """The calls in Python notation that `text` consists of: `f(a=1)`, `print(f(a=1))`, `[f(a=1), g(b="x")]`.

    Arguments are literals and given by name. Several calls stand on lines of their own or in a list.
    """
    try:
        return _Reader(_tokens(text)).calls()
    except _Wrong as wrong:
        return Unreadable(str(wrong))


class _Wrong(Exception):
    """The text is not in the notation; the message says why."""


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens = []
    position, end = 0, len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise _Wrong(f"cannot read {text[position:].lstrip()[:20]!r}")
        tokens.append((found.lastgroup, found[found.lastgroup]))
        position = found.end()
    return tokens


class _Reader:
    """Recursive descent over the tokens, to a limited depth."""

    def __init__(self, tokens: list[tuple[str, str]]):
        self.tokens = tokens
        self.at = 0

    def calls(self) -> list[ToolCall]:
        calls: list[ToolCall] = []
        while self.at < len(self.tokens):
            if self._accept("["):
                while not self._accept("]"):
                    calls.append(self._call())
                    self._accept(",")
            else:
                calls.append(self._call())
            self._accept(";")
        return calls

    def _call(self) -> ToolCall:
        name = self._name()
        if self._accept("="):  # result = f(...)
            name = self._name()
        self._expect("(")
        if name == "print" and self._peek(1) == "(":
            name = self._name()
            self._expect("(")
            call = self._arguments_of(name)
            self._expect(")")
            return call
        return self._arguments_of(name)

    def _name(self) -> str:
        kind, name = self._next()
        if kind != "name":
            raise _Wrong(f"expected the name of a tool, found {name[:20]!r}")
        return name

    def _arguments_of(self, name: str) -> ToolCall:
        arguments: dict[str, Any] = {}
        while not self._accept(")"):
            kind, argument = self._next()
            if kind != "name" or not self._accept("="):
                raise _Wrong(f"write the arguments of {name} by name, as in {name}(argument=1)")
            arguments[argument] = self._literal(_DEPTH)
            if not self._accept(","):
                self._expect(")")
                break
        return ToolCall(name.removesuffix(".call"), arguments)

    def _literal(self, depth: int) -> Any:
        if depth == 0:
            raise _Wrong("it is nested too deeply")
        kind, token = self._next()
        if kind == "text":
            return _string(token)
        if kind == "number":
            return _number(token)
        if kind == "name" and token in _WORDS:
            return _WORDS[token]
        if token in ("[", "("):
            items = []
            close = "]" if token == "[" else ")"
            while not self._accept(close):
                items.append(self._literal(depth - 1))
                if not self._accept(","):
                    self._expect(close)
                    break
            return items
        if token == "{":
            return self._mapping(depth - 1)
        raise _Wrong(f"expected a value, found {token[:20]!r}; expressions are not computed")

    def _mapping(self, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        while not self._accept("}"):
            kind, key = self._next()
            if kind != "text":
                raise _Wrong(f"a key must be a string, found {key[:20]!r}")
            self._expect(":")
            mapping[_string(key)] = self._literal(depth)
            if not self._accept(","):
                self._expect("}")
                break
        return mapping

    def _peek(self, ahead: int) -> str | None:
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else None

    def _next(self) -> tuple[str, str]:
        if self.at == len(self.tokens):
            raise _Wrong("it ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def _accept(self, sign: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] == ("sign", sign):
            self.at += 1
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            found = self._peek(0)
            raise _Wrong(f"expected {sign!r}" + (f", found {found[:20]!r}" if found else ", but it ends"))


def _string(token: str) -> str:
    quote = token[:3] if token[:3] in ("'''", '"""') and len(token) > 2 else token[0]
    if len(token) < 2 * len(quote) or not token.endswith(quote):
        raise _Wrong(f"the string {token[:20]!r} is not closed")
    return _ESCAPE.sub(_unescape, token[len(quote) : -len(quote)])


_ESCAPE = re.compile(
    r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)",
    re.DOTALL,
)
_PLAIN_ESCAPES = dict(zip("ntrbfva0", "\n\t\r\b\f\v\a\0", strict=True))
_ESCAPES = {**_PLAIN_ESCAPES, "\\": "\\", "'": "'", '"': '"', "\n": ""}


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if "\\u" in code:  # a pair, as JSON writes characters beyond 16 bits
        high, low = int(code[1:5], 16), int(code[7:], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))
    if len(code) > 1:
        number = int(code[1:], 16)
        if 0xD800 <= number <= 0xDFFF or number > 0x10FFFF:
            raise _Wrong(f"{found[0]} is no character")
        return chr(number)
    return _ESCAPES.get(code, found[0])


def _number(token: str) -> int | float:
    if len(token) > _LONGEST_NUMBER:
        raise _Wrong(f"the number {token[:20]}... has too many digits")
    return float(token) if set(token) & set(".eE") else int(token)
