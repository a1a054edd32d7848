"""The executor `docker`: each attempt is a container of the server's Docker Engine."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ...wire.runs import DOCKER, RunSpec
from ...wire.verbs import SHOW_DISK
from ..host import engine
from ..host.docker import run_docker
from ..host.engine_objects import Container, ContainerRow, Image
from ..reply import Failure
from .containers import build_run_body
from .executor import LiveAttempt, NewAttempt, ProgramState

# characters of a command that a hint shows
COMMAND_CHARACTERS = 200


class DockerExecutor:
    """See `Executor`."""

    noun = "container"
    runs_here = True

    def find_image(self, spec: RunSpec) -> Image | None:
        return engine.inspect_image(spec.image)

    def create(self, attempt: NewAttempt) -> bool:
        body = build_run_body(attempt)
        with _removed_if_refused(attempt):
            return engine.create_container(attempt.name, body)

    def start(self, attempt: NewAttempt) -> None:
        with _removed_if_refused(attempt):
            engine.start_container(attempt.name)

    def stop(self, name: str, grace_s: int) -> None:
        run_docker("stop", "--time", str(grace_s), name, check=False)

    def send_signal(self, name: str, number: int) -> None:
        with suppress(engine.EngineRequestError):
            engine.call("POST", f"/containers/{name}/kill?signal={signal.Signals(number).name}")

    def inspect(self, names: Sequence[str]) -> dict[str, ProgramState]:
        containers = engine.inspect_containers(list(names))
        return {name: describe_container(name, one) for name, one in containers.items()}

    def list_live(self, lab_id: str = "") -> list[LiveAttempt]:
        labels = ["labctl.run", *([f"labctl.lab-id={lab_id}"] if lab_id else [])]
        return [_describe_live(row) for row in engine.list_containers(*labels)]

    def remove(self, name: str) -> None:
        engine.remove_container(name)

    def build_exec_words(self, name: str, command: Sequence[str]) -> list[str]:
        enter = ["sh", "/lab/run/.labctl/entry.sh"]
        return ["docker", "exec", "-it", "-e", "LABCTL_ENTER=1", name, *enter, *command]

    def build_wait_words(self, name: str) -> list[str]:
        return ["docker", "wait", name]

    def read_console(self, name: str) -> str:
        done = run_docker("logs", name, check=False)
        return done.stdout + done.stderr


def _describe_live(row: ContainerRow) -> LiveAttempt:
    return LiveAttempt(
        executor=DOCKER,
        name=row.name,
        run=row.labels["labctl.run"],
        lab_id=row.labels.get("labctl.lab-id", ""),
        directory=Path(row.sources.get("/lab/run", "")),
    )


def describe_container(name: str, container: Container) -> ProgramState:
    """Return an attempt's state from that of its container."""
    state = container.State
    status = "ended"
    if state.Running or state.Restarting:
        status = "running"
    elif state.Status == "created" and not state.Error:
        status = "created"
    return ProgramState(
        name=name,
        status=status,
        exit_code=state.ExitCode,
        ended_at=_parse_docker_time(state.FinishedAt),
        is_out_of_memory=state.OOMKilled,
        error=state.Error,
    )


def _parse_docker_time(text: str) -> float | None:
    if not text or text.startswith("0001-"):  # it has not ended
        return None
    from datetime import datetime, timezone  # imported here to keep `start` fast

    try:
        moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc).timestamp()


@contextmanager
def _removed_if_refused(attempt: NewAttempt) -> Iterator[None]:
    try:
        yield
    except engine.EngineRequestError as refused:
        engine.remove_container(attempt.name)
        raise _describe_refusal(attempt.spec, refused) from None


def _describe_refusal(spec: RunSpec, refused: engine.EngineRequestError) -> Failure:
    why = refused.message.strip()[-1500:]
    if refused.is_limit:
        return Failure("policy", f"run {spec.id} cannot start now", why, _suggest_later(spec))
    # Docker's API tells the causes of a failed start apart by their text only.
    if "could not select device driver" in why:
        what = "Docker on the server cannot give the run access to a GPU"
        return Failure("gpu", what, why, "labctl doctor")
    if "no space left on device" in why:
        return Failure("disk", "the server's disk is full", why, SHOW_DISK)
    return Failure("docker", f"the container of run {spec.id} did not start", why)


def _suggest_later(spec: RunSpec) -> str:
    """Return the command that starts this run later, if it fits on a line."""
    command = shlex.join(["labctl", "run", "--", *spec.command])
    if not command.isprintable() or len(command) > COMMAND_CHARACTERS:
        command = "labctl run"
    return f"{command}   # again later"
