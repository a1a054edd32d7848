"""The agent gives a pulled image the lab's name only if the server can run it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labctl.agent.reply import parse_reply
from labctl.agent.runs import images
from labctl.wire.images import BuildResult, PullImageRequest
from labctl.wire.verbs import Empty, Verb

REFERENCE = "registry.example/labs:0123456789abcdef-amd64"
TAG = "labctl/built:0123456789abcdef"
# An engine for amd64. `image inspect` answers with the architecture of the pulled image.
DOCKER = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$1 $2" in
  "version "*) echo amd64 ;;
  "image inspect") echo "$PULLED" ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    return calls


def pull(capfdbinary: pytest.CaptureFixture[bytes], tag: str) -> BuildResult:
    images.pull(PullImageRequest(REFERENCE, tag))
    closing = capfdbinary.readouterr().err.decode()
    return parse_reply(Verb("pull-image", Empty, BuildResult), "", closing)


def test_a_pulled_image_gets_the_labs_name(
    calls: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULLED", "amd64")
    assert pull(capfdbinary, TAG) == BuildResult(0, ())
    assert calls.read_text().splitlines()[-1] == f"tag {REFERENCE} {TAG}"


def test_a_pulled_image_for_another_architecture_is_not_tagged_and_not_left(
    calls: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULLED", "arm64")
    result = pull(capfdbinary, TAG)
    assert result == BuildResult(1, ("the image is for arm64, and the server needs amd64",))
    lines = calls.read_text().splitlines()
    assert f"image rm {REFERENCE}" in lines
    assert not [line for line in lines if line.startswith("tag ")]


def test_an_image_that_labyaml_names_is_pulled_as_it_is(
    calls: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert pull(capfdbinary, "").code == 0
    assert calls.read_text().splitlines() == [f"pull {REFERENCE}"]
