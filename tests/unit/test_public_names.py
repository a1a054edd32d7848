"""What `labctl` offers to a Python user: these names, and no others by accident."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import labctl
from labctl import errors

ERRORS = {
    name
    for name, found in vars(errors).items()
    if inspect.isclass(found) and issubclass(found, Exception)
}
INTENDED = {"Course", "Lab", "Need", "GpuNeed", "Problem", "__version__"} | ERRORS


def test_the_public_names_are_the_intended_ones() -> None:
    assert set(labctl.__all__) == INTENDED
    assert labctl.__all__ == sorted(labctl.__all__)


@pytest.mark.parametrize("name", sorted(INTENDED))
def test_each_name_is_there_and_is_the_one_that_labctl_itself_uses(name: str) -> None:
    from labctl import course, lab, model

    found = getattr(labctl, name)
    homes = [module for module in (errors, course, lab, model) if hasattr(module, name)]
    assert all(getattr(home, name) is found for home in homes)
    assert homes or name == "__version__"


def test_names_that_only_tests_or_the_command_line_need_are_not_offered() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Ground'"):
        _ = labctl.Ground


def test_completion_at_a_prompt_shows_every_name_before_it_was_used() -> None:
    assert set(labctl.__all__) <= set(dir(labctl))


def test_a_star_import_gives_them_all() -> None:
    script = "from labctl import *; Lab; Need; LabError; print(__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, labctl.__version__)


def test_every_error_says_its_exit_code_and_is_a_lab_error() -> None:
    codes = {name: getattr(labctl, name).exit_code for name in ERRORS}
    assert set(codes.values()) <= {1, 2, 3, 4, 75, 130}
    assert all(issubclass(getattr(labctl, name), labctl.LabError) for name in ERRORS)
