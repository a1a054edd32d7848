"""The server's half of a push: plan, receive, commit, edits, in a home of its own."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from labctl.agent.files import checkpoints, commit, edits, files, outputs, push_target, unpacking
from labctl.agent.reply import Failure
from labctl.wire.codec import from_json, to_json
from labctl.wire.files import (
    CommitReply,
    CommitRequest,
    CompleteFile,
    ManifestRequest,
    PlanReply,
    PlanRequest,
    RunManifest,
    SkippedFile,
)
from labctl.wire.verbs import LabRequest

LAB = {"lab": "digits", "lab_id": "0f1e2d3c4b5a"}


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lab's code directory on this "server"."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "labctl" / "digits" / "code"


MTIME_NS = 1_700_000_000_123_456_789


def entry(path: str, content: bytes, mode: int = 0o644) -> list[Any]:
    return [path, len(content), hashlib.sha256(content).hexdigest(), mode, MTIME_NS]


def request(contents: dict[str, bytes], /, **more: Any) -> dict[str, Any]:
    wanted = [entry(path, content) for path, content in contents.items()]
    return {**LAB, "target": "code", "files": wanted, **more}


def plan_push(body: dict[str, Any]) -> PlanReply:
    return files.plan(from_json(PlanRequest, to_json(body)))


def commit_push(body: dict[str, Any]) -> CommitReply:
    return commit.commit(from_json(CommitRequest, to_json(body)))


def send(contents: dict[str, bytes], **more: Any) -> PlanReply | CommitReply:
    """A plan and, where something is needed, a transfer and a commit of it."""
    plan = plan_push(request(contents, **more))
    if not plan.needed or plan.conflicts:
        return plan
    needed = {path: contents[path] for path in plan.needed}
    return arrive(plan, needed, needed, **more)


def arrive(
    plan: PlanReply, wanted: dict[str, bytes], sent: dict[str, bytes], **more: Any
) -> CommitReply:
    """`wanted` is promised, `sent` comes, as rsync leaves it; then a commit."""
    stage(plan, sent)
    return commit_push(request(wanted, removed=plan.removed, **more))


def stage(plan: PlanReply, sent: dict[str, bytes], mtime_ns: int = MTIME_NS) -> None:
    for path, content in sent.items():
        place = Path(plan.staging) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        os.utime(place, ns=(mtime_ns, mtime_ns))


def archive(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in contents.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_what_is_sent_is_there_and_a_second_plan_needs_nothing(code: Path) -> None:
    contents = {"a.py": b"one", "sub/b.py": b"two", "empty": b""}
    assert send(contents).bad == ()
    assert tree(code) == contents
    again = plan_push(request(contents))
    assert (again.needed, again.conflicts, again.removed) == ((), (), ())


def test_a_first_push_becomes_the_tree_in_one_step(code: Path) -> None:
    contents = {"run.sh": b"#!/bin/sh", "sub/b.py": b"two"}
    wanted = [entry("run.sh", b"#!/bin/sh", 0o755), entry("sub/b.py", b"two")]
    asked = {**LAB, "target": "code", "files": wanted}
    plan = plan_push(asked)
    staging = Path(plan.staging)
    inode = staging.stat().st_ino
    assert staging.stat().st_mode & 0o777 == 0o700
    stage(plan, contents)
    commit_push({**asked, "removed": []})
    assert (code.stat().st_ino, staging.exists()) == (inode, False)
    assert code.stat().st_mode & 0o777 == 0o755
    assert tree(code) == contents
    assert (code / "run.sh").stat().st_mode & 0o777 == 0o755
    assert plan_push(asked).needed == ()


def test_what_an_earlier_try_left_in_staging_never_becomes_part_of_a_tree(code: Path) -> None:
    stage(plan_push(request({"gone": b"1" * 9, "kept": b"2"})), {"gone": b"1" * 9})
    assert send({"kept": b"2"}).bad == ()
    assert tree(code) == {"kept": b"2"}


def along(contents: dict[str, bytes], *names: str) -> PlanReply:
    """A plan of `contents`, of which those with these `names` come along."""
    texts = {name: base64.b64encode(contents[name]).decode() for name in names}
    return plan_push(request(contents, contents=texts))


def test_what_comes_along_with_a_plan_is_committed_at_once(code: Path) -> None:
    send({"a": b"1", "b": b"2", "gone": b"3"})
    after = {"a": b"new", "b": b"2"}
    found = along(after, "a", "b")
    assert (found.needed, found.removed, found.bad) == (("a",), ("gone",), ())
    assert tree(code) == after
    assert plan_push(request(after)).needed == ()


def test_what_comes_along_and_is_not_all_that_is_needed_changes_nothing(code: Path) -> None:
    send({"a": b"1"})
    assert along({"a": b"2", "b": b"3"}, "a").bad is None
    assert tree(code) == {"a": b"1"}


def test_what_comes_along_is_no_way_round_a_conflict(code: Path) -> None:
    send({"a": b"1"})
    (code / "a").write_bytes(b"edited there")
    found = along({"a": b"2"}, "a")
    assert (found.conflicts, found.bad) == (("a",), None)
    assert tree(code) == {"a": b"edited there"}


def test_what_comes_along_different_is_bad_and_changes_nothing(code: Path) -> None:
    send({"a": b"1"})
    found = plan_push(request({"a": b"2"}, contents={"a": base64.b64encode(b"x").decode()}))
    assert (found.bad, tree(code)) == (("a",), {"a": b"1"})


def test_a_directory_that_is_there_already_stays_the_one_it_is(code: Path) -> None:
    """A container may have mounted it: it would not see what took its place."""
    code.mkdir(parents=True)
    inode = code.stat().st_ino
    assert send({"a": b"1"}).bad == ()
    assert (code.stat().st_ino, tree(code)) == (inode, {"a": b"1"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": b"1"}, {"a/b": b"2"}),
        ({"a/b": b"1", "a/c/d": b"1"}, {"a": b"2"}),
        ({"a/b/c": b"1", "x": b"1"}, {"x": b"1"}),
        ({"a": b"1", "b": b"2"}, {"a": b"2", "b": b"1"}),
        ({"a": b"1"}, {}),
    ],
)
def test_any_tree_becomes_any_other(
    code: Path,
    before: dict[str, bytes],
    after: dict[str, bytes],
) -> None:
    send(before)
    for cache in (code / "a" / "__pycache__", code / "__pycache__"):
        if cache.parent.is_dir():
            cache.mkdir()
            (cache / "x.pyc").write_bytes(b"bytecode")
    send(after)
    assert {n: c for n, c in tree(code).items() if "__pycache__" not in n} == after
    assert not [d for d in code.rglob("*") if d.is_dir() and not any(d.iterdir())]


def test_an_edit_is_a_conflict_until_force(code: Path) -> None:
    send({"a.py": b"one", "b.py": b"one"})
    (code / "a.py").write_bytes(b"edited")
    (code / "new.py").write_bytes(b"made here")
    mine = {"a.py": b"mine", "b.py": b"mine", "new.py": b"mine too"}
    refused = plan_push(request(mine))
    assert refused.conflicts == ("a.py", "new.py")
    assert tree(code)["b.py"] == b"one"
    send(mine, force=True)
    assert tree(code) == mine


def test_an_edited_file_that_is_gone_at_home_stays(code: Path) -> None:
    send({"a.py": b"one"})
    (code / "a.py").write_bytes(b"edited")
    assert plan_push(request({})).conflicts == ("a.py",)
    assert tree(code) == {"a.py": b"edited"}
    plan_push(request({}, force=True))
    assert tree(code) == {}


def test_an_edit_between_plan_and_commit_stays(code: Path) -> None:
    send({"a.py": b"one", "gone.py": b"one"})
    plan = plan_push(request({"a.py": b"two"}))
    (code / "a.py").write_bytes(b"edited")
    (code / "gone.py").write_bytes(b"edited")
    two = {"a.py": b"two"}
    reply = arrive(plan, two, two)
    assert sorted(reply.conflicts) == ["a.py", "gone.py"]
    assert tree(code) == {"a.py": b"edited", "gone.py": b"edited"}


def test_the_same_edit_on_both_sides_is_none(code: Path) -> None:
    send({"a.py": b"one"})
    (code / "a.py").write_bytes(b"both")
    assert plan_push(request({"a.py": b"both"})).conflicts == ()
    assert edits.edits(LabRequest(**LAB)).files == ()
    assert plan_push(request({"a.py": b"later"})).conflicts == ()


def test_a_commit_cut_before_its_record_is_no_edit(code: Path) -> None:
    send({"a.py": b"one"})
    target = push_target.PushTarget(LAB["lab"], LAB["lab_id"], "code")
    old_record = target.record_path.read_bytes()
    send({"a.py": b"two"})
    target.record_path.write_bytes(old_record)  # killed between the rename and the record
    assert edits.edits(LabRequest(**LAB)).files == ()
    assert plan_push(request({"a.py": b"three"})).conflicts == ()


def test_what_is_staged_whole_does_not_travel_again(code: Path) -> None:
    wanted = {"whole": b"hello", "begun": b"hello world", "by-tar": b"1234567"}
    plan = plan_push(request(wanted))
    stage(plan, {"whole": b"hello"})
    stage(plan, {"begun": b"hello", "by-tar": b"1234567"}, mtime_ns=1)
    plan = plan_push(request(wanted))
    assert (plan.whole, plan.staged_bytes) == (("whole", "by-tar"), 17)
    assert arrive(plan, wanted, {"begun": b"hello world"}).bad == ()
    assert tree(code) == wanted


def test_what_is_staged_of_another_version_is_not_taken_for_this_one(code: Path) -> None:
    stage(plan_push(request({"a": b"one"})), {"a": b"one"})
    assert plan_push(request({"a": b"two"})).whole == ()


@pytest.mark.parametrize("mtime_ns", [1, MTIME_NS])
def test_a_file_of_another_length_is_never_whole(code: Path, mtime_ns: int) -> None:
    plan = plan_push(request({"a": b"12345"}))
    stage(plan, {"a": b"1234"}, mtime_ns=mtime_ns)
    assert commit_push(request({"a": b"12345"}, removed=[])).bad == ("a",)
    assert tree(code) == {}


def test_where_a_file_of_that_size_is_the_hash_is_wanted_first(code: Path) -> None:
    send({"a": b"one", "b": b"one", "gone": b"one"})
    (code / "b").write_bytes(b"edited")
    plan = plan_push(unread({"a": b"two"}, force=True))
    assert (plan.unsure, plan.needed, plan.removed) == (("a",), (), ("b", "gone"))
    assert len(tree(code)) == 3, "nothing is done before it is known"
    assert plan_push(unread({"a": b"one", "b": b"mine"})).conflicts == ("b",)
    (code / "new").write_bytes(b"made here")
    assert plan_push(unread({"a": b"one", "new": b"too"})).conflicts == ("b", "new")


def unread(contents: dict[str, bytes], /, **more: Any) -> dict[str, Any]:
    """A request that does not know the hashes yet."""
    files_ = [[path, len(content), "", 0o644, MTIME_NS] for path, content in contents.items()]
    return {**request({}, **more), "files": files_}


def test_a_file_without_a_hash_is_bad(code: Path) -> None:
    stage(plan_push(unread({"a": b"one"})), {"a": b"one"})
    assert commit_push(unread({"a": b"one"}, removed=[])).bad == ("a",)
    assert tree(code) == {}


def test_what_was_not_hashed_before_counts_once_its_hash_is_told(code: Path) -> None:
    send({"a": b"old"})
    new = {"a": b"new one"}
    plan = plan_push(unread(new))
    assert plan.needed == ("a",)
    assert arrive(plan, new, new) == CommitReply(1, (), ())
    assert (tree(code), edits.edits(LabRequest(**LAB)).files) == (new, ())
    assert plan_push(request(new)).needed == ()


def test_what_arrived_wrong_is_named_and_nothing_is_replaced(code: Path) -> None:
    send({"a.py": b"one", "b.py": b"one"})
    wanted = {"a.py": b"two", "b.py": b"two"}
    plan = plan_push(request(wanted))
    stage(plan, {"a.py": b"two"})
    stage(plan, {"b.py": b"2wo"}, mtime_ns=1)
    assert commit_push(request(wanted, removed=[])).bad == ("b.py",)
    assert tree(code) == {"a.py": b"two", "b.py": b"one"}


def test_a_link_in_staging_is_no_file_that_arrived(code: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"12345")
    plan = plan_push(request({"a": b"12345"}))
    (Path(plan.staging) / "a").symlink_to(tmp_path / "secret")
    assert commit_push(request({"a": b"12345"}, removed=[])).bad == ("a",)
    assert tree(code) == {}


@pytest.mark.parametrize("name", ["../x", "/etc/x"])
def test_nothing_is_staged_elsewhere(code: Path, name: str) -> None:
    content = base64.b64encode(b"x").decode()
    with pytest.raises(Failure):
        plan_push(request({name: b"x"}, contents={name: content}))
    assert not (code.parent / "x").exists()


def test_a_changed_mode_needs_no_bytes(code: Path) -> None:
    send({"go.sh": b"#!/bin/sh"})
    assert not os.access(code / "go.sh", os.X_OK)
    plan = plan_push({**request({}), "files": [entry("go.sh", b"#!/bin/sh", 0o755)]})
    assert plan.needed == ()
    assert os.access(code / "go.sh", os.X_OK)


def test_nothing_is_written_through_a_link(code: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    send({"a.py": b"one"})
    (code / "sub").symlink_to(outside)
    with pytest.raises(Failure):
        plan_push(request({"sub/x": b"1"}))
    (code / "a.py").unlink()
    (code / "a.py").symlink_to(outside / "a.py")
    assert plan_push(request({"a.py": b"two"})).conflicts == ("a.py",)
    send({"a.py": b"two"}, force=True)
    assert (code / "a.py").read_bytes() == b"two"
    assert not (code / "a.py").is_symlink()
    assert not any(outside.iterdir())


def test_edits_tell_what_they_were_made_from(code: Path) -> None:
    send({"a.py": b"one", "b.py": b"one"})
    (code / "a.py").write_bytes(b"edited")
    (code / "n.ipynb").write_bytes(b"{}")
    (code / ".ipynb_checkpoints").mkdir()
    (code / ".ipynb_checkpoints" / "n.ipynb").write_bytes(b"{}")
    base = hashlib.sha256(b"one").hexdigest()
    found = {path: (size, old) for path, size, _, old in edits.edits(LabRequest(**LAB)).files}
    assert found == {"a.py": (6, base), "n.ipynb": (2, "")}


def test_a_short_disk_is_told_before_anything_is_staged(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "count_free_bytes", lambda _: files.RESERVE_BYTES + 4)
    plan = plan_push(request({"a.bin": b"12345"}))
    assert plan.short_bytes == 1
    assert not push_target.PushTarget(LAB["lab"], LAB["lab_id"], "code").staging.exists()


@pytest.mark.parametrize("target", ["elsewhere", "data/../x", "data/", ""])
def test_only_known_targets(code: Path, target: str) -> None:
    with pytest.raises(Failure):
        plan_push({**LAB, "target": target, "files": []})


def make_run(code: Path, contents: dict[str, bytes], *, ended: bool) -> Path:
    run = code.parent / "runs" / "r1"
    (run / ".labctl").mkdir(parents=True)
    (run / ".labctl" / "spec.json").write_text('{"outputs":["checkpoints"]}')
    if ended:
        (run / ".labctl" / "record.json").write_text('{"id":"r1","state":"exited"}')
    for name, content in contents.items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (1.0, 1.0))
    return run


def list_outputs(**more: bool) -> RunManifest:
    return outputs.manifest(ManifestRequest(**LAB, runs=("r1",), **more)).runs["r1"]


def test_a_file_that_somebody_writes_is_not_whole(code: Path) -> None:
    run = make_run(code, {"checkpoints/m.bin": b"half"}, ended=False)
    with (run / "checkpoints" / "m.bin").open("ab"):
        found = list_outputs()
        open_file = SkippedFile("checkpoints/m.bin", "still open for writing")
        assert (found.files, found.skipped) == ((), (open_file,))
    assert [f[0] for f in list_outputs().files] == ["checkpoints/m.bin"]


def test_a_log_counts_while_it_grows(code: Path) -> None:
    run = make_run(code, {"logs/run.log": b"one\n"}, ended=False)
    with (run / "logs" / "run.log").open("ab", buffering=0) as log:
        log.write(b"two\n")
        digest = hashlib.sha256(b"one\ntwo\n").hexdigest()
        assert list_outputs().files == (CompleteFile("logs/run.log", 8, digest, growing=True),)


def checkpoint(content: bytes, promised: bytes) -> dict[str, bytes]:
    digest = hashlib.sha256(promised).hexdigest()
    text = f'{{"files":{{"m.bin":{{"size":{len(promised)},"sha256":"{digest}"}}}}}}'
    return {"checkpoints/s1/m.bin": content, "checkpoints/s1/manifest.json": text.encode()}


def test_a_checkpoint_counts_only_as_its_manifest_says(code: Path) -> None:
    make_run(code, {**checkpoint(b"half", b"half and half"), "checkpoints/x": b"1"}, ended=True)
    found = list_outputs()
    assert [f[0] for f in found.files] == ["checkpoints/x"]
    assert {s[0] for s in found.skipped} == {
        "checkpoints/s1/m.bin",
        "checkpoints/s1/manifest.json",
    }


def test_a_checkpoint_whose_manifest_is_not_ready_waits(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "SETTLED_S", 3600.0)  # a listing may take seconds
    run = make_run(code, checkpoint(b"whole", b"whole"), ended=False)
    manifest = run / "checkpoints" / "s1" / "manifest.json"
    assert len(list_outputs().files) == 2
    whole = manifest.read_text()
    for text in (whole[:-3], "{}", '{"files":{"m.bin":{"size":5}}}'):
        manifest.write_text(text)
        assert list_outputs().files == ()


@pytest.mark.parametrize("text", ["[]", '{"files":5}', '{"files":["m.bin"]}', "\x00"])
@pytest.mark.parametrize("quick", [False, True])
def test_a_manifest_that_describes_no_files_is_a_file_as_any_other(
    code: Path, text: str, quick: bool
) -> None:
    run = make_run(code, {"checkpoints/s1/m.bin": b"1"}, ended=False)
    manifest = run / "checkpoints" / "s1" / "manifest.json"
    manifest.write_text(text)
    os.utime(manifest, (1.0, 1.0))
    assert {file.path for file in list_outputs(quick=quick).files} == {
        "checkpoints/s1/m.bin",
        "checkpoints/s1/manifest.json",
    }


def test_a_manifest_that_cannot_be_read_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(checkpoints, "read_json", refuse)
    manifest = checkpoints.read_checkpoint_manifest(tmp_path / "manifest.json")
    assert (manifest.names, manifest.hashes) == ((), {})


def test_a_damaged_record_of_what_was_pulled_counts_as_none(code: Path) -> None:
    run = make_run(code, {"checkpoints/m.bin": b"1"}, ended=True)
    for text in ('{"checkpoints/m.bin":5}', '{"checkpoints/m.bin":[1]}', "[]", "{"):
        (run / ".labctl" / "pulled.json").write_text(text)
        assert list_outputs().unpulled == 1
    digest = hashlib.sha256(b"1").hexdigest()
    (run / ".labctl" / "pulled.json").write_text(f'{{"checkpoints/m.bin":[1,"{digest}"]}}')
    assert list_outputs().unpulled == 0


def test_a_checkpoint_with_hashes_counts_as_soon_as_it_is_there(code: Path) -> None:
    run = make_run(code, {}, ended=False)
    for name, content in checkpoint(b"whole", b"whole").items():
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert len(list_outputs().files) == 2
    (run / "checkpoints" / "s1" / "m.bin").write_bytes(b"other")
    assert list_outputs().files == ()


def test_a_checkpoint_in_a_hidden_directory_is_still_being_written(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "SETTLED_S", 3600.0)  # a listing may take seconds
    run = make_run(code, {}, ended=False)
    staging = run / "checkpoints" / ".new"
    staging.mkdir(parents=True)
    for name, content in checkpoint(b"whole", b"whole").items():
        (staging / Path(name).name).write_bytes(content)
    assert list_outputs().files == ()
    staging.rename(run / "checkpoints" / "s1")
    assert len(list_outputs().files) == 2


def test_all_brings_new_files_but_not_the_code_that_was_sent(code: Path) -> None:
    run = make_run(code, {"code/train.py": b"x", "code/model.pth": b"y", "z": b"z"}, ended=True)
    (run / ".labctl" / "code.json").write_text('["train.py"]')
    assert list_outputs().files == ()
    assert {f[0] for f in list_outputs(all=True).files} == {"code/model.pth", "z"}


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_are_unpacked_without_links(tmp_path: Path, kind: str) -> None:
    into = tmp_path / "into"
    into.mkdir()
    path = tmp_path / f"a.{kind}"
    if kind == "tar":
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo("./d/x")
            info.size = 2
            tar.addfile(info, io.BytesIO(b"hi"))
            for type_, name in ((tarfile.SYMTYPE, "link"), (tarfile.CHRTYPE, "device")):
                odd = tarfile.TarInfo(name)
                odd.type, odd.linkname = type_, "/etc/passwd"
                tar.addfile(odd)
        left_out = 2
    else:
        with zipfile.ZipFile(path, "w") as zipped:
            zipped.writestr("d/x", "hi")
            link = zipfile.ZipInfo("link")
            link.external_attr = 0o120777 << 16
            zipped.writestr(link, "/etc/passwd")
        left_out = 1
    assert unpacking.unpack(path, path.name, into) == (1, left_out)
    assert tree(into) == {"d/x": b"hi"}


@pytest.mark.parametrize("name", ["../x", "/abs", "a/../../x", "a\\..\\x", "a\x1bb"])
def test_archives_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    into = tmp_path / "into"
    into.mkdir()
    (tmp_path / "a.tar").write_bytes(archive({name: b"x"}))
    with pytest.raises(Failure, match="leaves"):
        unpacking.unpack(tmp_path / "a.tar", "a.tar", into)
    assert tree(into) == {}
    assert not (tmp_path / "x").exists()


def test_an_archive_larger_than_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "count_free_bytes", lambda _: files.RESERVE_BYTES + 5)
    (tmp_path / "a.tar").write_bytes(archive({"a": b"123", "b": b"456"}))
    (tmp_path / "into").mkdir()
    with pytest.raises(Failure, match="no room"):
        unpacking.unpack(tmp_path / "a.tar", "a.tar", tmp_path / "into")


@pytest.mark.parametrize("content", [b"", b"no archive", archive({"a": b"x" * 3000})[:1000]])
@pytest.mark.parametrize("name", ["a.tar", "a.tgz", "a.zip"])
def test_damaged_archives_are_told(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "into").mkdir()
    with pytest.raises(Failure, match="damaged or not an archive"):
        unpacking.unpack(tmp_path / name, name, tmp_path / "into")
