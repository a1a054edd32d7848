"""Push a lab's code and data to its server, and pull code that was edited there."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labctl.config import LabConfig
from labctl.errors import UsageError
from labctl.events import Reporter, SilentReporter, UniqueNote, report_part
from labctl.lazy import lazy_imports
from labctl.model import FileEntry, Server
from labctl.parallel import run_parts
from labctl.servers.context import LabContext
from labctl.sync import push as transfer
from labctl.sync.fetch import fetch_data
from labctl.sync.ignore import IgnoredName
from labctl.sync.ignored_files import describe_data_in_code, describe_ignored, read_code
from labctl.sync.push import Files, PushedTree
from labctl.sync.pushed_code import save_pushed_code
from labctl.sync.scan import HashIndex, scan_code, scan_data
from labctl.sync.transfer_lock import hold_transfers, share_transfers
from labctl.wire.server_data import CHECK_DATA, CheckDataRequest
from labctl.wire.verbs import LabRequest

if TYPE_CHECKING:  # a push starts faster without the modules for downloads
    from labctl.sync.edits import EditsResult

with lazy_imports(__name__):
    from labctl.sync import edits

# Target on the server, local directory, its files, and the index of their hashes.
Tree = tuple[str, Path, Files, HashIndex]


def push(context: LabContext, server: Server, *, force: bool) -> list[PushedTree]:
    """Push the lab's code and data side by side; the server fetches data with an address."""
    if not context.config.data:
        return [push_code(context, server, force=force)]
    with share_transfers():
        pushed = run_parts(
            {
                "code": lambda: [push_code(context, server, force=force)],
                "data": lambda: push_data(context, server, force=force),
            }
        )
    return [*pushed["code"], *pushed["data"]]


def push_code(context: LabContext, server: Server, *, force: bool) -> PushedTree:
    """Push the lab's code. After new code, say which files a run may miss."""
    root, reporter = context.config.root, context.reporter
    inside = _list_data_inside(context.config)
    index = HashIndex(root, "code")
    ignored: list[IgnoredName] = []
    files: list[FileEntry] = []

    def scan() -> Sequence[FileEntry]:
        files.extend(scan_code(root, reporter, data=inside, later=index, ignored=ignored))
        return files

    with report_part(reporter, "code"):
        (pushed,) = _push_trees(context, server, [("code", root, scan, index)], force=force)
    _record_pushed(context, server, files, index)
    if pushed.sent:
        _note_missing_files(context, ignored, files)
    return pushed


def _record_pushed(
    context: LabContext, server: Server, files: Sequence[FileEntry], index: HashIndex
) -> None:
    """Record which code the server has now, for the comparison of its runs."""
    root = context.config.root
    hashes: dict[str, str] = {}
    for file in files:
        with contextlib.suppress(OSError):
            # The push has hashed what its scan left out.
            hashes[file.path] = file.sha256 or index.lookup(
                file.path, (root / file.path).stat(follow_symlinks=False)
            )
    save_pushed_code(root, context.lab_id, server.id, hashes)


def _note_missing_files(
    context: LabContext, ignored: Sequence[IgnoredName], code: Sequence[FileEntry]
) -> None:
    """Say which files a run may miss that are on this machine."""
    config = context.config
    data = {name: one.path for name, one in config.data.items() if one.path and one.inside_lab}
    if not (ignored or data):
        return
    texts = read_code(config.root, code)
    for text in (
        describe_ignored(config.root, ignored, texts),
        describe_data_in_code(config.root, data, texts),
    ):
        if text:
            context.reporter.emit(UniqueNote(text=text))


def push_data(context: LabContext, server: Server, *, force: bool = False) -> list[PushedTree]:
    """Push only the data directories; the server fetches data with an address.

    Raises if the server lacks a directory that it should have by itself.
    """
    with report_part(context.reporter, "data"):
        check_server_data(context, server)
        pushed = _push_directories(context, server, force=force)
        config = context.config
        urls = {name: source.url for name, source in config.data.items() if source.url}
        if urls:
            remote = context.open_agent(server)
            fetch_data(remote, config.name, context.lab_id, urls, context.reporter)
    return pushed


def check_server_data(context: LabContext, server: Server) -> None:
    """NotFoundError if a directory of `server:` data is not on the server.

    PolicyError if a run may not read it there.
    """
    if directories := context.config.server_data:
        context.open_agent(server).call(CHECK_DATA, CheckDataRequest(directories))


def _push_directories(context: LabContext, server: Server, *, force: bool) -> list[PushedTree]:
    trees = _scan_directories(context.config, context.reporter)
    return _push_trees(context, server, trees, force=force) if trees else []


def _scan_directories(config: LabConfig, reporter: Reporter) -> list[Tree]:
    trees: list[Tree] = []
    for name, source in config.data.items():
        if source.path is not None:
            index = HashIndex(config.root, f"data/{name}")
            files = scan_data(config.root, name, source.path, reporter, later=index)
            trees.append((f"data/{name}", source.path, files, index))
    return trees


def _list_data_inside(config: LabConfig) -> list[Path]:
    """List the data directories that are inside the lab, and so not part of its code."""
    return [data.path for data in config.data.values() if data.path and data.inside_lab]


def _push_trees(
    context: LabContext, server: Server, trees: Sequence[Tree], *, force: bool
) -> list[PushedTree]:
    with hold_transfers(context.config.root, "push", context.reporter):
        remote = context.open_agent(server)
        return [
            transfer.push_tree(
                remote,
                context.config.name,
                context.lab_id,
                target,
                root,
                files,
                context.reporter,
                force=force,
                index=index,
            )
            for target, root, files, index in trees
        ]


def check_trees(context: LabContext) -> None:
    """UsageError if a file of the code or the data cannot be pushed: bad name or no permission.

    Before the lab has a server, also say which files a run may miss.
    """
    config, quiet = context.config, SilentReporter()
    ignored: list[IgnoredName] = []
    try:
        inside, index = _list_data_inside(config), HashIndex(config.root, "code")
        code = scan_code(config.root, quiet, data=inside, later=index, ignored=ignored)
        trees: list[tuple[Path, Sequence[FileEntry]]] = [(config.root, code)]
        for _, root, files, _ in _scan_directories(config, quiet):
            trees.append((root, files() if callable(files) else files))
    except PermissionError as error:
        raise _make_unreadable_error(str(error.filename)) from error
    for root, files in trees:
        for entry in files:
            if not os.access(root / entry.path, os.R_OK):
                raise _make_unreadable_error(str(root / entry.path))
    has_server = context.state.get_lab_server(context.lab_id) is not None
    if not has_server:
        _note_missing_files(context, ignored, code)


def _make_unreadable_error(path: str) -> UsageError:
    return UsageError(
        f"cannot read {path}",
        why="you have no permission to read it, so it cannot be sent to a server",
        hint=f"chmod u+r {shlex.quote(path)}   # or add it to .labignore",
    )


def save_edits(context: LabContext, server: Server) -> EditsResult:
    """Save files that were edited on the server to `<lab>/server-edits/`."""
    return _pull_edits(context, server, merge=False)


def pull_code(context: LabContext, server: Server) -> list[str]:
    """Copy files that were edited on the server into the lab; return the paths of all of them."""
    result = _pull_edits(context, server, merge=True)
    return [*result.brought, *(f"{result.directory}/{name}" for name in result.saved)]


def _pull_edits(context: LabContext, server: Server, *, merge: bool) -> EditsResult:
    remote, lab = context.open_agent(server), LabRequest(context.config.name, context.lab_id)
    root, reporter = context.config.root, context.reporter
    return edits.pull_edits(remote, lab, root, reporter=reporter, merge=merge)
