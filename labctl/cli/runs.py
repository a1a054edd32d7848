"""push, run, attach, exec, ssh, cancel."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

import click

from labctl.cli.options import json_option, open_lab, rest, yes_option

if TYPE_CHECKING:
    from labctl.errors import LabError
    from labctl.lab import Lab
    from labctl.model import Run
    from labctl.servers.context import Ground

OWN_FAILURE = 255
DETACHED = 130


@click.command("push")
@click.option("--force", is_flag=True, help="Overwrite what was edited on the server.")
@yes_option
@json_option
@click.pass_context
def push_command(ctx: click.Context, force: bool, yes: bool, json_: bool) -> None:
    """Send code and data to the server; `run` does it by itself.

    \b
    labctl push
    """
    from labctl.cli.screen import as_json, size

    pushed = open_lab(ctx, yes=yes, quiet=json_).push(force=force)
    if json_:
        as_json({"pushed": pushed})
        return
    for one in pushed:
        click.echo(f"{one.target}: {one.sent} sent ({size(one.sent_bytes)}), {one.unchanged} as is")


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--detach", "-d", is_flag=True, help="Do not follow the log.")
@click.option("--id", "run_id", default="", help="A name; repeated, the same run is found.")
@click.option("-it", "tty", is_flag=True, help="With a terminal, for programs that ask.")
@click.option("--no-push", is_flag=True, help="Run what is on the server already.")
@click.option("--recover", is_flag=True, help="Go on elsewhere where its server ends too early.")
@click.option("--keeper", default="", metavar="HOST", help="Its `labctl keep` recovers the run.")
@click.option("--probe", default="", metavar="1%|STEPS", help="First so much, and what all takes.")
@yes_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run_command(
    ctx: click.Context,
    detach: bool,
    run_id: str,
    tty: bool,
    no_push: bool,
    recover: bool,
    keeper: str,
    probe: str,
    yes: bool,
    json_: bool,
    command: tuple[str, ...],
) -> None:
    """Run lab.yaml's command, or COMMAND, in a container on the server, and follow its log.

    Ctrl-C stops following, not the run. Exits with the command's own code.

    \b
    labctl run
    labctl run -- python train.py --epochs 20
    labctl run --detach --id night
    labctl run --probe 1%
    labctl run --recover
    labctl run --recover --keeper HOST --detach
    """
    from labctl.cli.exit_codes import clean

    if recover and ((detach and not keeper) or tty or no_push):
        raise _not_with_recover()
    if keeper and not recover:
        raise _no_keeper_without_recover(keeper)
    if probe and tty:
        raise _no_probe_with_a_terminal()

    lab = open_lab(ctx, yes=yes, quiet=json_)
    if probe and not (run_id and lab.ground.state.run(lab.id, run_id)):
        from labctl.cli.probe import asked

        if not asked(ctx, lab, command, probe, push=not no_push, json_=json_):
            return
        no_push = not recover  # it has just been sent
    seen: list[Run] = []

    def started(run: Run, found: bool) -> None:
        seen.append(run)
        rest(ctx)
        if not json_:
            said = "found" if found else "started"
            click.echo(f"run {run.id} {said}: {clean(shlex.join(run.command))}", err=True)

    try:
        found = lab.run(
            command,
            id=run_id,
            follow=not detach and not tty,
            tty=tty,
            push=not no_push,
            recover=recover,
            keeper=keeper,
            on_start=started,
            on_log=(lambda block: None) if json_ else write_log,
        ).seen
    except KeyboardInterrupt:
        if not seen:
            raise
        _still_running(lab, seen[0])
        ctx.exit(DETACHED)
    if tty and not found.ended:
        _replace(lab, f"docker attach {found.container}")
    _finish(ctx, found, detach, json_)


def _not_with_recover() -> LabError:
    from labctl.errors import UsageError

    return UsageError(
        "--recover follows the run and keeps the code that it sends",
        why="so it goes neither with --detach nor with -it or --no-push",
        hint="labctl run --recover; with --keeper HOST, --detach is fine",
    )


def _no_keeper_without_recover(keeper: str) -> LabError:
    from labctl.errors import UsageError

    return UsageError(
        "--keeper goes with --recover",
        why="a keeper recovers the runs that are handed to it",
        hint=f"labctl run --recover --keeper {keeper}",
    )


def _no_probe_with_a_terminal() -> LabError:
    from labctl.errors import UsageError

    return UsageError(
        "--probe goes not with -it",
        why="nobody answers a program that is only tried",
        hint="labctl run --probe 1%",
    )


def _finish(ctx: click.Context, run: Run, detach: bool, json_: bool) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json

    if json_:
        as_json({"run": run})
    elif run.ended:
        click.echo(f"run {run.id}: {clean(run.told)}", err=True)
        if run.stopped_by:
            click.echo(
                f"labctl up && labctl run --recover --id {run.id}    go on with it", err=True
            )
        elif run.exit_code:
            click.echo(f"labctl explain {run.id}    why, and what to try next", err=True)
        _name_new_files(run)
    else:
        click.echo(f"labctl logs -f {run.id}    follow it", err=True)
    ctx.exit(exit_code(run) if run.ended else 0)


def exit_code(run: Run) -> int:
    """The command's own code; 255 where nobody can know it."""
    return OWN_FAILURE if run.exit_code is None else run.exit_code


def _name_new_files(run: Run) -> None:
    if run.new_files:
        from labctl.cli.exit_codes import clean

        shown = ", ".join(clean(name) for name in run.new_files[:5])
        more = f" and {len(run.new_files) - 5} more" if len(run.new_files) > 5 else ""
        click.echo(f"new files outside outputs: {shown}{more} (labctl pull --all)", err=True)


def write_log(block: bytes) -> None:
    """A piece of a run's log to standard output, as it came."""
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()


def _still_running(lab: Lab, run: Run) -> None:
    server = lab.ground.state.server_of_lab(lab.id)
    price = server.offer.price_usd_per_hour if server else 0.0
    click.echo(f"\nrun {run.id} goes on at {price:.2f} dollars an hour", err=True)
    if lab.keeper:
        said = f"the keeper at {lab.keeper} looks after it; this machine may be switched off"
        click.echo(said, err=True)
    for line, deed in (
        (f"labctl logs -f {run.id}", "follow it again"),
        (f"labctl cancel {run.id}", "end the run"),
        ("labctl down", "end the bill"),
    ):
        click.echo(f"  {line:<{len(run.id) + 18}}{deed}", err=True)


def _replace(lab: Lab, line: str, *, tty: bool = True) -> None:
    become_ssh(lab.ground, line, tty=tty)


def become_ssh(ground: Ground, line: str, *, tty: bool = True) -> None:
    """Become ssh to the lab's server: its exit code, its terminal, its signals."""
    import shutil

    from labctl.commands.ssh import interactive_argv
    from labctl.errors import LabError
    from labctl.servers.gate import has_gate, let_in
    from labctl.shell import portable
    from labctl.transports.ssh_client import quick_login

    server = ground.server()
    if has_gate(server):
        let_in(ground, server)
    config = ground.connections.write(server)
    if not shutil.which("ssh"):
        raise LabError(
            "there is no ssh on this machine", hint="sudo apt-get install openssh-client"
        )
    framed = portable(line) if line else ""
    words = interactive_argv(str(config), server.alias, framed, tty=tty, login=quick_login())
    sys.stdout.flush()
    os.execvp(words[0], words)


@click.command("attach")
@click.argument("run", default="")
@click.pass_context
def attach_command(ctx: click.Context, run: str) -> None:
    """The tmux session beside RUN (the latest): its log, the GPU, a shell in the container.

    Leave it with Ctrl-b d. Closing it does not touch the run.

    \b
    labctl attach
    """
    from labctl.runs import runs
    from labctl.shell import command

    lab = open_lab(ctx)
    found = runs.latest(lab.ground, run)
    server = lab.ground.server()
    about = {"lab": lab.config.name, "lab_id": lab.id, "run": found.id}
    session = lab.ground.remote(server).call("session", about)["session"]
    _replace(lab, command("exec", "tmux", "attach-session", "-t", f"={session}").render())


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--run", "run_id", default="", help="The run whose container it is (the latest).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_command(ctx: click.Context, run_id: str, command: tuple[str, ...]) -> None:
    """COMMAND inside a running run's container.

    \b
    labctl exec -- nvidia-smi
    labctl exec -- bash
    """
    from labctl.errors import NotFoundError
    from labctl.runs import runs
    from labctl.shell import command as words

    lab = open_lab(ctx)
    found = runs.latest(lab.ground, run_id)
    runs.refresh(lab.ground, lab.ground.server())
    found = runs.latest(lab.ground, found.id)
    if found.ended:
        raise NotFoundError(
            f"run {found.id} has ended", why=found.told, hint="labctl run -it -- bash"
        )
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    flags = ("-it",) if tty else ("-i",)
    inner = ("sh", "/lab/run/.labctl/entry.sh", *command)
    line = words("exec", "docker", "exec", *flags, "-e", "LABCTL_ENTER=1", found.container, *inner)
    _replace(lab, line.render(), tty=tty)


@click.command(
    "ssh",
    # What follows COMMAND's first word is COMMAND's, `--all` too.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--all", "all_", is_flag=True, help="COMMAND on every lab's server, not a shell.")
@click.option(
    "--at-once", default=32, show_default=True, type=click.IntRange(1, 256), help="With --all."
)
@click.option("--json", "json_", is_flag=True, help="With --all: one JSON object.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def ssh_command(
    ctx: click.Context, all_: bool, at_once: int, json_: bool, command: tuple[str, ...]
) -> None:
    """A shell on the server, or COMMAND there.

    With --all COMMAND runs on the servers of all labs, many at once. Each one's output is shown
    whole and in the order of their names, then who failed. Exits with the largest code of them,
    255 where a server was not reached.

    \b
    labctl ssh
    labctl ssh -- df -h
    labctl ssh --all -- nvidia-smi -L
    """
    from labctl.errors import UsageError
    from labctl.shell import command as words

    # One word is a line for the shell there, as with ssh; several are argv, each kept whole.
    line = command[0] if len(command) == 1 else words(*command).render()
    if not all_:
        if json_:
            raise UsageError("--json goes with --all", hint="labctl ssh --all --json -- COMMAND")
        tty = not command or (sys.stdin.isatty() and sys.stdout.isatty())
        _replace(open_lab(ctx), line, tty=tty)
    if not command:
        raise UsageError("--all needs a command", hint="labctl ssh --all -- uptime")
    from labctl.cli.fan_out import everywhere

    ctx.exit(everywhere(line, at_once, json_))


@click.command("cancel")
@click.argument("run", default="")
@click.option("--grace", default=60, show_default=True, help="Seconds to write a checkpoint.")
@json_option
@click.pass_context
def cancel_command(ctx: click.Context, run: str, grace: int, json_: bool) -> None:
    """End RUN (the latest): SIGTERM, time for a checkpoint, then SIGKILL.

    \b
    labctl cancel
    """
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import as_json
    from labctl.runs import runs

    lab = open_lab(ctx, quiet=json_)
    ground: Ground = lab.ground
    found = runs.latest(ground, run)
    ended, before = runs.cancel(ground, ground.server(), found.id, grace)
    if json_:
        as_json({"run": ended, "already": before})
    else:
        said = "had ended before: " if before else ""
        click.echo(f"run {ended.id}: {said}{clean(ended.told)}")
