"""The parts of the sample project that are not Python: what it asks labctl and Docker for."""

from __future__ import annotations

import importlib.util
import re

import jinja2
import pytest
import yaml
from template_project import REPOSITORY, TEMPLATE

# The top-level keys of lab.yaml in the design.
KEYS = {
    *("lab", "server", "image", "run", "env", "secrets", "data", "outputs", "services", "store"),
    "limits",
}


def test_pytorch_is_here() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("the sample project's other tests need PyTorch: pip install 'labctl[train]'")


def render(*, has_dataset: bool) -> dict[str, object]:
    source = (TEMPLATE / "lab.yaml.j2").read_text()
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    text = template.from_string(source).render(
        lab="digits",
        provider="local",
        base_image="python:3.11-slim",
        cpu=True,
        cuda_base="nvidia",
        provider_example="",
        has_dataset=has_dataset,
    )
    lab: dict[str, object] = yaml.safe_load(text)
    return lab


def test_lab_yaml_keeps_to_the_design() -> None:
    lab = render(has_dataset=True)
    assert set(lab) <= KEYS
    assert lab["lab"] == "digits"
    assert lab["server"] == {"provider": "local", "gpu": "auto"}
    assert lab["image"] == {"build": ".", "args": {"BASE": "python:3.11-slim"}}
    assert lab["data"] == {"digits": "./dataset"}


def test_lab_yaml_names_no_data_where_there_is_none() -> None:
    assert set(render(has_dataset=True)) - set(render(has_dataset=False)) == {"data"}


def test_the_training_image_has_one_recipe() -> None:
    link = REPOSITORY / "images" / "train" / "Dockerfile"
    assert link.read_text() == (TEMPLATE / "Dockerfile").read_text()


def test_the_dockerfile_keeps_to_what_both_builders_know() -> None:
    dockerfile = (TEMPLATE / "Dockerfile").read_text()
    assert "--mount" not in dockerfile
    assert re.findall(r"^(?:COPY|ADD) (.*)$", dockerfile, re.MULTILINE) == [
        "requirements.txt /opt/lab/requirements.txt"
    ]
    arguments = re.findall(r"^ARG (\w+)(=.*)?$", dockerfile, re.MULTILINE)
    assert dict(arguments) == {
        "BASE": "=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        "PIP_INDEX_URL": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_INDEX": "",
        "TORCH": '="torch==2.13.0"',
    }


def test_nothing_that_a_run_makes_is_sent_with_the_code() -> None:
    for name in (".labignore", ".gitignore"):
        ignored = (TEMPLATE / name).read_text().splitlines()
        assert {"/dataset/", "/checkpoints/", "/logs/", "__pycache__/"} <= set(ignored)
