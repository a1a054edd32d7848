"""The command keep: a keeper watches over the labs that laptops hand over to this machine."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from labctl.cli.exit_codes import clean
from labctl.cli.keeper_process import install_unit, log_lines
from labctl.cli.options import INSTALL, json_option
from labctl.cli.tables import age_text, print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.commands.systemd import UNIT, keep_unit
from labctl.config import Paths, copy_environment, find_paths
from labctl.config.member_ids import list_lab_ids
from labctl.errors import LabError, UsageError
from labctl.errors.replies import as_reply
from labctl.keeper.workers import RecoveryWorkers
from labctl.lazy import lazy_imports
from labctl.lifecycle import kept_labs
from labctl.model import make_record
from labctl.state import State
from labctl.state.ledgers import CANCELED, list_lines
from labctl.text import add_next
from labctl.wire.codec import encode, from_json_values
from labctl.wire.kept_labs import (
    DescribeKeptLabReply,
    DropKeptLabReply,
    GreetLabKeeperReply,
    ImportLabReply,
    KeeperReportRecord,
    NoteCancelReply,
    RecoverRunsReply,
    SendRunReply,
)
from labctl.wire.mirrors import StoredFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from labctl.lifecycle.keeper_host import MemberReport
    from labctl.lifecycle.kept_labs import KeptLab

with lazy_imports(__name__):
    from labctl.keeper import labs as keeper_labs
    from labctl.keeper import recovery_worker
    from labctl.lifecycle import import_lab, keeper_host
    from labctl.runs import saved_copies


@click.command("keep")
@INSTALL
@click.option("--list", "list_", is_flag=True, help="List the labs that the keeper watches.")
@click.option("--drop", metavar="LAB", help="Stop watching LAB; its server keeps running.")
@json_option
@click.option("--hello", metavar="LAB", hidden=True)
@click.option("--add", is_flag=True, hidden=True)
@click.option("--describe", "--told", "describe", metavar="LAB", hidden=True)
@click.option("--give", nargs=2, metavar="LAB RUN", hidden=True)
@click.option("--cancel", nargs=2, metavar="LAB RUN", hidden=True)
@click.option("--attend", metavar="LAB", hidden=True)
@click.pass_context
def keep_command(
    ctx: click.Context,
    install: bool,
    list_: bool,
    drop: str | None,
    json_: bool,
    hello: str | None,
    add: bool,
    describe: str | None,
    give: tuple[str, str] | None,
    cancel: tuple[str, str] | None,
    attend: str | None,
) -> None:
    """Run the keeper: watch over labs that other machines have handed over to this one.

    The keeper recovers their runs, mirrors their results and removes leftover resources at the
    provider. It runs in the foreground until Ctrl-C. To hand over a lab, use `labctl run --recover
    --keeper HOST` on the laptop.

    \b
    labctl keep
    labctl keep --install
    labctl keep --list
    """
    context = KeepContext()
    if hello:
        context.print_reply(lambda: _describe_keeper(context, hello))
    elif add:
        context.print_reply(lambda: _import_lab(context))
    elif describe:
        context.print_reply(lambda: _describe_lab(context, describe))
    elif give:
        _send_run_files(context, *give)
    elif cancel:
        context.print_reply(lambda: _note_cancel(context, *cancel))
    elif attend:
        context.print_reply(lambda: _recover_runs(context, attend))
    elif drop:
        _drop_lab(context, drop, json_)
    elif list_:
        _list_labs(context, json_)
    elif install:
        _install_unit(context)
    else:
        _run_keeper(context)
    ctx.exit(context.code)


class KeepContext:
    """Environment, paths, state and exit code, shared by all parts of `keep`."""

    def __init__(self) -> None:
        self.environ = copy_environment()
        self.paths: Paths = find_paths(self.environ)
        self.paths.keep_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.state: State = State(self.paths.database)
        self.code = 0

    def print_reply(self, action: Callable[[], NamedTuple]) -> None:
        """Run an action for another labctl and print its reply, or the error, as a line of JSON."""
        try:
            reply = action()
        except LabError as error:
            reply, self.code = as_reply(error), error.exit_code
        click.echo(encode(reply))


def _run_keeper(context: KeepContext) -> None:
    recovery_workers = RecoveryWorkers()
    with keeper_labs.only_keeper(context.paths):
        keeper = keeper_labs.Keeper(
            context.paths,
            context.state,
            context.environ,
            notify=log_lines,
            attend=recovery_workers.run_worker,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: keeper.stop.set())
        count = len(kept_labs.list_kept_labs(context.paths))
        log_lines("", f"labctl keep started with {count} lab{'' if count == 1 else 's'}")
        keeper.run()
        recovery_workers.end_all()
        log_lines("", "labctl keep stopped; the next one resumes its work")


def _describe_keeper(context: KeepContext, name: str) -> GreetLabKeeperReply:
    return GreetLabKeeperReply(
        import_lab.describe_keeper(context.paths, name, keeper_labs.is_running(context.paths))
    )


def _import_lab(context: KeepContext) -> ImportLabReply:
    journal = keeper_labs.make_log_reporter(lambda name, text: click.echo(text, err=True), "")
    taken = import_lab.import_lab(
        sys.stdin.buffer,
        context.paths,
        context.state,
        context.environ,
        journal,
        running=keeper_labs.is_running(context.paths),
    )
    return ImportLabReply(taken)


def _describe_lab(context: KeepContext, name: str) -> DescribeKeptLabReply:
    lab = kept_labs.find_kept_lab(context.paths, name)
    others = list_lab_ids(lab.lab_id)[1:]
    report = keeper_host.KeeperReport(
        lines=tuple(list_lines(context.state, lab.lab_id)),
        runs=tuple(kept_labs.list_recorded_runs(context.state, lab)),
        round=kept_labs.read_checks(context.paths).get(lab.name),
        running=keeper_labs.is_running(context.paths),
        members=tuple(
            member
            for lab_id in others
            if (member := _report_member(context, lab, lab_id)).lines or member.runs
        ),
    )
    return DescribeKeptLabReply(make_record(KeeperReportRecord, report))


def _report_member(context: KeepContext, lab: KeptLab, lab_id: str) -> MemberReport:
    """Report what is known of one of the lab's servers beside the first, which it may not have."""
    lines = tuple(list_lines(context.state, lab_id))
    parts = (context.state.get_run(lab_id, run_id) for run_id in lab.runs)
    return keeper_host.MemberReport(
        lab_id=lab_id, lines=lines, runs=tuple(part for part in parts if part)
    )


def _note_cancel(context: KeepContext, name: str, run: str) -> NoteCancelReply:
    lab = kept_labs.find_kept_lab(context.paths, name)
    context.state.record(CANCELED, lab_id=lab.lab_id, run_id=run)
    return NoteCancelReply()


def _send_run_files(context: KeepContext, name: str, run: str) -> None:
    """Write the index of a run's files as one line of JSON, then a tar of those that are missing.

    Standard input names the files that the other side has: one JSON object, path -> SHA-256.
    """
    out = sys.stdout.buffer
    try:
        sha256_by_path = _parse_hashes(sys.stdin.buffer.readline() or b"{}")
        root = kept_labs.lab_directory(
            context.paths, kept_labs.find_kept_lab(context.paths, name).name
        )
        files = saved_copies.list_outputs(root, run)
    except LabError as error:
        out.write(encode(as_reply(error)).encode() + b"\n")
        context.code = error.exit_code
        return
    index = {file.path: StoredFile(file.size, file.sha256) for file in files}
    out.write(encode(SendRunReply(index)).encode() + b"\n")
    missing_files = [file for file in files if sha256_by_path.get(file.path) != file.sha256]
    saved_copies.write_tar(root, run, missing_files, out)
    out.flush()


def _parse_hashes(line: bytes) -> dict[str, str]:
    try:
        return from_json_values(str, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise UsageError("this is not a list of files", why=str(error)) from None


def _recover_runs(context: KeepContext, name: str) -> RecoverRunsReply:
    """Recover a lab's run in this process, which ends when the keeper does."""

    def exit_with_keeper() -> None:
        # Read the descriptor: the lock of sys.stdin must be free when the interpreter exits.
        while os.read(0, 4096):
            pass
        os._exit(143)

    # Exiting normally releases what is held, above all the lease in the store: the next keeper
    # need not wait until it is stale.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not sys.stdin.isatty():
        threading.Thread(target=exit_with_keeper, daemon=True).start()
    lab = kept_labs.find_kept_lab(context.paths, name)
    journal = keeper_labs.make_log_reporter(log_lines, lab.name)
    recovery_worker.recover_lab(
        kept_labs.make_context(lab, context.paths, context.state, journal, context.environ), lab
    )
    return RecoverRunsReply()


def _drop_lab(context: KeepContext, name: str, json_: bool) -> None:
    if json_:
        context.print_reply(
            lambda: DropKeptLabReply(kept_labs.drop(context.paths, context.state, name).name)
        )
        return
    lab = kept_labs.drop(context.paths, context.state, name)
    click.echo(f"{lab.name} is no longer watched; its servers and disks keep running and billing")


def _install_unit(context: KeepContext) -> None:
    words = [sys.executable, "-m", "labctl", "keep"]
    install_unit(context.paths, UNIT, ("ssh", "python3"), lambda path: keep_unit(words, path=path))


def _list_labs(context: KeepContext, json_: bool) -> None:
    labs, running = (
        keeper_labs.describe_kept_labs(context.paths, context.state),
        keeper_labs.is_running(context.paths),
    )
    if json_:
        print_json({"running": running, "labs": labs})
        return
    if not running:
        click.echo("No keeper is running here.\n  next: labctl keep --install")
    if not labs:
        click.echo("No lab was handed over to this machine.")
        return
    rows = []
    for lab in labs:
        last = lab.round
        rows.append(
            (
                lab.name,
                ", ".join(_run_state(run) for run in lab.runs),
                f"{age_text(last.at)} ago" if last else "never",
                last.state if last else "",
                ", ".join(server.id for server in lab.servers) or "no server",
            )
        )
    print_table(rows, ("LAB", "RUNS", "CHECKED", "RESULT", "SERVER"))
    for lab in labs:
        if lab.round and lab.round.error:
            text = add_next(f"{lab.name}: {lab.round.error}", lab.round.hint)
            print_message(clean(text), err=False)


def _run_state(run: Any) -> str:
    return run if isinstance(run, str) else f"{run.id} {run.state_text}"
