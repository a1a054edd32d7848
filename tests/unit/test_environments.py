"""Environments of runs without containers: their scripts run here, in a home of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from labctl.agent.host.paths import lab_dir, labctl_home
from labctl.agent.reply import parse_reply
from labctl.agent.runs import environment_builds
from labctl.agent.runs.environments import is_whole, use_environment
from labctl.config import ImageConfig
from labctl.runs.environment import read_script
from labctl.wire.images import BuildEnvironmentRequest, BuildOpening, BuildResult
from labctl.wire.runs import ENVIRONMENT
from labctl.wire.verbs import Verb

LAB_ID, OTHER_LAB_ID = "0f1e2d3c4b5a", "1f1e2d3c4b5a"
REFERENCE = f"{ENVIRONMENT}:0123456789abcdef"
COUNT = 'mkdir -p "$ENVIRONMENT/bin" && echo built >> "$HOME/builds"'
PIP = ImageConfig(requirements="requirements.txt")
CONDA = ImageConfig(conda="environment.yml")
# It creates what micromamba would, and notes how it was called.
MICROMAMBA = """#!/bin/sh
echo "$*" >> "$HOME/calls"
[ "$1" = clean ] || { mkdir -p "$4/bin"; ln -s "$(command -v python3)" "$4/bin/python"; }
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of the server's account, with the lab's directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (lab_dir("digits", LAB_ID) / "code").mkdir(parents=True)


def make_request(
    script: str = COUNT, lab_id: str = LAB_ID, **files: str
) -> BuildEnvironmentRequest:
    args = {"FILE": "requirements.txt", "PYTHON": ""}
    return BuildEnvironmentRequest("digits", lab_id, REFERENCE, script, args, files)


def build(
    capfdbinary: pytest.CaptureFixture[bytes], request: BuildEnvironmentRequest
) -> BuildResult:
    environment_builds.build(request)
    verb = Verb("build-environment", BuildOpening, BuildResult)
    return parse_reply(verb, "", capfdbinary.readouterr().err.decode())


def count_builds() -> int:
    return len((Path.home() / "builds").read_text().splitlines())


def test_it_is_built_once(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert use_environment(REFERENCE, LAB_ID) is None
    assert build(capfdbinary, make_request()).code == 0
    assert build(capfdbinary, make_request()).code == 0
    assert count_builds() == 1
    environment = use_environment(REFERENCE, LAB_ID)
    assert environment is not None
    assert environment.directory == labctl_home() / ".environments" / "0123456789abcdef"


def test_two_builds_at_once_make_it_once() -> None:
    request = make_request(f"sleep 0.3; {COUNT}")
    builds = [threading.Thread(target=environment_builds.build, args=(request,)) for _ in "ab"]
    for each in builds:
        each.start()
    for each in builds:
        each.join()
    assert count_builds() == 1


def test_a_failed_build_leaves_nothing_but_its_log(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    script = f'{COUNT}; echo "Step 2/3 : RUN uv venv"; echo no such Python; exit 3'
    result = build(capfdbinary, make_request(script))
    assert (result.code, result.tail) == (3, ("Step 2/3 : RUN uv venv", "no such Python"))
    assert "no such Python" in Path(result.log).read_text()
    assert not list((labctl_home() / ".environments").iterdir())


def test_what_a_killed_build_left_is_not_used(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    left = labctl_home() / ".environments" / "0123456789abcdef" / "env" / "half"
    left.mkdir(parents=True)
    assert not is_whole(REFERENCE)
    assert use_environment(REFERENCE, LAB_ID) is None
    assert build(capfdbinary, make_request()).code == 0
    assert not left.exists()


def test_it_stays_while_a_lab_uses_it(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    build(capfdbinary, make_request())
    assert use_environment(REFERENCE, OTHER_LAB_ID)
    environment_builds.release_environments(LAB_ID)
    assert is_whole(REFERENCE)
    environment_builds.release_environments(OTHER_LAB_ID)
    assert not list((labctl_home() / ".environments").iterdir())


@pytest.mark.long
def test_a_server_without_uv_uses_venv_and_pip(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package index has no uv."""
    python = Path.home() / "programs" / "python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = build(capfdbinary, make_request(read_script(PIP), **{"requirements.txt": "\n"}))
    assert result.code == 0, result
    assert "Step 3/3 : RUN pip install --requirements requirements.txt" in result.tail[0]
    prefix = labctl_home() / ".environments" / "0123456789abcdef" / "env"
    words = [prefix / "bin" / "python", "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(prefix)


@pytest.mark.parametrize("script", [read_script(PIP), read_script(CONDA)])
def test_a_script_is_for_the_plain_shell(script: str) -> None:
    subprocess.run(["dash", "-n"], input=script, text=True, check=True)


def test_a_version_that_the_server_lacks_is_named(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    request = make_request(read_script(PIP), **{"requirements.txt": "\n"})
    result = build(
        capfdbinary, request._replace(args={"FILE": "requirements.txt", "PYTHON": "3.4"})
    )
    assert result.code == 1
    assert any(line.startswith("This server has Python 3.") for line in result.tail)


def test_conda_uses_the_micromamba_of_the_account(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    request = make_request(read_script(CONDA), **{"environment.yml": "dependencies: [python]\n"})
    request = request._replace(args={"FILE": "environment.yml"})
    missing = build(capfdbinary, request)
    assert "This server has no micromamba, mamba or conda, which image.conda needs." in missing.tail
    program = Path.home() / ".local" / "bin" / "micromamba"
    program.parent.mkdir(parents=True)
    program.write_text(MICROMAMBA)
    program.chmod(0o755)
    assert build(capfdbinary, request).code == 0
    prefix = labctl_home() / ".environments" / "0123456789abcdef" / "env"
    calls = (Path.home() / "calls").read_text().splitlines()
    assert calls[0] == f"create --yes --prefix {prefix} --file environment.yml"
