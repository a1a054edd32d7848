"""Lab machines that several people share: real sshds, real leases, two users each with a labctl."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from sshd_container import Sshd, wait_for

from labctl.commands import lease
from labctl.errors import CapacityError, HostKeyError, LabError, PolicyError
from labctl.events import Question, SilentReporter
from labctl.model import CreateServerRequest, GpuNeed, Need, Server
from labctl.providers import ProviderContext
from labctl.providers.static import HostEntry, StaticProvider, StaticSettings
from labctl.servers.connections import Connections

pytest_plugins = ["sshd_fixtures"]
pytestmark = pytest.mark.engine


class Person(SilentReporter):
    """Somebody with a laptop of their own, who confirms the keys of new machines."""

    def __init__(self, name: str, home: Path, machines: list[Sshd], user: str = "student") -> None:
        self.name = name
        self.asked: list[Question] = []
        self.connections = Connections(home / "ssh", home / ".ssh" / "config")
        around = ProviderContext(
            data_dir=home,
            owner=name,
            connect=self.connections.connect,
            settle_host_key=lambda endpoint: self.connections.settle_host_key(endpoint, self),
            progress=lambda text, done, total: None,
            resolve_alias=self.connections.user_config.resolve_alias,
        )
        hosts = tuple(
            HostEntry(host="127.0.0.1", port=box.port, user=user, identity=str(box.key))
            for box in machines
        )
        self.provider = StaticProvider(StaticSettings(hosts=hosts), around)

    def confirm(self, decision: Question) -> bool:
        self.asked.append(decision)
        return True

    def request(self, token: str, **need: int) -> CreateServerRequest:
        return CreateServerRequest(
            lab="digits", lab_id=f"id-of-{self.name}", token=token, public_key="", identity="",
            need=Need(**need),
        )  # fmt: skip

    def up(self, token: str, **need: int) -> Server:
        request = self.request(token, **need)
        return self.provider.create(self.provider.offers(request.need)[0], request)

    def leave(self) -> None:
        for machine in self.provider.machines:
            self.connections.connect(machine.endpoint).close()


Arrive = Callable[..., Person]


@pytest.fixture
def machines(start_sshd: Callable[..., Sshd]) -> list[Sshd]:
    return [start_sshd()]


@pytest.fixture
def arrive(tmp_path: Path, machines: list[Sshd]) -> Iterator[Arrive]:
    here: list[Person] = []

    def one(name: str, user: str = "student") -> Person:
        here.append(Person(name, tmp_path / name, machines, user))
        return here[-1]

    yield one
    for person in here:
        person.leave()


def test_of_two_who_race_one_wins_and_the_other_is_told_who(
    arrive: Arrive, machines: list[Sshd]
) -> None:
    """Through different accounts, so that file permissions are real; no Python is needed."""
    machines[0].sh("rm -f /usr/bin/python3*")
    people = [arrive("alice"), arrive("bob", "fishy")]
    offers = [person.provider.offers(Need())[0] for person in people]

    def claim(number: int) -> Server | LabError:
        person = people[number]
        try:
            return person.provider.create(offers[number], person.request(f"{number}" * 8))
        except LabError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(claim, range(2)))
    [server] = [each for each in results if isinstance(each, Server)]
    [refusal] = [each for each in results if isinstance(each, LabError)]
    winner = "alice" if server.lab_id == "id-of-alice" else "bob"
    assert isinstance(refusal, CapacityError)
    assert f"held by {winner} for digits until 20" in refusal.why


def test_a_life_of_a_claim(arrive: Arrive, machines: list[Sshd]) -> None:
    alice, bob = arrive("alice"), arrive("bob", "fishy")
    server = alice.up("aaaa", ttl_s=1000)
    assert len(alice.asked) == 1
    assert alice.connections.connect(server.endpoint).run("echo in").stdout == "in\n"
    assert alice.provider.find(server.id) is not None
    assert [each.id for each in alice.provider.servers()] == [server.id]
    assert bob.provider.servers() == []
    assert bob.provider.find(server.id) is not None, "the id says whose it is, not who asks"
    bob.provider.terminate("static-127-0-0-1-1-bbbb")
    with pytest.raises(CapacityError, match="is in use"):
        bob.up("bbbb")
    longer = alice.provider.extend(server.id, 5000)
    assert longer is not None
    assert longer.deadline_at is not None
    assert server.deadline_at is not None
    assert 3000 < longer.deadline_at - server.deadline_at < 5000
    alice.provider.terminate(server.id)
    alice.provider.terminate(server.id)
    assert alice.provider.find(server.id) is None
    assert bob.up("bbbb").lab_id == "id-of-bob"
    with pytest.raises(CapacityError, match="is in use"):
        alice.up("cccc")
    assert len(alice.asked) == 1
    assert machines[0].sh(f"stat -c %a {lease.DIRECTORY}") == "1777\n"


def test_an_expired_claim_is_taken_over(arrive: Arrive) -> None:
    alice, bob = arrive("alice"), arrive("bob", "cshy")
    server = alice.up("aaaa", ttl_s=8)
    wait_for(lambda: alice.provider.find(server.id) is None)
    assert bob.up("bbbb").lab_id == "id-of-bob"


def test_a_claim_of_an_earlier_boot_is_taken_over(arrive: Arrive, machines: list[Sshd]) -> None:
    alice, bob = arrive("alice"), arrive("bob", "noisy")
    server = alice.up("aaaa")
    machines[0].sh(f'sed -i \'s/"boot_id":"../"boot_id":"zz/\' {lease.DIRECTORY}/*/owner.json')
    assert alice.provider.find(server.id) is None
    assert bob.up("bbbb").lab_id == "id-of-bob"


def test_a_pool_gives_the_first_free_one_and_names_all_holders(
    arrive: Arrive, machines: list[Sshd], start_sshd: Callable[..., Sshd]
) -> None:
    machines.append(start_sshd())
    alice, bob, carol = arrive("alice"), arrive("bob"), arrive("carol")
    first, second = alice.up("aaaa"), bob.up("bbbb")
    assert first.endpoint.port == machines[0].port
    assert second.endpoint.port == machines[1].port
    with pytest.raises(CapacityError) as caught:
        carol.up("cccc")
    assert "held by alice" in caught.value.why
    assert "held by bob" in caught.value.why
    alice.provider.terminate(first.id)
    assert carol.up("cccc").endpoint.port == machines[0].port
    assert [check.ok for check in carol.provider.check()] == [True, True]


def test_a_machine_with_gpus(arrive: Arrive, machines: list[Sshd]) -> None:
    fake = "#!/bin/sh\\necho 'GPU-1, 15360, 550.54, Tesla T4'\\n"
    machines[0].sh(f'printf "{fake}" > /usr/bin/nvidia-smi; chmod +x /usr/bin/nvidia-smi')
    provider = arrive("alice").provider
    [offer] = provider.offers(Need(gpu=GpuNeed(kind="T4", count=1)))
    assert (offer.gpu_name, offer.gpu_count) == ("Tesla T4", 1)
    assert provider.offers(Need(gpu=GpuNeed(kind="A100", count=1))) == []


def test_a_machine_whose_key_changed_is_never_claimed(arrive: Arrive, machines: list[Sshd]) -> None:
    alice = arrive("alice")
    server = alice.up("aaaa")
    alice.leave()
    machines[0].stop_sshd()
    machines[0].new_host_key()
    machines[0].start_sshd()
    for act in (lambda: alice.provider.find(server.id), lambda: alice.up("bbbb")):
        with pytest.raises(HostKeyError):
            act()


def test_an_unconfirmed_key_is_a_refusal(
    arrive: Arrive, machines: list[Sshd], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = arrive("alice")
    with monkeypatch.context() as patch:
        patch.setattr(alice, "confirm", lambda decision: False)
        with pytest.raises(PolicyError, match="not confirmed") as caught:
            alice.up("aaaa")
    assert "SHA256:" in caught.value.why
    assert machines[0].sh(f"ls -d {lease.DIRECTORY} 2>/dev/null || echo none") == "none\n"


def test_an_alias_of_the_users_own_config(machines: list[Sshd], tmp_path: Path) -> None:
    folder = tmp_path / "alice" / ".ssh"
    folder.mkdir(parents=True)
    box = machines[0]
    (folder / "known_hosts").write_text(f"the-box {box.host_key}\n")
    (folder / "config").write_text(
        f"Host box\n HostName 127.0.0.1\n Port {box.port}\n User student\n"
        f" IdentityFile {box.key}\n HostKeyAlias the-box\n"
        f" UserKnownHostsFile {folder}/known_hosts\n"
    )
    alice = Person("alice", tmp_path / "alice", machines)
    alice.provider.settings = StaticSettings(hosts=("box",))
    server = alice.up("aaaa")
    assert server.id == "static-box-aaaa"
    assert alice.asked == [], "the key stands in their known_hosts"
    named = msgspec.structs.replace(server, alias="digits")
    assert alice.connections.open(named).run("id -un").stdout == "student\n"
    alice.connections.close(named)
    alice.leave()


@pytest.mark.parametrize(
    "is_target_known",
    [
        pytest.param(False, id="new machine"),
        pytest.param(True, id="known machine", marks=pytest.mark.long),
    ],
)
def test_an_unknown_jump_host_blocks_only_the_machines_behind_it(
    start_sshd: Callable[..., Sshd],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_target_known: bool,
) -> None:
    direct, gate = start_sshd(), start_sshd()
    lab, ssh_dir = tmp_path / "digits", tmp_path / ".ssh"
    lab.mkdir()
    ssh_dir.mkdir(mode=0o700)
    known = [f"[127.0.0.1]:{direct.port} {direct.host_key}\n"]
    known += [f"localhost {gate.host_key}\n"] if is_target_known else []
    (ssh_dir / "known_hosts").write_text("".join(known))
    entries = [
        f"{{host: 127.0.0.1, port: {direct.port}, user: student, identity: {direct.key}}}",
        "{host: localhost, user: student, identity: KEY, jump: 'student@127.0.0.1:PORT'}",
    ]
    behind = entries[1].replace("KEY", str(gate.key)).replace("PORT", str(gate.port))
    hosts = f"[{entries[0]}, {behind}]"
    (lab / "lab.yaml").write_text(
        f"lab: digits\nserver: {{provider: static, static: {{hosts: {hosts}}}}}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(lab)

    offers = run_labctl("offers")
    assert offers.returncode == 0, offers.stderr
    assert f"127.0.0.1:{direct.port} " in offers.stdout
    assert "1 machine cannot be used now: localhost\n" in offers.stderr
    checks = run_labctl("doctor").stdout
    assert f"ok  127.0.0.1:{direct.port}: free\n" in checks
    unknown = f"jump host student@127.0.0.1:{gate.port} has a host key that your ssh does not know"
    assert f"!!  localhost: the {unknown}" in checks
    assert f"next: ssh -p {gate.port} student@127.0.0.1\n" in checks


def run_labctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labctl", *words], capture_output=True, text=True, check=False
    )
