"""The Tab key in real shells, set up by `labctl completion --install`."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.cli.completion_values import answer_shell
from labctl.config import ensure_lab_id, find_paths
from labctl.model import Forward, Run
from labctl.state import State

PROGRAM = (
    f"#!{sys.executable} -I\nimport sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
)
LAB = "lab: digits\nservices: {board: {port: 5000}}\n"
PROMPT = "ready> "
HEAVY = {"ansible", "boto3", "docker", "fabric", "paramiko", "rich", "requests"}
Complete = Callable[..., list[str]]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs terminals")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A home with `labctl` on its PATH, and the lab `digits` with two runs on record."""
    program = tmp_path / "bin" / "labctl"
    program.parent.mkdir()
    program.write_text(f"{PROGRAM}from labctl.cli import main\nmain()\n")
    program.chmod(0o755)
    lab = tmp_path / "digits"
    (lab / "nested").mkdir(parents=True)
    (lab / "lab.yaml").write_text(LAB)
    for name in ("notes.txt", "readme.md", "train.py"):
        (lab / name).write_text("")
    environ = {
        "HOME": str(tmp_path),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "SHELL": "/bin/bash",
    }
    with State(find_paths(environ).database) as state:
        for number, run_id in enumerate(("night-1", "night-2")):
            run = Run(
                id=run_id,
                lab_id=ensure_lab_id(lab),
                server_id="gone",
                state="exited",
                summary="done\nor \x1b[2J: not",
                created_at=1000.0 + number,
            )
            state.save_run(run)
    return environ


def call(
    *words: str, environ: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["labctl", *words],
        executable=shutil.which("labctl", path=environ["PATH"]),
        cwd=cwd or Path(environ["HOME"]) / "digits",
        env=environ,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def complete(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Complete:
    """The answer to a shell that completes a line; nothing must be said beside it."""

    def answer(line: str, cwd: Path | None = None) -> list[str]:
        monkeypatch.chdir(cwd or Path(environ["HOME"]) / "digits")
        for name, value in (environ | make_request(line)).items():
            monkeypatch.setenv(name, value)
        answer_shell()
        out, err = capfd.readouterr()
        assert err == ""
        return out.split()

    return answer


def make_request(line: str) -> dict[str, str]:
    """What bash sets when the Tab key is pressed at the end of `line`."""
    return {
        "_LABCTL_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(f"{line}.".split()) - 1),
    }


class Terminal:
    """A shell on a terminal, in which keys are typed."""

    def __init__(self, argv: list[str], environ: dict[str, str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def type(self, keys: str) -> None:
        self.text = ""
        os.write(self._ours, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while text not in self.text:
            left = end - time.monotonic()
            assert left > 0, f"no {text!r} in {self.text!r}"
            if select.select([self._ours], [], [], min(left, 1.0))[0]:
                self.text += os.read(self._ours, 65536).decode(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def open_terminal(environ: dict[str, str]) -> Any:
    terminals: list[Terminal] = []

    def open_(*argv: str) -> Terminal:
        if shutil.which(argv[0]) is None:
            pytest.skip(f"{argv[0]} is not installed")
        terminals.append(Terminal([*argv], environ, Path(environ["HOME"]) / "digits"))
        return terminals[-1]

    yield open_
    for terminal in terminals:
        terminal.close()


@pytest.mark.parametrize(
    ("shell", "startup", "prompt"),
    [("bash", ".bashrc", f"PS1='{PROMPT}'\n"), ("zsh", ".zshrc", f"PROMPT='{PROMPT}'\n")],
)
def test_the_tab_key_completes_after_one_command(
    shell: str, startup: str, prompt: str, environ: dict[str, str], open_terminal: Any
) -> None:
    (Path(environ["HOME"]) / startup).write_text(prompt.rstrip("\n"))  # no newline at its end
    done = call("completion", "--install", shell, environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    terminal = open_terminal(shell, "-i")
    terminal.wait_for(PROMPT)
    for line, completed in (
        ("labctl logs nigh\t", "t-"),
        ("labctl forward jup\t", "jupyter"),
        ("labctl up --provider sta\t", "static"),
        ("labctl cp not\t", "notes.txt"),
        ("labctl run -- python tra\t", "train.py"),
        ("labctl exec -- cat rea\t", "readme.md"),
    ):
        terminal.type(f"\x15{line}")  # Ctrl-U deletes the line before
        terminal.wait_for(completed)


def test_zsh_shows_how_each_run_ended(environ: dict[str, str], open_terminal: Any) -> None:
    (Path(environ["HOME"]) / ".zshrc").write_text(f"PROMPT='{PROMPT}'\n")
    call("completion", "--install", "zsh", environ=environ)
    terminal = open_terminal("zsh", "-i")
    terminal.wait_for(PROMPT)
    terminal.type("labctl logs night-\t\t")
    terminal.wait_for("done or ")


def test_fish_completes_after_one_command(environ: dict[str, str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    done = call("completion", "--install", "fish", environ=environ)
    assert (done.returncode, done.stderr) == (0, "")

    def ask(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "-c", f"complete -C '{line}'"],
            cwd=Path(environ["HOME"]) / "digits",
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    assert [each.partition("\t")[0] for each in ask("labctl logs nig")] == ["night-1", "night-2"]
    assert {"board", "jupyter", "tensorboard"} <= set(ask("labctl forward "))
    assert ask("labctl doctor --provider loc") == ["local"]
    assert [each.partition("\t")[0] for each in ask("labctl init new --template d")] == ["ddp"]
    assert "notes.txt" in ask("labctl cp not")
    assert "compare\tCompare runs: results, settings, cost, chance." in ask("labctl comp")


def test_the_newest_run_comes_first(complete: Complete) -> None:
    for command in ("logs", "attach", "exec", "cancel", "pull", "explain", "run --id", "serve"):
        assert complete(f"labctl {command} n") == ["plain,night-2", "plain,night-1"]


def test_a_run_is_offered_once_and_not_in_place_of_a_command(complete: Complete) -> None:
    assert complete("labctl exec night-1 night") == []
    assert complete("labctl serve night-1 night") == []
    assert complete("labctl forward board boa") == []


def test_forwards_that_can_be_stopped_are_offered(
    environ: dict[str, str], complete: Complete
) -> None:
    from labctl.model import Endpoint, Offer, Server

    lab_id = ensure_lab_id(Path(environ["HOME"]) / "digits")
    with State(find_paths(environ).database) as state:
        for number, owner in ((1, lab_id), (2, "f" * 12)):
            state.save_server(
                Server(
                    id=f"s{number}",
                    provider="local",
                    lab="digits",
                    lab_id=owner,
                    alias="digits",
                    endpoint=Endpoint(host="127.0.0.1", user="student"),
                    state="running",
                    created_at=1.0,
                    offer=Offer(provider="local", type="container"),
                )
            )
            forward = Forward(
                id=f"f{number}",
                server_id=f"s{number}",
                service="jupyter",
                local_port=1,
                remote_port=1,
                url="",
            )
            state.save_forward(forward)
    assert complete("labctl forward --stop ") == ["plain,jupyter", "plain,f1"]
    assert complete("labctl forward --stop --all f") == ["plain,f1", "plain,f2"]


def test_the_lab_may_be_above_or_named(environ: dict[str, str], complete: Complete) -> None:
    home = Path(environ["HOME"])
    assert complete("labctl logs night-1", home / "digits" / "nested")
    assert complete("labctl -C digits logs night-1", home) == ["plain,night-1"]
    assert complete("labctl -C digits forward boa", home) == ["plain,board"]


@pytest.mark.parametrize(
    "line",
    ["labctl logs ", "labctl bogus ", "labctl course bogus ", "labctl run --bogus x --id ",
     "labctl -C /nowhere logs ", "labctl exec 'open quote", "labctl forward --stop "],
)  # fmt: skip
def test_without_a_lab_there_is_nothing_to_say(
    line: str, complete: Complete, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert complete(line, tmp_path / "empty") in ([], ["file,"])
    assert list((tmp_path / "empty").iterdir()) == []


def test_damaged_files_are_left_to_the_commands(
    environ: dict[str, str], complete: Complete
) -> None:
    home = Path(environ["HOME"])
    (home / "digits" / "lab.yaml").write_text("lab: [\n")
    assert complete("labctl forward jup") == ["plain,jupyter"]
    find_paths(environ).database.write_bytes(b"no database")
    assert complete("labctl logs ") == []
    (home / "digits" / ".labctl" / "lab.json").write_text("{")
    assert complete("labctl logs ") == []
    assert not list(find_paths(environ).log_dir.glob("*")), "a completion reports no bug"


def test_a_completion_creates_no_record(environ: dict[str, str], complete: Complete) -> None:
    shutil.rmtree(find_paths(environ).state_dir)
    assert complete("labctl logs ") == []
    assert not find_paths(environ).state_dir.exists()


@pytest.mark.parametrize("line", ["labctl ", "labctl course ", "labctl logs ", "labctl forward "])
def test_a_completion_imports_little_and_connects_to_nothing(
    line: str, environ: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "labctl"
    program.write_text(
        f"""{PROGRAM}import socket, subprocess
before = set(sys.modules)
REACHING = {{"socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.exec", "os.fork"}}
sys.addaudithook(lambda event, _: print(event, file=sys.stderr) if event in REACHING else None)
from labctl.cli import main
try:
    main()
finally:
    packages = {{name.partition(".")[0] for name in sys.modules}}
    print(*sorted(packages & {HEAVY!r}), sep="", end="", file=sys.stderr)
"""
    )
    done = call(environ=environ | make_request(line))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_second_installation_changes_nothing(environ: dict[str, str]) -> None:
    home = Path(environ["HOME"])
    (home / "dotfiles").mkdir()
    (home / "dotfiles" / "bashrc").write_text("alias ll='ls -l'\n")
    (home / ".bashrc").symlink_to("dotfiles/bashrc")
    first = call("completion", "--install", environ=environ)
    text = (home / ".bashrc").read_text()
    second = call("completion", "--install", environ=environ)
    assert "added a line" in first.stdout
    assert "added a line" not in second.stdout
    assert (home / ".bashrc").read_text() == text
    assert (home / ".bashrc").is_symlink()
    assert text.startswith("alias ll='ls -l'\n[ -r ")


def test_an_unknown_login_shell_is_asked_for(environ: dict[str, str]) -> None:
    done = call("completion", "--install", environ={**environ, "SHELL": "/bin/tcsh"})
    assert done.returncode == 2
    assert "$SHELL) is tcsh" in done.stderr
    assert "next: labctl completion --install bash" in done.stderr


def test_a_managed_startup_file_stays_as_it_is(environ: dict[str, str]) -> None:
    startup = Path(environ["HOME"]) / ".bashrc"
    startup.mkdir()
    done = call("completion", "--install", environ=environ)
    assert done.returncode == 1
    assert f"cannot write {startup}" in done.stderr
    assert 'next: eval "$(labctl completion bash)"' in done.stderr


def test_the_script_is_printed_without_install(environ: dict[str, str]) -> None:
    done = call("completion", "zsh", environ=environ)
    assert done.stdout.startswith("#compdef labctl\n")
    assert not (Path(environ["HOME"]) / ".zshrc").exists()
