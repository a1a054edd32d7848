"""The seam between a run and the part of the server that runs its program.

A run's claim, log, exit record, outputs and recovery are the same everywhere. An executor runs the
program of one attempt, which it knows by the attempt's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Union

from ...wire.runs import GangMember, RunSpec
from ..host.engine_objects import Image
from ..reply import Failure


class Environment(NamedTuple):
    """The programs of an attempt without a container: those in `directory`, and the server's."""

    directory: Path | None = None


class JobImage(NamedTuple):
    """An image that `runtime`, on the machine of a job, runs or finds by itself."""

    runtime: str


# What an attempt runs in.
AttemptImage = Union[Image, Environment, JobImage]


class NewAttempt(NamedTuple):
    """An attempt to start. `root` is the lab's directory, `directory` the run's.

    `member` is its place in a run on several servers, None for a run on this one alone.
    """

    name: str
    root: Path
    directory: Path
    spec: RunSpec
    image: AttemptImage
    member: GangMember | None = None


class ProgramState(NamedTuple):
    """The program of an attempt, as its executor sees it now.

    `status` is "created" (not started yet), "queued" (started, and waits for a machine), "running"
    or "ended". `exit_code`, `ended_at` (Unix seconds of the server's clock) and `is_out_of_memory`
    are those of an ended one; None if nobody recorded them. `error` says why it did not start, ""
    if it did. `began` is False for an ended one that never ran. `summary` says what a queued one
    waits for, or why something else than its command ended it. `began_at` is when one that was
    queued began to run, if that is known.
    """

    name: str
    status: str
    exit_code: int | None = 0
    ended_at: float | None = None
    is_out_of_memory: bool = False
    error: str = ""
    began: bool = True
    summary: str = ""
    began_at: float | None = None


class UnknownStartError(Failure):
    """Nobody knows whether an attempt has started. A repeated start finds out."""


class LiveAttempt(NamedTuple):
    """An attempt whose program runs. `directory` is the run's."""

    executor: str
    name: str
    run: str
    lab_id: str
    directory: Path


class Executor(Protocol):
    """Runs the programs of attempts. `noun` is what users call one, such as "container".

    `runs_here`: they run on this machine, so that a restart of it ends them.
    """

    noun: str
    runs_here: bool

    def find_image(self, spec: RunSpec) -> AttemptImage | None:
        """Return what an attempt runs in; None if it is not on this server."""

    def create(self, attempt: NewAttempt) -> bool:
        """Create an attempt without starting it; return False if it exists.

        Failure if it is refused.
        """

    def start(self, attempt: NewAttempt) -> None:
        """Start a created attempt. Failure if it is refused; it is removed then."""

    def stop(self, name: str, grace_s: int) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s` seconds; return once it has ended."""

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to an attempt; one that has ended is fine."""

    def inspect(self, names: Sequence[str]) -> dict[str, ProgramState]:
        """Return the attempts that exist, by name."""

    def list_live(self, lab_id: str = "") -> list[LiveAttempt]:
        """List the attempts that run, of one lab or of all, the newest first."""

    def remove(self, name: str) -> None:
        """Kill an attempt and forget it; an absent one is fine."""

    def build_exec_words(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command beside the program, in a terminal.

        It has the program's environment.
        """

    def build_wait_words(self, name: str) -> list[str]:
        """Return a command line that ends when the program has ended."""

    def read_console(self, name: str) -> str:
        """Return what the program printed without its log: all of it in a terminal."""
