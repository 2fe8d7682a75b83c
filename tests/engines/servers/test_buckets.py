"""Bytes on their way: what arrives is what was announced, or an error that names the tensor."""

import gc
import json
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.engine import TensorSpec, WeightUpdate
from covey.engines.servers.weights import buckets
from covey.engines.servers.weights.buckets import ROW, checksum, pack, planned, unpack
from covey.engines.servers.weights.files import MANIFEST, read_folder, write_folder


def update(*tensors, version=3):
    named = [(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named)
    return WeightUpdate(version, specs, lambda: iter(named))


def through_json(update, bucket_bytes):
    """Every bucket with its manifest, as the other side gets them."""
    for bucket in pack(update, bucket_bytes):
        yield json.loads(json.dumps(bucket.manifest())), bucket.data.clone()


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), min_size=8, max_size=8),
    bucket_bytes=st.integers(1, 4000),
)
def test_tensors_of_any_shape_and_format_arrive_as_they_were(shapes, dtypes, bucket_bytes):
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    arrived = [pair for one in through_json(update(*tensors), bucket_bytes) for pair in unpack(*one)]
    assert [name for name, _ in arrived] == [f"t{i}" for i in range(len(tensors))]
    for (_, got), tensor in zip(arrived, tensors, strict=True):
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)


def test_a_bucket_ends_where_the_next_tensor_would_not_fit():
    # 16 bytes each, and one of 80 that fits nowhere: [16 + 16], [80], [16]
    specs = [TensorSpec(name, (size,), torch.float32) for name, size in (("a", 4), ("b", 3), ("c", 20), ("d", 1))]
    assert [[spec.name for spec in bucket] for bucket in planned(specs, 32)] == [["a", "b"], ["c"], ["d"]]


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_one_changed_byte_is_found_and_its_tensor_named(place):
    ((manifest, data),) = through_json(update(torch.randn(10), torch.randn(5000)), 10**6)
    offset = manifest["tensors"][1]["offset"]
    data[offset : offset + 20000][place] ^= 1
    with pytest.raises(ValueError, match="'t1' changed on its way"):
        unpack(manifest, data)


def test_numbers_that_change_places_are_found():
    tensor = torch.arange(4 * ROW, dtype=torch.uint8)
    for other in (tensor.roll(8), tensor.flip(0), tensor.view(4, ROW).flip(0).reshape(-1) + 1):
        assert checksum(tensor) != checksum(other)


def test_rows_that_change_places_are_found():
    rows = torch.randn(4, ROW // 4)
    assert checksum(rows) != checksum(rows.flip(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 10**6}, "does not lie within"),
        ({"offset": -16}, "does not lie within"),
        ({"dtype": "os.system"}, "not a dtype"),
        ({"dtype": "nn"}, "not a dtype"),
        ({"shape": None}, "not a manifest"),
    ],
)
def test_a_manifest_cannot_reach_beyond_its_buffer(change, message):
    ((manifest, data),) = through_json(update(torch.randn(10)), 10**6)
    manifest["tensors"][0] |= change
    with pytest.raises(ValueError, match=message):
        unpack(manifest, data)


def test_what_was_not_announced_is_not_sent():
    two = update(torch.ones(2), torch.zeros(3))
    short = WeightUpdate(3, two.specs[:1], two.tensors)
    with pytest.raises(RuntimeError, match="'t1' was sent"):
        list(through_json(short, 10**6))


def test_a_folder_holds_what_was_written(tmp_path):
    sent = update(torch.randn(100, 10), torch.randn(7), torch.randn(3, 3).bfloat16())
    write_folder(sent, tmp_path / "v3", bucket_bytes=1000)
    assert len(list((tmp_path / "v3").glob("model-*-of-00002.safetensors"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["v3"]
    taken = []
    read_folder(tmp_path / "v3", lambda tensors: taken.extend(tensors))
    assert {name: tensor.tolist() for name, tensor in taken} == {n: t.tolist() for n, t in sent.tensors()}


def test_a_folder_that_was_changed_is_not_loaded(tmp_path):
    write_folder(update(torch.randn(10), torch.randn(7)), tmp_path / "v3", bucket_bytes=10**6)
    path = tmp_path / "v3" / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["checksums"]["t1"] ^= 1
    path.write_text(json.dumps(manifest))
    taken = []
    with pytest.raises(ValueError, match="'t1' changed on its way"):
        read_folder(tmp_path / "v3", lambda tensors: taken.extend(tensors))
    assert not taken


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    write_folder(update(torch.randn(10)), tmp_path / "v3", bucket_bytes=10**6)
    path = tmp_path / "v3" / MANIFEST
    path.write_text(path.read_text().replace('"model.safetensors"', '"../model.safetensors"'))
    with pytest.raises(ValueError, match="not the name of a file"):
        read_folder(tmp_path / "v3", list)


def test_a_folder_on_another_disk_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="must see the same disk"):
        read_folder(tmp_path / "v3", list)


def test_dense_buckets_have_no_gaps():
    """12 bytes end at no multiple of 16, so the third tensor would not follow the second at once."""
    specs = update(torch.zeros(4), torch.zeros(3), torch.zeros(8)).specs
    assert [len(bucket) for bucket in planned(specs, 1000)] == [3]
    assert [[spec.name for spec in bucket] for bucket in planned(specs, 1000, dense=True)] == [["t0", "t1"], ["t2"]]


def test_an_error_does_not_keep_the_tensors_open(monkeypatch):
    ended = []

    def tensors():
        try:
            yield "a", torch.ones(8)
            yield "b", torch.ones(8)
        finally:
            ended.append(True)

    def fails(tensor):
        raise MemoryError

    monkeypatch.setattr(buckets, "checksum", fails)
    specs = tuple(TensorSpec(name, (8,), torch.float32) for name in "ab")
    with pytest.raises(MemoryError) as raised:  # which keeps the frames
        next(pack(WeightUpdate(1, specs, tensors), 32))
    assert ended and raised


def test_buffers_are_gone_with_packing_that_did_not_finish(monkeypatch):
    made, original = [], buckets.checksum

    def note(tensor):
        made.append(weakref.ref(tensor.untyped_storage()))
        return original(tensor)

    monkeypatch.setattr(buckets, "checksum", note)
    gc.disable()
    try:
        packing = pack(update(torch.arange(8.0), torch.ones(8)), 32)
        next(packing)
        del packing
        assert made[0]() is None, "no cycle keeps it until the next collection"
    finally:
        gc.enable()
