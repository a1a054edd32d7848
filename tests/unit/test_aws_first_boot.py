"""What a machine is told at its first boot."""

from __future__ import annotations

import email
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from labctl.errors import UsageError
from labctl.model import Boot
from labctl.providers.aws import USER_DATA_BYTES
from labctl.providers.user_data import build_user_data

TEMPLATES = Path(__file__).parents[2] / "templates" / "cloud-init"
PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\nBBBB\n-----END OPENSSH PRIVATE KEY-----\n"
BOOT = Boot(
    lab="digits",
    public_key="ssh-ed25519 AAAAC3 labctl",
    host_key="ssh-ed25519 AAAAC3host",
    host_private_key=PRIVATE,
    ttl_s=3600,
)


def parts(text: str) -> dict[str, str]:
    message = email.message_from_string(text)
    assert message.is_multipart()
    assert not message.defects
    found = {}
    for part in message.walk():
        if not part.is_multipart():
            payload = part.get_payload(decode=True)
            assert isinstance(payload, bytes)
            found[part.get_content_type()] = payload.decode()
    return found


def build(boot: Boot) -> str:
    return build_user_data(TEMPLATES, boot, "ubuntu", "AWS", USER_DATA_BYTES)


def hook(ttl_s: int | None) -> str:
    text = build_user_data(
        TEMPLATES, Boot(**{**vars_of(BOOT), "ttl_s": ttl_s}), "ubuntu", "AWS", USER_DATA_BYTES
    )
    return parts(text)["text/cloud-boothook"]


def vars_of(boot: Boot) -> dict[str, object]:
    return {name: getattr(boot, name) for name in boot.__struct_fields__}


def test_it_is_a_message_of_a_hook_and_a_cloud_config() -> None:
    text = build(BOOT)
    assert len(text.encode()) <= USER_DATA_BYTES
    found = parts(text)
    assert set(found) == {"text/cloud-boothook", "text/cloud-config"}
    assert found["text/cloud-boothook"].startswith("#!/bin/sh\n")
    assert found["text/cloud-config"].startswith("#cloud-config\n")


def test_config_brings_keys_and_no_password() -> None:
    config = yaml.safe_load(parts(build(BOOT))["text/cloud-config"])
    assert config["ssh_keys"] == {
        "ed25519_private": PRIVATE,
        "ed25519_public": "ssh-ed25519 AAAAC3host",
    }
    assert config["ssh_deletekeys"] is True
    assert config["ssh_authorized_keys"] == ["ssh-ed25519 AAAAC3 labctl"]
    assert config["ssh_pwauth"] is False
    assert config["disable_root"] is True
    assert config["package_upgrade"] is False
    assert config["hostname"] == "labctl-digits"
    assert config["user"]["name"] == "ubuntu"


def test_same_boot_gives_the_same_text() -> None:
    assert build(BOOT) == build_user_data(TEMPLATES, BOOT, "ubuntu", "AWS", USER_DATA_BYTES)


def test_too_large_is_refused() -> None:
    large = Boot(**{**vars_of(BOOT), "public_key": "ssh-rsa " + "A" * USER_DATA_BYTES})
    with pytest.raises(UsageError) as raised:
        build(large)
    assert "16384" in raised.value.what


def test_without_a_ttl_nothing_is_armed() -> None:
    assert "shutdown" not in hook(None)


@pytest.mark.parametrize("ttl_s", [None, 3600])
def test_hook_is_a_script_that_a_plain_shell_takes(ttl_s: int | None) -> None:
    done = subprocess.run(["sh", "-n"], input=hook(ttl_s), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Timer:
    """The hook's timer, run here on files of its own, with a `shutdown` that tells instead."""

    def __init__(self, directory: Path, ttl_s: int) -> None:
        inner = hook(ttl_s).split("<<'END'\n")[1].split("\nEND\n")[0]
        assert "/var/lib/labctl" in inner
        self.file = directory / "ttl"
        self.told = directory / "told"
        script = directory / "ttl.sh"
        script.write_text(inner.replace("/var/lib/labctl", str(directory)))
        programs = directory / "bin"
        programs.mkdir()
        shutdown = programs / "shutdown"
        # It ends its caller, as a shutdown does.
        shutdown.write_text(f'#!/bin/sh\necho "$@" > {self.told}\nkill $PPID\n')
        shutdown.chmod(0o755)
        self._words = ["sh", str(script)]
        self._environ = {"PATH": f"{programs}:{os.environ['PATH']}"}

    def run(self, deadline_s: float = 120.0) -> float:
        """How long it took until the machine was told to power off."""
        began = time.monotonic()
        subprocess.run(self._words, env=self._environ, timeout=deadline_s)
        assert self.told.read_text().startswith("-P now")
        return time.monotonic() - began

    def put(self, boot: str, at: float, wall: float) -> None:
        self.file.write_text(f"{boot} {at:.0f} {wall:.0f}\n")


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def test_timer_ends_the_machine_at_its_ttl(tmp_path: Path) -> None:
    timer = Timer(tmp_path, 2)
    assert 1.0 < timer.run() < 8.0
    known, at, wall = timer.file.read_text().split()
    assert known == boot_id()
    assert int(at) <= uptime_s()
    assert int(wall) <= time.time() + 1


def test_timer_after_a_reboot_counts_the_time_away(tmp_path: Path) -> None:
    timer = Timer(tmp_path, 3600)
    timer.put("another-boot", 5, time.time() + 2)
    assert timer.run() < 8.0


def test_timer_spares_for_a_while_what_was_off_at_its_deadline(tmp_path: Path) -> None:
    """Whoever starts a stopped server again comes for what is on its disk."""
    timer = Timer(tmp_path, 3)
    timer.put("another-boot", 99_999_999, time.time() - 60)
    began = time.time()
    assert timer.run() > 1.0
    known, _, wall = timer.file.read_text().split()
    assert known == boot_id()
    assert int(wall) >= int(began) + 3


def test_timer_spares_it_for_an_hour_at_most(tmp_path: Path) -> None:
    assert "left=3600\n" in hook(12 * 3600)


@pytest.mark.parametrize("text", ["", "half", "a b c\n", "one two\n", "boot 12 \n"])
def test_timer_with_a_damaged_file_starts_over(tmp_path: Path, text: str) -> None:
    timer = Timer(tmp_path, 1)
    timer.file.write_text(text)
    assert timer.run() < 8.0


def test_timer_follows_a_deadline_that_was_moved(tmp_path: Path) -> None:
    timer = Timer(tmp_path, 1)
    timer.put(boot_id(), uptime_s() + 4, time.time() + 4)
    assert 2.0 < timer.run() < 10.0
