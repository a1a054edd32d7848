"""Before `down` removes a server: what a person copied into its home directory."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import PolicyError
from labctl.events import Note, Question, report_wait
from labctl.model import Server
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.sync import home_files
from labctl.sync.containment import escape_controls
from labctl.sync.home_files import SAVED, HomeFiles
from labctl.text import bytes_text
from labctl.wire.verbs import LabRequest

NAMED_AT_MOST = 5
# About 15 minutes at 100 Mbit/s, on a server that may cost money all the while.
LARGEST_UNASKED_BYTES = 10 * 1024**3
# seconds that the clocks of server and provider may differ
CLOCK_SLACK_S = 3600.0


def choose_home_files(context: LabContext, server: Server, *, asks: bool) -> HomeFiles | None:
    """Return the files to download before the server is removed; None without any.

    With `asks` the user decides, without it all of them are chosen. More than LARGEST_UNASKED_BYTES
    need a user who types the answer: PolicyError without one, because --yes means neither hours of
    a download nor the loss of such files. A leased machine keeps its files, so nothing is listed.
    """
    if adoption.is_shared_with_others(context):
        return None
    remote = context.open_agent(server)
    with report_wait(context.reporter, "reading the files in the server's home directory"):
        listed = home_files.list_home_files(remote, server.created_at - CLOCK_SLACK_S)
    if listed.skipped:
        names = _name_some(listed.skipped)
        text = f"not downloaded from the server's home directory, and deleted with it: {names}"
        context.reporter.emit(Note(text=text, level="warning"))
    if _sum_bytes(listed) > LARGEST_UNASKED_BYTES:
        if not asks or not _confirm(context, listed):
            raise _make_large_error(listed, asks=asks)
        return listed
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
    is_large = _sum_bytes(listed) > LARGEST_UNASKED_BYTES
    without = "they are deleted with the server"
    if is_large:
        without = "the server is stopped and its disk kept, where the provider can do that"
    detail = (
        f"In the server's home directory, outside the lab {context.name}: {_name_files(listed)}\n"
        f"If you do not download them, {without}."
    )
    question = f"download {_describe_amount(listed)} to {SAVED}/?"
    if is_large:
        typed = "download"
        question = f"{question} Type {typed} for yes"
        return context.reporter.confirm(Question(question=question, detail=detail, typed=typed))
    return context.reporter.confirm(Question(question=question, detail=detail, default=True))


def _make_large_error(listed: HomeFiles, *, asks: bool) -> PolicyError:
    more = f"labctl downloads more than {bytes_text(LARGEST_UNASKED_BYTES)} only if you"
    return PolicyError(
        f"the server's home directory has {_describe_amount(listed)} outside the lab: "
        f"{_name_files(listed)}",
        why=f"{more} type so" if asks else f"{more} copy them yourself",
    )


def _describe_amount(listed: HomeFiles) -> str:
    count = "1 file" if len(listed.files) == 1 else f"{len(listed.files)} files"
    return f"{count} ({bytes_text(_sum_bytes(listed))})"


def _sum_bytes(listed: HomeFiles) -> int:
    return sum(file.size for file in listed.files)


def _name_files(listed: HomeFiles) -> str:
    return _name_some(tuple(escape_controls(file.path) for file in listed.files))


def _name_some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more
