"""Datasets for the tests of the sample project."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import template_project  # noqa: F401  (makes the project's modules importable)

PER_CLASS = {"train": 16, "val": 4, "test": 4}  # images of each digit in the small dataset

if importlib.util.find_spec("torch") is None:
    # One file needs no PyTorch; a test in it is skipped and says why the others are missing.
    collect_ignore_glob = ["test_template_[!i]*.py"]


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 1797 digits."""
    import prepare_data

    out = tmp_path_factory.mktemp("all") / "digits"
    prepare_data.prepare(out)
    return out


@pytest.fixture(scope="session")
def small(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 digits to train on: an epoch takes a moment."""
    out = tmp_path_factory.mktemp("small") / "digits"
    for part, number in PER_CLASS.items():
        for label in sorted((digits / part).iterdir()):
            (out / part / label.name).mkdir(parents=True)
            for image in sorted(label.iterdir())[:number]:
                shutil.copy(image, out / part / label.name)
    return out
