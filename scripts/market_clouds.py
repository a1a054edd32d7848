"""The six simulated clouds of the demonstration, each a `labctl rehearse` of its own.

`read_remains` asks each cloud's own API, as its console would, and not labctl.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import requests
from google.auth.transport.requests import AuthorizedSession
from google.oauth2 import service_account

from labctl.providers.local import engine, image
from labctl.rehearsal.core.images import default_building

LABCTL = str(Path(sys.executable).with_name("labctl"))
ROOT = Path(__file__).parents[1]
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
MACHINE_FILES = (
    ROOT / "scripts" / "market-machine" / "Dockerfile",
    ROOT / "tests" / "gpu-standin" / "nvidia-smi",
    ROOT / "templates" / "image-classifier" / "requirements.txt",
)
START_S = 900.0  # the first start builds the machines' image
ASK_S = 30.0
NOT_FOUND = 404
IS_READY = "is running: paste"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
AZURE_PARTS = {
    "compute/virtualMachines": "2024-07-01",
    "compute/disks": "2024-03-02",
    "network/networkInterfaces": "2024-05-01",
    "network/publicIPAddresses": "2024-05-01",
    "network/networkSecurityGroups": "2024-05-01",
    "network/virtualNetworks": "2024-05-01",
}


@dataclass(frozen=True)
class CloudPlan:
    """How a cloud is simulated. `gpu` is the GPU that its machines seem to have, "" for records
    only: such machines never boot. `url_variable` is the one that has the API's address.
    """

    name: str
    url_variable: str
    gpu: str = ""


PLANS = (
    CloudPlan("aws", "AWS_ENDPOINT_URL", "Tesla T4|15360"),
    CloudPlan("azure", "LABCTL_SERVER_AZURE_ENDPOINT_URL", "Tesla T4|15360"),
    CloudPlan("gcp", "LABCTL_SERVER_GCP_ENDPOINT_URL"),
    CloudPlan("lambda", "LAMBDA_ENDPOINT_URL"),
    CloudPlan("runpod", "RUNPOD_ENDPOINT_URL"),
    CloudPlan("vast", "VAST_URL", "NVIDIA A100 80GB PCIe|81920"),
)


@dataclass(frozen=True)
class SimulatedCloud:
    """A simulated cloud that runs, and the control requests that docs/rehearsal.md describes."""

    name: str
    url: str
    variable: str

    def send(self, name: str, body: dict[str, object], *, quiet: bool = False) -> dict[str, Any]:
        """Send a control request, and show it as a person would type it."""
        text = json.dumps(body)
        if not quiet:
            lines = (
                "curl -H 'X-Labctl-Rehearsal: 1'",
                f"-d '{text}'",
                f"${self.variable}/rehearsal/{name}",
            )
            print("\n$ " + " \\\n    ".join(lines), flush=True)
        address = f"{self.url}/rehearsal/{name}"
        reply = requests.post(address, text, headers={"X-Labctl-Rehearsal": "1"}, timeout=ASK_S)
        reply.raise_for_status()
        state: dict[str, Any] = reply.json()
        return state

    def read_state(self) -> dict[str, Any]:
        return self.send("state", {}, quiet=True)

    def list_alive(self) -> list[str]:
        ended = ("ended", "terminated")
        return [one for one, state in self.read_state()["instances"].items() if state not in ended]


Clouds = dict[str, SimulatedCloud]


@contextmanager
def rehearse_clouds(folder: Path) -> Iterator[Clouds]:
    """Run all simulated clouds, export their variables, and end them with all machines."""
    images = {gpu: build_machine(gpu) for gpu in {plan.gpu for plan in PLANS} if gpu}
    with ExitStack() as stack:
        processes = {
            plan.name: stack.enter_context(_start(plan, images.get(plan.gpu, ""), folder))
            for plan in PLANS
        }
        for plan in PLANS:
            _await_start(plan, processes[plan.name], folder)
            _export(folder / f"{plan.name}.env")
        yield {
            plan.name: SimulatedCloud(plan.name, os.environ[plan.url_variable], plan.url_variable)
            for plan in PLANS
        }


def build_machine(gpu: str) -> str:
    """Build the image of a machine that seems to have this GPU ("NAME|MIB"); return its name.

    It has PyTorch, from the wheels of scripts/setup or, with a registry, from PyTorch's index.
    """
    building = default_building()
    source = building.data_dir / "images" / "lab-server"
    wheels = os.environ.get("LABCTL_WHEELHOUSE", "")
    with engine.connect() as docker, tempfile.TemporaryDirectory() as folder:
        server = image.ensure(docker, source, building.base_image, building.progress)
        for file in MACHINE_FILES:
            shutil.copy(file, folder)
        tag = f"labctl-demo-machine:{image.content_hash(Path(folder), f'{server} {gpu}')}"
        if image.has_image(docker, tag):
            return tag
        print("building a machine with PyTorch; this takes some minutes, once", flush=True)
        (Path(folder) / "wheels").mkdir()
        if wheels:
            shutil.copytree(wheels, Path(folder) / "wheels", dirs_exist_ok=True)
        arguments = {
            "LAB_SERVER": server,
            "PIP_OPTIONS": "--no-index --find-links /wheels" if wheels else CPU_INDEX,
            "GPU": gpu.partition("|")[0],
            "GPU_MIB": gpu.partition("|")[2],
        }
        docker.images.build(path=folder, tag=tag, buildargs=arguments, rm=True)
    return tag


@contextmanager
def _start(plan: CloudPlan, machine_image: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ["rehearse", plan.name]
    words += ["--set", f"image={machine_image}"] if machine_image else ["--boot", "none"]
    print(f"$ labctl {shlex.join(words)} &", flush=True)
    with (
        (folder / f"{plan.name}.env").open("wb") as exports,
        (folder / f"{plan.name}.log").open("wb") as log,
        subprocess.Popen([LABCTL, *words], cwd=folder, stdout=exports, stderr=log) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def _await_start(plan: CloudPlan, process: subprocess.Popen[bytes], folder: Path) -> None:
    log = folder / f"{plan.name}.log"
    until_s = time.monotonic() + START_S
    while IS_READY not in log.read_text():
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"the simulation of {plan.name} did not start:\n{log.read_text()}")
        time.sleep(0.2)


def _export(exports: Path) -> None:
    """Do what a person does with the lines that `labctl rehearse` prints."""
    for line in exports.read_text().splitlines():
        word, *names = shlex.split(line)
        for name in names:
            if word == "unset":
                os.environ.pop(name, None)
            else:
                variable, _, text = name.partition("=")
                os.environ[variable] = text


def read_remains(clouds: Clouds) -> dict[str, list[str]]:
    """Ask each cloud what exists there: machines, disks, addresses, networks and keys."""
    return {name: sorted(READERS[name](cloud.url)) for name, cloud in clouds.items()}


def _read_aws(url: str) -> list[str]:
    ec2 = boto3.client("ec2", endpoint_url=url)
    pages = ec2.describe_instances()["Reservations"]
    machines = [one for page in pages for one in page["Instances"]]
    groups = ec2.describe_security_groups()["SecurityGroups"]
    return [
        *(one["InstanceId"] for one in machines if one["State"]["Name"] != "terminated"),
        *(one["VolumeId"] for one in ec2.describe_volumes()["Volumes"]),
        *(one["GroupName"] for one in groups if one["GroupName"] != "default"),
        *(one["KeyName"] for one in ec2.describe_key_pairs()["KeyPairs"]),
        *(one["AllocationId"] for one in ec2.describe_addresses()["Addresses"]),
    ]


def _read_azure(url: str) -> list[str]:
    secret = {"X-IDENTITY-HEADER": os.environ["IDENTITY_HEADER"]}
    query = {"resource": "https://management.azure.com/", "api-version": "2019-08-01"}
    token = _get(os.environ["IDENTITY_ENDPOINT"], secret, query)["access_token"]
    headers = {"Authorization": f"Bearer {token}"}
    group = f"{url}/subscriptions/{os.environ['AZURE_SUBSCRIPTION_ID']}/resourceGroups/labctl"
    # What was never used has no resource group.
    if requests.get(group, query, headers=headers, timeout=ASK_S).status_code == NOT_FOUND:
        return []
    return [
        one["id"].rpartition("/providers/")[2]
        for kind, version in AZURE_PARTS.items()
        for one in _get(
            f"{group}/providers/Microsoft.{kind[0].upper()}{kind[1:]}",
            headers,
            {"api-version": version},
        )["value"]
    ]


def _read_gcp(url: str) -> list[str]:
    credentials = service_account.Credentials.from_service_account_file(
        os.environ["GOOGLE_APPLICATION_CREDENTIALS"], scopes=[CLOUD_PLATFORM]
    )
    session = AuthorizedSession(credentials)
    project = f"{url}/compute/v1/projects/{os.environ['GOOGLE_CLOUD_PROJECT']}"
    found = [
        one["name"]
        for kind in ("instances", "disks")
        for zone in session.get(f"{project}/aggregated/{kind}").json().get("items", {}).values()
        for one in zone.get(kind, [])
    ]
    rules = session.get(f"{project}/global/firewalls").json().get("items", [])
    return found + [one["name"] for one in rules if not one["name"].startswith("default-")]


def _read_lambda(url: str) -> list[str]:
    headers = {"Authorization": f"Bearer {os.environ['LAMBDA_API_KEY']}"}
    kinds = ("instances", "ssh-keys", "file-systems")
    return [
        f"{kind} {one['id']}"
        for kind in kinds
        for one in _get(f"{url}/api/v1/{kind}", headers)["data"]
        if one.get("status") != "terminated"
    ]


def _read_runpod(url: str) -> list[str]:
    headers = {"Authorization": f"Bearer {os.environ['RUNPOD_API_KEY']}"}
    return [
        str(one)
        for kind in ("pods", "network-volumes", "account/ssh-keys")
        for listed in _get(f"{url}/v2/{kind}", headers).values()
        for one in listed
    ]


def _read_vast(url: str) -> list[str]:
    headers = {"Authorization": f"Bearer {os.environ['VAST_API_KEY']}"}
    machines = _get(f"{url}/api/v1/instances", headers)["instances"]
    return [str(one["id"]) for one in (*machines, *_get(f"{url}/api/v0/ssh", headers))]


def _get(address: str, headers: dict[str, str], query: dict[str, str] | None = None) -> Any:
    reply = requests.get(address, query, headers=headers, timeout=ASK_S)
    reply.raise_for_status()
    return reply.json()


READERS: dict[str, Callable[[str], list[str]]] = {
    "aws": _read_aws,
    "azure": _read_azure,
    "gcp": _read_gcp,
    "lambda": _read_lambda,
    "runpod": _read_runpod,
    "vast": _read_vast,
}
