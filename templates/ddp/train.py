"""Train one network in several processes, each with its part of every batch.

    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --standalone --nproc-per-node=2 train.py --compress fp16
    torchrun --standalone --nproc-per-node=2 train.py --sync-every 8
    torchrun --standalone --nproc-per-node=2 train.py --measure

Started again in the same place, it resumes from its checkpoint. SIGTERM and
Ctrl-C make a checkpoint first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter

import exchange
import measure

# labctl sets these on a server. Elsewhere, everything is beside the code.
RUN = Path(os.environ.get("LABCTL_RUN_DIR", "."))
LOGS = Path(os.environ.get("LABCTL_LOG_DIR", RUN / "logs"))
CHECKPOINT = Path(os.environ.get("LABCTL_CHECKPOINT_DIR", RUN / "checkpoints")) / "last.pt"
TEST_IMAGES = 297
TALK_EVERY = 10  # steps between two log entries


def main() -> int:
    options = parse_options()
    device = join()
    try:
        torch.manual_seed(options.seed)  # the same weights in each process
        model = make_model(options.width).to(device)
        if options.measure:
            measure.measure(model, device, options.batch_size, max(options.sync_every, 8), LOGS)
            return 0
        return Training(options, model, device).run()
    finally:
        # What still uses gloo's threads when Python ends would abort it.
        gc.collect()
        distributed.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=10, help="passes over the training images")
    add("--batch-size", type=int, default=60, help="images per step, of all processes together")
    add("--lr", type=float, default=0.05, help="learning rate")
    add("--width", type=int, default=1024, help="neurons per hidden layer")
    add("--seed", type=int, default=int(os.environ.get("SEED", 1)), help="same seed, same run")
    add("--compress", default="none", choices=exchange.COMPRESSIONS, help="how gradients are sent")
    add("--sync-every", type=int, default=1, help="steps between two exchanges (local SGD)")
    add("--measure", action="store_true", help="measure time and bytes per step, without training")
    options = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if options.batch_size % processes and not options.measure:
        parser.error(f"--batch-size must be a multiple of the {processes} processes")
    if options.sync_every > 1 and options.compress != "none":
        parser.error("--compress is for gradients; with --sync-every, parameters are sent")
    return options


def join() -> torch.device:
    """Join the processes that torchrun started. GPUs exchange gradients by NCCL, CPUs by gloo."""
    is_alone = "RANK" not in os.environ
    alone = {"store": distributed.HashStore(), "rank": 0, "world_size": 1} if is_alone else {}
    if not torch.cuda.is_available():
        distributed.init_process_group("gloo", **alone)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl", **alone)
    return device


def make_model(width: int) -> nn.Module:
    hidden = [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def build_model() -> tuple[nn.Module, Tensor]:
    """Return the network and an example, for `labctl estimate train.py:build_model`."""
    return make_model(1024), torch.zeros(1, 64)


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return 1500 training images and 297 test images of handwritten digits."""
    pixels, labels = load_digits(return_X_y=True)
    images, truth = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], truth[train]), TensorDataset(images[test], truth[test])


class Training:
    """One run. `step` counts the steps that are done."""

    def __init__(self, options: argparse.Namespace, model: nn.Module, device: torch.device) -> None:
        self.options, self.model, self.device = options, model, device
        self.processes, self.is_first = distributed.get_world_size(), distributed.get_rank() == 0
        self.train_images, self.test_images = load_images()
        # A new order in each epoch. Each process takes every N-th image of it.
        self.sampler = DistributedSampler(self.train_images, seed=options.seed, drop_last=True)
        part = options.batch_size // self.processes
        self.batches = DataLoader(self.train_images, part, sampler=self.sampler, drop_last=True)
        self.total_steps = options.epochs * len(self.batches)
        self.optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
        self.step = self.resume()
        # With local SGD, each process trains alone between two exchanges.
        self.is_local = options.sync_every > 1
        self.forward = model if self.is_local else exchange.wrap(model, options.compress)
        self.log = SummaryWriter(str(LOGS), purge_step=self.step + 1) if self.is_first else None
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note_signal)

    def note_signal(self, number: int, _frame: object) -> None:
        self.signal = number

    def run(self) -> int:
        """Train to the end, or until a signal comes. Return the exit code."""
        stopped_by = 0
        while self.step < self.total_steps and not stopped_by:
            stopped_by = self.train_epoch()
            self.save()
            if self.is_first:
                self.report(stopped_by)
        if self.log:
            self.log.close()
        return 128 + stopped_by if stopped_by else 0

    def train_epoch(self) -> int:
        """Train to the end of the epoch. Return the signal that ended it earlier, or 0."""
        epoch, done = divmod(self.step, len(self.batches))
        self.sampler.set_epoch(epoch)
        for place, (images, labels) in enumerate(self.batches):
            if place < done:  # The checkpoint was made within an epoch.
                continue
            loss = cross_entropy(self.forward(images.to(self.device)), labels.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()  # Meanwhile, DDP averages the gradients.
            self.optimizer.step()
            self.step += 1
            if self.is_local and self.step % self.options.sync_every == 0:
                exchange.average_parameters(self.model)
            if self.step % TALK_EVERY == 0 and (number := self.talk(loss)):
                return number
        return 0

    def talk(self, loss: Tensor) -> int:
        """Log the mean loss. Return the signal that any process got: all must stop together."""
        mine = torch.tensor([loss.item(), self.signal])
        others = [torch.empty(2) for _ in range(self.processes)]
        distributed.all_gather(others, mine)
        losses, signals = torch.stack(others).unbind(1)
        if self.log:
            self.log.add_scalar("train/loss", float(losses.mean()), self.step)
            progress = {"step": self.step, "total_steps": self.total_steps}
            (LOGS / "progress.json").write_text(json.dumps(progress))
        return int(signals.max())

    @torch.no_grad()
    def report(self, stopped_by: int) -> None:
        if stopped_by:
            print(f"stopped after step {self.step}, with a checkpoint", flush=True)
            return
        images, labels = self.test_images.tensors
        predicted = self.model(images.to(self.device)).argmax(1).cpu()
        accuracy = float((predicted == labels).float().mean())
        self.log.add_scalar("test/accuracy", accuracy, self.step)
        print(f"step {self.step}/{self.total_steps}  test accuracy {accuracy:.4f}", flush=True)

    def resume(self) -> int:
        """Restore the checkpoint, in each process, and return its step; 0 without one."""
        if not CHECKPOINT.exists():
            return 0
        state = torch.load(CHECKPOINT, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.is_first:
            print(f"resuming after step {state['step']}", flush=True)
        return state["step"]

    def save(self) -> None:
        """Write the checkpoint. A reader finds the old file or the new one, never a part."""
        if self.is_local:
            exchange.average_parameters(self.model)
        if not self.is_first:
            return
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
        partial = CHECKPOINT.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save({**state, "step": self.step}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(CHECKPOINT)


if __name__ == "__main__":
    sys.exit(main())
