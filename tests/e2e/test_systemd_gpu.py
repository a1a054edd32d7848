"""Units on a machine with a real systemd and stand-in GPUs: no reload takes a container's GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_directory import UNTIL_GO
from lab_servers import ROOT, wait_for
from sshd_container import Sshd, docker
from systemd_machine import build_gpu_image, lab_on, load_image, machine

from labctl.agent.host.gpu_access import EVERY_S, FIRST_S, STATE
from labctl.agent.host.systemd_reload import PUT_OFF
from labctl.agent.reply import parse_reply
from labctl.agent.watchdog.state_files import ROOT_DIR
from labctl.agent.watchdog.systemd_unit import UNIT
from labctl.servers.agent import build_program
from labctl.wire.verbs import Verb
from labctl.wire.watchdog import GUARD, RELOAD_UNITS

pytestmark = [pytest.mark.engine, pytest.mark.long]

FIRST, SECOND, THIRD = "remote-first", "remote-second", "remote-third"
CGROUP_DRIVER = """\
cat > /tmp/driver.py <<'END'
import json, pathlib
path = pathlib.Path("/etc/docker/daemon.json")
settings = json.loads(path.read_text() if path.exists() else "{}")
path.write_text(json.dumps({**settings, "exec-opts": ["native.cgroupdriver=systemd"]}))
END
python3 /tmp/driver.py
systemctl restart docker && docker info --format '{{.CgroupDriver}}' | grep -qx systemd"""
# A device that no container may open of itself: the GPU, where one is to be lost for real.
FUSE = "10:229"
GENERATOR = """\
mkdir -p /etc/systemd/system-generators && cd /etc/systemd/system-generators
printf '#!/bin/sh\\necho reload >> /run/reloads\\n' > count && chmod 755 count
systemctl daemon-reload && test "$(cat /run/reloads)" = reload"""
REQUEST: dict[str, Any] = {
    "lab": "units",
    "lab_id": "0123456789ab",
    "server_id": "server-1",
    "limits": {"ttl_s": 8 * 3600},
    "ending": {"kind": "poweroff", "disk": "stays"},
}


@pytest.fixture(scope="module")
def box(
    server_image: str, small_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sshd]:
    folder = tmp_path_factory.mktemp("systemd-gpu")
    options = ("--cap-add", "SYS_PTRACE", "--device-cgroup-rule", f"c {FUSE} rwm")
    with machine(build_gpu_image(server_image), folder, options) as made:
        made.sh(CGROUP_DRIVER)
        load_image(made, small_image, folder)
        (folder / "program.zip").write_bytes(build_program())
        docker("cp", str(folder / "program.zip"), f"{made.name}:/root/program.zip")
        made.sh(GENERATOR)
        for version in (FIRST, SECOND, THIRD):
            made.sh(f"python3 -m zipfile -e /root/program.zip /root/{version}")
        yield made


@pytest.fixture
def gpu_container(box: Sshd, small_image: str) -> Iterator[str]:
    box.sh(f"docker run -d --name training --gpus all {small_image} sleep 3600")
    yield "training"
    box.sh("docker rm -f training")


def call(box: Sshd, verb: Verb[Any, Any], request: dict[str, Any], version: str) -> Any:
    """What a verb of the program of that version answers to root."""
    words = f"python3 -I -S -B /root/{version}/__main__.py {verb.name}"
    return parse_reply(verb, box.sh(f"echo '{json.dumps(request)}' | {words}"), "")


def count_reloads(box: Sshd) -> int:
    """How often systemd has read its files: it runs its generators each time."""
    return int(box.sh("wc -l < /run/reloads"))


def state(box: Sshd) -> str:
    return box.sh(f"systemctl is-enabled {UNIT.name}; systemctl is-active {UNIT.name}")


def test_a_new_version_of_the_watchdog_needs_no_reload(box: Sshd) -> None:
    assert call(box, GUARD, REQUEST, FIRST).watch.version == FIRST
    assert state(box) == "enabled\nactive\n"
    before = count_reloads(box)
    assert call(box, GUARD, REQUEST, SECOND).watch.version == SECOND
    assert count_reloads(box) == before
    assert box.sh(f"cd {ROOT_DIR} && ls -d remote-*").split() == [SECOND]
    assert SECOND in box.sh("pgrep -af 'watchdog /var/lib'")


def test_a_changed_unit_waits_for_the_containers_with_a_gpu(box: Sshd, gpu_container: str) -> None:
    """As after an earlier labctl, whose unit named the program's version."""
    call(box, GUARD, REQUEST, SECOND)
    unit = box.sh(f"cat {UNIT}")
    box.sh(f"sed -i 's|current|{SECOND}|' {UNIT} && systemctl daemon-reload")
    before = count_reloads(box)
    watch = call(box, GUARD, {**REQUEST, "limits": {"ttl_s": 9 * 3600}}, THIRD).watch
    assert (watch.version, watch.alive) == (SECOND, True)
    assert watch.ttl_left_s > 8.5 * 3600
    (put_off,) = [one for one in watch.decisions if one.what == "update postponed"]
    assert gpu_container in put_off.why
    assert count_reloads(box) == before
    box.sh(f"systemctl kill --signal=KILL {UNIT.name}")  # its program is still there
    call(box, GUARD, REQUEST, THIRD)
    assert count_reloads(box) == before
    box.sh(f"docker stop -t 0 {gpu_container}")
    assert call(box, GUARD, REQUEST, THIRD).watch.version == THIRD
    assert count_reloads(box) == before + 1
    assert box.sh(f"cat {UNIT}") == unit
    assert state(box) == "enabled\nactive\n"


def test_a_first_watchdog_beside_a_gpu_container_needs_no_reload(
    box: Sshd, gpu_container: str
) -> None:
    box.sh(f"systemctl disable --now {UNIT.name}; rm {UNIT}; systemctl daemon-reload")
    before = count_reloads(box)
    assert call(box, GUARD, REQUEST, THIRD).watch.version == THIRD
    assert state(box) == "enabled\nactive\n"
    assert count_reloads(box) == before


def test_a_reload_of_units_is_put_off_and_made_up_for(box: Sshd, gpu_container: str) -> None:
    before = count_reloads(box)
    assert call(box, RELOAD_UNITS, {}, FIRST).put_off_for == (gpu_container,)
    assert count_reloads(box) == before
    box.sh(f"test -e {PUT_OFF}")
    box.sh(f"docker stop -t 0 {gpu_container}")
    assert call(box, RELOAD_UNITS, {}, FIRST).put_off_for == ()
    assert count_reloads(box) == before + 1
    box.sh(f"test ! -e {PUT_OFF}")


def test_a_gpu_that_a_reload_takes_is_noticed(
    box: Sshd, tmp_path: Path, base_image: str, small_image: str
) -> None:
    """The fault itself: a reload, and a device in a container that systemd was not told of."""
    if not Path("/sys/fs/cgroup/devices").is_dir():
        pytest.skip("with cgroup v2 device rules are a program, which the stand-in cannot add to")
    if "fuse" not in Path("/proc/misc").read_text().split():
        pytest.skip("this kernel has no /dev/fuse, which stands in for a GPU's device")
    box.sh(f"echo '{FUSE.replace(':', ' ')}' > /etc/gpu-standin-device")
    with lab_on(box, tmp_path, base_image, small_image) as lab:
        lab.labctl("run", "--detach", "--id", "night", "--", "sh", "-c", UNTIL_GO)
        folder = "/home/student/labctl/campus/runs/night"
        read = f"cat {folder}/.labctl/{STATE} 2>/dev/null || echo '{{}}'"
        wait_for(lambda: json.loads(box.sh(read)).get("opened_at"), FIRST_S + 60)
        box.sh("systemctl daemon-reload")
        wait_for(lambda: json.loads(box.sh(read)).get("lost_at"), EVERY_S + 60)
        status = lab.labctl("status", "--refresh").stdout
        box.sh(f"touch {folder}/go", user="student")
    assert "night has lost its GPU\n  next: labctl explain night" in status


def share(box: Sshd, folder: Path, memory: str) -> tuple[str, int]:
    """Run the role of shared servers: what it printed, and how many tasks changed something."""
    (folder / "broker.zip").write_bytes(build_program())
    choices = {
        "shared_server_program": str(folder / "broker.zip"),
        "shared_server_shell_memory": memory,
        "ansible_port": box.port,
        "ansible_user": "student",
        "ansible_ssh_private_key_file": str(box.key),
        "ansible_ssh_common_args": "-F none -o StrictHostKeyChecking=no "
        f"-o UserKnownHostsFile={folder}/known_hosts",
    }
    playbook = str(Path(sys.executable).with_name("ansible-playbook"))
    words = [playbook, "-i", "127.0.0.1,", "-e", json.dumps(choices), "playbooks/shared.yml"]
    done = subprocess.run(
        ["env", "LC_ALL=C.UTF-8", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = re.search(r"changed=(\d+)", done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert changed, done.stdout + done.stderr
    return done.stdout, int(changed[1])


NOTICE = "systemd has not reloaded its changed files"


def test_a_shared_servers_role_puts_its_reload_off(
    box: Sshd, tmp_path: Path, small_image: str
) -> None:
    said, _ = share(box, tmp_path, "4G")
    assert NOTICE not in said
    assert box.sh("systemctl is-enabled labctl-broker") == "enabled\n"
    before = count_reloads(box)
    box.sh(f"docker run -d --name lecture --gpus all {small_image} sleep 3600")
    said, _ = share(box, tmp_path, "5G")
    assert NOTICE in said
    assert count_reloads(box) == before
    # A new unit of the broker, too: its program starts again by the earlier one.
    unit, start = "/etc/systemd/system/labctl-broker.service", "/usr/local/lib/labctl/start-broker"
    box.sh(f"sleep 0.01; echo '# changed' >> {unit}; {start}")
    assert count_reloads(box) == before
    box.sh("docker rm -f lecture")
    said, _ = share(box, tmp_path, "5G")
    assert NOTICE not in said
    assert count_reloads(box) > before
    assert box.sh("systemctl show -p NeedDaemonReload --value labctl-broker") == "no\n"
    assert share(box, tmp_path, "5G")[1] == 0
