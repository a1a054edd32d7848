"""A variable that no shell replaces in a run's command is noticed, with a command that works."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from labctl.runs.shell_variables import describe_literal_variable


@pytest.mark.parametrize("variable", ["$LABCTL_DATA_DIR", "${LABCTL_DATA_DIR}"])
def test_the_suggested_command_replaces_the_variable(variable: str) -> None:
    words = ["printf", "%s|", "two words", f"{variable}/y", f'--q="{variable}"', "$HOME"]
    text = describe_literal_variable(words)
    assert f"so {variable} stays as it is" in text
    shell = shlex.split(text.partition("labctl run -- ")[2])
    done = subprocess.run(
        shell, env={"LABCTL_DATA_DIR": "/lab/data"}, check=True, capture_output=True, text=True
    )
    assert done.stdout == 'two words|/lab/data/y|--q="/lab/data"|$HOME|'


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "--data", "/lab/data/y"],
        ["python", "train.py", "--home", "$HOME"],
        ["sh", "-c", "python train.py --data $LABCTL_DATA_DIR/y"],
        ["timeout", "60", "bash", "-lc", "python train.py --data $LABCTL_DATA_DIR/y"],
        ["python", "-c", "import os; print(os.path.expandvars('$LABCTL_DATA_DIR'))"],
        [],
    ],
)
def test_other_commands_get_no_warning(command: list[str]) -> None:
    assert describe_literal_variable(command) == ""
