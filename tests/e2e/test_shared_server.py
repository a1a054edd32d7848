"""Two students on one server: their runs and services work, and neither sees or stops the other."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from lab_servers import wait_for
from shared_bed import BROKER, IMAGE, SLEEP, Person, SharedServer, quoted, small_shares

from labctl.agent.broker.http import IDLE_S
from labctl.errors import LabError, PolicyError
from labctl.events import SilentReporter
from labctl.servers.prepare import probe
from labctl.services.port_forward import Forwarding, ForwardSpec
from labctl.services.services import ensure_service, list_services, stop_service
from labctl.wire.images import BUILD_IMAGE, BuildImageRequest
from labctl.wire.services import ServiceRequest

pytest_plugins = ["shared_fixtures"]
pytestmark = pytest.mark.engine


def test_a_run_is_its_accounts_own(alice: Person, bob: Person) -> None:
    log, run = alice.run("first", "id -u; id -un; touch /x; cat /proc/self/status")
    assert run.exit_code == 0
    assert log.split()[:2] == [alice.said("id -u"), "lab"]
    assert "Read-only file system" in log
    assert "CapEff:\t0000000000000000" in log
    assert "NoNewPrivs:\t1" in log
    # The same lab and the same run of another account is another run.
    log, run = bob.run("first", "id -u")
    assert log.split() == [bob.said("id -u")]


def test_data_on_the_server_is_what_staff_provides(alice: Person, bed: SharedServer) -> None:
    bed.host.sh("mkdir -p /srv/labctl/birds /datasets && echo owl > /srv/labctl/birds/a")
    bed.host.sh("chmod -R a+rwX /srv/labctl /datasets")
    source = "/srv/labctl/birds"
    try:
        shell = "cat /lab/data/birds/a; touch /lab/data/birds/new"
        log, _ = alice.run("birds", shell, data={"birds": source})
        assert log.startswith("owl\n")
        assert "Read-only file system" in log
        with pytest.raises(PolicyError, match="this server is shared"):
            alice.start("others", "id", data={"birds": "/datasets"})
        mount = {"Type": "bind", "Source": source, "Target": "/lab/data/birds"}
        body = {"Image": IMAGE, "Cmd": ["id"], "HostConfig": {"Mounts": [mount]}}
        status, said = alice.ask("POST", "/containers/create", body)
        assert (status, "read-only" in said["message"]) == (403, True)
    finally:
        bed.host.sh("rm -rf /srv/labctl /datasets")


FORBIDDEN = {
    "Privileged": True,
    "PidMode": "host",
    "NetworkMode": "host",
    "IpcMode": "host",
    "UTSMode": "host",
    "UsernsMode": "host",
    "CapAdd": ["SYS_ADMIN"],
    "Binds": ["/:/host"],
    "VolumesFrom": ["x"],
    "Devices": [{"PathOnHost": "/dev/sda", "PathInContainer": "/dev/sda"}],
    "DeviceCgroupRules": ["b 8:* rwm"],
    "CgroupParent": "/",
    "GroupAdd": ["0"],
    "Sysctls": {"kernel.msgmax": "1"},
    "RestartPolicy": {"Name": "always"},
    "OomScoreAdj": -1000,
    "Ulimits": [{"Name": "nofile", "Soft": 1, "Hard": 1}],
    "ExtraHosts": ["metadata:169.254.169.254"],
    "Mounts": [{"Type": "volume", "Source": "v", "Target": "/lab/v"}],
    "PortBindings": {"80/tcp": [{"HostIp": "0.0.0.0", "HostPort": "80"}]},
    "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["x"], "Capabilities": [["gpu"]]}],
}

FORBIDDEN_ABOVE = {"User": "0:0", "Volumes": {"/v": {}}, "MacAddress": "x"}
ABSENT = [
    ("GET", "/events", None),
    ("GET", "/images/json", None),
    ("POST", "/build", None),
    ("POST", "/containers/prune", None),
    ("GET", "/volumes", None),
    ("GET", "/networks", None),
    ("POST", "/images/create?fromSrc=-", None),
    ("POST", "/plugins/pull?remote=x", None),
    ("GET", "/v1.41/../v1.41/events", None),
    ("GET", "/containers/../events", None),
]


def test_nothing_is_given_that_a_shared_server_does_not_give(alice: Person) -> None:
    plain = {"Image": IMAGE, "Cmd": ["id"]}
    bodies = [{**plain, "HostConfig": {key: value}} for key, value in FORBIDDEN.items()]
    bodies += [{**plain, key: value} for key, value in FORBIDDEN_ABOVE.items()]
    for body, (status, said) in zip(
        bodies, alice.ask_all([("POST", "/containers/create", one) for one in bodies]), strict=True
    ):
        assert status == 403, f"{body}: {said}"
    for (_, path, _), (status, _) in zip(ABSENT, alice.ask_all(ABSENT), strict=True):
        assert status in (403, 404), path


def test_one_does_not_see_or_stop_the_other(alice: Person, bob: Person, bed: SharedServer) -> None:
    run = alice.start("steady", SLEEP)
    name = run.container
    whole = bed.host.sh("docker ps --no-trunc --format '{{.ID}} {{.Names}}'")
    identity = next(line.split()[0] for line in whole.splitlines() if name in line)
    assert name in alice.said("docker ps --format '{{.Names}}'")
    assert bob.said("docker ps --all --format '{{.Names}}'").find("steady") < 0
    uid = alice.said("id -u")
    calls = [
        (method, f"/containers/{ref}{path}", {"Cmd": ["id"]} if path == "/exec" else None)
        for ref in (name, f"u{uid}.{name}", identity, identity[:12])
        for method, paths in (
            ("GET", ("/json", "/logs?stdout=1", "/stats", "/archive?path=/etc/passwd")),
            ("POST", ("/start", "/stop", "/kill", "/wait", "/attach", "/resize?h=1&w=1", "/exec")),
            ("DELETE", ("?force=1",)),
        )
        for path in paths
    ]
    for (_, path, _), (status, said) in zip(calls, bob.ask_all(calls), strict=True):
        assert status == 404, f"{path}: {said}"
        assert said["message"].startswith("No such container")
    assert "No such" in bob.refused(f"docker exec {name} id")
    made = alice.ask("POST", f"/containers/{name}/exec", {"Cmd": ["id"]})[1]["Id"]
    assert bob.ask("POST", f"/exec/{made}/start", {"Detach": False})[0] == 404
    assert bob.ask("GET", f"/exec/{made}/json")[0] == 404
    # Not by way of the machine either: processes, homes, each other's results.
    shown = bob.said("ps -eo user:32,args")
    assert "lab-alice" not in shown
    assert "sleep 600" not in shown
    assert "Permission denied" in bob.refused("ls /home/lab-alice")
    assert "permission denied" in bob.refused("docker -H unix:///var/run/docker.sock ps")
    assert bob.ssh("kill 1", check=False).returncode != 0
    assert alice.find_run("steady").state == "running"
    assert alice.cancel("steady").state == "cancelled"


def test_exec_and_logs_are_the_accounts(alice: Person) -> None:
    alice.start("entered", SLEEP)
    name = alice.find_run("entered").container
    uid = alice.said("id -u")
    assert alice.said(f"docker exec {name} id -u") == uid
    assert "account itself" in alice.refused(f"docker exec -u 0 {name} id")
    assert "privileged" in alice.refused(f"docker exec --privileged {name} id")
    assert "does not copy files" in alice.refused(f"docker cp {name}:/etc/shadow -")
    # Input goes in, its end too, and the output still comes.
    assert alice.said(f"printf one | docker exec -i {name} cat") == "one"
    assert alice.said(f"printf two | docker run --rm -i {IMAGE} sh -c 'cat; id -u'") == f"two{uid}"
    # A second request behind one that the engine does not switch to a stream goes nowhere.
    made = alice.ask("POST", f"/containers/{name}/exec", {"Cmd": ["true"]})[1]["Id"]
    smuggled = "GET /v1.41/containers/json?all=1 HTTP/1.1\\r\\nHost: d\\r\\n\\r\\n"
    answer = alice.said(
        "python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); "
        f's.connect("{BROKER}"); body = "{{\\"Detach\\": true}}"; '
        f's.sendall(("POST /v1.41/exec/{made}/start HTTP/1.1\\r\\nHost: d\\r\\n'
        "Connection: Upgrade\\r\\nUpgrade: tcp\\r\\n"
        f'Content-Length: %d\\r\\n\\r\\n%s{smuggled}" % (len(body), body)).encode()); '
        "s.settimeout(20)\n"
        "while True:\n b = s.recv(65536)\n if not b: break\n print(b.decode())'"
    )
    assert answer.count("HTTP/1.1") == 1
    assert "Names" not in answer
    alice.cancel("entered", grace_s=1)


RAW_REQUESTS = """
import socket, sys
for line in ODD:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(60)
    link.connect("/run/labctl/broker.sock")
    body = b'{"Image": "IMAGE", "Cmd": ["id"]}'
    link.sendall(line.replace(b"LENGTH", b"%d" % len(body)) + body)
    link.shutdown(socket.SHUT_WR)
    print(link.recv(65536).decode("latin-1").partition("\\r\\n")[0])
"""
ODD_HEADS = [
    b"POST /containers/create?name=odd HTTP/1.x\nHost: d\r\nContent-Length: LENGTH\r\n\r\n",
    b"POST /containers/create?name=odd HTTP/1.1 x\r\nHost: d\r\nContent-Length: LENGTH\r\n\r\n",
    b"POST /containers/create?name=odd HTTP/1.1\r\nHost: d\r\nContent-Length: \xb2\r\n\r\n",
    b"POST /containers/create?name=odd HTTP/1.1\r\nHost: d\r\nContent-Length: LENGTH\r\n"
    b"Content-Length: 1\r\n\r\n",
    b"POST /containers/create?name=odd HTTP/1.1\r\nHost: d\r\nContent-Length: LENGTH\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"POST /containers/create?name=odd&Name=even HTTP/1.1\r\nHost: d\r\n"
    b"Content-Length: LENGTH\r\n\r\n",
]


def test_what_is_not_quite_http_reaches_no_engine(alice: Person, bed: SharedServer) -> None:
    script = RAW_REQUESTS.replace("ODD", repr(ODD_HEADS)).replace("IMAGE", IMAGE)
    answers = alice.said(f"python3 -c {quoted(script)}").splitlines()
    assert [line.split()[:2] for line in answers] == [["HTTP/1.1", "400"]] * len(ODD_HEADS)
    assert "odd" not in bed.host.sh("docker ps --all --format '{{.Names}}'")
    # What follows a whole request, or stands in its head, is no request and no head to the engine.
    plain = b"GET /containers/json HTTP/1.1\nX-Registry-Auth: x\nHost: d\n\nGET /_ping HTTP/1.1\n\n"
    script = RAW_REQUESTS.replace("ODD", repr([plain]))
    assert alice.said(f"python3 -c {quoted(script)}") == "HTTP/1.1 200 OK"


def _creation(name: str, source: str, target: str = "/lab/data") -> tuple[str, str, Any]:
    mounts = [{"Type": "bind", "Source": source, "Target": target}]
    body = {"Image": IMAGE, "Cmd": ["cat", f"{target}/secret"], "HostConfig": {"Mounts": mounts}}
    return "POST", f"/containers/create?name={name}", body


def test_only_ones_own_is_mounted_and_a_swapped_link_leads_nowhere(
    alice: Person, bob: Person, bed: SharedServer
) -> None:
    alice.ssh("mkdir -p labctl/secret && echo alices > labctl/secret/secret")
    bob.ssh("mkdir -p labctl/own labctl/deep/er && echo bobs > labctl/own/secret")
    bob.ssh("ln -s /home/lab-alice/labctl/secret labctl/link; ln -s / labctl/deep/root")
    bed.host.sh("install -d -m 755 /home/lab-bob/labctl/roots")
    sources = (
        "/home/lab-alice/labctl/secret",
        "/",
        "/etc",
        "/run/labctl",
        "/home/lab-bob",
        "/home/lab-bob/labctl/link",
        "/home/lab-bob/labctl/deep/root/etc",
        "/home/lab-bob/labctl/../../lab-alice",
        "/home/lab-bob/labctl//own",
        "/home/lab-bob/labctl/roots",
        "/dev/shm/labctl-0",
        "relative",
    )
    asked = [_creation("bad", source) for source in sources]
    for target in ("/", "/proc", "/etc/shadow", "/lab/../etc", "/dev/null"):
        asked.append(_creation("bad", "/home/lab-bob/labctl/own", target))
    for one, (status, said) in zip(asked, bob.ask_all(asked), strict=True):
        assert status == 403, f"{one}: {said}"
    # Swapped between the check and the start: the container has what was checked.
    assert bob.ask(*_creation("swapped", "/home/lab-bob/labctl/own"))[0] == 201
    bob.ssh("mv labctl/own labctl/moved && ln -s /home/lab-alice/labctl/secret labctl/own")
    assert bob.ask("POST", "/containers/swapped/start")[0] == 200
    bob.ssh("docker wait swapped")
    assert bob.said("docker logs swapped") == "bobs"
    bob.ssh("docker rm swapped")
    assert bed.host.sh("ls /run/labctl/mounts") == "", "nothing stays bound"


GREEDY = """\
dd if=/dev/zero of=/var/tmp/fill bs=1M count=32
head -c 200000000 /dev/zero | tail -c 150000000 >/dev/null || echo memory refused
i=0; while [ $i -lt 80 ]; do sleep 60 & i=$((i+1)); done"""


@pytest.mark.long
def test_one_cannot_starve_the_other(alice: Person, bob: Person, bed: SharedServer) -> None:
    """Memory, disk and forks end at the account's own share, over all its containers."""
    mib = 1024**2
    with small_shares(bed, memory_bytes=64 * mib, pids=64):
        run = bob.start("steady", SLEEP, memory_bytes=1 << 50, cpus=64.0)
        shown = bob.ask("GET", f"/containers/{run.container}/json")[1]["HostConfig"]
        assert shown["Memory"] == shown["MemorySwap"] == 64 * mib
        assert shown["PidsLimit"] == 64
        assert shown["CgroupParent"].endswith(f"/labctl/u{bob.said('id -u')}")
        log, _ = bob.run("greedy", GREEDY)
        assert "No space left on device" in log, "/var/tmp is memory of its own"
        assert "memory refused" in log
        assert "can't fork" in log, "64 processes in all containers together"
        assert alice.run("not-starved", "echo fine")[0] == "fine\n"
        body = {"Image": IMAGE, "Cmd": ["id"]}
        many = [("POST", f"/containers/create?name=m{n}", body) for n in range(17)]
        statuses = [status for status, _ in bob.ask_all(many)]
        assert statuses[0] == 201
        assert statuses[-1] == 409, "an account has at most 16 containers"
        bob.ssh("docker rm -f $(docker ps -aq)")


def test_gpus_are_lent_one_by_one_and_each_refusal_names_the_holder(
    alice: Person, bob: Person, bed: SharedServer
) -> None:
    listing = alice.run("look", "nvidia-smi -L", gpus="all")[0]
    assert listing.count("GPU-") == 1
    log, _ = alice.run("none", "nvidia-smi -L", env={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert "not found" in log, "a GPU is had through a lease only"
    for node in ("/dev/nvidia0", "/dev/nvidia1"):
        assert "Permission denied" in alice.refused(f"cat {node}")
    alice.start("first-gpu", SLEEP, gpus="all")
    # Who has all they may have shares it among their own.
    shared_log, _ = alice.run("second", "nvidia-smi -L", gpus="all")
    bob.start("other-gpu", SLEEP, gpus="all")
    bob.cancel("other-gpu")
    known = probe(alice.connections.open(alice.server))
    assert [(gpu.name, gpu.memory_bytes >> 30) for gpu in known.gpus] == [("Tesla T4", 15)] * 2
    taken = alice.ask("GET", "/labctl/gpus")[1]["gpus"]
    assert [one["holder"] for one in taken].count("lab-alice") == 1
    assert all(one["use_percent"] >= 0 for one in taken)
    uuid = next(one["uuid"] for one in taken if one["holder"])
    assert uuid in shared_log
    with pytest.raises(PolicyError, match="cannot start now") as others:
        bob.start("that-gpu", SLEEP, gpus=uuid)
    assert "in use by lab-alice for at most 60 min" in others.value.why
    # A lease that ends takes the run with it, and says so.
    alice.cancel("first-gpu")
    with small_shares(bed, gpu_lease_s=1):
        _, run = alice.run("short", SLEEP, gpus="all")
    assert run.stopped_by == "GPU lease"
    assert "its GPU time ended" in run.summary


def test_a_program_that_a_container_with_a_gpu_leaves_opens_none(
    alice: Person, bed: SharedServer
) -> None:
    """The container may give a file of its account to the GPUs' group, with the setgid bit."""
    group = bed.host.sh("getent group labctl-gpu | cut -d: -f3").strip()
    folder = "labctl/hw3/runs/leaves"
    wait = "while [ ! -e /lab/run/copied ]; do sleep 0.1; done"
    mark = f"chgrp {group} /lab/run/cat && chmod 2755 /lab/run/cat && touch /lab/run/marked"
    alice.start("leaves", f"{wait}; {mark}; sleep 600", gpus="all")
    alice.ssh(f"cp /bin/cat {folder}/ && touch {folder}/copied")
    wait_for(lambda: alice.ssh(f"test -e {folder}/marked", check=False).returncode == 0)
    assert alice.said(f"stat -c '%a %g' {folder}/cat") == f"2755 {group}"
    assert "Permission denied" in alice.refused(f"{folder}/cat /dev/nvidia0")
    alice.cancel("leaves", grace_s=1)


def test_a_service_is_its_owners_alone(alice: Person, bob: Person, bed: SharedServer) -> None:
    wanted = ServiceRequest(
        lab="hw3",
        lab_id=alice.server.lab_id,
        name="page",
        image=IMAGE,
        command=(
            "sh",
            "-c",
            "echo secret > /lab/code/index.html; exec httpd -f -p 8000 -h /lab/code",
        ),
        port=8000,
    )
    service = ensure_service(alice.remote, wanted, SilentReporter())
    assert service.socket.startswith("/run/labctl/accounts/")
    assert list_services(alice.remote, "hw3", alice.server.lab_id) == [service]
    spec = ForwardSpec(
        config=str(alice.ssh_config),
        server_id=alice.server.id,
        endpoint=alice.server.endpoint,
        service=service,
    )
    with Forwarding(spec) as forward:
        link = http.client.HTTPConnection("127.0.0.1", forward.local_port, timeout=30)
        link.request("GET", "/index.html")
        assert link.getresponse().read() == b"secret\n"
        link.close()
    # Bob reaches neither the socket, nor the container, nor any port of the machine.
    assert "Permission denied" in bob.refused(f"ls {service.socket}")
    address = bed.host.sh(
        "docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "
        f"u{alice.said('id -u')}.{service.container}"
    ).strip()
    knock = 'import socket; socket.create_connection(("ADDRESS", 8000), 5)'
    at = knock.replace("ADDRESS", address)
    assert "Error" in bob.refused(f"python3 -c '{at}'")
    assert "Error" in alice.refused(f"python3 -c '{at}'"), "not even its owner's shell"
    assert "Error" in bob.refused(f"python3 -c '{knock.replace('ADDRESS', '127.0.0.1')}'")
    log, _ = bob.run("knock", f"wget -T 3 -O - http://{address}:8000/; echo $?")
    assert "secret" not in log
    # A broker that starts again has the service where it was.
    bed.host.sh("/usr/local/lib/labctl/start-broker")
    wait_for(lambda: list_services(alice.remote, "hw3", alice.server.lab_id))
    assert ensure_service(alice.remote, wanted, SilentReporter()) == service
    assert stop_service(alice.remote, "hw3", alice.server.lab_id) == ["page"]


def test_an_image_of_ones_own_stands_for_nobody_elses(alice: Person, bob: Person) -> None:
    """Sent under a name that all use, it is seen by its owner alone."""
    before = bob.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}")
    script = REPACKED.replace("IMAGE", IMAGE)
    assert "Loaded image" in alice.said(f"python3 -c '{script}' | docker load")
    assert alice.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}") != before
    assert bob.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}") == before
    own = alice.said(f"docker image inspect --format '{{{{index .RepoTags 0}}}}' {IMAGE}")
    assert own == f"labctl-u{alice.said('id -u')}/{IMAGE}"
    assert "No such image" in bob.refused(f"docker image inspect {own}")
    assert "No such image" in bob.refused(f"docker run --rm {own} id")
    assert "does not accept this image archive" in alice.refused("echo nonsense | docker load")
    for name in (IMAGE, f"docker.io/library/{IMAGE}"):
        assert "staff provides" in bob.refused(f"docker pull {name}")
    asked = [("POST", f"/images/create?fromImage={IMAGE}", None)]
    assert [status for status, _ in bob.ask_all(asked)] == [409]
    alice.ssh(f"docker rmi {IMAGE}")
    assert alice.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}") == before
    assert "No such image" in alice.refused(f"docker rmi {IMAGE}"), "what all use stays"


def test_no_spelling_of_a_key_names_an_image_for_all(
    alice: Person, bob: Person, bed: SharedServer
) -> None:
    """The engine takes the last of two keys that differ in case only."""
    before = bob.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}")
    for public in (IMAGE, "pytorch/pytorch:2.8.0"):
        for key in ("repotags", "RepoTag\u017f"):
            script = REPACKED.replace("IMAGE", "mine:1").replace(
                "Layers=[]", f"Layers=[], **{{{key!a}: [{public!r}]}}"
            )
            assert "one key twice" in alice.refused(f"python3 -c {quoted(script)} | docker load")
    assert bob.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}") == before
    assert "No such object" in bed.host.sh("docker inspect pytorch/pytorch:2.8.0", check=False)


def test_an_image_keeps_its_id_on_its_way(alice: Person, bed: SharedServer) -> None:
    bed.host.sh(f"docker save {IMAGE} > /var/tmp/whole.tar; chmod 644 /var/tmp/whole.tar")
    before = bed.host.sh(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}").strip()
    assert f"Loaded image: labctl-u{alice.said('id -u')}/" in alice.said(
        "docker load < /var/tmp/whole.tar"
    )
    assert alice.said(f"docker image inspect --format '{{{{.Id}}}}' {IMAGE}") == before
    alice.ssh(f"docker rmi {IMAGE}")


@pytest.mark.long
def test_an_image_may_be_long_in_coming(alice: Person, bed: SharedServer) -> None:
    """`docker save` writes all of a large image to the disk before its first byte."""
    bed.host.sh(f"docker save {IMAGE} > /var/tmp/slow.tar; chmod 644 /var/tmp/slow.tar")
    late = f"(sleep {IDLE_S + 5:.0f}; cat /var/tmp/slow.tar) | docker load"
    assert "Loaded image: labctl-u" in alice.said(late)
    alice.ssh(f"docker rmi {IMAGE}")


UPLOAD = """
import http.client, io, json, socket, tarfile
sent = 0
def blocks():
    global sent
    info = tarfile.TarInfo("l/layer.tar")
    info.size = 8 << 30
    yield info.tobuf()
    while sent < info.size:
        yield bytes(1 << 20)
        sent += 1 << 20
link = http.client.HTTPConnection("docker")
link.sock = socket.socket(socket.AF_UNIX)
link.sock.connect("/run/labctl/broker.sock")
try:
    link.request("POST", "/images/load", blocks(), {}, encode_chunked=True)
except OSError:
    pass
reply = link.getresponse()
print(reply.status, sent >> 20, json.load(reply)["message"])
"""


@pytest.mark.long
def test_an_upload_ends_before_the_disk_is_full(alice: Person, bed: SharedServer) -> None:
    """There was room for it when it began. What had come of it is gone."""
    root = bed.host.sh("docker info --format '{{.DockerRootDir}}'").strip()
    free = int(bed.host.sh(f"df --output=avail -B1 {root} | tail -1"))
    with small_shares(bed, disk_free_bytes=max(0, free - (1 << 30))):
        status, mib, message = alice.said(f"python3 -c {quoted(UPLOAD)}").split(maxsplit=2)
    assert (status, message) == ("507", "shared server: its disk has no room for another image")
    assert int(mib) < 4096  # of 8192; other tests free some of this disk meanwhile
    wait_for(lambda: "docker-import" not in bed.host.sh(f"ls {root}/tmp"))


@pytest.mark.long
def test_an_image_gives_neither_leases_nor_places_nor_disk(
    alice: Person, bob: Person, bed: SharedServer
) -> None:
    """What stands in an image is its account's own word, and the engine would take it over."""
    uuid = alice.ask("GET", "/labctl/gpus")[1]["gpus"][0]["uuid"]
    config = {
        "Labels": {
            "labctl.gpus": uuid,
            "labctl.lease-ends": "99999999999",
            "labctl.service-socket": "/run/labctl/taken/x.sock",
            "labctl.service-port": "80",
        },
        "Volumes": {"/data": {}},
    }
    bed.host.sh(f"docker save {IMAGE} > /var/tmp/image.tar; chmod 644 /var/tmp/image.tar")
    script = REWRITTEN.replace("CONFIG", repr(config))
    alice.ssh(f"python3 -c {quoted(script)} | docker load")
    shell = "touch /data/x; grep ' /data ' /proc/mounts; sleep 60"
    body = {"Image": "forged:1", "Cmd": ["sh", "-c", shell]}
    assert alice.ask("POST", "/containers/create?name=forged", body)[0] == 201
    assert alice.ask("POST", "/containers/forged/start")[0] == 200
    held = [one["holder"] for one in bob.ask("GET", "/labctl/gpus")[1]["gpus"]]
    assert held == ["", ""], "a lease is what the broker gave"
    wait_for(lambda: "tmpfs" in alice.said("docker logs forged"))
    bed.host.sh("/usr/local/lib/labctl/start-broker")
    alice.said("docker ps")
    assert "taken" not in bed.host.sh("ls /run/labctl")
    alice.ssh("docker rm -f forged; docker rmi forged:1")


def test_no_place_is_taken_before_its_owner_comes(
    alice: Person, bob: Person, bed: SharedServer
) -> None:
    for place in ("/dev/shm/labctl", "/tmp/tmux"):
        there = f"{place}-{bob.said('id -u')}"
        assert bed.host.sh(f"stat -c '%U %a' {there}").split() == ["lab-bob", "700"]
        assert "not permitted" in alice.refused(f"rm -rf {there}; mv {there} {there}.old")
    # The way to the cloud's credentials is shut before Docker's own rules are asked.
    rules = bed.host.sh("iptables -t mangle -S PREROUTING")
    assert "-i lc+" in rules
    assert "169.254.169.254/32" in rules


@pytest.mark.long
def test_a_crowd_of_one_leaves_the_broker_to_the_others(alice: Person, bob: Person) -> None:
    """Connections that say nothing, more than an account has, while they are open."""
    with ThreadPoolExecutor(1) as thread:
        crowd = thread.submit(alice.said, f"python3 -c {quoted(CROWD)}")
        try:
            wait_for(lambda: "full" in alice.said("cat crowd.log 2>/dev/null || true"))
            assert bob.run("beside-a-crowd", "echo fine")[0] == "fine\n"
        finally:
            alice.ssh("rm -f crowd.log")
        assert crowd.result() == "64 are heard, 36 are refused"
    assert alice.ask("GET", "/labctl/gpus")[0] == 200


def test_images_are_not_built_by_the_engine(alice: Person) -> None:
    alice.ssh("mkdir -p labctl/hw3/code && echo FROM scratch > labctl/hw3/code/Dockerfile")
    request = BuildImageRequest("hw3", alice.server.lab_id, ".", "labctl/x:1", args={})
    with pytest.raises(PolicyError, match="cannot build images") as refused:
        alice.remote.stream(BUILD_IMAGE, request, on_reply=lambda _: None, on_bytes=lambda _: None)
    assert "rootlesskit" in refused.value.why
    assert alice.ask("POST", "/build")[0] == 403


@pytest.mark.long
def test_an_account_that_has_ended_is_shut_out(bob: Person, bed: SharedServer) -> None:
    """Its keys in its own home do not help it, and what it ran is gone."""
    bob.ssh("mkdir -p -m 700 .ssh && cat /etc/ssh/labctl-keys/lab-bob > .ssh/authorized_keys")
    run = bob.start("goes-on", SLEEP)
    staff = bed.staff()
    course = staff.course()
    seats = {one.lab_id: one for one in course.provider.servers()}
    course.provider.terminate(seats[bob.server.lab_id].id)
    assert [one.lab_id for one in course.provider.servers()] == [
        bed.people["lab-alice"].server.lab_id
    ]
    bob.connections.close(bob.server)
    assert "Permission denied" in bob.refused("true")
    with pytest.raises(LabError):
        bob.find_run("goes-on")
    assert run.container not in bed.host.sh("docker ps -a --format '{{.Names}}'")
    assert bed.host.sh("ls /home/lab-bob/labctl/hw3/runs/goes-on/logs").startswith("run.log")


CROWD = f"""
import os, select, socket, time
many = [socket.socket(socket.AF_UNIX) for _ in range(100)]
for one in many:
    one.connect("{BROKER}")
end = time.monotonic() + 120
while (refused := len(select.select(many, [], [], 0.1)[0])) < 36 and time.monotonic() < end:
    time.sleep(0.05)
open("crowd.log", "w").write("full")
while os.path.exists("crowd.log"):
    time.sleep(0.05)
print(len(many) - refused, "are heard,", refused, "are refused")
"""
REWRITTEN = """
import hashlib, io, json, sys, tarfile
source = tarfile.open("/var/tmp/image.tar")
listed = json.load(source.extractfile("manifest.json"))
made = json.load(source.extractfile(listed[0]["Config"]))
made["config"].update(CONFIG)
config = json.dumps(made).encode()
name = hashlib.sha256(config).hexdigest() + ".json"
listed[0].update(Config=name, RepoTags=["forged:1"])
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
    for path in listed[0]["Layers"]:
        tar.addfile(source.getmember(path), source.extractfile(path))
    for path, text in ((name, config), ("manifest.json", json.dumps(listed).encode())):
        info = tarfile.TarInfo(path)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
"""
REPACKED = """
import hashlib, io, json, sys, tarfile
config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Cmd": ["evil"]},
                     "rootfs": {"type": "layers", "diff_ids": []}}).encode()
name = hashlib.sha256(config).hexdigest() + ".json"
listed = json.dumps([dict(Config=name, RepoTags=["IMAGE"], Layers=[])]).encode()
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
    for path, text in ((name, config), ("manifest.json", listed)):
        info = tarfile.TarInfo(path)
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
"""
