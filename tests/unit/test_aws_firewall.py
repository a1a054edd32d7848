"""Who may reach a server: the lab's security group, and the caller's own address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from aws_cloud import REGION, Cloud
from aws_provider import a_request, a_server, an_offer, context, provider, with_market

from labctl.errors import ConnectError
from labctl.model import Server
from labctl.providers.aws import AwsProvider, AwsSettings


class Mirror:
    """Answers with an address, as a service on the Internet does."""

    def __init__(self) -> None:
        self.answer = "203.0.113.7\n"
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(mirror.answer.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    made = Mirror()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
def aws(cloud: Cloud, mirror: Mirror, tmp_path: Path) -> AwsProvider:
    with_market(cloud)
    return provider(tmp_path, AwsSettings(address_from=mirror.url))


def rules(server: Server) -> dict[str, str]:
    """Network -> whose, of every rule of the lab's group."""
    ec2 = boto3.client("ec2", region_name=REGION)
    [group] = ec2.describe_security_groups(
        Filters=[{"Name": "group-name", "Values": [f"labctl-{server.lab_id}"]}]
    )["SecurityGroups"]
    ec2.close()
    found = {}
    for rule in group["IpPermissions"]:
        assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 22, 22)
        for entry in (*rule["IpRanges"], *rule["Ipv6Ranges"]):
            found[entry.get("CidrIp") or entry["CidrIpv6"]] = entry["Description"]
    return found


def test_only_the_callers_address_is_let_in(aws: AwsProvider, tmp_path: Path) -> None:
    server = a_server(aws, tmp_path)
    assert rules(server) == {"203.0.113.7/32": "labctl ada"}
    assert aws.admit(server.id) == ""


def test_address_that_changed_replaces_the_old_one(
    aws: AwsProvider, mirror: Mirror, tmp_path: Path
) -> None:
    server = a_server(aws, tmp_path)
    mirror.answer = "203.0.113.8"
    assert aws.admit(server.id) == "203.0.113.8/32"
    assert rules(server) == {"203.0.113.8/32": "labctl ada"}


def test_version_six_is_an_address_too(aws: AwsProvider, mirror: Mirror, tmp_path: Path) -> None:
    mirror.answer = "2001:db8::7"
    assert rules(a_server(aws, tmp_path)) == {"2001:db8::7/128": "labctl ada"}


def test_other_people_of_the_lab_keep_their_way_in(
    aws: AwsProvider, mirror: Mirror, tmp_path: Path
) -> None:
    server = a_server(aws, tmp_path)
    mirror.answer = "198.51.100.9"
    bob = AwsProvider(aws.settings, context(tmp_path, "bob"))
    assert bob.admit(server.id) == "198.51.100.9/32"
    assert rules(server) == {"203.0.113.7/32": "labctl ada", "198.51.100.9/32": "labctl bob"}


def test_given_networks_need_no_address(cloud: Cloud, tmp_path: Path) -> None:
    with_market(cloud)
    settings = AwsSettings(
        ssh_from=("192.0.2.0/24", "198.51.100.0/24"), address_from="http://[::1]:9/"
    )
    aws = provider(tmp_path, settings)
    server = a_server(aws, tmp_path)
    assert set(rules(server)) == {"192.0.2.0/24", "198.51.100.0/24"}
    fewer = msgspec.structs.replace(settings, ssh_from=("192.0.2.0/24",))
    assert provider(tmp_path, fewer).admit(server.id) == ""
    assert set(rules(server)) == {"192.0.2.0/24"}


@pytest.mark.parametrize(
    "answer", ["", "<html>", "999.1.1.1", "203.0.113.7 198.51.100.1", "x" * 900]
)
def test_answer_that_is_no_address_lets_nobody_in(
    aws: AwsProvider, mirror: Mirror, tmp_path: Path, answer: str
) -> None:
    mirror.answer = answer
    with pytest.raises(ConnectError) as raised:
        a_server(aws, tmp_path)
    assert "ssh_from" in raised.value.hint
    assert aws.leftovers() == []


def test_two_at_once_share_one_group(aws: AwsProvider, tmp_path: Path) -> None:
    request = a_request(aws, tmp_path)
    aws.create(an_offer(), request)
    again = provider(tmp_path, aws.settings)
    again.create(an_offer(), msgspec.structs.replace(request, token="other"))
    kinds = [resource.kind for resource in aws.leftovers()]
    assert kinds.count("security-group") == 1
    assert kinds.count("key-pair") == 1


def test_key_of_the_lab_is_renewed_where_it_is_another_one(
    aws: AwsProvider, cloud: Cloud, tmp_path: Path
) -> None:
    request = a_request(aws, tmp_path)
    aws.create(an_offer(), request)
    (tmp_path / "other").mkdir()
    other = a_request(aws, tmp_path / "other")
    again = provider(tmp_path, aws.settings)
    again.create(an_offer(), msgspec.structs.replace(other, lab_id=request.lab_id))
    ec2 = boto3.client("ec2", region_name=REGION)
    [key] = ec2.describe_key_pairs(IncludePublicKey=True)["KeyPairs"]
    ec2.close()
    assert key["PublicKey"].split()[:2] == other.public_key.split()[:2]
    assert cloud.seen["ImportKeyPair"] == 3
