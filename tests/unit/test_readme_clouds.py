"""The README's table of clouds says what their providers implement."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl import providers
from labctl.cli.rehearse import rehearse_command

ROOT = Path(__file__).parents[2]
# The members of the protocols that a row stands for: any of them is enough.
MEMBERS = {
    "a timer at the cloud ends the server": ("set_deadline", "fixed_timer"),
    "`labctl stop` and `start`": ("stop",),
    "the disk can outlive the server": ("keep_disk",),
    "only your address may use ssh": ("admit",),
    "prices without an account": ("list_catalog_offers",),
    "quotas before money is spent": ("compute_room",),
}


def read_table() -> dict[str, dict[str, str]]:
    """Return the cells of each row by the cloud's name."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| | aws |"))
    _, *clouds = split_row(lines[start])
    table: dict[str, dict[str, str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row, *cells = split_row(line)
        table[row] = dict(zip(clouds, cells, strict=True))
    return table


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("row", MEMBERS)
def test_a_cell_says_whether_the_provider_can_do_it(row: str) -> None:
    for cloud, cell in read_table()[row].items():
        kind = providers.get_provider_class(cloud)
        can = any(hasattr(kind, member) for member in MEMBERS[row])
        assert (cell != "-") == can, (row, cloud)


def test_a_power_off_that_ends_the_costs_is_declared() -> None:
    for cloud, cell in read_table()["a server that turns itself off costs nothing"].items():
        kind = providers.get_provider_class(cloud)
        assert (cell != "-") == ("shutdown" in getattr(kind, "ends_billing", ())), cloud


def test_every_cloud_of_the_table_can_be_rehearsed() -> None:
    assert set(read_table()["simulated: `labctl rehearse`"]) <= set(rehearse_command.commands)
