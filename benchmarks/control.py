"""One command on one server, and on all servers: labctl compared with ssh and the peers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from benchmarks.boxes import ALGORITHMS, Box, Boxes, boxes
from benchmarks.measure import Call, Comparison, NotDoneError, Row
from benchmarks.peers import Peer
from benchmarks.settings import Settings
from benchmarks.startup import LABCTL
from labctl.transports import Transport

LINE = "echo done"
COLD_TARGET, WARM_TARGET, IN_PROCESS_S = 1.0, 0.4, 0.008
MANY_COLD_TARGET, MANY_WARM_TARGET = 0.5, 0.15
PEER_WORK = str(Path(__file__).with_name("peer_work.py"))
OWN_WORK = str(Path(__file__).with_name("fabric_work.py"))


class Asked:
    """Rows over some servers; every side must get output from each of them."""

    def __init__(self, name: str, made: Boxes, asked: Sequence[Box]) -> None:
        self.name = name
        self.made = made
        self.asked = asked
        self.hosts = self._hosts()
        self.inventory = self._ansible_inventory()
        self.pyinfra = self._pyinfra_inventory()

    def row(self, name: str, *argv: str, target: float | None = None) -> Row:
        call = Call(argv, self.made.home, self.made.home, "done", len(self.asked))
        return Row(name, call, target)

    def cold(self, name: str, *argv: str, target: float) -> Row:
        """Build a row that starts without a shared connection."""
        made = self.row(name, *argv, target=target)
        made.before = lambda number: self.made.end_masters()
        return made

    def warm(self, name: str, *argv: str, target: float) -> Row:
        """Build a row that uses the shared connection left by the same command."""
        made = self.row(name, *argv, target=target)
        made.before = made.work
        return made

    def ssh(self, name: str, words: Sequence[str]) -> Row:
        """Build a row with one ssh per server, all at the same time."""
        each = " & ".join(shlex.join([*words, box.name, LINE]) for box in self.asked)
        return self.row(name, "sh", "-c", f"{each} & wait")

    def peers(self, found: dict[str, Peer]) -> list[Row]:
        rows = []
        for package in ("fabric", "parallel-ssh", "asyncssh"):
            if peer := found.get(package):
                words = (peer.program("python"), PEER_WORK, package, "run", self.hosts, LINE)
                rows.append(self.row(f"{package} {peer.version}", *words))
        if peer := found.get("pyinfra"):
            words = (peer.program("pyinfra"), "-y", self.pyinfra, "exec", "--", LINE)
            rows.append(self.row(f"pyinfra {peer.version}, exec", *words))
        if peer := found.get("ansible-core"):
            words = (peer.program("ansible"), "all", "-i", self.inventory, "-f", "20")
            rows.append(self.row(f"ansible {peer.version}, raw", *words, "-m", "raw", "-a", LINE))
        return rows

    def _file(self, ending: str, text: str) -> str:
        path = self.made.home / f"{self.name}.{ending}"
        path.write_text(text)
        return str(path)

    def _hosts(self) -> str:
        known = str(self.made.home / ".ssh" / "known_hosts")
        body = [
            {
                "host": box.endpoint.host,
                "port": box.endpoint.port,
                "user": box.endpoint.user,
                "key": str(self.made.key),
                "known_hosts": known,
                "host_key": box.endpoint.host_key,
            }
            for box in self.asked
        ]
        return self._file("json", json.dumps(body))

    def _ansible_inventory(self) -> str:
        options = f"-F {self.made.config('default')} -o ControlMaster=no -o ControlPath=none"
        lines = [f"{box.name} ansible_ssh_args='{options}'" for box in self.asked]
        return self._file("ini", "[all]\n" + "\n".join(lines) + "\n")

    def _pyinfra_inventory(self) -> str:
        hosts = [
            (
                box.name,
                {
                    "ssh_hostname": box.endpoint.host,
                    "ssh_port": box.endpoint.port,
                    "ssh_user": box.endpoint.user,
                    "ssh_key": str(self.made.key),
                },
            )
            for box in self.asked
        ]
        return self._file("py", f"hosts = {hosts!r}\n")


def compare_one_server(settings: Settings) -> Generator[Comparison]:
    """Compare one command on one server; the baseline is a fresh ssh with its defaults."""
    with boxes(settings.home / "control", 1, settings.image) as made:
        rows = _list_one_server_rows(made, settings.peers)
        yield Comparison("one command on one server", rows, settings.sizes.rounds)


def _list_one_server_rows(made: Boxes, found: dict[str, Peer]) -> list[Row]:
    box = made.all[0]
    lab = made.lab("control", box)
    asked = Asked("one-server", made, [box])
    # Typed in the lab's directory, as people do: an option before `ssh` takes a slower path.
    typed = f"cd {shlex.quote(str(lab.config.root))} && exec {shlex.quote(LABCTL)} ssh -- echo done"
    labctl = ("sh", "-c", typed)
    shared = made.ssh("labctl's ciphers", "-o", "ControlMaster=auto", "-o", "ControlPersist=600")
    shared += ("-o", f"ControlPath={made.home}/cm-%C")
    inner = _InProcess(made.in_process.open(made.server(box, "control")))
    in_process = Row("labctl in process, warm", inner, limit=IN_PROCESS_S)
    other = _InProcess(made.connections.open(made.server(box, "control")))
    other_way = Row("the same through the user's ssh, warm", other, ours=True)
    for row, work in ((in_process, inner), (other_way, other)):
        row.before = work
    cold_in_process = asked.row("labctl in process, cold", *_fabric_words(asked))
    cold_in_process.ours = True
    return [
        *(asked.row(f"ssh, {name}", *made.ssh(name), box.name, LINE) for name in ALGORITHMS),
        asked.row("ssh over a master", *shared, box.name, LINE),
        asked.cold("labctl ssh -- CMD, cold", *labctl, target=COLD_TARGET),
        asked.warm("labctl ssh -- CMD, warm", *labctl, target=WARM_TARGET),
        in_process,
        cold_in_process,
        other_way,
        *asked.peers(found),
    ]


def _fabric_words(asked: Asked) -> tuple[str, ...]:
    return (sys.executable, OWN_WORK, asked.hosts, LINE)


class _InProcess:
    """Run a command through the interface that every labctl command uses."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def __call__(self, number: int) -> None:
        if self.transport.run(LINE).stdout != "done\n":
            raise NotDoneError("the server's output is wrong")


def compare_all_servers(settings: Settings) -> Generator[Comparison]:
    """Compare one command on all servers; the baseline is a fresh ssh for each, all at once."""
    count = settings.sizes.servers
    with boxes(settings.home / "fan-out", count, settings.image) as made:
        rows = _list_all_servers_rows(made, settings.peers)
        yield Comparison(f"one command on {count} servers", rows, settings.sizes.rounds)


def _list_all_servers_rows(made: Boxes, found: dict[str, Peer]) -> list[Row]:
    asked = Asked("all-servers", made, made.all)
    labctl = (LABCTL, "ssh", "--all", "--", "echo", "done")
    fabric = asked.row("labctl's fabric transport, cold", *_fabric_words(asked))
    fabric.ours = True
    return [
        *(asked.ssh(f"ssh, {name}", made.ssh(name)) for name in ALGORITHMS),
        asked.cold("labctl ssh --all, cold", *labctl, target=MANY_COLD_TARGET),
        asked.warm("labctl ssh --all, warm", *labctl, target=MANY_WARM_TARGET),
        fabric,
        *asked.peers(found),
    ]
