"""The three protobuf messages of the API, read and written without generated code; everything else is JSON.

A message is a sequence of numbered fields; `_fields` yields them, and a reader takes those that it knows. Fields of
newer clients are skipped. Nothing is trusted: a length, a type or a shape that does not fit is a `WireError`.
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

MAX_CELLS = 1 << 27  # most numbers of a request's tensors, sparse ones counted as if they were dense
MAX_DIMENSIONS = 8
NO_TOKEN = (0, -99999.0)  # id and log-prob of an empty cell among the most probable tokens

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # kinds of fields
_DTYPES: dict[int, np.dtype[Any]] = {  # the last is bfloat16
    number: np.dtype(name) for number, name in enumerate(("<f4", "<i8", "<i4", "<u2"), 1)
}
_FLOAT32, _INT64, _BFLOAT16 = 1, 2, 4
_MAX_FIELD = 1 << 29

T = TypeVar("T")


class WireError(ValueError):
    """Bytes that are no message of the kind that was expected."""


@dataclass(frozen=True)
class WireTensor:
    """A tensor as it was sent: dense, or in compressed sparse rows (`rows` and `columns`)."""

    values: np.ndarray[Any, Any]  # flat, float32 or int64
    shape: tuple[int, ...]
    rows: np.ndarray[Any, Any] | None = None  # [rows + 1], where each row's values begin
    columns: np.ndarray[Any, Any] | None = None

    def dense(self, fill: float = 0) -> np.ndarray[Any, Any]:
        """The tensor in its shape; `fill` where a sparse one lists no value."""
        if self.rows is None or self.columns is None:
            return self.values.reshape(self.shape)
        filled = np.full(self.shape, fill, self.values.dtype)
        filled[np.repeat(np.arange(self.shape[0]), np.diff(self.rows)), self.columns] = self.values
        return filled

    @property
    def fits(self) -> bool:
        """True if the values, and the rows and columns of a sparse tensor, are those of its shape."""
        if any(size < 0 for size in self.shape):
            return False
        if self.rows is None or self.columns is None:
            return self.rows is self.columns and math.prod(self.shape) == len(self.values)
        rows, columns = self.rows, self.columns
        if len(self.shape) != 2 or len(rows) != self.shape[0] + 1 or rows[0] != 0:
            return False
        inside = (rows[:-1] <= rows[1:]).all() and ((columns >= 0) & (columns < self.shape[1])).all()
        return bool(inside) and len(columns) == len(self.values) == rows[-1]


@dataclass(frozen=True)
class Datum:
    """Tokens that the model reads, and what the loss reads for each."""

    tokens: list[int]
    inputs: dict[str, WireTensor]
    unread: str | None = None  # a part of it that is no text, by its name


@dataclass(frozen=True)
class ForwardBackward:
    """Request of a forward pass, and of a backward pass unless `forward_only`."""

    model_id: str = ""
    seq_id: int = 0
    data: list[Datum] = field(default_factory=list)
    loss_fn: str = ""
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class TopK:
    """The K most probable tokens of each position: ids [N, K] and log-probs [N, K]."""

    ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]


@dataclass(frozen=True)
class SampledSequence:
    """One sample: its tokens with their log-probs, and True if it ended by itself."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    top: TopK | None = None


@dataclass(frozen=True)
class Sampled:
    """Answer to a request of samples."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray[Any, Any] | None = None  # [prompt], NaN where there is none
    prompt_top: TopK | None = None
    target_logprobs: WireTensor | None = None


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Read a request; WireError for bytes that are none."""
    model_id, seq_id, data, loss_fn, forward_only, cells = "", 0, list[Datum](), "", False, 0
    numbers: dict[str, float | str] = {}
    newer: dict[str, float | str] = {}
    for number, kind, value in _fields(memoryview(body)):
        if number == 1:
            model_id = _text(kind, value)
        elif number == 2:
            seq_id = _integer(kind, value)
        elif number == 3:
            data.append(_datum(_inner(kind, value)))
            cells += sum(math.prod(tensor.shape) for tensor in data[-1].inputs.values())
            if cells > MAX_CELLS:
                raise WireError(f"the tensors of a request have more than {MAX_CELLS:,} numbers.")
        elif number == 4:
            loss_fn = _text(kind, value)
        elif number == 5:
            _add(numbers, _inner(kind, value), _double)
        elif number == 6:
            forward_only = bool(_integer(kind, value))
        elif number == 7:
            _add(newer, _inner(kind, value), lambda kind, value: _number_or_text(_inner(kind, value)))
    return ForwardBackward(model_id, seq_id, data, loss_fn, numbers | newer, forward_only)


def _datum(message: memoryview) -> Datum:
    tokens, inputs, unread = list[int](), dict[str, WireTensor](), None
    for number, kind, value in _fields(message):
        if number == 1:
            for part, inner_kind, inner in _fields(_inner(kind, value)):
                if part == 1:
                    for name, last_kind, last in _fields(_inner(inner_kind, inner)):
                        if name == 1:
                            tokens += _array(_inner(last_kind, last), np.dtype("<i4")).tolist()
                else:
                    unread = {2: "an image", 3: "audio"}.get(part, f"a part of kind {part}")
        elif number == 2:
            _add(inputs, _inner(kind, value), lambda kind, value: _tensor(_inner(kind, value)))
    return Datum(tokens, inputs, unread)


def _tensor(message: memoryview) -> WireTensor:
    dense: memoryview | None = None
    sparse: dict[int, memoryview] | None = None
    dtype, shape = 0, list[int]()
    for number, kind, value in _fields(message):
        if number == 1:
            dense, sparse = _inner(kind, value), None
        elif number == 2:
            sparse, dense = {at: _inner(*part) for at, *part in _fields(_inner(kind, value))}, None
        elif number == 3:
            dtype = _integer(kind, value)
        elif number == 4:  # packed, or one at a time
            shape += [_integer(kind, value)] if kind == _VARINT else _varints(_inner(kind, value))
    if dtype not in _DTYPES:
        raise WireError(f"a tensor has dtype {dtype}; known are {', '.join(map(str, _DTYPES))}.")
    values = _array((sparse or {}).get(1, memoryview(b"")) if dense is None else dense, _DTYPES[dtype])
    if dtype == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape) or math.prod(shape) > MAX_CELLS:
        raise WireError(f"a tensor of shape {shape[:MAX_DIMENSIONS]} has more than {MAX_CELLS:,} numbers.")
    if sparse is None:
        tensor = WireTensor(values, tuple(shape or [len(values)]))
    else:
        rows, columns = (_array(sparse.get(at, memoryview(b"")), np.dtype("<i8")) for at in (2, 3))
        tensor = WireTensor(values, tuple(shape), rows, columns)
    if not tensor.fits:
        what = f"{len(values)} numbers" if sparse is None else "rows or columns outside of it"
        raise WireError(f"a tensor of shape {shape} comes with {what}.")
    return tensor


def _fields(message: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, kind and value of each field: an int, or the bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if not 0 < number < _MAX_FIELD:
            raise WireError(f"there is no field {number}.")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, kind, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_EIGHT, _FOUR):
            size = 8 if kind == _EIGHT else 4
        else:
            raise WireError(f"field {number} is of kind {kind}, which is not in use.")
        if size > len(message) - at:
            raise WireError(f"field {number} ends after its message.")
        yield number, kind, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise WireError("a number ends after its message.")
        byte = message[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result & (1 << 64) - 1, at
    raise WireError("a number has more than 64 bits.")


def _varints(message: memoryview) -> list[int]:
    found, at = list[int](), 0
    while at < len(message):
        value, at = _varint(message, at)
        found.append(_signed(value))
    return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _integer(kind: int, value: Any) -> int:
    if kind != _VARINT:
        raise WireError("a number was expected, and bytes came.")
    return _signed(value)


def _inner(kind: int, value: Any) -> memoryview:
    if kind != _BYTES:
        raise WireError("bytes were expected, and a number came.")
    return memoryview(value)


def _text(kind: int, value: Any) -> str:
    try:
        return bytes(_inner(kind, value)).decode()
    except UnicodeDecodeError as error:
        raise WireError("a text is not in UTF-8.") from error


def _double(kind: int, value: Any) -> float:
    if kind != _EIGHT:
        raise WireError("a float of eight bytes was expected.")
    return float(struct.unpack("<d", value)[0])


def _number_or_text(message: memoryview) -> float | str:
    found: float | str = 0.0
    for number, kind, value in _fields(message):
        if number == 1:
            found = _double(kind, value)
        elif number == 2:
            found = _text(kind, value)
    return found


def _add(entries: dict[str, T], message: memoryview, read: Callable[[int, Any], Any]) -> None:
    """Add an entry of a map, which is a message of a key and a value."""
    key, found = "", None
    for number, kind, value in _fields(message):
        if number == 1:
            key = _text(kind, value)
        elif number == 2:
            found = read(kind, value)
    if found is None:
        raise WireError(f"the entry {key!r} has no value.")
    entries[key] = found


def _array(data: memoryview, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if len(data) % dtype.itemsize:
        raise WireError(f"{len(data)} bytes are no whole number of {dtype} values.")
    return np.frombuffer(data, dtype)


# ---- writing ---------------------------------------------------------------------------------------------------------


def request_of(asked: ForwardBackward) -> bytes:
    """A request that `read_forward_backward` reads as this one; equal requests give equal bytes."""
    out = [_field(1, asked.model_id.encode()), _number(2, asked.seq_id), _field(4, asked.loss_fn.encode())]
    for datum in asked.data:
        parts = [_field(1, _field(1, _field(1, _packed(datum.tokens, "<i4"))))]
        parts += [_field(1, _field(2 if "image" in datum.unread else 3, b""))] if datum.unread is not None else []
        for name, tensor in sorted(datum.inputs.items()):
            parts.append(_field(2, _field(1, name.encode()) + _field(2, _written_tensor(tensor))))
        out.append(_field(3, b"".join(parts)))
    for name, value in sorted(asked.config.items()):
        number_of = _encoded(1 << 3 | _EIGHT)
        held = _field(2, value.encode()) if isinstance(value, str) else number_of + struct.pack("<d", value)
        out.append(_field(7, _field(1, name.encode()) + _field(2, held)))
    return b"".join([*out, _number(6, int(asked.forward_only))])


def write_forward_backward(logprobs: Sequence[np.ndarray[Any, Any]], metrics: Mapping[str, float]) -> bytes:
    """Answer to a `ForwardBackward`: log-probs [N] or [N, K] of each datum, and metrics by their names."""
    out = [_field(1, b"ArrayRecord")]
    for trailing, group in groupby(logprobs, key=lambda one: one.shape[1:]):
        rows = [np.ascontiguousarray(one, np.dtype("<f4")) for one in group]
        ends = np.cumsum([0, *(one.nbytes for one in rows)], dtype="<i8")
        tensor = _field(1, b"".join(map(np.ndarray.tobytes, rows))) + _field(2, ends.tobytes()) + _number(3, _FLOAT32)
        tensor += _field(4, b"".join(map(_encoded, trailing))) if trailing else b""
        entry = _field(1, b"logprobs") + _field(2, tensor)
        out.append(_field(2, _field(1, b"TensorRecord") + _field(2, entry) + _number(3, len(rows))))
    for name, value in metrics.items():
        out.append(_field(3, _field(1, name.encode()) + _encoded(2 << 3 | _EIGHT) + struct.pack("<d", value)))
    return b"".join(out)


def write_sampled(answer: Sampled) -> bytes:
    """Answer to a request of samples."""
    out = list[bytes]()
    for one in answer.sequences:
        parts = [_number(1, 0 if one.stopped else 1), _field(2, _packed(one.tokens, "<i4"))]
        parts.append(_field(3, _packed(one.logprobs, "<f4")))
        parts += [_field(4, _top(one.top))] if one.top is not None else []
        out.append(_field(1, b"".join(parts)))
    if answer.prompt_logprobs is not None:
        out.append(_field(2, _packed(answer.prompt_logprobs, "<f4")))
    if answer.prompt_top is not None:
        out.append(_field(3, _top(answer.prompt_top)))
    if answer.target_logprobs is not None:
        out.append(_field(5, _written_tensor(answer.target_logprobs)))
    return b"".join(out)


def _top(top: TopK) -> bytes:
    length, k = top.ids.shape
    return b"".join(
        [_field(1, _packed(top.ids, "<i4")), _field(2, _packed(top.logprobs, "<f4")), _number(3, k), _number(4, length)]
    )


def _written_tensor(tensor: WireTensor) -> bytes:
    values, dtype = (tensor.values, _FLOAT32) if tensor.values.dtype.kind == "f" else (tensor.values, _INT64)
    data = _packed(values, _DTYPES[dtype].str)
    if tensor.rows is not None and tensor.columns is not None:
        sparse = _field(1, data) + _field(2, _packed(tensor.rows, "<i8")) + _field(3, _packed(tensor.columns, "<i8"))
        body = _field(2, sparse)
    else:
        body = _field(1, data)
    return body + _number(3, dtype) + _field(4, b"".join(map(_encoded, tensor.shape)))


def _packed(values: Iterable[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(values, np.dtype(dtype)).tobytes()


def _encoded(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers in two's complement
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(number: int, value: int) -> bytes:
    return _encoded(number << 3 | _VARINT) + _encoded(value)


def _field(number: int, value: bytes) -> bytes:
    return _encoded(number << 3 | _BYTES) + _encoded(len(value)) + value
