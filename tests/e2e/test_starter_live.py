"""An assignment from the course to its submission: handed out, checked on the server, updated.

The keeper answers over a real sshd, and the tests run in the student's image on a real server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from course_bed import CourseBed, course_bed, keeping
from submit_bed import SSHD

from labctl.config import find_paths
from labctl.courses.server_submissions import WorkerProcesses
from labctl.courses.starters import publish_starters
from labctl.courses.submission_worker import BUNDLE, SubmissionOrder
from labctl.submissions.bundle import open_member, read_members

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")), reason="there is no sshd here"
    ),
]
# The server's own Python as an image: the server has no network, and apt takes a minute.
IMPORT_PYTHON = (
    "tar -C / --exclude=usr/share --exclude=usr/libexec --exclude=usr/bin/docker* "
    "-c bin lib lib64 usr 2>/dev/null | docker import - with-python"
)
OPEN = "raise NotImplementedError"
FILES = {
    "net.py": f"def double(number):\n    {OPEN}\n\n\n# The end.\n",
    "Dockerfile": "FROM with-python\nCOPY site /usr/lib/python3/dist-packages\n",
    "train.sh": (
        "cd /lab/run/checkpoints && printf '\\020\\0\\0\\0\\0\\0\\0\\0{}              ' "
        ">model.safetensors && touch -d '1 minute ago' model.safetensors\n"
    ),
    "lab.yaml": "image: {build: .}\nrun: sh train.sh\noutputs: [checkpoints, logs]\n",
}
PUBLIC = """\
import os

from net import double


def test_double():
    assert double(4) == 8


def test_where():
    assert os.path.isdir("/lab/run/checkpoints"), "not on the server"
"""
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[CourseBed]:
    with course_bed(tmp_path, "{provider: local}", "image: {build: image}\n") as made:
        course = tmp_path / "ml"
        (course / "image").mkdir()
        (course / "image" / "Dockerfile").write_text("FROM scratch\n")
        keys = "template: starter, tests: {public: public}, "
        text = (course / "course.yaml").read_text().replace("hw3: {", f"hw3: {{{keys}")
        (course / "course.yaml").write_text(text)
        for directory in ("starter", "public"):
            (course / directory).mkdir()
        for name, content in FILES.items():
            (course / "starter" / name).write_text(content)
        # More than one part, through sshd, the forced command and the keeper's socket.
        (course / "starter" / "weights.bin").write_bytes(os.urandom(1024**2))
        (course / "public" / "test_net.py").write_text(PUBLIC)
        publish_starters(made.course, find_paths({"HOME": str(tmp_path)}))
        yield made


def add_pytest(lab: Path) -> None:
    """Copy pytest into the lab, for its image."""
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        ignore = shutil.ignore_patterns("__pycache__")
        source = Path(spec.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, lab / "site" / name, ignore=ignore)
        else:
            shutil.copy(source, lab / "site")


def read_members_of(file: Path) -> dict[str, bytes]:
    with file.open("rb") as bundle:
        return {one.path: open_member(bundle, one).read() for one in read_members(bundle)}


def submit_from_server(bed: CourseBed, lab: Path) -> None:
    """Prepare what the page for students submits: the same files as `labctl submit` in `lab`."""
    paths = find_paths({"HOME": str(bed.folder / "keeper-home")})
    draft = bed.folder / "draft"
    draft.mkdir()
    order = SubmissionOrder(
        course=str(bed.course.path),
        paths={name: str(getattr(paths, name)) for name in paths.__struct_fields__},
        seat="alice",
        student="alice",
        assignment="hw3",
        directory=str(draft),
        run="first",
    )
    prepared = WorkerProcesses().run(order)
    assert (prepared.what, prepared.why) == ("", "")
    # There, the files of the run exist: test_where passes.
    assert prepared.tests.text == "all 2 public tests pass"
    (submitted,) = (lab / ".labctl" / "submissions" / "hw3").glob("bundle-*.tar")
    own, theirs = read_members_of(draft / BUNDLE), read_members_of(submitted)
    assert own.keys() == theirs.keys()
    different = {name for name in own if own[name] != theirs[name]}
    assert different <= {"manifest.json", "run.json"}
    assert [path.name for path in draft.iterdir() if path.is_dir()] == []


def test_an_assignment_is_handed_out_checked_on_the_server_and_submitted(bed: CourseBed) -> None:
    with keeping(bed):
        joined = json.loads(
            bed.labctl("alice", "join", str(bed.invited("alice")), "--yes", "--json")[0]
        )["joined"]
        assert [starter["state"] for starter in joined["starters"]] == ["new"]
        lab = Path(joined["directory"]) / "hw3"
        weights = bed.folder / "ml" / "starter" / "weights.bin"
        assert (lab / "weights.bin").read_bytes() == weights.read_bytes()
        said = bed.labctl("alice", "check", code=1, cwd=lab)[0]
        assert "hw3: 0 of 2 tests passed" in said
        (lab / "net.py").write_text(FILES["net.py"].replace(OPEN, "return 2 * number"))
        add_pytest(lab)
        bed.labctl("alice", "up", "--yes", cwd=lab)
        try:
            bed.labctl("alice", "ssh", "--", IMPORT_PYTHON, cwd=lab)
            bed.labctl("alice", "run", "--yes", "--id", "first", cwd=lab)
            checked = bed.labctl("alice", "check", "--on-server", cwd=lab)[0]
            assert "hw3: 2 of 2 tests passed on the server" in checked
            bed.labctl("alice", "pull", cwd=lab)
            submitted = bed.labctl("alice", "submit", "--yes", cwd=lab)[0]
            assert "1 of 2 public tests fail: tests/test_net.py::test_where" in submitted
            assert "hw3: accepted" in submitted
            submit_from_server(bed, lab)
        finally:
            bed.labctl("alice", "down", "--yes", "--discard", cwd=lab)
        net = bed.folder / "ml" / "starter" / "net.py"
        net.write_text(net.read_text().replace("# The end.", "# The course's new end."))
        publish_starters(bed.course, find_paths({"HOME": str(bed.folder)}))
        assert "net.py: merged with your changes" in bed.labctl("alice", "join", cwd=lab)[0]
        text = (lab / "net.py").read_text()
        assert "return 2 * number" in text
        assert "# The course's new end." in text
