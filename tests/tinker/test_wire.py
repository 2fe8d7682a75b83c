"""The protobuf messages of the wire, compared with bodies that clients have sent and with a reader of its own."""

import random
import struct

import numpy as np
import pytest

from covey.tinker import wire
from covey.tinker.wire import Sampled, SampledSequence, TopK, WireError, WireTensor

# Two datums, as the client 0.38.0 serialises them: numbers [3] for a loss on samples; targets [2, 2], sparse weights.
DATA = (
    "1a8e010a0c0a0a0a0801000000020000000a080a060a042c01000012210a0a616476616e746167657312130a0c000000000000803f000080bf18"
    "01220103121f0a086c6f6770726f627312130a0c000000000000c0bf000010c0180122010312300a0d7461726765745f746f6b656e73121f0a18"
    "02000000000000002c01000000000000070000000000000018022201031a94010a0c0a0a0a08050000000600000012390a0d7461726765745f74"
    "6f6b656e7312280a20060000000000000007000000000000000800000000000000090000000000000018022202020212490a0777656967687473"
    "123e12360a080000003f0000803e12180000000000000000010000000000000002000000000000001a1001000000000000000000000000000000"
    "1801220202022203"
)
START, END = "0a09733a747261696e3a301003", "70706f2a1d0a12636c69705f6c6f775f7468726573686f6c64119a9999999999e93f"
BODIES = {  # the newer client also sends settings as numbers or texts
    "0.25.0": START + DATA + END,
    "0.38.0": START
    + DATA
    + END
    + "3a1f0a12636c69705f6c6f775f7468726573686f6c641209099a9999999999e93f3a0b0a046e6f74651203120178",
}


@pytest.mark.parametrize("version", BODIES)
def test_a_recorded_request_is_read(version):
    asked = wire.read_forward_backward(bytes.fromhex(BODIES[version]))
    assert (asked.model_id, asked.seq_id, asked.loss_fn, asked.forward_only) == ("s:train:0", 3, "ppo", False)
    assert asked.config == {"clip_low_threshold": 0.8} | ({"note": "x"} if version == "0.38.0" else {})
    first, second = asked.data
    assert first.tokens == [1, 2, 300] and first.unread is None  # two chunks
    assert {name: one.dense().tolist() for name, one in first.inputs.items()} == {
        "target_tokens": [2, 300, 7],
        "logprobs": [0.0, -1.5, -2.25],
        "advantages": [0.0, 1.0, -1.0],
    }
    assert second.inputs["target_tokens"].dense().tolist() == [[6, 7], [8, 9]]
    assert second.inputs["weights"].dense().tolist() == [[0.0, 0.5], [0.25, 0.0]]


def test_fields_of_a_newer_client_are_skipped():
    body = bytes.fromhex(BODIES["0.38.0"]) + bytes([15 << 3 | 2, 3, 1, 2, 3, 14 << 3, 7])
    assert wire.read_forward_backward(body).seq_id == 3


@pytest.mark.parametrize("seed", range(10))
def test_damaged_bodies_are_refused_or_read_but_never_crash(seed):
    chance, whole = random.Random(seed), bytes.fromhex(BODIES["0.38.0"])
    for _ in range(200):
        body = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(4)):
            if body:
                body[chance.randrange(len(body))] = chance.randrange(256)
        try:
            for datum in wire.read_forward_backward(bytes(body)).data:
                for tensor in datum.inputs.values():
                    tensor.dense()
        except WireError:
            pass


@pytest.mark.parametrize(
    "tensor",
    [
        "0a0400000000" + "1801" + "220102",  # one number in the shape [2]
        "0a03000000" + "1801",  # no whole number of floats
        "0a0400000000" + "1809",  # no such type
        "0a00" + "1801" + "2206ffffffffff7f",  # a shape of more numbers than memory has
        "12020a00" + "1801" + "22020202",  # sparse without rows
    ],
)
def test_a_tensor_that_does_not_fit_its_shape_is_refused(tensor):
    inner = bytes.fromhex(tensor)
    entry = b"\x0a\x01a\x12" + bytes([len(inner)]) + inner
    datum = b"\x12" + bytes([len(entry)]) + entry
    with pytest.raises(WireError):
        wire.read_forward_backward(b"\x1a" + bytes([len(datum)]) + datum)


@pytest.mark.parametrize("version", BODIES)
def test_a_request_that_is_written_again_is_read_as_the_same(version):
    asked = wire.read_forward_backward(bytes.fromhex(BODIES[version]))
    again = wire.read_forward_backward(wire.request_of(asked))
    assert (again.model_id, again.seq_id, again.loss_fn, again.config) == (
        *(asked.model_id, asked.seq_id, asked.loss_fn),
        asked.config,
    )
    for one, other in zip(again.data, asked.data, strict=True):
        assert one.tokens == other.tokens and one.inputs.keys() == other.inputs.keys()
        for name, tensor in one.inputs.items():
            assert np.array_equal(tensor.dense(), other.inputs[name].dense())
            assert (tensor.rows is None) is (other.inputs[name].rows is None)
    assert wire.request_of(again) == wire.request_of(asked)


def test_a_request_has_a_limit_for_all_its_tensors_together(monkeypatch):
    monkeypatch.setattr(wire, "MAX_CELLS", 9)  # the two datums have 3 + 3 + 3, and 4 + 4
    with pytest.raises(WireError, match="9 numbers"):
        wire.read_forward_backward(bytes.fromhex(BODIES["0.25.0"]))
    monkeypatch.setattr(wire, "MAX_CELLS", 17)
    assert len(wire.read_forward_backward(bytes.fromhex(BODIES["0.25.0"])).data) == 2


def parse(message):
    """Fields of a message, by number: a list of values each."""
    found, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = 8 if key & 7 == 1 else varint()
            value, at = message[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def test_an_answer_holds_logprobs_and_metrics():
    ragged = [np.array([-1.0, -2.0]), np.array([-3.0]), np.array([[-4.0, -5.0]])]
    answer = parse(wire.write_forward_backward(ragged, {"loss:sum": 2.5}))
    assert answer[1] == [b"ArrayRecord"]
    flat, nested = (parse(one) for one in answer[2])  # log-probs of other trailing shapes are a record of their own
    assert flat[3] == [2] and nested[3] == [1]
    tensor = parse(parse(flat[2][0])[2][0])
    assert np.frombuffer(tensor[1][0], "<f4").tolist() == [-1.0, -2.0, -3.0]
    assert np.frombuffer(tensor[2][0], "<i8").tolist() == [0, 8, 12]  # bytes
    assert parse(parse(nested[2][0])[2][0])[4] == [b"\x02"]
    (metric,) = answer[3]
    assert parse(metric) == {1: [b"loss:sum"], 2: [struct.pack("<d", 2.5)]}


def test_a_sample_holds_tokens_logprobs_and_what_was_asked_of_the_prompt():
    top = TopK(np.array([[3, 4]]), np.array([[-0.5, -1.0]]))
    targets = WireTensor(np.array([-1.5], np.float32), (1, 3), np.array([0, 1]), np.array([2]))
    sequence = SampledSequence([7, 1], [-0.25, -0.5], True, top)
    answer = parse(wire.write_sampled(Sampled([sequence], np.array([np.nan, -2.0]), top, targets)))
    sample = parse(answer[1][0])
    assert sample[1] == [0] and np.frombuffer(sample[2][0], "<i4").tolist() == [7, 1]
    assert np.frombuffer(sample[3][0], "<f4").tolist() == [-0.25, -0.5]
    assert parse(sample[4][0])[3] == [2]
    assert np.isnan(np.frombuffer(answer[2][0], "<f4")[0])
    sparse = parse(parse(answer[5][0])[2][0])
    assert np.frombuffer(sparse[1][0], "<f4").tolist() == [-1.5]
    assert np.frombuffer(sparse[3][0], "<i8").tolist() == [2]
