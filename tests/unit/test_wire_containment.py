"""Every place that takes a name from elsewhere refuses names that leave their directory."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.agent.broker import image_archive, mounts
from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.rules import BrokerAccount
from labctl.agent.files import fetch_https, fetch_s3, unpacking
from labctl.agent.host.paths import CheckedPaths, resolve_inside
from labctl.agent.mirror import ssh_gateway
from labctl.agent.reply import Failure
from labctl.config.locations import parse_inside
from labctl.errors import LabError, NotFoundError, PolicyError, TransferError
from labctl.submissions.manifest import check_path
from labctl.submissions.run_files import _list_model
from labctl.sync.containment import require_contained
from labctl.wire.containment import is_contained, is_inside

Check = Callable[[str, Path], object]

OUTSIDE = ["..", "../x", "code/../../x", "code/..", "/etc/passwd", "//etc/passwd", "code/../x"]
ODD = ["", ".", "./x", "code/./x", "code/.", "code//x", "code/"]
HIDDEN = ["code/a\0b", "\0", "code/..\0/x"]
HOSTILE = [*OUTSIDE, *ODD, *HIDDEN]
REFUSED = (LabError, Failure, HttpRefusal, ValueError)


def check_gateway(name: str, root: Path) -> object:
    before = Path.cwd()
    os.chdir(root)
    try:
        return ssh_gateway.find_path(name)
    finally:
        os.chdir(before)


def check_mount(name: str, root: Path) -> object:
    account = BrokerAccount(uid=os.getuid(), gid=os.getgid(), name="alice", home=str(root))
    return mounts.open_owned_path(account, f"{root}/labctl/{name}")


STRICT: dict[str, Check] = {
    "sync": lambda name, root: require_contained(name),
    "bundle": lambda name, root: check_path(name),
    "agent": lambda name, root: resolve_inside(root, name),
    "agent, many": lambda name, root: CheckedPaths(root)(name),
    "bucket": lambda name, root: fetch_s3._check_name(name),
    "store": check_gateway,
    "mount": check_mount,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("where", STRICT)
def test_a_name_that_is_not_plain_is_refused_everywhere(
    where: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "labctl" / "code").mkdir(parents=True)
    (tmp_path / "labctl" / "code" / "x").touch()
    (tmp_path / "labctl" / "x").touch()
    with pytest.raises(REFUSED):
        STRICT[where](name, tmp_path)
    assert not is_contained(name)


@pytest.mark.parametrize("where", STRICT)
def test_a_plain_name_passes_everywhere(where: str, tmp_path: Path) -> None:
    (tmp_path / "labctl" / "code").mkdir(parents=True)
    (tmp_path / "labctl" / "code" / "..x").touch()
    STRICT[where]("code/..x", tmp_path)
    assert is_contained("code/..x")
    assert is_contained("...")
    assert is_contained("~")


@pytest.mark.parametrize("name", [*OUTSIDE, *HIDDEN])
def test_an_unpacked_member_stays_in_its_directory(name: str, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    packed = tmp_path / "set.tar"
    with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo(name.replace("\0", "\x01")), io.BytesIO())
    with pytest.raises(Failure):
        unpacking.unpack(packed, "set.tar", into)
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as zipped:
        zipped.writestr(name.replace("\0", "\x01"), b"")
    with pytest.raises(Failure):
        unpacking.unpack(tmp_path / "set.zip", "set.zip", into)
    assert list(into.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"into", "set.tar", "set.zip"}


@pytest.mark.parametrize("name", ["a\\..\\x", "code//x", "code/./x", "a\x7fb"])
def test_an_unpacked_member_with_an_odd_name_is_refused(name: str) -> None:
    with pytest.raises(Failure):
        unpacking._check_member_name(name)


@pytest.mark.parametrize(
    ("name", "plain"), [("./", ""), (".", ""), ("./a/b", "a/b"), ("a/", "a"), ("././a", "a")]
)
def test_an_unpacked_member_may_start_with_the_directory_itself(name: str, plain: str) -> None:
    assert unpacking._check_member_name(name) == plain


@pytest.mark.parametrize("name", ["../x", "a/../../x", "..", "a\0b", "a/.."])
def test_an_uploaded_image_names_no_file_outside(name: str) -> None:
    with pytest.raises(HttpRefusal):
        image_archive._clean_name(name)


@pytest.mark.parametrize(("name", "clean"), [("/a//b/./c/", "a/b/c"), ("./", ""), ("a", "a")])
def test_an_uploaded_image_may_name_its_files_in_several_ways(name: str, clean: str) -> None:
    assert image_archive._clean_name(name) == clean


@pytest.mark.parametrize("path", ["", "/", "/..", "/.", "/a%00b", "/a%1fb", "/%2e%2e"])
def test_an_address_without_a_file_name_gets_one_of_ours(path: str) -> None:
    assert fetch_https._file_name(f"https://example.org{path}") == fetch_https.NO_NAME


@pytest.mark.parametrize("text", ["..", "../x", "a/../../x", "/etc", "~/x", "a\0b", "", "-x"])
def test_a_path_in_the_configuration_stays_in_the_lab(text: str) -> None:
    with pytest.raises(ValueError):
        parse_inside(text)


def test_a_path_in_the_configuration_is_normalized() -> None:
    assert [parse_inside(text) for text in ("./a", "a//b", "a/../b", ".")] == ["a", "a/b", "b", "."]


@pytest.mark.parametrize("name", ["..", ".", "../x", "a/b", "/etc", "a\0b"])
def test_a_chosen_checkpoint_is_one_of_the_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        list(_list_model(tmp_path, name, []))


def test_a_long_name_that_leaves_is_refused_as_one_that_leaves() -> None:
    name = "../" * 2000 + "x"
    with pytest.raises(PolicyError, match="leaves its directory"):
        require_contained(name)
    with pytest.raises(TransferError) as caught:
        check_path(name)
    assert "leaves the bundle" in caught.value.why


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b.c", "\0", "~", "..."]), max_size=6))
def test_a_contained_path_is_its_own_normal_form_below_any_directory(parts: list[str]) -> None:
    path = "/".join(parts)
    below = os.path.normpath(f"/top/{path}").startswith("/top/") and "\0" not in path
    is_plain = below and os.path.normpath(path) == path and not path.startswith("/")
    assert is_contained(path) == is_plain


def test_a_link_is_followed_before_a_path_counts_as_inside(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "below").mkdir(parents=True)
    (tmp_path / "top-secret").mkdir()
    (top / "out").symlink_to(tmp_path / "top-secret")
    (top / "in").symlink_to("below")
    (top / "loop-out").symlink_to("in/../../top-secret")
    (tmp_path / "alias").symlink_to("top")
    inside = ["", "below", "in", "missing", "below/../in"]
    assert [is_inside(top / name, top) for name in inside] == [True] * 5
    outside = ["out", "out/x", "..", "../top-secret", "loop-out"]
    assert [is_inside(top / name, top) for name in outside] == [False] * 5
    assert is_inside(top / "below", tmp_path / "alias")
