"""Debian's container registry, on the loopback of a lab's server: there the engine needs no TLS.

It runs in a container of its own that shares the server's network, since installing the package
would start a daemon on a machine with systemd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sshd_container

IMAGE = "labctl-test-registry"
HOST = "127.0.0.1:5000"
DOCKERFILE = """
ARG BASE
FROM ${BASE}
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends docker-registry \\
    && rm -rf /var/lib/apt/lists/*
RUN echo 'version: 0.1\\nhttp: {addr: 127.0.0.1:5000}\\n\\
storage: {filesystem: {rootdirectory: /tmp/registry}}' > /registry.yml
CMD ["docker-registry", "serve", "/registry.yml"]
"""
# Run on the server: gives an image in the registry another architecture.
CHANGE_ARCHITECTURE = """
import hashlib, json, sys
from urllib.request import Request, urlopen

host, repository, tag, architecture = sys.argv[1:]
kind = "application/vnd.docker.distribution.manifest.v2+json"

def send(method, address, data=None):
    headers = {"Accept": kind, "Content-Type": kind if "/manifests/" in address else "text/plain"}
    return urlopen(Request(address, data, headers, method=method))

base = f"http://{host}/v2/{repository}"
manifest = json.load(send("GET", f"{base}/manifests/{tag}"))
config = json.load(send("GET", f"{base}/blobs/{manifest['config']['digest']}"))
text = json.dumps({**config, "architecture": architecture}).encode()
digest = "sha256:" + hashlib.sha256(text).hexdigest()
upload = send("POST", f"{base}/blobs/uploads/", b"").headers["Location"]
send("PUT", f"{upload}&digest={digest}", text)
manifest["config"].update(digest=digest, size=len(text))
send("PUT", f"{base}/manifests/{tag}", json.dumps(manifest).encode())
"""


def build_image() -> str:
    return sshd_container.build(IMAGE, DOCKERFILE)


@contextmanager
def run_registry(server_id: str) -> Iterator[None]:
    """Run an empty registry that the server reaches as HOST."""
    words = ("run", "-d", "--network", f"container:{server_id}", build_image())
    container = sshd_container.docker(*words).strip()
    try:
        yield
    finally:
        sshd_container.docker("rm", "-f", container)


def change_architecture(server_id: str, repository: str, tag: str, architecture: str) -> None:
    """Let an image in the registry be one for another architecture."""
    words = ("exec", "-i", server_id, "python3", "-", HOST, repository, tag, architecture)
    sshd_container.docker(*words, stdin=CHANGE_ARCHITECTURE)
