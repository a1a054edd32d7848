"""Train with parameters that the processes share out (FSDP2).

    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --standalone --nproc-per-node=2 train.py --plain

Started again in the same place, it resumes from its checkpoint, also with
another number of processes. SIGTERM and Ctrl-C make a checkpoint first.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# labctl sets this on a server. Elsewhere, checkpoints are beside the code.
CHECKPOINTS = Path(os.environ.get("LABCTL_CHECKPOINT_DIR", "checkpoints"))
STOPPED = 143  # what a shell reports for SIGTERM
signals: list[int] = []  # that this process got


def main() -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=100, help="steps of the whole training")
    add("--batch-size", type=int, default=64, help="images per step, of all processes together")
    add("--width", type=int, default=256, help="width of the network")
    add("--blocks", type=int, default=8, help="depth of the network")
    add("--plain", action="store_true", help="keep everything in each process, to compare (DDP)")
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


def shard(model: nn.Sequential, device: torch.device) -> nn.Module:
    """Leave each process a part of every parameter.

    A layer collects its parameters before it computes, and drops them after it. So only one layer
    is whole at a time.
    """
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(options: argparse.Namespace, device: torch.device) -> int:
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(1)  # the same first weights in each process
    model = make_model(options.width, options.blocks).to(device)
    forward = DistributedDataParallel(model) if options.plain else shard(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
        # Meanwhile, each process gets the mean gradients of its part.
        loss.backward()
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
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = measure_mib(states)
    return f"{weights:.1f} parameters, {gradients:.1f} gradients, {moments:.1f} optimizer (MiB)"


def measure_mib(tensors: list[Tensor]) -> float:
    own = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.nbytes for each in own) / 2**20


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the newest checkpoint and return its step; 0 without one."""
    newest = max(CHECKPOINTS.glob("step-*"), default=None)
    if newest is None:
        return 0
    weights, state = get_state_dict(model, optimizer)
    # Each process reads its part, also if another number of processes wrote it.
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(newest.name.removeprefix("step-"))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write a checkpoint, each process its own part. Only a complete one gets its name."""
    partial = CHECKPOINTS / ".partial"
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=partial)
    distributed.barrier()
    if distributed.get_rank() == 0:
        older = list(CHECKPOINTS.glob("step-*"))
        partial.rename(CHECKPOINTS / f"step-{step:06d}")
        for directory in older:
            shutil.rmtree(directory)
    distributed.barrier()


if __name__ == "__main__":
    sys.exit(main())
