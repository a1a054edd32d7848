"""The database: what goes in comes out, the ledger only grows, and nothing secret is kept."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from labctl.errors import BusyError, DiskFullError, LabError
from labctl.model import CreateServerRequest, Endpoint, Forward, Need, Offer, Run, Server
from labctl.shell import Secret
from labctl.state import State, database

OFFER = Offer(provider="local", type="container", price_usd_per_hour=0.5)


def server(server_id: str, *, lab_id: str = "aa", created_at: float = 1.0) -> Server:
    return Server(
        id=server_id,
        provider="local",
        lab="digits",
        lab_id=lab_id,
        alias="digits",
        endpoint=Endpoint(host="127.0.0.1", port=2222, host_key="ssh-ed25519 AAAA"),
        offer=OFFER,
        created_at=created_at,
    )


def request(token: str = "t1", *, lab_id: str = "aa") -> CreateServerRequest:
    return CreateServerRequest(
        lab="digits",
        lab_id=lab_id,
        token=token,
        public_key="ssh-ed25519 AAAA",
        identity="/keys/id",
        need=Need(),
        tags={"labctl:lab": "aa"},
        first_boot="#!/bin/sh\necho 'hello'\n",
    )


def run(run_id: str, *, lab_id: str = "aa", created_at: float = 1.0) -> Run:
    return Run(
        id=run_id,
        lab_id=lab_id,
        server_id="s1",
        state="running",
        created_at=created_at,
        progress={"loss": 0.5},
    )


def forward(forward_id: str, *, server_id: str = "s1") -> Forward:
    return Forward(
        id=forward_id,
        server_id=server_id,
        service="jupyter",
        local_port=1,
        remote_port=2,
        url="http://localhost:1",
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "labctl.db"


@pytest.fixture
def state(path: Path) -> Iterator[State]:
    with State(path) as opened:
        yield opened


def test_servers_come_back_as_they_were(state: State, path: Path) -> None:
    old, young = server("s1"), server("s2", created_at=2.0)
    other = server("s3", lab_id="bb")
    for each in (young, old, other):
        state.save_server(each)
    assert state.list_servers("aa") == [old, young]
    assert len(state.list_servers()) == 3
    assert state.get_lab_server("aa") == young
    assert state.get_lab_server("cc") is None
    assert state.get_server("s1") == old
    with State(path) as second:
        assert second.list_servers() == state.list_servers()


def test_a_server_saved_again_replaces_what_was_known(state: State) -> None:
    state.save_server(server("s1"))
    changed = server("s1", created_at=5.0, lab_id="bb")
    state.save_server(changed)
    assert state.list_servers() == [changed]
    assert state.list_servers("aa") == []


def test_a_dropped_server_takes_its_forwards_along(state: State) -> None:
    state.save_server(server("s1"))
    state.save_forward(forward("f1"))
    state.save_forward(forward("f2", server_id="s2"))
    state.drop_server("s1")
    state.drop_server("never-there")
    assert state.list_servers() == []
    assert state.list_forwards() == [forward("f2", server_id="s2")]


def test_attempts_are_open_until_their_outcome_is_written(state: State) -> None:
    state.begin_attempt("t1", request("t1"), OFFER)
    state.begin_attempt("t2", request("t2", lab_id="bb"), OFFER)
    (attempt,) = state.list_open_attempts("aa")
    assert (attempt.request, attempt.offer, attempt.provider) == (request("t1"), OFFER, "local")
    assert attempt.created_at == pytest.approx(time.time(), abs=60)
    assert len(state.list_open_attempts()) == 2
    state.end_attempt("t1", "server s1")
    assert state.list_open_attempts("aa") == []
    with pytest.raises(ValueError, match="outcome"):
        state.end_attempt("t2", "")


def test_the_same_attempt_twice_is_one_and_another_is_refused(state: State) -> None:
    state.begin_attempt("t1", request(), OFFER)
    state.begin_attempt("t1", request(), OFFER)
    assert len(state.list_open_attempts()) == 1
    with pytest.raises(ValueError, match="used for another"):
        state.begin_attempt("t1", request(lab_id="bb"), OFFER)
    assert len(state.list_open_attempts()) == 1


def test_an_attempt_is_seen_by_others_as_soon_as_it_is_begun(state: State, path: Path) -> None:
    state.begin_attempt("t1", request(), OFFER)
    with State(path, read_only=True) as other:
        assert len(other.list_open_attempts("aa")) == 1


def test_runs(state: State) -> None:
    first, second, third = run("r1"), run("r2", created_at=2.0), run("r3", created_at=2.0)
    for each in (first, second, third):
        state.save_run(each)
    state.save_run(run("r1", lab_id="bb", created_at=9.0))
    assert state.list_runs("aa") == [first, second, third]
    assert state.get_run("aa", "r2") == second
    assert state.get_run("aa", "r9") is None
    assert state.get_latest_run("aa") == third
    state.save_run(first)
    assert state.get_latest_run("aa") == third
    assert state.get_latest_run("cc") is None


def test_a_run_saved_again_unchanged_writes_nothing(path: Path) -> None:
    with State(path) as state:
        state.save_run(run("r1"))
        log = path.with_name(f"{path.name}-wal")
        before = log.stat().st_size
        state.save_run(run("r1"))
        assert log.stat().st_size == before
        state.save_run(run("r1", created_at=9.0))
        assert log.stat().st_size > before
        assert state.get_run("aa", "r1") == run("r1", created_at=9.0)


def test_forwards(state: State) -> None:
    state.save_forward(forward("f1"))
    state.save_forward(forward("f2", server_id="s2"))
    assert state.list_forwards("s1") == [forward("f1")]
    state.drop_forward("f1")
    assert state.list_forwards() == [forward("f2", server_id="s2")]


def test_the_ledger_tells_what_happened_in_order(state: State) -> None:
    state.record("server-created", lab_id="aa", server_id="s1", detail={"usd": 0.5, "n": [1]})
    state.record("run-started", lab_id="aa", server_id="s1", run_id="r1")
    state.record("server-created", lab_id="bb", server_id="s2")
    assert [each.kind for each in state.list_events()] == [
        "server-created",
        "run-started",
        "server-created",
    ]
    (first, second) = state.list_events(lab_id="aa")
    assert first.detail == {"usd": 0.5, "n": [1]}
    assert second.run_id == "r1"
    assert first.number < second.number
    assert first.at == pytest.approx(time.time(), abs=60)
    assert [each.lab_id for each in state.list_events(kind="server-created")] == ["aa", "bb"]
    assert [each.lab_id for each in state.list_events(limit=1)] == ["bb"]
    assert state.list_events(server_id="s1", run_id="r9") == []


@pytest.mark.parametrize(
    "line",
    [
        "UPDATE events SET kind = 'x'",
        "DELETE FROM events",
        "INSERT OR REPLACE INTO events (number, at, kind, lab_id, server_id, run_id, detail)"
        " VALUES (1, 0, 'x', '', '', '', '{}')",
    ],
)
def test_the_ledger_only_grows(state: State, path: Path, line: str) -> None:
    state.record("made")
    outside = sqlite3.connect(path)
    outside.execute("PRAGMA recursive_triggers = ON")
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        outside.execute(line)
    outside.close()
    assert [each.kind for each in state.list_events()] == ["made"]


@pytest.mark.parametrize(
    "detail", [{"a": Secret("x")}, {"a": [{"b": Secret("x")}]}, {"a": ({"b": Secret("x")},)}]
)
def test_secrets_never_reach_the_disk(state: State, path: Path, detail: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="Secret"):
        state.record("x", detail=detail)
    assert state.list_events() == []


def test_files_are_the_persons_own(state: State, path: Path) -> None:
    state.record("x")
    with state.lock("aa", "up"):
        files = [each for each in path.parent.rglob("*") if each.is_file()]
        assert {each.name for each in files} >= {"labctl.db", "labctl.db-wal", "aa.lock"}
        assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
    directories = [path.parent, path.parent / "locks"]
    assert {stat.S_IMODE(each.stat().st_mode) for each in directories} == {0o700}


def test_a_file_open_to_others_is_closed_to_them(path: Path) -> None:
    State(path).close()
    path.chmod(0o644)
    State(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_reading_creates_nothing(path: Path) -> None:
    with State(path, read_only=True) as state:
        found = [
            *state.list_servers(),
            *state.list_runs(),
            *state.list_forwards(),
            *state.list_events(),
        ]
        assert found == []
        assert state.was_rebuilt == ""
        with pytest.raises(LabError):
            state.save_server(server("s1"))
    assert not path.parent.exists()


def test_reading_changes_nothing(state: State, path: Path) -> None:
    state.save_server(server("s1"))
    with State(path, read_only=True) as reader:
        assert reader.list_servers() == [server("s1")]
        with pytest.raises(LabError):
            reader.drop_server("s1")
    assert state.list_servers() == [server("s1")]


def test_what_a_crash_left_in_the_log_is_read(path: Path, tmp_path: Path) -> None:
    with State(path) as state:
        state.save_server(server("s1"))
        crashed = tmp_path / "crashed"
        crashed.mkdir()
        for name in ("labctl.db", "labctl.db-wal"):
            (crashed / name).write_bytes((path.parent / name).read_bytes())
    with State(crashed / "labctl.db") as again:
        assert again.was_rebuilt == ""
        assert again.list_servers() == [server("s1")]


def test_a_deleted_database_leaves_nothing_of_its_log_behind(path: Path) -> None:
    kept = {}
    with State(path) as state:
        state.save_server(server("s1"))
        for suffix in ("-wal", "-shm"):
            kept[suffix] = Path(f"{path}{suffix}").read_bytes()
    path.unlink()
    for suffix, data in kept.items():
        Path(f"{path}{suffix}").write_bytes(data)
    with State(path) as fresh:
        assert fresh.list_servers() == []
        fresh.save_server(server("s2"))
    with State(path) as again:
        assert again.list_servers() == [server("s2")]


def test_many_threads_share_one(state: State) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: state.record("x", detail={"n": number}), range(200)))
        list(pool.map(lambda number: state.save_server(server(f"s{number}")), range(50)))
    assert len(state.list_events()) == 200
    assert len(state.list_servers()) == 50


def test_a_transaction_is_all_or_nothing(state: State) -> None:
    state.save_server(server("s1"))
    state.save_forward(forward("f1"))

    def half() -> None:
        with state._transaction():
            state._write("DELETE FROM forwards")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert state.list_forwards() == [forward("f1")]
    state.drop_server("s1")
    assert state.list_forwards() == []


def test_a_database_that_is_held_is_told_as_busy(
    state: State, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    outside = sqlite3.connect(path, isolation_level=None)
    outside.execute("BEGIN IMMEDIATE")
    with State(path) as second, pytest.raises(BusyError) as caught:
        second.record("x")
    assert caught.value.exit_code == 75
    outside.execute("ROLLBACK")
    outside.close()
    state.record("x")
    assert len(state.list_events()) == 1


def test_no_room_is_told_as_such_and_nothing_is_lost(state: State) -> None:
    state.save_server(server("s1"))
    pages = state._select_rows("PRAGMA page_count")[0][0]
    state._select_rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFullError):
        state.record("x", detail={"text": "x" * 400_000})
    state._select_rows("PRAGMA max_page_count = 1000000")
    assert state.list_servers() == [server("s1")]
    state.record("after")
    assert state.list_events(limit=1)[0].kind == "after"


def test_a_record_that_cannot_be_read_is_told(state: State, path: Path) -> None:
    state.save_server(server("s1"))
    outside = sqlite3.connect(path)
    outside.execute("UPDATE servers SET json = '{}'")
    outside.commit()
    outside.close()
    with pytest.raises(LabError, match="cannot be read") as caught:
        state.list_servers()
    assert caught.value.hint == "labctl status --refresh"


@pytest.mark.parametrize(("network", "mode"), [(True, "delete"), (False, "wal"), (None, "wal")])
def test_on_a_network_file_system_there_is_no_shared_memory(
    path: Path, network: bool | None, mode: str
) -> None:
    with State(path, network=network) as state:
        state.save_server(server("s1"))
        assert state._select_rows("PRAGMA journal_mode") == [(mode,)]
        assert Path(f"{path}-shm").exists() == (mode == "wal")
    with State(path) as again:
        assert again.list_servers() == [server("s1")]
        assert again._select_rows("PRAGMA journal_mode") == [(mode,)]


def test_file_systems_are_found_by_the_deepest_mount() -> None:
    linux = database.parse_linux_mounts(
        "/dev/sda1 / ext4 rw 0 0\nfiler:/home /home nfs4 rw 0 0\n"
        "/dev/sdb1 /home/my\\040disk xfs rw 0 0\nodd\n"
    )
    assert database.find_filesystem(Path("/home/alice/.local"), linux) == "nfs4"
    assert database.find_filesystem(Path("/home/my disk/x"), linux) == "xfs"
    assert database.find_filesystem(Path("/homework"), linux) == "ext4"
    assert database.find_filesystem(Path("/x"), {}) == ""


def test_the_mounts_of_macos_are_read() -> None:
    mac = database.parse_bsd_mounts(
        "/dev/disk3s1s1 on / (apfs, sealed, local, read-only, journaled)\n"
        "/dev/disk3s5 on /System/Volumes/Data (apfs, local)\n"
        "//alice@filer/home on /Volumes/home share (smbfs, nodev, nosuid)\n"
        "filer:/x on /Users/a (nfs)\nnonsense\n"
    )
    assert mac["/"] == "apfs"
    assert mac["/Volumes/home share"] == "smbfs"
    assert database.find_filesystem(Path("/Users/a/.local"), mac) == "nfs"


def test_where_this_machine_keeps_temporary_files_is_no_network(tmp_path: Path) -> None:
    assert not database.is_on_network(tmp_path)


def test_a_state_directory_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LabError) as caught:
        State(tmp_path / "file" / "labctl.db")
    assert "LABCTL_STATE_DIR" in caught.value.hint


def test_a_thousand_servers_are_read_in_a_blink(state: State) -> None:
    with state._transaction():
        for number in range(1000):
            state.save_server(server(f"s{number:04}", lab_id=f"{number:04}"))
    assert len(state.list_servers()) == 1000
    assert state.get_lab_server("0500") == server("s0500", lab_id="0500")


def test_a_database_of_an_earlier_labctl_is_migrated(tmp_path: Path) -> None:
    """As labctl wrote it before attempts had an account; the one that wrote it may go on."""
    path = tmp_path / "labctl.db"
    with State(path) as state:
        state.begin_attempt("t1", request(), OFFER)
        state.save_server(server("s1"))
    outside = sqlite3.connect(path)
    outside.execute("ALTER TABLE attempts DROP COLUMN account")
    outside.execute("PRAGMA user_version = 1")
    with State(path, read_only=True) as reader:
        assert [one.account for one in reader.list_open_attempts()] == [""]
        assert [one.id for one in reader.list_servers()] == ["s1"]
    assert outside.execute("PRAGMA user_version").fetchone() == (1,)
    with State(path) as state, State(path) as twin:
        assert state.was_rebuilt == ""
        state.begin_attempt("t2", request("t2"), OFFER, "123456789012")
        assert [one.account for one in twin.list_open_attempts()] == ["", "123456789012"]
    outside.execute("UPDATE attempts SET outcome = 'created' WHERE token = 't1'")
    outside.commit()
    outside.close()
    with State(path) as state:
        assert [one.token for one in state.list_open_attempts()] == ["t2"]
