"""What labctl remembers on this machine: servers, attempts, runs, forwards and a ledger, in SQLite.

A cache and a ledger, never the truth about what exists: the provider's tags are. So a database
that cannot be read is put aside and a fresh one made, and `State.was_rebuilt` says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from labctl.errors import LabError
from labctl.model import NAME_PATTERN, CreateRequest, Forward, Offer, Run, Server, Value
from labctl.shell import Secret
from labctl.state.database import open_database, open_to_read, spoken
from labctl.state.locks import hold_lock

__all__ = ["Attempt", "LedgerEntry", "State"]

T = TypeVar("T")
V = TypeVar("V", bound=Value)


class Attempt(Value, frozen=True):
    """One call of `Provider.create`, written before it is made. `outcome` is "" while open.

    `account` is the provider's account that was asked, as in `Server.account`.
    """

    token: str
    lab_id: str
    provider: str
    request: CreateRequest
    offer: Offer
    created_at: float
    outcome: str = ""
    account: str = ""


class LedgerEntry(Value, frozen=True):
    """One line of the ledger; `number` grows. `detail` is what the recorder wrote."""

    number: int
    at: float
    kind: str
    lab_id: str = ""
    server_id: str = ""
    run_id: str = ""
    detail: dict[str, Any] = msgspec.field(default_factory=dict)


class State:
    """The database at `path`, made where there is none (0600, in a 0700 directory).

    `read_only` creates, moves and changes nothing: what is missing or unusable reads as empty.
    `network` says whether the directory lies on a network file system; None: find out.
    `was_rebuilt` says why the database was begun anew by this very object; "" when it was not.
    Use from several threads is fine. Every method raises BusyError when another process holds
    the database for BUSY_TIMEOUT_S, DiskFullError, or LabError for anything else that SQLite says.
    """

    def __init__(self, path: Path, *, read_only: bool = False, network: bool | None = None) -> None:
        self.path = path
        self._guard = threading.RLock()
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
        """Keep the server as it is now, in place of what was known of it."""
        self._write(
            "INSERT INTO servers (id, lab_id, provider, alias, state, created_at, json)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET lab_id=excluded.lab_id,"
            " provider=excluded.provider, alias=excluded.alias, state=excluded.state,"
            " created_at=excluded.created_at, json=excluded.json",
            (
                *(server.id, server.lab_id, server.provider, server.alias, server.state),
                *(server.created_at, _encoded(server)),
            ),
        )

    def server(self, server_id: str) -> Server | None:
        return self._one(Server, "SELECT json FROM servers WHERE id = ?", (server_id,))

    def server_of_lab(self, lab_id: str) -> Server | None:
        """The lab's server, the youngest one where there are several."""
        return self._one(
            Server,
            "SELECT json FROM servers WHERE lab_id = ? ORDER BY created_at DESC, id LIMIT 1",
            (lab_id,),
        )

    def servers(self, lab_id: str | None = None) -> list[Server]:
        """Every server known, of one lab or of all, the oldest first."""
        return self._all(
            Server,
            "SELECT json FROM servers WHERE ?1 IS NULL OR lab_id = ?1 ORDER BY created_at, id",
            (lab_id,),
        )

    def drop_server(self, server_id: str) -> None:
        """Forget a server that the provider says is terminated, and its forwards."""
        with self._transaction():
            self._write("DELETE FROM forwards WHERE server_id = ?", (server_id,))
            self._write("DELETE FROM servers WHERE id = ?", (server_id,))

    # attempts

    def begin_attempt(
        self, token: str, request: CreateRequest, offer: Offer, account: str = ""
    ) -> None:
        """Write down what is about to be asked for. On disk when this returns.

        The same attempt again changes nothing; another one with a used token is a ValueError.
        """
        values = (token, request.lab_id, offer.provider, _encoded(request), _encoded(offer))
        with self._transaction():
            known = self._rows(
                "SELECT token, lab_id, provider, request, offer FROM attempts WHERE token = ?",
                (token,),
            )
            if known and tuple(known[0]) != values:
                raise ValueError("this token was used for another attempt")
            if not known:
                self._write(
                    "INSERT INTO attempts"
                    " (token, lab_id, provider, request, offer, created_at, account)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*values, time.time(), account),
                )

    def open_attempts(self, lab_id: str | None = None) -> list[Attempt]:
        """Attempts whose outcome nobody wrote down, of one lab or of all, the oldest first."""
        rows = self._rows(
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
                request=_decoded(request, CreateRequest),
                offer=_decoded(offer, Offer),
                created_at=created_at,
                outcome=outcome,
                account=account,
            )
            for token, lab, provider, request, offer, created_at, outcome, account in rows
        ]

    def renew_attempt(self, token: str) -> None:
        """The same attempt is made again now: what comes of it may show itself from now on."""
        self._write("UPDATE attempts SET created_at = ? WHERE token = ?", (time.time(), token))

    def end_attempt(self, token: str, outcome: str) -> None:
        """Close an attempt: what came of it, in words, such as a server's id."""
        if not outcome:
            raise ValueError("an outcome says what came of the attempt")
        self._write("UPDATE attempts SET outcome = ? WHERE token = ?", (outcome, token))

    # runs

    def save_run(self, run: Run) -> None:
        self._write(
            "INSERT INTO runs (lab_id, id, server_id, created_at, json) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (lab_id, id) DO UPDATE SET server_id=excluded.server_id,"
            " created_at=excluded.created_at, json=excluded.json",
            (run.lab_id, run.id, run.server_id, run.created_at, _encoded(run)),
        )

    def run(self, lab_id: str, run_id: str) -> Run | None:
        return self._one(Run, "SELECT json FROM runs WHERE lab_id = ? AND id = ?", (lab_id, run_id))

    def runs(self, lab_id: str | None = None) -> list[Run]:
        """The runs of one lab or of all, the oldest first."""
        return self._all(
            Run,
            "SELECT json FROM runs WHERE ?1 IS NULL OR lab_id = ?1 ORDER BY created_at, rowid",
            (lab_id,),
        )

    def latest_run(self, lab_id: str) -> Run | None:
        return self._one(
            Run,
            "SELECT json FROM runs WHERE lab_id = ? ORDER BY created_at DESC, rowid DESC LIMIT 1",
            (lab_id,),
        )

    # forwards

    def save_forward(self, forward: Forward) -> None:
        self._write(
            "INSERT INTO forwards (id, server_id, json) VALUES (?, ?, ?) ON CONFLICT (id)"
            " DO UPDATE SET server_id=excluded.server_id, json=excluded.json",
            (forward.id, forward.server_id, _encoded(forward)),
        )

    def forwards(self, server_id: str | None = None) -> list[Forward]:
        return self._all(
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
        """Append to the ledger, for good. A Secret anywhere in `detail` is a TypeError."""
        self._write(
            "INSERT INTO events (at, kind, lab_id, server_id, run_id, detail)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (time.time(), kind, lab_id, server_id, run_id, _encoded(detail or {})),
        )

    def events(
        self,
        *,
        lab_id: str | None = None,
        server_id: str | None = None,
        run_id: str | None = None,
        kind: str | None = None,
        limit: int = -1,
    ) -> list[LedgerEntry]:
        """The ledger's lines that fit, the oldest first; with `limit`, the last so many."""
        rows = self._rows(
            "SELECT number, at, kind, lab_id, server_id, run_id, detail FROM events"
            " WHERE (?1 IS NULL OR lab_id = ?1) AND (?2 IS NULL OR server_id = ?2)"
            " AND (?3 IS NULL OR run_id = ?3) AND (?4 IS NULL OR kind = ?4)"
            " ORDER BY number DESC LIMIT ?5",
            (lab_id, server_id, run_id, kind, limit),
        )
        names = ("number", "at", "kind", "lab_id", "server_id", "run_id")
        return [
            LedgerEntry(**dict(zip(names, row, strict=False)), detail=_decoded(row[6], dict))
            for row in reversed(rows)
        ]

    # one at a time

    @contextmanager
    def exclusive(self, lab_id: str, what: str, *, wait_s: float = 10.0) -> Iterator[None]:
        """Hold the lab for the deed `what` (such as "up"); other processes and threads wait.

        Raises BusyError that names the holder after `wait_s`. The kernel lets go when the process
        ends, however it ends.
        """
        if not NAME_PATTERN.fullmatch(lab_id):
            raise ValueError(f"not a lab id: {lab_id!r}")
        with hold_lock(self.path.parent / "locks" / f"{lab_id}.lock", what, wait_s=wait_s):
            yield

    # plumbing

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All that is written inside reaches the disk together, or not at all."""
        with self._guard:
            self._write("BEGIN IMMEDIATE")
            try:
                yield
                self._write("COMMIT")
            except BaseException:
                self._db.rollback()
                raise

    def _write(self, line: str, values: tuple[Any, ...] = ()) -> None:
        with self._guard, spoken(self.path):
            self._db.execute(line, values)

    def _rows(self, line: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._guard, spoken(self.path):
            return self._db.execute(line, values).fetchall()

    def _all(self, kind: type[V], line: str, values: tuple[Any, ...]) -> list[V]:
        return [_decoded(row[0], kind) for row in self._rows(line, values)]

    def _one(self, kind: type[V], line: str, values: tuple[Any, ...]) -> V | None:
        return next(iter(self._all(kind, line, values)), None)


def _encoded(value: Any) -> str:
    _refuse_secrets(value)
    return msgspec.json.encode(value).decode()


def _refuse_secrets(value: Any) -> None:
    """msgspec would write a Secret out in full, as it does any dataclass."""
    if isinstance(value, Secret):
        raise TypeError("a Secret never goes into the state")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_secrets(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _refuse_secrets(item)


def _decoded(text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise LabError(
            "a record in labctl's database cannot be read",
            why=f"{kind.__name__}: {error}",
            hint="labctl status --refresh",
        ) from error
