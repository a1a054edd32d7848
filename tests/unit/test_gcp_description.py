"""Requests are held to Google's own description of Compute Engine."""

from __future__ import annotations

import pytest

from labctl.rehearsal.core.validation import ApiRequest
from labctl.rehearsal.gcp.description import DiscoveryValidator, find_document

ZONE = "/compute/v1/projects/my-project/zones/us-central1-a"


@pytest.fixture(scope="module")
def google() -> DiscoveryValidator:
    document = find_document()
    if document is None:
        pytest.skip("google-api-python-client is not installed")
    return DiscoveryValidator.load(document, {"compute.instances.insert", "compute.instances.get"})


def insert(body: bytes, **query: tuple[str, ...]) -> ApiRequest:
    return ApiRequest(method="POST", path=f"{ZONE}/instances", query=query, body=body)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"name": "vm-1", "scheduling": {"maxRunDuration": {"seconds": "60"}}}', ""),
        (b'{"name": "vm-1", "machine_type": "n1"}', "'machine_type' was unexpected"),
        (b'{"name": "VM 1"}', "does not match"),
        (b'{"name": "vm-1", "scheduling": {"provisioningModel": "CHEAP"}}', "is not one of"),
        (b'{"name": "vm-1", "scheduling": {"maxRunDuration": 60}}', "is not of type 'object'"),
        (b'{"name": "vm-1", "labels": {"a": 1}}', "is not of type 'string'"),
        (b"{", "the body is not JSON"),
    ],
)
def test_a_body(google: DiscoveryValidator, body: bytes, problem: str) -> None:
    problems = google.check_request(insert(body))
    assert problem in "".join(problems)
    assert bool(problems) == bool(problem)


def test_parameters(google: DiscoveryValidator) -> None:
    body = b'{"name": "vm-1"}'
    assert google.check_request(insert(body, requestId=("1",))) == ()
    [problem] = google.check_request(insert(body, request_id=("1",)))
    assert "unknown query parameter request_id" in problem
    bad = ApiRequest(method="GET", path="/compute/v1/projects/P_1/zones/us-a/instances/vm-1")
    assert "parameter project" in "".join(google.check_request(bad))


def test_a_method_that_is_not_there(google: DiscoveryValidator) -> None:
    request = ApiRequest(method="PUT", path=f"{ZONE}/instances")
    assert "is not in the description" in "".join(google.check_request(request))


def test_a_reply(google: DiscoveryValidator) -> None:
    request = ApiRequest(method="GET", path=f"{ZONE}/instances/vm-1")
    assert google.check_reply(request, 200, b'{"name": "vm-1", "status": "RUNNING"}') == ()
    assert google.check_reply(request, 200, b'{"status": "AWAKE"}') != ()
    assert google.check_reply(request, 404, b"") == ()
