"""`labctl rehearse lambda` as a process, and labctl's commands that need no machine against it."""

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
    words = [sys.executable, "-m", "labctl", "rehearse", "lambda", "--boot", "none"]
    variables = {**os.environ, "HOME": str(tmp_path)}
    for name in [name for name in variables if name.startswith(("LAMBDA_", "XDG_"))]:
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
    assert "simulated Lambda is running" in messages


def run(environ: dict[str, str], directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "labctl", *words]
    return subprocess.run(
        argv, cwd=directory, env=environ, capture_output=True, text=True, check=False
    )


def test_doctor_and_offers_need_no_machine(environ: dict[str, str], tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "lab.yaml").write_text("lab: digits\nserver: {provider: lambda, gpu: any}\n")
    checks = run(environ, lab, "doctor", "--provider", "lambda").stdout
    assert "capacity: gpu_1x_rtx6000 in us-east-1 has capacity now, $0.50/h" in checks
    assert "only `labctl down` or a keeper ends the costs" in checks
    offers = run(environ, lab, "offers")
    assert offers.returncode == 0
    assert "gpu_1x_a10" in offers.stdout
    del environ["LAMBDA_API_KEY"]
    refused = run(environ, lab, "up", "--yes")
    assert refused.returncode == 1
    assert "no Lambda key was found" in refused.stderr
    assert "export LAMBDA_API_KEY=..." in refused.stderr
