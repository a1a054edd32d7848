"""What the keeper's parts say to each other and to systemd."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from labctl.commands.systemd import keep_unit
from labctl.config import find_paths, load_lab
from labctl.errors import UsageError
from labctl.events import SilentReporter
from labctl.lifecycle import kept_labs
from labctl.lifecycle.keeper_host import _format_ssh_destination, _parse_host
from labctl.model import NAME_PATTERN
from labctl.state import State

WORDS = ("/opt/my python/bin/python", "-m", "labctl", "keep")


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    text = keep_unit(WORDS, path="/usr/bin:/a%b")
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read_string(text)
    service = parser["Service"]
    assert service["ExecStart"] == '"/opt/my python/bin/python" "-m" "labctl" "keep"'
    assert service["Environment"] == '"PATH=/usr/bin:/a%%b"'
    assert service["Restart"] == "always"
    assert service["NoNewPrivileges"] == "yes"
    assert parser["Install"]["WantedBy"] == "default.target"
    if shutil.which("systemd-analyze"):
        unit = tmp_path / "labctl-keep.service"
        unit.write_text(keep_unit(("/bin/true",), path="/usr/bin"))
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(unit)], capture_output=True, text=True
        )
        assert "labctl-keep.service:" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("host", "parts"),
    [
        ("gpu-box", ("", "gpu-box", 0)),
        ("alice@gpu-box", ("alice", "gpu-box", 0)),
        ("alice@gpu-box:2222", ("alice", "gpu-box", 2222)),
        ("gpu-box:22", ("", "gpu-box", 22)),
        ("alice@[2001:db8::1]", ("alice", "2001:db8::1", 0)),
    ],
)
def test_hosts_are_read_as_ssh_reads_them(host: str, parts: tuple[str, str, int]) -> None:
    assert _parse_host(host) == parts


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "alice@-x", "x:99999", "", "a@b@-c"])
def test_hosts_that_could_be_options_are_refused(host: str) -> None:
    with pytest.raises(UsageError):
        _parse_host(host)


def test_a_host_is_shown_as_ssh_takes_it() -> None:
    assert _format_ssh_destination("alice@gpu-box:2222") == "-p 2222 alice@gpu-box"
    assert _format_ssh_destination("gpu-box") == "gpu-box"


def test_a_ward_is_named_by_lab_and_id_and_by_nothing_else() -> None:
    assert kept_labs.kept_lab_name("digits", "0f1e2d3c4b5a") == "digits-0f1e2d3c4b5a"
    for lab, lab_id in (("../x", "0f1e2d3c4b5a"), ("digits", "../../x"), ("", "x"), ("A", "b")):
        with pytest.raises(ValueError, match="invalid lab name"):
            kept_labs.kept_lab_name(lab, lab_id)
    assert NAME_PATTERN.fullmatch("keep")


def test_what_the_laptop_has_set_counts_but_for_what_the_keepers_machine_has(
    tmp_path: Path,
) -> None:
    root = tmp_path / "digits"
    root.mkdir()
    (root / "lab.yaml").write_text("run: [x]\nserver: {provider: aws}\n")
    laptop = {
        "HOME": str(tmp_path),
        "LABCTL_SERVER_AWS_SETTLE": "7s",
        "LABCTL_SERVER_AWS_PROFILE": "work",
        "LABCTL_BUDGET": "4.5",
        "LABCTL_TTL": "90m",
    }
    config = load_lab(root, environ=laptop)
    assert config.beside == {
        "server.aws.settle": "7s",
        "server.aws.profile": "work",
        "server.budget": "4.5",
        "server.ttl": "90m",
    }
    one = kept_labs.KeptLab(
        lab="digits",
        lab_id="0f1e2d3c4b5a",
        by="alice@laptop",
        at=0.0,
        runs=(),
        settings=config.beside,
        ceiling_usd_per_hour=0.7,
    )
    environ = {"HOME": str(tmp_path), "LABCTL_SERVER_AWS_PROFILE": "keeper"}
    places = find_paths(environ)
    with State(places.database) as state:
        context = kept_labs.make_context(one, places, state, SilentReporter(), environ, root=root)
    settings = context.config.server.provider_settings["aws"]
    assert (settings.profile, settings.settle_s) == ("keeper", 7)
    need = context.config.server.need
    assert (need.budget_usd, need.ttl_s, need.max_price_usd_per_hour) == (4.5, 5400, 0.7)
    assert context.owner == "alice"
    assert context.place
    assert context.config.name == "digits"
    assert msgspec.json.decode(msgspec.json.encode(one), type=kept_labs.KeptLab) == one
