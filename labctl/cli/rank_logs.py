"""The output of one process of a run that has several, on one server or on many."""

from __future__ import annotations

from collections.abc import Callable

from labctl.cli import runs as run_commands
from labctl.cli.wrapping import print_message
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.lab import Lab
from labctl.lifecycle import gang
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.servers.job_queue import build_job_request, count_gpus


def print_rank_logs(lab: Lab, run: str, rank: str, follow: bool, tail: int) -> None:
    """Print the output of the process with this global rank, or with "all" of each process.

    UsageError if there is no such process.
    """
    run_id = runs.find_run(lab.context, run).id
    count = lab.config.server.count
    if rank == "all":
        if follow:
            raise UsageError(
                "--rank all cannot be combined with -f",
                why="each process writes a log of its own, and labctl follows one at a time",
                hint=f"labctl logs {run_id} --rank all\nlabctl logs -f {run_id} --rank 1",
            )
        _print_all_logs(lab, run_id, tail)
        return
    if not rank.isdecimal():
        raise UsageError(
            f"{rank!r} is not a rank", why="write a number, or all", hint="labctl logs --rank 1"
        )
    processes = count_processes(lab)
    server, process = divmod(int(rank), processes)
    if server >= count:
        raise UsageError(
            f"run {run_id} has no rank {rank}",
            why=f"it has {count * processes} processes, and the first has rank 0",
            hint=f"labctl logs {run_id} --rank {count * processes - 1}",
        )
    _print_log(lab, run_id, server, process, follow, tail)


def count_processes(lab: Lab) -> int:
    """Return the number of processes that a run starts on each server."""
    launch = lab.config.launch
    if not launch.launcher:
        return 1
    context = lab.context
    if launch.processes:
        return launch.processes
    server = context.get_server()
    if context.config.submits_jobs:
        return max(1, count_gpus(build_job_request(context, server)))
    return max(1, len(context.load_facts(server).gpus))


def _print_all_logs(lab: Lab, run_id: str, tail: int) -> None:
    """Print the logs of all processes, rank by rank, with the rank before each line.

    Each is printed as it arrives: together they may be larger than this machine's memory. The first
    error of a server that does not answer is raised after the others' logs.
    """
    processes = count_processes(lab)
    errors: list[LabError] = []
    for number in range(lab.config.server.count):
        context = gang.select_server(lab.context, number)
        try:
            for process in range(processes):
                _print_prefixed_log(context, run_id, number * processes + process, process, tail)
        except LabError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _print_prefixed_log(
    context: LabContext, run_id: str, rank: int, process: int, tail: int
) -> None:
    """Print what a process has printed, or that it has printed nothing or was not started."""
    lines = _PrefixedLines(b"[%d] " % rank, run_commands.write_log)
    server = context.get_server()
    try:
        runs.watch(
            context, server, run_id, tail=tail, follow=False, process=process, on_log=lines.feed
        )
    except NotFoundError:
        if process == 0:
            raise
        print_message(f"rank {rank} of run {run_id} was not started")
        return
    finally:
        lines.finish()
    if lines.is_empty:
        print_message(f"rank {rank} of run {run_id} has no output")


class _PrefixedLines:
    """Writes a prefix before each line of a log that arrives in pieces, and ends the last line."""

    def __init__(self, prefix: bytes, write: Callable[[bytes], None]) -> None:
        self.is_empty = True
        self._prefix = prefix
        self._write = write
        self._is_line_begun = False

    def feed(self, block: bytes) -> None:
        if not block:
            return
        self.is_empty = False
        start = b"" if self._is_line_begun else self._prefix
        self._is_line_begun = not block.endswith(b"\n")
        body, end = (block, b"") if self._is_line_begun else (block[:-1], b"\n")
        self._write(start + body.replace(b"\n", b"\n" + self._prefix) + end)

    def finish(self) -> None:
        if self._is_line_begun:
            self._write(b"\n")


def _print_log(lab: Lab, run_id: str, server: int, process: int, follow: bool, tail: int) -> None:
    context = gang.select_server(lab.context, server)
    size_bytes = 0

    def write(block: bytes) -> None:
        nonlocal size_bytes
        size_bytes += len(block)
        run_commands.write_log(block)

    run = runs.watch(
        context,
        context.get_server(),
        run_id,
        tail=tail,
        follow=follow,
        process=process,
        on_log=write,
    )
    if not size_bytes:
        has = "printed" if run.has_ended else "has printed"
        print_message(f"this process of run {run_id} {has} nothing")
