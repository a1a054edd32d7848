"""A student's download of the results that the course's keeper saved of their ended server."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from labctl.errors import LabError, NotFoundError, ProviderError, UsageError
from labctl.events import Progress
from labctl.model import Value
from labctl.providers.course import CourseProvider
from labctl.servers.context import LabContext
from labctl.sync.containment import find_name_problem
from labctl.sync.ignore import create_ignored_directory
from labctl.wire.containment import find_link_on_way
from labctl.wire.keeper import FetchSavedFileReply, SavedFileRecord

# Not runs/: there, names are those of this lab's own runs, and a seat's labs share its server.
DIRECTORY = "from-course"
DRAFT = ".labctl-partial"


class SavedResults(Value, frozen=True):
    """The files that were downloaded to `directory` now, those there before, and those skipped."""

    directory: Path
    downloaded: tuple[str, ...]
    present: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    size_bytes: int = 0


def fetch_saved_results(context: LabContext) -> SavedResults:
    """Download what the keeper saved of the student's seat to `from-course/` in the lab.

    A file that exists is left alone. Each is verified before it gets its name. NotFoundError if the
    keeper has nothing, UsageError if the lab's servers come from no course.
    """
    provider = _find_course_provider(context)
    files = provider.list_saved_files()
    if not files:
        raise NotFoundError(
            "the course has no saved results of yours",
            why="the keeper saves them when it ends a server",
            hint="labctl pull",
        )
    root = context.config.root / DIRECTORY
    create_ignored_directory(root)
    downloaded, present, skipped, size_bytes = [], [], [], 0
    for done, file in enumerate(files):
        context.reporter.emit(
            Progress(name="downloading", done=done, total=len(files), unit="files")
        )
        if find_name_problem(file.path) or find_link_on_way(root, file.path) is not None:
            skipped.append(file.path)
        elif (root / file.path).exists():
            present.append(file.path)
        else:
            _download(provider, root, file)
            downloaded.append(file.path)
            size_bytes += file.size_bytes
    return SavedResults(
        directory=root,
        downloaded=tuple(downloaded),
        present=tuple(present),
        skipped=tuple(skipped),
        size_bytes=size_bytes,
    )


def _find_course_provider(context: LabContext) -> CourseProvider:
    provider = context.provider
    if not isinstance(provider, CourseProvider):
        raise UsageError(
            f"the servers of {context.name} do not come from a course",
            why="only a course's keeper saves the results of servers that it ends",
            hint="labctl pull",
        )
    return provider


def _download(provider: CourseProvider, root: Path, file: SavedFileRecord) -> None:
    """Download one file next to its place, verify it, and rename it."""
    target = root / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    draft, digest, offset = target.parent / DRAFT, hashlib.sha256(), 0
    try:
        with draft.open("wb") as out:
            while True:
                reply = provider.fetch_saved_part(file.path, offset)
                part = _decode_part(reply)
                out.write(part)
                digest.update(part)
                offset += len(part)
                if offset >= reply.size_bytes or not part:
                    break
        if offset != reply.size_bytes or digest.hexdigest() != reply.sha256:
            raise ProviderError(
                f"{file.path!a} changed while it was downloaded", hint="labctl pull --from-course"
            )
        draft.replace(target)
    except OSError as error:
        raise LabError(f"cannot write {target}", why=error.strerror or "") from error
    finally:
        draft.unlink(missing_ok=True)


def _decode_part(reply: FetchSavedFileReply) -> bytes:
    try:
        return base64.b64decode(reply.data, validate=True)
    except ValueError:
        raise ProviderError(
            "the keeper sent an invalid part of a file", hint="tell your instructor"
        ) from None
