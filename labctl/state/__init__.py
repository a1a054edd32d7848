"""The database of this machine: servers, attempts, runs, forwards and a ledger, in SQLite.

It is a cache and a ledger; the provider's tags decide what exists. So a database that cannot be
read is moved aside and a new one is created, and `State.was_rebuilt` says why.

May import: commands, config, estimate and the layers below.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError
from labctl.model import (
    NAME_PATTERN,
    CreateServerRequest,
    Forward,
    Moving,
    Offer,
    Run,
    Server,
    Value,
)
from labctl.shell import Secret
from labctl.state.database import open_database, open_to_read, translate_errors
from labctl.state.locks import hold_lock, note_progress

__all__ = ["Attempt", "LedgerEntry", "State"]

T = TypeVar("T")
V = TypeVar("V", bound=Value)


class Attempt(Value, frozen=True):
    """One call of `Provider.create`, stored before the call. `outcome` is "" while it is open.

    `account` is the provider account of the call, as in `Server.account`.
    """

    token: str
    lab_id: str
    provider: str
    request: CreateServerRequest
    offer: Offer
    created_at: float
    outcome: str = ""
    account: str = ""


class LedgerEntry(Value, frozen=True):
    """One line of the ledger; `number` increases. The contents of `detail` depend on `kind`."""

    number: int
    at: float
    kind: str
    lab_id: str = ""
    server_id: str = ""
    run_id: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class State:
    """The database at `path`, created if missing (0600, in a 0700 directory).

    `read_only` creates, moves and changes nothing: a missing or unusable database reads as empty.
    `network` says whether the directory is on a network file system; None finds out. `was_rebuilt`
    says why this object replaced the database; "" if it did not. Several threads may use it. Every
    method raises BusyError if another process holds the database for BUSY_TIMEOUT_S,
    DiskFullError, or LabError for any other error of SQLite.
    """

    def __init__(self, path: Path, *, read_only: bool = False, network: bool | None = None) -> None:
        self.path = path
        self._lock = threading.RLock()
        if read_only:
            self._db, self.was_rebuilt = open_to_read(path)
        else:
            self._db, self.was_rebuilt = open_database(path, network=network)

    def __enter__(self) -> State:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # servers

    def save_server(self, server: Server) -> None:
        """Store the server; replaces an earlier record of it."""
        self._write(
            "INSERT INTO servers (id, lab_id, provider, alias, state, created_at, json)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET lab_id=excluded.lab_id,"
            " provider=excluded.provider, alias=excluded.alias, state=excluded.state,"
            " created_at=excluded.created_at, json=excluded.json",
            (
                *(server.id, server.lab_id, server.provider, server.alias, server.state),
                *(server.created_at, _encode(server)),
            ),
        )

    def update_server(self, before: Server | None, server: Server) -> Server:
        """Store the server if its record is still `before`, None for no record; return the newest.

        If another process has changed the record, that one stays. A dropped one is not recreated.
        """
        with self._transaction():
            current = self.get_server(server.id)
            if current != before:
                return current or server
            self.save_server(server)
            return server

    def save_servers(self, *servers: Server) -> None:
        """Store these servers together, or none of them."""
        with self._transaction():
            for server in servers:
                self.save_server(server)

    def get_server(self, server_id: str) -> Server | None:
        return self._select_one(Server, "SELECT json FROM servers WHERE id = ?", (server_id,))

    def get_lab_server(self, lab_id: str, moving: Moving = "") -> Server | None:
        """Return the lab's server, the newest if it has several; None without one.

        With `moving`, the one that has this part in an unfinished move of the lab.
        """
        servers = self._select_all(
            Server,
            "SELECT json FROM servers WHERE lab_id = ? ORDER BY created_at DESC, id",
            (lab_id,),
        )
        return next((server for server in servers if server.moving == moving), None)

    def list_servers(self, lab_id: str | None = None) -> list[Server]:
        """List the recorded servers of one lab or of all, the oldest first."""
        return self._select_all(
            Server,
            "SELECT json FROM servers WHERE ?1 IS NULL OR lab_id = ?1 ORDER BY created_at, id",
            (lab_id,),
        )

    def drop_server(self, server_id: str) -> None:
        """Delete the record of a server that the provider shows as terminated, and its forwards."""
        with self._transaction():
            self._write("DELETE FROM forwards WHERE server_id = ?", (server_id,))
            self._write("DELETE FROM servers WHERE id = ?", (server_id,))

    # attempts

    def begin_attempt(
        self, token: str, request: CreateServerRequest, offer: Offer, account: str = ""
    ) -> None:
        """Store a request before it is sent. It is on disk when this returns.

        Repeating the same attempt changes nothing; another one with a used token is a ValueError.
        """
        values = (token, request.lab_id, offer.provider, _encode(request), _encode(offer))
        with self._transaction():
            recorded = self._select_rows(
                "SELECT token, lab_id, provider, request, offer FROM attempts WHERE token = ?",
                (token,),
            )
            if recorded and tuple(recorded[0]) != values:
                raise ValueError("this token was used for another attempt")
            if not recorded:
                self._write(
                    "INSERT INTO attempts"
                    " (token, lab_id, provider, request, offer, created_at, account)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*values, time.time(), account),
                )

    def list_open_attempts(self, lab_id: str | None = None) -> list[Attempt]:
        """List the attempts without an outcome, of one lab or of all, the oldest first."""
        rows = self._select_rows(
            "SELECT token, lab_id, provider, request, offer, created_at, outcome, account"
            " FROM attempts WHERE outcome = '' AND (?1 IS NULL OR lab_id = ?1)"
            " ORDER BY created_at, rowid",
            (lab_id,),
        )
        return [
            Attempt(
                token=token,
                lab_id=lab,
                provider=provider,
                request=_decode(request, CreateServerRequest),
                offer=_decode(offer, Offer),
                created_at=created_at,
                outcome=outcome,
                account=account,
            )
            for token, lab, provider, request, offer, created_at, outcome, account in rows
        ]

    def renew_attempt(self, token: str) -> None:
        """Record that an attempt is repeated now: its server may appear from now on."""
        self._write("UPDATE attempts SET created_at = ? WHERE token = ?", (time.time(), token))

    def end_attempt(self, token: str, outcome: str) -> None:
        """Close an attempt with its outcome as text, such as "created"."""
        if not outcome:
            raise ValueError("the outcome of an attempt must not be empty")
        self._write("UPDATE attempts SET outcome = ? WHERE token = ?", (outcome, token))

    # runs

    def save_run(self, run: Run) -> None:
        """Insert or replace a run; the same run again writes nothing, so it waits for no disk."""
        self._write(
            "INSERT INTO runs (lab_id, id, server_id, created_at, json) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (lab_id, id) DO UPDATE SET server_id=excluded.server_id,"
            " created_at=excluded.created_at, json=excluded.json WHERE json != excluded.json",
            (run.lab_id, run.id, run.server_id, run.created_at, _encode(run)),
        )

    def get_run(self, lab_id: str, run_id: str) -> Run | None:
        return self._select_one(
            Run, "SELECT json FROM runs WHERE lab_id = ? AND id = ?", (lab_id, run_id)
        )

    def list_runs(self, lab_id: str | None = None) -> list[Run]:
        """List the runs of one lab or of all, the oldest first."""
        return self._select_all(
            Run,
            "SELECT json FROM runs WHERE ?1 IS NULL OR lab_id = ?1 ORDER BY created_at, rowid",
            (lab_id,),
        )

    def get_latest_run(self, lab_id: str) -> Run | None:
        return self._select_one(
            Run,
            "SELECT json FROM runs WHERE lab_id = ? ORDER BY created_at DESC, rowid DESC LIMIT 1",
            (lab_id,),
        )

    # forwards

    def save_forward(self, forward: Forward) -> None:
        self._write(
            "INSERT INTO forwards (id, server_id, json) VALUES (?, ?, ?) ON CONFLICT (id)"
            " DO UPDATE SET server_id=excluded.server_id, json=excluded.json",
            (forward.id, forward.server_id, _encode(forward)),
        )

    def list_forwards(self, server_id: str | None = None) -> list[Forward]:
        return self._select_all(
            Forward,
            "SELECT json FROM forwards WHERE ?1 IS NULL OR server_id = ?1 ORDER BY rowid",
            (server_id,),
        )

    def drop_forward(self, forward_id: str) -> None:
        self._write("DELETE FROM forwards WHERE id = ?", (forward_id,))

    # the ledger

    def record(
        self,
        kind: str,
        *,
        lab_id: str = "",
        server_id: str = "",
        run_id: str = "",
        detail: dict[str, Any] | None = None,
    ) -> None:
        """Append a line to the ledger. A Secret anywhere in `detail` is a TypeError."""
        self._write(
            "INSERT INTO events (at, kind, lab_id, server_id, run_id, detail)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (time.time(), kind, lab_id, server_id, run_id, _encode(detail or {})),
        )

    def list_events(
        self,
        *,
        lab_id: str | None = None,
        server_id: str | None = None,
        run_id: str | None = None,
        kind: str | None = None,
        limit: int = -1,
    ) -> list[LedgerEntry]:
        """List the matching lines of the ledger, oldest first; only the last `limit` of them."""
        wanted = {"lab_id": lab_id, "server_id": server_id, "run_id": run_id, "kind": kind}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        # SQLite uses its index of labs only if the condition is a plain comparison.
        where = " AND ".join(f"{name} = ?" for name in wanted) or "TRUE"
        rows = self._select_rows(
            "SELECT number, at, kind, lab_id, server_id, run_id, detail FROM events"
            f" WHERE {where} ORDER BY number DESC LIMIT ?",
            (*wanted.values(), limit),
        )
        names = ("number", "at", "kind", "lab_id", "server_id", "run_id")
        return [
            LedgerEntry(**dict(zip(names, row, strict=False)), detail=_decode(row[6], dict))
            for row in reversed(rows)
        ]

    def list_lab_ids(self) -> set[str]:
        """List the ids of the labs that the ledger has lines of."""
        return {row[0] for row in self._select_rows("SELECT DISTINCT lab_id FROM events")}

    # locking

    @contextmanager
    def lock(
        self,
        lab_id: str,
        what: str,
        *,
        wait_s: float = 10.0,
        is_command: bool = True,
        on_wait: Callable[[str], None] = lambda holder: None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> Iterator[None]:
        """Lock the lab for the action `what` (such as "up"); other processes and threads wait.

        Without `is_command`, `what` describes the action, as in `hold_lock`.
        `on_wait` is called once, with a description of the holder, if the lock is not free, and
        `on_progress` with what the holder gives to `note_progress` from then on. Raises BusyError,
        which names the holder, after `wait_s`. The kernel releases the lock when the process ends,
        however it ends.
        """
        with hold_lock(
            self.find_lock(lab_id),
            what,
            wait_s=wait_s,
            is_command=is_command,
            on_wait=on_wait,
            on_progress=on_progress,
        ):
            yield

    def note_progress(self, lab_id: str, text: str) -> None:
        """Show those who wait for the lock that the caller holds how far its action is."""
        note_progress(self.find_lock(lab_id), text)

    def find_lock(self, lab_id: str) -> Path:
        """Return the file that `lock` locks, for a process that must hold the same lock."""
        if not NAME_PATTERN.fullmatch(lab_id):
            raise ValueError(f"not a lab id: {lab_id!r}")
        return self.path.parent / "locks" / f"{lab_id}.lock"

    # SQL

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Write everything inside to the disk together, or not at all."""
        with self._lock:
            self._write("BEGIN IMMEDIATE")
            try:
                yield
                self._write("COMMIT")
            except BaseException:
                self._db.rollback()
                raise

    def _write(self, line: str, values: tuple[Any, ...] = ()) -> None:
        with self._lock, translate_errors(self.path):
            self._db.execute(line, values)

    def _select_rows(self, line: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock, translate_errors(self.path):
            return self._db.execute(line, values).fetchall()

    def _select_all(self, kind: type[V], line: str, values: tuple[Any, ...]) -> list[V]:
        return [_decode(row[0], kind) for row in self._select_rows(line, values)]

    def _select_one(self, kind: type[V], line: str, values: tuple[Any, ...]) -> V | None:
        return next(iter(self._select_all(kind, line, values)), None)


def _encode(value: Any) -> str:
    _refuse_secrets(value)
    return msgspec.json.encode(value).decode()


def _refuse_secrets(value: Any) -> None:
    """Raise TypeError for a Secret, which msgspec would write in full, like any dataclass."""
    if isinstance(value, Secret):
        raise TypeError("a Secret never goes into the state")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_secrets(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _refuse_secrets(item)


def _decode(text: str, kind: type[T]) -> T:
    try:
        return decode_json(text, kind)
    except msgspec.MsgspecError as error:
        raise LabError(
            "a record in labctl's database cannot be read",
            why=f"{kind.__name__}: {error}",
            hint=lambda subject: subject.refresh,
        ) from error
