"""down: results come home first, and nothing that bills is forgotten."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lab_world import LAB_ID, Cloud, Labctl, Recorded, World, unreachable, world

from labctl.config import ensure_lab_id
from labctl.errors import (
    BusyError,
    ConnectError,
    EngineError,
    HostKeyError,
    InterruptError,
    NotFoundError,
    PolicyError,
    ThrottledError,
)
from labctl.events import Event, Progress, Step
from labctl.lifecycle import up
from labctl.lifecycle.down import DownResult, down
from labctl.model import Resource, Run, Server
from labctl.runs import outputs
from labctl.servers import adoption, end_server
from labctl.servers.host_keys import ensure_key_pair
from labctl.services import lab_services


@pytest.fixture
def ready(lab: World) -> World:
    up.up(lab.context())
    return lab


def end(lab: World, reporter: Recorded | None = None, *, discard: bool = False) -> DownResult:
    return down(lab.context(reporter), discard=discard)


def test_results_are_home_before_the_server_is_gone(ready: World) -> None:
    ready.machine.run_with("night", **{"model.pt": "weights", "best.pt": "better"})
    ending = end(ready)
    assert ending.removed.startswith("srv-")
    assert ending.pulled_files == 2
    assert (ready.home / "lab/runs/night/checkpoints/model.pt").read_text() == "weights"
    assert ready.cloud.machines == {}
    context = ready.context()
    assert context.state.list_servers() == []
    assert [run.id for run in context.state.list_runs(LAB_ID)] == ["night"], "history stays"
    assert not (ready.places.ssh_dir / ending.removed).exists()


def test_after_an_interrupted_removal_commands_name_down(ready: World, labctl: Labctl) -> None:
    """Ctrl-C while the provider removes the server: its record must not call it running."""

    def interrupt(event: Event) -> None:
        if isinstance(event, Step) and event.name.startswith("waiting for cloud to end"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end(ready, Recorded(on_event=interrupt))
    listed = labctl(ready, "status").out
    assert listed.startswith("digits: being removed (last known), cloud small\n")
    assert "  next: labctl down\n" in listed
    assert "ssh digits" not in listed
    pushed = labctl(ready, "push")
    assert pushed.code == NotFoundError.exit_code
    assert pushed.err.startswith("labctl: the server of digits is being removed\n")
    assert pushed.err.endswith("  next: labctl down\n")
    assert "Nothing is left running or billing.\n" in labctl(ready, "down", "--yes").out
    assert labctl(ready, "status").out.startswith("digits: no server\n")


@pytest.mark.parametrize(("answers", "count"), [([True, True], 1), ([True, False], 0)])
def test_files_in_the_home_directory_are_offered_before_the_server_ends(
    ready: World, answers: list[bool], count: int
) -> None:
    (ready.machine.home / "notes.txt").write_text("by hand")
    reporter = Recorded(answers=answers)
    ending = end(ready, reporter)
    assert (ending.home_files, ready.cloud.machines) == (count, {})
    assert "notes.txt" in reporter.asked[1].detail
    saved = [path.read_text() for path in (ready.home / "lab" / "server-home").rglob("notes.txt")]
    assert saved == ["by hand"] * count
    assert [(ready.home / "lab" / name).is_dir() for name in ending.home_directories] == [
        True
    ] * count


def list_untracked(directory: Path) -> list[str]:
    argv = ["git", "-C", str(directory), "status", "--porcelain", "--untracked-files=all"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()


def download_all(ready: World) -> Path:
    """End a server that has results, an edited file and files in its home; return the lab."""
    lab = ready.home / "lab"
    ensure_lab_id(lab)  # which hides .labctl
    subprocess.run(["git", "init", "-q", str(lab)], check=True)
    ready.machine.run_with("night", **{"model.pt": "weights"})
    code = ready.machine.home / "labctl" / "digits" / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text("edited there")
    (ready.machine.home / "notes.txt").write_text("by hand")
    ending = end(ready)
    assert (ending.pulled_files, ending.saved_edits, ending.home_files) == (1, 1, 1)
    return lab


def test_git_status_lists_none_of_the_downloads(ready: World) -> None:
    assert list_untracked(download_all(ready)) == ["?? lab.yaml"]


def test_downloads_leave_existing_directories_as_they_are(ready: World) -> None:
    lab = ready.home / "lab"
    for name in ("runs", "server-home", "server-edits"):
        (lab / name).mkdir()
    (lab / "runs" / ".gitignore").write_text("*.pt\n")
    untracked = list_untracked(download_all(ready))
    assert (lab / "runs" / ".gitignore").read_text() == "*.pt\n"
    assert "?? runs/night/run.json" in untracked
    assert any(line.endswith("/notes.txt") for line in untracked)
    assert any(line.endswith("/train.py") for line in untracked)


def test_a_server_with_a_large_home_is_stopped_and_not_removed(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.lifecycle.home_files.LARGEST_UNASKED_BYTES", 3)
    (ready.machine.home / "notes.txt").write_text("by hand")
    with pytest.raises(PolicyError, match="was not removed") as caught:
        end(ready, Recorded(answers=[True, False]))
    assert "1 file (7 B) outside the lab: notes.txt" in caught.value.why
    assert "its disk kept" in caught.value.why
    assert caught.value.hint.startswith("labctl down ")
    assert ready.cloud.calls == ["create", "stop"]


def test_every_wait_of_down_is_named_and_ends(ready: World) -> None:
    ready.machine.run_with("night", **{"model.pt": "weights"})
    reporter = Recorded()
    removed = end(ready, reporter).removed
    assert removed not in ready.cloud.machines
    waits = [event for event in reporter.events if isinstance(event, Step) and event.brief]
    begun = [wait.name for wait in waits if not wait.done]
    assert begun == [
        "looking for the server of digits",
        "reading the runs on digits",
        "reading the files in the server's home directory",
        "stopping the services",
        "reading the runs on digits",
        "listing the results on the server",
        "finishing the download of night",
        "looking for files that were edited on the server",
        "checking that all results are on this machine",
        "removing the lab's containers",
        "removing digits",
        "waiting for cloud to end digits",
        "checking what is left (cloud)",
        "checking what is left (cloud)",
    ]
    assert sorted(wait.name for wait in waits if wait.done) == sorted(begun)


def test_without_a_server_it_says_so_and_asks_nothing(lab: World) -> None:
    reporter = Recorded()
    assert end(lab, reporter) == DownResult()
    assert reporter.asked == []
    assert lab.cloud.calls == []


def test_a_refusal_changes_nothing(ready: World) -> None:
    reporter = Recorded(answers=[False])
    with pytest.raises(PolicyError, match="nothing was removed") as caught:
        end(ready, reporter)
    assert caught.value.exit_code == 3
    assert caught.value.why.endswith("is still running (free)")
    assert caught.value.hint == "labctl pull   # downloads new results and keeps the server"
    assert len(ready.cloud.machines) == 1
    assert "LOST" not in reporter.asked[0].question


def test_a_server_that_never_became_ready_has_no_results_to_lose(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PolicyError("the server is not ready for labctl")

    with monkeypatch.context() as patch:
        patch.setattr(up, "prepare", fail)
        with pytest.raises(PolicyError):
            up.up(lab.context())
    reporter = Recorded()
    assert end(lab, reporter).removed
    assert reporter.asked[0].question == "remove the server digits (cloud)?"


def test_of_a_leased_machine_only_the_lease_is_ended(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extend(server_id: str, span_s: int) -> Server | None:
        return ready.cloud.find(server_id)

    monkeypatch.setattr(ready.cloud, "extend", extend, raising=False)
    reporter = Recorded()
    end(ready, reporter)
    assert reporter.asked[0].question == "end the lease of digits (cloud)?"


def test_what_cannot_be_saved_is_stopped_and_kept(ready: World) -> None:
    ready.machine.error = unreachable()
    with pytest.raises(PolicyError, match="was not removed") as caught:
        end(ready)
    assert "its disk kept" in caught.value.why
    assert "it is silent" in caught.value.why
    assert ready.cloud.calls == ["create", "stop"]
    with pytest.raises(NotFoundError, match="is stopped"):
        ready.context().get_server()


def test_without_its_docker_engine_a_leased_machine_is_kept_with_a_way_out(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("Docker does not answer", hint="systemctl status docker")

    monkeypatch.setattr(lab_services, "remove_containers", fail)
    monkeypatch.setattr(adoption, "is_leased", lambda context: True)
    ready.machine.run_with("night", **{"model.pt": "weights"})
    with pytest.raises(EngineError) as caught:
        end(ready)
    assert "the results are downloaded" in caught.value.why
    assert (ready.home / "lab/runs/night/checkpoints/model.pt").exists()
    assert caught.value.hint.splitlines()[1].startswith("labctl down --discard ")
    assert end(ready, discard=True).removed


def test_a_stopped_server_comes_back_with_up_and_its_results_with_down(ready: World) -> None:
    ready.machine.error = unreachable()
    with pytest.raises(PolicyError):
        end(ready)
    ready.machine.error = None
    ready.machine.run_with("night", **{"model.pt": "weights"})
    assert end(ready).pulled_files == 1
    assert ready.cloud.calls == ["create", "stop", "start", "terminate"]
    assert (ready.home / "lab/runs/night/checkpoints/model.pt").exists()


def test_where_nothing_can_be_stopped_it_goes_on(tmp_path: Path) -> None:
    lab = world(tmp_path, Cloud)
    up.up(lab.context())
    lab.machine.error = unreachable()
    with pytest.raises(PolicyError) as caught:
        end(lab)
    assert "the server is still running, unchanged (free)" in caught.value.why
    assert lab.cloud.calls == ["create"]


def test_a_clock_that_was_set_back_does_not_make_down_wait(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ready.context().state
    [server] = state.list_servers()
    state.save_server(msgspec.structs.replace(server, created_at=server.created_at + 86_400))
    waits: list[float] = []
    real = adoption.poll_until

    def poll(check: Any, *, pause_s: float, deadline_s: float) -> Any:
        waits.append(deadline_s)
        return real(check, pause_s=pause_s, deadline_s=0.0)

    monkeypatch.setattr(adoption, "poll_until", poll)
    end(ready)
    assert waits
    assert max(waits) <= ready.cloud.settle_s


def test_a_clock_that_was_set_back_ends_the_wait_for_an_unconfirmed_server(
    lab: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.cloud.settle_s = 0.05
    lab.cloud.interrupt_after_create = True
    with pytest.raises(InterruptError):
        up.up(lab.context())
    lab.cloud.machines.clear()  # the request never became a server
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 86_400)
    end(lab)
    assert lab.context().state.list_open_attempts() == []


def test_discard_asks_in_plain_words_and_needs_no_answer_of_the_server(ready: World) -> None:
    ready.machine.error = unreachable()
    reporter = Recorded()
    end(ready, reporter, discard=True)
    assert "LOST" in reporter.asked[0].question
    assert ready.cloud.machines == {}


def test_discard_leads_out_of_a_foreign_host_key_as_the_hint_says(
    ready: World, tmp_path: Path
) -> None:
    (server,) = ready.cloud.machines.values()
    key = ensure_key_pair(tmp_path / "other").rpartition(" ")[0]
    foreign = msgspec.structs.replace(server.endpoint, host_key=key)
    ready.cloud.change(server.id, endpoint=foreign)
    with pytest.raises(HostKeyError) as caught:
        end(ready)
    assert "labctl down --discard" in caught.value.hint
    assert end(ready, discard=True).removed == server.id
    assert ready.cloud.machines == {}


def test_discard_drops_a_leased_machine_that_has_another_host_key(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,) = ready.cloud.machines.values()

    def refuse(server_id: str) -> None:
        raise HostKeyError("the host key is not the one that was pinned")

    monkeypatch.setattr(ready.cloud, "terminate", refuse)
    with pytest.raises(HostKeyError):
        end(ready, discard=True)
    monkeypatch.setattr(adoption, "is_leased", lambda context: True)
    with pytest.raises(HostKeyError):
        end(ready)
    reporter = Recorded()
    result = end(ready, reporter, discard=True)
    assert (result.removed, result.dropped) == ("", server.id)
    assert ready.context().state.list_servers() == []


def test_discard_gives_up_a_leased_machine_that_does_not_answer(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(server_id: str) -> None:
        raise unreachable()

    (server,) = ready.cloud.machines.values()
    monkeypatch.setattr(ready.cloud, "find", fail)
    monkeypatch.setattr(ready.cloud, "terminate", fail)
    ready.machine.error = unreachable()
    with pytest.raises(ConnectError):
        end(ready, discard=True)  # a machine that costs money must be ended at its provider
    monkeypatch.setattr(adoption, "is_leased", lambda context: True)
    for command in (partial(down, discard=False), up.up):
        with pytest.raises(ConnectError) as caught:
            command(ready.context())
        assert "labctl down --discard   #" in caught.value.hint
    run = Run(id="night", lab_id=LAB_ID, server_id=server.id, state="running")
    ready.context().state.save_run(run)
    result = end(ready, discard=True)
    assert (result.removed, result.dropped, result.has_other_key) == ("", server.id, False)
    (lost,) = ready.context().state.list_runs(LAB_ID)
    assert lost.summary == "lost: labctl down gave up its machine, where it may still run"
    assert ready.context().state.list_servers() == []


def test_a_removal_never_confirmed_stays_on_record(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_server, "GONE_DEADLINE_S", 0.3)
    ready.cloud.never_gone = True
    with pytest.raises(BusyError, match="has not confirmed") as caught:
        end(ready)
    assert caught.value.hint == "labctl down"
    assert len(ready.context().state.list_servers()) == 1
    ready.cloud.never_gone = False
    assert end(ready).removed
    assert ready.context().state.list_servers() == []


def test_what_something_else_holds_is_removed_once_that_lets_go(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_server, "FIRST_PAUSE_S", 0.01)
    ready.cloud.remove_errors = [BusyError("held"), ThrottledError("too fast"), BusyError("held")]
    disks = [
        Resource(provider="cloud", kind="disk", id=name, lab_id=LAB_ID) for name in ("d1", "d2")
    ]
    ready.cloud.left = [*disks]
    assert end(ready).leftovers == ()
    assert ready.cloud.remove_errors == []


def test_who_held_it_may_show_itself_before_the_next_try(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_server, "FIRST_PAUSE_S", 0.01)
    disk, late = (Resource(provider="cloud", kind="disk", id=name) for name in ("d1", "d2"))
    ready.cloud.left = [disk, late]
    ready.cloud.remove_errors = [BusyError("held")]
    shown: list[Resource] = [late, disk]
    end_server.remove_resources(ready.context(), [disk], lambda: shown)
    assert ready.cloud.left == []


def test_what_is_held_for_too_long_is_named(ready: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_server, "RELEASE_DEADLINE_S", 0.3)
    disk = Resource(provider="cloud", kind="disk", id="d1")
    ready.cloud.left = [disk]
    ready.cloud.remove_errors = [BusyError("held")] * 99
    with pytest.raises(BusyError, match="disk d1 could not be removed") as caught:
        end_server.remove_resources(ready.context(), [disk])
    assert "held" in caught.value.why
    assert caught.value.hint == "labctl orphans --terminate"
    ready.cloud.remove_errors = []
    end_server.remove_resources(ready.context(), [disk])
    assert ready.cloud.left == []


def test_what_is_left_is_listed(ready: World) -> None:
    ready.cloud.add("second", "digits", LAB_ID)
    ready.cloud.add("stranger", "digits", "ffffffffffff")
    disk = Resource(provider="cloud", kind="disk", id="d1", price_usd_per_month=2.0)
    ready.cloud.left.append(disk)
    ending = end(ready)
    assert [one.id for one in ending.servers_left] == ["second"]
    assert ending.leftovers == (disk,)
    assert ending.removed != "second"


def test_twice_is_once(ready: World) -> None:
    assert end(ready).removed
    assert end(ready) == DownResult()
    assert ready.cloud.calls.count("terminate") == 1


def spoil(lab: Path, size: int) -> None:
    """Change a byte of each file of this size among the results here, and let no time show it."""
    for path in (lab / "runs").rglob("*"):
        if path.is_file() and path.stat().st_size == size:
            before = path.stat()
            path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_result_that_was_spoiled_here_comes_again_before_the_server_goes(ready: World) -> None:
    ready.machine.run_with("night", **{"model.pt": "weights that took a night"})
    outputs.pull(ready.context(), ready.context().get_server(), [])
    spoil(ready.home / "lab", len("weights that took a night"))
    assert end(ready).pulled_files == 1
    here = ready.home / "lab/runs/night/checkpoints/model.pt"
    assert here.read_text() == "weights that took a night"
    assert ready.cloud.machines == {}


def test_a_result_that_the_disk_here_spoils_keeps_the_server(ready: World) -> None:
    ready.machine.run_with("night", **{"model.pt": "weights that took a night"})

    def on_event(event: Event) -> None:
        if isinstance(event, Progress) and event.name == "pull night" and event.done == event.total:
            spoil(ready.home / "lab", len("weights that took a night"))

    with pytest.raises(PolicyError, match="was not removed"):
        end(ready, Recorded(on_event=on_event))
    assert ready.cloud.calls == ["create", "stop"]
    assert not (ready.home / "lab/runs/night/checkpoints").exists()


def put_two_of_one_name(run: Path) -> None:
    (run / "scratch").mkdir()
    (run / "scratch" / "odd\x1b.bin").write_text("the only copy")
    (run / "scratch" / "odd%1B.bin").write_text("another one")


def put_broken_checkpoint(run: Path) -> None:
    (run / "scratch").mkdir()
    (run / "scratch" / "manifest.json").write_text('{"files": {"not-there": {"size": 1}}}')


def put_reserved_name(run: Path) -> None:
    (run / "run.json").write_text("the run's own")


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (put_two_of_one_name, r"runs/night/scratch/odd\x1b.bin"),
        (put_broken_checkpoint, "runs/night/scratch/manifest.json"),
        (put_reserved_name, "runs/night/run.json"),
    ],
)
def test_a_file_outside_the_outputs_that_could_not_come_keeps_the_server(
    ready: World, put: Callable[[Path], None], name: str
) -> None:
    run = ready.machine.run_with("night", **{"model.pt": "weights"})
    put(run)
    with pytest.raises(PolicyError, match="was not removed") as caught:
        end(ready)
    assert f"{name}: " in caught.value.why
    assert "its disk kept" in caught.value.why
    assert "labctl ssh" in caught.value.hint
    assert "labctl down --discard" in caught.value.hint
    assert ready.cloud.calls == ["create", "stop"]
    assert end(ready, discard=True).removed


@pytest.mark.parametrize("name", ["checkpoints/best.pt", "logs"])
def test_an_output_that_links_out_of_the_lab_keeps_the_server(ready: World, name: str) -> None:
    """Somebody moved them to a larger disk."""
    run = ready.machine.run_with("night", **{"model.pt": "weights"})
    elsewhere = ready.machine.home / "scratch" / "moved"
    elsewhere.parent.mkdir()
    place = run / name
    if place.is_dir():
        place.rmdir()
        elsewhere.mkdir()
    else:
        elsewhere.write_text("better weights")
    place.symlink_to(elsewhere)
    with pytest.raises(PolicyError, match="was not removed") as caught:
        end(ready)
    assert f"runs/night/{name}: a link to a path outside the lab" in caught.value.why
    assert ready.cloud.calls == ["create", "stop"]


def test_links_to_what_is_saved_or_not_there_keep_no_server(ready: World) -> None:
    run = ready.machine.run_with("night", **{"model.pt": "weights"})
    (run / "checkpoints" / "latest.pt").symlink_to("model.pt")
    (run / "checkpoints" / "gone.pt").symlink_to("/lab/run/checkpoints/model.pt")
    (run / "venv").mkdir()
    (run / "venv" / "python").symlink_to("/usr/bin/env")
    assert end(ready).removed


def test_what_a_notebook_saves_as_it_is_stopped_is_home(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ready.machine.home / "labctl" / "digits" / "code"
    ready.machine.run_with("night", **{"model.pt": "weights"})
    stop_service = lab_services.services.stop_service

    def stops(*about: Any, **more: Any) -> Any:
        code.mkdir(exist_ok=True)
        (code / "notes.ipynb").write_text("all of today's work")
        return stop_service(*about, **more)

    monkeypatch.setattr(lab_services.services, "stop_service", stops)
    assert end(ready).saved_edits == 1
    [saved] = (ready.home / "lab" / "server-edits").rglob("notes.ipynb")
    assert saved.read_text() == "all of today's work"


def test_files_with_odd_names_are_saved_and_keep_no_server(ready: World) -> None:
    run = ready.machine.run_with("night", **{"model.pt": "weights"})
    (run / "scratch").mkdir()
    (run / "scratch" / "two\nlines.bin").write_text("the only copy")
    code = ready.machine.home / "labctl" / "digits" / "code"
    code.mkdir(exist_ok=True)
    (code / "odd\x07.py").write_text("made there")
    assert end(ready).removed
    lab = ready.home / "lab"
    assert (lab / "runs/night/scratch/two%0Alines.bin").read_text() == "the only copy"
    [saved] = (lab / "server-edits").rglob("odd%07.py")
    assert saved.read_text() == "made there"


def test_what_is_no_output_by_its_name_keeps_no_server(ready: World) -> None:
    run = ready.machine.run_with("night", **{"model.pt": "weights"})
    for folder in (run / "checkpoints", run / "scratch"):
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "__pycache__" / "train.pyc").write_text("bytecode")
        (folder / ".nfs0001").write_text("removed, and open still")
    assert end(ready).removed


def test_every_request_of_down_has_a_line_on_the_screen(
    ready: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    unnamed: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Step):
            shown.remove(event.name) if event.done else shown.append(event.name)

    def watch(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def watched(*args: Any) -> Any:
            if not shown:
                unnamed.append(f"{name} {args[0] if args else ''}")
            return call(*args)

        monkeypatch.setattr(owner, name, watched)

    for name in ("find", "servers", "terminate", "leftovers"):
        watch(ready.cloud, name)
    watch(ready.machine, "_answer")
    ready.machine.run_with("night", **{"model.pt": "weights"})
    assert end(ready, Recorded(on_event=note)).pulled_files == 1
    # a download has a bar of its own
    assert [call for call in unnamed if "exec tar" not in call] == []
    assert shown == []
