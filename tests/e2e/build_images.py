"""Builds the images that most end-to-end tests need, so that no test waits for one.

scripts/test runs it beside the static checks. A test that finds its image missing builds it itself.
"""

from __future__ import annotations

from collections.abc import Callable
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
from labctl.rehearsal.core.images import default_building, ensure_image


def build_servers() -> None:
    server = lab_servers.build_server_image(lab_servers.base_image())
    lab_servers.build_gpu_image(server)
    systemd_machine.build_image(server)
    wireguard_machine.build_image(server)
    with engine.connect() as client:
        ensure_image(client, default_building())


def list_small_builds() -> list[Callable[[], object]]:
    """Return what builds one image each; most stand on the one of `sshd_container`."""
    return [
        slurm_cluster.build_image,
        store_lab.build_store_image,
        bare_container.build_image,
        sync_lab.build_image,
        registry_container.build_image,
        lab_servers.small_image,
        lab_servers.image_with_pytest,
    ]


def main() -> None:
    # Half of a build waits for packages or for the disk.
    with ThreadPoolExecutor(max_workers=3) as pool:
        servers = pool.submit(build_servers)
        sshd_container.build_tmux_image()
        for built in [servers, *(pool.submit(build) for build in list_small_builds())]:
            built.result()


if __name__ == "__main__":
    main()
