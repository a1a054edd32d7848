"""The output of one process of a run that has several, on one server or on many."""

from __future__ import annotations

import click

from labctl.cli import runs as run_commands
from labctl.cli.wrapping import print_message
from labctl.errors import UsageError
from labctl.lab import Lab
from labctl.lifecycle import gang
from labctl.runs import runs
from labctl.servers.job_queue import build_job_request, count_gpus


def print_rank_logs(lab: Lab, run: str, rank: str, follow: bool, tail: int) -> None:
    """Print the output of the process with this global rank, or with "all" of each server's first.

    UsageError if there is no such process.
    """
    run_id = runs.find_run(lab.context, run).id
    count = lab.config.server.count
    if rank == "all":
        if follow:
            raise UsageError(
                "--rank all cannot be combined with -f",
                why="the lines of several processes would be mixed",
                hint=f"labctl logs {run_id} --rank all\nlabctl logs -f {run_id} --rank 1",
            )
        for number in range(count):
            click.echo(f"--- server {number} ---", err=True)
            _print_log(lab, run_id, number, 0, follow, tail)
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
