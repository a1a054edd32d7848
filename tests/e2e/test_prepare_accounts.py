"""Bare machines that each test has to itself: accounts with fewer rights, odd shells, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_container import bare, build_image
from prepare_bench import PLAYBOOKS, bench
from sshd_container import Sshd

from labctl.errors import LabError, PolicyError
from labctl.events import Note, Step
from labctl.servers.playbooks import LOG_NAME
from labctl.servers.prepare import playbook_hash, probe

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def image() -> str:
    return build_image()


@pytest.fixture
def untouched(image: str, tmp_path: Path) -> Iterator[Sshd]:
    with bare(image, tmp_path) as box:
        yield box


@pytest.mark.long
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


@pytest.mark.long
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
        assert after.tmux
        assert not after.boto3
        said = [note.text for note in alice.reporter.of(Note) if "boto3" in note.text]
        assert len(said) == 1
        assert "cannot save results by itself" in said[0]
        alice.transport.close()


def test_account_without_sudo_gets_the_exact_words(untouched: Sshd, tmp_path: Path) -> None:
    bob = bench(untouched, tmp_path, "bob")
    with pytest.raises(PolicyError) as caught:
        bob.prepare()
    assert bob.transport.round_trips == 1
    assert caught.value.what == "bobs-lab is not ready for labctl, and bob may not change it"
    lines = caught.value.why.splitlines()
    assert "- Docker Engine is not installed" in lines
    assert "    sudo apt-get install --yes docker.io tmux python3" in lines
    assert "    sudo usermod --append --groups docker bob" in lines
    assert "labctl inventory" in caught.value.hint
    bob.transport.close()


@pytest.mark.long
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
        "preparing alices-lab failed at: Install Python on a Debian or Ubuntu machine"
    )
    assert "python3" in caught.value.why
    log = alice.ssh_config.parent / LOG_NAME
    assert caught.value.hint == f"less {log}"
    assert "failed" in log.read_text()
    assert "stamp" not in untouched.sh("ls /var/lib/labctl 2>/dev/null || true")
    alice.transport.close()


@pytest.mark.long
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


@pytest.mark.long
def test_probe_through_csh_and_through_a_banner(untouched: Sshd, tmp_path: Path) -> None:
    untouched.sh("apt-get update && apt-get install -y --no-install-recommends csh")
    untouched.sh("chsh -s /bin/csh bob")
    untouched.sh("sed -i '1i echo Welcome to the lab' /home/carol/.bashrc")
    bob, carol = (bench(untouched, tmp_path, user) for user in ("bob", "carol"))
    quiet, noisy = probe(bob.transport), probe(carol.transport)
    assert quiet.user == "bob"
    assert noisy.user == "carol"
    bob.transport.close()
    carol.transport.close()
