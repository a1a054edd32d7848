"""The first run on a server: code, data and the image side by side, and what ends them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from lab_world import LAB_ID, Labctl, Machine, Recorded, World, world

from labctl import Lab
from labctl.agent import reply
from labctl.config import ImageConfig
from labctl.errors import BuildError, LinkLostError, LockHeldError, PolicyError
from labctl.events import Event, Note, Part
from labctl.lifecycle import up
from labctl.parallel import on_cancel
from labctl.runs import first_run
from labctl.runs.environment import read_dockerfile
from labctl.sync import lab_files
from labctl.sync.transfer_lock import hold_transfers
from labctl.transports import Result

LONG_S = 30.0
DONE = {"id": "first", "lab_id": LAB_ID, "state": "exited", "exit_code": 0, "told": "done"}
OK = {"code": 0, "tail": []}


def keep_going() -> None:
    return


class Engine(Machine):
    """Files are real. Images exist once they are built or pulled; runs end at once.

    `on_build`, `on_data`, `on_pull` and `on_start` are called as the server begins with it.
    """

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.images: set[str] = set()
        self.verbs: list[str] = []
        self.on_build: Callable[[], None] = keep_going
        self.on_data: Callable[[], None] = keep_going
        self.on_pull: Callable[[], None] = keep_going
        self.on_start: Callable[[], None] = keep_going
        self.build_code = 0
        self.build_tail = ["no space"]
        self.code_at_build: list[str] = []
        self.guard = threading.Lock()

    @property
    def lab(self) -> Path:
        return self.home / "labctl" / "digits"

    def _answer(self, line: str, stdin: bytes) -> Result:
        verb = line.split()[-1]
        request = json.loads(stdin) if stdin.startswith(b"{") else {}
        self.verbs.append(verb)
        if verb == "image":
            ids = {name: name if name in self.images else "" for name in request["references"]}
            return Result(code=0, stdout=encode({"ids": ids}))
        if verb in ("build", "pull-image"):
            return self._make_image(verb, request)
        if verb in ("run", "start"):
            return self._start(verb, request["spec"])
        if request.get("target", "").startswith("data/"):
            self.on_data()
        return super()._answer(line, stdin)

    def _make_image(self, verb: str, request: dict[str, str]) -> Result:
        if verb == "build":
            code = self.lab / "code"
            self.code_at_build = sorted(p.name for p in code.iterdir()) if code.is_dir() else []
        (self.on_build if verb == "build" else self.on_pull)()
        if not self.build_code:
            self.images.add(request.get("tag") or request["reference"])
        end = {"code": self.build_code, "tail": self.build_tail, "log": "build.log"}
        return Result(code=0, stdout=encode({"log": "build.log"}), stderr=encode(end))

    def _start(self, verb: str, spec: dict[str, str]) -> Result:
        self.on_start()
        if spec["image"] not in self.images:
            missing = encode({"missing": spec["image"]})
            return Result(code=0, stdout=missing, stderr=missing)
        run = {**DONE, "id": spec["id"], "image": spec["image"]}
        began = encode({"run": run, "found": False})
        return Result(code=0, stdout=began, stderr=encode({"run": run}))


def encode(message: dict[str, object]) -> str:
    return reply.encode_line(message).decode()


def wait_for(event: threading.Event) -> None:
    """As a transport waits for the server: the end of its part ends it too."""
    with on_cancel(event.set):
        assert event.wait(LONG_S)


def wait_for_cancel() -> None:
    wait_for(threading.Event())
    raise LinkLostError("the process was ended")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "machine")


@pytest.fixture
def lab(tmp_path: Path, engine: Engine) -> World:
    """A ready server without an image, and a lab with code, data and a Dockerfile."""
    made = replace(world(tmp_path), machine=engine)
    root = made.home / "lab"
    (root / "lab.yaml").write_text(
        "lab: digits\nrun: [python]\nimage: {build: .}\ndata: {digits: ./dataset}\n"
    )
    (root / "Dockerfile").write_text("FROM scratch\n")
    (root / "train.py").write_text("print('epoch 1')\n")
    (root / "dataset").mkdir()
    (root / "dataset" / "one.bin").write_bytes(b"x" * 4096)
    (root / ".labignore").write_text("/dataset/\n")
    up.up(made.context())
    engine.verbs.clear()
    return made


def use_pulled_image(lab: World) -> None:
    file = lab.home / "lab" / "lab.yaml"
    file.write_text(file.read_text().replace("{build: .}", "labctl-tests/no-such-image:1"))


def run(lab: World, reporter: Recorded | None = None, run_id: str = "first") -> str:
    """As a new process would; returns the state of the run."""
    made = Lab(lab.context(reporter)).run(id=run_id, follow=True)
    return made.last_known.state


def test_a_build_waits_for_the_code_and_not_for_the_data(lab: World, engine: Engine) -> None:
    building = threading.Event()
    engine.on_build = building.set
    engine.on_data = lambda: wait_for(building)
    assert run(lab) == "exited"
    assert engine.code_at_build == [".labignore", "Dockerfile", "lab.yaml", "train.py"]
    assert engine.verbs[-1] == "run", "the request comes when all is there, and only once"
    assert engine.verbs.count("run") == 1
    assert (engine.lab / "data/digits/one.bin").stat().st_size == 4096


def test_an_image_that_is_pulled_waits_for_nothing(lab: World, engine: Engine) -> None:
    use_pulled_image(lab)
    pulling = threading.Event()
    engine.on_pull = pulling.set
    engine.on_data = lambda: wait_for(pulling)
    assert run(lab) == "exited"


def test_an_image_that_is_on_the_server_is_not_made_again(lab: World, engine: Engine) -> None:
    use_pulled_image(lab)
    engine.images.add("labctl-tests/no-such-image:1")
    assert run(lab) == "exited"
    assert "pull-image" not in engine.verbs


def test_a_later_run_asks_for_no_image_and_still_gets_a_missing_one(
    lab: World, engine: Engine
) -> None:
    run(lab)
    engine.verbs.clear()
    run(lab, run_id="second")
    assert sorted(engine.verbs) == ["plan", "plan", "run"]
    engine.verbs.clear()
    engine.images.clear()
    assert run(lab, run_id="third") == "exited"
    assert engine.verbs[-4:] == ["run", "image", "build", "run"]


def test_a_failed_build_stops_the_data_and_nothing_half_made_is_used(
    lab: World, engine: Engine
) -> None:
    engine.build_code = 1
    engine.on_data = wait_for_cancel
    with pytest.raises(BuildError, match="the image build failed"):
        run(lab)
    assert "run" not in engine.verbs
    assert not (engine.lab / "data/digits").exists()
    engine.build_code, engine.on_data = 0, keep_going
    assert run(lab) == "exited"


def test_the_timings_of_a_run_whose_image_build_fails_are_printed(
    lab: World, engine: Engine, labctl: Labctl
) -> None:
    engine.build_code = 1
    output = labctl(lab, "run", "--timings")
    assert output.code == 255
    table, _, error = output.err.partition("labctl: the image build failed")
    assert error
    rows = table[table.index("part  ") :].splitlines()[1:]
    assert {row.split()[0] for row in rows} >= {"code", "image", "total"}
    assert "part  " not in labctl(lab, "run").err


def test_a_build_without_the_python_of_lab_yaml_names_the_one_of_the_base(
    lab: World, engine: Engine
) -> None:
    file = lab.home / "lab" / "lab.yaml"
    file.write_text(file.read_text().replace("build: .", "requirements: requirements.txt"))
    (lab.home / "lab" / "requirements.txt").write_text("numpy\n")
    dockerfile = read_dockerfile(ImageConfig(requirements="requirements.txt"))
    [printed] = [line for line in dockerfile.splitlines() if "This base image has" in line]
    words = printed.replace("$(python3 -V)", "Python 3.11.2").replace("${PYTHON}", "3.12")
    engine.build_code = 1
    for number in ("", "#9 0.412 "):  # of BuildKit
        engine.build_tail = [printed, number + words.partition('"')[2].partition('"')[0], "exit 1"]
        with pytest.raises(BuildError) as failed:
            run(lab)
        assert failed.value.hint.split("\n")[:-1] == [
            "write this line in lab.yaml:",
            'image: {python: "3.11", requirements: requirements.txt}',
            "then:",
            "labctl run",
        ]
    engine.build_tail = ["no space"]
    with pytest.raises(BuildError) as failed:
        run(lab)
    assert failed.value.hint.startswith("labctl ssh -- cat build.log")


UV_MISSES = (
    "#19 2.412 Using Python 3.11.2 environment at: /opt/venv",
    "#19 2.431 error: No solution found when resolving dependencies",
    "#19 2.431   cause: Because tabulate was not found in the provided package locations and you",
)
PIP_MISSES = ("ERROR: No matching distribution found for tabulate>=0.9",)
PLATFORMS = " ".join(
    f"--platform {tag}_riscv64" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
)


@pytest.mark.parametrize(
    ("build", "tail", "version", "options"),
    [
        (
            "requirements: requirements.txt",
            UV_MISSES,
            "Python 3.11",
            f"--python-version 3.11 {PLATFORMS} --only-binary=:all: -r requirements.txt",
        ),
        (
            "build: .",
            PIP_MISSES,
            "the image's version of Python",
            f"{PLATFORMS} --only-binary=:all: 'tabulate>=0.9'",
        ),
    ],
    ids=["uv", "pip"],
)
def test_a_wheel_that_is_missing_is_named_with_the_command_that_downloads_it(
    lab: World, engine: Engine, build: str, tail: tuple[str, ...], version: str, options: str
) -> None:
    wheels = lab.home / "my wheels"
    wheels.mkdir()
    lab.places.config_dir.mkdir(parents=True, exist_ok=True)
    (lab.places.config_dir / "config.yaml").write_text(f"wheelhouse: {wheels}\n")
    file = lab.home / "lab" / "lab.yaml"
    file.write_text(file.read_text().replace("build: .", build))
    (lab.home / "lab" / "requirements.txt").write_text("tabulate\n")
    context = lab.context()
    facts = context.load_facts(context.get_server())
    context.save_facts(context.get_server(), msgspec.structs.replace(facts, arch="riscv64"))
    engine.build_code, engine.build_tail = 1, [*tail]
    with pytest.raises(BuildError) as failed:
        run(lab)
    assert failed.value.hint.split("\n")[:-1] == [
        f"your wheelhouse lacks a package. Download it for {version}, then try again:",
        f"pip download -d '{wheels}' {options}",
    ]
    engine.build_tail = ["no space"]
    with pytest.raises(BuildError) as failed:
        run(lab)
    assert failed.value.hint.startswith("labctl ssh -- cat build.log")


def test_without_a_package_index_the_wheels_that_setup_downloaded_are_named(
    lab: World, engine: Engine
) -> None:
    engine.build_code = 1
    engine.build_tail = ["Could not fetch URL https://index.example/simple/torch/: no route"]
    hints = []
    for _ in range(2):
        with pytest.raises(BuildError) as failed:
            run(lab)
        hints.append(failed.value.hint.split("\n")[0])
        wheels = lab.places.cache_dir / "wheelhouse"
        wheels.mkdir(parents=True, exist_ok=True)
    assert hints[0].startswith("labctl ssh -- cat build.log")
    assert hints[1].startswith(f"export LABCTL_WHEELHOUSE={wheels}   # the packages that ")


def test_a_mistyped_script_is_named_once_and_before_the_push(lab: World, engine: Engine) -> None:
    reporter, pushes = Recorded(), list[int]()

    def note_pushes(event: Event) -> None:
        if isinstance(event, Note) and event.level == "warning":
            pushes.append(engine.verbs.count("plan"))

    def start(made: Lab, name: str, *, push: bool = True) -> int:
        """Run it; return how often the script was named so far."""
        made.run(["python", "trian.py"], id=name, push=push, follow=True)
        return reporter.said.count("there is no trian.py in this lab; did you mean train.py?")

    reporter.on_event = note_pushes
    checked = Lab(lab.context(reporter))
    checked.check_run(["python", "trian.py"])
    assert start(checked, "first") == 1
    before = engine.verbs.count("plan")
    assert start(Lab(lab.context(reporter)), "second") == 2
    assert pushes == [0, before]
    later = start(Lab(lab.context(reporter)), "third", push=False)
    assert later == 2, "without a push, the code on the server counts"


def test_a_variable_that_no_shell_replaces_is_named_before_the_run(
    lab: World, engine: Engine
) -> None:
    reporter, runs_before = Recorded(), list[int]()

    def note_runs(event: Event) -> None:
        if isinstance(event, Note) and "$LABCTL_DATA_DIR" in event.text:
            runs_before.append(engine.verbs.count("run"))

    reporter.on_event = note_runs
    checked = Lab(lab.context(reporter))
    command = ["python", "train.py", "--data", "$LABCTL_DATA_DIR/y"]
    checked.run(command, id="first", follow=True)
    checked.run(command, id="second", push=False, follow=True)
    assert runs_before == [0], "before the first run, and only once"
    assert """sh -c 'python train.py --data "$LABCTL_DATA_DIR/y"'""" in reporter.said


def test_code_that_was_edited_there_stops_the_image(lab: World, engine: Engine) -> None:
    context = lab.context()
    lab_files.push(context, context.get_server(), force=False)
    (engine.lab / "code/train.py").write_text("edited\n")
    (lab.home / "lab/train.py").write_text("print('epoch 2')\n")
    with pytest.raises(PolicyError, match="were changed on the server"):
        run(lab)
    assert not {"build", "run"} & set(engine.verbs)


def test_an_interrupt_ends_all_parts(lab: World, engine: Engine) -> None:
    building = threading.Event()

    def interrupt() -> None:
        wait_for(building)
        # A real signal: it also ends a wait of the main thread.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        wait_for_cancel()

    def build() -> None:
        building.set()
        wait_for_cancel()

    engine.on_build, engine.on_data = build, interrupt
    with pytest.raises(KeyboardInterrupt):
        run(lab)
    assert not [thread for thread in threading.enumerate() if "labctl-part" in thread.name]
    assert (engine.images, engine.verbs.count("run")) == (set(), 0)
    with hold_transfers(lab.home / "lab", "pull", Recorded(), wait_s=0):
        pass
    engine.on_build, engine.on_data = keep_going, keep_going
    assert run(lab) == "exited"


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_run_says_that_it_has_not_started(
    lab: World, engine: Engine, labctl: Labctl
) -> None:
    engine.on_build = interrupt
    output = labctl(lab, "run", "--id", "first")
    assert (output.code, engine.verbs.count("run")) == (130, 0)
    assert output.err.endswith(
        "labctl: interrupted before the run started\n"
        "  the server keeps the finished build steps and the files that it has\n"
        "  next: labctl run --id first\n"
        "        (continues)\n"
        "        labctl down\n"
        "        (instead, to remove the server)\n"
    )
    engine.on_build = keep_going
    assert labctl(lab, "run", "--id", "first").code == 0


def test_an_interrupt_while_the_run_starts_does_not_say_that_nothing_runs(
    lab: World, engine: Engine, labctl: Labctl
) -> None:
    run(lab)
    engine.on_start = interrupt
    output = labctl(lab, "run", "--id", "second")
    assert output.code == 130
    assert "labctl: interrupted while the run started" in output.err
    assert "next: labctl status --refresh\n" in output.err


def test_other_processes_wait_until_all_transfers_have_ended(lab: World, engine: Engine) -> None:
    reporter, pushed = Recorded(), threading.Event()

    def end_of_code(event: object) -> None:
        if event == Part(name="code", done=True):
            pushed.set()

    def push_elsewhere() -> None:
        wait_for(pushed)
        assert engine.lab.joinpath("code/train.py").exists()
        # The code has been pushed, and the data has not.
        with pytest.raises(LockHeldError) as refused:
            Context().run(pull_as_another_process, lab.home / "lab")
        errors.append(refused.value)

    errors: list[BaseException] = []
    reporter.on_event = end_of_code
    engine.on_data = push_elsewhere
    context = lab.context(reporter)
    lab_files.push(context, context.get_server(), force=False)
    assert len(errors) == 1
    assert not any("waiting" in text for text in reporter.said.splitlines())


def pull_as_another_process(root: Path) -> None:
    """Called in a context of its own: outside of the parts that share their lock."""
    with hold_transfers(root, "pull", Recorded(), wait_s=0):
        pass


def test_the_parts_are_reported(lab: World) -> None:
    reporter = Recorded()
    run(lab, reporter)
    parts = [event for event in reporter.events if isinstance(event, Part)]
    for name in ("code", "data", "image", "start"):
        begin, end = parts.index(Part(name=name)), parts.index(Part(name=name, done=True))
        assert begin < end
    assert parts[-1] == Part(name="start", done=True)
    finished = [part.name for part in parts if part.done]
    assert finished.index("code") < finished.index("image")


def test_only_a_run_on_this_server_makes_an_image_known(lab: World) -> None:
    run(lab)
    context = lab.context()
    server = context.get_server()
    image = context.state.list_runs(LAB_ID)[0].image
    assert first_run.has_run_on_server(context, server, image)
    assert not first_run.has_run_on_server(context, server, "other:1")
    lab.cloud.add("srv-2", "digits", LAB_ID)
    assert not first_run.has_run_on_server(context, lab.cloud.machines["srv-2"], image)
