"""The static provider under the contract: two machines with a real sshd, and leases on them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from case import Case

from labctl.events import SilentReporter
from labctl.providers import ProviderContext
from labctl.providers.static import HostEntry, StaticProvider, StaticSettings
from labctl.servers.connections import Connections

sys.path.append(str(Path(__file__).parents[1] / "e2e"))
from sshd_container import Sshd, build_image, docker, start


@pytest.fixture(scope="session")
def static_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sshd]]:
    key = tmp_path_factory.mktemp("static") / "id_ed25519"
    image = build_image()
    boxes: list[Sshd] = []
    try:
        for _ in range(2):
            boxes.append(start(image, key))
        yield boxes
    finally:
        for box in boxes:
            docker("rm", "-f", "-v", box.name)


@pytest.fixture
def static_case(static_machines: list[Sshd], tmp_path: Path) -> Iterator[Case]:
    """The person's own key and known_hosts are what they have for any other ssh."""
    home = tmp_path / "home" / ".ssh"
    home.mkdir(parents=True)
    known = [f"[127.0.0.1]:{box.port} {box.host_key}\n" for box in static_machines]
    (home / "known_hosts").write_text("".join(known))
    connections = Connections(tmp_path / "ssh", home / "config")

    def unexpected(_: object) -> str:
        raise AssertionError("the static provider asks for no program")

    around = ProviderContext(
        data_dir=tmp_path,
        owner="contract",
        connect=connections.connect,
        settle_host_key=lambda endpoint: connections.settle_host_key(endpoint, SilentReporter()),
        progress=lambda text, done, total: None,
        resolve_alias=connections.user_config.resolve_alias,
    )
    hosts = tuple(
        HostEntry(host="127.0.0.1", port=box.port, user="student", identity=str(box.key))
        for box in static_machines
    )
    provider = StaticProvider(StaticSettings(hosts=hosts), around)
    case = Case(provider, tmp_path)
    try:
        yield case
    finally:
        case.clean_up()
        for machine in provider.machines:
            connections.connect(machine.endpoint).close()
