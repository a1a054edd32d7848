"""A few steps of a run in PyTorch's profiler: a short run of its own, and its page in a forward.

What profiles travels in the run's environment, as a zip in base64: the container's Python imports
`sitecustomize` from it (labctl/profiler), whatever the image and whatever the program.
"""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from labctl.config import data_dir
from labctl.errors import InterruptError, LabError, NotFoundError, UsageError
from labctl.events import Note, Step
from labctl.insight.explain.evidence import Finding
from labctl.insight.explain.profile import Profile, advise, read_profile
from labctl.model import Run, RunSpec, Server, Service, Value
from labctl.runs import images, outputs, runs
from labctl.servers.adoption import renew
from labctl.servers.context import Ground
from labctl.services import lab_services, services
from labctl.services.forwards import Forwarding
from labctl.sync import lab_files

PREFIX = runs.PROFILES
STEPS, WARMUP = 5, 10
LEAST_WARMUP = 3
MOST_STEPS = 50
ZIP = "/tmp/labctl-profiler.zip"
# Stands before the run's own command: `sh -c WRAP labctl-profile COMMAND...`.
WRAP = (
    f'printf %s "$LABCTL_PROFILER" | base64 -d >{ZIP} || exit 70; unset LABCTL_PROFILER; '
    f'export PYTHONPATH="{ZIP}${{PYTHONPATH:+:$PYTHONPATH}}"; exec "$@"'
)
NAME = "labctl-profile"
SERVICE = "profile"
PORT = 8765
SHOW = 'exec "$(command -v python3 || command -v python)" -c "$0"'
TAIL_BYTES = 2000
CANCEL_GRACE_S = 5


class Profiled(Value, frozen=True):
    """A profile: `directory` holds its page and trace here, `findings` say what it tells.

    `there` says that the lab's server has it, too, and can show it.
    """

    run: str
    directory: str
    there: bool
    profile: Profile
    findings: tuple[Finding, ...]


def profile(
    ground: Ground, run_id: str = "", *, steps: int = STEPS, warmup: int = WARMUP
) -> Profiled:
    """Profile the command of a run (the latest; lab.yaml's where there was none), in another run.

    The code is the lab's as it is now. A run that is a profile itself is looked at again. LabError
    where the command failed, or made too few optimizer steps.
    """
    if warmup < LEAST_WARMUP or not 1 <= steps <= MOST_STEPS:
        raise UsageError(
            f"{steps} steps after {warmup} of warm-up cannot be profiled",
            why=f"it takes 1 to {MOST_STEPS} steps, after {LEAST_WARMUP} at least",
            hint="labctl profile --steps 5 --warmup 10",
        )
    if run_id.startswith(PREFIX):
        return _again(ground, runs.latest(ground, run_id))
    server = ground.server()
    wanted = runs.spec(ground, server, _command(ground, run_id), PREFIX + runs.new_id(), False)
    settings = {"LABCTL_PROFILE_STEPS": str(steps), "LABCTL_PROFILE_WARMUP": str(warmup)}
    inside = {**wanted.env, **settings, "LABCTL_PROFILER": packed()}
    command = ("sh", "-c", WRAP, NAME, *wanted.command)
    wanted = msgspec.structs.replace(wanted, env=inside, command=command)
    renew(ground, server)
    _warn_of_others(ground, server)
    lab_files.push(ground, server, force=False)
    return _found(ground, server, *_run(ground, server, wanted))


def _command(ground: Ground, run_id: str) -> tuple[str, ...]:
    try:
        return runs.latest(ground, run_id).command
    except NotFoundError:
        if run_id:
            raise
        return ()


def own_command(run: Run) -> Run:
    """The run with the command that was profiled, where it is a profile's."""
    wrapped = run.command[3:4] == (NAME,)
    return msgspec.structs.replace(run, command=run.command[4:]) if wrapped else run


def packed() -> str:
    """The zip that the container's Python imports from, in base64; the same at every call."""
    import labctl.insight.profiler

    source = Path(labctl.insight.profiler.__file__).parent
    content = {
        "sitecustomize.py": (source / "sitecustomize.py").read_text(encoding="utf-8"),
        "labctl_trace.py": (source / "trace.py").read_text(encoding="utf-8"),
        "page.html": page(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in content.items():
            info = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            archive.writestr(info, text, compress_type=zipfile.ZIP_DEFLATED)
    return base64.b64encode(buffer.getvalue()).decode()


def page() -> str:
    """The page of a profile, whose figures take the place of PROFILE_AS_JSON."""
    return (data_dir() / "templates" / "profile" / "index.html").read_text(encoding="utf-8")


def shelf() -> tuple[str, ...]:
    """The command of the container that shows every profile of a lab's runs."""
    import labctl.insight.profiler

    program = Path(labctl.insight.profiler.__file__).with_name("trace_server.py")
    return ("sh", "-c", SHOW, program.read_text(encoding="utf-8"))


def _warn_of_others(ground: Ground, server: Server) -> None:
    busy = [
        runs.to_run(one, server.id).id
        for one in runs.refresh(ground, server)["runs"]
        if one["state"] == "running"
    ]
    if busy:
        text = f"run {busy[0]} is at work there, too: the figures are those of a shared server"
        ground.reporter.emit(Note(text=text, level="warning"))


class _Tail:
    """The end of what a program says."""

    def __init__(self, emit: Callable[[Note], None]) -> None:
        self.text = b""
        self.emit = emit

    def feed(self, block: bytes) -> None:
        self.text = (self.text + block)[-TAIL_BYTES:]
        for line in block.decode(errors="replace").splitlines():
            self.emit(Note(text=line, level="detail"))


def _run(ground: Ground, server: Server, wanted: RunSpec) -> tuple[Run, str]:
    """The profiled run, ended, and its last words."""
    name = "profiling a few steps"
    ground.reporter.emit(Step(name=name))
    tail = _Tail(ground.reporter.emit)
    try:
        run = runs.start(
            ground,
            server,
            wanted,
            follow=True,
            on_start=lambda run, found: None,
            on_log=tail.feed,
        )
    except KeyboardInterrupt:
        runs.cancel(ground, server, wanted.id, CANCEL_GRACE_S)
        raise InterruptError("interrupted; the profiled run was ended") from None
    ground.reporter.emit(Step(name=name, done=True))
    return run, tail.text.decode(errors="replace").strip()


def _again(ground: Ground, run: Run) -> Profiled:
    """A profile that was made before; where its server is gone, as it was brought home."""
    server = ground.state.server_of_lab(ground.lab_id)
    there = server is not None and server.state == "running" and server.id == run.server_id
    return _found(ground, server if there else None, run)


def _found(ground: Ground, server: Server | None, run: Run, said: str = "") -> Profiled:
    """What a profiled run wrote, brought here; `said` are its last words."""
    if server is not None:
        outputs.pull(ground, server, [run.id], only=("logs",))
    directory = ground.config.root / "runs" / run.id / "logs" / "profile"
    try:
        found = read_profile(directory)
    except NotFoundError as error:
        if run.exit_code:
            raise LabError(
                f"the command did not get as far as being profiled: {run.told}",
                why=said,
                hint=f"labctl explain {run.id}",
            ) from None
        hint = "labctl profile --warmup 3 --steps 2, or a command with more steps"
        raise LabError(error.what, why=error.why, hint=hint) from None
    return Profiled(
        run=run.id,
        directory=str(directory),
        there=server is not None,
        profile=found,
        findings=advise(found),
    )


def forward(ground: Ground, found: Profiled, port: int = 0) -> Forwarding:
    """The profile's page on the server, behind an open forward."""
    server = ground.server()
    wanted = request(ground)

    def shown(server: Server) -> Service:
        service = _ensured(ground, server, wanted)
        return msgspec.structs.replace(service, path=f"/{found.run}/")

    return lab_services.open_forward(ground, server, shown(server), port or PORT, shown)


def _ensured(ground: Ground, server: Server, wanted: services.ServiceRequest) -> Service:
    remote = ground.remote(server)

    def provide() -> None:
        lab_files.push(ground, server, force=False)
        images.ensure(ground, server, remote, wanted.image)

    return services.ensure_service(remote, wanted, ground.reporter, provide_image=provide)


def request(ground: Ground) -> services.ServiceRequest:
    """A container of the lab's image that shows every profile of the lab's runs."""
    return services.ServiceRequest(
        lab=ground.config.name,
        lab_id=ground.lab_id,
        name=SERVICE,
        image=images.reference(ground),
        command=shelf(),
        port=PORT,
        args=images.build_args(ground, ground.config.image),
        wheelhouse=bool(ground.config.wheelhouse),
        replace=True,
    )
