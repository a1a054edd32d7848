"""A rehearsed account, people with homes of their own in it, and a look at all that it holds.

Fixtures are in aws_fixtures.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from lab_servers import wait_for
from warm_labctl import Command, Warm

from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.rehearsal.core.scenario import Loss

REGION = "us-east-1"
ROLE = "arn:aws:iam::123456789012:role/labctl-deadline"
LAB_YAML = """\
lab: {name}
server: {{provider: aws, gpu: auto, spot: prefer, ttl: 2h, max_ttl: 8h,
  idle: 30m, budget: 5}}
run: echo trained
"""
HOLD_S = 60.0
SSH_DEADLINE = "labctl.servers.reachability.SSH_DEADLINE_S"
GONE_DEADLINE = "labctl.servers.end_server.GONE_DEADLINE_S"
UP = ("up", "--yes")
DOWN = ("down", "--yes", "--discard")
ORPHANS = ("orphans", "--terminate", "--yes")
MADE = (
    "ImportKeyPair",
    "CreateSecurityGroup",
    "AuthorizeSecurityGroupIngress",
    "RunInstances",
    "CreateSchedule",
    "CreateTags",
)
# With several servers, there is one more of both.
MADE_BY_GANG = (*MADE, "CreatePlacementGroup")
TAKEN = ("TerminateInstances", "DeleteSecurityGroup", "DeleteKeyPair", "DeleteSchedule")
TAKEN_OF_GANG = (*TAKEN, "DeletePlacementGroup")
LIVING = ("pending", "running", "stopping", "stopped", "shutting-down")
READING = ("Describe", "Get", "List")


@dataclass
class AwsLab:
    """One person's lab: a directory and a home, and `labctl` in it."""

    bed: Bed
    root: Path
    environ: dict[str, str]

    @property
    def home(self) -> Path:
        return Path(self.environ["HOME"])

    @property
    def state(self) -> Path:
        return self.home / ".local" / "state" / "labctl"

    @property
    def id(self) -> str:
        return str(json.loads((self.root / ".labctl" / "lab.json").read_text())["id"])

    def start(self, *words: str, **other: Any) -> Command:
        return self.bed.warm.start(*words, directory=self.root, environ=self.environ, **other)

    def labctl(self, *words: str, code: int | None = 0, **other: Any) -> str:
        """What it said, once it has ended with `code` (None: any)."""
        command = self.start(*words, **other)
        ended = command.wait()
        assert code is None or ended == code, f"exit {ended}:\n{command.said}"
        return command.said

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.labctl(*words, "--json", code=code))
        return found

    def up_until_ssh(self, **other: Any) -> str:
        """`up` as far as it comes where nobody answers, then kill -9; what it said."""
        described = self.home / ".ssh" / "config"
        described.unlink(missing_ok=True)
        command = self.start(*UP, **other)
        wait_for(lambda: described.exists() or command.done.is_set())
        command.kill()
        assert command.wait() == -signal.SIGKILL, command.said
        return command.said

    def killed_before(self, effect: str, folder: Path) -> None:
        """`up` killed before this effect on this machine; see Warm.start."""
        command = self.start(*UP, trace=folder / "last", last=effect)
        assert command.wait() == -signal.SIGKILL, f"no {effect}:\n{command.said}"

    def become_gang(self, count: int = 2) -> None:
        """lab.yaml asks for so many servers."""
        text = (
            (self.root / "lab.yaml").read_text().replace("gpu: auto", f"gpu: auto, count: {count}")
        )
        (self.root / "lab.yaml").write_text(text.replace("budget: 5", "budget: 20"))

    def forget(self) -> None:
        """The state is gone."""
        shutil.rmtree(self.state, ignore_errors=True)


@dataclass
class Bed:
    rehearsal: Rehearsal
    warm: Warm
    folder: Path
    scenario: Scenario
    count: int = 0
    clients: dict[str, Any] = field(default_factory=dict)

    def lab(self, name: str = "digits", **environ: str) -> AwsLab:
        """A lab of somebody else's each time; what AWS offers is kept for all of them."""
        self.count += 1
        home = self.folder / f"{self.count}"
        root = home / name
        root.mkdir(parents=True)
        (root / "lab.yaml").write_text(LAB_YAML.format(name=name))
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        around = {
            **kept,
            **self.rehearsal.environment,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "LABCTL_SERVER_AWS_SCHEDULER_ROLE": ROLE,
            "LABCTL_SERVER_AWS_SETTLE": "1s",
            **environ,
        }
        return AwsLab(self, root, around)

    def client(self, service: str) -> Any:
        if service not in self.clients:
            self.clients[service] = boto3.client(
                service,
                region_name=REGION,
                endpoint_url=self.rehearsal.url,
                aws_access_key_id="AKIALOOKSON",
                aws_secret_access_key="secret",
            )
        return self.clients[service]

    def living(self) -> list[str]:
        """The instances that have not ended for good."""
        return [one for one, state in self.rehearsal.instances.items() if state in LIVING]

    def left(self) -> list[str]:
        """All that the account holds of anybody's, whatever tags it bears."""
        with self.set(expired=False, denied=(), throttle=(), lost=(), dropped=()):
            return self._left()

    def _left(self) -> list[str]:
        ec2, scheduler = self.client("ec2"), self.client("scheduler")
        found = [f"instance {one}" for one in self.living()]
        found += [f"volume {one['VolumeId']}" for one in ec2.describe_volumes()["Volumes"]]
        interfaces = ec2.describe_network_interfaces()["NetworkInterfaces"]
        found += [f"network interface {one['NetworkInterfaceId']}" for one in interfaces]
        groups = ec2.describe_security_groups()["SecurityGroups"]
        found += [f"group {one['GroupName']}" for one in groups if one["GroupName"] != "default"]
        placed = ec2.describe_placement_groups()["PlacementGroups"]
        found += [f"placement group {one['GroupName']}" for one in placed]
        found += [f"key {one['KeyName']}" for one in ec2.describe_key_pairs()["KeyPairs"]]
        return found + [
            f"schedule {one['Name']}" for one in scheduler.list_schedules()["Schedules"]
        ]

    def placed(self) -> dict[str, str]:
        """The placement group of each living instance."""
        shown = self.client("ec2").describe_instances(InstanceIds=self.living())["Reservations"]
        instances = [one for reservation in shown for one in reservation["Instances"]]
        return {one["InstanceId"]: one["Placement"]["GroupName"] for one in instances}

    def tagged(self, instance_id: str) -> dict[str, str]:
        found = self.client("ec2").describe_instances(InstanceIds=[instance_id])
        tags = found["Reservations"][0]["Instances"][0]["Tags"]
        return {tag["Key"]: tag["Value"] for tag in tags}

    @contextmanager
    def set(self, **scenario: Any) -> Iterator[None]:
        """Some of the scenario differs for a while."""
        before = {key: getattr(self.rehearsal.scenario, key) for key in scenario}
        self.rehearsal.change(**scenario)
        try:
            yield
        finally:
            self.rehearsal.change(**before)

    @contextmanager
    def changes(self) -> Iterator[Counter[str]]:
        """Counts the calls that change something, or may."""
        before = Counter(self.rehearsal.calls)
        counted: Counter[str] = Counter()
        yield counted
        called = Counter(self.rehearsal.calls) - before
        counted.update({k: n for k, n in called.items() if not k.startswith(READING)})

    def killed_at(
        self, lab: AwsLab, words: tuple[str, ...], kind: str, action: str, skip: int = 0
    ) -> None:
        """kill -9 while the call is on its way ("dropped") or its answer is ("lost")."""
        with self.set(**{kind: (Loss(action=action, hold=HOLD_S, skip=skip),)}):
            held = self.rehearsal.held_calls.get(action, 0)
            command = lab.start(*words)
            wait_for(
                lambda: self.rehearsal.held_calls.get(action, 0) > held or command.done.is_set()
            )
            command.kill()
            assert command.wait() == -signal.SIGKILL, f"no {action}:\n{command.said}"

    def reset(self) -> None:
        self.rehearsal.change(
            **{key: getattr(self.scenario, key) for key in Scenario.__struct_fields__}
        )
