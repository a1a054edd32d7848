"""What one student can use up of a shared server, on a real engine: a share, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lab_servers import wait_for
from shared_bed import IMAGE, SLEEP, Person, SharedServer, small_shares

from labctl.agent.broker.calls import MOST_EXECS
from labctl.errors import PolicyError

pytest_plugins = ["shared_fixtures"]
pytestmark = [pytest.mark.engine, pytest.mark.long]
REGISTRY = Path(__file__).with_name("registry.py")
TINY = "127.0.0.1:5055/tiny:1"
STUBBORN = """\
trap 'touch /lab/run/ends; while [ ! -e /lab/run/go ]; do sleep 0.1; done; exit 0' TERM
sleep 600 & wait"""


def start_registry(bed: SharedServer) -> None:
    """One that runs already keeps the port."""
    bed.host.sh(f"cat > /var/tmp/registry.py <<'END'\n{REGISTRY.read_text()}\nEND")
    bed.host.sh("setsid python3 /var/tmp/registry.py /var/tmp/given-up 5055 >/dev/null 2>&1 &")
    ready = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 5055))'"
    wait_for(lambda: bed.host.sh(f"{ready} && echo yes", check=False) == "yes\n")


def list_gpus(person: Person) -> list[dict[str, Any]]:
    gpus: list[dict[str, Any]] = person.ask("GET", "/labctl/gpus")[1]["gpus"]
    return gpus


def start_refused(person: Person, run: str, uuid: str) -> str:
    with pytest.raises(PolicyError, match="cannot start now") as refused:
        person.start(run, SLEEP, gpus=uuid)
    return refused.value.why


def test_a_gpu_goes_to_the_next_in_the_queue(alice: Person, bob: Person, bed: SharedServer) -> None:
    """Though the one whose lease ends asks again and again, and the broker starts again."""
    alice.run("wakes-the-driver", "true", gpus="all")  # the first question wakes the driver
    uuid = list_gpus(alice)[0]["uuid"]
    with small_shares(bed, gpu_lease_s=1):
        alice.start("hog", STUBBORN, gpus=uuid)
        assert "This account is next" in start_refused(bob, "waits", uuid)
        # Until her lease has ended, alice may share it among her own containers.
        wait_for(lambda: alice.ssh("test -e labctl/hw3/runs/hog/ends", check=False).returncode == 0)
        start_refused(alice, "hog-again", uuid)
        alice.ssh("touch labctl/hw3/runs/hog/go")
        wait_for(lambda: not list_gpus(alice)[0]["holder"])
        assert "is reserved for lab-bob, who is before you" in start_refused(alice, "at-once", uuid)
    assert "is reserved for lab-bob" in start_refused(alice, "after-a-restart", uuid)
    bob.start("waits-no-more", SLEEP, gpus=uuid)
    assert list_gpus(alice)[0]["holder"] == "lab-bob"
    bob.cancel("waits-no-more")


@pytest.mark.long
def test_a_container_that_is_not_started_loses_its_gpu(
    alice: Person, bob: Person, bed: SharedServer
) -> None:
    devices = {"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}]}
    body = {"Image": IMAGE, "Cmd": ["id"], "HostConfig": devices}
    bed.host.sh("rm -f /run/labctl/gpu-queue.json")
    with small_shares(bed, gpu_claim_s=1, gpus_per_account=2):
        assert alice.ask("POST", "/containers/create?name=never", body)[0] == 201
        wait_for(lambda: not any(gpu["holder"] for gpu in list_gpus(bob)))
        assert alice.ask("POST", "/containers/never/start")[0] == 404
        log, _ = bob.run("both", "nvidia-smi -L", gpus="all")
    assert log.count("GPU-") == 2


@pytest.mark.long
def test_what_is_no_accounts_keeps_no_lease_from_ending(alice: Person, bed: SharedServer) -> None:
    """Labels of an image make it look like an account's; the engine lists it with the others."""
    labels = "--label labctl.uid=nobody --label labctl.gpus=GPU-x"
    name = bed.host.sh(f"docker run -d {labels} {IMAGE} sleep 600").strip()
    try:
        with small_shares(bed, gpu_lease_s=1):
            _, run = alice.run("ends-early", SLEEP, gpus="all")
        assert run.stopped_by == "GPU lease"
    finally:
        bed.host.sh(f"docker rm -f {name}")


def test_commands_that_are_never_started_are_bounded(alice: Person) -> None:
    alice.start("filled", SLEEP)
    name = alice.said("docker ps --format '{{.Names}}'")
    asked = [("POST", f"/containers/{name}/exec", {"Cmd": ["true"]})] * (MOST_EXECS + 1)
    answers = alice.ask_all(asked)
    # The shell that a run's session has in its container is one of them.
    statuses = [status for status, _ in answers]
    assert (statuses[0], statuses[-1]) == (201, 409)
    made = answers[0][1]["Id"]
    assert alice.ask("POST", f"/exec/{made}/start", {"Detach": False})[0] == 200
    wait_for(lambda: alice.ask(*asked[0])[0] == 201)
    alice.cancel("filled", grace_s=1)


@pytest.mark.long
def test_what_a_container_prints_fills_no_disk(alice: Person, bed: SharedServer) -> None:
    body = {"Image": IMAGE, "Cmd": ["sh", "-c", "yes 0123456789 | head -c 60000000"]}
    made = alice.ask("POST", "/containers/create?name=prints", body)[1]["Id"]
    assert alice.ask("POST", "/containers/prints/start")[0] == 200
    alice.ssh("docker wait prints")
    size = int(bed.host.sh(f"du -sb /var/lib/docker/containers/{made}").split()[0])
    assert 1_000_000 < size < 12_000_000
    alice.ssh("docker rm prints")


def test_no_spelling_of_a_name_replaces_what_staff_gave(alice: Person, bed: SharedServer) -> None:
    """The engine corrects a colon at the end, and takes a bare one for all tags."""
    start_registry(bed)
    bed.host.sh(f"docker rmi --force {TINY}", check=False)  # of an earlier server
    bed.host.sh(f"docker tag {IMAGE} {TINY}")
    given = bed.host.sh(f"docker inspect -f '{{{{.Id}}}}' {TINY}")
    for name in (TINY, f"{TINY}:", TINY.removesuffix("1")):
        status, _ = alice.ask("POST", f"/images/create?fromImage={name}&tag=")
        assert status in (404, 409), name
    assert bed.host.sh(f"docker inspect -f '{{{{.Id}}}}' {TINY}") == given
    bed.host.sh(f"docker rmi --force {TINY}")


@pytest.mark.long
def test_a_pull_is_bounded_while_it_goes_on(alice: Person, bob: Person, bed: SharedServer) -> None:
    start_registry(bed)
    bed.host.sh(f"docker rmi --force {TINY}", check=False)  # of an earlier server
    assert "Downloaded newer image" in alice.said(f"docker pull {TINY}")
    with small_shares(bed, image_bytes=1 << 20):
        said = alice.refused("docker pull 127.0.0.1:5055/huge:1")
        assert "larger than the shared server allows" in said
        wait_for(lambda: bed.host.sh("ls /var/tmp").find("given-up") >= 0)
    # An account that hangs up takes its pull with it.
    bed.host.sh("rm /var/tmp/given-up")
    alice.ssh("timeout 3 docker pull 127.0.0.1:5055/huge:1", check=False)
    wait_for(lambda: bed.host.sh("ls /var/tmp").find("given-up") >= 0)
