"""A bare machine becomes a lab server, through real Ansible over a real sshd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_container import CAROLS_PASSWORD, bare, build_image
from prepare_bench import PLAYBOOKS, Bench, bench, by_hand, inventory_of
from sshd_container import Sshd

from labctl.errors import PolicyError
from labctl.events import Note, Progress, Step
from labctl.model import ServerFacts
from labctl.servers.playbooks import LOG_NAME
from labctl.servers.prepare import playbook_hash, probe

pytestmark = [pytest.mark.engine, pytest.mark.long]
DAEMON_JSON = {
    "log-opts": {"max-size": "10m"},
    "registry-mirrors": ["https://mirror.lab.example"],
}


@pytest.fixture(scope="module")
def image() -> str:
    return build_image()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a space in it, as home directories on a Mac may have."""
    path = tmp_path_factory.mktemp("prepare") / "my labs"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def prepared(image: str, folder: Path) -> Iterator[tuple[Bench, ServerFacts, ServerFacts]]:
    """A machine that alice prepared, and its Facts before and after."""
    with bare(image, folder) as box:
        box.sh(f"mkdir /etc/docker && echo '{json.dumps(DAEMON_JSON)}' > /etc/docker/daemon.json")
        alice = bench(box, folder, "alice")
        before = probe(alice.transport)
        after = alice.prepare(before)
        yield alice, before, after
        alice.transport.close()


def test_bare_machine_is_seen_as_bare(prepared: tuple[Bench, ServerFacts, ServerFacts]) -> None:
    _, before, _ = prepared
    assert before.user == "alice"
    assert before.home == "/home/alice"
    assert before.os.startswith(("Debian", "Ubuntu"))
    assert before.sudo
    assert (before.python, before.tmux, before.docker) == ("", "", "")
    assert before.docker_error == "not installed"
    assert before.disk_free_bytes > 0
    assert before.memory_bytes > 0
    assert before.boot_id


def test_prepare_installs_what_labctl_needs(
    prepared: tuple[Bench, ServerFacts, ServerFacts],
) -> None:
    alice, _, after = prepared
    assert after.python
    assert after.tmux
    assert alice.transport.run("command -v rsync").code == 0, "for people"
    assert alice.transport.run("command -v curl").code == 0, "for data sets"
    assert alice.transport.run("python3 -c 'import psutil'").code == 0
    assert after.stamp == playbook_hash(PLAYBOOKS)
    # No init runs in a container, so nothing starts dockerd: told, and no error of the playbook.
    assert after.docker_error.startswith("the daemon does not answer")
    assert any("does not answer" in note.text for note in alice.reporter.of(Note))
    assert "docker" in alice.box.sh("id -nG alice").split()
    assert alice.box.sh("stat -c '%U %a' /home/alice/labctl").split() == ["alice", "700"]
    assert alice.box.sh("stat -c '%U %a' /var/tmp/labctl-leases").split() == ["root", "1777"]


def test_daemon_json_keeps_what_was_there(prepared: tuple[Bench, ServerFacts, ServerFacts]) -> None:
    alice, _, _ = prepared
    assert json.loads(alice.box.sh("cat /etc/docker/daemon.json")) == {
        "live-restore": True,
        "log-driver": "json-file",
        "log-opts": {"max-size": "10m", "max-file": "3"},
        "registry-mirrors": ["https://mirror.lab.example"],
    }


def test_tasks_are_told_as_they_go(prepared: tuple[Bench, ServerFacts, ServerFacts]) -> None:
    alice, _, _ = prepared
    steps = alice.reporter.of(Step)
    assert Step(name="prepare", detail="alices-lab") == steps[0]
    assert Step(name="prepare", done=True, detail="alices-lab") == steps[-1]
    told = [step.name for step in steps if step.done and step.detail == "changed"]
    assert "Install Python on a Debian or Ubuntu machine" in told
    assert "lab_server : Install the distribution's Docker Engine" in told
    last = alice.reporter.of(Progress)[-1]
    assert last.done == last.total > 15
    log = alice.ssh_config.parent / LOG_NAME
    assert log.stat().st_mode & 0o777 == 0o600


def test_prepared_server_costs_one_round_trip(
    prepared: tuple[Bench, ServerFacts, ServerFacts],
) -> None:
    alice, _, after = prepared
    steps = len(alice.reporter.of(Step))
    alice.transport.round_trips = 0
    again = alice.prepare()
    assert alice.transport.round_trips == 1
    assert len(alice.reporter.of(Step)) == steps
    assert again.stamp == after.stamp


@pytest.mark.long
def test_by_hand_on_the_printed_inventory_changes_nothing(
    prepared: tuple[Bench, ServerFacts, ServerFacts], tmp_path: Path
) -> None:
    alice, _, _ = prepared
    output, changed = by_hand(inventory_of(alice, folder=tmp_path))
    assert changed == 0, output


@pytest.mark.long
def test_by_hand_with_a_sudo_password(
    prepared: tuple[Bench, ServerFacts, ServerFacts], folder: Path, tmp_path: Path
) -> None:
    alice, _, _ = prepared
    carol = bench(alice.box, folder, "carol")
    carol.connections.open(carol.server)
    password = tmp_path / "password"
    password.write_text(CAROLS_PASSWORD)
    words = (f"--become-password-file={password}",)
    output, changed = by_hand(inventory_of(carol, folder=tmp_path), *words)
    assert changed == 2, output  # carol's own: the group docker, ~/labctl
    assert "docker" in alice.box.sh("id -nG carol").split()
    output, changed = by_hand(inventory_of(carol, folder=tmp_path), *words)
    assert changed == 0, output


def test_second_account_of_a_stamped_server_gets_its_rights(
    prepared: tuple[Bench, ServerFacts, ServerFacts], folder: Path
) -> None:
    """The stamp is the machine's: who lacks sudo is told about rights, not about packages."""
    alice, _, _ = prepared
    # An engine that refuses bob, in words of Docker's own.
    alice.box.sh("mv /usr/bin/docker /usr/bin/docker.real")
    try:
        alice.box.sh(
            "printf '#!/bin/sh\\necho \"permission denied while trying to connect to the Docker "
            "daemon socket\" >&2\\nexit 1\\n' > /usr/bin/docker && chmod 755 /usr/bin/docker"
        )
        bob = bench(alice.box, folder, "bob")
        with pytest.raises(PolicyError) as caught:
            bob.prepare()
    finally:
        alice.box.sh("mv -f /usr/bin/docker.real /usr/bin/docker")
    assert "sudo usermod --append --groups docker bob" in caught.value.why
    assert "apt-get" not in caught.value.why
    bob.transport.close()


@pytest.mark.long
def test_nvidia_toolkit_from_a_stand_in_repository(
    prepared: tuple[Bench, ServerFacts, ServerFacts], tmp_path: Path
) -> None:
    alice, _, _ = prepared
    inventory = inventory_of(alice, folder=tmp_path)
    words = (
        *("-e", "lab_server_nvidia=true"),
        *("-e", "lab_server_nvidia_repository=file:/srv/nvidia"),
        *("-e", "lab_server_nvidia_key=file:///srv/nvidia/key.asc"),
    )
    offer_toolkit(alice.box, "1.17.7-1")
    output, changed = by_hand(inventory, *words)
    assert changed == -1
    assert "nvidia-container-toolkit 1.17.7-1 lets" in " ".join(output.split())
    offer_toolkit(alice.box, "1.17.8-1")
    alice.box.sh("apt-get update")
    output, changed = by_hand(inventory, *words)
    assert changed > 0, output
    daemon = json.loads(alice.box.sh("cat /etc/docker/daemon.json"))
    assert daemon["runtimes"]["nvidia"]["path"] == "nvidia-container-runtime"
    assert daemon["registry-mirrors"] == DAEMON_JSON["registry-mirrors"]
    assert probe(alice.transport).nvidia_runtime
    links = "system create-dev-char-symlinks --create-all"
    assert alice.box.sh("cat /root/nvidia-ctk").splitlines()[-1] == links
    assert links in alice.box.sh("cat /etc/udev/rules.d/71-nvidia-dev-char.rules")
    output, changed = by_hand(inventory, *words)
    assert changed == 0, output


def offer_toolkit(box: Sshd, version: str) -> None:
    """Put a signed repository with an empty toolkit of that version at /srv/nvidia."""
    box.sh(
        f"""set -e
        command -v gpg >/dev/null || {{ apt-get update && apt-get install -y gpg gpg-agent; }}
        rm -rf /srv/nvidia && mkdir -p /srv/nvidia /tmp/pkg/DEBIAN /tmp/pkg/usr/bin
        cd /srv/nvidia
        printf '#!/bin/sh\\n' > /tmp/pkg/usr/bin/nvidia-container-runtime-hook
        printf '#!/bin/sh\\necho "$*" >> /root/nvidia-ctk\\nln -sf ../full /dev/char/195:255\\n' \\
            > /tmp/pkg/usr/bin/nvidia-ctk
        chmod 755 /tmp/pkg/usr/bin/*
        printf '%s\\n' 'Package: nvidia-container-toolkit' 'Version: {version}' \\
            'Architecture: all' 'Maintainer: Lab <lab@lab.example>' \\
            'Description: stand-in' > /tmp/pkg/DEBIAN/control
        dpkg-deb --build /tmp/pkg toolkit.deb
        {{ cat /tmp/pkg/DEBIAN/control; echo 'Filename: ./toolkit.deb'
          echo "Size: $(stat -c %s toolkit.deb)"
          echo "SHA256: $(sha256sum toolkit.deb | cut -d ' ' -f 1)"; echo; }} > Packages
        {{ echo "Date: $(LC_ALL=C date -u '+%a, %d %b %Y %H:%M:%S UTC')"; echo 'SHA256:'
          echo " $(sha256sum Packages | cut -d ' ' -f 1) $(stat -c %s Packages) Packages"
        }} > Release
        export GNUPGHOME=/root/gpg; mkdir -p -m 700 $GNUPGHOME
        gpg --list-keys lab@lab.example || gpg --batch --passphrase '' \\
            --quick-generate-key lab@lab.example rsa3072 sign never
        gpg --batch --yes --clearsign -o InRelease Release
        gpg --armor --export lab@lab.example > key.asc
        chmod -R a+rX /srv/nvidia"""
    )
