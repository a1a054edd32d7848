"""Real lab servers for tests: the product's own image and provider, on this machine's engine.

Fixtures are in conftest.py: `lab_server` and `gpu_server` are shared by a whole session (leave them
as found), `start_lab_server` makes one to break.
"""

from __future__ import annotations

import io
import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sshd_container
from docker.errors import APIError

from labctl.model import CreateServerRequest, Endpoint, Need, Server
from labctl.providers import ProviderContext
from labctl.providers.local import LocalProvider, LocalSettings, cache, engine, image
from labctl.servers.host_keys import ensure_key_pair

ROOT = Path(__file__).parents[2]
GPU_CONTEXT = ROOT / "tests" / "gpu-standin"
CLOCK_CONTEXT = ROOT / "tests" / "clock-standin"
GPU_SETTINGS = {"extra_capabilities": ("SYS_PTRACE",)}
_END = "~that was all~"
MADE_BY_SCRIPT = "labctl-base:bookworm"
TEST_LABEL = "labctl.test"
PID_LABEL = "labctl.test-pid"
READY_DEADLINE_S = 300.0
PYTEST_DOCKERFILE = """
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pytest \\
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
"""
SMALL_DOCKERFILE = """
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends busybox-static

FROM scratch
COPY --from=0 /bin/busybox /bin/busybox
RUN ["/bin/busybox", "mkdir", "-p", "/usr/bin", "/usr/sbin", "/sbin", "/tmp"]
RUN ["/bin/busybox", "--install", "-s"]
"""


def base_image() -> str:
    """What the server's image stands on: the variable's, one made by scripts/base-image, or the
    registry's."""
    if chosen := os.environ.get("LABCTL_BASE_IMAGE"):
        return chosen
    with engine.connect() as docker:
        found = docker.images.list(name=MADE_BY_SCRIPT)
    return MADE_BY_SCRIPT if found else "debian:bookworm-slim"


def build_server_image(base: str) -> str:
    """The lab server's image, built if it is not there."""
    around = context(base)
    source = around.data_dir / "images" / "lab-server"
    with engine.connect() as client:
        return image.ensure(client, source, base, around.progress)


def build_gpu_image(server_image: str) -> str:
    """The same with a stand-in for two GPUs."""
    return build_on(server_image, "labctl-gpu-standin", GPU_CONTEXT)


def build_clock_image(server_image: str) -> str:
    """The same with a clock that can be set."""
    return build_on(server_image, "labctl-clock-standin", CLOCK_CONTEXT)


def build_on(server_image: str, name: str, source: Path) -> str:
    """The image `name` of a Dockerfile in `source` that stands on a lab server's image."""
    tag = f"{name}:{server_image.rpartition(':')[2]}"
    with engine.connect() as client:
        client.images.build(
            path=str(source), tag=tag, buildargs={"LAB_SERVER": server_image}, rm=True
        )
    return tag


def image_with_pytest() -> str:
    """Python with pytest, for the tests of an assignment."""
    return sshd_container.build("labctl-test-pytest:1", PYTEST_DOCKERFILE)


def small_image() -> str:
    """Two megabytes with a shell, for what any container does: it is with a server in no time."""
    return sshd_container.build("labctl-test-small:1", SMALL_DOCKERFILE)


def context(base: str, owner: str = "tests") -> ProviderContext:
    """`owner` decides whose pool of cached layers is used."""

    def unexpected(*_: Any) -> Any:
        raise AssertionError("the local provider needs no connection")

    return ProviderContext(
        data_dir=ROOT,
        owner=owner,
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        base_image=base,
    )


def wait_for(condition: Callable[[], Any], deadline_s: float = READY_DEADLINE_S) -> Any:
    """The first true value of `condition`.

    Between two looks it pauses twice as long as a look took, or a tenth of what it has waited: most
    looks start a process or two, and what is waited for would wait for them on two cores.
    """
    start = time.monotonic()
    end = start + deadline_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < end, f"not within {deadline_s} s"
        time.sleep(min(1.0, max(0.05, 2 * (now - began), (now - start) / 10)))


@dataclass(frozen=True)
class LabServer:
    """One running server. `known_hosts` pins its key; `server.endpoint.identity` opens it."""

    provider: LocalProvider
    request: CreateServerRequest
    server: Server
    known_hosts: Path

    @property
    def endpoint(self) -> Endpoint:
        """As it is now: the port changes when the server restarts."""
        return self.found().endpoint

    def found(self) -> Server:
        found = self.provider.find(self.server.id)
        assert found is not None, f"{self.server.id} is gone"
        return found

    def ssh_words(self, *options: str) -> list[str]:
        """argv of an ssh to the server, without a user's configuration."""
        endpoint = self.endpoint
        return [
            *("ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "StrictHostKeyChecking=yes"),
            *("-o", f"HostKeyAlias={self.server.id}", "-o", "LogLevel=ERROR"),
            *("-i", endpoint.identity, "-p", str(endpoint.port), *options),
            *("--", f"{endpoint.user}@{endpoint.host}"),
        ]

    def ssh(
        self, line: str, *, stdin: bytes | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell line as the student."""
        words = [*self.ssh_words(), line]
        if stdin is None:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        else:
            done = subprocess.run(words, input=stdin, capture_output=True, check=False)
        text = subprocess.CompletedProcess(
            words, done.returncode, done.stdout.decode(), done.stderr.decode()
        )
        assert not check or text.returncode == 0, f"{line}: {text.stdout}{text.stderr}"
        return text

    def sh(self, line: str, *, check: bool = True) -> str:
        """Run a shell line as root, through the engine outside."""
        code, text = inside(self.server.id, line)
        assert not check or code == 0, f"{line}: {text}"
        return text

    def load(self, *names: str) -> None:
        """Give the engine inside these images of the engine outside, unless it has them."""
        for name in names:
            with engine.connect() as docker:
                wanted = docker.images.get(name).id
                line = f"docker image inspect --format '{{{{.Id}}}}' {shlex.quote(name)}"
                if self.ssh(line, check=False).stdout.strip() == wanted:
                    continue
                saved = io.BytesIO()
                for chunk in docker.images.get(name).save(named=name):
                    saved.write(chunk)
            self.ssh("docker load --quiet", stdin=saved.getvalue())

    def wait_until_ready(self) -> None:
        """Until the student can log in; the engine inside answers by then."""
        wait_for(lambda: self.endpoint.port and self.ssh("true", check=False).returncode == 0)

    def restart(self) -> None:
        """Reboot it, and wait for it; the port is another one afterwards."""
        with engine.connect() as docker:
            docker.containers.get(self.server.id).restart(timeout=30)
        self.wait_until_ready()

    def inspected(self) -> dict[str, Any]:
        """What `docker inspect` outside says."""
        with engine.connect() as docker:
            attrs: dict[str, Any] = docker.containers.get(self.server.id).attrs
        return attrs

    def kill(self) -> None:
        """Cut the power: no process gets a chance."""
        with engine.connect() as docker:
            docker.containers.get(self.server.id).kill()

    def vanish(self) -> None:
        """Remove it behind the provider's back."""
        with engine.connect() as docker:
            docker.containers.get(self.server.id).remove(force=True)

    def terminate(self) -> None:
        self.provider.terminate(self.server.id)


# The fixture `start_lab_server`.
StartLabServer = Callable[..., LabServer]


def start(
    directory: Path,
    base: str,
    lab: str,
    settings: LocalSettings,
    owner: str = "tests",
    first_boot: str = "",
) -> LabServer:
    """A new server that is ready. `directory` is for its key; `terminate` it afterwards."""
    provider = LocalProvider(settings, context(base, owner))
    identity = directory / "id_ed25519"
    request = CreateServerRequest(
        lab=lab,
        lab_id=secrets.token_hex(6),
        token=secrets.token_hex(8),
        public_key=ensure_key_pair(identity),
        identity=str(identity),
        need=Need(),
        tags={TEST_LABEL: "1", PID_LABEL: str(os.getpid())},
        first_boot=first_boot,
    )
    made = provider.create(provider.offers(request.need)[0], request)
    try:
        return _ready(provider, request, made, directory / "known_hosts")
    except BaseException:
        provider.terminate(made.id)
        raise


def _ready(
    provider: LocalProvider, request: CreateServerRequest, made: Server, known_hosts: Path
) -> LabServer:
    def with_key() -> Server | None:
        found = provider.find(made.id)
        return found if found and found.endpoint.host_key else None

    server = wait_for(with_key)
    known_hosts.write_text(f"{server.id} {server.endpoint.host_key}\n")
    lab_server = LabServer(provider, request, server, known_hosts)
    lab_server.wait_until_ready()
    return lab_server


def drop_pool(base: str, owner: str) -> None:
    """Remove the caches of this owner that no server uses."""
    provider = LocalProvider(LocalSettings(), context(base, owner))
    with engine.connect() as docker:
        volumes = cache.list_free_volumes(docker, owner)
    for left in provider.leftovers():
        if left.id in volumes:
            provider.remove(left)


def sweep(base: str) -> None:
    """End the servers of test processes that were killed before they could."""
    provider = LocalProvider(LocalSettings(), context(base))
    with engine.connect() as docker:
        found = docker.containers.list(
            all=True, ignore_removed=True, filters={"label": [TEST_LABEL, PID_LABEL]}
        )
        orphans = [
            container.labels["labctl.server"]
            for container in found
            if not _lives(int(container.labels[PID_LABEL]))
        ]
    for server_id in orphans:
        provider.terminate(server_id)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def inside(container: str, line: str, **how: str) -> tuple[int, str]:
    """A shell line in a container, through the engine: its exit code, and what it printed.

    An engine that is busy may lose a part of what a short command has printed. The line runs once:
    where the output has not the size that follows it, it is read again. `how` is the Docker SDK's
    `user`, `workdir`.
    """
    output_file = f"/dev/shm/.output-{secrets.token_hex(8)}"
    show = f"cat {output_file}; printf '{_END}%s' $(wc -c <{output_file})"
    with engine.connect() as docker:
        box = docker.containers.get(container)
        words = ["sh", "-c", f"(\n{line}\n) >{output_file} 2>&1\ncode=$?; {show}; exit $code"]
        code, output = box.exec_run(words, **how)
        for _ in range(5):
            text, mark, size = output.rpartition(_END.encode())
            if size == b"%d" % len(text):
                break
            try:
                _, output = box.exec_run(["sh", "-c", show], **how)
            except APIError:  # the line has ended its container
                break
        else:
            assert code != 0, f"the engine loses what is printed: {line}"
    return int(code), (text if mark else output).decode(errors="replace")
