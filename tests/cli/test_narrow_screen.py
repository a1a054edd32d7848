"""Errors, hints and questions on a terminal of 80 columns: read from the screen of tmux."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from terminal import open_terminal
from test_grading_guide import COURSES, FILES, prepare_course
from transcripts import make_program, make_session

from labctl import Lab
from labctl.courses.records.folder import make_private
from labctl.model import Endpoint, Offer, Run, Server
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from submission_bed import DUE_AT, handed_in, make_receiver, packed

COLUMNS = 80
COMMAND_S = 60.0
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJf9dHhVsI2y3a9vT5o1kTqZ7bq0mC4rYw8sN6uXeLpQ"
ANSWER = "You are right: the names are explained, and so is the choice of the rate in train.py."
LAB = """\
lab: digits
run: [python, train.py]
secrets: [TOKEN_OF_THE_TRACKER, TOKEN_OF_THE_STORE, TOKEN_OF_THE_DATA_SET]
server: {provider: static, gpu: A100, static: {hosts: [gpu1.lab.example, gpu2.lab.example]}}
"""


@pytest.fixture
def lab() -> Iterator[Path]:
    """A lab whose path fits a line, unlike pytest's directories."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "lab.yaml").write_text(LAB)
        yield Path(folder)


def test_messages_are_wrapped_at_words_and_commands_are_not(lab: Path, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    options = "--learning-rate 0.001 --weight-decay 0.0005 --batch-size 128 --epochs 30"
    (lab / "inner").mkdir()
    (lab / "inner" / "train.py").touch()
    with open_terminal(lab, environ, COLUMNS) as terminal:
        question = terminal.run("labctl trust", ["n"], COMMAND_S).splitlines()
        error = terminal.run("labctl init 'a b'", [], COMMAND_S).splitlines()
        sentence = terminal.run("labctl estimate", [], COMMAND_S).splitlines()
        note = terminal.run("labctl init inner --provider local", [], COMMAND_S).splitlines()
        hint = terminal.run(f"labctl run {options}", [], COMMAND_S).splitlines()
        ready = terminal.run(f"labctl receive init {lab / 'submissions'}", [], COMMAND_S)
    assert [line for line in [*question, *error, *sentence, *note] if len(line) > COLUMNS] == []
    start = next(n for n, line in enumerate(question) if line.startswith("  - give your"))
    assert question[start].endswith("TOKEN_OF_THE_DATA_SET to")
    assert question[start + 1] == "    the programs that it runs"
    assert any(line.startswith("  starting with a letter or digit; try a-b") for line in error)
    assert any(line.endswith(" a function of your code that") for line in sentence)
    assert note[0].startswith(str(lab / "inner"))
    assert note[0].endswith("Commands that you")
    assert any(line.startswith("Keep ") for line in ready.splitlines())
    assert [
        line for line in ready.splitlines() if len(line) > COLUMNS and "next:" not in line
    ] == []
    assert [line.strip() for line in hint if len(line) > COLUMNS] == [
        f"next: labctl run -- python train.py {options}"
    ]


def test_a_mistyped_provider_is_asked_for_again_with_the_nearest_one(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('trained')\n")
    with open_terminal(project, environ, COLUMNS) as terminal:
        shown = terminal.run("labctl init", ["locl", ""], COMMAND_S).splitlines()
    assert "Error:" not in shown
    assert "there is no provider 'locl'; did you mean local?" in shown
    assert "  provider: local" in "\n".join(shown)
    assert [line for line in shown if len(line) > COLUMNS] == []


def test_ctrl_c_leaves_no_blank_line(lab: Path, tmp_path: Path) -> None:
    """`labctl` waits for an answer of the network that does not come."""
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        server = f"{{provider: static, static: {{hosts: ['127.0.0.1:{port}']}}}}"
        (lab / "lab.yaml").write_text(f"lab: digits\nrun: [python]\nserver: {server}\n")
        with open_terminal(lab, environ, COLUMNS) as terminal:
            terminal.run("labctl trust --yes", [], COMMAND_S)
            terminal.start("labctl doctor; echo code $?")
            silent.settimeout(COMMAND_S)
            connection, _ = silent.accept()
            with connection:
                terminal.press("C-c")
                terminal.wait_for("code 130", COMMAND_S)
                rows = terminal.read_rows()
    start = next(n for n, line in enumerate(rows) if "labctl doctor" in line)
    end = rows.index("code 130")
    assert "labctl: interrupted" in rows[start:end]
    assert "" not in rows[start:end], rows
    assert not any("^C" in line for line in rows)


def test_what_was_typed_before_a_question_does_not_answer_it(lab: Path, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    with open_terminal(lab, environ, COLUMNS) as terminal:
        shown = terminal.run("sleep 2; labctl trust", ["n"], COMMAND_S, type_ahead="y")
    assert "approved" not in shown.splitlines()


def test_a_table_is_cut_on_a_terminal_and_whole_in_a_pipe(lab: Path, tmp_path: Path) -> None:
    """Also if the shell exports COLUMNS."""
    command = "python train.py --learning-rate 0.001 --weight-decay 0.0005 --batch-size 128 --last"
    (lab / "lab.yaml").write_text(f"lab: digits\nrun: {command}\n")
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    with open_terminal(lab, environ, COLUMNS) as terminal:
        shown = terminal.run("labctl config", [], COMMAND_S)
        terminal.run("labctl config | tee piped", [], COMMAND_S)
        terminal.run(f"COLUMNS={COLUMNS} labctl config | tee exported", [], COMMAND_S)
    assert max(map(len, shown.splitlines())) <= COLUMNS
    assert "--last" not in shown
    for piped in ("piped", "exported"):
        rows = [line.split(maxsplit=2) for line in (lab / piped).read_text().splitlines()]
        value = next(row[2] for row in rows if row[0] == "run")
        assert value.endswith("--last")


@pytest.mark.parametrize("options", ["", " --all"])
def test_the_cost_of_spot_servers_fits_the_terminal(
    lab: Path, tmp_path: Path, options: str
) -> None:
    """What the terminal has no room for is in the pipe."""
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    record_spot_server(Lab.load(lab, environ=environ))
    with open_terminal(lab, environ, COLUMNS) as terminal:
        lines = terminal.run(f"labctl cost{options}", [], COMMAND_S).splitlines()
        terminal.run(f"labctl cost{options} | tee piped", [], COMMAND_S)
    with open_terminal(lab, environ, 120) as terminal:
        wide_lines = terminal.run(f"labctl cost{options}", [], COMMAND_S).splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert lines[1].split()[0] == "i-7934dcd0144a3ec73"
    assert "$4.31" in lines[1]
    assert "IDLE" not in "".join(lines)
    # No server has had an idle limit here, so a terminal of any width leaves the column out.
    assert wide_lines[0].split()[-2:] == ["COST", "SAVED"]
    assert "IDLE" not in "".join(wide_lines)
    assert "?" not in "".join(wide_lines)
    headings, row = (lab / "piped").read_text().splitlines()[:2]
    assert headings.endswith("  COST   SAVED  IDLE")
    assert row.split()[-3:] == ["$4.31", "$8.18", "-"]


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_status_and_cost_of_runs_fit_the_terminal(lab: Path, tmp_path: Path, columns: int) -> None:
    """The reason why a run failed is whole, below its row where there is no room beside it."""
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    summary = "failed with exit code 1: RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    names = [f"1128-10{number}000-cnn-augmented" for number in range(2)]
    record_spot_server(Lab.load(lab, environ=environ))
    record_runs(Lab.load(lab, environ=environ), names, summary)
    with open_terminal(lab, environ, columns) as terminal:
        status = terminal.run("labctl status", [], COMMAND_S).splitlines()
        costs = terminal.run("labctl cost", [], COMMAND_S).splitlines()
    assert [line for line in [*status, *costs] if len(line) > columns] == []
    assert summary in " ".join(" ".join(status).split())
    for lines in (status, costs):
        assert [line.split()[0] for line in lines if line.startswith("1128-")] in (
            names,
            names[::-1],
        )
    (heading,) = (line for line in costs if line.startswith("RUN"))
    assert heading.split()[-1] == "COST"
    assert ("TIME" in heading) == (columns > 40)


def record_runs(lab: Lab, names: list[str], summary: str) -> None:
    """Record failed runs on the lab's server."""
    server_id = "i-7934dcd0144a3ec73.us-east-1"
    for number, name in enumerate(names):
        started_at = time.time() - 9000 * (number + 1)
        lab.context.state.save_run(
            Run(
                id=name, lab_id=lab.id, server_id=server_id, state="exited", exit_code=1,
                summary=summary, command=("python", "train.py"), created_at=started_at,
                started_at=started_at, ended_at=started_at + 5000,
            )
        )  # fmt: skip
    lab.context.state.close()


def record_spot_server(lab: Lab) -> None:
    """Record a server that ran for most of a day."""
    offer = Offer(
        provider="aws", type="g4dn.12xlarge", price_usd_per_hour=0.1815, spot=True,
        on_demand_usd_per_hour=0.526,
    )  # fmt: skip
    server = Server(
        id="i-7934dcd0144a3ec73.us-east-1", provider="aws", lab="digits", lab_id=lab.id,
        alias="digits", state="running", endpoint=Endpoint(host="127.0.0.1"), offer=offer,
        created_at=time.time() - 23.75 * 3600,
    )  # fmt: skip
    lab.context.state.save_server(server)
    lab.context.state.close()


def test_tables_of_a_course_are_folded_at_spaces(tmp_path: Path) -> None:
    """Also where a name, a rubric and an excuse do not fit beside each other."""
    session = make_session(tmp_path, COURSES / "marks", {})
    roster = session.directory / "canvas.csv"
    roster.write_text(roster.read_text().replace("Cole, Carol", "Cole-Abercrombie, Carolina J."))
    prepare_course(session, "http://127.0.0.1:9")
    make_receiver(session.directory / ".course", late="48h", penalty="10")
    drop = Receiver(session.directory / ".course" / "drop", lambda: DUE_AT + 86_000.0)
    handed_in(drop, packed(FILES, student="alice"), "alice")
    why = "ill for two weeks, with a note from the hospital"
    commands = [
        f"labctl course excuse hw3 carol --why '{why}'",
        "labctl course grades hw3 --rubric",
        "labctl course collect hw3",
        "labctl course mark hw3 --list",
        "labctl course roster",
        f"labctl course regrades hw3 alice --accept --answer '{ANSWER}'",
        "labctl course regrades --all",
    ]
    with open_terminal(session.directory, session.environ, COLUMNS) as terminal:
        outputs = [terminal.run(command, [], COMMAND_S) for command in commands]
    lines = [line.rstrip() for output in outputs for line in output.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []
    graded, collected = "carol    Carolina J.…  -", "carol  Carolina J.…  excused"
    for start, reason in ((graded, f"excused: {why}"), (collected, why)):
        row = next(number for number, line in enumerate(lines) if line.startswith(start))
        assert lines[row + 1].strip() == reason
    quoted = [line.removeprefix("  > ") for line in lines if line.startswith("  > ")]
    assert " ".join(quoted) == ANSWER


def test_the_path_of_a_join_file_is_never_cut(tmp_path: Path) -> None:
    """On a terminal it is on a line of its own; a program that reads the table gets all of it."""
    course = tmp_path / "machine-learning-2026"
    course.mkdir()
    keeper = "keeper: {host: keeper.example.edu, user: labctl}\n"
    (course / "course.yaml").write_text(f"course: machine-learning-2026\n{keeper}")
    (course / "roster.csv").write_text("id,name\nada,Ada Lovelace\n")
    make_private(course)
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    into = course / "the-join-files-of-the-first-group" / "of-students"
    command = f"labctl course invite ada --host-key '{HOST_KEY}' --into {into}"
    with open_terminal(course, environ, COLUMNS) as terminal:
        lines = terminal.run(command, [], COMMAND_S).splitlines()
        piped = terminal.run(f"{command} | cat", [], COMMAND_S).splitlines()
    file = str(into / "machine-learning-2026-ada.join")
    assert [line.strip() for line in lines[:3]] == ["STUDENT  FILE", "ada", file]
    assert f"ada      {file}" in piped


def test_feedback_is_wrapped_at_words(tmp_path: Path) -> None:
    note = "clear names, but the function needs a docstring that says what it does with a zero"
    text = f"code: 18 of 20 (ann): {note}"
    feedback = Feedback(assignment="hw1", number=1, score=18, points=20, text=text, page="")
    show = f"""
from pathlib import Path
import msgspec
from labctl.cli.submit_output import print_feedback
from labctl.submissions.feedback import Feedback
feedback = msgspec.json.decode({msgspec.json.encode(feedback)!r}, type=Feedback)
print_feedback(feedback, Path("feedback.html"))
"""
    (tmp_path / "show.py").write_text(show)
    environ = {"HOME": str(tmp_path), "PATH": f"{make_program(tmp_path)}:/usr/bin:/bin"}
    with open_terminal(tmp_path, environ, COLUMNS) as terminal:
        lines = terminal.run(f"{sys.executable} show.py", [], COMMAND_S).splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert text in " ".join(lines)
