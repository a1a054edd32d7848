"""Files that a person copied into a server's home directory: which count, and how they come."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labctl.agent.files.home_files import list_home_files
from labctl.errors import PolicyError
from labctl.events import Note, PolicyReporter, Question
from labctl.lifecycle.home_files import choose_home_files, pull_home_files
from labctl.servers.agent import AgentClient
from labctl.transports import Result
from labctl.transports.fake import FakeTransport
from labctl.wire.files import HomeFilesRequest

LAB_ID = "0f1e2d3c4b5a"


class Asking(PolicyReporter):
    """Answers with `answer`; keeps the questions and the notes."""

    def __init__(self, answer: bool = True) -> None:
        self.notes: list[str] = []
        self.questions: list[Question] = []
        self.answer = answer
        super().__init__(
            lambda event: self.notes.append(event.text) if isinstance(event, Note) else None
        )

    def confirm(self, decision: Question) -> bool:
        self.questions.append(decision)
        return self.answer


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The home directory of a server, with what labctl and the system put there."""
    home = tmp_path / "machine"
    for name in (
        ".bashrc", ".ssh/authorized_keys", "labctl/digits/code/train.py", "env/pyvenv.cfg",
        "env/lib/torch.py", "work/__pycache__/a.pyc", "notes.txt", "work/.env", "work/a b.csv",
    ):  # fmt: skip
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / "link.txt").symlink_to("/etc/passwd")
    return home


@pytest.fixture
def context(tmp_path: Path, machine: Path) -> Any:
    """What the flow uses of a LabContext: an agent in that home, and a lab here."""

    def answer(line: str, stdin: bytes) -> Result:
        done = subprocess.run(
            ["sh", "-c", line],
            input=stdin,
            capture_output=True,
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": str(machine),
            },
            check=False,
        )
        out, err = done.stdout.decode(errors="surrogateescape"), done.stderr.decode()
        return Result(code=done.returncode, stdout=out, stderr=err)

    (tmp_path / "lab").mkdir()
    transport = FakeTransport().reply("", answer)
    return SimpleNamespace(
        config=SimpleNamespace(name="digits", root=tmp_path / "lab"),
        lab_id=LAB_ID,
        name="digits",
        provider=object(),
        reporter=Asking(),
        open_agent=lambda server: AgentClient(transport),
    )


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_what_a_person_put_there_counts(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(machine))
    reply = list_home_files(HomeFilesRequest(time.time() - 60))
    assert [file.path for file in reply.files] == ["notes.txt", "work/.env", "work/a b.csv"]
    assert list_home_files(HomeFilesRequest(time.time() + 60)).files == ()


def test_they_are_downloaded_whole(context: Any, tmp_path: Path) -> None:
    server: Any = SimpleNamespace(created_at=time.time())
    listed = choose_home_files(context, server, asks=True)
    assert listed is not None
    [question] = context.reporter.questions
    assert question.question == "download 3 files (30 B) to server-home/?"
    assert "notes.txt, work/.env, work/a b.csv" in question.detail
    directory = pull_home_files(context, server, listed)
    assert directory.parent == tmp_path / "lab" / "server-home"
    assert names(directory) == ["notes.txt", "work/.env", "work/a b.csv"]
    assert (directory / "work/a b.csv").read_text() == "work/a b.csv"


def test_control_characters_of_a_name_are_escaped_here(context: Any, machine: Path) -> None:
    (machine / "bad\nname").write_text("x")
    server: Any = SimpleNamespace(created_at=time.time())
    listed = choose_home_files(context, server, asks=True)
    assert listed is not None
    assert "bad%0Aname" in context.reporter.questions[0].detail
    directory = pull_home_files(context, server, listed)
    assert (directory / "bad%0Aname").read_text() == "x"


def test_nobody_is_asked_without_a_user_and_a_no_downloads_nothing(context: Any) -> None:
    server: Any = SimpleNamespace(created_at=time.time())
    assert choose_home_files(context, server, asks=False)
    assert context.reporter.questions == []
    context.reporter = Asking(answer=False)
    assert choose_home_files(context, server, asks=True) is None


def test_a_large_home_is_neither_downloaded_nor_deleted_without_a_typed_answer(
    context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("labctl.lifecycle.home_files.LARGEST_UNASKED_BYTES", 20)
    server: Any = SimpleNamespace(created_at=time.time())
    with pytest.raises(PolicyError, match=r"has 3 files \(30 B\) outside the lab: notes.txt"):
        choose_home_files(context, server, asks=False)
    assert choose_home_files(context, server, asks=True)
    assert context.reporter.questions[0].typed == "download"
    context.reporter = Asking(answer=False)
    with pytest.raises(PolicyError):
        choose_home_files(context, server, asks=True)


def test_what_cannot_come_is_named(context: Any, machine: Path) -> None:
    (machine / ("\n" * 100)).write_text("x")
    server: Any = SimpleNamespace(created_at=time.time())
    choose_home_files(context, server, asks=False)
    [note] = context.reporter.notes
    assert note.startswith(
        "not downloaded from the server's home directory, and deleted with it: \\n\\n"
    )
