"""One command on some servers over fabric inside this process, a thread for each.

    python fabric_work.py HOSTS.json COMMAND

This is how programs (keepers, courses, the dashboard) reach servers the first time.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from labctl.model import Endpoint
from labctl.transports.fabric import FabricTransport


def ask(endpoint: Endpoint, line: str) -> str:
    transport = FabricTransport(endpoint)
    try:
        return transport.run(line).stdout
    finally:
        transport.close()


def main() -> None:
    listed, line = sys.argv[1:]
    endpoints = [
        Endpoint(
            host=one["host"],
            port=one["port"],
            user=one["user"],
            identity=one["key"],
            host_key=one["host_key"],
        )
        for one in json.loads(Path(listed).read_text())
    ]
    with ThreadPoolExecutor(len(endpoints)) as threads:
        for said in threads.map(lambda one: ask(one, line), endpoints):
            print(said, end="")


if __name__ == "__main__":
    main()
