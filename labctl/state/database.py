"""Opening the database: its schema, its file's modes, and what to do with one that is broken."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from labctl.errors import BusyError, DiskFullError, LabError
from labctl.state.locks import hold_lock

SCHEMA_VERSION = 2
BUSY_TIMEOUT_S = 10.0
# A larger database is checked whole only where its size looks wrong: that would take long.
MAX_CHECKED_BYTES = 8 * 2**20

_SCHEMA = """
CREATE TABLE servers (
    id TEXT PRIMARY KEY, lab_id TEXT NOT NULL, provider TEXT NOT NULL, alias TEXT NOT NULL,
    state TEXT NOT NULL, created_at REAL NOT NULL, json TEXT NOT NULL
);
CREATE INDEX servers_of_lab ON servers (lab_id, created_at);
CREATE TABLE attempts (
    token TEXT PRIMARY KEY, lab_id TEXT NOT NULL, provider TEXT NOT NULL, created_at REAL NOT NULL,
    outcome TEXT NOT NULL DEFAULT '', request TEXT NOT NULL, offer TEXT NOT NULL,
    account TEXT NOT NULL DEFAULT ''
);
CREATE INDEX attempts_of_lab ON attempts (lab_id, outcome);
CREATE TABLE runs (
    lab_id TEXT NOT NULL, id TEXT NOT NULL, server_id TEXT NOT NULL, created_at REAL NOT NULL,
    json TEXT NOT NULL, PRIMARY KEY (lab_id, id)
);
CREATE INDEX runs_by_age ON runs (lab_id, created_at);
CREATE TABLE forwards (id TEXT PRIMARY KEY, server_id TEXT NOT NULL, json TEXT NOT NULL);
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL,
    lab_id TEXT NOT NULL, server_id TEXT NOT NULL, run_id TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE INDEX events_of_lab ON events (lab_id, number);
CREATE TRIGGER events_keep BEFORE UPDATE ON events
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER events_stay BEFORE DELETE ON events
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""
# Schema version -> the statements that make it the next one. An earlier labctl that still has the
# file open goes on working: it names the columns that it writes and reads.
_MIGRATIONS = {1: ("ALTER TABLE attempts ADD COLUMN account TEXT NOT NULL DEFAULT ''",)}
# `INSERT OR REPLACE` deletes without firing the trigger above unless recursive_triggers is on.
_ON_OPEN = ("PRAGMA recursive_triggers = ON", "PRAGMA synchronous = FULL")

# WAL needs memory shared by all who have the file open, which these do not give.
_NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "fuse", "afs", "afp", "9p", "lustre", "ceph", "drvfs")
_SUFFIXES = ("", "-wal", "-shm", "-journal")


class _UnusableError(Exception):
    """The file is not a database of this version of labctl; the message says why."""


def open_database(path: Path, *, network: bool | None = None) -> tuple[sqlite3.Connection, str]:
    """The database at `path`, made or begun anew where needed, and why it was begun anew, or "".

    What cannot be used moves to `<name>.broken-<time>`. Only one process at a time does this.
    """
    try:
        if path.exists():
            with suppress(_UnusableError):
                return _current(path), ""
        else:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with hold_lock(
            path.parent / "locks" / "database.lock", "opening the database", wait_s=30.0
        ):
            return _made(path, network)
    except OSError as error:
        raise LabError(
            f"cannot write {path}",
            why=error.strerror or "",
            hint="export LABCTL_STATE_DIR=DIR   # a directory of your own",
        ) from error


def open_to_read(path: Path) -> tuple[sqlite3.Connection, str]:
    """The database for reading only, and why it cannot be used, or "": then it reads as empty."""
    why = ""
    if path.exists():
        try:
            db = _opened(path, fix_modes=False)
        except _UnusableError as error:
            why = str(error)
        else:
            with spoken(path):
                db = _migrated_copy(db)
            db.execute("PRAGMA query_only = ON")
            return db, ""
    db = _connected(":memory:")
    db.executescript(_SCHEMA)
    db.execute("PRAGMA query_only = ON")
    return db, why


@contextmanager
def spoken(path: Path) -> Iterator[None]:
    """Turns what SQLite says into the errors of the house."""
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        # The second is how Python tells of text that a damaged page holds.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise BusyError(
                "another labctl holds the database",
                why=f"waited {BUSY_TIMEOUT_S:.0f} s for {path}",
                hint="try again in a moment",
            ) from error
        if code == sqlite3.SQLITE_FULL:
            raise DiskFullError(
                f"no room to write {path}", why=str(error), hint=f"df -h {path.parent}"
            ) from error
        raise LabError(
            f"the database {path} cannot be used",
            why=str(error),
            hint=f"mv {path} {path}.broken   # then: labctl status --refresh",
        ) from error


def _made(path: Path, network: bool | None) -> tuple[sqlite3.Connection, str]:
    """Under the lock: the database that another process made meanwhile, or a new one."""
    why = ""
    if path.exists():
        try:
            return _current(path), ""
        except _UnusableError as error:
            why = str(error)
        aside = path.with_name(f"{path.name}.broken-{time.time():.3f}")
        for suffix in _SUFFIXES:
            with suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
        why = f"{why}; the old file is {aside}"
    # Built under another name, so that nobody ever sees one without its tables. A log left by
    # a deleted database would be applied to the new one.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    _removed(path)
    _removed(draft)
    try:
        with spoken(path):
            _write_fresh(draft, lies_on_network(path.parent) if network is None else network)
        draft.replace(path)
    finally:
        _removed(draft)
    return _opened(path), why


def _write_fresh(file: Path, on_network: bool) -> None:
    """A new database with its tables, whole when this returns."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    db = _connected(str(file))
    with closing(db):
        db.executescript(
            f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;"
            f"PRAGMA journal_mode = {'DELETE' if on_network else 'WAL'};"
        )


def _removed(file: Path) -> None:
    for suffix in _SUFFIXES:
        Path(f"{file}{suffix}").unlink(missing_ok=True)


def _current(path: Path) -> sqlite3.Connection:
    """A connection to the database, migrated to this version where an earlier one made it."""
    db = _opened(path)
    with _closed_on_error(db), spoken(path):
        _migrate(db)
    return db


def _migrate(db: sqlite3.Connection) -> None:
    """Bring the schema up to date, all or nothing; other processes may be at it as well."""
    if _version(db) == SCHEMA_VERSION:
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        for version in range(_version(db), SCHEMA_VERSION):
            for statement in _MIGRATIONS[version]:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


def _migrated_copy(db: sqlite3.Connection) -> sqlite3.Connection:
    """The database itself or, where its schema is an earlier one, a migrated copy in memory."""
    if _version(db) == SCHEMA_VERSION:
        return db
    copy = _connected(":memory:")
    with closing(db), _closed_on_error(copy):
        db.backup(copy)
        _migrate(copy)
    return copy


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _opened(path: Path, *, fix_modes: bool = True) -> sqlite3.Connection:
    """A connection to a whole database of this version or an earlier one.

    _UnusableError for anything else.
    """
    try:
        found = path.stat()
    except FileNotFoundError as error:
        # Another process is just now putting it aside.
        raise _UnusableError("the database was gone") from error
    if not stat.S_ISREG(found.st_mode):
        raise LabError(f"{path} is not a file", hint="export LABCTL_STATE_DIR=DIR")
    if found.st_size == 0:
        raise _UnusableError("the database was empty")
    if fix_modes and stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o600)
    logged = any(_size(f"{path}{suffix}") for suffix in ("-wal", "-journal"))
    try:
        with spoken(path):
            db = _connected(f"{path.absolute().as_uri()}?mode=rw", uri=True)
            with _closed_on_error(db):
                _check(db, found.st_size, logged)
    except LabError as error:
        cause = error.__cause__
        if cause is not None and _is_damage(cause):
            raise _UnusableError(f"the database was damaged: {cause}") from error
        if not path.exists():
            raise _UnusableError("the database was gone") from error
        raise
    return db


def _is_damage(error: BaseException) -> bool:
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    damage = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
    return code in damage


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size
    except FileNotFoundError:
        return 0


def _check(db: sqlite3.Connection, size: int, logged: bool) -> None:
    """Raises _UnusableError or what SQLite raises unless this is a whole database of ours.

    `size` is the file's before it was opened; `logged` tells that part of it stood in a log then.
    """
    version = _version(db)
    if version > SCHEMA_VERSION:
        raise _UnusableError(
            f"the database was of a newer labctl (schema {version}; here {SCHEMA_VERSION})"
        )
    if version < min(_MIGRATIONS):
        raise _UnusableError("the database was not labctl's")
    # SQLite itself notices a file that lacks whole pages, but reads the rest of a cut one as zeros.
    # With a log that is no sign of damage: a crash while it was folded in leaves such a file.
    cut = size % db.execute("PRAGMA page_size").fetchone()[0]
    if cut and not logged:
        raise _UnusableError("the database was cut short")
    if size <= MAX_CHECKED_BYTES or cut:
        said = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if said != "ok":
            raise _UnusableError(f"the database was damaged: {said.splitlines()[-1]}")


def _connected(name: str, *, uri: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(
        name, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    with _closed_on_error(db):
        for pragma in _ON_OPEN:
            db.execute(pragma)
    return db


@contextmanager
def _closed_on_error(db: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        db.close()
        raise


def lies_on_network(directory: Path) -> bool:
    """Whether `directory` is on NFS or another file system that several machines share."""
    return filesystem_of(directory.resolve(), _mounts()).startswith(_NETWORK_FILESYSTEMS)


def filesystem_of(path: Path, mounts: dict[str, str]) -> str:
    """The type of the file system that `path` lies on; `mounts` is mount point -> type."""
    for place in (path, *path.parents):
        if str(place) in mounts:
            return mounts[str(place)]
    return ""


def _mounts() -> dict[str, str]:
    if sys.platform == "linux":
        with suppress(OSError):
            return linux_mounts(Path("/proc/self/mounts").read_text(errors="surrogateescape"))
        return {}
    import subprocess

    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["mount"], capture_output=True, text=True, timeout=5, check=True)
        return bsd_mounts(said.stdout)
    return {}


def linux_mounts(text: str) -> dict[str, str]:
    """Mount point -> type, of /proc/self/mounts; the last mount on a point is the visible one."""
    mounts = {}
    for line in text.splitlines():
        words = line.split(" ")
        if len(words) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[1])
            mounts[point] = words[2]
    return mounts


def bsd_mounts(text: str) -> dict[str, str]:
    """Mount point -> type, of what `mount` prints on macOS: `SOURCE on POINT (TYPE, ...)`."""
    matches = (re.fullmatch(r".*? on (.*) \(([^,)]+).*", line) for line in text.splitlines())
    return {match[1]: match[2] for match in matches if match}
