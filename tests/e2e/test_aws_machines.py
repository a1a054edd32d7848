"""Machines that boot: a kill at each step of the first contact, keys, addresses, kept images."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from aws_bed import DOWN, ORPHANS, REGION, SSH_DEADLINE, UP, AwsLab, Bed
from lab_servers import wait_for
from msgspec.structs import replace
from warm_labctl import COMMAND_S

from labctl.rehearsal.aws.scenario import Capacity
from labctl.runs import images
from labctl.runs.image_cache import ImageCache
from labctl.state import State

pytest_plugins = ["aws_fixtures"]
pytestmark = pytest.mark.engine

NEW_HOST_KEY = (
    "rm -f /etc/ssh/ssh_host_ed25519_key*;"
    " ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key;"
    " kill -HUP $(cat /run/sshd.pid); pkill -f '[s]shd: ubuntu'; true"
)


@pytest.mark.long
def test_killed_at_each_step_of_the_first_contact(machines: Bed, tmp_path: Path) -> None:
    lab = machines.lab()
    # The first CreateTags is the deadline's, then come both keys, then the last one alone.
    machines.killed_at(lab, UP, "dropped", "CreateTags", skip=1)
    (instance,) = machines.living()
    first = machines.tagged(instance)["labctl:host-key"]
    machines.killed_at(lab, UP, "lost", "CreateTags")
    both = machines.tagged(instance)
    assert both["labctl:host-key"] == first
    assert both["labctl:host-key-next"] not in ("", first)
    # sshd has been told to change its key.
    lab.killed_before("os.rename known_hosts", tmp_path)
    machines.killed_at(lab, UP, "dropped", "CreateTags")
    machines.killed_at(lab, UP, "lost", "CreateTags")
    for effect in ("host-key", "guarded", "ready"):
        lab.killed_before(f"INSERT INTO events {effect}", tmp_path)
    assert "digits is ready" in lab.labctl(*UP)
    assert machines.living() == [instance]
    last = machines.tagged(instance)
    assert last["labctl:host-key-next"] == ""
    assert first not in last["labctl:host-key"]
    code, presented = machines.rehearsal.execute(
        instance, "cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub"
    )
    assert (code, presented.strip()) == (0, last["labctl:host-key"])
    lab.forget()
    assert lab.json("status", "-r")["reachable"] is True
    # Nothing is known to be home, so this looks.
    lab.labctl("down", "--yes")


@pytest.mark.long
def test_a_new_server_loads_a_kept_image_and_builds_nothing(
    machines: Bed, small_image: str, tmp_path: Path
) -> None:
    lab = machines.lab()
    image = keep_built_image(lab, small_image)
    # The load goes on, whatever becomes of `up`: it has begun before the guards are armed.
    lab.killed_before("INSERT INTO events guarded", tmp_path)
    (instance,) = machines.living()
    inspect = f"docker image inspect {image}"
    wait_for(lambda: machines.rehearsal.execute(instance, inspect)[0] == 0)
    lab.labctl(*UP)
    said = lab.labctl("run")
    assert "trained" in said
    assert "building" not in said
    remove = f"docker rm -f $(docker ps -aq); docker rmi -f {image}"
    assert machines.rehearsal.execute(instance, remove)[0] == 0
    said = lab.labctl("run")
    assert "trained" in said
    assert f"loading {image}" in said
    assert "building" not in said
    lab.labctl(*DOWN)


@pytest.mark.long
def test_a_built_image_goes_to_the_lab_s_store_and_comes_from_there(
    machines: Bed, small_image: str
) -> None:
    settings = {"LABCTL_SERVER_AWS_INSTANCE_PROFILE": "labctl-server"}
    lab = machines.lab(LABCTL_BASE_IMAGE=small_image, **settings)
    with (lab.root / "lab.yaml").open("a") as file:
        file.write("image: {build: .}\nstore: s3://built/labs\n")
    unique = secrets.token_hex(8)
    dockerfile = f"ARG BASE\nFROM ${{BASE}}\nRUN echo {unique} > /unique\n"
    (lab.root / "Dockerfile").write_text(dockerfile)
    machines.client("s3").create_bucket(Bucket="built")
    lab.labctl(*UP)
    said = lab.labctl("run", "--", "cat", "/unique")
    image = said.split("building the image (")[1].split(")")[0]
    folder = f"labs/digits-{lab.id}/images/"

    def list_keys() -> list[str]:
        found = machines.client("s3").list_objects_v2(Bucket="built", Prefix=folder)
        return [one["Key"] for one in found.get("Contents", [])]

    wait_for(lambda: any(key.endswith(".json") for key in list_keys()))
    (instance,) = machines.living()
    remove = "docker rm -f $(docker ps -aq); docker rmi -f $(docker images -aq)"
    inspect = f"docker image inspect {image}"
    assert machines.rehearsal.execute(instance, remove)[0] == 0
    assert machines.rehearsal.execute(instance, inspect)[0] != 0
    said = lab.labctl("run", "--", "cat", "/unique")
    assert f"loading {image} from the store" in said
    assert "building" not in said
    assert unique in said
    assert machines.rehearsal.execute(instance, remove)[0] == 0
    lab.labctl(*UP)
    wait_for(lambda: machines.rehearsal.execute(instance, inspect)[0] == 0)
    lab.labctl(*DOWN)


def keep_built_image(lab: AwsLab, base: str) -> str:
    """Give the lab a Dockerfile whose image a `local` server has built, and this machine keeps."""
    with (lab.root / "lab.yaml").open("a") as file:
        file.write("image: {build: .}\n")
    # The server has no such base and cannot get it: it could not build the image.
    (lab.root / "Dockerfile").write_text(f"FROM {base}\nENV UNIQUE={secrets.token_hex(8)}\n")
    tag = images.content_hash(lab.root, {})[: images.DIGEST_DIGITS]
    image = f"{images.BUILT}:{tag}"
    build = ["docker", "build", "-q", "-t", image, str(lab.root)]
    subprocess.run(build, check=True, capture_output=True)
    inspect = ["docker", "image", "inspect", "--format", "{{.Architecture}}", image]
    architecture = subprocess.run(inspect, check=True, capture_output=True, text=True).stdout
    saved = subprocess.run(["docker", "save", image], check=True, capture_output=True).stdout
    subprocess.run(["docker", "rmi", image], check=True, capture_output=True)
    cache = ImageCache(Path(lab.environ["XDG_CACHE_HOME"]) / "labctl" / "images", 10**9)
    cache.add(image, architecture.strip(), [saved])
    return image


PROGRAM = """\
from labctl import Lab
from labctl.events import SilentReporter

class Agreeing(SilentReporter):
    def confirm(self, question):
        return True

print(Lab.load(".", reporter=Agreeing()).up().alias)
"""


@pytest.mark.long
def test_a_program_goes_on_after_the_host_key_was_replaced(machines: Bed) -> None:
    """Its commands go over one connection of its own, made with the key that is replaced."""
    lab = machines.lab()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=lab.root,
        env=lab.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "digits\n"), done.stderr
    lab.labctl(*DOWN)


@pytest.mark.long
def test_a_changed_host_key_stops_everything(machines: Bed) -> None:
    lab = machines.lab()
    lab.labctl(*UP)
    (instance,) = machines.living()
    assert machines.rehearsal.execute(instance, NEW_HOST_KEY)[0] == 0
    for words in (("status", "-r"), UP, ("push",), ("down", "--yes")):
        wait_for(lambda: "host key" in lab.labctl(*words, code=3))  # noqa: B023
    assert "host key" in lab.labctl("ssh", "--", "true", code=255)
    assert machines.living() == [instance]
    lab.labctl(*DOWN)


@pytest.mark.long
def test_an_address_that_another_server_has_now_is_no_login(machines: Bed) -> None:
    mine, theirs = machines.lab(), machines.lab()
    mine.labctl(*UP)
    (gone,) = machines.living()
    theirs.labctl(*UP)
    other = next(one for one in machines.living() if one != gone)
    machines.client("ec2").terminate_instances(InstanceIds=[gone])
    machines.rehearsal.wait(gone, "terminated")
    address = machines.rehearsal.find_record(other).address
    with State(mine.state / "labctl.db") as state:
        known = state.get_server(f"{gone}.{REGION}")
        assert known is not None
        state.save_server(replace(known, endpoint=replace(known.endpoint, host=address)))
    # These do not ask the provider first.
    for words, code in ((("ssh", "--", "true"), 255), (("push",), 3)):
        assert "host key" in mine.labctl(*words, code=code)
    assert mine.json("status", "-r")["server"] is None
    assert "left: volume vol-" in mine.labctl(*DOWN, code=1)
    assert machines.living() == [other]
    theirs.labctl(*DOWN)
    theirs.labctl(*ORPHANS, "--kept-too")


@pytest.mark.long
def test_a_console_is_shown_where_ssh_never_opens(machines: Bed) -> None:
    lab = machines.lab(LABCTL_SERVER_AWS_SSH_FROM="192.0.2.0/24")
    said = lab.labctl(*UP, code=75, settings={SSH_DEADLINE: 3})
    assert "the end of the server's console:" in said
    assert "the server was removed again" in said


@pytest.mark.long
def test_a_server_that_is_not_what_was_asked_for_is_told_with_its_price(machines: Bed) -> None:
    lab = machines.lab()
    said = lab.labctl(*UP, "--gpu", "any", code=3)
    (instance,) = machines.living()
    assert "this lab needs a GPU, and the server has none" in said
    assert f"{instance}.{REGION} is still running (last known), at $0." in said
    cut_off(machines, instance)
    said = lab.labctl("down", "--yes", code=3)
    assert "not everything on it could be saved" in said
    assert "its disk kept for 30 days: vol-" in said
    assert machines.living() == []
    (volume,) = machines.left()
    assert volume.startswith("volume ")
    assert " a month" in lab.labctl("down", "--yes", code=1)
    lab.labctl("orphans", "--terminate", "--kept-too", "--yes")


def cut_off(bed: Bed, instance: str) -> None:
    """Nobody gets in any more: a sshd that ended would be started again."""
    gone = "chmod -x /usr/sbin/sshd && kill $(cat /run/sshd.pid)"
    code, said = bed.rehearsal.execute(instance, f"{gone}; pkill -f '[s]shd: ubuntu'; true")
    assert code == 0, said


def write_gang(lab: AwsLab) -> None:
    lab.become_gang()
    text = (lab.root / "lab.yaml").read_text()
    (lab.root / "lab.yaml").write_text(text.replace("budget: 20", "budget: 20, executor: process"))


def find_zones(machines: Bed) -> set[str]:
    reservations = machines.client("ec2").describe_instances(InstanceIds=machines.living())
    return {
        instance["Placement"]["AvailabilityZone"]
        for one in reservations["Reservations"]
        for instance in one["Instances"]
    }


@pytest.mark.long
def test_a_gang_leaves_the_zone_that_has_room_for_one(machines: Bed) -> None:
    lab = machines.lab()
    write_gang(lab)
    first_zone = lab.json("offers")["offers"][0]["zone"]
    ec2 = machines.client("ec2")
    with machines.set(capacity=(Capacity(zone=first_zone, left=1),)):
        assert "no server of this zone is kept" in lab.labctl("up", "--yes")
    assert len(machines.living()) == 2
    (zone,) = find_zones(machines)
    assert zone != first_zone
    assert set(machines.placed().values()) == {f"labctl-{lab.id}-{zone}"}
    groups = ec2.describe_security_groups()["SecurityGroups"]
    names = [
        tag["Value"]
        for one in [*groups, *ec2.describe_key_pairs()["KeyPairs"]]
        for tag in one.get("Tags", ())
        if tag["Key"] == "labctl:lab"
    ]
    assert names == ["digits", "digits"]
    assert len(lab.json("orphans", code=1)["orphans"]["here"]) == 2
    lab.labctl(*ORPHANS)
    assert machines.living() == []
    status = lab.json("status")
    assert (status["server"], status["servers"]) == (None, [])


@pytest.mark.long
def test_servers_of_a_gang_reach_one_another_and_nobody_else_does(machines: Bed) -> None:
    lab = machines.lab()
    write_gang(lab)
    assert "2 servers of digits are ready" in lab.labctl("up", "--yes")
    # They are created side by side, so the first server need not be the first instance.
    first, second = sorted(machines.living(), key=lambda one: machines.tagged(one)["labctl:lab"])
    assert len(find_zones(machines)) == 1
    stranger = machines.lab("stranger")
    stranger.labctl("up", "--yes")
    (third,) = set(machines.living()) - {first, second}
    address = machines.rehearsal.execute(first, "hostname -I")[1].split()[-1]
    listen = "python3 -m http.server 5555 >/dev/null 2>&1 </dev/null & sleep 1"
    assert machines.rehearsal.execute(first, listen)[0] == 0
    connect = f"import socket; socket.create_connection(('{address}', 5555), 3)"
    for machine, code in ((second, 0), (third, 1)):
        assert machines.rehearsal.execute(machine, f'python3 -c "{connect}"')[0] == code
    run = lab.labctl("run", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE at $MASTER_ADDR")
    assert f"0 of 2 at {address}" in run
    lab.labctl("down", "--yes")
    assert machines.living() == [third]
    stranger.labctl(*DOWN)
