"""What an assignment hands out: templates, their publication, and their way to a student."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labctl.cli.starter_output import print_starters
from labctl.config import find_paths, is_trusted
from labctl.config.locations import parse_template
from labctl.courses import git_templates, join
from labctl.courses.course_update import update_course_lab
from labctl.courses.invitation import invite
from labctl.courses.join import JoinResult
from labctl.courses.keys import JOIN_REQUEST, AuthorizedKeys
from labctl.courses.plan import compute_plan
from labctl.courses.publish import publish_assignments
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.plan_changes import list_cautions
from labctl.courses.requests import RequestHandler
from labctl.courses.rpc import answer_enrollment
from labctl.courses.servers import CourseOperator
from labctl.courses.starter_delivery import strip_generated_lines
from labctl.courses.starters import (
    build_starters,
    list_published,
    publish_starters,
    summarize_starters,
)
from labctl.errors import BusyError, ConfigError, ProviderError, UsageError
from labctl.events import SilentReporter
from labctl.lab import Lab
from labctl.model import Endpoint
from labctl.providers.course import REQUEST as KEEPER_REQUEST
from labctl.providers.course import CourseProvider, download_starter
from labctl.state import State
from labctl.submissions.assignment import load_assignment
from labctl.sync.starter import Starter, read_record
from labctl.wire.keeper import FetchStarterReply, FetchStarterRequest

sys.path.append(str(Path(__file__).parents[1] / "flow"))
from course_keeper_context import Pretended, course_folder

HOST_KEY = "ssh-ed25519 " + "A" * 68
PATHS = find_paths({"HOME": "/nonexistent"})
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_course(root: Path, rules: str, more: str = "") -> CourseFolder:
    return course_folder(root, f"assignments: {{hw3: {{{rules}}}}}\n{more}")


def build(folder: CourseFolder) -> Starter:
    (starter,) = build_starters(folder.config, PATHS)
    return starter


def find_problem(folder: CourseFolder) -> str:
    with pytest.raises(ConfigError) as caught:
        build_starters(folder.config, PATHS)
    (problem,) = caught.value.problems
    assert problem.line == 5
    return f"{problem.path}: {problem.message}"


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    made = make_course(tmp_path / "ml", "template: starter")
    (made.path / "starter" / "src").mkdir(parents=True)
    (made.path / "starter" / "train.py").write_text("print('train')\n")
    (made.path / "starter" / "src" / "model.py").write_text("net\n")
    return made


def test_a_directory_is_handed_out_without_what_it_ignores(folder: CourseFolder) -> None:
    starter = folder.path / "starter"
    (starter / ".labignore").write_text(".env\n/solution/\n")
    (starter / ".env").write_text("TOKEN=1\n")
    (starter / "solution").mkdir()
    (starter / "solution" / "train.py").touch()
    (starter / "__pycache__").mkdir()
    (starter / "__pycache__" / "x.pyc").touch()
    (starter / "train.py").chmod(0o755)
    files = build(folder).by_path()
    assert sorted(files) == [".labignore", "src/model.py", "train.py"]
    assert (files["train.py"].executable, files["src/model.py"].executable) == (True, False)


def test_a_template_of_labctl_has_a_lab_file_for_the_course(tmp_path: Path) -> None:
    made = build(make_course(tmp_path / "a", "template: image-classifier")).by_path()
    lab = made["lab.yaml"].content.decode()
    assert "BASE: python:3.11-slim" in lab  # `local` has no GPU
    assert "\nlab:" not in lab
    assert {"train.py", "model.py", "Dockerfile"} <= made.keys()
    assert not [path for path in made if path.endswith(".j2")]


def test_every_problem_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    folder = course_folder(
        tmp_path / "ml",
        "assignments:\n"
        "  hw1: {template: no-such-template}\n"
        "  hw2:\n"
        "    template: empty\n"
        "    tests: {public: missing}\n",
    )
    (folder.path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        build_starters(folder.config, PATHS)
    found = {(problem.line, problem.path): problem.message for problem in caught.value.problems}
    assert found.keys() == {
        (6, "assignments.hw1.template"),
        (8, "assignments.hw2.template"),
        (9, "assignments.hw2.tests.public"),
    }
    assert (
        "no template of that name in labctl: image-classifier"
        in found[6, "assignments.hw1.template"]
    )
    assert "no files" in found[8, "assignments.hw2.template"]
    assert "there is no directory 'missing'" in found[9, "assignments.hw2.tests.public"]


def test_a_plan_shows_the_starters_and_refuses_bad_ones(
    folder: CourseFolder, tmp_path: Path
) -> None:
    paths = find_paths({"HOME": str(tmp_path)})
    staff = CourseOperator(folder, paths, State(paths.database), SilentReporter(), by="ada")
    (summary,) = compute_plan(staff, offline=True).starters
    assert (summary.assignment, summary.files, summary.published) == ("hw3", 2, "")
    publish_starters(folder, paths)
    assert compute_plan(staff, offline=True).starters[0].published == "current"
    (folder.path / "starter" / "train.py").write_text("print('newer')\n")
    assert compute_plan(staff, offline=True).starters[0].published == "older"
    (folder.path / "starter" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError):
        compute_plan(staff, offline=True)


def test_a_link_in_a_template_is_refused(folder: CourseFolder) -> None:
    (folder.path / "starter" / "passwords").symlink_to("/etc/passwd")
    assert "'passwords' is a link" in find_problem(folder)


def test_a_template_that_is_a_link_out_of_the_course_is_refused(tmp_path: Path) -> None:
    folder = make_course(tmp_path / "ml", "template: starter")
    (folder.path / "starter").symlink_to("/etc")
    assert "leads out of the course's folder" in find_problem(folder)


def test_a_special_file_in_a_template_is_refused(folder: CourseFolder) -> None:
    os.mkfifo(folder.path / "starter" / "pipe")
    assert "'pipe' is a special file" in find_problem(folder)


def test_a_file_of_five_gigabytes_is_refused_before_it_is_read(folder: CourseFolder) -> None:
    with (folder.path / "starter" / "weights.bin").open("wb") as file:
        file.truncate(5 * 1024**3)
    began_s = time.process_time()
    assert "more than 16 MiB" in find_problem(folder)
    assert time.process_time() - began_s < 1.0


def test_too_many_files_are_refused(folder: CourseFolder) -> None:
    for number in range(500):
        (folder.path / "starter" / f"{number}.txt").touch()
    assert "more than 500 files" in find_problem(folder)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (".env", "A=1\n", ".env: a file of secrets"),
        ("key.txt", "-----BEGIN OPENSSH PRIVATE KEY-----\n", "key.txt, line 1: a private key"),
        ("lab.yaml", "run: x\nserver: {provider: aws}\n", "line 2: remove `server`"),
        ("lab.yaml", "run: [\n", "lab.yaml, line"),
        ("lab.yaml", "# ours\nrum: python train.py", "lab.yaml, line 2: unknown key"),
        ("assignment.yaml", "", "cannot be part of a starter"),
    ],
)
def test_a_file_that_students_must_not_get_is_refused(
    name: str, text: str, said: str, folder: CourseFolder
) -> None:
    (folder.path / "starter" / name).write_text(text)
    assert said in find_problem(folder)


@pytest.mark.parametrize("template", [".", ".course", "assignments", "assignments/hw3/labels"])
def test_the_private_files_of_a_course_are_never_a_template(template: str, tmp_path: Path) -> None:
    rules = f"template: {template}, grade: {{labels: assignments/hw3/labels}}"
    folder = make_course(tmp_path / "ml", rules)
    labels = folder.path / "assignments" / "hw3" / "labels"
    labels.mkdir(parents=True)
    (labels / "labels.csv").write_text("item,label\n")
    assert "which students must not get" in find_problem(folder)


@pytest.mark.parametrize(
    "rules",
    [
        "template: hw3, tests: {hidden: hw3/secret}",
        "template: hw3, grade: {autograder: hw3/secret}",
        "tests: {public: hw3, hidden: hw3/secret}",
    ],
)
def test_what_grades_is_never_handed_out(rules: str, tmp_path: Path) -> None:
    folder = make_course(tmp_path / "ml", rules)
    secret = folder.path / "hw3" / "secret"
    secret.mkdir(parents=True)
    (secret / "test_a.py").write_text("def test_a(): ...")
    assert "has, or is in, hw3/secret, which students must not get" in find_problem(folder)


def test_an_assignment_called_like_a_directory_of_a_lab_is_refused(tmp_path: Path) -> None:
    folder = course_folder(tmp_path / "ml", "assignments: {runs: {template: image-classifier}}\n")
    assert "is the name of a directory" in find_problem(folder)


# Public tests.


def test_public_tests_are_handed_out_below_tests(tmp_path: Path) -> None:
    rules = "template: starter, tests: {public: assignments/hw3/tests}"
    folder = make_course(tmp_path / "ml", rules)
    public = folder.path / "assignments" / "hw3" / "tests"
    (public / "data").mkdir(parents=True)
    (public / "test_net.py").write_text("def test_net(): pass\n")
    (public / "data" / "digit.txt").write_text("7")
    (folder.path / "starter").mkdir()
    (folder.path / "starter" / "train.py").touch()
    starter = build(folder)
    assert starter.tests == ("tests/data/digit.txt", "tests/test_net.py")
    assert sorted(starter.by_path()) == ["tests/data/digit.txt", "tests/test_net.py", "train.py"]
    (folder.path / "starter" / "tests").mkdir()
    (folder.path / "starter" / "tests" / "test_net.py").touch()
    assert "tests/test_net.py occurs twice" in find_problem(folder)


def test_an_assignment_may_hand_out_tests_alone(tmp_path: Path) -> None:
    folder = make_course(tmp_path / "ml", "tests: {public: tests}")
    (folder.path / "tests").mkdir()
    (folder.path / "tests" / "net_test.py").touch()
    assert "no file test_*.py" in find_problem(folder)
    (folder.path / "tests" / "test_net.py").touch()
    assert build(folder).tests == ("tests/net_test.py", "tests/test_net.py")


def test_a_directory_of_tests_that_is_missing_is_a_problem(tmp_path: Path) -> None:
    folder = make_course(tmp_path / "ml", "tests: {public: tests/public}")
    assert "there is no directory 'tests/public'" in find_problem(folder)


# A template in a git repository.


def run_git(repository: Path, *words: str, text: str = "") -> str:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.edu")
    command = ["git", *identity, "-c", "protocol.file.allow=always", *words]
    done = subprocess.run(
        command, cwd=repository, input=text, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "starter.git"
    made.mkdir()
    run_git(made, "init", "-q", "-b", "main")
    (made / "train.py").write_text("print('from git')\n")
    (made / "go.sh").write_text("#!/bin/sh\n")
    (made / "go.sh").chmod(0o755)
    return made


def commit(repository: Path) -> str:
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-q", "-m", "starter")
    return run_git(repository, "rev-parse", "HEAD")


def git_course(tmp_path: Path, repository: Path, sha1: str) -> CourseFolder:
    return make_course(tmp_path / "ml", f'template: "file://{repository}@{sha1}"')


def test_a_commit_is_handed_out_also_when_its_branch_has_moved_on(
    repository: Path, tmp_path: Path
) -> None:
    pinned = commit(repository)
    (repository / "train.py").write_text("print('newer')\n")
    commit(repository)
    folder = git_course(tmp_path, repository, pinned)
    files = build(folder).by_path()
    assert files["train.py"].content == b"print('from git')\n"
    assert files["go.sh"].executable
    repository.rename(tmp_path / "moved")  # it is fetched only once
    assert build(folder).by_path() == files


def test_no_hook_and_no_filter_of_a_repository_runs(repository: Path, tmp_path: Path) -> None:
    (repository / ".gitattributes").write_text("*.py filter=bad\n")
    sha1 = commit(repository)
    mark = tmp_path / "ran"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {mark}\n")
        (hooks / name).chmod(0o755)
    run_git(repository, "config", "core.hooksPath", str(hooks))
    run_git(repository, "config", "filter.bad.smudge", f"touch {mark}")
    build(git_course(tmp_path, repository, sha1))
    assert not mark.exists()


def test_a_link_in_a_commit_is_refused(repository: Path, tmp_path: Path) -> None:
    (repository / "passwords").symlink_to("/etc/passwd")
    folder = git_course(tmp_path, repository, commit(repository))
    assert "'passwords' is a link" in find_problem(folder)


def test_a_submodule_in_a_commit_is_refused(repository: Path, tmp_path: Path) -> None:
    commit(repository)
    run_git(repository, "submodule", "--quiet", "add", f"file://{repository}", "inner")
    folder = git_course(tmp_path, repository, commit(repository))
    assert "'inner' is a submodule" in find_problem(folder)


def test_a_large_file_in_a_commit_is_refused_though_it_compresses_well(
    repository: Path, tmp_path: Path
) -> None:
    with (repository / "weights.bin").open("wb") as file:
        file.truncate(40 * 1024**2)
    folder = git_course(tmp_path, repository, commit(repository))
    assert "more than 16 MiB" in find_problem(folder)


def test_a_commit_whose_directories_never_end_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 12 directories holds the next one ten times: a few kilobytes, 10^12 files."""
    monkeypatch.setattr(git_templates, "MOST_LISTING_BYTES", 1024**2)
    tree = run_git(repository, "hash-object", "-w", "train.py")
    kind = "100644 blob"
    for _ in range(12):
        rows = "".join(f"{kind} {tree}\t{number}\n" for number in range(10))
        tree, kind = run_git(repository, "mktree", text=rows), "040000 tree"
    sha1 = run_git(repository, "commit-tree", "-m", "bomb", tree)
    run_git(repository, "update-ref", "refs/heads/main", sha1)
    problem = find_problem(git_course(tmp_path, repository, sha1))
    assert f"the commit {sha1[:10]} cannot be listed: git: more than 1 MiB" in problem


@pytest.mark.parametrize(
    ("name", "said"),
    [('"a\\nb"', "an unprintable character"), ('"\\377"', "not UTF-8"), (".GIT", "never uploads")],
)
def test_a_name_in_a_commit_that_no_lab_may_have_is_refused(
    name: str, said: str, repository: Path, tmp_path: Path
) -> None:
    blob = run_git(repository, "hash-object", "-w", "train.py")
    tree = run_git(repository, "mktree", text=f"100644 blob {blob}\t{name}\n")
    sha1 = run_git(repository, "commit-tree", "-m", "starter", tree)
    run_git(repository, "update-ref", "refs/heads/main", sha1)
    assert said in find_problem(git_course(tmp_path, repository, sha1))


def test_git_stops_at_the_limit_for_what_it_fetches(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_templates, "MOST_PACK_BYTES", 1024**2)
    (repository / "noise.bin").write_bytes(os.urandom(3 * 1024**2))
    folder = git_course(tmp_path, repository, commit(repository))
    assert "cannot be fetched" in find_problem(folder)


def test_an_unknown_commit_and_a_missing_repository_say_so(
    repository: Path, tmp_path: Path
) -> None:
    commit(repository)
    said = find_problem(git_course(tmp_path, repository, COMMIT))
    assert f"the commit {COMMIT[:10]} cannot be fetched from file://" in said


@pytest.mark.parametrize(
    "address",
    [
        "https://example.edu/a.git",
        "https://example.edu/a.git@main",
        f"https://example.edu/a.git@{COMMIT[:12]}",
        f"https://user:password@example.edu/a.git@{COMMIT}",
        f"http://example.edu/a.git@{COMMIT}",
        f"git://example.edu/a.git@{COMMIT}",
        f"ssh://-oProxyCommand=id/a.git@{COMMIT}",
        "/etc",
        "../elsewhere",
        "-x",
    ],
)
def test_an_address_without_a_commit_or_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(ValueError):
        parse_template(address)


def test_a_git_address_without_a_commit_is_a_problem_of_course_yaml(tmp_path: Path) -> None:
    folder = make_course(tmp_path / "ml", 'template: "https://example.edu/a.git"')
    with pytest.raises(ConfigError) as caught:
        _ = folder.config
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == ("assignments.hw3.template", 5)
    assert "40 hex digits of a commit" in problem.message


# Publishing, and a student who joins.


def test_an_invitation_publishes_what_is_new_and_reads_nothing_else(folder: CourseFolder) -> None:
    publish_starters(folder, PATHS)
    (folder.path / "starter" / "link").symlink_to("/etc/passwd")  # is being edited
    text = (folder.path / "course.yaml").read_text()
    text = text.replace("{hw3:", "{hw4: {template: image-classifier}, hw3:")
    (folder.path / "course.yaml").write_text(text)
    edited = CourseFolder(folder.path)
    (new,) = publish_starters(edited, PATHS, only_new=True)
    assert (new.assignment, list_published(edited).keys()) == ("hw4", {"hw3", "hw4"})
    assert publish_starters(edited, PATHS, only_new=True) == []
    (folder.path / "course.yaml").write_text("course: ml\n")
    assert publish_starters(CourseFolder(folder.path), PATHS, only_new=True) == []
    assert list_published(edited).keys() == {"hw3", "hw4"}


def test_of_two_versions_after_an_interruption_the_newer_one_counts(folder: CourseFolder) -> None:
    publish_starters(folder, PATHS)
    (file,) = (folder.private / "starters" / "hw3").iterdir()
    older = file.with_name("f" * 64 + ".json")
    older.write_bytes(b"{}")
    os.utime(older, (1, 1))
    assert list_published(folder) == {"hw3": file.stem}
    publish_starters(folder, PATHS)
    assert not older.exists()


def test_students_get_a_new_version_only_when_it_is_published(folder: CourseFolder) -> None:
    (first,) = publish_starters(folder, PATHS)
    assert (first.files, first.changed) == (2, True)
    before = list_published(folder)
    assert not publish_starters(folder, PATHS)[0].changed
    (folder.path / "starter" / "train.py").write_text("print('newer')\n")
    (folder.path / "starter" / "src" / "model.py").unlink()
    assert publish_starters(folder, PATHS, only_new=True) == []
    assert list_published(folder) == before
    assert publish_starters(folder, PATHS)[0].changed
    handouts = folder.path / "handouts" / "hw3"
    assert [path.name for path in handouts.rglob("*") if path.is_file()] == ["train.py"]
    (folder.path / "course.yaml").write_text("course: ml\n")
    assert publish_starters(CourseFolder(folder.path), PATHS) == []
    assert list_published(folder) == {}


class KeeperHere:
    """In place of the connections to a keeper: its answers without ssh."""

    def __init__(self, folder: CourseFolder, keys: AuthorizedKeys) -> None:
        self.folder, self.keys = folder, keys
        self.requests: list[bytes] = []
        self.is_down = False

    def open_line_channel(self, endpoint: Endpoint, request: str) -> KeeperHere:
        self.request = request
        return self

    def exchange(self, line: bytes) -> bytes:
        self.requests.append(line)
        if self.request == JOIN_REQUEST:
            return answer_enrollment(self.folder, "alice", line, self.keys, time.time()).encode()
        if self.is_down:
            raise BusyError("the course's keeper is not running", hint="try again later")
        return RequestHandler(self.folder, Pretended(self.folder)).answer("alice", line) + b"\n"

    def close(self) -> None:
        pass


class Student:
    """Alice, who joins the course and updates her lab."""

    def __init__(self, folder: CourseFolder, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = AuthorizedKeys(folder, home / "authorized_keys")
        self.folder, self.home = folder, home
        self.paths = find_paths({"HOME": str(home)})
        self.keeper = KeeperHere(folder, keys)
        self.lab = home / "ml" / "hw3"
        monkeypatch.setattr(join, "Connections", lambda *_: self.keeper)
        monkeypatch.setenv("HOME", str(home))
        self.data = invite(folder, "alice", home, keys, HOST_KEY).path.read_bytes()

    def join(self) -> JoinResult:
        return join.join_course(self.data, None, self.paths, SilentReporter(), base=self.home)

    def update(self, directory: Path | None = None) -> JoinResult:
        context = Lab.load(directory or self.home / "ml").context
        provider = context.provider
        assert isinstance(provider, CourseProvider)
        provider._channel = self.keeper.open_line_channel(provider.endpoint, KEEPER_REQUEST)
        return update_course_lab(context)


@pytest.fixture
def student(folder: CourseFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Student:
    publish_assignments(folder, HOST_KEY)
    publish_starters(folder, PATHS)
    home = tmp_path / "home"
    home.mkdir()
    return Student(folder, home, monkeypatch)


def test_joining_writes_each_starter_into_a_lab_of_its_own(student: Student) -> None:
    (starter,) = student.join().starters
    assert (starter.assignment, starter.state, starter.directory) == ("hw3", "new", student.lab)
    assert {change.action for change in starter.changes} == {"added"}
    assert (student.lab / "train.py").read_text() == "print('train')\n"
    assert load_assignment(student.lab / "assignment.yaml").name == "hw3"
    config = Lab.load(student.lab).config
    assert (config.name, config.server.provider) == ("hw3-ml-alice", "course")
    assert "/hw3/" in (student.home / "ml" / ".labignore").read_text().splitlines()
    (again,) = student.update().starters
    assert (again.state, again.changes) == ("current", ())


def test_joining_counts_the_files_as_the_plan_does(
    student: Student, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(student.home)
    (summary,) = summarize_starters(student.folder, PATHS)
    assert summary.files == 2
    print_starters(student.join())
    assert capsys.readouterr().out.startswith("hw3: 2 new files and lab.yaml in ml/hw3\n")


@pytest.mark.parametrize(
    ("text", "trusted"),
    [("run: python train.py\n", True), ("run: x\nsecrets: [WANDB_API_KEY]\n", False)],
)
def test_a_lab_file_that_uses_the_students_own_secrets_is_not_approved(
    text: str, trusted: bool, student: Student
) -> None:
    (student.folder.path / "starter" / "lab.yaml").write_text(text)
    publish_starters(student.folder, PATHS)
    student.join()
    assert is_trusted(student.paths, Lab.load(student.lab).config) == trusted


def set_image(student: Student, image: str) -> None:
    lines = (student.folder.path / "course.yaml").read_text().splitlines()
    lines = [image if line.startswith("image:") else line for line in lines]
    (student.folder.path / "course.yaml").write_text("\n".join([*lines, ""]))
    student.folder.refresh()


def test_a_changed_image_of_the_course_reaches_the_labs_of_those_who_have_joined(
    student: Student,
) -> None:
    set_image(student, "image: x:1")
    assert student.join().image_change == ""
    course_lab = student.home / "ml"
    set_image(student, "image: x:2")
    updated = student.update()
    assert (updated.image, updated.image_change) == ("x:2", "updated")
    assert updated.starters[0].state == "updated"
    for directory in (course_lab, student.lab):
        config = Lab.load(directory).config
        assert config.image.reference == "x:2"
        assert is_trusted(student.paths, config)
    again = student.update()
    assert (again.image_change, again.starters[0].state) == ("", "current")

    own = (course_lab / "lab.yaml").read_text() + "run: python mine.py\n"
    (course_lab / "lab.yaml").write_text(own)
    set_image(student, "image: x:3")
    assert student.update().image_change == "differs"
    assert (course_lab / "lab.yaml").read_text() == own
    student.keeper.is_down = True  # nothing is known of the image
    assert student.join().image_change == ""


def test_a_lab_file_of_the_starter_without_an_image_gets_that_of_the_course(
    student: Student,
) -> None:
    own = student.folder.path / "starter" / "lab.yaml"
    own.write_text("run: python train.py\n")
    set_image(student, "image: x:1")
    publish_starters(student.folder, PATHS)
    student.join()
    config = Lab.load(student.lab).config
    assert (config.image.reference, config.run) == ("x:1", ("python", "train.py"))
    set_image(student, "image: x:2")
    (updated,) = student.update().starters
    assert Lab.load(student.lab).config.image.reference == "x:2"
    written = (student.lab / "lab.yaml").read_bytes()
    assert strip_generated_lines(written) == own.read_bytes()
    (again,) = student.update().starters
    assert (updated.state, again.state) == ("updated", "current")

    own.write_text("image: own:1\nrun: python train.py\n")
    publish_starters(student.folder, PATHS)
    student.update()
    assert Lab.load(student.lab).config.image.reference == "own:1"


@pytest.mark.parametrize(
    ("image", "files"),
    [
        (
            'image: {requirements: requirements.txt, python: "3.12"}',
            {"requirements.txt": "-r more.txt\ntorch\n", "more.txt": "pandas==2.2.3\n"},
        ),
        ("image: {conda: environment.yml}", {"environment.yml": "dependencies: [numpy]\n"}),
        (
            "image: {build: docker, args: {BASE: debian}}",
            {"docker/Dockerfile": "FROM scratch\nCOPY setup.sh /\n", "docker/setup.sh": "true\n"},
        ),
    ],
    ids=["requirements", "conda", "build"],
)
def test_an_image_that_servers_build_reaches_the_lab_with_its_files(
    image: str, files: dict[str, str], student: Student
) -> None:
    for name, text in files.items():
        path = student.folder.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    set_image(student, image)
    publish_starters(student.folder, PATHS)
    student.join()
    assert {name: (student.lab / name).read_text() for name in files} == files
    config = Lab.load(student.lab).config
    wanted = student.folder.config.lab.image
    for key in ("build", "requirements", "conda", "python", "extras", "args"):
        assert getattr(config.image, key) == getattr(wanted, key)
    assert is_trusted(student.paths, config)
    assert student.update().starters[0].state == "current"


def test_a_starter_keeps_its_own_image_and_its_own_list(student: Student) -> None:
    (student.folder.path / "requirements.txt").write_text("torch\n")
    starter = student.folder.path / "starter"
    (starter / "requirements.txt").write_text("jax\n")
    (starter / "lab.yaml").write_text("run: python train.py\n")
    set_image(student, "image: {requirements: requirements.txt}")
    publish_starters(student.folder, PATHS)
    student.join()
    assert (student.lab / "requirements.txt").read_text() == "jax\n"
    config = Lab.load(student.lab).config
    assert (config.image.requirements, config.run) == (
        "requirements.txt",
        ("python", "train.py"),
    )
    (starter / "lab.yaml").write_text("image: own:1\n")
    (starter / "requirements.txt").unlink()
    publish_starters(student.folder, PATHS)
    student.update()
    assert Lab.load(student.lab).config.image.reference == "own:1"
    assert not (student.lab / "requirements.txt").exists()


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("{requirements: missing.txt}", "image.requirements: 'missing.txt' cannot be"),
        ("{build: docker}", "image.build: there is no directory 'docker'"),
        ("{build: imported}", "image.build: imported has no Dockerfile"),
        ("{requirements: imported/list.txt}", "image.requirements: imported/list.txt has, or is"),
    ],
)
def test_an_image_that_cannot_be_handed_out_is_a_problem_of_course_yaml(
    image: str, problem: str, folder: CourseFolder
) -> None:
    (folder.path / "imported").mkdir(exist_ok=True)
    (folder.path / "imported" / "list.txt").write_text("torch\n")
    text = (folder.path / "course.yaml").read_text().replace("{build: .}", image)
    (folder.path / "course.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_starters(CourseFolder(folder.path).config, PATHS)
    (found,) = caught.value.problems
    assert found.line == 3
    assert f"{found.path}: {found.message}".startswith(problem)


def test_a_plan_says_which_labs_get_no_image(folder: CourseFolder) -> None:
    def list_image_cautions() -> list[str]:
        config = CourseFolder(folder.path).config
        return [caution for caution in list_cautions(config, 0.0) if "image" in caution]

    (beside,) = list_image_cautions()
    assert "its Dockerfile is beside the roster" in beside
    file = folder.path / "course.yaml"
    text = file.read_text().replace("{build: .}", "{requirements: requirements.txt}")
    file.write_text(text.replace("assignments: {", "assignments: {hw4: {}, "))
    (without,) = list_image_cautions()
    assert without.startswith("no image for hw4, the course's own lab: ")


def test_a_course_without_an_image_leaves_the_choice_to_the_lab(
    student: Student, tmp_path: Path
) -> None:
    set_image(student, "")
    student.join()
    (student.home / "ml" / "Dockerfile").write_text("FROM scratch\n")
    assert Lab.load(student.home / "ml").config.image.is_built
    folder = make_course(tmp_path / "b", "template: image-classifier")
    text = (folder.path / "course.yaml").read_text().replace("image: {build: .}\n", "")
    (folder.path / "course.yaml").write_text(text)
    lab = build(CourseFolder(folder.path)).by_path()["lab.yaml"].content.decode()
    assert "BASE: python:3.11-slim" in lab, "python:3.12-slim has no torch"


def test_an_update_keeps_what_the_student_changed(student: Student) -> None:
    student.join()
    (student.lab / "train.py").write_text("print('mine')\n")
    (student.lab / "src" / "model.py").unlink()
    (student.folder.path / "starter" / "new.py").touch()
    (student.folder.path / "starter" / "train.py").write_text("print('theirs')\n")
    publish_starters(student.folder, PATHS)
    (starter,) = student.update(student.lab).starters  # from the assignment's own lab
    actions = {change.path: change.action for change in starter.changes}
    assert actions == {"new.py": "added", "train.py": "conflict"}
    assert (student.lab / "train.py").read_text() == "print('mine')\n"
    assert not (student.lab / "src" / "model.py").exists()
    (again,) = student.update().starters
    assert (again.state, again.changes) == ("current", ())


def test_a_blocked_file_is_tried_again_by_the_next_update(student: Student) -> None:
    (student.lab / "train.py").mkdir(parents=True)
    (starter,) = student.join().starters
    assert [change.path for change in starter.changes if change.action == "blocked"] == ["train.py"]
    (student.lab / "train.py").rmdir()
    (starter,) = student.update().starters
    assert {change.path: change.action for change in starter.changes} == {"train.py": "added"}
    record = read_record(student.lab)
    assert record is not None
    assert len(record.sha256) == 64


def test_a_lab_that_is_a_link_is_not_written_through(student: Student, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (student.home / "ml").mkdir()
    student.lab.symlink_to(outside)
    (starter,) = student.join().starters
    assert starter.state == "failed"
    assert "is not a directory" in starter.problem
    assert list(outside.iterdir()) == []


def test_a_directory_where_the_assignments_file_comes_fails_this_assignment_only(
    student: Student,
) -> None:
    text = (student.folder.path / "course.yaml").read_text()
    text = text.replace("{hw3:", "{hw4: {template: starter}, hw3:")
    (student.folder.path / "course.yaml").write_text(text)
    student.folder = CourseFolder(student.folder.path)
    publish_starters(student.folder, PATHS)
    student.keeper.folder = student.folder
    file = student.lab / "assignment.yaml"
    file.mkdir(parents=True)
    publish_assignments(student.folder, HOST_KEY)
    hw3, hw4 = student.join().starters
    assert (hw3.state, hw4.state) == ("failed", "new")
    assert f"{file} cannot be written" in hw3.problem
    file.rmdir()
    assert student.update().starters[0].state == "current"
    assert load_assignment(file).name == "hw3"


def test_the_labs_of_assignments_follow_the_course_to_another_keeper(student: Student) -> None:
    student.join()
    file = student.home / "ml" / "lab.yaml"
    file.write_text(file.read_text().replace("keeper.example", "moved.example"))
    (starter,) = student.update().starters
    assert {change.path: change.action for change in starter.changes} == {"lab.yaml": "updated"}
    assert "moved.example" in (student.lab / "lab.yaml").read_text()
    assert student.update().starters[0].state == "current"


def test_without_the_keeper_a_student_has_joined_and_gets_the_files_later(
    student: Student,
) -> None:
    student.keeper.is_down = True
    joined = student.join()
    assert (joined.again, joined.starters[0].state) == (False, "failed")
    assert "keeper is not running" in joined.starters[0].problem
    student.keeper.is_down = False
    assert student.update().starters[0].state == "new"


def test_a_starter_that_differs_from_its_announced_hash_is_not_written(
    student: Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "download_starter", lambda *_: b"{}")
    (starter,) = student.join().starters
    assert (starter.state, student.lab.exists()) == ("failed", False)


def test_a_large_starter_comes_in_parts(student: Student) -> None:
    noise = os.urandom(1024**2)
    (student.folder.path / "starter" / "noise.bin").write_bytes(noise)
    publish_starters(student.folder, PATHS)
    student.join()
    assert (student.lab / "noise.bin").read_bytes() == noise
    assert len([line for line in student.keeper.requests if b'"starter"' in line]) == 3


@pytest.mark.parametrize(
    "line",
    [
        b'{"do": "starter", "assignment": "../../course", "sha256": "", "offset": 0}',
        b'{"do": "starter", "assignment": "hw9", "sha256": "", "offset": 0}',
        b'{"do": "starter", "assignment": "hw3", "sha256": "0", "offset": 0}',
        b'{"do": "starter", "assignment": "hw3", "sha256": "../SHA", "offset": 0}',
    ],
)
def test_a_request_for_another_file_is_refused(line: bytes, student: Student) -> None:
    line = line.replace(b"SHA", list_published(student.folder)["hw3"].encode())
    handler = RequestHandler(student.folder, Pretended(student.folder))
    assert b"has no such version" in handler.answer("alice", line)


@pytest.mark.parametrize(
    ("data", "size_bytes"), [("", 10), ("!!", 10), ("QUFB", 2), ("QUFB", 10**12)]
)
def test_a_keeper_whose_parts_do_not_fit_together_is_not_believed(
    data: str, size_bytes: int
) -> None:
    def send(request: FetchStarterRequest) -> FetchStarterReply:
        part = data if request.offset == 0 or len(data) != 4 else ""
        return FetchStarterReply(part, size_bytes)

    with pytest.raises(ProviderError, match="invalid part"):
        download_starter(send, "hw3", "0" * 64)


def test_a_lab_without_a_course_has_nothing_to_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lab.yaml").write_text("lab: digits\n")
    with pytest.raises(UsageError, match="do not come from a course"):
        update_course_lab(Lab.load(tmp_path).context)
