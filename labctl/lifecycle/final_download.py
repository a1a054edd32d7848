"""Save everything that is only on a server, before it is removed."""

from __future__ import annotations

from contextlib import suppress

from labctl.errors import EngineError, LabError, PolicyError
from labctl.errors.subject import Subject
from labctl.events import Note, report_wait
from labctl.lifecycle import home_files, unsaved_server, up
from labctl.model import Server, Value
from labctl.runs import outputs, runs
from labctl.runs.saved_copies import note_downloaded
from labctl.servers import adoption, kept_disks
from labctl.servers.context import LabContext
from labctl.services import lab_services
from labctl.sync import lab_files
from labctl.sync.home_files import HomeFiles
from labctl.sync.local_results import MissingFile

GRACE_S = 60
NAMED_AT_MOST = 20
FIX_FILES = (
    "labctl up && labctl ssh   # rename them or make them readable\nlabctl down   # afterwards\n"
    "labctl down --discard   # instead, to delete them"
)


def decide_on_home(subject: Subject) -> str:
    """Return the commands for a home directory that is too large to download unasked."""
    if subject.kind == "lab":
        deleting = "labctl up && labctl pull && labctl down --discard"
        return f"labctl down   # asks about them\n{deleting}   # instead, to delete them"
    return (
        f"{subject.up}   # starts the server again\n"
        f"{subject.ssh('ls -l')}   # copy these files, or delete them\n"
        f"{subject.down}   # afterwards\n{subject.down} --discard   # instead, saves nothing"
    )


class FinalDownload(Value, frozen=True):
    """How many files `download_everything` downloaded.

    `home_directory` is where those of the home directory are, relative to the lab; "" without any.
    """

    results: int = 0
    edits: int = 0
    home_files: int = 0
    home_directory: str = ""


def download_everything(
    context: LabContext, server: Server, running: list[str], *, asks_for_home: bool | None = None
) -> FinalDownload:
    """Stop what runs, pull everything and verify it.

    Files in the home directory are downloaded too: if the user agrees with `asks_for_home`, always
    if that is False, and never if it is None.
    """
    if server.state == "stopped":
        server = up.make_ready(context, server)
    home = None
    if asks_for_home is not None:
        home = _choose_home_files(context, server, asks_for_home)
    is_home_saved, home_directory = not home, ""
    try:
        _end_work(context, server, running)
        pulled = outputs.pull(context, server, [], everything=True)
        with report_wait(context.reporter, "looking for files that were edited on the server"):
            edits = lab_files.save_edits(context, server)
        if home:
            directory = home_files.pull_home_files(context, server, home)
            home_directory = directory.relative_to(context.config.root.resolve()).as_posix()
            is_home_saved = True
        unsaved = [
            *(describe_missing(file) for file in outputs.list_missing(context, server)),
            *(f"code/{skipped}" for skipped in edits.skipped),
        ]
    except LabError as error:
        raise unsaved_server.stop_and_keep_disk(
            context, server, error, home_is_saved=is_home_saved
        ) from error
    if unsaved:
        raise unsaved_server.stop_and_keep_disk(
            context, server, make_unsaved_error(unsaved), hint=FIX_FILES, home_is_saved=True
        )
    kept_disks.note_saved(context, server)
    note_downloaded(context, server)
    remove_containers(context, server)
    return FinalDownload(
        results=sum(run.files for run in pulled),
        edits=len(edits.saved),
        home_files=len(home.files) if home else 0,
        home_directory=home_directory,
    )


def _choose_home_files(context: LabContext, server: Server, asks: bool) -> HomeFiles | None:
    try:
        return home_files.choose_home_files(context, server, asks=asks)
    except PolicyError as error:
        raise unsaved_server.stop_and_keep_disk(
            context, server, error, hint=decide_on_home, home_is_saved=False
        ) from error
    except LabError as error:
        raise unsaved_server.stop_and_keep_disk(
            context, server, error, home_is_saved=False
        ) from error


def _end_work(context: LabContext, server: Server, running: list[str]) -> None:
    """Cancel these runs and stop the lab's services. Without an engine none of them can run."""
    for run_id in running:
        run, _ = runs.cancel(context, server, run_id, GRACE_S)
        context.reporter.emit(Note(text=f"{run.id}: {run.summary}"))
    # A file that a notebook saves after the pull would be lost with the server.
    with suppress(EngineError), report_wait(context.reporter, "stopping the services"):
        lab_services.stop_services(context, server)


def remove_containers(context: LabContext, server: Server) -> None:
    """Remove the lab's containers from a server that ends; one that is deleted may keep them."""
    try:
        with report_wait(context.reporter, "removing the lab's containers"):
            lab_services.remove_containers(context, server)
    except EngineError as error:
        # A deleted machine loses its containers. A leased one must not pass them to the next user.
        if not adoption.is_leased(context):
            return
        error.why = f"{error.why}\nthe results are downloaded; only containers may be left there"
        error.hint = "\n".join(
            [error.hint, f"{context.subject.down} --discard   # ends the lease without Docker"]
        )
        raise


def describe_missing(file: MissingFile) -> str:
    """Name a file that is only on the server, and why."""
    return f"runs/{file.run}/{file.path}" + (f": {file.reason}" if file.reason else "")


def make_unsaved_error(names: list[str]) -> LabError:
    """Build the error about files that exist only on the server."""
    shown = "\n".join(f"  {name}" for name in names[:NAMED_AT_MOST])
    more = f"\n  and {len(names) - NAMED_AT_MOST} more" * (len(names) > NAMED_AT_MOST)
    count = "1 file exists" if len(names) == 1 else f"{len(names)} files exist"
    return LabError(f"{count} only on the server:\n{shown}{more}")
