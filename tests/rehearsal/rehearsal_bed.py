"""What tests of the rehearsal do with it: clients, a user-data, a login."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from labctl.providers.local import engine
from labctl.rehearsal.aws import Rehearsal
from labctl.rehearsal.core.images import Building
from labctl.servers.host_keys import ensure_key_pair

ROOT = Path(__file__).parents[2]
MADE_HERE = "labctl-base:bookworm"
DLAMI = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
ONCE = Config(retries={"total_max_attempts": 1}, read_timeout=20)


def building(base_image: str) -> Building:
    """Of this checkout. "" is the base made here where there is one, else the registry's."""
    if not base_image:
        with engine.connect() as docker:
            base_image = MADE_HERE if docker.images.list(name=MADE_HERE) else ""
    return Building(data_dir=ROOT, base_image=base_image, progress=lambda text, done, of: None)


def client(rehearsal: Rehearsal, service: str = "ec2", region: str = "us-east-1") -> Any:
    """A client that asks once, so that what was broken is seen."""
    return boto3.client(
        service,
        endpoint_url=rehearsal.url,
        aws_access_key_id="AKIAEXAMPLE",
        aws_secret_access_key="secret",
        region_name=region,
        config=ONCE,
    )


def ami_of(rehearsal: Rehearsal, region: str = "us-east-1") -> str:
    answer = client(rehearsal, "ssm", region).get_parameter(Name=DLAMI)
    return str(answer["Parameter"]["Value"])


def wait_for(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true value of `condition`, which may start a process each time."""
    end = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < end, f"not within {timeout_s} s"
        time.sleep(max(0.02, 2 * (now - began)))


class RehearsalSetup:
    """An account that is ready: a key pair, a group that lets the caller in, and a login."""

    def __init__(self, rehearsal: Rehearsal, directory: Path) -> None:
        self.rehearsal = rehearsal
        self.ec2 = client(rehearsal)
        self.directory = directory
        self.public_key = ensure_key_pair(directory / "user_key")
        self.host_key = ensure_key_pair(directory / "host_key")
        self.ec2.import_key_pair(KeyName="lab", PublicKeyMaterial=self.public_key.encode())
        self.group = self.ec2.create_security_group(GroupName="lab", Description="tests")["GroupId"]
        self.ssh_rule = {
            "GroupId": self.group,
            "IpPermissions": [
                {
                    "IpProtocol": "tcp",
                    "FromPort": 22,
                    "ToPort": 22,
                    "IpRanges": [{"CidrIp": f"{rehearsal.caller}/32"}],
                }
            ],
        }
        self.ec2.authorize_security_group_ingress(**self.ssh_rule)
        self.ami = ami_of(rehearsal)

    def run(self, **other: Any) -> dict[str, Any]:
        """RunInstances of one machine; keywords over the usual ones, None leaves one out."""
        tags = [{"Key": "labctl", "Value": "1"}]
        kinds = ("instance", "volume", "network-interface")
        asked = {
            "ImageId": self.ami,
            "MinCount": 1,
            "MaxCount": 1,
            "InstanceType": "g4dn.xlarge",
            "KeyName": "lab",
            "SecurityGroupIds": [self.group],
            "UserData": self.user_data(),
            "InstanceInitiatedShutdownBehavior": "terminate",
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
            **other,
        }
        call = {key: value for key, value in asked.items() if value is not None}
        instance: dict[str, Any] = self.ec2.run_instances(**call)["Instances"][0]
        return instance

    def described(self, instance_id: str) -> dict[str, Any]:
        answer = self.ec2.describe_instances(InstanceIds=[instance_id])
        instance: dict[str, Any] = answer["Reservations"][0]["Instances"][0]
        return instance

    def user_data(self) -> str:
        """A multipart as labctl's: a boothook, then the keys and the name."""
        private = (self.directory / "host_key").read_text()
        indented = "".join(f"    {line}\n" for line in private.splitlines())
        config = (
            "#cloud-config\n"
            "hostname: labctl-digits\n"
            f"ssh_authorized_keys: ['{self.public_key}']\n"
            f"ssh_keys:\n  ed25519_private: |\n{indented}"
            f"  ed25519_public: {self.host_key}\n"
        )
        hook = "#!/bin/sh\nshutdown -P +120\necho armed >> /var/log/hook\n"
        whole = MIMEMultipart(boundary="labctl")
        for text, kind in ((hook, "cloud-boothook"), (config, "cloud-config")):
            whole.attach(MIMEText(text, kind, "us-ascii"))
        return whole.as_string()

    def running(self, **other: Any) -> Machine:
        """A machine that accepts a login."""
        instance_id = self.run(**other)["InstanceId"]
        self.rehearsal.wait(instance_id, "running")
        machine = Machine(self, instance_id)
        machine.wait_for_login()
        return machine


class Machine:
    """One instance, reached over SSH with its host key pinned."""

    def __init__(self, setup: RehearsalSetup, instance_id: str) -> None:
        self.setup = setup
        self.id = instance_id

    @property
    def address(self) -> str:
        return str(self.setup.described(self.id)["PublicIpAddress"])

    def ssh(self, line: str, timeout_s: int = 5) -> subprocess.CompletedProcess[str]:
        known_hosts = self.setup.directory / "known_hosts"
        known_hosts.write_text(f"lab {self.setup.host_key}\n")
        options = {
            "UserKnownHostsFile": known_hosts,
            "StrictHostKeyChecking": "yes",
            "HostKeyAlias": "lab",
            "BatchMode": "yes",
            "ConnectTimeout": timeout_s,
            "LogLevel": "ERROR",
        }
        words = [word for pair in options.items() for word in ("-o", "{}={}".format(*pair))]
        key = ["-i", str(self.setup.directory / "user_key")]
        return subprocess.run(
            ["ssh", "-F", "none", *words, *key, f"ubuntu@{self.address}", line],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def wait_for_login(self) -> None:
        wait_for(lambda: self.ssh("true", timeout_s=1).returncode == 0)

    def opens(self) -> bool:
        """Whether the SSH port can be reached within a second."""
        try:
            with socket.create_connection((self.address, 22), timeout=1):
                return True
        except OSError:
            return False

    def metadata(self, path: str) -> str:
        """What the machine reads of its metadata with a token, "" where there is nothing."""
        line = (
            "T=$(curl -sX PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60'"
            " http://169.254.169.254/latest/api/token) &&"
            ' curl -sf -H "X-aws-ec2-metadata-token: $T"'
            f" http://169.254.169.254/latest/{path}"
        )
        return self.ssh(line).stdout
