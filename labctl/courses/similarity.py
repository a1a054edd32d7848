"""Code that submissions have in common, as evidence for a person to review. It proves nothing.

Students wrote the code: it is read as text, never executed, and a process of its own with limits
compares it. The result is stored below .course only.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config import copy_environment
from labctl.config.installation import install_command
from labctl.courses.collect import SeatSubmission, collect
from labctl.courses.grading.flags import is_generated
from labctl.courses.handed_out import hash_handed_out_files, list_handed_out_files
from labctl.courses.records.folder import CourseFolder
from labctl.courses.similarity_page import write_pages
from labctl.courses.similarity_worker import (
    CodeDocument,
    ComparisonReply,
    ComparisonRequest,
    SimilarPair,
    UncomparedFile,
)
from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError
from labctl.lifecycle.project_imports import read_notebook_code
from labctl.model import Value
from labctl.submissions import bundle
from labctl.sync.scan import hash_file

SIMILARITY = "similarity"
# The languages of course work. Other files are data, or nobody's own words.
CODE_SUFFIXES = frozenset(
    (".py", ".ipynb", ".sh", ".r", ".jl", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js")
)
# Larger files are data or generated; a submission with more of them is cut, and named.
MOST_FILE_BYTES = 256 * 1024
MOST_FILES, MOST_CODE_BYTES = 200, 1024 * 1024
MOST_PREVIOUS = 2000
COMPARISON_S = 600
MOST_MEMORY_BYTES = 4 * 1024**3
CODE = "code/"
# Runs the worker with limits for its memory and processor time.
LIMITED = (
    "import os, resource, sys\n"
    "memory, time = int(sys.argv[1]), int(sys.argv[2])\n"
    "resource.setrlimit(resource.RLIMIT_AS, (memory, memory))\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (time, time))\n"
    "os.execv(sys.executable, [sys.executable, '-P', '-m', sys.argv[3]])\n"
)
WORKER = "labctl.courses.similarity_worker"
# The same hashes each time; and no window, although copydetect imports matplotlib.
WORKER_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MPLBACKEND": "agg", "OPENBLAS_NUM_THREADS": "1"}


class SimilarityResult(Value, frozen=True):
    """The pairs of an assignment with code in common, the largest share first.

    `page` shows them side by side. Submissions of earlier years are named `previous:NAME`.
    """

    assignment: str
    submissions: int
    previous: int
    pairs: tuple[SimilarPair, ...]
    skipped: tuple[UncomparedFile, ...]
    page: Path


def find_similar_code(
    folder: CourseFolder, name: str, templates: Path, previous: Path | None = None, *, by: str = ""
) -> SimilarityResult:
    """Compare the code of an assignment's submissions with each other, and store the pages.

    `templates` holds those of labctl. `previous` has a directory for each submission of an earlier
    year, as `collect --into` writes them. Code that was handed out does not count.
    """
    if find_spec("copydetect") is None:
        raise LabError(
            "the similarity extra is not installed",
            why="the module copydetect is missing",
            hint=install_command("similarity"),
        )
    skipped: list[UncomparedFile] = []
    handed_out = hash_handed_out_files(folder, templates)
    documents = [
        _read_submission(submission, handed_out, skipped)
        for submission in collect(folder, name, by=by).accepted
    ]
    earlier = _read_previous(previous, handed_out, skipped) if previous is not None else []
    request = ComparisonRequest(
        documents=(*documents, *earlier), handed_out=_read_starters(folder, templates)
    )
    reply = _run_worker(request)
    skipped += reply.skipped
    pages = folder.private / SIMILARITY / name
    page = write_pages(pages, name, request, reply.pairs, templates / "similarity")
    return SimilarityResult(
        assignment=name,
        submissions=len(documents),
        previous=len(earlier),
        pairs=reply.pairs,
        skipped=tuple(skipped),
        page=page,
    )


def _is_code(path: str) -> bool:
    return Path(path).suffix.lower() in CODE_SUFFIXES and not is_generated(path)


def _read_submission(
    submission: SeatSubmission, handed_out: Collection[str], skipped: list[UncomparedFile]
) -> CodeDocument:
    with Path(submission.bundle).open("rb") as stream:
        manifest, members = bundle.inspect(stream)
        hashes = {file.path: file.sha256 for file in manifest.files}
        files = (
            (member.path.removeprefix(CODE), member.size, bundle.open_member(stream, member))
            for member in members
            if member.path.startswith(CODE) and hashes[member.path] not in handed_out
        )
        return CodeDocument(
            name=submission.seat, files=_read_files(submission.seat, files, skipped)
        )


def _read_previous(
    directory: Path, handed_out: Collection[str], skipped: list[UncomparedFile]
) -> list[CodeDocument]:
    """Read the submissions of an earlier year: each directory in `directory` is one."""
    if not directory.is_dir():
        raise NotFoundError(
            f"there is no directory {directory}",
            hint=f"labctl course collect NAME --into {directory}   # in the earlier course",
        )
    folders = [path for path in sorted(directory.iterdir()) if _is_own_directory(path)]
    return [
        _read_folder(f"previous:{path.name}", path, handed_out, skipped)
        for path in folders[:MOST_PREVIOUS]
    ]


def _is_own_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")


def _read_folder(
    name: str, root: Path, handed_out: Collection[str], skipped: list[UncomparedFile]
) -> CodeDocument:
    texts = _read_files(name, _open_files(root, handed_out), skipped)
    return CodeDocument(name=name, files=texts, is_previous=True)


def _open_files(root: Path, handed_out: Collection[str]) -> Iterator[tuple[str, int, BinaryIO]]:
    for path in sorted(root.rglob("*")):
        is_own = path.is_file() and not path.is_symlink()
        if not is_own or not _is_code(path.name) or hash_file(path) in handed_out:
            continue
        with path.open("rb") as stream:
            yield path.relative_to(root).as_posix(), path.stat().st_size, stream


def _read_files(
    name: str, files: Iterable[tuple[str, int, BinaryIO]], skipped: list[UncomparedFile]
) -> dict[str, str]:
    """Return the texts of a submission's code, by path; what is left out goes to `skipped`."""
    texts: dict[str, str] = {}
    total = 0
    for path, size, content in files:
        if not _is_code(path):
            continue
        total += size
        if size > MOST_FILE_BYTES or total > MOST_CODE_BYTES or len(texts) >= MOST_FILES:
            total -= size
            skipped.append(UncomparedFile(document=name, path=path, why="too large, or too many"))
        elif (text := _decode(path, content.read(size))) is None:
            skipped.append(UncomparedFile(document=name, path=path, why="it is not text"))
        else:
            texts[path] = text
    return texts


def _decode(path: str, data: bytes) -> str | None:
    """Return the code of a file, of a notebook that of its cells; None if it is not text."""
    try:
        text = data.decode()
        if path.lower().endswith(".ipynb"):
            text = read_notebook_code(text)
    except (ValueError, RecursionError):
        return None
    return None if "\0" in text else text


def _read_starters(folder: CourseFolder, templates: Path) -> dict[str, str]:
    """Return the code that students got from the course or from labctl, by path."""
    return {
        str(path): text
        for path in list_handed_out_files(folder, templates)
        if _is_code(path.name)
        and path.stat().st_size <= MOST_FILE_BYTES
        and (text := _decode(path.name, path.read_bytes())) is not None
    }


def _run_worker(request: ComparisonRequest) -> ComparisonReply:
    """Compare the documents in a process with limits; LabError if it exceeds them."""
    environment = {**copy_environment(), **WORKER_ENVIRONMENT}
    limits = (str(MOST_MEMORY_BYTES), str(COMPARISON_S))
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", LIMITED, *limits, WORKER],
                input=msgspec.json.encode(request),
                capture_output=True,
                cwd=directory,
                env=environment,
                timeout=COMPARISON_S,
                check=False,
            )
            if done.returncode == 0:
                return decode_json(done.stdout, ComparisonReply)
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"it ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it took more than {COMPARISON_S} s"
    raise LabError("the code could not be compared", why=why[:300], hint="labctl doctor --report")
