"""The templates for one GPU, from `labctl init` to the receipt of a submission."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from submit_bed import SSHD, Machine, receiving_machine

from labctl.runs.evaluation import read_evaluation
from labctl.servers.host_keys import ensure_key_pair

pytestmark = [
    pytest.mark.engine,
    pytest.mark.train,
    pytest.mark.long,
    pytest.mark.skipif(
        not (Path(SSHD).exists() and shutil.which("ssh")), reason="there is no sshd here"
    ),
]
# seconds in which an image with PyTorch is built on a busy machine
BUILD_S = 1800.0
TEMPLATES = Path(__file__).parents[2] / "templates"
SHORT_TRAININGS = {
    "text-generator": (
        *("python", "train.py", "--steps", "20", "--checkpoint-every", "10"),
        *("--layers", "1", "--width", "32", "--context", "32", "--batch-size", "4"),
    ),
    "cuda-kernel": ("python", "measure.py", "--sizes", "64", "256", "--repeat", "3"),
    "fine-tune": ("python", "train.py", "--steps", "20", "--checkpoint-every", "10"),
}
MODULES = {"fine-tune": ("torch", "peft"), "text-generator": ("torch",), "cuda-kernel": ("torch",)}


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with receiving_machine(tmp_path_factory.mktemp("receiver")) as machine:
        yield machine


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory,
    receiver: Machine,
    base_image: str,
    server_image: str,
) -> LabDirectory:
    """The home of a student whom the receiver knows."""
    lab = make_lab(tmp_path_factory.mktemp("home"), "work", base_image)
    (lab.root / "lab.yaml").unlink()
    lab.environ["LABCTL_WHEELHOUSE"] = os.environ.get("LABCTL_WHEELHOUSE", "")
    key = Path(lab.environ["HOME"]) / ".local/share/labctl/keys/submit/id_ed25519"
    receiver.admit("alice", ensure_key_pair(key))
    return lab


def list_missing_packages(template: str) -> list[str]:
    """Return the packages that this machine has neither installed nor, if it is set, as wheels."""
    missing = [name for name in MODULES[template] if importlib.util.find_spec(name) is None]
    wheels = os.environ.get("LABCTL_WHEELHOUSE", "")
    names = [path.name for path in Path(wheels).glob("*.whl")] if wheels else []
    return missing + [
        f"{name} in LABCTL_WHEELHOUSE"
        for name in MODULES[template]
        if wheels and not any(each.startswith(f"{name}-") for each in names)
    ]


@pytest.mark.parametrize("template", SHORT_TRAININGS)
def test_a_template_goes_from_init_to_a_receipt(
    home: LabDirectory, receiver: Machine, template: str
) -> None:
    if missing := list_missing_packages(template):
        pytest.skip(f"this machine lacks {', '.join(missing)}")
    home.labctl("init", template, "--template", template)
    lab = LabDirectory(home.root / template, template, home.environ)
    if template == "cuda-kernel" and not list_missing_packages("fine-tune"):
        share_image(lab)
    (lab.root / "assignment.yaml").write_text(receiver.assignment())
    try:
        lab.labctl("up", "--yes")
        run = lab.start("run", "--yes", "--id", "first", "--", *SHORT_TRAININGS[template])
        run.end(deadline_s=BUILD_S)
        assert "run first: done" in run.stderr + run.stdout
        lab.labctl("pull", "first")
        logs = lab.root / "runs" / "first" / "logs"
        assert read_evaluation(logs / "evaluation.json").where == "server"
        here = lab.labctl("eval").stdout
        assert re.search(r"on the server: .* the same", here), here
        lab.labctl("eval", "--on-server")
        lab.labctl("report")
        page = (lab.root / "runs" / "first" / "report.html").read_text()
        assert "predicted correctly" in page
        out = lab.labctl("submit", "--yes").stdout
        assert re.search(r"model +[\d.]+ \w+ ", out)
        assert "received" in out
    finally:
        lab.labctl("down", "--yes", "--discard")


def share_image(lab: LabDirectory) -> None:
    """Give the lab the image of the template fine-tune, since installing PyTorch takes minutes."""
    settings = lab.root / "lab.yaml"
    image = "image: {requirements: requirements.txt}\n"
    text = re.sub(r"^image:\n(  .*\n)+", image, settings.read_text(), flags=re.MULTILINE)
    settings.write_text(text)
    shutil.copy(TEMPLATES / "fine-tune" / "requirements.txt", lab.root)
