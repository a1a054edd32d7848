"""`labctl rehearse runpod` as a process, and labctl's commands that need no machine against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that the command says to export, in a home of its own."""
    words = [sys.executable, "-m", "labctl", "rehearse", "runpod", "--boot", "none"]
    variables = {**os.environ, "HOME": str(tmp_path)}
    for name in [name for name in variables if name.startswith(("RUNPOD_", "XDG_"))]:
        del variables[name]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            name, _, value = (
                process.stdout.readline().strip().removeprefix("export ").partition("=")
            )
            variables[name] = value
        try:
            yield variables
        finally:
            process.send_signal(signal.SIGINT)
            _, messages = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "simulated RunPod is running" in messages


def run(environ: dict[str, str], directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "labctl", *words]
    return subprocess.run(
        argv, cwd=directory, env=environ, capture_output=True, text=True, check=False
    )


def test_doctor_and_offers_need_no_machine(environ: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "lab.yaml").write_text("lab: pods\nserver: {provider: runpod, gpu: any}\n")
    checks = run(environ, lab, "doctor", "--provider", "runpod").stdout
    assert "capacity: NVIDIA RTX A4000 in EU-RO-1 is in stock now, $0.25/h" in checks
    assert "only `labctl down` or a keeper is sure to end the costs" in checks
    offers = run(environ, lab, "offers")
    assert offers.returncode == 0
    assert "RTX 4090" in offers.stdout
    del environ["RUNPOD_API_KEY"]
    refused = run(environ, lab, "up", "--yes")
    assert refused.returncode == 1
    assert "no RunPod key was found" in refused.stderr
    assert "export RUNPOD_API_KEY=..." in refused.stderr
