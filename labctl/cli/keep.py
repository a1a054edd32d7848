"""The command keep: a keeper watches over the labs that laptops hand over to this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from labctl.cli.exit_codes import clean
from labctl.cli.options import INSTALL, json_option
from labctl.cli.screen import age_text, print_json, print_table
from labctl.commands.systemd import UNIT, keep_unit
from labctl.config import Paths, copy_environment, find_paths
from labctl.errors import LabError
from labctl.errors.replies import as_reply
from labctl.keeper.workers import RecoveryWorkers
from labctl.lifecycle import kept_labs
from labctl.model import Value
from labctl.state import State
from labctl.state.ledgers import list_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from labctl.lifecycle.import_lab import ImportedLab, KeeperInfo
    from labctl.lifecycle.keeper_host import KeeperReport


class KeepReply(Value, frozen=True, omit_defaults=True):
    """The reply to another labctl. Each request has its own field; the others are not written."""

    known: KeeperInfo | None = None
    taken: ImportedLab | None = None
    told: KeeperReport | None = None
    dropped: str = ""


@click.command("keep")
@INSTALL
@click.option("--list", "list_", is_flag=True, help="List the labs that the keeper watches.")
@click.option("--drop", metavar="LAB", help="Stop watching LAB; its server keeps running.")
@json_option
@click.option("--hello", metavar="WARD", hidden=True)
@click.option("--add", is_flag=True, hidden=True)
@click.option("--told", "describe", metavar="WARD", hidden=True)
@click.option("--give", nargs=2, metavar="WARD RUN", hidden=True)
@click.option("--attend", metavar="WARD", hidden=True)
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
        context.print_reply(lambda: _read_ward(context, hello))
    elif add:
        context.print_reply(lambda: _import_lab(context))
    elif describe:
        context.print_reply(lambda: _describe_lab(context, describe))
    elif give:
        _send_run_files(context, *give)
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

    def print_reply(self, action: Callable[[], KeepReply]) -> None:
        """Run an action for another labctl and print its result or its error as one JSON object."""
        try:
            reply = msgspec.to_builtins(action())
        except LabError as error:
            reply, self.code = as_reply(error), error.exit_code
        click.echo(json.dumps({"version": 1, **reply}))

    def log(self, name: str, text: str) -> None:
        """Write each line of `text` to the log with the time and, unless it is "", `name`."""
        prefix = f"{name}: " if name else ""
        for line in clean(text).splitlines():
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            sys.stderr.write(f"{stamp} {prefix}{line}\n")
        sys.stderr.flush()


def _run_keeper(context: KeepContext) -> None:
    from labctl.keeper.labs import Keeper, only_keeper

    recovery_workers = RecoveryWorkers()
    with only_keeper(context.paths):
        keeper = Keeper(
            context.paths,
            context.state,
            context.environ,
            tell=context.log,
            attend=recovery_workers.run_worker,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: keeper.stop.set())
        count = len(kept_labs.list_kept_labs(context.paths))
        context.log("", f"labctl keep started with {count} lab{'' if count == 1 else 's'}")
        keeper.run()
        recovery_workers.end_all()
        context.log("", "labctl keep stopped; the next one resumes its work")


def _read_ward(context: KeepContext, name: str) -> KeepReply:
    from labctl.keeper.labs import is_running
    from labctl.lifecycle.import_lab import describe_keeper

    return KeepReply(known=describe_keeper(context.paths, name, is_running(context.paths)))


def _import_lab(context: KeepContext) -> KeepReply:
    from labctl.keeper.labs import LogReporter, is_running
    from labctl.lifecycle.import_lab import import_lab

    journal = LogReporter(lambda name, text: click.echo(text, err=True), "")
    taken = import_lab(
        sys.stdin.buffer,
        context.paths,
        context.state,
        context.environ,
        journal,
        running=is_running(context.paths),
    )
    return KeepReply(taken=taken)


def _describe_lab(context: KeepContext, name: str) -> KeepReply:
    from labctl.keeper.labs import is_running
    from labctl.lifecycle.keeper_host import KeeperReport

    lab = kept_labs.find_kept_lab(context.paths, name)
    return KeepReply(
        told=KeeperReport(
            lines=tuple(list_lines(context.state, lab.lab_id)),
            runs=tuple(kept_labs.list_recorded_runs(context.state, lab)),
            round=kept_labs.read_checks(context.paths).get(lab.name),
            running=is_running(context.paths),
        )
    )


def _send_run_files(context: KeepContext, name: str, run: str) -> None:
    """Write the index of a run's files as one line of JSON, then a tar of those that are missing.

    Standard input names the files that the other side has: one JSON object, path -> SHA-256.
    """
    from labctl.runs.saved_copies import list_outputs, write_tar

    out = sys.stdout.buffer
    try:
        sha256_by_path = json.loads(sys.stdin.buffer.readline() or b"{}")
        root = kept_labs.lab_directory(
            context.paths, kept_labs.find_kept_lab(context.paths, name).name
        )
        files = list_outputs(root, run)
    except LabError as error:
        out.write(json.dumps(as_reply(error)).encode() + b"\n")
        context.code = error.exit_code
        return
    index = {file.path: [file.size, file.sha256] for file in files}
    out.write(json.dumps({"version": 1, "files": index}).encode() + b"\n")
    missing_files = [file for file in files if sha256_by_path.get(file.path) != file.sha256]
    write_tar(root, run, missing_files, out)
    out.flush()


def _recover_runs(context: KeepContext, name: str) -> KeepReply:
    """Recover a lab's run in this process, which ends when the keeper does."""
    from labctl.keeper.labs import LogReporter
    from labctl.keeper.recovery_worker import recover_lab

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
    journal = LogReporter(context.log, lab.name)
    recover_lab(
        kept_labs.make_context(lab, context.paths, context.state, journal, context.environ), lab
    )
    return KeepReply()


def _drop_lab(context: KeepContext, name: str, json_: bool) -> None:
    if json_:
        context.print_reply(
            lambda: KeepReply(dropped=kept_labs.drop(context.paths, context.state, name).name)
        )
        return
    lab = kept_labs.drop(context.paths, context.state, name)
    click.echo(f"{lab.name} is no longer watched; its servers and disks keep running and billing")


def _install_unit(context: KeepContext) -> None:
    folder = context.paths.config_dir.parent / "systemd" / "user"
    programs = [shutil.which(name) for name in ("ssh", "python3")]
    directories = [str(Path(program).parent) for program in programs if program]
    path = os.pathsep.join(dict.fromkeys([*directories, "/usr/local/bin", "/usr/bin", "/bin"]))
    text = keep_unit([sys.executable, "-m", "labctl", "keep"], path=path)
    target = folder / f"{UNIT}.service"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as error:
        raise LabError(
            f"cannot write {target}", why=error.strerror or "", hint=f"ls -ld {target.parent}"
        ) from error
    click.echo(f"wrote {target}; next:")
    click.echo(f"  systemctl --user daemon-reload && systemctl --user enable --now {UNIT}")
    click.echo("  loginctl enable-linger     # keep it running when you log out")
    click.echo(f"  journalctl --user -u {UNIT} -f")


def _list_labs(context: KeepContext, json_: bool) -> None:
    from labctl.keeper.labs import describe_kept_labs, is_running

    labs, running = describe_kept_labs(context.paths, context.state), is_running(context.paths)
    if json_:
        print_json({"running": running, "labs": labs})
        return
    if not running:
        click.echo("No keeper is running here; next: labctl keep, or labctl keep --install")
    if not labs:
        click.echo("No lab was handed over to this machine.")
        return
    rows = []
    for lab in labs:
        server, last = lab.server, lab.round
        rows.append(
            (
                lab.name,
                ", ".join(_run_state(run) for run in lab.runs),
                server.id if server else "no server",
                f"{age_text(last.at)} ago" if last else "never",
                (last.error or last.state) if last else "",
            )
        )
    print_table(rows, ("LAB", "RUNS", "SERVER", "CHECKED", "RESULT"))


def _run_state(run: Any) -> str:
    return run if isinstance(run, str) else f"{run.id} {run.state}"
