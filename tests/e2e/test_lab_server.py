"""The lab server itself: what a student finds on it, and what it survives."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from lab_servers import (
    TEST_LABEL,
    LabServer,
    context,
    drop_pool,
    start,
    wait_for,
)

from labctl.providers.local import LocalProvider, LocalSettings

pytestmark = pytest.mark.engine

DOCKERD_PID = "cat /run/docker.pid"
EAT_MEMORY = """awk 'BEGIN { text = "x"; while (1) text = text text }'"""
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


@pytest.fixture
def loaded(lab_server: LabServer, small_image: str) -> Iterator[LabServer]:
    """The shared server with an image on it; its containers go after each test."""
    lab_server.load(small_image)
    yield lab_server
    lab_server.ssh("docker ps --all --quiet | xargs -r docker rm --force")


def state_of(server: LabServer, container: str) -> dict[str, Any]:
    shown = server.ssh(f"docker inspect --format '{{{{json .State}}}}' {container}").stdout
    state: dict[str, Any] = json.loads(shown)
    return state


def engine_answers(server: LabServer) -> bool:
    return server.ssh("docker version", check=False).returncode == 0


def test_student_may_use_docker_and_become_root(lab_server: LabServer) -> None:
    assert lab_server.ssh("id -u").stdout.strip() == "1000"
    assert lab_server.ssh("id -un").stdout.strip() == "student"
    assert "docker" in lab_server.ssh("id -nG").stdout.split()
    assert lab_server.ssh("sudo -n id -u").stdout.strip() == "0"
    assert lab_server.ssh("cat /etc/shadow", check=False).returncode != 0
    assert lab_server.ssh("echo $HOME $SHELL").stdout.split() == ["/home/student", "/bin/bash"]


@pytest.mark.parametrize("program", ["docker", "tmux", "rsync", "curl", "python3", "ip", "ps"])
def test_programs_are_there(lab_server: LabServer, program: str) -> None:
    lab_server.ssh(f"command -v {program}")


def test_psutil_is_there(lab_server: LabServer) -> None:
    path = "import sys; sys.path.append('/usr/lib/python3/dist-packages'); import psutil"
    lab_server.ssh(f'python3 -I -S -c "{path}"')


@pytest.mark.parametrize("user", ["root", "student"])
def test_passwords_are_not_asked_for(lab_server: LabServer, user: str) -> None:
    words = lab_server.ssh_words("-o", "PubkeyAuthentication=no", "-o", "BatchMode=no")
    words[-1] = f"{user}@127.0.0.1"
    done = subprocess.run(
        [*words, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_root_cannot_log_in_even_with_a_key(lab_server: LabServer) -> None:
    key = lab_server.request.public_key
    lab_server.sh(f"mkdir -p /root/.ssh && echo '{key}' > /root/.ssh/authorized_keys")
    words = lab_server.ssh_words()
    words[-1] = "root@127.0.0.1"
    done = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    lab_server.sh("rm -r /root/.ssh")
    assert done.returncode == 255
    assert "Permission denied" in done.stderr


def test_sshd_listens_on_this_machines_loopback_only(lab_server: LabServer) -> None:
    assert lab_server.endpoint.host == "127.0.0.1"
    attrs = lab_server.inspected()
    assert {binding["HostIp"] for binding in attrs["NetworkSettings"]["Ports"]["22/tcp"]} == {
        "127.0.0.1"
    }


def test_server_is_not_privileged_and_bears_its_labels(lab_server: LabServer) -> None:
    attrs = lab_server.inspected()
    assert attrs["HostConfig"]["Privileged"] is False
    assert attrs["Name"] == f"/{lab_server.server.id}"
    labels = attrs["Config"]["Labels"]
    assert labels["labctl.lab-id"] == lab_server.request.lab_id
    assert labels["labctl.token"] == lab_server.request.token
    assert labels[TEST_LABEL] == "1"


def test_stamp_says_which_image_it_is(lab_server: LabServer, server_image: str) -> None:
    assert lab_server.ssh("cat /var/lib/labctl/stamp").stdout.strip() == server_image


def test_images_build_and_run_inside(loaded: LabServer, small_image: str) -> None:
    word = secrets.token_hex(8)
    dockerfile = f"FROM {small_image}\nRUN echo {word} > /word\nCMD cat /word\n"
    loaded.ssh(f"docker build --quiet --tag word-{word} -", stdin=dockerfile.encode())
    ran = loaded.ssh(f"docker run --rm --init --user 1000:1000 word-{word}")
    assert ran.stdout.strip() == word
    loaded.ssh(f"docker rmi word-{word}")


def test_memory_limit_of_a_container_holds(loaded: LabServer, small_image: str) -> None:
    limits = "--memory 32m --memory-swap 32m"
    eater = f"docker run --rm {limits} {small_image} {EAT_MEMORY}"
    # The kernel's SIGKILL: nothing else kills here, and the engine may learn of it too late.
    assert loaded.ssh(eater, check=False).returncode == 128 + signal.SIGKILL


def test_killed_dockerd_comes_back_and_containers_go_on(
    loaded: LabServer, small_image: str
) -> None:
    loaded.ssh(f"docker run --detach --name goes-on {small_image} sleep 600")
    before = state_of(loaded, "goes-on")
    old = loaded.sh(DOCKERD_PID)
    loaded.sh(f"kill -9 {old}")
    wait_for(lambda: loaded.sh(DOCKERD_PID, check=False) != old and engine_answers(loaded))
    after = state_of(loaded, "goes-on")
    assert after["Running"] is True
    assert after["Pid"] == before["Pid"]
    assert after["StartedAt"] == before["StartedAt"]


def test_killed_sshd_comes_back(lab_server: LabServer) -> None:
    old = lab_server.sh("pgrep --oldest --exact sshd")
    lab_server.sh(f"kill -9 {old}")
    lab_server.wait_until_ready()
    assert lab_server.sh("pgrep --oldest --exact sshd") != old


def test_orphans_are_reaped(lab_server: LabServer) -> None:
    lab_server.ssh("sh -c '(sleep 0.05 &) ; true'")
    wait_for(lambda: "Z" not in lab_server.sh("ps -eo stat="))


@pytest.mark.long
def test_reboot_is_one(loaded: LabServer, small_image: str) -> None:
    """Files, images and containers stay; processes end as at a shutdown; the boot id is new."""
    catch = 'trap "echo saved; exit 7" TERM; while :; do sleep 0.1; done'
    loaded.ssh(f"docker run --detach --name catches {small_image} sh -c '{catch}'")
    wait_for(lambda: state_of(loaded, "catches")["Running"])
    loaded.ssh("tmux new-session -d -s lost && echo kept > kept")
    boot_id = loaded.ssh(BOOT_ID).stdout
    host_key = loaded.server.endpoint.host_key
    loaded.restart()
    assert loaded.found().endpoint.host_key == host_key
    assert loaded.ssh(BOOT_ID).stdout != boot_id
    assert loaded.ssh("cat kept").stdout == "kept\n"
    assert loaded.ssh("tmux ls", check=False).returncode != 0
    state = state_of(loaded, "catches")
    assert (state["Status"], state["ExitCode"]) == ("exited", 7)
    assert loaded.ssh("docker logs catches").stdout == "saved\n"
    loaded.ssh("docker start catches")
    assert state_of(loaded, "catches")["Running"] is True


@pytest.fixture(scope="module")
def own_pool(base_image: str) -> Iterator[str]:
    """An owner whose caches nobody else takes."""
    owner = f"tests-{secrets.token_hex(4)}"
    yield owner
    drop_pool(base_image, owner)


@pytest.fixture(scope="module")
def limited(
    own_pool: str, base_image: str, small_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LabServer]:
    """A small server with a script for its first boot."""
    settings = LocalSettings(memory_bytes=512 * 1024**2, cpus=0.5)
    script = "#!/bin/sh\nid -un >> /var/lib/labctl/ran\n"
    folder = tmp_path_factory.mktemp("small")
    server = start(folder, base_image, "small", settings, own_pool, script)
    try:
        server.load(small_image)
        yield server
    finally:
        server.terminate()


@pytest.mark.long
def test_limits_of_the_settings_reach_the_engine(limited: LabServer, small_image: str) -> None:
    host = limited.inspected()["HostConfig"]
    assert (host["Memory"], host["NanoCpus"]) == (512 * 1024**2, 500_000_000)
    # What runs inside counts as the server's own.
    limited.ssh(f"docker run --name eater {small_image} {EAT_MEMORY}", check=False)
    assert state_of(limited, "eater")["ExitCode"] == 137


@pytest.mark.long
def test_power_loss_leaves_a_server_that_boots(limited: LabServer, small_image: str) -> None:
    """What is for its first boot has run once."""
    limited.ssh(f"docker run --detach --name cut {small_image} sleep 600")
    limited.kill()
    limited.provider.start(limited.server.id)
    limited.wait_until_ready()
    state = state_of(limited, "cut")
    assert state["Status"] == "exited"
    assert state["ExitCode"] != 0
    limited.ssh("docker start cut")
    assert state_of(limited, "cut")["Running"] is True
    assert limited.ssh("cat /var/lib/labctl/ran").stdout == "root\n"


@pytest.mark.long
def test_next_server_finds_the_images_and_nothing_else(
    own_pool: str, base_image: str, small_image: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whether the one before it was terminated, or just vanished with a container that restarts."""

    def one(lab: str) -> LabServer:
        return start(tmp_path_factory.mktemp(lab), base_image, lab, LocalSettings(), own_pool)

    def leave_all_kinds(server: LabServer) -> None:
        words = f"--detach --restart always --name old --volume old:/old {small_image}"
        server.ssh(f"docker run {words} sleep 600")
        server.ssh("docker network create old")

    def assert_clear(server: LabServer) -> None:
        images = server.ssh("docker images --format '{{.Repository}}:{{.Tag}}'").stdout.split()
        assert small_image in images
        assert server.ssh("docker ps --all --quiet").stdout == ""
        assert server.ssh("docker volume ls --quiet").stdout == ""
        networks = server.ssh("docker network ls --format '{{.Name}}'").stdout.split()
        assert sorted(networks) == ["bridge", "host", "none"]

    with ExitStack() as ends:
        first = one("first")
        ends.callback(first.terminate)
        first.load(small_image)
        leave_all_kinds(first)
        first.terminate()
        second = one("second")
        ends.callback(second.terminate)
        assert_clear(second)
        leave_all_kinds(second)
        second.vanish()
        third = one("third")
        ends.callback(third.terminate)
        assert_clear(third)


def test_listing_shows_servers_of_two_labs_side_by_side(
    lab_server: LabServer, gpu_server: LabServer, base_image: str
) -> None:
    fresh = LocalProvider(LocalSettings(), context(base_image))
    listed = {server.id: server for server in fresh.servers()}
    for mine in (lab_server, gpu_server):
        assert listed[mine.server.id].endpoint == mine.endpoint
    assert lab_server.endpoint.port != gpu_server.endpoint.port
    assert lab_server.server.endpoint.host_key != gpu_server.server.endpoint.host_key


class TestGpuStandIn:
    """Everything between `--gpus` and nvidia-smi is Docker's own."""

    @pytest.fixture
    def gpus(self, gpu_server: LabServer, small_image: str) -> LabServer:
        gpu_server.load(small_image)
        return gpu_server

    def uuids(self, server: LabServer) -> list[str]:
        query = "nvidia-smi --query-gpu=uuid --format=csv,noheader"
        return server.ssh(query).stdout.split()

    def test_server_shows_two(self, gpus: LabServer) -> None:
        fields = "name,uuid,memory.total,driver_version,utilization.gpu,memory.used,power.draw"
        query = f"nvidia-smi --query-gpu={fields},temperature.gpu --format=csv,noheader,nounits"
        rows = [row.split(", ") for row in gpus.ssh(query).stdout.splitlines()]
        assert [row[0] for row in rows] == ["Tesla T4", "Tesla T4"]
        for row in rows:
            assert row[1].startswith("GPU-")
            assert all(float(number) >= 0 for number in (row[2], *row[4:]))
        assert len(gpus.ssh("nvidia-smi -L").stdout.splitlines()) == 2
        assert "Tesla T4" in gpus.ssh("nvidia-smi").stdout

    def test_all_reach_a_container(self, gpus: LabServer, small_image: str) -> None:
        shown = gpus.ssh(f"docker run --rm --gpus all {small_image} nvidia-smi -L").stdout
        assert [line.split("UUID: ")[1].rstrip(")") for line in shown.splitlines()] == self.uuids(
            gpus
        )

    def test_chosen_one_reaches_a_container_of_another_user(
        self, gpus: LabServer, small_image: str
    ) -> None:
        second = self.uuids(gpus)[1]
        for device in ("1", second):
            run = f"docker run --rm --gpus device={device} --user 1000 {small_image}"
            shown = gpus.ssh(f"{run} nvidia-smi -L").stdout
            assert shown.count("UUID") == 1
            assert second in shown

    def test_unknown_one_is_refused(self, gpus: LabServer, small_image: str) -> None:
        done = gpus.ssh(f"docker run --rm --gpus device=7 {small_image} true", check=False)
        assert done.returncode == 125
        assert "unknown device" in done.stderr

    def test_without_gpus_a_container_has_none(self, gpus: LabServer, small_image: str) -> None:
        done = gpus.ssh(f"docker run --rm {small_image} nvidia-smi", check=False)
        assert done.returncode == 127
