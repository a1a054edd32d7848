"""Builds the images that most end-to-end tests need, so that no test waits for one.

scripts/test runs it beside the static checks. A test that finds its image missing builds it itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import bare_container
import lab_servers
import registry_container
import slurm_cluster
import sshd_container
import store_lab
import sync_lab
import systemd_machine
import wireguard_machine

from labctl.providers.local import engine
from labctl.rehearsal.images import default_building, ensure_image


def build_servers() -> None:
    server = lab_servers.build_server_image(lab_servers.base_image())
    lab_servers.build_gpu_image(server)
    systemd_machine.build_image(server)
    wireguard_machine.build_image(server)
    with engine.connect() as client:
        ensure_image(client, default_building())


def build_small() -> None:
    """Each of the others stands on the one of `sshd_container`."""
    sshd_container.build_tmux_image()
    sync_lab.build_image()
    slurm_cluster.build_image()
    store_lab.build_store_image()
    bare_container.build_image()
    lab_servers.small_image()
    lab_servers.image_with_pytest()
    registry_container.build_image()


def main() -> None:
    with ThreadPoolExecutor() as pool:
        for built in [pool.submit(build_servers), pool.submit(build_small)]:
            built.result()


if __name__ == "__main__":
    main()
