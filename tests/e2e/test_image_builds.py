"""Two machines request the same build on one server: one builds, the other waits."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_servers import wait_for

from labctl.agent.reply import parse_reply
from labctl.wire.codec import encode
from labctl.wire.images import BuildImageRequest, BuildResult
from labctl.wire.verbs import Empty, Verb

pytestmark = pytest.mark.engine

LAB, LAB_ID = "digits", "0f1e2d3c4b5a"
# A build begins when the test lets it.
DOCKER = """#!/bin/sh
touch "$HOME/begun"
until [ -e "$HOME/go" ]; do sleep 0.02; done
exec {docker} "$@"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An account on a server, with a lab whose code is there, and this machine's engine."""
    code = tmp_path / "labctl" / LAB / "code"
    code.mkdir(parents=True)
    (code / "birds.py").write_text("NAME = 'first'\n")
    (tmp_path / "labctl" / LAB / ".labctl").mkdir()
    (tmp_path / "labctl" / LAB / ".labctl" / "id").write_text(LAB_ID)
    programs = tmp_path / "bin"
    programs.mkdir()
    docker = subprocess.run(["which", "docker"], capture_output=True, text=True, check=True)
    (programs / "docker").write_text(DOCKER.format(docker=docker.stdout.strip()))
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def tag() -> Iterator[str]:
    name = f"labctl/built:{secrets.token_hex(8)}"
    yield name
    subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)


def start_build(request: BuildImageRequest) -> subprocess.Popen[str]:
    """Start a build by the agent, and return when it has sent the log's name."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from labctl.agent.entrypoint import main; main()", "build"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    process.stdin.write(encode(request) + "\n")
    process.stdin.close()
    process.stdin = None
    assert "log" in process.stdout.readline()
    return process


def test_a_second_build_of_an_image_leaves_the_files_of_the_first_alone(
    home: Path, tag: str
) -> None:
    request = BuildImageRequest(
        LAB, LAB_ID, ".", tag, {}, dockerfile="FROM scratch\nCOPY code /code\n", has_code=True
    )
    builds = [start_build(request)]
    wait_for((home / "begun").exists)
    (context,) = (home / "labctl" / LAB / "builds").glob("*.context")
    (context / "code" / "of-the-first").touch()
    builds.append(start_build(request))
    (home / "go").touch()
    for build in builds:
        _, errors = build.communicate()
        assert parse_reply(Verb("build", Empty, BuildResult), "", errors).code == 0, errors
    made = subprocess.run(
        ["docker", "create", tag, "none"], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        copied = ["docker", "cp", f"{made}:/code", str(home / "copied")]
        subprocess.run(copied, capture_output=True, check=True)
    finally:
        subprocess.run(["docker", "rm", made], capture_output=True, check=True)
    assert {path.name for path in (home / "copied").iterdir()} == {"birds.py", "of-the-first"}
