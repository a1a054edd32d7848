"""A lab on a machine without Docker, by the commands that a student types."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_directory import LabDirectory
from sshd_container import Sshd, start, wait_for
from sync_lab import build_image

from labctl.servers.host_keys import ensure_key_pair

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine

TRAIN = """
import os, signal, sys, time

def save(*_):
    with open(os.path.join(os.environ["LABCTL_CHECKPOINT_DIR"], "model"), "w") as file:
        file.write("weights")
    sys.exit(int(sys.argv[1]))

signal.signal(signal.SIGTERM, save)
print("training in", os.getcwd(), flush=True)
time.sleep(float(sys.argv[2]))
save()
"""
PACKAGES = ("uv-", "pyyaml-", "setuptools-")
IMPORTS = """
import sys, birds, yaml
print(birds.NAME, yaml.safe_load("[1]"), sys.prefix)
"""
Labctl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def machine(sshd_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    box = start(build_image(), tmp_path_factory.mktemp("keys") / "id_ed25519")
    yield box
    subprocess.run(["docker", "rm", "-f", "-v", box.name], capture_output=True, check=True)


@pytest.fixture(scope="module")
def project(machine: Sshd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home") / "plain"
    directory.mkdir()
    (directory.parent / "wheels").mkdir()
    host = f"{{host: 127.0.0.1, port: {machine.port}, user: student, identity: '{machine.key}'}}"
    (directory / "lab.yaml").write_text(
        f"lab: plain\nserver:\n  provider: static\n  executor: process\n"
        f"  static: {{hosts: [{host}]}}\nrun: python3 train.py 0 0\n"
    )
    (directory / "train.py").write_text(TRAIN)
    return directory


@pytest.fixture(scope="module")
def environ(project: Path) -> dict[str, str]:
    environ = {"HOME": str(project.parent), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    environ["LABCTL_WHEELHOUSE"] = str(project.parent / "wheels")
    return environ


@pytest.fixture(scope="module")
def labctl(project: Path, environ: dict[str, str]) -> Labctl:
    ensure_key_pair(project.parent / ".ssh" / "id_ed25519")

    def call(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "labctl", *words]
        done = subprocess.run(
            command, cwd=project, env=environ, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    call("up", "--yes")
    return call


def read_run(labctl: Labctl, name: str) -> dict[str, object]:
    runs = json.loads(labctl("status", "--refresh", "--json").stdout)["runs"]
    return next(run for run in runs if run["id"] == name)


def test_a_run_prints_its_log_and_its_results_come_home(labctl: Labctl, project: Path) -> None:
    done = labctl("run", "--id", "first")
    assert "training in /home/student/labctl/plain/runs/first/code" in done.stdout
    labctl("pull", "first")
    assert (project / "runs" / "first" / "checkpoints" / "model").read_text() == "weights"
    run = read_run(labctl, "first")
    assert (run["state"], run["executor"], run["image"]) == ("exited", "process", "")
    assert "  runs are plain processes (executor: process)\n" in labctl("status").stdout


def test_the_exit_code_is_the_commands_own(labctl: Labctl) -> None:
    labctl("run", "--id", "failing", "--", "sh", "-c", "exit 7", code=7)


@pytest.mark.long
def test_a_command_beside_a_run_its_measurements_and_its_cancel(
    labctl: Labctl, project: Path, machine: Sshd
) -> None:
    labctl("run", "--detach", "--id", "long", "--", "python3", "train.py", "143", "60")
    beside = labctl("exec", "long", "--", "sh", "-c", "echo $LABCTL_RUN_ID; exit 3", code=3)
    assert beside.stdout == "long\n"
    wait_for(lambda: "training" in labctl("logs", "long").stdout)
    (shown,) = json.loads(labctl("top", "--json").stdout)["server"]["runs"]
    assert (shown["run"], shown["person"], shown["processes"]) == ("long", "student", 2)
    telemetry = "/home/student/labctl/plain/runs/long/logs/telemetry.jsonl"
    wait_for(lambda: machine.sh(f"cat {telemetry} || true") != "")
    assert "canceled" in labctl("cancel", "long").stdout
    labctl("pull", "long")
    measured = (project / "runs" / "long" / "logs" / "telemetry.jsonl").read_text().splitlines()
    assert json.loads(measured[0])["processes"] == 2
    assert (project / "runs" / "long" / "checkpoints" / "model").read_text() == "weights"
    refused = labctl("exec", "long", "--", "true", code=255)
    assert "labctl: run long has ended" in refused.stderr


@pytest.mark.long
def test_a_run_killed_on_the_machine_is_reported(labctl: Labctl, machine: Sshd) -> None:
    labctl("run", "--detach", "--id", "killed", "--", "sleep", "600")
    wait_for(lambda: read_run(labctl, "killed")["state"] == "running")
    machine.sh("pkill -9 -f 'entry.sh [s]leep 600'; pkill -9 -x sleep -u student")
    run = read_run(labctl, "killed")
    assert (run["state"], run["told"]) == ("exited", "its process was killed from outside")


@pytest.mark.long
def test_a_run_with_a_terminal_asks_and_keeps_its_exit_code(
    labctl: Labctl, project: Path, environ: dict[str, str]
) -> None:
    line = "test -t 0 && stty size; read -r name; echo hello $name; exit 3"
    lab = LabDirectory(project, "plain", environ)
    with lab.in_terminal("run", "-it", "--id", "asks", "--", "sh", "-c", line) as terminal:
        fcntl.ioctl(terminal.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
        terminal.said("33 99")
        terminal.type("ada\n")
        terminal.said("hello ada")
        terminal.said("run asks: failed with exit code 3")
        assert terminal.popen.wait(60) == 3
    run = read_run(labctl, "asks")
    assert (run["state"], run["exit_code"]) == ("exited", 3)
    assert "hello ada\n" in labctl("logs", "asks").stdout


@pytest.mark.long
def test_a_run_with_a_terminal_outlives_its_connection(
    labctl: Labctl, project: Path, environ: dict[str, str], machine: Sshd
) -> None:
    line = "echo rea''dy; sleep 1; echo still here; sleep 60"
    lab = LabDirectory(project, "plain", environ)
    words = ("run", "-it", "--id", "cut", "--", "sh", "-c", line)
    with lab.in_terminal(*words) as terminal:
        terminal.said("ready")
        machine.sh("pkill -9 -u student -x sshd")
        terminal.popen.wait(60)
    wait_for(lambda: "still here" in labctl("logs", "cut").stdout)
    assert read_run(labctl, "cut")["state"] == "running"
    with lab.in_terminal(*words) as terminal:
        terminal.said("run cut has a terminal already")
    assert "canceled" in labctl("cancel", "cut").stdout


@pytest.mark.long
def test_ctrl_c_reaches_a_program_in_its_terminal(
    labctl: Labctl, project: Path, environ: dict[str, str]
) -> None:
    lab = LabDirectory(project, "plain", environ)
    code = "import time\ntry:\n  print('rea' 'dy', flush=True)\n  time.sleep(60)\n"
    code += "except KeyboardInterrupt:\n  time.sleep(0.5)\n  exit(5)"
    with lab.in_terminal("run", "-it", "--id", "stopped", "--", "python3", "-c", code) as terminal:
        terminal.said("ready")
        terminal.type("\x03")
        assert terminal.popen.wait(60) == 5


@pytest.fixture
def lists_packages(labctl: Labctl, project: Path) -> Iterator[None]:
    """The lab has a list of packages, with a project of its own, and a wheelhouse."""
    if not os.environ.get("LABCTL_WHEELHOUSE"):
        pytest.skip("LABCTL_WHEELHOUSE is not set")
    wheels = project.parent / "wheels"
    for wheel in Path(os.environ["LABCTL_WHEELHOUSE"]).glob("*.whl"):
        if wheel.name.startswith(PACKAGES):
            shutil.copy(wheel, wheels)
    (project / "birdlib").mkdir(exist_ok=True)
    (project / "birdlib" / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='birdlib', version='1', py_modules=['birds'])\n"
    )
    (project / "birdlib" / "birds.py").write_text("NAME = 'first'\n")
    (project / "requirements.txt").write_text("PyYAML\n-e ./birdlib\n")
    (project / "imports.py").write_text(IMPORTS)
    file = project / "lab.yaml"
    text = file.read_text()
    file.write_text(text + "image: {requirements: requirements.txt}\n")
    labctl("trust", "--yes")
    yield
    file.write_text(text)


@pytest.mark.usefixtures("lists_packages")
def test_packages_are_installed_once_and_each_run_has_its_own_code(
    labctl: Labctl, project: Path, machine: Sshd
) -> None:
    first = labctl("run", "--id", "packages", "--", "python", "imports.py")
    assert "✓ building the environment" in first.stderr
    environment = machine.sh("ls -d /home/student/labctl/.environments/*/env").strip()
    assert f"first [1] {environment}\n" in first.stdout
    kept = machine.sh(f"ls {Path(environment).parent}").split()
    assert kept == ["build.sh", "code", "env", "labs", "whole"]
    (project / "birdlib" / "birds.py").write_text("NAME = 'second'\n")
    again = labctl("run", "--id", "packages-2", "--", "python", "imports.py")
    assert "building the environment" not in again.stderr
    assert f"second [1] {environment}\n" in again.stdout
    run = read_run(labctl, "packages")
    assert run["image"] == f"labctl/environment:{Path(environment).parent.name}"


@pytest.mark.usefixtures("lists_packages")
def test_a_failed_installation_says_why_and_leaves_nothing(
    labctl: Labctl, project: Path, machine: Sshd
) -> None:
    (project / "requirements.txt").write_text("no-such-package\n")
    failed = labctl("run", "--id", "broken", "--", "true", code=255)
    assert "the environment of the run could not be built" in failed.stderr
    assert "pip download -d" in failed.stderr
    digest = failed.stderr.partition("environment-")[2].partition(".log")[0]
    assert digest not in machine.sh("ls /home/student/labctl/.environments")


def test_an_image_is_refused_before_anything_starts(labctl: Labctl, project: Path) -> None:
    file = project / "lab.yaml"
    text = file.read_text()
    file.write_text(text + "image: python:3.12\nlimits: {memory: 1GB}\n")
    refused = labctl("run", "--", "true", code=255)
    file.write_text(text)
    assert "image: needs a container" in refused.stderr
    assert "limits.memory: needs a container" in refused.stderr


SERVICE = """\
services:
  web: {port: 8123, command: python3 -m http.server --bind 127.0.0.1 8123}
"""
FIND_LISTENER = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))'"


@pytest.fixture
def has_service(labctl: Labctl, project: Path) -> Iterator[None]:
    file = project / "lab.yaml"
    text = file.read_text()
    file.write_text(text + SERVICE)
    labctl("trust", "--yes")
    yield
    file.write_text(text)


def open_forward(labctl: Labctl) -> str:
    (opened,) = json.loads(labctl("forward", "web", "--detach", "--json").stdout)["forwards"]
    with urllib.request.urlopen(opened["url"], timeout=30) as page:
        return str(page.read().decode())


@pytest.mark.long
@pytest.mark.usefixtures("has_service")
def test_a_service_is_a_process_that_a_forward_reaches(labctl: Labctl, machine: Sshd) -> None:
    assert "train.py" in open_forward(labctl)
    assert machine.sh("pgrep -u student -f http.server").count("\n") == 1
    labctl("forward", "--stop")
    machine.sh("pkill -u student -f http.server")
    assert "train.py" in open_forward(labctl)
    labctl("forward", "--stop")


@pytest.mark.usefixtures("has_service")
def test_a_port_that_another_program_has_is_not_taken(labctl: Labctl, machine: Sshd) -> None:
    machine.sh("pkill -u student -f http.server || true")
    server = "python3 -m http.server --bind 127.0.0.1 8123"
    machine.sh(f"{server} >/dev/null 2>&1 &", user="noisy")
    wait_for(lambda: machine.sh(f"{FIND_LISTENER} 2>/dev/null && echo yes || true") != "")
    refused = labctl("forward", "web", "--detach", code=1)
    machine.sh("pkill -u noisy -f http.server")
    assert "port 8123 of the server, which web needs, is in use" in refused.stderr


def test_a_service_that_is_not_installed_says_what_to_add(labctl: Labctl) -> None:
    refused = labctl("forward", "jupyter", "--detach", code=4)
    assert "there is no jupyterlab for the service jupyter on the server" in refused.stderr
    assert "add jupyterlab to the list of packages" in refused.stderr


@pytest.mark.long
def test_tensorboard_and_jupyter_come_from_the_packages_of_the_lab(
    labctl: Labctl, project: Path, machine: Sshd
) -> None:
    if not os.environ.get("LABCTL_WHEELHOUSE"):
        pytest.skip("LABCTL_WHEELHOUSE is not set")
    for wheel in Path(os.environ["LABCTL_WHEELHOUSE"]).glob("*.whl"):
        shutil.copy(wheel, project.parent / "wheels")
    packages = "tensorboard\njupyterlab\njupyter-server>=2.20\nipykernel\n"
    (project / "requirements.txt").write_text(packages)
    file = project / "lab.yaml"
    text = file.read_text()
    file.write_text(text + "image: {requirements: requirements.txt}\n")
    labctl("trust", "--yes")
    opened = json.loads(labctl("forward", "tensorboard", "jupyter", "--detach", "--json").stdout)[
        "forwards"
    ]
    urls = {each["service"]: each["url"] for each in opened}
    with urllib.request.urlopen(urls["tensorboard"], timeout=60) as page:
        assert b"TensorBoard" in page.read()
    base, _, token = urls["jupyter"].partition("/lab?token=")
    with urllib.request.urlopen(f"{base}/api/contents?token={token}", timeout=60) as page:
        names = [each["name"] for each in json.load(page)["content"]]
    assert {"code", "runs"} <= set(names)
    listening = machine.sh("cat /proc/net/tcp").splitlines()
    ports = {line.split()[1] for line in listening[1:] if line.split()[3] == "0A"}
    addresses = {port.split(":")[0] for port in ports if port.split(":")[1] in ("178A", "22B8")}
    assert addresses == {"0100007F"}
    labctl("forward", "--stop")
    file.write_text(text)


@pytest.mark.usefixtures("has_service")
def test_down_gives_the_machine_back(labctl: Labctl, machine: Sshd) -> None:
    labctl("forward", "web", "--detach")
    labctl("down", "--yes")
    assert machine.sh("pgrep -u student -f http.server || true") == ""
    assert machine.sh("ls /home/student/labctl/.environments || true") == ""
    assert machine.sh("pgrep -u student -f entry.sh || true") == ""
