"""The server of one `labctl run`: checks before it costs money, and its removal after the run.

A server that something else uses is kept. The `--down` of the last command removes it.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from functools import partial

from labctl.errors import BuildError, LabError, PolicyError, UsageError
from labctl.events import Note
from labctl.lifecycle.down import Consent, DownResult, down
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.status import INTERRUPTED_DOWN
from labctl.model import Run, Server
from labctl.runs import run_specs, runs
from labctl.servers.accounts import ENDED
from labctl.servers.context import LabContext
from labctl.services.background_forwards import list_forwards
from labctl.state.uses import is_used
from labctl.sync import lab_files
from labctl.sync.single_file import download_file
from labctl.text import names_text

# seconds to wait while another command ends the same server; AWS takes minutes
WAIT_S = 600.0
_RUN = "labctl run --up --down"


class ServerInUseError(PolicyError):
    """The server is not the caller's to end: other runs or forwards use it, or it is a new one."""


def check_inputs(
    context: LabContext, command: tuple[str, ...], run_id: str, keeper: str = ""
) -> None:
    """Check what a run needs from this machine: command, name, secrets, files and keeper."""
    run_specs.require_valid(context, command, run_id or run_specs.make_run_id())
    runs.read_secrets(context)
    lab_files.check_trees(context)
    if keeper:
        KeeperHost(context, keeper).fetch_inventory()


def require_not_ended(context: LabContext, run: Run) -> None:
    """UsageError if this run has ended on an earlier server, so that it would run a second time."""
    if run.has_ended and not _is_server_there(context, run):
        raise UsageError(
            f"run {run.id} has already ended: {run.summary}",
            why="its server is gone, so a new server would run it a second time",
            hint=f"labctl pull {run.id}   # its results\n"
            f"labctl run --up -- {shlex.join(run.command)}   # starts a new run with another id",
        )


def _is_server_there(context: LabContext, run: Run) -> bool:
    """Whether the run's server still exists; its provider knows, since a watchdog may end it."""
    recorded = context.state.get_lab_server(context.lab_id)
    if recorded is None or recorded.id != run.server_id:
        return False
    shown = context.provider.find(recorded.id)
    return shown is not None and shown.state not in ENDED


def end_unused(context: LabContext, *, is_own: bool, server_id: str = "") -> DownResult:
    """Do what `down` does without asking; ServerInUseError if something else uses the server.

    `is_own`: the caller created the server, so forwards to it are the caller's too. With
    `server_id`, no other server is ended.
    """
    consent: Consent = partial(_require_unused, is_own=is_own, server_id=server_id)
    return down(context, discard=False, consent=consent, wait_s=WAIT_S)


def _require_unused(
    context: LabContext,
    server: Server,
    running: list[str],
    discard: bool,
    *,
    is_own: bool,
    server_id: str,
) -> None:
    uses = _list_uses(context, server, is_own=is_own)
    # The first server has the run; without it, the others of the lab are of no use.
    if server_id not in ("", server.id) and not context.rank:
        uses.append(f"the run was on {server_id}, which has ended; this is a new server")
    if uses:
        raise ServerInUseError(
            f"{server.alias} was not removed", why="\n".join(uses), hint=context.subject.down
        )


def _list_uses(context: LabContext, server: Server, *, is_own: bool) -> list[str]:
    """Describe what uses the server; its runs are as last recorded."""
    uses = []
    # The servers of a lab that has several are used together.
    lab_id = context.lab_id if context.rank is None else context.group
    active = [
        run.id
        for run in context.state.list_runs(context.lab_id)
        if run.state in ("starting", "running") and run.server_id == server.id
    ]
    if active and server.state != "stopped":
        verb = "is" if len(active) == 1 else "are"
        uses.append(f"{names_text(active, 5)} {verb} still running on it")
    elif is_used(context.state, lab_id, "run"):
        uses.append("another `labctl run` of this lab is using it")
    if is_own:
        return uses
    if open_forwards := [one.service for one in list_forwards(context.state, server.id)]:
        uses.append(f"a background forward is open: {names_text(open_forwards, 5)}")
    if is_used(context.state, lab_id, "forward"):
        uses.append("`labctl forward` or `labctl serve` is open in a terminal")
    return uses


def save_build_log(context: LabContext, error: BuildError) -> None:
    """Copy the log of a failed build to this machine, and name the copy in the error."""
    if not error.log_path:
        return
    # Keep what the error says about the repair; its command that shows the log needs the server.
    repair = [line for line in str(error.hint).splitlines() if error.log_path not in line]
    repair = [re.sub(r"labctl run$", _RUN, line) for line in repair]
    directory = context.paths.log_dir
    copy = directory / f"build-{posixpath.basename(error.log_path)}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        transport = context.open_agent(context.get_server()).transport
        download_file(transport, error.log_path, copy, context.reporter)
    except (LabError, OSError) as failure:
        text = f"the build log could not be saved: {failure}"
        context.reporter.emit(Note(text=text, level="warning"))
        file = context.config.image.environment_file or "the Dockerfile"
        error.hint = "\n".join(repair or [f"fix {file}, then:", _RUN])
        return
    error.log_path = str(copy)
    error.hint = "\n".join([*repair, f"less {copy}   # the full log"])


def record_interrupted_down(context: LabContext, run_id: str, reason: str) -> None:
    """Record that `--down` was interrupted, so that `labctl status` can say so."""
    server = context.state.get_lab_server(context.lab_id)
    if server is not None:
        context.state.record(
            INTERRUPTED_DOWN,
            lab_id=context.lab_id,
            server_id=server.id,
            run_id=run_id,
            detail={"why": reason},
        )
