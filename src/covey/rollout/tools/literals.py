"""Calls with literals of Python or Gemma as arguments, parsed in linear time: hostile text can crash Python's own."""

import json
import re
from typing import Any

from covey.rollout.tools.calls import MAX_DEPTH, MalformedCall, Part, ToolCall, Unreadable, decode_json


class _NotationError(Exception):
    """The text is not in the notation; the message says why."""


_CLOSING = {"[": "]", "(": ")", "{": "}"}
_AS_JSON = {"(": "[", ")": "]"}


class _JsonWriter:
    """Writes the tokens of one value as JSON."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.closing: list[str] = []

    def sign(self, sign: str) -> None:
        if sign in _CLOSING:
            self.closing.append(_CLOSING[sign])
            if len(self.closing) > MAX_DEPTH:
                raise _NotationError("it is nested too deeply")
        elif self.closing and sign == self.closing[-1]:
            self.closing.pop()
            if self.pieces[-1] == ",":  # a comma behind the last item
                self.pieces.pop()
        elif not self.closing or sign not in ",:":
            raise _NotationError(f"expected a value, found {sign!r}; expressions are not computed")
        self.pieces.append(_AS_JSON.get(sign, sign))

    def value(self) -> Any:
        text = "".join(self.pieces)
        value = decode_json(text)
        if isinstance(value, Unreadable):
            raise _NotationError(f"{value} of {text[:100]}")
        return value


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
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_LONGEST_NUMBER = 400


def read_python_calls(text: str) -> list[ToolCall] | Unreadable:
    """The calls in Python notation that `text` consists of, on lines or in a list; arguments are literals."""
    try:
        return _PythonCalls(text).read()
    except _NotationError as error:
        return Unreadable(str(error))


class _PythonCalls:
    def __init__(self, text: str):
        self.tokens: list[tuple[str, str]] = []
        self.at = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            found = _TOKEN.match(text, position)
            if found is None or found.lastgroup is None:
                raise _NotationError(f"cannot read {text[position:].lstrip()[:20]!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()

    def read(self) -> list[ToolCall]:
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
        printed = name == "print" and ("sign", "(") in self.tokens[self.at + 1 : self.at + 2]
        if printed:
            name = self._name()
            self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._accept(")"):
            kind, argument = self._next()
            if kind != "name" or not self._accept("="):
                raise _NotationError(f"write the arguments of {name} by name, as in {name}(argument=1)")
            arguments[argument] = self._literal()
            if not self._accept(","):
                self._expect(")")
                break
        if printed:
            self._expect(")")
        return ToolCall(name.removesuffix(".call"), arguments)

    def _name(self) -> str:
        kind, name = self._next()
        if kind != "name":
            raise _NotationError(f"expected the name of a tool, found {name[:20]!r}")
        return name

    def _literal(self) -> Any:
        writer = _JsonWriter()
        while True:
            kind, token = self._next()
            if kind == "text":
                writer.pieces.append(json.dumps(_string(token)))
            elif kind == "number":
                writer.pieces.append(_number(token))
            elif token in _WORDS:
                writer.pieces.append(_WORDS[token])
            else:
                writer.sign(token[:20])
            if not writer.closing:
                return writer.value()

    def _next(self) -> tuple[str, str]:
        if self.at == len(self.tokens):
            raise _NotationError("it ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def _accept(self, sign: str) -> bool:
        accepted = self.at < len(self.tokens) and self.tokens[self.at] == ("sign", sign)
        self.at += accepted
        return accepted

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            found = f"found {self.tokens[self.at][1][:20]!r}" if self.at < len(self.tokens) else "but it ends"
            raise _NotationError(f"expected {sign!r}, {found}")


def _number(token: str) -> str:
    if len(token) > _LONGEST_NUMBER:
        raise _NotationError(f"the number {token[:20]}... has too many digits")
    if not set(token) & set(".eE"):
        return str(int(token))
    value = repr(float(token))
    if value.endswith("inf"):
        raise _NotationError(f"the number {token[:20]} is too large")
    return value


def _string(token: str) -> str:
    quote = token[:3] if token[:3] in ("'''", '"""') and len(token) > 2 else token[0]
    if len(token) < 2 * len(quote) or not token.endswith(quote):
        raise _NotationError(f"the string {token[:20]!r} is not closed")
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
            raise _NotationError(f"{found[0]} is not a character")
        return chr(number)
    return _ESCAPES.get(code, found[0])


_GEMMA_HEAD = re.compile(r"call:\s*+([^\s{]++)\s*+(?=\{)")
_GEMMA_TOKEN = r"""\s*+(?:
    {quote}(?P<string>.*?){quote}
  | (?P<key>[^\s{{}}\[\]:,<>|]++)(?=\s*+:)
  | (?P<plain>(?:true|false|null)\b|-?(?:0|[1-9][0-9]{{0,399}}+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?(?![\w.]))
  | (?P<sign>[{{}}\[\]:,])
)"""


def read_gemma_call(text: str, quote: str) -> Part:
    """The call `call:name{key:value,...}` that `text` is; strings stand between two `quote` marks."""
    head = _GEMMA_HEAD.match(text)
    if head is None:
        return MalformedCall(text, "it does not begin with call:name{")
    token = re.compile(_GEMMA_TOKEN.format(quote=re.escape(quote)), re.DOTALL | re.VERBOSE)
    writer, at = _JsonWriter(), head.end()
    try:
        while writer.closing or not writer.pieces:
            found = token.match(text, at)
            if found is None:
                raise _NotationError(_gemma_reason(text[at:].lstrip(), quote))
            if found.lastgroup == "sign":
                writer.sign(found["sign"])
            else:
                is_plain = found.lastgroup == "plain"
                writer.pieces.append(found["plain"] if is_plain else json.dumps(found[found.lastgroup or 0]))
            at = found.end()
        if rest := text[at:].strip():
            raise _NotationError(f"something follows the arguments: {rest[:20]!r}")
        return ToolCall(head[1], writer.value())
    except _NotationError as error:
        return MalformedCall(text, str(error))


def _gemma_reason(rest: str, quote: str) -> str:
    if not rest:
        return "the arguments are not closed"
    if rest.startswith(quote):
        return f"a string is not closed by {quote}"
    return f"cannot read {rest[:20]!r}: a string stands between {quote} and {quote}"
