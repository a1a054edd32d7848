"""Measures how fast processes exchange data: all-reduce of messages of several sizes.

labctl passes this text to the Python of the lab's image, with torchrun around it. It prints one
line of JSON. Bus bandwidth is defined as in NVIDIA's nccl-tests (doc/PERFORMANCE.md): the bytes of
the message, times 2 (N-1)/N, by seconds.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import distributed

SIZES = [4**exponent for exponent in range(5, 15)]  # 1 KiB to 256 MiB
WARM_UPS, FEWEST, MOST = 2, 3, 200
SECONDS = 0.3  # for each size
MARK = "labctl-bandwidth: "


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(local_rank)
    distributed.init_process_group("nccl" if has_gpu else "gloo")
    device = f"cuda:{local_rank}" if has_gpu else "cpu"
    count = distributed.get_world_size()
    rows = []
    for size in SIZES:
        seconds = measure(torch.zeros(size // 4, device=device))
        speed = size / seconds * 2 * (count - 1) / count
        rows.append({"bytes": size, "seconds": seconds, "bus_bytes_per_s": speed})
    if distributed.get_rank() == 0:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        result = {
            "rows": rows,
            "processes": count,
            "servers": count // int(os.environ["LOCAL_WORLD_SIZE"]),
            "device": torch.cuda.get_device_name() if has_gpu else "CPU",
            "backend": distributed.get_backend(),
            "interface": interface,
            "link_bits_per_s": read_link_speed(interface),
        }
        print(MARK + json.dumps(result), flush=True)
    distributed.destroy_process_group()


def measure(values: torch.Tensor) -> float:
    """Return the mean seconds of one all-reduce, over as many as fit into SECONDS."""
    for _ in range(WARM_UPS):
        distributed.all_reduce(values)
    one = time_all_reduces(values, FEWEST)
    repeats = torch.tensor([SECONDS / one], device=values.device)
    # All processes must agree on the number.
    distributed.broadcast(repeats, 0)
    return time_all_reduces(values, int(min(MOST, max(FEWEST, repeats.item()))))


def time_all_reduces(values: torch.Tensor, repeats: int) -> float:
    distributed.barrier()
    started = time.perf_counter()
    for _ in range(repeats):
        distributed.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def read_link_speed(interface: str) -> float:
    """Return the bits per second that the network card reports; 0 if it reports none."""
    try:
        text = Path("/sys/class/net", interface, "speed").read_text()
        return max(0.0, int(text) * 1e6)
    except (OSError, ValueError):
        return 0.0


if __name__ == "__main__":
    main()
