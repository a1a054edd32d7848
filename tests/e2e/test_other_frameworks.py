"""The templates of other frameworks as a student uses them, from `init` to a submission."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_directory import LabDirectory, make_lab
from PIL import Image
from submit_bed import receiving_machine

REPOSITORY = Path(__file__).parents[2]
# The run's command, what evaluate.py imports, and what the model is asked.
TEMPLATES: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "tabular": (
        ("--model", "xgboost", "--rounds", "4"),
        "xgboost",
        {"rows": [[5, 8, 0, 40, 9, 1]]},
    ),
    "tensorflow": (("--epochs", "2"), "tensorflow", None),
    "jax": (("--epochs", "2"), "jax", None),
}
# The first run installs the packages in an image.
FIRST_RUN_S = 1800.0
pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.long]


@pytest.fixture(params=list(TEMPLATES))
def lab(
    request: pytest.FixtureRequest, tmp_path: Path, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    """The project of a template, with a server."""
    template = request.param
    if importlib.util.find_spec(TEMPLATES[template][1]) is None:
        pytest.skip(f"{template}: pip install -r templates/{template}/requirements*.txt")
    made = make_lab(tmp_path, "unused", base_image)
    home = Path(made.environ["HOME"])
    made.environ["LABCTL_WHEELHOUSE"] = str(gather_wheels(template, tmp_path / "wheels"))
    words = ("init", str(home / template), "--template", template, "--provider", "local")
    LabDirectory(home, "", made.environ).labctl(*words)
    lab = LabDirectory(home / template, template, made.environ)
    try:
        lab.labctl("up", "--yes")
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard")


def gather_wheels(template: str, target: Path) -> Path:
    """Download the template's packages to a wheelhouse, beside those that are there already."""
    target.mkdir()
    present = os.environ.get("LABCTL_WHEELHOUSE", "")
    for wheel in Path(present).glob("*.whl") if present else ():
        os.link(wheel, target / wheel.name)
    directory = REPOSITORY / "templates" / template
    lists = sorted(directory.glob("requirements*.txt"))  # requirements-cpu.txt is the first
    packages = ("uv", "fastapi", "uvicorn", "python-multipart", "prometheus-client", "pillow")
    words = ("download", "-q", "-d", target, "--find-links", target, "-r", lists[0], *packages)
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return target


def test_from_init_to_a_submission(lab: LabDirectory, tmp_path: Path) -> None:
    arguments, _, question = TEMPLATES[lab.name]
    words = ("run", "--yes", "--", "python", "train.py", *arguments)
    trained = lab.start(*words).end(deadline_s=FIRST_RUN_S)
    assert "test accuracy" in trained.stdout
    lab.labctl("pull")
    (run,) = (path for path in (lab.root / "runs").iterdir() if path.is_dir())
    result = lab.json("eval")["evaluation"]
    assert result["accuracy_local"] == pytest.approx(result["accuracy_server"], abs=0.01)
    assert result["total"] > 200
    on_server = lab.json("eval", "--on-server")["evaluation"]
    assert on_server["accuracy_server"] == pytest.approx(result["accuracy_local"], abs=0.01)
    lab.labctl("report")
    page = (run / "report.html").read_text()
    assert "Worst mistakes" in page
    assert result["checkpoint"] in page
    ask(lab, question)
    submit(lab, tmp_path)


def ask(lab: LabDirectory, question: Any) -> None:
    """Serve the model, and ask it about a row, or about a picture."""
    served = lab.json("serve", "--detach", "--yes")["serve"]
    kind, body = "application/json", json.dumps(question).encode()
    if question is None:
        kind, body = "image/png", make_picture()
    connection = http.client.HTTPConnection(served["url"].removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", "/predict", body, {"Content-Type": kind})
        reply = json.loads(connection.getresponse().read())
    finally:
        connection.close()
        lab.labctl("serve", "--stop")
    (prediction,) = reply["predictions"]
    assert 0 < prediction["probability"] <= 1
    assert served["checkpoint"] == reply["model"]["checkpoint"]


def make_picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (20, 30), 200).save(buffer, "PNG")
    return buffer.getvalue()


def submit(lab: LabDirectory, folder: Path) -> None:
    (folder / "receiver").mkdir()
    with receiving_machine(folder / "receiver") as machine:
        machine.admit("sam", lab.labctl("submit", "--key").stdout.strip())
        (lab.root / "assignment.yaml").write_text(machine.assignment())
        assert "received" in lab.labctl("submit", "--yes").stdout
