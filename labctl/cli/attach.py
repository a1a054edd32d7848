"""The commands attach and exec: a terminal in a run's session or container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.completion_values import complete_files, complete_runs
from labctl.cli.options import RUN, SERVER, make_empty_name_error, open_lab
from labctl.cli.own_command import SEPARATOR, OwnCommand, require_program, split_words
from labctl.cli.plain_ssh import ABOUT_THE_GPU, replace_with_exec, replace_with_ssh
from labctl.cli.wrapping import print_message
from labctl.errors import NotFoundError, UsageError
from labctl.lazy import lazy_imports
from labctl.shell import command as words
from labctl.wire.runs import OPEN_SESSION, RunRequest

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from labctl.model import Run, Server
    from labctl.servers.context import LabContext

with lazy_imports(__name__):
    from labctl.lifecycle import reconcile
    from labctl.runs import runs
    from labctl.servers import gpus

# programs that show the same on the server as in a container
_ABOUT_THE_SERVER = frozenset(
    ("df", "free", "htop", "lscpu", "nproc", "nvidia-smi", "nvtop", "ps", "top", "uptime")
)
# programs that need a terminal if nothing follows them
_INTERACTIVE = frozenset(("bash", "ipython", "python", "python3", "sh", "zsh"))
# key in click's context: whether the words of `labctl exec` contain `--`
HAS_SEPARATOR = "labctl.has_separator"


@click.command("attach")
@RUN
@click.pass_context
def attach_command(ctx: click.Context, run: str) -> None:
    """Open the tmux session beside RUN (default: the latest run).

    It has windows for the run's log, the GPU (without one: the processes), and a shell in the
    container. Change the window with Ctrl-b n, and leave with Ctrl-b d. Closing it does not affect
    the run.

    \b
    labctl attach
    """
    lab = open_lab(ctx)
    run_id = runs.find_run(lab.context, run).id
    request = RunRequest(lab.config.name, lab.id, run_id)
    try:
        server = lab.context.get_server()
        reply = lab.context.open_agent(server).call(OPEN_SESSION, request)
    except NotFoundError as error:
        # There is no server, or the run was on an earlier one.
        if reconcile.local_log_path(lab.context, run_id).is_file():
            error.hint = words("labctl", "logs", run_id).render()
        raise
    line = ["exec", "tmux", "attach-session", "-t", f"={reply.session}"]
    if reply.ended:  # the session ends with its viewer, as nothing else would end it
        line += [";", "set-option", "-t", f"={reply.session}:", "destroy-unattached", "on"]
        text = f"Run {run_id} has ended. Ctrl-b d leaves its session, which shows the log."
        print_message(f"{text} To print the log: labctl logs {run_id}")
    else:
        print_message(f"The session of run {run_id}. Leave it with Ctrl-b d; the run continues.")
    replace_with_ssh(lab.context, words(*line).render())


def _complete_run_or_command(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Offer runs before `--`, and files after it: the lab's code is in the container too."""
    complete = complete_files if ctx.meta.get(HAS_SEPARATOR) else complete_runs
    return complete(ctx, param, incomplete)


class _ExecCommand(OwnCommand):
    """`labctl exec`: the word before `--` is a run."""

    def parse_words(self, ctx: click.Context, args: list[str]) -> list[str]:
        before, command = split_words(args)
        ctx.meta[HAS_SEPARATOR] = SEPARATOR in args
        rest = super().parse_words(ctx, before)
        ctx.params["command"] = tuple(command)
        return rest

    def names_run(self, ctx: click.Context, word: str) -> bool:
        runs_on_record = complete_runs(ctx, self.params[0], word)
        return any(item.value == word for item in runs_on_record)


@click.command("exec", cls=_ExecCommand)
@click.argument(
    "typed",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[RUN] -- COMMAND",
    shell_complete=_complete_run_or_command,
)
@click.option(
    "-it",
    "tty",
    is_flag=True,
    expose_value=False,
    help="Has no effect, as exec uses your terminal if there is one.",
)
@SERVER
@click.pass_context
def exec_command(
    ctx: click.Context, typed: tuple[str, ...], command: tuple[str, ...], rank: int
) -> None:
    """Run COMMAND inside the container of RUN (default: the latest run), which must be running.

    \b
    labctl exec -- nvidia-smi
    labctl exec -- bash
    labctl exec night -- bash
    """
    if "" in typed:
        raise make_empty_name_error("RUN")
    lab = open_lab(ctx, rank=rank)
    require_program(f"labctl exec {' '.join(typed[:1])}".rstrip(), command)
    if not command or len(typed) > 1:
        is_run = len(typed) == 1 and lab.context.state.get_run(lab.id, typed[0]) is not None
        raise _make_no_command_error(typed, is_run)
    run = runs.find_run(lab.context, typed[0] if typed else "")
    server = lab.context.get_server()
    runs.refresh(lab.context, server)
    run = runs.find_run(lab.context, run.id)
    _require_gpu_for(command, lab.context, server)
    if run.has_ended:
        others = [one for one in lab.context.state.list_runs(lab.id) if one.state == "running"]
        hint = suggest_after_end(command, others)
        raise NotFoundError(f"run {run.id} has ended", why=run.summary, hint=hint)
    replace_with_exec(lab.context, run, command)


def _require_gpu_for(command: Sequence[str], context: LabContext, server: Server) -> None:
    """NotFoundError if the command shows GPUs, and the record says that the server has none.

    Without an `up` on this machine, nothing is known about the server. On a cluster, the record is
    about the login node, and a run may have the GPUs of another machine.
    """
    if command[0] not in ABOUT_THE_GPU or context.config.submits_jobs:
        return
    facts = context.load_facts(server)
    if not facts.os or facts.gpus:
        return
    top = "labctl top   # the use of processors and memory"
    raise NotFoundError(
        "this server has no GPU",
        why=f"{command[0]} comes with the driver of an NVIDIA GPU",
        hint="\n".join([*gpus.suggest_other_server(context), top]),
    )


def suggest_after_end(command: Sequence[str], running: Sequence[Run]) -> str:
    """Return what to type for a command whose run has ended; `running` are the other runs."""
    hints = [
        f"{words('labctl', 'exec', run.id, SEPARATOR, *command).render()}   # is still running"
        for run in running[:1]
    ]
    if command[0] in _ABOUT_THE_SERVER:
        hints.append(f"{words('labctl', 'ssh', SEPARATOR, *command).render()}   # on the server")
    else:
        options = ["-it"] if len(command) == 1 and command[0] in _INTERACTIVE else []
        line = words("labctl", "run", *options, SEPARATOR, *command).render()
        hints.append(f"{line}   # in a new run")
    return "\n".join(hints)


def _make_no_command_error(typed: Sequence[str], is_run: bool) -> UsageError:
    command = "bash" if is_run or not typed else words(*typed).render()
    run = f"{typed[0]} " if is_run else ""
    return UsageError(
        "labctl exec needs `--` before the command",
        why="a word before `--` is the name of a run; without one, it is the latest run",
        hint=f"labctl exec {run}-- {command}",
    )
