"""What commands report with --json: every key that was there is there, with the value it had."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from frozen import FIRST, Frozen, Student

from labctl.cli.groups import cli

COMMANDS: dict[str, list[str]] = json.loads((FIRST / "json" / "commands.json").read_text())


@pytest.fixture
def homes(student: Student, frozen: Frozen) -> Frozen:
    """All homes that commands were asked in."""
    keeper = frozen.unpack("keeper")
    frozen.restore_database("keeper.state.sql", keeper / ".local/state/labctl/labctl.db")
    frozen.unpack("course")
    teacher = frozen.root / "teacher"
    teacher.mkdir()
    (frozen.root / "course").rename(teacher / "ml")
    database = teacher / "home" / ".local/state/labctl/labctl.db"
    frozen.restore_database("course.state.sql", database)
    return frozen


def report(homes: Frozen, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    home, *words = COMMANDS[name]
    folders = {who: str(homes.root / who) for who in ("student", "teacher")}
    monkeypatch.setenv("HOME", str(homes.root / home))
    done = CliRunner().invoke(cli, [word.format(**folders) for word in words])
    assert done.exit_code == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def find_changes(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """What of `before` is not in `now`; keys may have been added."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key, value in before.items():
            if key in now:
                yield from find_changes(value, now[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is gone"
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from find_changes(one, other, f"{where}[{number}]")
    elif isinstance(before, float) and isinstance(now, int | float):
        # What is a time has grown by the seconds that the test takes, and so have the dollars.
        is_time = where.endswith(("_s", "_at", "now"))
        if now != pytest.approx(before, rel=1e-3, abs=120 if is_time else 0.01):
            yield f"{where} was {before}, is {now}"
    elif before != now:
        yield f"{where} was {before!r}, is {now!r}"


@pytest.mark.parametrize("name", [one for one in COMMANDS if one != "config"])
def test_every_key_is_there_with_its_value(
    homes: Frozen, then: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = homes.value(f"json/{name}.json")
    assert list(find_changes(before, report(homes, name, monkeypatch))) == []


def test_every_setting_has_the_value_that_it_had(
    homes: Frozen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be more of them."""
    before, now = (
        {one["key"]: one for one in said["settings"]}
        for said in (homes.value("json/config.json"), report(homes, "config", monkeypatch))
    )
    assert list(find_changes(before, now)) == []


def test_a_cancelled_run_is_called_so(
    homes: Frozen, then: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = report(homes, "status", monkeypatch)
    states = {one["id"]: one["state"] for one in said["runs"]}
    assert states == {
        "first": "exited", "failed": "exited", "stopped": "cancelled", "night": "running",
    }  # fmt: skip


def test_a_difference_is_seen() -> None:
    before = {"a": [{"usd": 1.0, "up_s": 1.0}], "state": "cancelled", "gone": None}
    now = {"a": [{"usd": 1.1, "up_s": 9.0}], "state": "canceled", "new": 1}
    assert list(find_changes(before, now)) == [
        ".a[0].usd was 1.0, is 1.1",
        ".state was 'cancelled', is 'canceled'",
        ".gone is gone",
    ]
