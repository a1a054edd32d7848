"""Profile a few steps in PyTorch's profiler: in a short run of its own, with a page in a forward.

The profiler is passed in the run's environment, as a zip in base64. The container's Python imports
`sitecustomize` from it (insight/profiler), whatever the image and the program.
"""

from __future__ import annotations

import base64
import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from labctl.config import find_data_dir
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.events import Event, Note, Progress, Step, report_wait
from labctl.insight import profiler
from labctl.insight.explain.evidence import Finding
from labctl.insight.explain.memory_profile import MemorySizes
from labctl.insight.explain.profile import Profile, advise, read_profile
from labctl.model import Run, Server, Service, Value
from labctl.runs import images, outputs, run_specs, runs
from labctl.runs.active_runs import describe_runs_beside_profile
from labctl.servers.adoption import renew
from labctl.servers.context import LabContext
from labctl.services import lab_services, services
from labctl.services.port_forward import Forwarding
from labctl.state import uses
from labctl.sync import lab_files, transfer_lock
from labctl.text import duration_text
from labctl.wire.run_ids import PROFILE_PREFIX
from labctl.wire.runs import RunSpec
from labctl.wire.services import ServiceRequest

STEPS, WARMUP = 5, 10
STEP = "profiling a few steps"
# What the profiler writes to the log at each step.
STEP_LINE = re.compile(rb"labctl profile: step (\d+) of (\d+)\r?\n")
LEAST_WARMUP = 3
# The profiler ends a command that has made no optimizer step by then.
FIRST_STEP_S = 600
LEAST_MEMORY_STEPS = 2
MOST_STEPS = 50
ZIP = "/tmp/labctl-profiler.zip"
UNPACK = (
    f'printf %s "$LABCTL_PROFILER" | base64 -d >{ZIP} || exit 70; unset LABCTL_PROFILER; '
    f'export PYTHONPATH="{ZIP}${{PYTHONPATH:+:$PYTHONPATH}}"; '
)
# Prefix of the run's own command: `sh -c WRAP labctl-profile COMMAND...`.
WRAP = UNPACK + 'exec "$@"'
NAME = "labctl-profile"
# In the page, replaced by the figures.
PAGE_MARK = "PROFILE_AS_JSON"
SERVICE: Literal["profile"] = "profile"
PORT = 8765
SHOW = 'exec "$(command -v python3 || command -v python)" -c "$0"'
TAIL_BYTES = 2000
CANCEL_GRACE_S = 5


class PredictedMemory(Value, frozen=True):
    """What `labctl estimate` predicts for the profiled command; `why` if it cannot.

    `target` is the function that builds the model, `item` the shape of its example ("1x16x16"),
    `where_batch` the source of the batch size.
    """

    sizes: MemorySizes = MemorySizes()
    target: str = ""
    item: str = ""
    batch: int = 0
    where_batch: str = ""
    why: str = ""


class ProfileResult(Value, frozen=True):
    """A profile. `directory` holds its page and trace on this machine, `findings` are its results.

    `there` is whether the lab's server has the profile too, and can show it. `predicted` is set if
    memory was profiled.
    """

    run: str
    directory: str
    there: bool
    profile: Profile
    findings: tuple[Finding, ...]
    predicted: PredictedMemory | None = None


def profile(
    context: LabContext,
    run_id: str = "",
    *,
    steps: int = STEPS,
    warmup: int = WARMUP,
    memory: bool = False,
) -> ProfileResult:
    """Profile the command of a run (by default the latest, else lab.yaml's) in a new run.

    Uses the lab's current code. For a run that is a profile itself, return that profile. `memory`
    also records what memory holds. LabError if the command failed, or made too few optimizer steps.
    """
    if run_id.startswith(PROFILE_PREFIX):
        return _load_earlier(context, runs.find_run(context, run_id))
    # What a block holds is known for those that the traced step before has allocated.
    traced = max(steps, LEAST_MEMORY_STEPS) if memory else steps
    settings = {"LABCTL_PROFILE_MEMORY": "1"} if memory else {}
    server, run, output = run_profiled(context, run_id, traced, warmup, settings, WRAP)
    return _load_profile(context, server, run, output)


def run_profiled(
    context: LabContext,
    run_id: str,
    steps: int,
    warmup: int,
    settings: Mapping[str, str],
    wrap: str,
) -> tuple[Server, Run, str]:
    """Run a run's command with the profiler, for a few steps; return the end of its output too."""
    if warmup < LEAST_WARMUP or not 1 <= steps <= MOST_STEPS:
        raise UsageError(
            f"cannot profile {steps} steps after {warmup} warm-up steps",
            why=f"allowed are 1 to {MOST_STEPS} steps, after at least {LEAST_WARMUP}",
            hint="labctl profile --steps 5 --warmup 10",
        )
    own_command = _find_command(context, run_id)
    server = context.get_server()
    wanted = run_specs.build_spec(
        context,
        server,
        own_command,
        PROFILE_PREFIX + run_specs.make_run_id(),
        False,
    )
    bounds = {
        "LABCTL_PROFILE_STEPS": str(steps),
        "LABCTL_PROFILE_WARMUP": str(warmup),
        "LABCTL_PROFILE_WAIT_S": str(FIRST_STEP_S),
    }
    env = {**wanted.env, **bounds, **settings, "LABCTL_PROFILER": pack_profiler()}
    command = ("sh", "-c", wrap, NAME, *wanted.command)
    wanted = wanted._replace(env=env, command=command)
    renew(context, server)
    with transfer_lock.name_command("profile"):
        lab_files.push(context, server, force=False)
    amount = f"{warmup} steps of warm-up, then {steps}; the first within "
    amount += duration_text(FIRST_STEP_S)
    return server, *_run(context, server, wanted, amount)


def _find_command(context: LabContext, run_id: str) -> tuple[str, ...]:
    try:
        return runs.find_run(context, run_id).command
    except NotFoundError:
        if run_id:
            raise
        return ()


def unwrap_command(run: Run) -> Run:
    """Return a profile's run with the command that was profiled; other runs unchanged."""
    wrapped = run.command[3:4] == (NAME,)
    return msgspec.structs.replace(run, command=run.command[4:]) if wrapped else run


def pack_profiler() -> str:
    """Build the zip that the container's Python imports from, in base64. Deterministic."""
    source = Path(profiler.__file__).parent
    content = {
        "sitecustomize.py": (source / "sitecustomize.py").read_text(encoding="utf-8"),
        "labctl_trace.py": (source / "trace.py").read_text(encoding="utf-8"),
        "labctl_memory.py": (source / "memory.py").read_text(encoding="utf-8"),
        "page.html": read_page(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in content.items():
            info = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            archive.writestr(info, text, compress_type=zipfile.ZIP_DEFLATED)
    return base64.b64encode(buffer.getvalue()).decode()


def read_page() -> str:
    """Read the page of a profile, in which PROFILE_AS_JSON is replaced by the figures."""
    return (find_data_dir() / "templates" / "profile" / "index.html").read_text(encoding="utf-8")


def page_server_command() -> tuple[str, ...]:
    """Return the command of the container that serves the profiles of a lab's runs."""
    program = Path(profiler.__file__).with_name("trace_server.py")
    return ("sh", "-c", SHOW, program.read_text(encoding="utf-8"))


class _OutputTail:
    """Keeps the end of a program's output, without the lines in which the profiler counts steps."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.text = b""
        self.emit = emit

    def append(self, block: bytes) -> None:
        self.text += block
        if steps := STEP_LINE.findall(self.text):
            done, total = map(int, steps[-1])
            detail = "writing the profile" if done >= total else ""
            event = Progress(name=STEP, done=done, total=total, unit="steps", detail=detail)
            self.emit(event)
        self.text = STEP_LINE.sub(b"", self.text)[-TAIL_BYTES:]
        for line in STEP_LINE.sub(b"", block).decode(errors="replace").splitlines():
            self.emit(Note(text=line, level="detail"))


def _run(context: LabContext, server: Server, wanted: RunSpec, amount: str) -> tuple[Run, str]:
    """Run the profile to its end; return the run and the end of its output."""
    context.reporter.emit(Step(name=STEP, detail=amount))
    tail = _OutputTail(context.reporter.emit)

    def cancel() -> Run:
        return runs.cancel(context, server, wanted.id, CANCEL_GRACE_S)[0]

    try:
        run = runs.start(
            context,
            server,
            wanted,
            follow=True,
            on_start=lambda run, found: None,
            on_log=tail.append,
            describe_beside=describe_runs_beside_profile,
        )
    except KeyboardInterrupt:
        raise runs.cancel_interrupted(cancel, "profile") from None
    context.reporter.emit(Step(name=STEP, done=True))
    return run, tail.text.decode(errors="replace").strip()


def _load_earlier(context: LabContext, run: Run) -> ProfileResult:
    """Load an earlier profile; if its server is gone, from the files that were pulled."""
    server = context.state.get_lab_server(context.lab_id)
    is_live = server is not None and server.state == "running" and server.id == run.server_id
    return _load_profile(context, server if is_live else None, run)


def _load_profile(
    context: LabContext, server: Server | None, run: Run, output: str = ""
) -> ProfileResult:
    """Pull and read what a profile run wrote; `output` is the end of its output."""
    if server is not None:
        outputs.pull(context, server, [run.id], only=("logs",))
    directory = context.config.root / "runs" / run.id / "logs" / "profile"
    try:
        result = read_profile(directory)
    except NotFoundError as error:
        if run.exit_code:
            raise LabError(
                f"the command failed before it could be profiled: {run.summary}",
                why=output,
                hint=f"labctl explain {run.id}",
            ) from None
        raise LabError(error.what, why=error.why, hint=error.hint) from None
    return ProfileResult(
        run=run.id,
        directory=str(directory),
        there=server is not None,
        profile=result,
        findings=advise(result),
    )


@contextmanager
def open_page(context: LabContext, found: ProfileResult, port: int = 0) -> Iterator[Forwarding]:
    """Open a forward to the profile's page on the server until the block ends.

    Then the service that shows the pages ends too, unless another process shows one.
    """
    state, lab_id = context.state, context.lab_id
    try:
        with (
            uses.hold_use(state, lab_id, "forward"),
            uses.hold_use(state, lab_id, SERVICE),
            _forward_page(context, found, port) as forward,
        ):
            yield forward
    finally:
        if not uses.is_used(state, lab_id, SERVICE):
            _stop_page_service(context)


def _stop_page_service(context: LabContext) -> None:
    """Stop the service that shows profiles. It ends with its server anyway, if that is gone."""
    with (
        suppress(LabError, KeyboardInterrupt),
        report_wait(context.reporter, "stopping the page of the profile"),
    ):
        remote = context.open_agent(context.get_server())
        services.stop_service(remote, context.config.name, context.lab_id, SERVICE)


def _forward_page(context: LabContext, found: ProfileResult, port: int) -> Forwarding:
    server = context.get_server()
    wanted = build_request(context)

    def ensure(server: Server) -> Service:
        service = lab_services.ensure(context, server, wanted)
        return msgspec.structs.replace(service, path=f"/{found.run}/")

    return lab_services.open_forward(context, server, ensure(server), port or PORT, ensure)


def build_request(context: LabContext) -> ServiceRequest:
    """Build the request for the container that serves the profiles of the lab's runs."""
    return ServiceRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        name=SERVICE,
        image=images.image_reference(context),
        command=page_server_command(),
        port=PORT,
        args=images.build_args(context, context.config.image),
        wheelhouse=bool(context.config.wheelhouse),
        replace=True,
    )
