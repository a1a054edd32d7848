"""The sample project on two servers at once learns what it learns on one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab

from labctl.insight.scalars import read_scalars

pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.long]
# Random numbers would differ: without dropout the processes compute what one computes.
WITHOUT_DROPOUT = """\
import functools, model, train
train.Classifier = functools.partial(model.Classifier, dropout=0.0)
train.main()
"""
TRAIN = ("python", "train_exactly.py", "--epochs", "1", "--batch-size", "60", "--log-every", "1")
LAUNCH = "launch: {with: torchrun, per_server: 1}\n"


@pytest.fixture
def home(tmp_path: Path, base_image: str, server_image: str) -> LabDirectory:
    """The home of a user, who makes both labs there."""
    lab = make_lab(tmp_path, "work", base_image)
    (lab.root / "lab.yaml").unlink()
    lab.environ["LABCTL_WHEELHOUSE"] = os.environ.get("LABCTL_WHEELHOUSE", "")
    return lab


def train(home: LabDirectory, name: str, count: int) -> dict[str, tuple[float, ...]]:
    """Train a new sample project on so many servers; return its curves by tag."""
    home.labctl("init", name)
    lab = LabDirectory(home.root / name, name, home.environ)
    settings = lab.root / "lab.yaml"
    count_line = rf"\1gpu: auto\n\1count: {count}"
    text = re.sub(r"^( *)gpu: auto", count_line, settings.read_text(), flags=re.MULTILINE)
    settings.write_text(text + LAUNCH)
    (lab.root / "train_exactly.py").write_text(WITHOUT_DROPOUT)
    try:
        lab.labctl("up", "--yes")
        output = lab.labctl("run", "--yes", "--id", "whole", "--", *TRAIN).stdout
        assert (f", {count} processes" in output) == (count > 1), output
        lab.labctl("pull", "whole")
    finally:
        lab.labctl("down", "--yes", "--discard")
    curves = read_scalars(lab.root / "runs" / "whole" / "logs").series
    return {curve.tag: curve.values for curve in curves}


def test_two_servers_learn_what_one_learns(home: LabDirectory) -> None:
    alone, together = train(home, "one", 1), train(home, "pair", 2)
    for tag in ("train/loss", "train/gradient_norm", "val/loss", "val/accuracy"):
        assert len(alone[tag]) > 0, tag
        assert together[tag] == pytest.approx(alone[tag], rel=0.02, abs=0.01), tag
