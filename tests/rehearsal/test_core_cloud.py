"""The core that all clouds with an HTTP API share, driven by labctl's client for such clouds."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import requests
from small_cloud import (
    DESCRIPTION,
    SMALL,
    Machine,
    MachineList,
    Misspelled,
    Ordered,
    SmallCloud,
)

from labctl.errors import (
    BusyError,
    CapacityError,
    ConnectError,
    CredentialsError,
    DeniedError,
    ProviderError,
    QuotaError,
    ThrottledError,
    UsageError,
)
from labctl.providers.http import AbsentError, ApiClient, resolve_endpoint
from labctl.rehearsal.core.scenario import (
    CallFailure,
    CloudCapacity,
    CloudDelays,
    CloudScenario,
    Loss,
    Throttle,
)
from labctl.rehearsal.core.simulation import ViolationError
from labctl.rehearsal.core.validation import ApiRequest, OpenApiValidator


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallCloud]:
    with SmallCloud(CloudScenario(boot="none")) as small:
        for name, value in small.environment.items():
            monkeypatch.setenv(name, value)
        yield small


@pytest.fixture
def client() -> ApiClient:
    return ApiClient(SMALL)


def create(client: ApiClient, kind: str = "small") -> Machine:
    return client.post("create a machine", "/machines", Machine, Ordered(kind=kind))


def list_ids(client: ApiClient) -> list[str]:
    listed = client.get("list the machines", "/machines", MachineList, {"most": "5"})
    return [one.id for one in listed.machines]


def test_a_machine_is_created_listed_and_deleted(cloud: SmallCloud, client: ApiClient) -> None:
    machine = create(client)
    assert list_ids(client) == [machine.id]
    cloud.wait(machine.id, "running")
    client.delete("delete the machine", f"/machines/{machine.id}")
    cloud.wait(machine.id, "ended")
    assert list_ids(client) == []
    with pytest.raises(AbsentError):
        client.delete("delete the machine", f"/machines/{machine.id}")
    assert cloud.calls == {"create": 1, "list": 2, "delete": 2}


def test_a_lost_reply_of_a_call_that_changes_something_is_not_repeated(
    cloud: SmallCloud, client: ApiClient
) -> None:
    cloud.change(lost=(Loss(action="create"), Loss(action="list", count=2)))
    with pytest.raises(ConnectError, match="create a machine"):
        create(client)
    assert cloud.calls == {"create": 1}
    assert list_ids(client) == ["m-0"]
    assert cloud.calls["list"] == 3
    cloud.change(lost=(), dropped=(Loss(action="create"),))
    with pytest.raises(ConnectError):
        create(client)
    assert list_ids(client) == ["m-0"]


def test_a_throttled_call_is_repeated_when_the_cloud_says(
    cloud: SmallCloud, client: ApiClient
) -> None:
    cloud.change(throttle=(Throttle(action="create", rate=5, burst=1),))
    assert [create(client).id for _ in range(3)] == ["m-0", "m-1", "m-2"]
    assert cloud.calls["create"] > 3
    cloud.change(throttle=(Throttle(action="create", rate=0.001, burst=1),))
    impatient = ApiClient(SMALL, repeat_throttled_s=0)
    create(impatient)
    with pytest.raises(ThrottledError):
        create(impatient)


@pytest.mark.parametrize(
    "key", ["secret-one\nsecret-two", "secret-one secret-two", "secret-\u2019"]
)
def test_a_damaged_key_is_in_no_error(
    cloud: SmallCloud, client: ApiClient, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(SMALL.key_variables[0], key)
    with pytest.raises(CredentialsError, match="damaged") as refused:
        list_ids(client)
    assert "secret" not in f"{refused.value.what} {refused.value.why} {refused.value.next_step}"


def test_errors_go_by_status_and_code(cloud: SmallCloud, client: ApiClient) -> None:
    cloud.change(capacity=(CloudCapacity(type="big", left=0),), quota=1)
    with pytest.raises(CapacityError):
        create(client, "big")
    create(client)
    with pytest.raises(QuotaError) as caught:
        create(client)
    assert caught.value.hint == "ask for more"
    assert "quota/machines" in caught.value.why
    cloud.change(denied=("create",))
    with pytest.raises(DeniedError):
        create(client)
    cloud.change(denied=(), expired=True)
    with pytest.raises(CredentialsError, match="not accepted"):
        list_ids(client)
    cloud.change(expired=False, failed=(CallFailure(action="create", status=502),))
    with pytest.raises(BusyError):
        create(client)


@pytest.mark.parametrize("body", [b"", b"<html>404 Not Found</html>"])
def test_a_404_that_is_not_the_clouds_own_is_no_proof_that_something_is_gone(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    class ElsewhereHandler(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), ElsewhereHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(SMALL.endpoint_variable, f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv(SMALL.key_variables[0], "k")
        with pytest.raises(ProviderError) as caught:
            ApiClient(SMALL).delete("delete the machine", "/machines/m-1")
        server.shutdown()
    assert type(caught.value) is ProviderError
    assert SMALL.endpoint_variable in caught.value.hint


def test_without_a_key_nothing_is_sent(
    cloud: SmallCloud, client: ApiClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SMALL_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CredentialsError, match="no Small Cloud key"):
        list_ids(client)
    assert cloud.calls == {}
    (tmp_path / ".small").mkdir()
    (tmp_path / ".small" / "key").write_text("api_key = the-key-of-this-test\n")
    assert list_ids(client) == []
    monkeypatch.setenv("SMALL_KEY", "another-key")
    with pytest.raises(CredentialsError):
        list_ids(client)


def test_delays_hide_new_and_ended_machines(cloud: SmallCloud, client: ApiClient) -> None:
    cloud.change(delays=CloudDelays(visible=0.4, forget=60))
    create(client)
    assert list_ids(client) == []
    cloud.change(delays=CloudDelays(forget=60))
    assert list_ids(client) == ["m-0"]


def test_what_the_description_lacks_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    cloud, client = SmallCloud(CloudScenario(boot="none")), ApiClient(SMALL)
    cloud.__enter__()
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    for body in (Misspelled(), Ordered(kind="longer than ten")):
        with pytest.raises(BusyError):
            client.post("create a machine", "/machines", Machine, body)
    for query in ({"mots": "1"}, {"most": "none"}):
        with pytest.raises(BusyError):
            client.get("list", "/machines", MachineList, query)
    with pytest.raises(BusyError):
        client.delete("delete", "/machines/x-1")
    assert cloud.instances == {}
    with pytest.raises(BusyError):
        create(client, "wrong")
    with pytest.raises(ViolationError) as caught:
        cloud.__exit__(None)
    for text in ("kindd", "is too long", "mots", "'none' is not of type", "x-1", "unheard-of"):
        assert text in caught.value.why


def test_control_requests_change_the_rehearsal_and_only_from_here(cloud: SmallCloud) -> None:
    header = {"X-Labctl-Rehearsal": "1"}
    url = f"{cloud.url}/rehearsal/set"
    done = requests.post(url, json={"switches": ["quota=0"]}, headers=header, timeout=5)
    assert done.json()["calls"] == {}
    assert cloud.scenario.quota == 0
    assert requests.post(url, json={"switches": ["quota=1"]}, timeout=5).status_code == 404
    wrong = requests.post(url, json={"switches": ["quotas=1"]}, headers=header, timeout=5)
    assert wrong.status_code == 400
    assert cloud.scenario.quota == 0


def test_an_endpoint_without_encryption_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_ENDPOINT_URL", "http://example.invalid")
    with pytest.raises(UsageError, match="not an https:// address"):
        resolve_endpoint(SMALL)


@pytest.mark.parametrize(
    ("path", "described"), [("/machines", True), ("/machines/m-1", False), ("/other", False)]
)
def test_a_path_is_in_the_description_or_not(path: str, described: bool) -> None:
    problems = OpenApiValidator(DESCRIPTION).check_request(ApiRequest(method="GET", path=path))
    assert (problems == ()) == described


def test_a_refused_reply_is_an_error_of_the_provider(cloud: SmallCloud, client: ApiClient) -> None:
    with pytest.raises(ProviderError):
        client.get("read", "/machines", Machine)
