"""Journal that a killed server continues from: the requests that it accepted, their results, and weights.

Rows are in an SQLite database, which a killed process leaves whole; weights are safetensors files in the same folder.
A client is restored from its newest weights, and its requests since then run again: the same arithmetic on the same
numbers. Results that clients may have seen are never computed again.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.runtime.files import naming_disk_errors
from covey.tinker.checkpoints import TrainingRun
from covey.tinker.errors import Refusal

Result = bytes | dict[str, Any]  # a protobuf message, or JSON

FOLDER = ".durable"  # inside the folder of saved states
DONE, FAILED, NOT_RUN = "done", "failed", "not run"  # outcomes of requests

_SCHEMA = """
CREATE TABLE IF NOT EXISTS server (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, version TEXT);
CREATE TABLE IF NOT EXISTS clients (
    id TEXT PRIMARY KEY, session TEXT, number INTEGER, run TEXT, saved_at INTEGER, through INTEGER, weights TEXT);
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT, number INTEGER, client TEXT, path TEXT, snapshot TEXT, gone TEXT);
CREATE TABLE IF NOT EXISTS requests (
    id TEXT PRIMARY KEY, session TEXT, client TEXT, number INTEGER, route TEXT, body BLOB, digest BLOB,
    acknowledgement TEXT, outcome TEXT, message BLOB, json TEXT, fetched INTEGER DEFAULT 0, dropped INTEGER DEFAULT 0);
CREATE INDEX IF NOT EXISTS of_client ON requests (client, number);
"""


@dataclass(frozen=True)
class Sent:
    """A request as it came; the digest shows whether a request with a known number is the same one."""

    route: str
    body: bytes
    digest: bytes

    @classmethod
    def of(cls, route: str, body: bytes | Mapping[str, Any]) -> "Sent":
        data = body if isinstance(body, bytes) else json.dumps(body, sort_keys=True).encode()
        return cls(route, data, hashlib.blake2b(data, digest_size=16).digest())


@dataclass(frozen=True)
class RequestEntry:
    """A request that was accepted, with its result once there is one."""

    id: str
    session: str
    client: str | None  # that trains; None for samples
    number: int  # among the client's operations
    sent: Sent
    acknowledgement: dict[str, Any]
    outcome: str | None = None
    result: Result | None = None
    fetched: bool = False
    dropped: bool = False  # nobody asks for the result any more


@dataclass(frozen=True)
class ClientEntry:
    """A training client, and the file of its weights after its operation `through`."""

    run: TrainingRun
    session: str
    number: int
    saved_at: int
    through: int
    weights: str


@dataclass(frozen=True)
class SamplerEntry:
    """A sampler; `snapshot` names its weights, None for the model alone."""

    id: str
    session: str
    number: int
    client: str | None  # whose unnamed sampler it is
    path: str | None
    snapshot: str | None
    gone: str | None


@dataclass(frozen=True)
class Past:
    """All that an earlier server left."""

    sessions: list[tuple[str, str]]  # ids, and versions of their clients
    clients: list[ClientEntry]
    samplers: list[SamplerEntry]
    requests: list[RequestEntry]  # in the order in which they came


NOTHING = Past([], [], [], [])


class Journal:
    """A journal that keeps nothing: a server that is killed forgets its sessions. `DurableJournal` keeps them.

    `weights` and `snapshot` are called on the worker's thread, all else on the event loop.
    """

    def past(self) -> Past:
        """Everything that an earlier server left."""
        return NOTHING

    def begin(self, session: str, version: str) -> None:
        """Add a session."""

    def end(self, session: str) -> None:
        """Forget a session with all that belongs to it."""

    def accept(self, entry: RequestEntry) -> None:
        """Add a request, before its client learns that it was accepted; one that is known stays as it is."""

    def discard(self, request_id: str) -> None:
        """Forget a request that was refused after all."""

    def settle(self, request_id: str, result: Result, outcome: str) -> None:
        """Add a result, before its client can see it; a second one is ignored."""

    def advance(self, request_id: str, result: Result, client: ClientEntry) -> None:
        """Add the result of an operation together with the client's weights after it."""

    def saved(self, client: str, step: int) -> None:
        """Note the step of the client's last saved state."""

    def fetched(self, request_id: str) -> None:
        """Note that a client has asked for the result."""

    def drop(self, request_id: str) -> None:
        """Forget a result that no client asks for any more."""

    def end_client(self, client: str) -> None:
        """Forget a client that was unloaded."""

    def sampler(self, entry: SamplerEntry) -> None:
        """Add a sampler, or replace what is known of it."""

    def is_due(self, steps: int) -> bool:
        """True after optimizer steps whose weights are written."""
        return False

    def weights(self, client: str, number: int, tensors: Callable[[], Mapping[str, Tensor]]) -> str | None:
        """Write a client's weights after an operation; the name of the file, None where none is kept."""
        return None

    def snapshot(self, sampler: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Write the weights of a sampler, which is added after that."""

    def read(self, file: str) -> dict[str, Tensor]:
        """The tensors of a file that is named in an entry; Refusal if it cannot be read."""
        raise NotImplementedError

    def close(self) -> None:
        """Add nothing from now on."""


class DurableJournal(Journal):
    """A journal in a folder."""

    def __init__(self, folder: Path, every: int, server: Mapping[str, Any], log: Callable[[str], None]):
        """Open a journal, which writes weights every so many optimizer steps.

        `server` are the settings that results depend on. Refusal if the sessions in the folder belong to others.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._every, self._log = folder, every, log
        self._closed = False
        self._db = sqlite3.connect(folder / "journal.sqlite", check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # a killed process loses nothing
        self._db.executescript(_SCHEMA)
        self._check(server)
        self._remove_unnamed()

    def _check(self, server: Mapping[str, Any]) -> None:
        known = dict(self._db.execute("SELECT name, value FROM server"))
        own = {name: json.dumps(value, sort_keys=True) for name, value in server.items()}
        if self._db.execute("SELECT 1 FROM sessions").fetchone() is not None:
            for name, value in own.items():
                if known.get(name) != value:
                    raise Refusal(
                        f"{str(self.folder)!r} has sessions of a server with {name} {known.get(name)}, and this one has"
                        f" {value}. Start the server as before, or remove that folder to end those sessions."
                    )
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO server VALUES (?, ?)", own.items())

    # ---- what an earlier server left ---------------------------------------------------------------------------------

    def past(self) -> Past:
        clients = [
            ClientEntry(TrainingRun.of_json(run), *rest)
            for run, *rest in self._db.execute("SELECT run, session, number, saved_at, through, weights FROM clients")
        ]
        columns = "id, session, number, client, path, snapshot, gone"
        samplers = [SamplerEntry(*row) for row in self._db.execute(f"SELECT {columns} FROM samplers ORDER BY rowid")]
        sessions = list(self._db.execute("SELECT id, version FROM sessions"))
        return Past(sessions, clients, samplers, list(self._requests()))

    def _requests(self) -> Iterator[RequestEntry]:
        columns = "id, session, client, number, route, body, digest, acknowledgement, outcome, message, json, fetched"
        for row in self._db.execute(f"SELECT {columns}, dropped FROM requests ORDER BY rowid"):
            request_id, session, client, number, route, body, digest, acknowledgement = row[:8]
            outcome, message, text, fetched, dropped = row[8:]
            yield RequestEntry(
                request_id,
                session,
                client,
                number,
                Sent(route, body or b"", digest),
                json.loads(acknowledgement),
                outcome,
                message if text is None else json.loads(text),
                bool(fetched),
                bool(dropped),
            )

    def read(self, file: str) -> dict[str, Tensor]:
        try:
            return load_file(self.folder / file)
        except Exception as error:  # of the library and of the file system
            raise Refusal(
                f"{str(self.folder / file)!r}, which sessions continue from, cannot be read ({error}). Remove"
                f" {str(self.folder)!r} to start without these sessions; saved states stay."
            ) from error

    # ---- rows --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection | None]:
        """The database, committed at the end; None once the journal is closed."""
        if self._closed:
            yield None
            return
        with self._db:
            yield self._db

    def _must(self, statement: str, *values: Any) -> None:
        """Write a row; if that fails, Refusal 503, after which clients try again."""
        try:
            with self._transaction() as db:
                if db is not None:
                    db.execute(statement, values)
        except sqlite3.Error as error:
            raise Refusal(f"the journal in {str(self.folder)!r} cannot be written: {error}.", 503) from error

    @contextmanager
    def _may(self, what: str) -> Iterator[sqlite3.Connection | None]:
        """A transaction whose failure, as on a full disk, is only logged: clients are served all the same."""
        try:
            with self._transaction() as db:
                yield db
        except sqlite3.Error as error:
            self._log(f"{what} could not be written to the journal in {str(self.folder)!r}: {error}")

    def begin(self, session: str, version: str) -> None:
        self._must("INSERT INTO sessions VALUES (?, ?)", session, version)

    def end(self, session: str) -> None:
        files = list[str]()
        with self._may(f"the end of {session}") as db:
            if db is None:
                return
            files += [row[0] for row in db.execute("SELECT weights FROM clients WHERE session = ?", (session,))]
            samplers = db.execute("SELECT id FROM samplers WHERE session = ?", (session,))
            files += [snapshot_file(row[0]) for row in samplers]
            db.execute("DELETE FROM sessions WHERE id = ?", (session,))
            for table in ("clients", "samplers", "requests"):
                db.execute(f"DELETE FROM {table} WHERE session = ?", (session,))
        self._remove(files)

    def accept(self, entry: RequestEntry) -> None:
        sent = entry.sent
        self._must(
            "INSERT OR IGNORE INTO requests (id, session, client, number, route, body, digest, acknowledgement)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(entry.id, entry.session, entry.client, entry.number, sent.route, sent.body, sent.digest),
            json.dumps(entry.acknowledgement),
        )

    def discard(self, request_id: str) -> None:
        with self._may(f"the refusal of {request_id}") as db:
            if db is not None:
                db.execute("DELETE FROM requests WHERE id = ? AND outcome IS NULL", (request_id,))

    def settle(self, request_id: str, result: Result, outcome: str) -> None:
        with self._may(f"the result of {request_id}") as db:
            if db is not None:
                _settle(db, request_id, result, outcome)
                # the body of an operation is needed until the client's weights were written after it
                db.execute("UPDATE requests SET body = NULL WHERE id = ? AND client IS NULL", (request_id,))

    def advance(self, request_id: str, result: Result, client: ClientEntry) -> None:
        run = client.run
        with self._may(f"the state of {run.id}") as db:
            if db is None:
                return
            _settle(db, request_id, result, DONE)
            place = run.id, client.session, client.number, json.dumps(asdict(run)), client.saved_at
            row = (*place, client.through, client.weights)
            db.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            before = "client = ? AND number <= ? AND outcome IS NOT NULL"
            db.execute(f"DELETE FROM requests WHERE dropped AND {before}", (run.id, client.through))
            db.execute(f"UPDATE requests SET body = NULL WHERE {before}", (run.id, client.through))
        self._remove([file.name for file in self.folder.glob(_weights(run.id, "*"))])

    def saved(self, client: str, step: int) -> None:
        with self._may(f"the saved state of {client}") as db:
            if db is not None:
                db.execute("UPDATE clients SET saved_at = ? WHERE id = ?", (step, client))

    def fetched(self, request_id: str) -> None:
        with self._may(f"the end of {request_id}") as db:
            if db is not None:
                db.execute("UPDATE requests SET fetched = 1 WHERE id = ?", (request_id,))

    def drop(self, request_id: str) -> None:
        """Forget a result; the request of an operation stays until the client's weights were written after it."""
        with self._may(f"the end of {request_id}") as db:
            if db is not None:
                db.execute("UPDATE requests SET dropped = 1 WHERE id = ?", (request_id,))
                db.execute(
                    "DELETE FROM requests WHERE id = ? AND (client IS NULL OR number <="
                    " (SELECT through FROM clients WHERE id = requests.client))",
                    (request_id,),
                )

    def end_client(self, client: str) -> None:
        with self._may(f"the end of {client}") as db:
            if db is None:
                return
            db.execute("DELETE FROM clients WHERE id = ?", (client,))
            db.execute("DELETE FROM requests WHERE client = ? AND outcome IS NOT NULL", (client,))
        self._remove([file.name for file in self.folder.glob(_weights(client, "*"))])

    def sampler(self, entry: SamplerEntry) -> None:
        if entry.gone is not None:
            with self._may(f"the end of {entry.id}") as db:
                if db is None:
                    return
                db.execute("UPDATE samplers SET snapshot = NULL, gone = ? WHERE id = ?", (entry.gone, entry.id))
            self._remove([snapshot_file(entry.id)])
            return
        self._must(
            "INSERT OR REPLACE INTO samplers (id, session, number, client, path, snapshot, gone)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(entry.id, entry.session, entry.number, entry.client, entry.path, entry.snapshot, entry.gone),
        )

    # ---- weights -----------------------------------------------------------------------------------------------------

    def is_due(self, steps: int) -> bool:
        return steps % self._every == 0

    def weights(self, client: str, number: int, tensors: Callable[[], Mapping[str, Tensor]]) -> str | None:
        if self._closed:
            return None
        self._write(name := _weights(client, str(number)), tensors())
        return name

    def snapshot(self, sampler: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        if not self._closed:
            self._write(snapshot_file(sampler), tensors())

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        new = self.folder / f"new-{name}"
        try:
            with naming_disk_errors("weights of a session", str(self.folder), "Then {remedy}."):
                save_file(dict(tensors), new)
                new.replace(self.folder / name)
        finally:
            new.unlink(missing_ok=True)

    def _remove_unnamed(self) -> None:
        """Remove files that no row names, which a killed server was writing or about to remove."""
        self._remove([file.name for file in self.folder.glob("*.safetensors")])

    def _remove(self, files: Iterable[str]) -> None:
        """Remove those of the files that no row names: a deletion of rows may have failed."""
        with suppress(sqlite3.Error):
            named = {row[0] for row in self._db.execute("SELECT weights FROM clients")}
            named |= {snapshot_file(row[0]) for row in self._db.execute("SELECT id FROM samplers WHERE gone IS NULL")}
            for file in {*files} - named:
                with suppress(OSError):
                    (self.folder / file).unlink(missing_ok=True)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._db.close()


def _settle(db: sqlite3.Connection, request_id: str, result: Result, outcome: str) -> None:
    message, text = (result, None) if isinstance(result, bytes) else (None, json.dumps(result))
    db.execute(
        "UPDATE requests SET outcome = ?, message = ?, json = ? WHERE id = ? AND outcome IS NULL",
        (outcome, message, text, request_id),
    )


def _weights(client: str, number: str) -> str:
    return f"client-{client.replace(':', '.')}-{number}.safetensors"


def snapshot_file(sampler: str) -> str:
    """The file of a sampler's weights."""
    return f"sampler-{sampler.replace(':', '.')}.safetensors"
