"""Packages that a run installs itself are found in its log, with the time that they took."""

from __future__ import annotations

import pytest
from explain_cases import findings, material, run, samples

from labctl.insight.explain.installs import find_installs

PIP = (
    "start\n"
    "Looking in indexes: https://index.example/simple\n"
    "Collecting torch\n"
    "  Downloading torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl (887.9 MB)\n"
    "Installing collected packages: mpmath, torch\n"
    "Successfully installed mpmath-1.3.0 torch-2.8.0\n"
    "epoch 1\n"
)
UV = "Resolved 9 packages in 1.20s\nPrepared 9 packages in 8.55s\nInstalled 9 packages in 70ms\n"
CONDA = "Solving environment: done\nExecuting transaction: ...working... done\n"


@pytest.mark.parametrize(
    ("log", "packages", "line"),
    [
        (PIP, 2, "Successfully installed mpmath-1.3.0 torch-2.8.0"),
        (PIP.replace("\n", "\r\n"), 2, "Successfully installed mpmath-1.3.0 torch-2.8.0"),
        (UV, 9, "Installed 9 packages in 70ms"),
        (CONDA, 0, "Executing transaction: ...working... done"),
    ],
)
def test_an_installation_is_found(log: str, packages: int, line: str) -> None:
    (install,) = find_installs(log.encode())
    assert (install.packages, install.line) == (packages, line)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "Requirement already satisfied: torch in /opt/venv\nepoch 1\n",
        "Collecting torch\nERROR: No matching distribution found for torch\n",
        "epoch 1: Collecting data\nnow Successfully installed x\n",
    ],
)
def test_a_log_without_an_installation(log: str) -> None:
    assert find_installs(log.encode()) == ()


def test_the_time_is_that_in_which_the_log_grew() -> None:
    """The log begins, installs between 1030 and 1170 s, and goes on."""
    sizes = {2: 5, 16: len(PIP) - 20, 17: len(PIP), 29: len(PIP) + 900}

    def grow(number: int) -> dict[str, int]:
        return {"log_bytes": next(sizes[key] for key in sorted(sizes) if number <= key)}

    found = findings(
        material(installs=find_installs(PIP.encode()), samples=samples(change=grow), log=PIP)
    )
    finding = found["packages-installed"]
    assert finding.level == "advice"
    assert finding.what == "the run itself installed 2 packages, which took about 2 min"
    assert finding.evidence[0].text == "Successfully installed mpmath-1.3.0 torch-2.8.0"
    assert "requirements: requirements.txt" in finding.next


def test_an_installation_that_takes_no_time_is_not_worth_a_word() -> None:
    made = material(
        installs=find_installs(PIP.encode()),
        samples=samples(change=lambda number: {"log_bytes": len(PIP) * (1 + number)}),
        run=run(started_at=995.0),
    )
    assert "packages-installed" not in findings(made)


def test_without_telemetry_the_time_is_unknown() -> None:
    found = findings(material(installs=find_installs((PIP + UV).encode()), samples=()))
    assert found["packages-installed"].what == "the run itself installed 11 packages"
