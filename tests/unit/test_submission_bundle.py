"""The bundle: made the same each time, and read as if a stranger had made it."""

from __future__ import annotations

import io
import stat
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from submission_bed import FILES, Tar, manifest_of, packed, pax_header, sha256, sources_of

from labctl.errors import TransferError
from labctl.submissions import bundle, manifest
from labctl.submissions.manifest import BundleFile

ONE = {"code/a.py": b"print(1)\n"}


def refusal(data: io.BytesIO | bytes) -> str:
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    with pytest.raises(TransferError) as caught:
        bundle.inspect(file)
    return caught.value.why


def test_the_same_files_make_the_same_bundle_of_the_size_that_was_foretold() -> None:
    data = packed()
    assert data == packed()
    assert len(data) == bundle.packed_bytes(manifest_of(FILES), sources_of(FILES))
    found, members = bundle.inspect(io.BytesIO(data))
    assert found == manifest_of(FILES)
    assert [one.path for one in members] == list(FILES)


def test_other_programs_read_it_too() -> None:
    with tarfile.open(fileobj=io.BytesIO(packed())) as tar:
        inside = tar.getmembers()
    assert [one.name for one in inside] == [manifest.NAME, *FILES]
    assert all(one.isreg() and one.mode == 0o644 for one in inside)


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=1, max_value=900), st.integers(min_value=0, max_value=2000))
def test_names_and_sizes_of_any_length_come_through(length: int, size: int) -> None:
    name = ("code/" + "äb/" * length)[:600].rstrip("/") + "x"
    name = "/".join(name.split("/")[:30])
    files = {name: bytes(size)}
    data = packed(files)
    assert len(data) == bundle.packed_bytes(manifest_of(files), sources_of(files))
    assert bundle.inspect(io.BytesIO(data))[1][0].path == name


def test_a_file_that_changes_while_it_is_packed_stops_it(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    for content in (b"print(2)\n", b"print(1)\n#", b"print(1"):
        path.write_bytes(content)
        file = BundleFile(path="code/a.py", size=9, sha256=sha256(ONE["code/a.py"]))
        with pytest.raises(TransferError, match="changed while it was packed"):
            bundle.write_bundle(
                manifest_of(ONE), [bundle.BundleSource(file=file, path=path)], io.BytesIO()
            )


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "code/../../evil",
        "/etc/cron.d/evil",
        "code//a",
        "code/./a",
        "code/a\\..\\b",
        "code/a\nb",
        "code/\x1b[2J",
        "code/\u202etxt.exe",
        "other/a",
        "code",
        "report.html/x",
        "signing-key",
        "code/" + "x" * 2000,
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    files = {name: b"x"}
    assert refusal(Tar(files).add(name, b"x").end())
    # Even where the manifest names something harmless.
    assert refusal(Tar({"code/a": b"x"}).add(name, b"x").end())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (b"1", "a hard link"), (b"2", "a link"), (b"3", "a device"), (b"4", "a device"),
        (b"5", "a directory"), (b"6", "a pipe"), (b"7", "a special file"), (b"S", "sparse"),
        (b"L", "a special file"), (b"K", "a special file"), (b"g", "a global header"),
        (b"\0", "a special file"),
    ],
)  # fmt: skip
def test_what_is_no_plain_file_is_refused(kind: bytes, said: str) -> None:
    tar = Tar(ONE).add("code/a.py", b"", type=kind, linkname="/etc/passwd")
    assert said in refusal(tar.end())


def test_pax_headers_may_name_and_do_nothing_else() -> None:
    long = "code/" + "x" * 300
    assert bundle.inspect(io.BytesIO(packed({long: b"1"})))[1][0].path == long
    for records in ({"linkpath": "/etc/passwd"}, {"GNU_sparse_size": "9"}, {"size": "-1"}):
        header = pax_header(**records)
        assert "sets" in refusal(Tar(ONE).raw(header).add("code/a.py", b"print(1)\n").end())
    assert "../evil" in refusal(
        Tar(ONE).raw(pax_header(path="../evil")).add("code/a.py", b"print(1)\n").end()
    )
    huge = pax_header(size=str(10 * 1024**3))
    assert "is truncated" in refusal(Tar(ONE).raw(huge).add("code/a.py", b"print(1)\n").end())


def test_a_header_of_any_length_is_not_taken_into_memory() -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = b"x", 7 * 1024**3
    assert "too long" in refusal(Tar(ONE).raw(info.tobuf(tarfile.USTAR_FORMAT)).end())


def test_what_the_manifest_does_not_say_is_refused() -> None:
    content = ONE["code/a.py"]
    whole = Tar(ONE).add("code/a.py", content)
    assert bundle.inspect(whole.end())
    assert "was changed" in refusal(Tar(ONE).add("code/a.py", b"print(9)\n").end())
    more = Tar(ONE).add("code/a.py", content).add("code/b.py", b"")
    assert "does not match manifest.json" in refusal(more.end())
    assert "but missing" in refusal(Tar(ONE).end())
    assert "does not match" in refusal(Tar(ONE).add("code/a.py", content + b"#").end())
    assert "after its end" in refusal(Tar(ONE).add("code/a.py", content).end(tail=b"PK\5\6"))


def test_one_name_twice_is_refused_also_where_letters_differ_in_size() -> None:
    for other in ("code/A.py", "code/a.py"):
        found = manifest_of(ONE)
        files = (*found.files, BundleFile(path=other, size=0, sha256=sha256(b"")))
        doubled = msgspec.structs.replace(found, files=files)
        with pytest.raises(TransferError, match="refused") as caught:
            manifest.decode(manifest.encode(doubled))
        assert "twice" in caught.value.why


def test_a_manifest_of_another_kind_is_refused() -> None:
    for other in ({"kind": "zip"}, {"version": 2}):
        assert "another kind" in refusal(packed(**other))
    headless = Tar(ONE)
    headless.out = io.BytesIO()
    assert "does not start" in refusal(headless.add("code/a.py", ONE["code/a.py"]).end())
    assert "cannot be read" in refusal(packed().replace(b'"lab": "digits"', b'"lab": [ "digi"'))


def test_cut_anywhere_it_breaks_off_or_is_no_tar() -> None:
    data = packed()
    for length in range(0, len(data) - 1024, 100):
        assert refusal(data[:length])


@settings(deadline=None, max_examples=60)
@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_no_changed_byte_gives_other_files(at: int, by: int) -> None:
    """Refused, or what was changed is filling between files and no file of the bundle."""
    data = bytearray(packed())
    at %= len(data)
    data[at] ^= by
    try:
        found, members = bundle.inspect(io.BytesIO(bytes(data)))
    except TransferError:
        return
    for member in members:
        content = bundle.open_member(io.BytesIO(bytes(data)), member).read()
        assert sha256(content) == {f.path: f.sha256 for f in found.files}[member.path]
    if found == manifest_of(FILES):
        assert [one.path for one in members] == list(FILES)


def test_a_compressed_tar_is_none() -> None:
    import gzip

    assert "plain tar" in refusal(gzip.compress(packed()))


def test_unpacked_it_is_what_it_was_and_nothing_runs(tmp_path: Path) -> None:
    bundle.unpack(io.BytesIO(packed()), tmp_path / "out")
    found = {
        path.relative_to(tmp_path / "out").as_posix(): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert {name: found[name] for name in FILES} == FILES
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert not any(mode & 0o111 for mode in modes)
    with pytest.raises(FileExistsError):
        bundle.unpack(io.BytesIO(packed()), tmp_path / "out")


def test_a_member_is_a_file_of_its_own() -> None:
    data = io.BytesIO(packed())
    member = next(one for one in bundle.inspect(data)[1] if one.path == "logs/run.log")
    file = bundle.open_member(data, member)
    assert file.read() == FILES["logs/run.log"]
    file.seek(-8, 2)
    assert file.read(100) == FILES["logs/run.log"][-8:]
