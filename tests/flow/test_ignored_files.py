"""Files that ignore rules leave out: named by the push, and by `explain` if the run missed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lab_world import LAB_ID, World, world

from labctl.events import Note
from labctl.insight.explain.evidence import Finding
from labctl.insight.explanation import explain
from labctl.lifecycle.reconcile import fetch_logs
from labctl.lifecycle.up import up
from labctl.model import Run
from labctl.sync.ignore import create_ignored_directory
from labctl.sync.lab_files import push

NEXT_FOR_FILE = "add the line !/data/words/train.bin to .labignore"
NEXT_FOR_FILES = "add the line !/data/words/** to .labignore"


@pytest.fixture
def there(tmp_path: Path) -> World:
    """A lab with a server, whose .gitignore leaves out data that its code names."""
    made = world(tmp_path)
    up(made.context())
    root = made.context().config.root
    (root / "data/words").mkdir(parents=True)
    (root / "data/words/train.bin").write_bytes(b"x" * 2048)
    (root / "data/words/prepare.py").write_text("")
    (root / "notes").mkdir()
    (root / "notes/draft.bin").write_bytes(b"x")
    (root / ".gitignore").write_text("*.bin\n")
    (root / "train.py").write_text("read(join('data', 'words', 'train.bin'))\n")
    return made


def push_notes(there: World) -> list[str]:
    context = there.context()
    push(context, context.get_server(), force=False)
    return [e.text for e in context.reporter.events if isinstance(e, Note) and "ignore" in e.text]


def test_a_push_names_ignored_files_only_of_directories_that_the_code_names(there: World) -> None:
    (text,) = push_notes(there)
    assert "data/words/ (1 file, 2.0 KiB; *.bin in .gitignore)" in text
    assert "notes" not in text
    assert push_notes(there) == [], "nothing new was sent, so nothing is said again"


@pytest.mark.parametrize(
    ("ignore_file", "rules"),
    [
        (".gitignore", "*.bin\n"),
        (".gitignore", "/data/\n"),
        (".gitignore", "words\n"),
        ("data/.gitignore", "*.bin\n"),
        ("data/.gitignore", "words/\n"),
    ],
)
def test_the_line_that_a_push_names_sends_the_files(
    there: World, ignore_file: str, rules: str
) -> None:
    root = there.context().config.root
    (root / ".gitignore").unlink()
    (root / ignore_file).write_text(rules)
    (text,) = push_notes(there)
    inclusion = re.search(r"add the line (\S+) to (\S+)\. ", text)
    assert inclusion is not None
    (root / inclusion[2]).write_text(f"{inclusion[1]}\n")
    (root / "train.py").write_text("read(join('data', 'words', 'train.bin'), again=True)\n")
    assert push_notes(there) == []
    sent = there.machine.home / "labctl" / "digits" / "code"
    assert (sent / "data/words/train.bin").is_file()


def test_a_push_counts_the_files_of_an_ignored_directory(there: World) -> None:
    root = there.context().config.root
    (root / ".gitignore").write_text("/data/\n")
    (root / "data/words/more").mkdir()
    (root / "data/words/more/x").write_bytes(b"x" * 1024)
    (text,) = push_notes(there)
    assert "data/ (3 files, 3.0 KiB; /data/ in .gitignore)" in text


def test_a_push_does_not_name_ignored_directories_that_are_sent_as_data(there: World) -> None:
    root = there.context().config.root
    (root / ".labignore").write_text("/data/words/\n")
    (root / "lab.yaml").write_text("lab: digits\ndata: {words: ./data/words}\n")
    assert push_notes(there) == []


@pytest.mark.parametrize(
    ("rules", "missing", "next_"),
    [
        ("*.bin\n", "data/words/train.bin", NEXT_FOR_FILE),
        ("*.bin\n", "/lab/code/data/words/train.bin", NEXT_FOR_FILE),
        ("/data/\n", "data/words/train.bin", "add the line !/data/ to .labignore"),
    ],
)
def test_explain_names_the_file_and_the_rule(
    there: World, rules: str, missing: str, next_: str
) -> None:
    context = there.context()
    (context.config.root / ".gitignore").write_text(rules)
    log = f"Traceback\nFileNotFoundError: [Errno 2] No such file or directory: '{missing}'\n"
    rule_of = explain_run_with(there, log)
    assert "file-missing" not in rule_of
    finding = rule_of["file-ignored"]
    assert "data/words/train.bin" in finding.what
    assert f"{rules.strip()} in .gitignore" in finding.why
    assert finding.next.startswith(next_)


@pytest.mark.parametrize(
    ("rules", "message", "path", "next_"),
    [
        ("/data/\n", "no words in data/words.", "data/words", "add the line !/data/ to .labignore"),
        ("*.bin\nprep*\n", "no words in data/words.", "data/words", NEXT_FOR_FILES),
        ("*.bin\n", "Couldn't read (data/words/train.bin)", "data/words/train.bin", NEXT_FOR_FILE),
    ],
)
def test_explain_names_the_rule_whatever_the_message_is(
    there: World, rules: str, message: str, path: str, next_: str
) -> None:
    (there.context().config.root / ".gitignore").write_text(rules)
    rule_of = explain_run_with(there, f"Traceback\nFileNotFoundError: {message}\n")
    assert rule_of["file-ignored"].what == f"{path} was not pushed with the code"
    assert rule_of["file-ignored"].next.startswith(next_)


def test_explain_sends_the_other_ignored_files_of_a_directory_too(there: World) -> None:
    (there.context().config.root / "data/words/test.bin").write_bytes(b"x")
    message = "[Errno 2] No such file or directory: 'data/words/train.bin'"
    rule_of = explain_run_with(there, f"Traceback\nFileNotFoundError: {message}\n")
    first, command, _ = rule_of["file-ignored"].next.splitlines()
    assert first == f"{NEXT_FOR_FILES}, then:"
    assert command.startswith("labctl run")


def test_explain_says_where_a_run_has_its_data(there: World) -> None:
    root = there.context().config.root
    (root / "lab.yaml").write_text("lab: digits\ndata: {corpus: ./data}\n")
    rule_of = explain_run_with(there, "Traceback\nFileNotFoundError: no words in data/words\n")
    assert rule_of["file-ignored"].next == "read it from $LABCTL_DATA_DIR/corpus/words"


@pytest.mark.parametrize(
    ("image", "packages"),
    [
        ("{conda: environment.yml}", "environment.yml"),
        ("{requirements: needs.txt}", "needs.txt"),
        ("{build: .}", "the Dockerfile"),
        ("python:3.12", "the image"),
    ],
)
def test_explain_names_the_labs_own_list_of_packages(
    there: World, image: str, packages: str
) -> None:
    root = there.context().config.root
    (root / "lab.yaml").write_text(f"lab: digits\nimage: {image}\n")
    rule_of = explain_run_with(there, "ModuleNotFoundError: No module named 'numpy'\n")
    text = f"correct its name, or add it to {packages}, then:\nlabctl run"
    assert rule_of["module-missing"].next == text


def test_a_directory_with_pushed_files_was_not_left_out(there: World) -> None:
    rule_of = explain_run_with(there, "Traceback\nFileNotFoundError: no words in data/words\n")
    assert "file-ignored" not in rule_of


@pytest.mark.parametrize(
    "missing", ["data/words/valid.bin", "../secret.bin", "/etc/passwd", "runs/first/model.pt"]
)
def test_a_file_that_no_rule_leaves_out_is_missing_as_before(there: World, missing: str) -> None:
    root = there.context().config.root
    (root.parent / "secret.bin").write_text("")
    create_ignored_directory(root / "runs")
    (root / "runs" / "first").mkdir()
    (root / "runs" / "first" / "model.pt").write_text("")
    log = f"FileNotFoundError: [Errno 2] No such file or directory: '{missing}'\n"
    rule_of = explain_run_with(there, log)
    assert "file-missing" in rule_of
    assert "file-ignored" not in rule_of


def explain_run_with(there: World, log: str) -> dict[str, Finding]:
    directory = there.machine.run_with("night", **{"model.safetensors": "weights"})
    (directory / "logs/run.log").write_text(log)
    context = there.context()
    server = context.get_server()
    run = Run(id="night", lab_id=LAB_ID, server_id=server.id, state="exited", exit_code=1)
    context.state.save_run(run)
    explanation = explain(context, fetch_logs(context, "night"))
    return {finding.rule: finding for finding in explanation.findings}
