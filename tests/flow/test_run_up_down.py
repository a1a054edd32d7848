"""run --up --down: what is checked before it costs, the order, and what each failure leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from lab_world import LAB_ID, Recorded, World, unreachable

from labctl import Lab, lifecycle
from labctl.cli import run_server
from labctl.cli.options import SCREEN
from labctl.cli.run_options import RunOptions
from labctl.cli.screen import Screen
from labctl.config import trust
from labctl.errors import (
    BuildError,
    ConnectError,
    InterruptError,
    LabError,
    NotFoundError,
    PolicyError,
    UsageError,
)
from labctl.events import Event, Step
from labctl.lifecycle import down, up
from labctl.lifecycle.run_server import end_unused
from labctl.lifecycle.status import read_status
from labctl.model import Forward, Run
from labctl.runs import runs
from labctl.servers import end_server, guard
from labctl.services import background_forwards
from labctl.state.uses import hold_use
from labctl.transports import Transport

NONE = RunOptions(
    detach=False,
    run_id="",
    tty=False,
    no_push=False,
    up=True,
    down=True,
    recover=False,
    keeper="",
    probe="",
    gpus=0,
    from_trial="",
    json_=False,
    command=(),
)
UP_ONLY = NONE._replace(down=False)
DOWN_ONLY = NONE._replace(up=False)


@dataclass
class Job:
    """One `labctl run`, whose run is a directory on the server; `work` is what it does there."""

    world: World
    reporter: Recorded = field(default_factory=Recorded)
    code: int = 0
    began: list[str] = field(default_factory=list)

    @property
    def lab(self) -> Lab:
        return Lab(self.world.context(self.reporter))

    def train(self, lab: Lab, started: list[Run]) -> Run:
        """A run `night` that ends at once and leaves a model."""
        self.began.append(lab.context.get_server().id)
        directory = self.world.machine.run_with("night", **{"model.pt": "weights"})
        record = json.loads((directory / ".labctl" / "record.json").read_text())
        record["exit_code"] = self.code
        (directory / ".labctl" / "record.json").write_text(json.dumps(record))
        runs.refresh(lab.context, lab.context.get_server())
        run = runs.find_run(lab.context, "night")
        started.append(run)
        return run

    def run(
        self,
        options: RunOptions = NONE,
        work: Callable[[Lab, list[Run]], Run | None] | None = None,
    ) -> int:
        lab, started = self.lab, list[Run]()
        with click.Context(click.Command("run")) as ctx:
            ctx.meta[SCREEN] = Screen()
            action = work or self.train
            return run_server.run_with_server(lab, options, started, lambda: action(lab, started))

    @property
    def model(self) -> str:
        file = self.world.home / "lab/runs/night/checkpoints/model.pt"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def job(lab: World) -> Job:
    return Job(lab)


def add_active_run(world: World, name: str) -> None:
    """A run of someone else that is active on the server."""
    directory = world.machine.run_with(name)
    record = {"id": name, "lab_id": LAB_ID, "state": "running"}
    (directory / ".labctl" / "record.json").write_text(json.dumps(record))


def fail(error: BaseException) -> Callable[[Lab, list[Run]], Run]:
    def work(lab: Lab, started: list[Run]) -> Run:
        raise error

    return work


# the order


def test_up_and_down_create_a_server_and_remove_it_after_the_pull(job: Job) -> None:
    job.code = 3
    events: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Step) and event.done and not event.brief:
            events.append(event.name.split(":")[0])

    job.reporter.on_event = note
    assert job.run() == 3
    assert job.world.cloud.calls == ["create", "terminate"]
    assert job.world.cloud.machines == {}
    assert job.model == "weights"
    assert events[0] == "creating a server"
    assert job.reporter.asked == [], "the price is 0, and --down is the consent"


def test_the_server_that_the_lab_has_is_used_and_ended(job: Job) -> None:
    server = up.up(job.lab.context)
    assert job.run() == 0
    assert job.began == [server.id]
    assert job.world.cloud.calls == ["create", "terminate"]


def test_up_alone_leaves_the_server_and_down_alone_needs_one(job: Job) -> None:
    with pytest.raises(NotFoundError):
        job.run(DOWN_ONLY)
    assert job.run(UP_ONLY) == 0
    assert list(job.world.cloud.machines) == job.began
    assert job.model == "", "nothing was pulled"
    assert job.run(DOWN_ONLY, lambda lab, started: None) == 0, "a probe was all"
    assert job.world.cloud.machines == {}
    assert job.model == "weights", "a probe that was all still brings everything home"


def test_after_a_move_the_new_server_is_ended(job: Job) -> None:
    def move(lab: Lab, started: list[Run]) -> Run:
        job.world.cloud.terminate(lab.context.get_server().id)
        up.up(job.lab.context)
        return job.train(lab, started)

    assert job.run(NONE, move) == 0
    assert job.world.cloud.calls == ["create", "terminate", "create", "terminate"]
    assert job.world.cloud.machines == {}
    assert job.model == "weights"


# before money is spent


def test_a_price_that_is_not_confirmed_starts_nothing(job: Job) -> None:
    job.world.cloud.price = 1.0
    job.reporter.answers = [False]
    with pytest.raises(PolicyError, match="nothing was started") as caught:
        job.run()
    assert caught.value.exit_code == 3
    assert (job.world.cloud.calls, job.began) == ([], [])
    assert job.reporter.asked[0].about == "price"


def break_files(world: World) -> None:
    (world.home / "lab" / "a\nb").write_text("")


def break_command(world: World) -> None:
    (world.home / "lab" / "lab.yaml").write_text("lab: digits\n")


def break_secret(world: World) -> None:
    (world.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: x\nsecrets: [TOKEN]\n")
    trust(world.places, world.context().config)


def break_data(world: World) -> None:
    (world.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: x\ndata: {birds: ./none}\n")


def break_dockerfile(world: World) -> None:
    (world.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: x\nimage: {build: none}\n")


@pytest.mark.parametrize(
    ("spoil", "options"),
    [
        (break_files, NONE),
        (break_command, NONE),
        (break_secret, NONE),
        (break_data, NONE),
        (break_dockerfile, NONE),
        (lambda world: None, NONE._replace(run_id="BAD NAME")),
        (lambda world: None, UP_ONLY._replace(run_id="BAD NAME")),
    ],
)
def test_an_invalid_run_is_refused_before_a_server_exists(
    job: Job, spoil: Callable[[World], None], options: RunOptions
) -> None:
    job.world.cloud.price = 1.0
    spoil(job.world)
    with pytest.raises(LabError):
        job.run(options)
    assert (job.world.cloud.tried, job.reporter.asked) == ([], [])


def test_an_unreadable_file_is_reported_before_a_server_exists(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.world.home / "lab" / "secret.txt").write_text("x")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("secret.txt"))
    with pytest.raises(UsageError, match="cannot read"):
        job.run()
    assert job.world.cloud.tried == []


def test_ignored_files_are_named_before_a_server_exists(job: Job) -> None:
    root = job.world.home / "lab"
    (root / "data").mkdir()
    (root / "data" / "train.bin").write_text("x")
    (root / ".gitignore").write_text("*.bin\n")
    (root / "train.py").write_text("open('data/train.bin')\n")
    job.world.cloud.price = 1.0
    job.reporter.answers = [False]  # to the price
    with pytest.raises(LabError):
        job.run(NONE)
    assert job.world.cloud.tried == []
    assert "left out by ignore rules: data/ (1 file" in job.reporter.said


def test_a_run_that_has_ended_is_not_paid_for_twice(job: Job) -> None:
    assert job.run() == 0
    with pytest.raises(UsageError, match="already ended") as caught:
        job.run(NONE._replace(run_id="night"))
    assert "labctl pull night" in caught.value.hint
    assert job.world.cloud.calls == ["create", "terminate"]


def test_a_run_that_ended_with_its_server_is_not_paid_for_twice(job: Job) -> None:
    """A watchdog has ended the server, and this machine has not noticed yet."""
    assert job.run(UP_ONLY) == 0
    (server_id,) = job.world.cloud.machines
    job.world.cloud.terminate(server_id)
    with pytest.raises(UsageError, match="already ended"):
        job.run(NONE._replace(run_id="night"))
    assert job.world.cloud.calls == ["create", "terminate"]


# who else uses the server


def test_a_server_that_does_not_answer_is_not_stopped_under_another_run(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(lab: Lab, started: list[Run]) -> Run:
        add_active_run(job.world, "other")
        run = job.train(lab, started)
        job.world.machine.error = unreachable()
        return run

    assert job.run(NONE, work) == 255
    assert job.world.cloud.calls == ["create"]
    assert "other is still running on it" in capsys.readouterr().err


def test_a_server_that_somebody_started_since_stays(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(lab: Lab, started: list[Run]) -> Run:
        run = job.train(lab, started)
        down.down(job.lab.context, discard=False, consent=lambda *_: None)
        up.up(job.lab.context)
        return run

    job.run(NONE, work)
    assert job.world.cloud.calls == ["create", "terminate", "create"]
    assert "this is a new server" in capsys.readouterr().err


def test_another_active_run_keeps_the_server(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    def work(lab: Lab, started: list[Run]) -> Run:
        add_active_run(job.world, "other")
        return job.train(lab, started)

    assert job.run(NONE, work) == 0
    assert job.world.cloud.calls == ["create"]
    assert job.model == "weights", "the results of its own run are here"
    told = capsys.readouterr().err
    assert "other is still running on it" in told
    assert "labctl down" in told


def test_the_last_of_two_ends_the_server(job: Job) -> None:
    """Another `labctl run` that pushes has no run yet; after it ends, its own --down ends all."""
    with hold_use(job.lab.context.state, LAB_ID, "run"):
        assert job.run() == 0
        assert job.world.cloud.calls == ["create"]
    assert job.run(NONE, lambda lab, started: None) == 0
    assert job.world.cloud.calls == ["create", "terminate"]


def test_two_at_once_end_it_once_and_both_succeed(job: Job) -> None:
    up.up(job.lab.context)
    together = threading.Barrier(2)
    removed: list[str] = []

    def end() -> None:
        context = job.world.context()
        together.wait(10)
        removed.append(end_unused(context, is_own=False).removed)

    threads = [threading.Thread(target=end) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert job.world.cloud.calls == ["create", "terminate"]
    assert sorted(map(bool, removed)) == [False, True]


@pytest.mark.parametrize("existed", [True, False])
def test_a_forward_keeps_a_server_that_others_started(
    job: Job, existed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if existed:
        up.up(job.lab.context)
    with hold_use(job.lab.context.state, LAB_ID, "forward"):
        assert job.run() == 0
    assert ("terminate" in job.world.cloud.calls) != existed
    assert ("is open in a terminal" in capsys.readouterr().err) == existed


def test_a_background_forward_keeps_it_too(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = up.up(job.lab.context)
    monkeypatch.setattr(background_forwards, "is_ours", lambda forward: True)
    forward = Forward(
        id="f1", server_id=server.id, service="tensorboard", local_port=6006, remote_port=6006,
        url="http://127.0.0.1:6006/", pid=os.getpid(), created_at=0.0,
    )  # fmt: skip
    job.lab.context.state.save_forward(forward)
    assert job.run() == 0
    assert job.world.cloud.calls == ["create"]
    assert "tensorboard" in capsys.readouterr().err


# failures

# the hint of a build; the log is gone with the server
SHOW_LOG = "labctl ssh -- cat /srv/none.log   # the full log"


def test_a_failed_build_ends_the_server_that_the_command_created(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(transport: Transport, source: str, target: Path, reporter: Recorded) -> None:
        target.write_text("Step 3/4 : RUN false")

    monkeypatch.setattr(lifecycle.run_server, "download_file", download)
    repair = "write in lab.yaml image: {python: 3.11}, then:"
    error = BuildError(
        "the image build failed",
        log_path="/srv/none.log",
        why="Step 3/4",
        hint=f"{repair}\nlabctl run\n{SHOW_LOG}",
    )
    with pytest.raises(BuildError) as caught:
        job.run(NONE, fail(error))
    assert job.world.cloud.calls == ["create", "terminate"]
    copy = job.world.places.log_dir / "build-none.log"
    assert caught.value.hint.splitlines() == [
        repair,
        "labctl run --up --down",
        f"less {copy}   # the full log",
    ]
    assert copy.read_text() == "Step 3/4 : RUN false"
    assert "Step 3/4" in caught.value.why
    assert "--down removed srv-" in capsys.readouterr().err


def test_a_build_log_that_cannot_be_saved_keeps_no_server(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object) -> None:
        raise ConnectError("cut")

    monkeypatch.setattr(lifecycle.run_server, "download_file", download)
    with pytest.raises(BuildError) as caught:
        job.run(NONE, fail(BuildError("no", log_path="/srv/none.log", hint=SHOW_LOG)))
    assert job.world.cloud.calls == ["create", "terminate"]
    assert caught.value.hint == "fix the Dockerfile, then:\nlabctl run --up --down"


@pytest.mark.parametrize("error", [UsageError("no"), ConnectError("cut"), ZeroDivisionError()])
def test_a_failed_start_removes_only_the_commands_own_server(job: Job, error: Exception) -> None:
    up.up(job.lab.context)
    with pytest.raises(type(error)):
        job.run(NONE, fail(error))
    assert job.world.cloud.calls == ["create"], "it existed before"
    down.down(job.lab.context, discard=False)
    with pytest.raises(type(error)):
        job.run(NONE, fail(error))
    assert job.world.cloud.calls[-2:] == ["create", "terminate"]


def test_without_down_a_failure_names_what_still_costs(job: Job) -> None:
    job.world.cloud.price = 1.0
    with pytest.raises(UsageError) as caught:
        job.run(UP_ONLY, fail(UsageError("no")))
    assert "is still running" in caught.value.why
    assert "labctl down" in caught.value.why
    assert job.world.cloud.calls == ["create"]


def test_a_server_that_does_not_become_ready_is_ended(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arm(*args: object, **options: object) -> None:
        raise LabError("the watchdog did not start")

    monkeypatch.setattr(guard, "arm", arm)
    job.world.cloud.price = 1.0
    with pytest.raises(LabError, match="watchdog") as caught:
        job.run()
    assert job.world.cloud.calls == ["create", "terminate"]
    assert "still running" not in caught.value.why
    with pytest.raises(LabError, match="watchdog") as caught:
        job.run(UP_ONLY)
    assert "still running" in caught.value.why


@pytest.mark.parametrize(("code", "exit_code"), [(0, 255), (3, 3)])
def test_a_failed_removal_is_reported_and_keeps_the_exit_code(
    job: Job, code: int, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job.code = code

    def work(lab: Lab, started: list[Run]) -> Run:
        run = job.train(lab, started)
        job.world.machine.error = unreachable()
        return run

    assert job.run(NONE, work) == exit_code
    assert job.world.cloud.calls == ["create", "stop"], "never the only copy"
    told = capsys.readouterr().err
    assert "was not removed: not everything on it could be saved" in told
    assert "its disk kept" in told
    assert "next: labctl up && labctl pull\n        labctl down --discard\n" in told


def test_a_server_that_is_not_removed_is_reported(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_server, "GONE_DEADLINE_S", 0.3)
    job.world.cloud.price = 1.0
    job.world.cloud.never_gone = True
    assert job.run() == 255
    told = capsys.readouterr().err
    assert "has not confirmed" in told
    assert "labctl down" in told
    assert job.model == "weights"


def test_json_is_one_object(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert job.run(NONE._replace(json_=True)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"]["id"] == "night"
    assert told["down"]["removed"].startswith("srv-")
    assert told["down"]["pulled_files"] == 1
    assert (told["kept"], told["error"]) == ("", "")


# interruptions


@pytest.fixture
def hangup_is_heeded() -> Iterator[None]:
    """Undo `nohup`, under which labctl ignores SIGHUP, as it should."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_is_heeded")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_run_leaves_the_server_and_says_so(
    job: Job, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(one) for one in run_server.END_SIGNALS]

    def work(lab: Lab, started: list[Run]) -> Run:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal comes first")

    job.world.cloud.price = 0.5
    with pytest.raises(click.exceptions.Exit) as caught:
        job.run(NONE, work)
    assert caught.value.exit_code == 130
    assert job.world.cloud.calls == ["create"]
    told = capsys.readouterr().err
    assert "$0.50/h" in told or "0.50" in told
    assert "labctl down" in told
    assert before == [signal.getsignal(one) for one in run_server.END_SIGNALS]
    recorded = read_status(job.lab.context, refresh=False).interrupted_down
    assert recorded.why == ("Ctrl-C" if number == signal.SIGINT else number.name)
    down.down(job.lab.context, discard=False)
    assert read_status(job.lab.context, refresh=False).interrupted_down is None


def test_a_lost_terminal_is_no_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    up.up(job.lab.context)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as gone, click.Context(click.Command("run")) as ctx:
        ctx.meta[SCREEN] = Screen()
        monkeypatch.setattr(sys, "stderr", gone)
        run_server.note_interrupt(job.lab, "night", run_server.SignalInterrupt("SIGHUP"))
        click.echo("written nowhere", err=True)
    recorded = read_status(job.lab.context, refresh=False).interrupted_down
    assert (recorded.run, recorded.why) == ("night", "SIGHUP")


@pytest.mark.usefixtures("hangup_is_heeded")
def test_a_terminal_that_closes_below_a_progress_bar_leaves_the_server(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    up.up(job.lab.context)
    master, slave = os.openpty()

    def work(lab: Lab, started: list[Run]) -> Run:
        screen = click.get_current_context().meta[SCREEN]
        screen.emit(Step(name="waiting for first output"))
        try:
            os.close(master)
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            screen.emit(Step(name="waiting for first output", done=True))
        raise AssertionError("the signal comes first")

    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(click.exceptions.Exit) as caught:
            job.run(NONE, work)
    assert caught.value.exit_code == 130
    recorded = read_status(job.lab.context, refresh=False).interrupted_down
    assert (recorded.run, recorded.why) == ("", "SIGHUP")
    assert job.world.cloud.calls == ["create"]


def test_ctrl_c_while_the_server_starts_is_recorded(job: Job) -> None:
    job.world.cloud.interrupt_after_create = True
    with pytest.raises(InterruptError):
        job.run()


def test_ctrl_c_while_the_server_ends(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    def work(lab: Lab, started: list[Run]) -> Run:
        run = job.train(lab, started)

        def interrupt(event: Event) -> None:
            raise KeyboardInterrupt

        job.reporter.on_event = interrupt
        return run

    with pytest.raises(click.exceptions.Exit) as caught:
        job.run(NONE, work)
    assert caught.value.exit_code == 130
    assert "labctl down" in capsys.readouterr().err
    assert job.world.cloud.calls == ["create"]


def test_ctrl_c_while_the_server_ends_after_a_failure(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle.run_server, "end_unused", end)
    job.world.cloud.price = 1.0
    with pytest.raises(UsageError, match="no") as caught:
        job.run(NONE, fail(UsageError("no")))
    assert "is still running" in caught.value.why
    assert "was interrupted (Ctrl-C)" in capsys.readouterr().err
    assert read_status(job.lab.context, refresh=False).interrupted_down.why == "Ctrl-C"


def test_a_signal_that_is_ignored_stays_ignored(job: Job) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        def work(lab: Lab, started: list[Run]) -> Run:
            os.kill(os.getpid(), signal.SIGHUP)
            return job.train(lab, started)

        assert job.run(NONE, work) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
