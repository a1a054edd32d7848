"""Train in one process or several with Hugging Face Accelerate.

    python train.py
    torchrun --standalone --nproc-per-node=2 train.py --accumulate 4

Started again in the same place, it resumes from its checkpoint, which it makes
after each epoch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

# labctl sets this on a server. Elsewhere, checkpoints are beside the code.
CHECKPOINTS = Path(os.environ.get("LABCTL_CHECKPOINT_DIR", "checkpoints"))
TEST_IMAGES = 297
STOPPED = 143  # what a shell reports for SIGTERM


def main() -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=5, help="passes over the training images")
    add("--batch-size", type=int, default=30, help="images per batch, of each process")
    add("--accumulate", type=int, default=1, help="batches between two exchanges of gradients")
    add("--width", type=int, default=1024, help="neurons per hidden layer")
    add("--precision", default="no", choices=("no", "fp16", "bf16"), help="mixed precision")
    options = parser.parse_args()
    # Accelerate takes the ranks from torchrun. A CPU has to be asked for.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=options.accumulate,
        mixed_precision=options.precision,
        # The order of the images depends only on the epoch.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: accelerator.set_trigger())
    try:
        return train(options, accelerator)
    finally:
        accelerator.end_training()


def make_model(width: int) -> nn.Module:
    hidden = [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def build_model() -> tuple[nn.Module, torch.Tensor]:
    """Return the network and an example, for `labctl estimate train.py:build_model`."""
    return make_model(1024), torch.zeros(1, 64)


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return 1500 training images and 297 test images of handwritten digits."""
    pixels, labels = load_digits(return_X_y=True)
    images, truth = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], truth[train]), TensorDataset(images[test], truth[test])


def train(options: argparse.Namespace, accelerator: Accelerator) -> int:
    set_seed(1)  # the same first weights in each process
    model = make_model(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_images, test_images = load_images()
    batches = DataLoader(train_images, options.batch_size, shuffle=True, drop_last=True)
    test_batches = DataLoader(test_images, 100)
    # Moves all to the device, wraps the model, and gives each process its part
    # of the images.
    model, optimizer, batches, test_batches = accelerator.prepare(
        model, optimizer, batches, test_batches
    )
    done = resume(accelerator)
    for epoch in range(done + 1, options.epochs + 1):
        started = time.perf_counter()
        batches.set_epoch(epoch)
        for images, labels in batches:
            # Exchanges gradients and updates parameters with each N-th batch.
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.check_trigger():  # in any process: all stop together
                accelerator.print(f"stopped during epoch {epoch}; a resumed run repeats it")
                return STOPPED
        ms = (time.perf_counter() - started) / len(batches) * 1000
        save(accelerator, epoch)
        accuracy = evaluate(accelerator, model, test_batches)
        accelerator.print(
            f"epoch {epoch}/{options.epochs}  test accuracy {accuracy:.4f}  {ms:.1f} ms/batch"
        )
    return 0


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, batches: DataLoader) -> float:
    right = []
    for images, labels in batches:
        # Of all processes, without the images that fill up the last batch.
        right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    return torch.cat(right).float().mean().item()


def resume(accelerator: Accelerator) -> int:
    """Restore the newest checkpoint and return its epoch; 0 without one."""
    newest = max(CHECKPOINTS.glob("epoch-*"), default=None)
    if newest is None:
        return 0
    accelerator.load_state(newest)
    accelerator.print(f"resuming after {newest.name}")
    return int(newest.name.removeprefix("epoch-"))


def save(accelerator: Accelerator, epoch: int) -> None:
    """Write a checkpoint. Only a complete one gets its name."""
    partial = CHECKPOINTS / ".partial"
    accelerator.save_state(partial)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        older = list(CHECKPOINTS.glob("epoch-*"))
        partial.rename(CHECKPOINTS / f"epoch-{epoch:04d}")
        for directory in older:
            shutil.rmtree(directory)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    sys.exit(main())
