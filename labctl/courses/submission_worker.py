"""Prepare a submission from a student's server, in a process of its own beside the keeper.

The files come from a student: their names, ignore rules and contents are parsed here, under limits
of time and memory, and not in the keeper. The bundle that the student confirms is the one that is
written here: what changes on the server afterwards does not matter.
"""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import msgspec

from labctl.config import Paths
from labctl.courses import server_contents, starters
from labctl.courses.records.folder import CourseFolder
from labctl.courses.servers import CourseOperator
from labctl.courses.status import build_seat_context, find_server
from labctl.decoding import decode_json
from labctl.errors import (
    ConnectError,
    LabError,
    NotFoundError,
    PolicyError,
    TransferError,
    UsageError,
)
from labctl.errors.unexpected import as_lab_error
from labctl.events import SilentReporter
from labctl.model import Run, Server, Value
from labctl.runs import public_tests
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.servers.context import LabContext
from labctl.state import State
from labctl.submissions import bundle
from labctl.submissions.assignment import Assignment
from labctl.submissions.bundle_checks import require_no_secrets
from labctl.submissions.bundling import (
    BundleContents,
    assemble_contents,
    find_missing_part,
)
from labctl.submissions.confinement import end_with_parent
from labctl.submissions.examination import examine_confined
from labctl.submissions.freshness import RunOnServer, find_stale_results
from labctl.submissions.intake import Expected
from labctl.submissions.manifest import CodeCommit
from labctl.submissions.receiver import Receiver
from labctl.submissions.run_files import CHECKPOINTS, LOGS, REPORT, find_best_checkpoint
from labctl.sync import selected_files
from labctl.text import names_text
from labctl.wire.checkpoints import MANIFEST
from labctl.wire.verbs import LabRequest

BUNDLE, RESULT, LAB = "bundle.tar", "prepared.json", "lab"
MEMORY_BYTES = 2 * 1024**3
CPU_S = 300
TESTS_S = 60
MOST_NAMED = 5
# Errors that are about the student's own files and server.
FOR_STUDENTS = (NotFoundError, PolicyError, TransferError, UsageError)
# Files that are named on the page; all of them are counted.
MOST_LISTED = 200


class SubmissionOrder(Value, frozen=True):
    """What to prepare: a run and the code of its lab or, without a run, the code of `lab_id`.

    `directory` is an empty private directory. `paths` are the fields of `Paths`.
    """

    course: str
    paths: dict[str, str]
    seat: str
    student: str
    assignment: str
    directory: str
    lab_id: str = ""
    run: str = ""


class PreparedFile(Value, frozen=True):
    path: str
    size: int


class PublicTestSummary(Value, frozen=True):
    """What the public tests say in one sentence; "" if there are none."""

    text: str = ""
    all_pass: bool = False


class PreparedSubmission(Value, frozen=True):
    """A bundle that is ready to be submitted, or `what` failed and `why`.

    `files` are the first of `file_count`. `notes` and `stale` are as in `BundleContents`.
    """

    what: str = ""
    why: str = ""
    run: str = ""
    checkpoint: str = ""
    sha256: str = ""
    bundle_bytes: int = 0
    file_count: int = 0
    files: tuple[PreparedFile, ...] = ()
    notes: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    tests: PublicTestSummary = PublicTestSummary()


def prepare(order: SubmissionOrder) -> PreparedSubmission:
    """Write the bundle of `order` to its directory, checked as `labctl submit` checks it."""
    folder = CourseFolder(Path(order.course))
    paths = Paths(**{name: Path(value) for name, value in order.paths.items()})
    receiver = Receiver(folder.drop)
    rules = receiver.load_rules(order.assignment)
    if not receiver.standing(rules.name, order.student).accepted:
        raise PolicyError(f"{rules.name} accepts no submissions any more")
    with State(paths.database) as state:
        staff = CourseOperator(folder, paths, state, SilentReporter(), by=order.student)
        server, lab, run = _find_work(staff, order)
        work = _make_copy(lab, Path(order.directory) / LAB)
        checkpoint, skipped = _download(lab, server, run, work.config.root, rules.max_size)
        contents = _collect(work, rules, order.student, run, checkpoint)
        tests = _run_public_tests(folder, work, rules.name, run)
    target = Path(order.directory) / BUNDLE
    with target.open("wb") as out:
        sha256 = bundle.write_bundle(contents.manifest, contents.sources, out)
    # As the receiver will: so a student learns of a hazard before they confirm.
    expected = Expected(rules.name, rules.course, order.student)
    examine_confined(target, expected, folder.drop / "incoming")
    files = contents.manifest.files
    return PreparedSubmission(
        run=contents.manifest.run,
        checkpoint=checkpoint,
        sha256=sha256,
        bundle_bytes=contents.bundle_bytes,
        file_count=len(files),
        files=tuple(PreparedFile(path=file.path, size=file.size) for file in files[:MOST_LISTED]),
        notes=(*contents.notes, *skipped),
        stale=contents.stale,
        tests=tests,
    )


def _find_work(
    staff: CourseOperator, order: SubmissionOrder
) -> tuple[Server, LabContext, Run | None]:
    """Return the server, and the lab with the run; NotFoundError if the server has them not."""
    seat = staff.folder.find_seat(order.seat)
    server = find_server(staff, seat)
    labs = server_contents.list_labs(build_seat_context(staff, seat), server)
    if order.run:
        lab, run = server_contents.find_latest_run(labs, server, order.run)
        return server, lab, run
    for lab in labs:
        if lab.lab_id == order.lab_id:
            return server, lab, None
    raise NotFoundError("this lab has no files on the server yet", why="save them in /lab/code")


def _make_copy(lab: LabContext, root: Path) -> LabContext:
    """Return the lab with the directory of its own where its files are downloaded to."""
    root.mkdir(mode=0o700)
    config = msgspec.structs.replace(lab.config, root=root, data={}, secrets=())
    return lab.make_sibling(config, lab.lab_id)


def _download(
    lab: LabContext, server: Server, run: Run | None, root: Path, most_bytes: int
) -> tuple[str, list[str]]:
    """Download the code and what a bundle has of the run.

    Returns the checkpoint to submit, and which files were left out.
    """
    remote, request = lab.open_agent(server), LabRequest(lab.config.name, lab.lab_id)
    code = selected_files.list_code(remote, request, root, lab.reporter)
    selected_files.fetch_code(code, most_bytes)
    if run is None:
        return "", code.describe_skipped()
    home = root / "runs" / run.id
    only = (CHECKPOINTS, LOGS, REPORT, EVALUATION)
    listed = selected_files.list_run(remote, request, run.id, only, home, lab.reporter)
    small = [path for path in listed.files if _describes_checkpoints(path)]
    listed.fetch(small, most_bytes)
    checkpoint = find_best_checkpoint(home)
    others = f"{CHECKPOINTS}/"
    chosen = f"{CHECKPOINTS}/{checkpoint}" if checkpoint else CHECKPOINTS
    listed.fetch(
        [
            path
            for path in listed.files
            if not path.startswith(others) or path == chosen or path.startswith(f"{chosen}/")
        ],
        most_bytes,
    )
    return checkpoint, code.describe_skipped() + listed.describe_skipped()


def _describes_checkpoints(path: str) -> bool:
    """Tell whether the choice of the checkpoint depends on a file of the run."""
    parts = path.split("/")
    is_manifest = len(parts) == 3 and parts[0] == CHECKPOINTS and parts[2] == MANIFEST
    return is_manifest or path in (EVALUATION, f"{LOGS}/{EVALUATION}")


def _collect(
    work: LabContext, rules: Assignment, student: str, run: Run | None, checkpoint: str
) -> BundleContents:
    """Collect and check what would be submitted; LabError if it cannot be."""
    # No commit: git would run what the student's own .git/config names.
    contents = assemble_contents(
        work, rules, student, rules.max_size, run, checkpoint, CodeCommit()
    )
    if not contents.manifest.files:
        raise NotFoundError("there are no files in /lab/code", why="save your work there")
    if part := find_missing_part(rules, contents):
        source = (
            f"run {run.id} has none on the server"
            if run
            else "only a run has it: start one with labctl run, then choose it here"
        )
        raise NotFoundError(f"{rules.name} requires the {part}", why=source)
    require_no_secrets(work, contents)
    if run is None:
        return contents
    home = work.config.root / "runs" / run.id
    stale = find_stale_results(RunOnServer(run), home, checkpoint)
    return msgspec.structs.replace(contents, stale=stale)


def _run_public_tests(
    folder: CourseFolder, work: LabContext, assignment: str, run: Run | None
) -> PublicTestSummary:
    """Run the public tests on the server, in the image of the run; without a run, none."""
    starter = starters.find_published(folder, assignment)
    root = work.config.root
    modules = [
        path
        for path in (starter.tests if starter is not None else ())
        if starters.is_test_module(path) and (root / path).is_file()
    ]
    if run is None or not modules:
        return PublicTestSummary()
    try:
        tests = public_tests.run_modules_on_server(work, run.id, modules, TESTS_S)
    except LabError as error:
        return PublicTestSummary(text=f"the public tests did not run: {error.what}")
    failed = [test.name for test in tests if test.outcome == "failed"]
    if not failed:
        return PublicTestSummary(text=f"all {len(tests)} public tests pass", all_pass=True)
    names = names_text(failed, MOST_NAMED)
    return PublicTestSummary(text=f"{len(failed)} of {len(tests)} public tests fail: {names}")


def _describe_problem(error: LabError, order: SubmissionOrder) -> PreparedSubmission:
    """Return what the student reads of an error: nothing of this machine's paths."""
    if isinstance(error, ConnectError):
        return PreparedSubmission(what="your server cannot be reached", why="try again in a minute")
    why = error.why if isinstance(error, FOR_STUDENTS) else "tell your instructor"
    texts = [text.replace(f"{order.directory}/{LAB}/", "") for text in (error.what, why)]
    return PreparedSubmission(what=texts[0], why=texts[1])


def main() -> None:
    """Read an order from standard input, and write the result to the order's directory."""
    end_with_parent()
    for kind, limit in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, MEMORY_BYTES)):
        # The hard limit stays: the process that examines the bundle has its own.
        resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
    order = decode_json(sys.stdin.buffer.read(), SubmissionOrder)
    try:
        prepared = prepare(order)
    except Exception as error:
        problem = as_lab_error(error, lambda text: print(text, file=sys.stderr))
        prepared = _describe_problem(problem, order)
    shutil.rmtree(Path(order.directory) / LAB, ignore_errors=True)
    draft = Path(order.directory) / f"{RESULT}.new"
    draft.write_bytes(msgspec.json.encode(prepared))
    draft.replace(draft.with_name(RESULT))


if __name__ == "__main__":
    main()
