"""How fast the GPUs or servers of a lab exchange data, measured by a short run of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from labctl.config import LabConfig
from labctl.decoding import decode_json
from labctl.errors import LabError, UsageError
from labctl.model import Run, Value
from labctl.runs.launch import PYTHON, TORCHRUN
from labctl.wire.networks import WIREGUARD_PREFIX

# A training on several servers spends most of its time waiting for such a link.
SLOW_BITS_PER_S = 1e9
TAIL_CHARACTERS = 1000
# Precedes the program's result in its output.
MARK = "labctl-bandwidth: "


class AllReduce(Value, frozen=True):
    """All-reduces of one size. `bus_bytes_per_s` is that of nccl-tests (doc/PERFORMANCE.md)."""

    bytes: int
    seconds: float
    bus_bytes_per_s: float


class Bandwidth(Value, frozen=True):
    """Measured all-reduces between `processes` on `servers`.

    `interface` is the network interface between servers, "" on one server. `link_bits_per_s` is
    what its card reports; 0 if it reports nothing, as virtual cards of most clouds.
    """

    rows: tuple[AllReduce, ...]
    processes: int
    servers: int
    device: str
    backend: str
    interface: str = ""
    link_bits_per_s: float = 0.0

    @property
    def best_bits_per_s(self) -> float:
        return 8 * max(row.bus_bytes_per_s for row in self.rows)

    @property
    def is_encrypted(self) -> bool:
        """Whether WireGuard encrypts what the servers exchange."""
        return self.interface.startswith(WIREGUARD_PREFIX)

    @property
    def link_share(self) -> float | None:
        """The share of the link that was reached, 0 to 1; None if its speed is not known."""
        if self.is_encrypted or not self.link_bits_per_s:  # a tunnel reports no real speed
            return None
        return self.best_bits_per_s / self.link_bits_per_s

    @property
    def is_slow(self) -> bool:
        """Whether the servers are connected by about 1 Gbit/s or less."""
        return self.servers > 1 and self.best_bits_per_s <= SLOW_BITS_PER_S


def build_command(config: LabConfig, gpu_count: int) -> tuple[str, ...]:
    """Return the command of the run, with one process for each GPU of a server.

    UsageError if there would be only one process.
    """
    if config.submits_jobs:
        raise UsageError(
            "bandwidth cannot measure here: each run is a job of Slurm",
            why="the login node does not know which GPUs and links a job will get",
            hint="labctl run -- nvidia-smi topo -m   # shows how the GPUs of a job are connected",
        )
    processes = config.launch.processes or gpu_count or 1
    if processes * config.server.count < 2:
        raise UsageError(
            "nothing to measure: a run of this lab has one process",
            why="the server has fewer than two GPUs, and `launch: {per_server: 2}` is not set",
            hint="labctl config   # shows what the lab needs",
        )
    python = config.run[0] if config.run and PYTHON.fullmatch(config.run[0]) else "python3"
    return (
        *(python, *TORCHRUN),
        *([] if config.server.count > 1 else ["--standalone"]),
        f"--nproc-per-node={processes}",
        *("--no-python", python, "-c", read_program()),
    )


def read_program() -> str:
    return Path(__file__).with_name("bandwidth_program.py").read_text(encoding="utf-8")


def parse_result(log: bytes, run: Run) -> Bandwidth:
    """Read what the program printed; LabError, with the end of its output, if it did not."""
    for line in log.decode(errors="replace").splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            try:
                return decode_json(text, Bandwidth)
            except msgspec.MsgspecError:
                continue
    raise LabError(
        f"the bandwidth could not be measured: {run.summary}",
        why=log.decode(errors="replace")[-TAIL_CHARACTERS:].strip(),
        hint="labctl run -- python -c 'import torch'   # the image must have PyTorch",
    )
