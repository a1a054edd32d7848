"""Data that is already on a server: what may be mounted, checked there after links are followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from labctl.agent.broker import mounts
from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.rules import BindMount
from labctl.agent.host import server_data
from labctl.agent.reply import Failure
from labctl.agent.runs import containers, records
from labctl.wire import server_paths
from labctl.wire.codec import to_json
from labctl.wire.runs import RunSpec
from labctl.wire.server_data import CheckDataRequest

SPEC = RunSpec("night", "digits", "0f1e", command=("true",), image="x", env={})


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server's /datasets below pytest's directory, which would count as a temporary one."""
    private = [each for each in server_paths._PRIVATE if not str(tmp_path).startswith(each)]
    monkeypatch.setattr(server_paths, "_PRIVATE", tuple(private))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = tmp_path / "datasets"
    (made / "birds").mkdir(parents=True)
    (tmp_path / "home/labctl").mkdir(parents=True)
    yield made
    (made / "birds").chmod(0o755)


def refuse(path: Path | str) -> tuple[str, str, str, str]:
    with pytest.raises(Failure) as raised:
        server_data.check_data(CheckDataRequest({"birds": str(path)}))
    report = raised.value.report
    return report.kind, report.what, report.why, report.hint


def test_links_are_followed_before_the_mount(datasets: Path) -> None:
    (datasets / "link").symlink_to("birds")
    assert server_data.resolve_all({"birds": f"{datasets}/link"}) == {"birds": datasets / "birds"}


def test_a_link_to_a_private_directory_is_refused(datasets: Path) -> None:
    for target in ("/etc", "/root/x", "/", datasets.parent / "home" / "labctl", "/run/docker.sock"):
        link = datasets / "link"
        link.symlink_to(target)
        kind, what, _, hint = refuse(link)
        assert kind == "policy"
        assert f"which leads to {target} on the server, cannot be the data set birds" in what
        assert hint == "fix data: in lab.yaml"
        link.unlink()


def test_the_home_directory_itself_is_refused(datasets: Path) -> None:
    home = datasets.parent / "home"
    assert "it contains" in refuse(home)[2]
    assert "belongs to the system or to labctl" in refuse(home / "labctl" / "digits")[2]
    assert "hidden directories" in refuse(home / ".ssh")[2]


def test_a_missing_directory_names_the_nearest_one(datasets: Path) -> None:
    path = datasets / "gone" / "deep"
    assert refuse(path)[:2] == ("missing", f"the server has no directory {path}")
    assert refuse(path)[3] == f"labctl ssh -- ls {datasets}   # then fix data: in lab.yaml"


def test_a_file_is_not_a_directory(datasets: Path) -> None:
    (datasets / "file").touch()
    assert refuse(datasets / "file")[:2] == (
        "usage",
        f"{datasets}/file on the server is not a directory",
    )


def test_the_account_itself_must_be_able_to_read(
    datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker runs as root and would mount it: the account's own permissions decide."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.F_OK)
    kind, what, _, hint = refuse(datasets / "birds")
    assert kind == "policy"
    assert f"may not read {datasets}/birds on the server" in what
    assert hint.startswith(f"labctl ssh -- ls -ld {datasets}/birds")


def test_other_file_systems_below_are_refused(
    datasets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "mountinfo"
    inner = str(datasets / "birds/my set").replace(" ", "\\040")
    table.write_text(f"36 35 98:0 / {inner} rw,noatime master:1 - ext3 /dev/root rw\n")
    monkeypatch.setattr(server_data, "MOUNT_TABLE", table)
    kind, what, why, _ = refuse(datasets / "birds")
    assert kind == "policy"
    assert f"contains other file systems: {datasets}/birds/my set" in what
    assert "read-only" in why


def test_a_shared_server_mounts_only_what_the_staff_provides(
    datasets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_data, "is_brokered", lambda: True)
    kind, what, why, hint = refuse(datasets / "birds")
    assert kind == "policy"
    assert "this server is shared" in what
    assert "/srv/labctl" in why
    assert hint.startswith("labctl ssh -- ls /srv/labctl")
    monkeypatch.setattr(server_data, "SHARED", datasets)
    assert server_data.resolve_directory("birds", f"{datasets}/birds") == datasets / "birds"


def test_the_broker_opens_shared_data_read_only_and_never_through_a_link(datasets: Path) -> None:
    path = str(datasets / "birds")
    os.close(mounts.open_shared_path(BindMount(path, "/lab/data/birds", read_only=True)))
    (datasets / "link").symlink_to("/etc")
    (datasets / "file").touch()
    for source, read_only in (
        (path, False),
        (f"{datasets}/link", True),
        (f"{datasets}/link/ssl", True),
        (f"{datasets}/file", True),
        (f"{datasets}/birds/../file", True),
        (f"{datasets}/gone", True),
    ):
        with pytest.raises(HttpRefusal):
            mounts.open_shared_path(BindMount(source, "/lab/data/birds", read_only=read_only))


def test_each_data_set_is_mounted_on_a_directory_beside_the_pushed_ones(datasets: Path) -> None:
    root = datasets.parent / "home/labctl/digits"
    (root / "data").mkdir(parents=True)
    (mount,) = containers.build_server_data_mounts(root, {"birds": f"{datasets}/birds"})
    assert (mount.Source, mount.Target, mount.ReadOnly) == (
        f"{datasets}/birds",
        "/lab/data/birds",
        True,
    )
    assert (root / "data" / "birds").is_dir()
    with pytest.raises(Failure):
        containers.build_server_data_mounts(root, {"../birds": f"{datasets}/birds"})


def test_a_run_without_such_data_has_the_hash_that_earlier_versions_gave_it() -> None:
    assert '"data"' not in records.encode_spec(SPEC)
    assert '"data": {"birds": "/d"}' in records.encode_spec(SPEC._replace(data={"birds": "/d"}))
    assert "data" in to_json(SPEC)
