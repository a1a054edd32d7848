"""One optimizer step, on a CPU or a GPU, in full or mixed precision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dataset import NO_LABEL, Batch
from ranks import Ranks


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step. Tensors stay on the device: reading one would wait for the GPU."""

    loss: Tensor  # mean over the step's images, those of all ranks
    correct: Tensor  # how many of them were classified correctly
    gradient_norm: Tensor  # before clipping
    images: int


def mixed_precision(wish: str, device: torch.device) -> torch.dtype | None:
    """Choose the type for mixed precision, or None for float32 only.

    `wish` is auto, bf16, fp16 or off. "auto" means bf16 where the GPU has it, since it has the
    range of float32, fp16 on older GPUs, and float32 on CPUs, where neither is faster as a rule.
    """
    if wish == "auto":
        if device.type != "cuda":
            return None
        # GPUs before Ampere have fp16 in hardware, but emulate bf16, slower
        # than float32.
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[wish]


def learning_rate(step: int, total_steps: int, peak: float) -> float:
    """Return the rate of step 1..total_steps: a linear rise over the first 5%, then half a cosine.

    It depends only on the step, so that a resumed run needs no state of a scheduler.
    """
    warmup = max(1, total_steps // 20)
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


class Learner:
    """A model with its optimizer (AdamW)."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        precision: torch.dtype | None,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        self.model = model.to(device)
        self.ranks = ranks
        self.network = ranks.wrap(self.model)
        self.device = device
        self.precision = precision
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.01)
        # In fp16 small gradients would vanish; scaling the loss up and the
        # gradients down again keeps them. A disabled scaler does nothing.
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)

    def step(self, group: Sequence[Batch], rate: float, clip: float) -> StepResult:
        """Do one step with `group`, whose batches count as one: their gradients are accumulated."""
        self.model.train()
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate
        images_here = torch.stack([(labels >= 0).sum() for _, labels in group]).sum()
        images_in_group = int(self.ranks.add(images_here))
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for number, batch in enumerate(group, start=1):
            images, labels = (part.to(self.device, non_blocking=True) for part in batch)
            with self._averaging(is_last=number == len(group)):
                with self._autocast():
                    logits = self.network(images).float()
                    # Divide by the images of the group, not of the batch: the
                    # last one may be smaller.
                    loss = functional.cross_entropy(
                        logits, labels, reduction="sum", ignore_index=NO_LABEL
                    )
                    loss = loss / images_in_group
                # `backward` averages over the ranks, whose parts add up to the
                # loss.
                scaled = self.scaler.scale(loss * self.ranks.count)
                scaled.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
            correct += (logits.detach().argmax(dim=1) == labels).sum()
        gradient_norm = self._update(clip)
        loss_sum, correct = self.ranks.add(torch.stack([loss_sum, correct]))
        return StepResult(loss_sum, correct, gradient_norm, images_in_group)

    def _averaging(self, *, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Exchange gradients once for each group: until its last batch, each rank sums its own."""
        if is_last or not isinstance(self.network, DistributedDataParallel):
            return contextlib.nullcontext()
        no_sync: contextlib.AbstractContextManager[Any] = self.network.no_sync()
        return no_sync

    def _update(self, clip: float) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        gradient_norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return gradient_norm.detach()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return all state of the next step, by file: weights, moments, random numbers."""
        moments = {
            f"{number}.{name}": value
            for number, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {"model": self.model.state_dict(), "optimizer": moments, "random": random}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the state from `tensors`."""
        self.model.load_state_dict(tensors["model"])
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors["optimizer"].items():
            number, name = key.split(".", 1)
            state.setdefault(int(number), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        torch.set_rng_state(tensors["random"]["cpu"])
        # A run that moves from a CPU to a GPU has none; it continues, but not
        # bit for bit.
        if self.device.type == "cuda" and "cuda" in tensors["random"]:
            torch.cuda.set_rng_state(tensors["random"]["cuda"], self.device)
