"""Measure a step with 1, 2, ... processes, and with each way to exchange."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy

import exchange

WARM_UP = 5
STEPS = 30


def measure(
    model: nn.Module, device: torch.device, batch_size: int, sync_every: int, logs: Path
) -> None:
    """Print a table, and write it to speedup.json, from which labctl draws the speed-up.

    With fewer processes than torchrun started, the others wait. All share the same batch.
    """
    ways = [("whole", "none", 1), ("fp16", "fp16", 1), ("powersgd", "powersgd", 1)]
    ways.append((f"every {sync_every} steps", "none", sync_every))
    rows = []
    for processes in range(1, distributed.get_world_size() + 1):
        group = distributed.new_group(list(range(processes)))
        # One process sends nothing, whatever the way.
        for name, compress, every in ways if processes > 1 else [("alone", "none", 1)]:
            seconds = 0.0
            if distributed.get_rank() < processes:
                part = -(-batch_size // processes)
                seconds = time_step(model, device, part, compress, every, group)
            sent = exchange.count_bytes(model, compress, every, processes)
            rows.append(
                {
                    "variant": name,
                    "processes": processes,
                    "seconds_per_step": seconds,
                    "bytes_per_step": sent,
                }
            )
            distributed.all_reduce(torch.zeros(1))  # The others wait here.
    if distributed.get_rank() == 0:
        write_table(rows, device, batch_size, logs)


def time_step(
    model: nn.Module,
    device: torch.device,
    images: int,
    compress: str,
    sync_every: int,
    group: distributed.ProcessGroup,
) -> float:
    """Return the median of the seconds per step; of each `sync_every` steps together."""
    is_alone, is_local = distributed.get_world_size(group) == 1, sync_every > 1
    forward = model if is_alone or is_local else exchange.wrap(model, compress, group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    data = torch.rand(images, 64, device=device)
    labels = torch.zeros(images, dtype=torch.long, device=device)
    seconds = []
    for number in range(WARM_UP + -(-STEPS // sync_every)):
        started = time.perf_counter()
        for _ in range(sync_every):
            optimizer.zero_grad()
            cross_entropy(forward(data), labels).backward()
            optimizer.step()
        if is_local:
            exchange.average_parameters(model, group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append((time.perf_counter() - started) / sync_every)
    return median(seconds)


def write_table(
    rows: list[dict[str, object]], device: torch.device, batch_size: int, logs: Path
) -> None:
    print(f"{'exchange':14} {'processes':>9} {'ms/step':>9} {'kB/step':>9} {'speed-up':>9}")
    alone = rows[0]["seconds_per_step"]
    for row in rows:
        seconds, sent = row["seconds_per_step"], row["bytes_per_step"] / 1000
        print(
            f"{row['variant']:14} {row['processes']:>9} {seconds * 1000:>9.1f} {sent:>9,.0f} "
            f"{alone / seconds:>9.2f}"
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    table = {"device": device.type, "backend": backend, "batch_size": batch_size, "rows": rows}
    logs.mkdir(parents=True, exist_ok=True)
    partial = logs / ".speedup.json.partial"
    partial.write_text(json.dumps(table, indent=1) + "\n")
    partial.replace(logs / "speedup.json")
