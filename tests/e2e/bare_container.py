"""A bare Debian container: sshd and sudo, nothing else. No python3, no Docker, no init.

`alice` has sudo without a password, `carol` with one, `bob` has none.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sshd_container import Sshd, build, docker

from labctl.servers.host_keys import ensure_key_pair

IMAGE = "labctl-test-prepare"
CAROLS_PASSWORD = "correct horse"
DOCKERFILE = """
ARG BASE
FROM ${BASE}
RUN echo 'Acquire::Languages "none";' > /etc/apt/apt.conf.d/99tests \\
    && printf '%s\\n' force-unsafe-io > /etc/dpkg/dpkg.cfg.d/99tests
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
        openssh-server sudo \\
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
RUN mkdir -p /run/sshd \\
    && useradd -m -s /bin/bash alice && useradd -m -s /bin/bash bob \\
    && useradd -m -s /bin/bash carol && echo 'carol:correct horse' | chpasswd \\
    && echo 'alice ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/alice \\
    && echo 'carol ALL=(ALL) ALL' > /etc/sudoers.d/carol
"""


def build_image() -> str:
    return build(IMAGE, DOCKERFILE)


@contextmanager
def bare(image: str, folder: Path) -> Iterator[Sshd]:
    """A running one, its sshd greeting; `folder` gets the private key that everybody accepts."""
    box = Sshd(f"labctl-test-prepare-{uuid.uuid4().hex[:8]}", folder / "key")
    docker(
        *("run", "-d", "--init", "--name", box.name, "-p", "127.0.0.1::22"),
        *(image, "sleep", "infinity"),
    )
    try:
        box.accept(ensure_key_pair(box.key), ("alice", "bob", "carol"))
        box.start_sshd()
        yield box
    finally:
        docker("rm", "--force", "--volumes", box.name)
