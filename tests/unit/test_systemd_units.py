"""Every systemd unit that labctl writes is started again, however often it has crashed."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from labctl.agent.watchdog.systemd_unit import build_unit_text
from labctl.commands.systemd import course_unit, keep_unit

ROOT = Path(__file__).parents[2]
WORDS = ("/bin/true",)
WRITERS = {"labctl/commands/systemd.py", "labctl/agent/watchdog/systemd_unit.py"}


def service_files(folder: str) -> dict[str, str]:
    """Path -> text of the files below `folder` that hold a service."""
    texts = {}
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8", errors="replace")
            if "\n[Service]\n" in text:
                texts[str(path.relative_to(ROOT))] = text
    return texts


UNITS = {
    "watchdog": build_unit_text(Path("/var/lib/labctl/watchdog")),
    "watchdog at a cloud that shuts down": build_unit_text(Path("/var/lib/labctl/watchdog"), 25.0),
    "keep": keep_unit(WORDS, path="/usr/bin"),
    "course": course_unit(WORDS, "ml", path="/usr/bin"),
    **service_files("playbooks"),
}


def test_no_unit_is_written_that_is_not_checked_here() -> None:
    assert set(service_files("labctl")) == WRITERS
    assert "playbooks/roles/shared_server/files/labctl-broker.service" in UNITS


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_started_again_without_end(name: str) -> None:
    """By default, systemd gives up after five crashes within ten seconds."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.read_string(UNITS[name])
    assert unit["Service"]["Restart"] == "always"
    assert unit["Unit"].get("StartLimitIntervalSec") == "0"
    for section in set(unit.sections()) - {"Unit"}:
        assert not any(key.startswith("startlimit") for key in unit[section])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_a_unit_without_complaint(name: str, tmp_path: Path) -> None:
    path = tmp_path / "labctl-test.service"
    path.write_text(UNITS[name])
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(path)], capture_output=True, text=True
    )
    assert "labctl-test.service" not in done.stderr, done.stderr
