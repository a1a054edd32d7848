"""The metadata service's client, and those who use it: a grading server's check, a kept disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from labctl.agent.host.imds import MOST_BYTES, Imds
from labctl.agent.reply import Failure
from labctl.agent.sandbox import grading
from labctl.agent.watchdog import disk

ROLES = f"/latest/{grading.ROLES}"


class Service(BaseHTTPRequestHandler):
    """Serves `pages`. `token` is what a PUT returns; a service of version 1 does not check it."""

    url: str
    pages: dict[str, bytes]
    token: bytes | None
    checks_token: bool
    broken: str  # what is wrong with each answer to a GET

    def do_PUT(self) -> None:
        if self.broken.isdecimal() and self.token is None:
            self.send_error(int(self.broken))
        else:
            self.reply(self.token if self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        sent = self.headers.get("X-aws-ec2-metadata-token", "")
        if self.broken.isdecimal():
            self.send_error(int(self.broken))
        elif self.checks_token and sent.encode() != self.token:
            self.send_error(401)
        else:
            self.reply(self.pages.get(self.path))

    def reply(self, body: bytes | None) -> None:
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        missing = 9 if self.broken == "cut off" and self.command == "GET" else 0
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        return


@pytest.fixture
def service() -> Iterator[type[Service]]:
    Service.pages, Service.token, Service.checks_token = {}, b"secret", True
    Service.broken = ""
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        Service.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield Service
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("token", [b"secret", None, b"<html>\r\nnot a token", b""])
def test_a_role_is_found_with_and_without_tokens(
    service: type[Service], token: bytes | None
) -> None:
    service.token, service.checks_token = token, token == b"secret"
    assert grading._get_role(Imds(service.url)) == ""
    service.pages[ROLES] = b"admin\nother\n"
    assert grading._get_role(Imds(service.url)) == "admin"


@pytest.mark.parametrize("broken", ["cut off", "401", "429", "500", "503"])
def test_a_service_that_does_not_say_it_may_have_a_role(
    service: type[Service], broken: str
) -> None:
    """A machine that grants a role runs no submission, whatever its service's state."""
    service.broken, service.pages[ROLES] = broken, b"admin"
    assert grading._get_role(Imds(service.url)) == grading.UNKNOWN_ROLE


@pytest.mark.parametrize("status", ["400", "403", "404"])
def test_a_service_that_refuses_grants_no_role(service: type[Service], status: str) -> None:
    service.broken = status
    assert grading._get_role(Imds(service.url)) == ""


def test_a_proxy_that_answers_for_every_address_is_no_such_service(service: type[Service]) -> None:
    service.broken, service.token = "503", None
    assert grading._get_role(Imds(service.url)) == ""


def test_a_machine_without_the_service_has_no_role() -> None:
    assert grading._get_role(Imds("http://127.0.0.1:9")) == ""


def test_a_response_without_end_is_not_read(service: type[Service]) -> None:
    service.pages["/latest/meta-data/x"] = bytes(MOST_BYTES + 1)
    imds = Imds(service.url)
    with pytest.raises(OSError, match="oversized"):
        imds.get("meta-data/x")
    service.pages["/latest/meta-data/x"] = b"y" * MOST_BYTES
    assert imds.get("meta-data/x").body == "y" * MOST_BYTES


def test_a_page_that_is_missing_is_a_reason_and_no_crash(service: type[Service]) -> None:
    with pytest.raises(Failure, match="does not give its instance-id"):
        disk._read_metadata(Imds(service.url), "instance-id")
