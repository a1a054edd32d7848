"""Services on a real engine: started once, found again, private, and honest when they fail."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from service_lab import HOME, LAB, LAB_ID, ServiceLab
from sshd_container import wait_for

from labctl.errors import LabError, NotFoundError, UsageError
from labctl.events import Progress
from labctl.model import Service
from labctl.services.services import list_services, stop_service
from labctl.wire.services import START_SERVICE, ServiceReply

pytest_plugins = ["service_fixtures"]
pytestmark = pytest.mark.engine


def ask(lab: ServiceLab, service: Service, path: str, *words: str) -> tuple[int, str]:
    """(HTTP status, body) of a request made on the server itself."""
    line = " ".join(["python3 -", str(service.port), f"'{path}'", *(f"'{w}'" for w in words)])
    program = (
        "import sys,http.client as h;p,u,*w=sys.argv[1:];c=h.HTTPConnection('127.0.0.1',int(p));"
        "c.request('GET',u,headers=dict(x.split('=',1) for x in w));r=c.getresponse();"
        "print(r.status);print(r.read().decode())"
    )
    status, _, body = lab.box.sh(f'echo "{program}" | {line}').partition("\n")
    return int(status), body


@pytest.mark.long
def test_tensorboard_is_added_to_an_image_without_it_and_found_again(
    service_lab: ServiceLab,
) -> None:
    first = service_lab.ensure("tensorboard")
    assert first.container == "digits-svc-tensorboard"
    again = service_lab.ensure("tensorboard")
    assert again == first
    steps = [e for e in service_lab.reporter.events if isinstance(e, Progress)]
    assert steps[-1].done == steps[-1].total > 1
    seen = service_lab.inspect(first.container)
    assert seen["Config"]["User"] == "1000:1000"
    assert seen["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]
    published = seen["HostConfig"]["PortBindings"]["6006/tcp"][0]
    assert (published["HostIp"], published["HostPort"], first.port) == ("127.0.0.1", "6006", 6006)
    read_only = {m["Destination"]: not m["RW"] for m in seen["Mounts"]}
    assert read_only["/lab/runs"]
    assert read_only["/lab/data"]
    assert not read_only["/lab/code"]


@pytest.mark.long
def test_a_run_that_begins_later_appears_in_tensorboard_under_its_id(
    service_lab: ServiceLab,
) -> None:
    service = service_lab.ensure("tensorboard")
    service_lab.write_scalars("later-run")

    def shown() -> bool:
        status, body = ask(service_lab, service, "/data/plugin/scalars/tags")
        return status == 200 and "train/loss_of_digits" in json.loads(body).get("later-run", {})

    wait_for(shown)


def test_jupyter_needs_its_token_which_stands_in_no_argv_and_no_environment(
    service_lab: ServiceLab,
) -> None:
    service = service_lab.ensure("jupyter")
    assert len(service.token) >= 32
    assert service_lab.ensure("jupyter") == service
    assert ask(service_lab, service, "/api/contents")[0] == 403
    token = f"Authorization=token {service.token}"
    status, body = ask(service_lab, service, "/api/contents", token)
    assert status == 200
    assert {"code", "runs", "data"} <= {one["name"] for one in json.loads(body)["content"]}
    # A name that some page points at the loopback is not one that a forward uses.
    assert ask(service_lab, service, "/api/contents", token, "Host=evil.example")[0] == 403
    assert service.token not in json.dumps(service_lab.inspect(service.container))
    assert service.token not in service_lab.box.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    path = f"{HOME}/{LAB}/.labctl/service-jupyter.token"
    assert service_lab.box.sh(f"stat -c %a:%U {path}").strip() == "600:student"


def test_any_command_with_a_port_is_a_service(service_lab: ServiceLab) -> None:
    service = service_lab.web()
    assert ask(service_lab, service, "/hello.txt") == (200, "hello\n\n")
    listed = list_services(service_lab.remote, LAB, LAB_ID)
    assert service in listed
    assert stop_service(service_lab.remote, LAB, LAB_ID, "web") == ["web"]
    assert stop_service(service_lab.remote, LAB, LAB_ID, "web") == []
    assert "web" not in [one.name for one in list_services(service_lab.remote, LAB, LAB_ID)]


def test_two_who_want_the_same_service_at_once_get_the_same_one(service_lab: ServiceLab) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: service_lab.web("shared"), range(4)))
    assert len(set(found)) == 1
    stop_service(service_lab.remote, LAB, LAB_ID, "shared")


@pytest.mark.long
def test_other_settings_are_told_and_what_runs_stays(service_lab: ServiceLab) -> None:
    service = service_lab.web("kept")
    later = service_lab.ensure("kept", "sleep", "600", port=8000)
    assert later == service
    assert any("earlier settings" in note for note in service_lab.reporter.notes)
    stop_service(service_lab.remote, LAB, LAB_ID, "kept")


def test_a_service_that_ends_shows_its_last_words(service_lab: ServiceLab) -> None:
    with pytest.raises(LabError) as caught:
        service_lab.ensure("broken", "sh", "-c", "echo no model here >&2; exit 3", port=8000)
    assert "no model here" in caught.value.why
    assert caught.value.what.endswith("exited right after its start (exit code 3)")
    assert caught.value.hint.startswith("labctl forward broken ")
    assert "digits-svc-broken" not in service_lab.box.sh("docker ps -a --format '{{.Names}}'")


def test_a_service_that_never_answers_is_given_up_at_its_deadline(
    service_lab: ServiceLab,
) -> None:
    wish = service_lab.request("mute", "sh", "-c", "echo thinking; sleep 600", port=8000)
    with pytest.raises(LabError, match=r"did not answer within 1\.5 s") as caught:
        service_lab.remote.call(START_SERVICE, wish._replace(deadline_s=1.5))
    assert "thinking" in caught.value.why
    assert "digits-svc-mute" not in service_lab.box.sh("docker ps -a --format '{{.Names}}'")


def test_the_secrets_of_a_service_are_gone_when_it_is(service_lab: ServiceLab) -> None:
    places = "find /dev/shm -name HF_TOKEN -path '*service.*'"
    served = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"
    script = f"grep -q hf_ /run/labctl-secrets/HF_TOKEN && exec python3 -c '{served}'"
    wish = service_lab.request("engine", "sh", "-c", script, port=8000)
    wish = wish._replace(test="true", secrets={"HF_TOKEN": "hf_8f2c"})
    service_lab.remote.call(START_SERVICE, wish)
    assert service_lab.box.sh(places).strip()
    assert "hf_8f2c" not in service_lab.box.sh("docker inspect digits-svc-engine")
    stop_service(service_lab.remote, LAB, LAB_ID, "engine")
    assert service_lab.box.sh(places) == ""
    broken = wish._replace(command=("sh", "-c", "exit 3"))
    with pytest.raises(LabError):
        service_lab.remote.call(START_SERVICE, broken)
    assert service_lab.box.sh(places) == ""


def test_an_image_that_is_not_there_is_provided_or_said_to_be_missing(
    service_lab: ServiceLab,
) -> None:
    wish = service_lab.request("x", "true", port=80)._replace(image="absent:1")
    assert service_lab.remote.call(START_SERVICE, wish) == ServiceReply(missing="absent:1")
    with pytest.raises(UsageError):
        service_lab.remote.call(START_SERVICE, wish._replace(name="../x"))
    service_lab.image, kept = "absent:1", service_lab.image
    try:
        with pytest.raises(NotFoundError, match="absent:1"):
            service_lab.ensure("x", "true", port=80)
    finally:
        service_lab.image = kept


def test_a_port_that_somebody_else_serves_is_taken_as_it_is(service_lab: ServiceLab) -> None:
    assert service_lab.ensure("model-api", port=9000) == Service(name="model-api", port=9000)
