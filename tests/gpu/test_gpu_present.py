"""Whether the GPU can be tested here."""

from __future__ import annotations

import platform
import subprocess

import gpu_card
import pytest

pytestmark = pytest.mark.gpu


def test_a_gpu_is_here(request: pytest.FixtureRequest) -> None:
    if obstacle := gpu_card.find_obstacle():
        pytest.skip(f"{obstacle}: python -m pytest tests/gpu checks one")
    import torch

    name, figure = request.getfixturevalue("card"), request.getfixturevalue("figure")
    words = ["nvidia-smi", "--query-gpu=driver_version,mig.mode.current,count", "--format=csv"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    figure("card", f"{name}, PyTorch {torch.__version__}, Python {platform.python_version()}")
    figure("driver, MIG, cards", said.splitlines()[1])
