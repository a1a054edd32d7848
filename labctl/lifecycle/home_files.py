"""Before `down` removes a server: what a person copied into its home directory."""

from __future__ import annotations

from pathlib import Path

from labctl.events import Note, Question, report_wait
from labctl.model import Server
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.sync import home_files
from labctl.sync.home_files import SAVED, HomeFiles
from labctl.text import bytes_text
from labctl.wire.verbs import LabRequest

NAMED_AT_MOST = 5
# seconds that the clocks of server and provider may differ
CLOCK_SLACK_S = 3600.0


def choose_home_files(context: LabContext, server: Server, *, asks: bool) -> HomeFiles | None:
    """Return the files to download before the server is removed; None without any.

    With `asks` the user decides, without it all of them are chosen. A leased machine keeps its
    files, so nothing is listed there.
    """
    if adoption.is_leased(context):
        return None
    remote = context.open_agent(server)
    with report_wait(context.reporter, "reading the files in the server's home directory"):
        listed = home_files.list_home_files(remote, server.created_at - CLOCK_SLACK_S)
    if listed.skipped:
        names = _name_some(listed.skipped)
        text = f"not downloaded from the server's home directory, and deleted with it: {names}"
        context.reporter.emit(Note(text=text, level="warning"))
    if not listed.files or (asks and not _confirm(context, listed)):
        return None
    return listed


def pull_home_files(context: LabContext, server: Server, listed: HomeFiles) -> Path:
    """Download the chosen files to a new directory below `<lab>/server-home/`; return it."""
    return home_files.pull_home_files(
        context.open_agent(server),
        LabRequest(context.config.name, context.lab_id),
        listed,
        context.config.root,
        reporter=context.reporter,
    )


def _confirm(context: LabContext, listed: HomeFiles) -> bool:
    count = "1 file" if len(listed.files) == 1 else f"{len(listed.files)} files"
    size = bytes_text(sum(file.size for file in listed.files))
    names = _name_some(tuple(file.path for file in listed.files))
    decision = Question(
        question=f"download {count} ({size}) to {SAVED}/?",
        detail=f"In the server's home directory, outside the lab {context.name}: {names}\n"
        "If you do not download them, they are deleted with the server.",
        default=True,
    )
    return context.reporter.confirm(decision)


def _name_some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more
