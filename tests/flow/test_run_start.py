"""Starting a run: exactly once, whatever the wire does, and secrets only on standard input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from lab_world import LAB_ID, Labctl, Recorded, World, unreachable

from labctl import Lab
from labctl.agent import reply
from labctl.config import load_lab, set_secret, trust
from labctl.errors import ConnectError, LabError, LinkLostError, PolicyError, UsageError
from labctl.lifecycle import follow as follow_flow
from labctl.lifecycle import recover, up
from labctl.model import Endpoint, Run, Server
from labctl.runs import images, run_specs, runs
from labctl.servers.context import LabContext
from labctl.transports import Result
from labctl.wire.runs import RunSpec

IMAGE = "labctl-tests/no-such-image:1"
RUNNING = {"id": "night", "lab_id": LAB_ID, "state": "running", "command": ["python"]}
DONE = {**RUNNING, "state": "exited", "exit_code": 0, "told": "done"}
STARTED = {"run": RUNNING, "found": False}
MISSING = {"missing": IMAGE}


@dataclass
class Turn:
    """One call of the program: its first reply, the bytes after it, then a closing or an error."""

    first: dict[str, Any] | None = None
    data: bytes = b""
    end: dict[str, Any] | LabError = field(default_factory=dict)


ABSENT = Turn({"ids": {IMAGE: ""}})


@dataclass
class Wire:
    """A server that answers in turns; what was asked is in `asked` as (verb, request)."""

    turns: list[Turn]
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(host="fake.example"))
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def transport(self, server_id: str = "") -> Wire:
        return self

    def stream(
        self,
        line: object,
        *,
        stdin: bytes = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        turn = self._next(str(line), stdin)
        if turn.first is not None:
            on_stdout(reply.encode_line(turn.first) + turn.data)
        if isinstance(turn.end, LabError):
            raise turn.end
        assert on_stderr
        on_stderr(reply.encode_line(turn.end))
        return 0

    def run(self, line: object, *, stdin: bytes = b"", **_: object) -> Result:
        turn = self._next(str(line), stdin)
        if isinstance(turn.end, LabError):
            raise turn.end
        return Result(code=0, stdout=reply.encode_line(turn.first or {}).decode())

    def close(self) -> None:
        pass

    def _next(self, line: str, stdin: bytes) -> Turn:
        self.lines.append(line)
        self.asked.append((line.split()[-1], json.loads(stdin.split(b"\n")[0])))
        return self.turns.pop(0)


@dataclass
class Started:
    """The lab with a server, a run about to start, and what came of it."""

    lab: World
    server: Server
    wanted: RunSpec
    began: list[tuple[str, bool]] = field(default_factory=list)
    log: bytearray = field(default_factory=bytearray)
    reporter: Recorded = field(default_factory=Recorded)

    def context(self, wire: Wire) -> LabContext:
        made = self.lab.context(self.reporter)
        made.connections.__dict__["machine"] = wire
        return made

    def start(self, *turns: Turn, follow: bool = True) -> tuple[Run, Wire]:
        wire = Wire([*turns])
        run = runs.start(
            self.context(wire),
            self.server,
            self.wanted,
            follow=follow,
            on_start=lambda run, found: self.began.append((run.id, found)),
            on_log=self.log.extend,
        )
        assert wire.turns == []
        return run, wire


@pytest.fixture
def started(lab: World) -> Started:
    (lab.home / "lab" / "lab.yaml").write_text(f"lab: digits\nrun: [python]\nimage: {IMAGE}\n")
    context = lab.context()
    server = up.up(context)
    return Started(lab, server, run_specs.build_spec(context, server, (), "night", False))


def test_followed_to_its_end_in_one_round_trip(started: Started) -> None:
    run, wire = started.start(Turn(STARTED, b"epoch 1\n", {"run": DONE}))
    assert (run.state, run.exit_code, run.server_id) == ("exited", 0, started.server.id)
    assert started.began == [("night", False)]
    assert started.log == b"epoch 1\n"
    ((verb, request),) = wire.asked
    assert (verb, request["spec"]["image"], request["secrets"]) == ("run", IMAGE, {})
    assert started.lab.context().state.get_run(LAB_ID, "night") == run


def test_the_ledger_keeps_once_how_a_run_came_about(started: Started) -> None:
    wanted = started.wanted
    started.wanted = wanted._replace(env={"SEED": "1", "API_KEY": "hunter2"})
    for found in (False, True):
        started.start(Turn({**STARTED, "found": found}, b"", {"run": DONE}))
    state = started.lab.context().state
    (line,) = state.list_events(run_id="night", kind="code")
    assert line.server_id == started.server.id
    assert (line.detail["command"], line.detail["image"]) == (["python"], IMAGE)
    assert line.detail["env"] == {"SEED": "1", "API_KEY": "hidden"}
    assert (line.detail["commit"], line.detail["dirty"]) == ("", None)
    assert line.detail["why"] == "the lab is not in a git repository"


def test_the_ledger_keeps_the_code_that_was_pushed_before_a_run(
    run_lab: World, labctl: Labctl
) -> None:
    root = run_lab.context().config.root
    for run_id, text in (("one", "lr = 1"), ("two", "lr = 2"), ("three", "lr = 2")):
        (root / "train.py").write_text(text)
        assert labctl(run_lab, "run", "--id", run_id).code == 0
        (root / "runs" / run_id).mkdir(parents=True)
    assert "The pushed code differs: train.py.\n" in labctl(run_lab, "compare", "one", "two").out
    assert "The pushed code is the same.\n" in labctl(run_lab, "compare", "two", "three").out


def test_the_ledger_keeps_what_a_server_is_made_of(started: Started) -> None:
    *_, line = started.lab.context().state.list_events(server_id=started.server.id, kind="ready")
    assert set(line.detail) >= {"cpus", "memory_bytes", "gpus", "os", "kernel", "docker"}


def test_detached(started: Started) -> None:
    run, wire = started.start(Turn({**STARTED, "found": True}), follow=False)
    assert [verb for verb, _ in wire.asked] == ["start"]
    assert run.state == "running"
    assert started.began == [("night", True)]


def test_a_wire_dead_before_the_answer_is_an_error_and_asks_nothing_twice(
    started: Started,
) -> None:
    for follow in (True, False):
        with pytest.raises(ConnectError):
            started.start(Turn(end=unreachable()), follow=follow)
    assert started.began == []
    assert started.lab.context().state.list_runs() == []


def test_a_wire_cut_later_resumes_at_the_byte_where_it_was_cut(started: Started) -> None:
    run, wire = started.start(
        Turn(STARTED, b"epoch 1\nepo", LinkLostError("cut")),
        Turn(end=unreachable()),
        Turn({"run": RUNNING, "offset": 11}, b"ch 2\n", LinkLostError("cut")),
        Turn({"run": RUNNING, "offset": 16}, b"epoch 3\n", {"run": DONE}),
    )
    assert started.log == b"epoch 1\nepoch 2\nepoch 3\n"
    assert started.began == [("night", False)]
    assert [verb for verb, _ in wire.asked] == ["run", "follow", "follow", "follow"]
    assert [request["offset"] for _, request in wire.asked[1:]] == [11, 11, 16]
    assert run.summary == "done"
    assert "reconnecting in 0.5 s" in started.reporter.said


def test_an_image_that_is_not_there_is_fetched_and_the_run_started_once(started: Started) -> None:
    _, wire = started.start(
        Turn(MISSING, end=MISSING),
        ABSENT,
        Turn({}, end={"code": 0, "tail": []}),
        Turn(STARTED, b"", {"run": DONE}),
    )
    assert [verb for verb, _ in wire.asked] == ["run", "image", "pull-image", "run"]
    assert wire.asked[2][1] == {"reference": IMAGE, "tag": ""}
    assert wire.asked[0] == wire.asked[3]
    assert started.began == [("night", False)]


def test_an_image_that_another_process_has_just_brought_is_not_fetched_again(
    started: Started,
) -> None:
    present = Turn({"ids": {IMAGE: "sha256:1"}})
    _, wire = started.start(Turn(MISSING, end=MISSING), present, Turn(STARTED, b"", {"run": DONE}))
    assert [verb for verb, _ in wire.asked] == ["run", "image", "run"]


def test_an_image_that_cannot_be_had(started: Started) -> None:
    no = {"code": 1, "tail": ["a", "b", "c", "manifest unknown"]}
    with pytest.raises(LabError, match="cannot pull") as caught:
        started.start(Turn(MISSING, end=MISSING), ABSENT, Turn({}, end=no))
    assert re.fullmatch(r"lab.yaml.* names it\nb\nc\nmanifest unknown", caught.value.why)
    assert caught.value.hint.startswith(f"docker pull {IMAGE} ")
    made = Turn({}, end={"code": 0, "tail": []})
    fetched = [Turn(MISSING, end=MISSING), ABSENT, made]
    with pytest.raises(LabError, match="although it was just built"):
        started.start(*fetched, *fetched)
    assert started.began == []


def test_secrets_go_by_standard_input_and_only_with_approval(started: Started) -> None:
    lab = started.lab
    yaml = lab.home / "lab" / "lab.yaml"
    yaml.write_text(yaml.read_text() + "secrets: [TOKEN]\n")
    with pytest.raises(PolicyError, match="was not approved"):
        started.start()
    trust(lab.places, load_lab(yaml, environ={"HOME": str(lab.home)}))
    set_secret(lab.places, LAB_ID, "TOKEN", "hunter2")
    _, wire = started.start(Turn(STARTED, b"", {"run": DONE}))
    assert wire.asked[0][1]["secrets"] == {"TOKEN": "hunter2"}
    assert "hunter2" not in " ".join(wire.lines)
    assert b"hunter2" not in lab.places.database.read_bytes()
    assert "hunter2" not in json.dumps(wire.asked[0][1]["spec"])


def test_cancel_says_whether_it_had_ended_before(started: Started) -> None:
    ended = {**DONE, "state": "cancelled", "told": "canceled (SIGTERM)"}
    wire = Wire([Turn({"run": ended, "already": False}), Turn({"run": ended, "already": True})])
    context = started.context(wire)
    assert [runs.cancel(context, started.server, "night", 5)[1] for _ in range(2)] == [False, True]
    assert wire.asked[0][1] == {
        "lab": "digits",
        "lab_id": LAB_ID,
        "run": "night",
        "grace_s": 5,
        "reason": "",
        "moves": False,
    }
    known = context.state.get_run(LAB_ID, "night")
    assert known is not None
    assert known.state == "cancelled"


def test_what_a_pull_brings_does_not_make_another_image(started: Started) -> None:
    directory = started.lab.home / "lab"
    (directory / "lab.yaml").write_text("lab: digits\n")
    (directory / "Dockerfile").write_text("FROM base\nCOPY . /x\n")
    context = started.lab.context()
    before = images.image_reference(context)
    assert before.startswith("labctl/built:")
    for name in ("runs", "server-edits", ".labctl"):
        (directory / name / "night").mkdir(parents=True)
        (directory / name / "night" / "model.pt").write_text("weights")
    assert images.image_reference(context) == before
    (directory / "train.py").write_text("changed")
    assert images.image_reference(context) != before


class UnfinishedRun:
    """A lab whose run `night` has lost its server, and how often its recovery began."""

    def __init__(self, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = started
        started.start(Turn(STARTED), follow=False)
        self.lab = Lab(started.context(Wire([])))
        self.followed: list[str] = []
        monkeypatch.setattr(recover, "is_unfinished", lambda context, run_id: run_id == "night")
        monkeypatch.setattr(follow_flow, "follow", self._follow)
        monkeypatch.setattr(self.lab, "require_approval", lambda: None)

    def _follow(self, context: LabContext, run_id: str, **_: object) -> Run:
        self.followed.append(run_id)
        return runs.find_run(context, run_id)

    def run(self, *command: str) -> None:
        self.lab.run(
            command,
            id="night",
            follow=True,
            recover=True,
            on_start=lambda run, found: self.started.began.append((run.id, found)),
        )


def test_an_unfinished_run_is_followed_again_and_named(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = UnfinishedRun(started, monkeypatch)
    started.began.clear()
    night.run()
    night.run("python")
    assert (night.followed, started.began) == (["night"] * 2, [("night", True)] * 2)


def test_an_unfinished_run_gets_no_other_command(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = UnfinishedRun(started, monkeypatch)
    with pytest.raises(UsageError, match="its command is different") as refused:
        night.run("python", "other.py")
    assert "labctl run --recover --id night " in refused.value.hint
    assert "labctl run -- python other.py " in refused.value.hint
    assert night.followed == []
