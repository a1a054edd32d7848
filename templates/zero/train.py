"""Train with an optimizer state that the processes share out (ZeRO-1).

    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --standalone --nproc-per-node=2 train.py --plain

Started again in the same place, it resumes from its checkpoint, also with
another number of processes. SIGTERM and Ctrl-C make a checkpoint first.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# labctl sets this on a server. Elsewhere, checkpoints are beside the code.
CHECKPOINT = Path(os.environ.get("LABCTL_CHECKPOINT_DIR", "checkpoints")) / "last.pt"
STOPPED = 143  # what a shell reports for SIGTERM
signals: list[int] = []  # that this process got


def main() -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="steps of the whole training")
    add("--batch-size", type=int, default=64, help="images per step, of all processes together")
    add("--width", type=int, default=256, help="width of the network")
    add("--blocks", type=int, default=8, help="depth of the network")
    add("--plain", action="store_true", help="keep all optimizer state in each process, to compare")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    device = join()
    try:
        return train(options, device)
    finally:
        # What still uses gloo's threads when Python ends would abort it.
        gc.collect()
        distributed.destroy_process_group()


def join() -> torch.device:
    """Join the processes that torchrun started. GPUs use NCCL, CPUs gloo."""
    is_alone = "RANK" not in os.environ
    alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    if not torch.cuda.is_available():
        distributed.init_process_group("gloo", **alone)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl", **alone)
    return device


def make_model(width: int, blocks: int) -> nn.Sequential:
    layers = [nn.Linear(64, width)]
    for _ in range(blocks):
        inner = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        layers.append(nn.Sequential(*inner))
    return nn.Sequential(*layers, nn.Linear(width, 10))


def build_model() -> tuple[nn.Sequential, Tensor]:
    """Return the network and an example, for `labctl estimate train.py:build_model`."""
    return make_model(256, 8), torch.zeros(1, 64)


def train(options: argparse.Namespace, device: torch.device) -> int:
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(1)  # the same first weights in each process
    model = make_model(options.width, options.blocks).to(device)
    forward = DistributedDataParallel(model)
    if options.plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        # Each process updates some parameters, and sends them to the others.
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    done = resume(model, optimizer)
    pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = (pixels / 16).float().to(device)
    labels = labels.to(device)
    for step in range(done + 1, options.steps + 1):
        # The same choice in each process, of which it takes every N-th image.
        chosen = torch.Generator().manual_seed(step)
        batch = torch.randint(len(images), (options.batch_size,), generator=chosen)[rank::processes]
        loss = cross_entropy(forward(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()  # Meanwhile, DDP averages the gradients.
        optimizer.step()
        if step == done + 1:
            print(f"process {rank}: {describe_memory(model, optimizer)}", flush=True)
        sums = torch.tensor([loss.item(), len(signals)])
        distributed.all_reduce(sums)
        is_stopping = sums[1] > 0  # in any process: all stop together
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step}/{options.steps}  loss {sums[0] / processes:.4f}", flush=True)
        if is_stopping or step % 50 == 0 or step == options.steps:
            save(model, optimizer, step)
        if is_stopping:
            return STOPPED
    return 0


def describe_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    weights = measure_mib(list(model.parameters()))
    gradients = measure_mib([each.grad for each in model.parameters()])
    # The optimizer inside has the state of this process's part.
    own = getattr(optimizer, "optim", optimizer)
    states = [value for state in own.state.values() for value in state.values()]
    moments = measure_mib(states)
    return f"{weights:.1f} parameters, {gradients:.1f} gradients, {moments:.1f} optimizer (MiB)"


def measure_mib(tensors: list[Tensor]) -> float:
    return sum(each.nbytes for each in tensors) / 2**20


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the checkpoint and return its step; 0 without one."""
    if not CHECKPOINT.exists():
        return 0
    state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    # Each process keeps its part.
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint. A reader finds the old file or the new one, never a part."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        # The first process collects all parts.
        optimizer.consolidate_state_dict(to=0)
    if distributed.get_rank() > 0:
        return
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    partial = CHECKPOINT.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(CHECKPOINT)


if __name__ == "__main__":
    sys.exit(main())
