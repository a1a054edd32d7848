"""Tests that need a real NVIDIA GPU: python -m pytest tests/gpu

They need Python, PyTorch and labctl, and neither Docker nor root. Run them while nothing else uses
the GPU. The figures that they measure are printed at the end; docs/gpu.md has some.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
# The helpers of other tests that run the sample project and build models.
sys.path += [str(HERE), *(str(HERE.parent / name) for name in ("template", "e2e"))]

import gpu_card  # noqa: E402
import template_project  # noqa: E402, F401  (makes the project's modules importable)

FIGURES = pytest.StashKey[list[tuple[str, str]]]()

if gpu_card.find_obstacle():
    # A test in one file is skipped and says why the others are missing.
    collect_ignore_glob = ["test_card_*.py"]


@pytest.fixture(scope="session")
def card() -> str:
    """The name of the first GPU."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this PyTorch cannot use the GPU")
    return str(torch.cuda.get_device_name(0))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> gpu_card.NoteFigure:
    """A function that notes a measured figure for the summary."""

    def note(name: str, value: object) -> None:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        request.config.stash.setdefault(FIGURES, []).append((name, text))

    return note


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        for name, text in figures:
            terminalreporter.write_line(f"{name}: {text}")


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 1797 digits of the sample project."""
    import prepare_data

    out = tmp_path_factory.mktemp("all") / "digits"
    prepare_data.prepare(out)
    return out
