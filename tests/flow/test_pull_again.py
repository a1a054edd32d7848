"""`labctl pull` that is cut: the next command pulls the same again."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from lab_world import Labctl, Machine, World

from labctl.errors import TransferError
from labctl.lifecycle import up
from labctl.transports import Result


class CutMachine(Machine):
    """Its transfers end too early."""

    def _answer(self, line: str, stdin: bytes) -> Result:
        if " tar -C " in line:
            raise TransferError("the transfer was cut short")
        return super()._answer(line, stdin)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (("pull",), "labctl pull late"),
        (("pull", "early"), "labctl pull early"),
        (("pull", "early", "--all"), "labctl pull --all early"),
        (("pull", "--runs"), "labctl pull --runs"),
        (("pull", "--all", "--runs"), "labctl pull --all --runs"),
        (("pull", "--follow", "early"), "labctl pull --follow early"),
    ],
)
def test_the_hint_names_what_was_pulled(
    lab: World, labctl: Labctl, words: tuple[str, ...], command: str
) -> None:
    made = replace(lab, machine=CutMachine(lab.machine.home))
    up.up(made.context())
    for number, name in enumerate(("early", "late")):
        directory = made.machine.run_with(name, **{"model.bin": "weights"})
        record = directory / ".labctl" / "record.json"
        record.write_text(re.sub(r"^{", f'{{"created_at": {number},', record.read_text()))
    labctl(made, "status", "--refresh")
    output = labctl(made, *words)
    assert output.code == 1
    assert f"next: {command}\n        (transferred data is kept and reused)\n" in output.err
