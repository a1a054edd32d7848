"""A bare machine becomes a lab server, through real Ansible over a real sshd."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from bare_container import CAROLS_PASSWORD, bare, build_image
from sshd_container import Sshd

from labctl.actions import Decision, Event, Note, Progress, Step
from labctl.actions.connections import Connections
from labctl.actions.prepare import LOG_NAME, playbook_hash, prepare, probe
from labctl.commands import ansible
from labctl.errors import LabError, PolicyError
from labctl.model import Endpoint, Facts, Server
from labctl.shell import Command
from labctl.transports import Result, Transport

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = ROOT / "playbooks"
DAEMON_JSON = {
    "log-opts": {"max-size": "10m"},
    "registry-mirrors": ["https://mirror.lab.example"],
}


T = TypeVar("T", bound=Event)


@dataclass
class Recorded:
    """A Reporter that keeps what it is told."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def ask(self, decision: Decision) -> bool:
        return decision.default

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]


class Counted:
    """A transport that counts round trips."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.endpoint: Endpoint = inner.endpoint
        self.round_trips = 0

    def run(
        self,
        line: Command | str,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = 60.0,
        check: bool = True,
    ) -> Result:
        self.round_trips += 1
        return self.inner.run(line, stdin=stdin, timeout_s=timeout_s, check=check)

    def stream(
        self,
        line: Command | str,
        *,
        stdin: bytes = b"",
        on_stdout: Callable[[bytes], None],
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> int:
        self.round_trips += 1
        return self.inner.stream(line, stdin=stdin, on_stdout=on_stdout, on_stderr=on_stderr)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Bench:
    """One bare machine as one account reaches it."""

    box: Sshd
    connections: Connections
    server: Server
    transport: Counted
    reporter: Recorded

    @property
    def ssh_config(self) -> Path:
        return self.connections.config_path(self.server.id)

    def prepare(self, facts: Facts | None = None, *, boto3: bool = False) -> Facts:
        return prepare(
            self.transport,
            self.server,
            facts,
            playbooks_dir=PLAYBOOKS,
            ssh_config=self.ssh_config,
            reporter=self.reporter,
            boto3=boto3,
        )


def bench(box: Sshd, folder: Path, user: str) -> Bench:
    connections = Connections(folder / user, None)
    server = box.server(f"{user}-1", f"{user}s-lab", user=user)
    transport = Counted(connections.open(server))
    return Bench(box, connections, server, transport, Recorded())


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
def prepared(image: str, folder: Path) -> Iterator[tuple[Bench, Facts, Facts]]:
    """A machine that alice prepared, and its Facts before and after."""
    with bare(image, folder) as box:
        box.sh(f"mkdir /etc/docker && echo '{json.dumps(DAEMON_JSON)}' > /etc/docker/daemon.json")
        alice = bench(box, folder, "alice")
        before = probe(alice.transport)
        after = alice.prepare(before)
        yield alice, before, after
        alice.transport.close()


@pytest.fixture
def untouched(image: str, tmp_path: Path) -> Iterator[Sshd]:
    with bare(image, tmp_path) as box:
        yield box


def by_hand(inventory: Path, *words: str) -> tuple[str, int]:
    """What a person types. Its output, and how many tasks changed something."""
    playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    done = subprocess.run(
        ["env", "LC_ALL=C.UTF-8", playbook, "-i", str(inventory), "playbooks/server.yml", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    changed = re.search(r"changed=(\d+)", done.stdout)
    assert changed, done.stdout + done.stderr
    return done.stdout + done.stderr, int(changed.group(1)) if done.returncode == 0 else -1


def inventory_of(*benches: Bench, folder: Path) -> Path:
    hosts = [
        ansible.Host(
            alias=one.server.alias,
            ssh_config=one.ssh_config,
            user=one.server.endpoint.user,
            stamp=playbook_hash(PLAYBOOKS),
        )
        for one in benches
    ]
    path = folder / "hosts"
    path.write_text(ansible.inventory(hosts))
    return path


def test_bare_machine_is_seen_as_bare(prepared: tuple[Bench, Facts, Facts]) -> None:
    _, before, _ = prepared
    assert before.user == "alice"
    assert before.home == "/home/alice"
    assert before.os.startswith(("Debian", "Ubuntu"))
    assert before.sudo
    assert (before.python, before.tmux, before.rsync, before.docker) == ("", "", "", "")
    assert before.docker_error == "not installed"
    assert before.disk_free_bytes > 0
    assert before.memory_bytes > 0
    assert before.boot_id
    assert not before.noisy_shell


def test_prepare_installs_what_labctl_needs(prepared: tuple[Bench, Facts, Facts]) -> None:
    alice, _, after = prepared
    assert after.python
    assert after.tmux
    assert after.rsync
    assert after.stamp == playbook_hash(PLAYBOOKS)
    # No init runs in a container, so nothing starts dockerd: told, and no error of the playbook.
    assert after.docker_error.startswith("the daemon does not answer")
    assert any("does not answer" in note.text for note in alice.reporter.of(Note))
    assert "docker" in alice.box.sh("id -nG alice").split()
    assert alice.box.sh("stat -c '%U %a' /home/alice/labctl").split() == ["alice", "700"]
    assert alice.box.sh("stat -c '%U %a' /var/tmp/labctl-leases").split() == ["root", "1777"]


def test_daemon_json_keeps_what_was_there(prepared: tuple[Bench, Facts, Facts]) -> None:
    alice, _, _ = prepared
    assert json.loads(alice.box.sh("cat /etc/docker/daemon.json")) == {
        "live-restore": True,
        "log-driver": "json-file",
        "log-opts": {"max-size": "10m", "max-file": "3"},
        "registry-mirrors": ["https://mirror.lab.example"],
    }


def test_tasks_are_told_as_they_go(prepared: tuple[Bench, Facts, Facts]) -> None:
    alice, _, _ = prepared
    steps = alice.reporter.of(Step)
    assert Step(name="prepare", detail="alices-lab") == steps[0]
    assert Step(name="prepare", done=True, detail="alices-lab") == steps[-1]
    told = [step.name for step in steps if step.done and step.detail == "changed"]
    assert "Have Python on a Debian or Ubuntu machine" in told
    assert "lab_server : Install Docker Engine of the distribution" in told
    last = alice.reporter.of(Progress)[-1]
    assert last.done == last.total > 15
    log = alice.ssh_config.parent / LOG_NAME
    assert log.stat().st_mode & 0o777 == 0o600


def test_prepared_server_costs_one_round_trip(prepared: tuple[Bench, Facts, Facts]) -> None:
    alice, _, after = prepared
    steps = len(alice.reporter.of(Step))
    alice.transport.round_trips = 0
    again = alice.prepare()
    assert alice.transport.round_trips == 1
    assert len(alice.reporter.of(Step)) == steps
    assert again.stamp == after.stamp


def test_a_server_that_saves_results_by_itself_gets_boto3_once(image: str, tmp_path: Path) -> None:
    with bare(image, tmp_path) as box:
        alice = bench(box, tmp_path, "alice")
        assert not probe(alice.transport).boto3
        assert alice.prepare(boto3=True).boto3
        assert "boto3" in box.sh("python3 -c 'import boto3; print(boto3.__name__)'")
        steps = len(alice.reporter.of(Step))
        alice.prepare(boto3=True)
        assert len(alice.reporter.of(Step)) == steps
        # Elsewhere nobody asks for it, and its absence is no lack.
        box.sh("apt-get purge --yes python3-boto3 python3-botocore")
        alice.prepare()
        assert len(alice.reporter.of(Step)) == steps
        alice.transport.close()


def test_without_boto3_to_be_had_it_is_a_lab_server_all_the_same(
    image: str, tmp_path: Path
) -> None:
    with bare(image, tmp_path) as box:
        box.sh(
            "printf 'Package: python3-boto3\nPin: version *\nPin-Priority: -1\n'"
            " > /etc/apt/preferences.d/none"
        )
        # Neither an older one of the distribution's, nor pip's, which reaches nothing.
        box.sh("printf '[global]\nno-index = true\n' > /etc/pip.conf")
        alice = bench(box, tmp_path, "alice")
        after = alice.prepare(boto3=True)
        assert after.rsync
        assert not after.boto3
        said = [note.text for note in alice.reporter.of(Note) if "boto3" in note.text]
        assert len(said) == 1
        assert "cannot save results by itself" in said[0]
        alice.transport.close()


def test_by_hand_on_the_printed_inventory_changes_nothing(
    prepared: tuple[Bench, Facts, Facts], tmp_path: Path
) -> None:
    alice, _, _ = prepared
    output, changed = by_hand(inventory_of(alice, folder=tmp_path))
    assert changed == 0, output


def test_by_hand_with_a_sudo_password(
    prepared: tuple[Bench, Facts, Facts], folder: Path, tmp_path: Path
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
    prepared: tuple[Bench, Facts, Facts], folder: Path
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


def test_nvidia_toolkit_from_a_stand_in_repository(
    prepared: tuple[Bench, Facts, Facts], tmp_path: Path
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
        chmod 755 /tmp/pkg/usr/bin/nvidia-container-runtime-hook
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


def test_account_without_sudo_gets_the_exact_words(untouched: Sshd, tmp_path: Path) -> None:
    bob = bench(untouched, tmp_path, "bob")
    with pytest.raises(PolicyError) as caught:
        bob.prepare()
    assert bob.transport.round_trips == 1
    assert caught.value.what == "bobs-lab is not ready for labctl, and bob may not change it"
    lines = caught.value.why.splitlines()
    assert "- Docker Engine is not installed" in lines
    assert "    sudo apt-get install --yes docker.io tmux rsync python3" in lines
    assert "    sudo usermod --append --groups docker bob" in lines
    assert "labctl inventory" in caught.value.hint
    bob.transport.close()


def test_what_the_administrator_is_told_to_type_is_enough(untouched: Sshd, tmp_path: Path) -> None:
    """The lines are typed literally, by root; afterwards only the daemon is not running."""
    bob = bench(untouched, tmp_path, "bob")
    with pytest.raises(PolicyError) as caught:
        bob.prepare()
    untouched.sh("apt-get update")
    for line in caught.value.why.splitlines():
        if line.startswith("    sudo "):
            untouched.sh("DEBIAN_FRONTEND=noninteractive " + line.strip().removeprefix("sudo "))
    bob.transport.close()
    found = probe(bob.transport)
    assert found.tmux
    assert found.rsync
    assert found.python
    assert found.docker_error.startswith("the daemon does not answer")
    assert "docker" in untouched.sh("id -nG bob").split()
    bob.transport.close()


def test_failing_task_is_named_with_its_message_and_the_log(
    untouched: Sshd, tmp_path: Path
) -> None:
    untouched.sh("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*")
    alice = bench(untouched, tmp_path, "alice")
    with pytest.raises(LabError) as caught:
        alice.prepare()
    assert caught.value.what == (
        "preparing alices-lab failed at: Have Python on a Debian or Ubuntu machine"
    )
    assert "python3" in caught.value.why
    log = alice.ssh_config.parent / LOG_NAME
    assert caught.value.hint == f"less {log}"
    assert "failed" in log.read_text()
    assert "stamp" not in untouched.sh("ls /var/lib/labctl 2>/dev/null || true")
    alice.transport.close()


def test_root_without_a_sudo_program(untouched: Sshd, tmp_path: Path) -> None:
    """What many clouds hand out: nothing is asked of a sudo that is not there."""
    untouched.sh("rm /usr/bin/sudo && cp -r /home/alice/.ssh /root && chown -R root /root/.ssh")
    root = bench(untouched, tmp_path, "root")
    after = root.prepare()
    assert after.stamp == playbook_hash(PLAYBOOKS)
    assert after.tmux
    assert "root" not in untouched.sh("getent group docker")
    assert untouched.sh("stat -c '%U %a' /root/labctl").split() == ["root", "700"]
    root.transport.close()


def test_probe_through_csh_and_through_a_banner(untouched: Sshd, tmp_path: Path) -> None:
    untouched.sh("apt-get update && apt-get install -y --no-install-recommends csh")
    untouched.sh("chsh -s /bin/csh bob")
    untouched.sh("sed -i '1i echo Welcome to the lab' /home/carol/.bashrc")
    bob, carol = (bench(untouched, tmp_path, user) for user in ("bob", "carol"))
    quiet, noisy = probe(bob.transport), probe(carol.transport)
    assert (quiet.user, quiet.noisy_shell) == ("bob", False)
    assert (noisy.user, noisy.noisy_shell) == ("carol", True)
    bob.transport.close()
    carol.transport.close()
