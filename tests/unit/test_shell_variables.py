"""A variable that no shell replaces in a run's command is noticed, with a command that works."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from labctl.runs.shell_variables import describe_literal_variable, describe_replaced_variable


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


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--data", "/birds/x y.csv"], "--data '/lab/data/birds/x y.csv'"),
        (["--data=/birds"], "--data=/lab/data/birds"),
    ],
)
def test_a_path_from_which_the_shell_of_this_machine_removed_the_variable(
    words: list[str], command: str
) -> None:
    text = describe_replaced_variable(["python", "train.py", *words], {"birds"})
    assert text.startswith("runs have their data at /lab/data, and the command reads /birds")
    assert text.endswith(f"labctl run -- python train.py {command}")


@pytest.mark.parametrize("word", ["/lab/data/birds", "/birdsong", "birds/x", "/other/birds", "/"])
def test_other_paths_get_no_warning(word: str) -> None:
    assert describe_replaced_variable(["python", word], {"birds"}) == ""
