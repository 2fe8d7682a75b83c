"""Folders whose files are known by checksums, flushed to the disk, and locked by one process."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from covey.runtime import files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.bin").write_bytes(b"123456789")
    (tmp_path / "inner" / "b.bin").write_bytes(bytes(1000))
    files.seal(tmp_path)
    return tmp_path


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_manifest_holds_sizes_and_checksums(folder):
    known = json.loads((folder / files.MANIFEST).read_text())
    assert known["a.bin"] == {"bytes": 9, "crc32": [0xCBF43926]}  # the check value of CRC-32
    assert list(known) == ["a.bin", "inner/b.bin"]
    assert files.damage(folder) is None


MANIFESTS = ('{"files', "{}", "[]", "null", '{"a.bin": {}}', '{"a.bin": 3}', '{"a.bin": {"bytes": null}}')


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda f: (f / "a.bin").write_bytes(b"1234"), "a.bin has 4 bytes instead of 9"),
        (lambda f: (f / "a.bin").unlink(), "a.bin is missing"),
        (lambda f: flip(f / "inner" / "b.bin"), "the content of inner/b.bin is not what was written"),
        *((lambda f, text=text: (f / files.MANIFEST).write_text(text), "cannot be read") for text in MANIFESTS),
    ],
    ids=["truncated", "missing", "one bit", *MANIFESTS],
)
def test_damage_is_found_and_named(folder, harm, found):
    harm(folder)
    assert found in files.damage(folder)


def test_more_files_and_no_manifest_are_no_damage(folder):
    (folder / "README.md").write_text("more")
    assert files.damage(folder) is None
    (folder / files.MANIFEST).unlink()
    flip(folder / "a.bin")
    assert files.damage(folder) is None


@pytest.mark.parametrize("name", ["state.json", "some.pt", "model.safetensors"])
@pytest.mark.parametrize("harm", [lambda path: path.write_bytes(b""), flip, lambda path: os.truncate(path, 60)])
def test_a_file_that_cannot_be_read_is_damage_without_a_manifest(tmp_path, name, harm):
    path = tmp_path / name
    if name == "state.json":
        path.write_text(json.dumps([0.125] * 13 + ["\u00e9"] * 9))
    elif name == "some.pt":
        torch.save({"a": torch.arange(1000)}, path)
    else:
        save_file({"a": torch.arange(3)}, path)
    assert files.damage(tmp_path) is None
    harm(path)
    assert files.damage(tmp_path) == f"{name} cannot be read"


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    (path := tmp_path / "picture.png").write_text("earlier")
    with pytest.raises(OSError, match="full"), files.written_whole(path) as new:
        new.write_text("hal")
        raise OSError("full")
    assert [path.read_text(), *os.listdir(tmp_path)] == ["earlier", "picture.png"]
    with files.written_whole(path) as new:
        new.write_text("later")
    assert [path.read_text(), *os.listdir(tmp_path)] == ["later", "picture.png"]


def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path):
    others = [tmp_path / ".b.1.txt", tmp_path / ".a.txt"]
    for path in (tmp_path / ".a.123.txt", *others):
        path.write_text("half")
    with files.written_whole(tmp_path / "a.txt") as new:
        new.write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.txt", *others])


def test_files_join_a_folder_when_all_are_whole(folder):
    def add(fails):
        with files.added_whole(folder) as new:
            (new / "inner").mkdir()
            (new / "a.bin").write_text("later")
            (new / "inner" / "c.bin").write_text("more")
            if fails:
                raise OSError("full")

    before = sorted(folder.rglob("*"))
    with pytest.raises(OSError, match="full"):
        add(True)
    assert sorted(folder.rglob("*")) == before and (folder / "a.bin").read_bytes() == b"123456789"
    add(False)
    assert (folder / "a.bin").read_text() == "later" and (folder / "inner" / "c.bin").read_text() == "more"
    assert len(list(folder.rglob("*"))) == len(before) + 1


def test_a_file_of_several_blocks_has_a_checksum_for_each(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 1 << 20)
    (tmp_path / "large").write_bytes(os.urandom((5 << 19) + 3))
    files.seal(tmp_path)
    assert len(json.loads((tmp_path / files.MANIFEST).read_text())["large"]["crc32"]) == 3
    assert files.damage(tmp_path) is None
    flip(tmp_path / "large")
    assert "large" in files.damage(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_full_disk_is_named_with_what_was_written(tmp_path):
    with (
        pytest.raises(
            OSError, match=r"the model could not be written into '.*': the disk is full\. Make room\."
        ) as said,
        files.naming_disk_errors("the model", str(tmp_path), "Make room."),
        open("/dev/full", "w") as full,
    ):
        full.write("x")
    assert said.value.__cause__.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EDQUOT, "the disk quota is used up. So make room."),
        (errno.EROFS, "the file system is read-only. So make it writable."),
        (errno.EACCES, "Permission denied. So see that it can be written to."),
    ],
    ids=["quota", "read-only", "no right"],
)
def test_a_reason_is_named_with_what_to_do_about_it(tmp_path, monkeypatch, number, says):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fails)  # of the probe, too
    with (
        pytest.raises(OSError, match=f"the model could not be written into '.*': {re.escape(says)}$"),
        files.naming_disk_errors("the model", str(tmp_path), "So {remedy}."),
    ):
        (tmp_path / "model").write_bytes(b"x")


def test_an_error_that_names_no_disk_is_checked_by_writing(tmp_path, monkeypatch):
    def fails():
        with files.naming_disk_errors("checkpoint-4", str(tmp_path), "Make room."):
            raise RuntimeError("unexpected pos 40704 vs 40596")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        fails()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(files, "_error_of_writing", lambda folder: errno.EDQUOT)
    with pytest.raises(OSError, match=r"checkpoint-4 could not be written into .*: the disk quota is used up"):
        fails()


HOLDS = """
import sys, time
from pathlib import Path
from covey.runtime.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def holder(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")
def test_a_locked_folder_is_refused_until_its_process_is_gone(tmp_path):
    with holder(tmp_path) as other:
        refused = pytest.raises(ValueError, match=f"in use by process {other.pid} on .*another output_dir")
        with refused, files.locked(tmp_path):
            pass
    assert (tmp_path / files.LOCK).exists()  # it was killed
    with files.locked(tmp_path):
        assert (tmp_path / files.LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX locks")
def test_a_lock_whose_file_is_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """Another run ends between opening the file and locking it."""
    import fcntl

    lock, ends = fcntl.lockf, iter([True])

    def slow(file, how):
        if next(ends, False):
            (tmp_path / files.LOCK).unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "lockf", slow)
    with files.locked(tmp_path):
        assert (tmp_path / files.LOCK).read_text().startswith(f"process {os.getpid()}")
    assert not any(tmp_path.iterdir())


def test_the_lock_of_another_run_stays(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    with files.locked(place):
        (place / files.LOCK).rename(tmp_path / "removed")  # the folder is emptied, and another run begins in it
        (place / files.LOCK).write_text("of another run")
    assert (place / files.LOCK).read_text() == "of another run"


def test_a_locked_folder_that_vanishes_hides_no_error(tmp_path):
    (place := tmp_path / "run").mkdir()
    with pytest.raises(OSError, match="checkpoint-2 could not be written"), files.locked(place):
        shutil.rmtree(place)
        place.write_text("")
        raise OSError("checkpoint-2 could not be written")


def test_a_folder_that_cannot_be_written_to_is_not_locked(tmp_path):
    with files.locked(tmp_path / "nowhere"):
        pass
