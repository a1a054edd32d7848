"""The work of a Python peer, run with the interpreter of the peer's environment.

    python peer_work.py fabric|parallel-ssh|asyncssh run HOSTS.json COMMAND
    python peer_work.py asyncssh|fabric put HOSTS.json SOURCE TARGET

HOSTS.json is a list of {"host", "port", "user", "key", "known_hosts"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

Host = dict[str, Any]


def fabric_run(hosts: list[Host], line: str) -> None:
    from fabric import Connection, ThreadingGroup

    ways = [_fabric(one) for one in hosts]
    group = ThreadingGroup.from_connections(ways) if len(ways) > 1 else ways[0]
    if isinstance(group, Connection):
        print(group.run(line, hide=True).stdout, end="")
        return
    for result in group.run(line, hide=True).values():
        print(result.stdout, end="")


def fabric_put(hosts: list[Host], source: str, target: str) -> None:
    way = _fabric(hosts[0])
    way.run(f"mkdir -p {target}", hide=True)
    for path in sorted(Path(source).iterdir()):
        way.put(str(path), f"{target}/{path.name}")


def _fabric(one: Host) -> Any:
    from fabric import Connection

    return Connection(
        one["host"],
        user=one["user"],
        port=one["port"],
        connect_kwargs={"key_filename": one["key"], "look_for_keys": False, "allow_agent": False},
    )


def parallel_run(hosts: list[Host], line: str) -> None:
    from pssh.clients import ParallelSSHClient
    from pssh.config import HostConfig

    ways = [HostConfig(user=h["user"], port=h["port"], private_key=h["key"]) for h in hosts]
    client = ParallelSSHClient([h["host"] for h in hosts], host_config=ways, allow_agent=False)
    for output in client.run_command(line):
        for text in output.stdout:
            print(text)


async def asyncssh_run(hosts: list[Host], line: str) -> None:
    async def one(host: Host) -> str:
        async with _asyncssh(host) as way:
            return str((await way.run(line, check=True)).stdout)

    print("".join(await asyncio.gather(*(one(host) for host in hosts))), end="")


async def asyncssh_put(hosts: list[Host], source: str, target: str) -> None:
    async with _asyncssh(hosts[0]) as way, way.start_sftp_client() as sftp:
        await sftp.put(source, target, recurse=True)


def _asyncssh(host: Host) -> Any:
    import asyncssh

    return asyncssh.connect(
        host["host"],
        host["port"],
        username=host["user"],
        client_keys=[host["key"]],
        known_hosts=host["known_hosts"],
        agent_path=None,
    )


def main() -> None:
    peer, what, listed, *words = sys.argv[1:]
    hosts = json.loads(Path(listed).read_text())
    deeds: dict[tuple[str, str], Any] = {
        ("fabric", "run"): fabric_run,
        ("fabric", "put"): fabric_put,
        ("parallel-ssh", "run"): parallel_run,
        ("asyncssh", "run"): asyncssh_run,
        ("asyncssh", "put"): asyncssh_put,
    }
    made = deeds[peer, what](hosts, *words)
    if made is not None:
        asyncio.run(made)


if __name__ == "__main__":
    main()
