"""Instances that are containers: boot, login, power, groups, metadata, disks, and what is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rehearsal_bed import Machine, RehearsalSetup, wait_for

from labctl.providers.local import engine
from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.images import Building
from labctl.rehearsal.core.machines import LABEL

pytestmark = pytest.mark.engine
SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


@pytest.fixture(scope="module")
def machine(real: RehearsalSetup) -> Machine:
    """One spot instance that the tests of this module share."""
    return real.running(**SPOT)


def test_the_user_data_was_applied_before_anybody_could_log_in(machine: Machine) -> None:
    said = machine.ssh("id -un; hostname; sudo id -u; cat /var/log/hook; groups")
    assert said.stdout.splitlines()[:4] == ["ubuntu", "labctl-digits", "0", "armed"]
    assert "docker" in said.stdout.splitlines()[4]


def test_there_is_an_engine(machine: Machine) -> None:
    wait_for(lambda: machine.ssh("docker version --format '{{.Server.Version}}'").returncode == 0)


def test_cloud_init_finishes(machine: Machine) -> None:
    done = machine.ssh("cloud-init status --wait")
    assert "status: done" in done.stdout


def test_the_console_is_what_the_machine_printed(machine: Machine) -> None:
    def text() -> str:
        return str(machine.setup.ec2.get_console_output(InstanceId=machine.id).get("Output", ""))

    wait_for(lambda: "Cloud-init v." in text())


def test_metadata_needs_a_token_and_knows_the_instance(machine: Machine) -> None:
    bare = machine.ssh(
        "curl -s -o /dev/null -w '%{http_code}' http://169.254.169.254/latest/meta-data/instance-id"
    )
    assert bare.stdout == "401"
    assert machine.metadata("meta-data/instance-id") == machine.id
    assert machine.metadata("meta-data/placement/region") == "us-east-1"
    document = json.loads(machine.metadata("dynamic/instance-identity/document"))
    assert document["instanceId"] == machine.id
    assert "spot" not in machine.metadata("meta-data/")


def test_the_api_is_at_the_same_address_inside(machine: Machine) -> None:
    said = machine.ssh(f"curl -s {machine.setup.rehearsal.url}/checkip")
    assert said.stdout.strip() == machine.setup.rehearsal.caller
    control = "curl -s -o /dev/null -w '%{http_code}' -H 'X-Labctl-Rehearsal: 1' -d '{}'"
    said = machine.ssh(f"{control} {machine.setup.rehearsal.url}/rehearsal/state")
    assert said.stdout == "404", "a machine controls nothing"


def test_only_what_the_group_allows_gets_in(machine: Machine) -> None:
    setup = machine.setup
    assert machine.opens()
    setup.ec2.revoke_security_group_ingress(**setup.ssh_rule)
    assert not machine.opens()
    setup.ec2.authorize_security_group_ingress(**setup.ssh_rule)
    assert machine.opens()


@pytest.mark.long
def test_a_reboot_keeps_address_and_disk(machine: Machine) -> None:
    address = machine.address
    before = machine.ssh("touch kept; cat /proc/sys/kernel/random/boot_id").stdout
    machine.ssh("sudo reboot")
    wait_for(lambda: machine.ssh("cat /proc/sys/kernel/random/boot_id").stdout not in ("", before))
    assert machine.ssh("ls; cat /var/log/hook").stdout.split() == ["kept", "armed", "armed"]
    assert machine.address == address


@pytest.mark.long
def test_a_reclaim_is_announced_to_the_machine(machine: Machine) -> None:
    assert machine.metadata("meta-data/spot/instance-action") == ""
    machine.setup.rehearsal.reclaim(machine.id, notice_s=10.0, rebalance_s=0.3)
    wait_for(lambda: machine.metadata("meta-data/events/recommendations/rebalance"))
    action = json.loads(wait_for(lambda: machine.metadata("meta-data/spot/instance-action")))
    assert action["action"] == "terminate"
    machine.setup.rehearsal.wait(machine.id, "terminated")
    assert _containers(machine.setup.rehearsal, machine.id) == []


@pytest.mark.long
def test_power_off_inside_ends_the_instance_and_a_kept_disk_stays(real: RehearsalSetup) -> None:
    first = real.running()
    first.ssh("echo precious > result")
    real.ec2.modify_instance_attribute(
        InstanceId=first.id,
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"DeleteOnTermination": False}}],
    )
    volume = real.described(first.id)["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    first.ssh("sudo shutdown -P now")
    real.rehearsal.wait(first.id, "terminated")
    reason = real.described(first.id)["StateReason"]["Code"]
    assert reason == "Client.InstanceInitiatedShutdown"
    second = real.running(InstanceInitiatedShutdownBehavior="stop")
    real.ec2.attach_volume(InstanceId=second.id, VolumeId=volume, Device="/dev/sdf")
    device = f"/dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_{volume.replace('-', '')}-part1"
    said = second.ssh(f"sudo mount -o ro {device} /mnt && cat /mnt/home/ubuntu/result")
    assert said.stdout == "precious\n"
    assert second.ssh("touch own; sudo touch /mnt/home/new").returncode != 0
    second.ssh("sudo poweroff")
    real.rehearsal.wait(second.id, "stopped")
    real.ec2.start_instances(InstanceIds=[second.id])
    real.rehearsal.wait(second.id, "running")
    second.wait_for_login()
    assert second.ssh("ls").stdout.split() == ["own"]
    real.ec2.terminate_instances(InstanceIds=[second.id])
    real.rehearsal.wait(second.id, "terminated")
    real.ec2.delete_volume(VolumeId=volume)
    assert [_containers(real.rehearsal, each.id) for each in (first, second)] == [[], []]


def test_an_instance_that_ends_while_it_boots_leaves_nothing(real: RehearsalSetup) -> None:
    ids = [real.run()["InstanceId"] for _ in range(2)]
    real.ec2.terminate_instances(InstanceIds=ids)
    for instance_id in ids:
        real.rehearsal.wait(instance_id, "terminated")
        assert _containers(real.rehearsal, instance_id) == []


def test_machines_that_only_accept_ssh(images: Building, tmp_path: Path) -> None:
    with Rehearsal(Scenario(boot="sshd"), images) as rehearsal:
        setup = RehearsalSetup(rehearsal, tmp_path)
        machines = [setup.run()["InstanceId"] for _ in range(3)]
        for instance_id in machines:
            rehearsal.wait(instance_id, "running")
            one = Machine(setup, instance_id)
            one.wait_for_login()
            assert one.ssh("hostname").stdout == "labctl-digits\n"
        assert len(_containers(rehearsal)) == 3
        one.ssh("sudo poweroff")
        rehearsal.wait(one.id, "terminated")
        label = _label(rehearsal)
    with engine.connect() as docker:
        assert docker.containers.list(all=True, filters={"label": label}) == []
        assert docker.networks.list(filters={"label": label}) == []


def _label(rehearsal: Rehearsal) -> str:
    assert rehearsal._machines is not None
    return f"{LABEL}={rehearsal._machines.name}"


def _containers(rehearsal: Rehearsal, instance_id: str = "") -> list[str]:
    """The names of its containers that are this instance's."""
    with engine.connect() as docker:
        found = docker.containers.list(all=True, filters={"label": _label(rehearsal)})
        return [str(one.name) for one in found if instance_id in str(one.name)]
