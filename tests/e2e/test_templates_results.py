"""What the templates for one GPU write: evaluated, reported and submitted over a real sshd.

The runs train on this machine, as labctl's containers run them: tests/e2e/test_templates_live.py
needs images with PyTorch for that.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from submit_bed import SSHD, Machine, receiving_machine
from transcripts import Session, make_session

from labctl.config import ensure_lab_id, find_paths
from labctl.model import Run
from labctl.servers.host_keys import ensure_key_pair
from labctl.state import State

pytestmark = [
    pytest.mark.train,
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")), reason="there is no sshd here"
    ),
]
SHORT = {
    "text-generator": (
        *("train.py", "--steps", "4", "--checkpoint-every", "2"),
        *("--layers", "1", "--width", "16", "--context", "16", "--batch-size", "2"),
    ),
    "cuda-kernel": ("measure.py", "--sizes", "64", "256", "--repeat", "3"),
    "fine-tune": ("train.py", "--steps", "4", "--checkpoint-every", "2", "--batch-size", "2"),
}


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with receiving_machine(tmp_path_factory.mktemp("receiver")) as machine:
        yield machine


def train(session: Session, program: tuple[str, ...]) -> None:
    """Train in runs/first, as on a server, and write the record that a pull writes."""
    run = session.directory / "runs" / "first"
    run.mkdir(parents=True)
    words = {"LABCTL_RUN_DIR": str(run), "LABCTL_RUN_ID": "first"}
    subprocess.run(
        [sys.executable, "-B", *program],
        cwd=session.directory,
        env={**session.environ, **words, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    now = time.time()
    record = Run(
        id="first",
        lab_id=ensure_lab_id(session.directory),
        server_id="gone",
        state="exited",
        exit_code=0,
        command=("python", *program),
        created_at=now - 60,
        started_at=now - 60,
        ended_at=now,
    )
    (run / "run.json").write_bytes(msgspec.json.encode(record))
    with State(find_paths({"HOME": session.environ["HOME"]}).database) as state:
        state.save_run(record)


@pytest.mark.parametrize("template", SHORT)
def test_a_run_is_evaluated_reported_and_submitted(
    receiver: Machine, tmp_path: Path, template: str
) -> None:
    if template == "fine-tune" and importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    (tmp_path / "empty").mkdir()
    session = make_session(tmp_path, tmp_path / "empty", {"PYTHONWARNINGS": "ignore"})
    home = Path(session.environ["HOME"])
    key = home / ".local/share/labctl/keys/submit/id_ed25519"
    receiver.admit(template, ensure_key_pair(key))
    assert "is ready" in session.run(f"labctl init lab --template {template} --provider local")
    session = session.enter("lab")
    (session.directory / "assignment.yaml").write_text(receiver.assignment())
    train(session, SHORT[template])
    evaluated = session.run("labctl eval")
    assert re.search(r"on the server: .* the same", evaluated), evaluated
    assert "report.html" in session.run("labctl report")
    page = (session.directory / "runs" / "first" / "report.html").read_text()
    assert "predicted correctly" in page
    assert ("perplexity" in page) == (template != "cuda-kernel")
    submitted = session.run("labctl submit --yes")
    assert re.search(r"model +[\d.]+ \w+ ", submitted), submitted
    assert "received" in submitted
    bundles = list((session.directory / ".labctl" / "submissions" / "hw3").glob("bundle-*"))
    assert len(bundles) == 1
