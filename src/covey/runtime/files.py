"""Folders that survive crashes: manifests with checksums, files flushed to the disk, and locks."""

import errno
import glob
import json
import os
import socket
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

MANIFEST = "covey_manifest.json"
LOCK = "_covey_lock"  # uploads to the hub leave out "_*": reading it in this process would release it
BLOCK = 1 << 26  # bytes of a file per checksum; threads read different blocks
PIECE = 1 << 20
CAUSES = {  # and what to do about them
    errno.ENOSPC: ("the disk is full", "make room"),
    errno.EDQUOT: ("the disk quota is used up", "make room"),
    errno.EROFS: ("the file system is read-only", "make it writable"),
}


def seal(folder: Path) -> None:
    """Write the manifest of a folder's files, and flush files and manifest to the disk."""
    (folder / MANIFEST).write_text(json.dumps(contents(folder), indent=1))
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def damage(folder: Path) -> str | None:
    """The first difference between a folder and its manifest, else None; without a manifest, the first damaged file."""
    if not (folder / MANIFEST).exists():
        return next((f"{path.name} cannot be read" for path in sorted(folder.rglob("*")) if not _legible(path)), None)
    try:
        known: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        sizes = {name: int(file["bytes"]) for name, file in known.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        sizes = {}
    if not sizes:
        return f"{MANIFEST} cannot be read"
    found = contents(folder)
    for name, size in sizes.items():
        if name not in found:
            return f"{name} is missing"
        if found[name]["bytes"] != size:
            return f"{name} has {found[name]['bytes']:,} bytes instead of {size:,}"
        if found[name] != known[name]:
            return f"the content of {name} is not what was written (its checksum differs)"
    return None


def _legible(path: Path) -> bool:
    """False for a damaged file of JSON, torch (an archive with checksums) or safetensors."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix in (".pt", ".pth"):
            with zipfile.ZipFile(path) as archive:
                return archive.testzip() is None
        elif path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, "np"):
                pass
    except Exception:  # of three libraries
        return path.is_dir()
    return True


def contents(folder: Path) -> dict[str, dict[str, Any]]:
    """By file name: the size and the CRC-32 of each block, for every file except the manifest."""
    found = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # zlib and reading let other threads run
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
            size = path.stat().st_size
            sums = list(pool.map(partial(_checksum, path), range(0, size, BLOCK)))
            found[path.relative_to(folder).as_posix()] = {"bytes": size, "crc32": sums}
    return found


def _checksum(path: Path, start: int) -> int:
    value = 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        for _ in range(BLOCK // PIECE):
            value = zlib.crc32(file.read(PIECE), value)
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError for a duplicate key, of which Python would silently take the last."""
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"`{twice}` is a duplicate key. Leave one out.")
    return dict(pairs)


def read_text(path: Path) -> str:
    """The text of a file that a user wrote; ValueError if it is not in UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8."
        ) from error


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk (fsync)."""
    if os.name == "posix":
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


@contextmanager
def naming_disk_errors(what: str, folder: str, advice: str) -> Iterator[None]:
    """Context that turns errors of a full or read-only disk into an `OSError` with folder, reason and advice.

    `{remedy}` in the advice is replaced by what to do about the reason. Libraries report such errors in many ways, so
    after any other error one mebibyte is written as a test.
    """
    try:
        yield
    except Exception as error:
        named = [number for number in CAUSES if os.strerror(number) in str(error)]
        number = named[0] if named else _error_of_writing(Path(folder, f".covey_probe_{os.getpid()}"))
        if number is None:
            raise
        cause, remedy = CAUSES.get(number, (os.strerror(number), "see that it can be written to"))
        raise OSError(
            f"{what} could not be written into {folder!r}: {cause}. {advice.format(remedy=remedy)}"
        ) from error


def _error_of_writing(path: Path) -> int | None:
    try:
        path.write_bytes(bytes(PIECE))
        flush(path)
    except OSError as error:
        return error.errno
    finally:
        with suppress(OSError):
            path.unlink()
    return None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Context with a path for a new file, which replaces `path` at the end; after an error the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    for stale in path.parent.glob(f".{glob.escape(path.stem)}.*{path.suffix}"):  # of a process that was killed
        stale.unlink(missing_ok=True)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def added_whole(folder: Path) -> Iterator[Path]:
    """Context with a folder for new files, which are all moved into `folder` at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
        yield Path(new)
        for path in [path for path in Path(new).rglob("*") if path.is_file()]:
            place = folder / path.relative_to(new)
            place.parent.mkdir(parents=True, exist_ok=True)
            flush(path)
            path.replace(place)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the kernel releases the lock when the process ends, also by SIGKILL.

    Forked processes do not inherit the lock. On a file system without locks, nothing is locked. ValueError if another
    process, perhaps on another machine, has it.
    """
    path = folder / LOCK
    try:
        import fcntl

        file = path.open("a+")
    except (ImportError, OSError):
        yield
        return
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"output_dir={str(folder)!r} is in use by {path.read_text() or 'another process'}, and two runs"
                    " would overwrite each other's checkpoints. Choose another output_dir, or end that run first."
                ) from None
        if not _is_at(file.fileno(), path):  # a run that ended has removed it since it was opened
            with locked(folder):
                yield
            return
        with suppress(OSError):  # a full disk
            os.truncate(file.fileno(), 0)
            note = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            os.write(file.fileno(), note.encode())
        try:
            yield
        finally:
            with suppress(OSError):  # the folder was removed or became read-only; the first error says so
                if _is_at(file.fileno(), path):
                    path.unlink()


def _is_at(number: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(number), path.stat())


def shipped(path: str) -> Path:
    """Path of a file or folder that is shipped with the package: inside the package, or next to the sources."""
    package = Path(__file__).parents[1]
    return found if (found := package / path).exists() else package.parents[1] / path
