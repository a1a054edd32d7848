"""Train a small GPT on a text. Stop it at any time; start it again to continue.

    python train.py
    python train.py --text BOOKS --layers 6 --width 384 --context 256
    python train.py --compile --checkpoint-activations --amp bf16

Started again in the same place, it resumes from its last complete checkpoint
with the very numbers it would have had. SIGTERM and Ctrl-C make a checkpoint
first.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import checkpoints
import evaluate
import predict
import text
from checkpoints import Checkpoint, CheckpointError
from journal import (
    LOGS,
    RUN_ID,
    WHERE,
    DivergedError,
    Journal,
    StopRequest,
    check_finite,
    write_json,
)
from model import GPT, Shape, measure_loss

LOG_EVERY = 10  # steps between two points of a curve
PROMPT = "The student"  # continued at each checkpoint


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", type=Path, help="a directory with *.txt files (sentences made by text.py)")
    add("--steps", type=int, default=300, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="pieces of text per step")
    add("--context", type=int, default=96, help="bytes that the network sees at once")
    add("--layers", type=int, default=3, help="blocks")
    add("--heads", type=int, default=4, help="parts of the attention")
    add("--width", type=int, default=96, help="numbers per byte; a multiple of --heads")
    add("--dropout", type=float, default=0.1, help="share of numbers that a step leaves out")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--amp", default="auto", choices=("auto", "bf16", "fp16", "off"), help="mixed precision")
    add("--compile", action="store_true", help="let torch.compile fuse operations")
    add("--checkpoint-activations", action="store_true", help="less memory, more time")
    add("--checkpoint-every", type=int, default=100, help="steps, with a validation")
    add("--keep", type=int, default=3, help="newest checkpoints to keep, beside the best")
    add("--seed", type=int, default=int(os.environ.get("SEED", 1)), help="same seed, same run")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    options = parser.parse_args()
    sizes = ("steps", "batch_size", "context", "layers", "heads", "width")
    sizes += ("checkpoint_every", "keep")
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.compile and not any(map(shutil.which, ("g++", "clang++"))):
        parser.error("--compile needs a C++ compiler: write `image: {build: .}` in lab.yaml")
    if options.width % options.heads:
        parser.error("--width must be a multiple of --heads")
    return options


def mixed_precision(wish: str, device: torch.device) -> torch.dtype | None:
    """Choose the type for matrix products, or None for float32 only.

    "auto": bf16 where the GPU has it, since it has the range of float32; fp16 on older GPUs;
    float32 on CPUs.
    """
    if wish == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[wish]


def learning_rate(step: int, total_steps: int, peak: float) -> float:
    """Rise over the first 5% of the steps, then fall as half a cosine to a tenth."""
    warmup = max(1, total_steps // 20)
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    return peak * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """One run. `step` counts the optimizer steps that are done."""

    def __init__(self, options: argparse.Namespace, stop: StopRequest) -> None:
        self.options, self.stop = options, stop
        self.device = evaluate.pick_device(options.device)
        self.precision = mixed_precision(options.amp, self.device)
        whole, self.origin = text.load(options.text)
        self.parts = text.split(whole, options.context)
        self.shape = Shape(options.context, options.layers, options.heads, options.width)
        torch.manual_seed(options.seed)
        self.model = GPT(
            self.shape,
            options.dropout,
            checkpoint_activations=options.checkpoint_activations,
        ).to(self.device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if options.compile:
            self.forward = torch.compile(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.1)
        # Scales the loss up in fp16, where small gradients would become zero.
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.precision == torch.float16
        )
        self.step, self.seconds = 0, 0.0
        if checkpoint := checkpoints.latest():
            self.resume(checkpoint)
        self.started = time.monotonic() - self.seconds
        self.journal = Journal(self.step)

    def run(self) -> int:
        """Train to the end, or until a stop is requested. Return the exit code."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        number = str(self.precision or torch.float32).removeprefix("torch.")
        print(f"run {RUN_ID}: {parameters:,} parameters, text: {self.origin}", flush=True)
        size = f"{self.options.batch_size} x {self.options.context} bytes per step"
        print(f"on {self.device}, {number}, {size}", flush=True)
        try:
            while self.step < self.options.steps:
                if self.stop.exit_code:
                    self.save({})
                    print(f"stopped after step {self.step}, with a checkpoint", flush=True)
                    return self.stop.exit_code
                self.train_steps()
            self.report()
        finally:
            self.journal.writer.close()
        return 0

    def train_steps(self) -> None:
        """Train until a stop, or until the next validation, and save a checkpoint."""
        losses, started, first = [], time.monotonic(), self.step
        while not self.stop.exit_code:
            losses.append(self.train_step())
            self.step += 1
            is_due = self.step % self.options.checkpoint_every == 0
            is_due |= self.step == self.options.steps
            if self.step % LOG_EVERY == 0 or is_due:
                loss = check_finite(float(torch.stack(losses).mean()))
                tokens = len(losses) * self.options.batch_size * self.options.context
                speed = tokens / (time.monotonic() - started)
                self.log(loss, speed)
                losses, started = [], time.monotonic()
            if is_due:
                self.validate(loss, speed)
                return
        if self.step > first:
            self.journal.writer.flush()

    def train_step(self) -> Tensor:
        """Do one optimizer step and return its loss, which stays on the device."""
        # What a step draws depends on its number alone: a resumed run draws the
        # same pieces, and leaves out the same numbers.
        torch.manual_seed((self.options.seed << 32) + self.step)
        dice = torch.Generator().manual_seed((self.options.seed << 32) + self.step)
        pieces = text.draw(
            self.parts["train"], self.options.batch_size, self.options.context, dice
        ).to(self.device, non_blocking=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step + 1, self.options.steps, self.options.lr)
        self.model.train()
        with self.autocast():
            loss = measure_loss(self.forward(pieces[:, :-1]), pieces[:, 1:])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.precision)

    def log(self, loss: float, speed: float) -> None:
        self.journal.progress(self.step, self.options.steps, loss=loss, tokens_per_second=speed)
        figures = {"train/loss": loss, "train/gradient_norm": float(self.norm)}
        figures["train/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        figures["speed/tokens_per_second"] = speed
        if self.device.type == "cuda":
            figures["memory/peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.journal.scalars(self.step, figures)

    def validate(self, loss: float, speed: float) -> None:
        """Measure the loss on val, write a continuation of PROMPT, and save a checkpoint."""
        score = evaluate.score(self.model, self.parts["val"])
        check_finite(score.loss)
        self.journal.scalars(
            self.step, {"val/loss": score.loss, "val/perplexity": score.perplexity}
        )
        sample = predict.continue_text(self.model, PROMPT.encode(), 60)
        self.journal.writer.add_text("sample", predict.decode(sample), self.step)
        self.save({"val_loss": score.loss, "val_accuracy": score.accuracy, "train_loss": loss})
        print(
            f"step {self.step}/{self.options.steps}  loss {loss:.4f}  val {score.loss:.4f}  "
            f"perplexity {score.perplexity:.2f}  {speed:,.0f} tokens/s",
            flush=True,
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        if state["shape"] != vars(self.shape):
            raise CheckpointError(
                f"{checkpoint.path} has another shape ({state['shape']}); "
                "use the same options, or delete the checkpoints"
            )
        self.model.load_state_dict(load_file(checkpoint.path / "model.safetensors"))
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(checkpoint.path / "optimizer.safetensors").items():
            number, name = key.split(".", 1)
            moments.setdefault(int(number), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if state["scaler"]:  # empty unless the run so far was in fp16
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.seconds = checkpoint.step, state["seconds"]
        print(f"resuming from {checkpoint.path}", flush=True)

    def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint, after the curves up to it."""
        self.journal.writer.flush()
        self.seconds = time.monotonic() - self.started
        moments = {
            f"{number}.{name}": value
            for number, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        state = {"shape": vars(self.shape), "seconds": self.seconds, "run": RUN_ID}
        state["scaler"] = self.scaler.state_dict()
        with checkpoints.writing(self.step, metrics, state) as directory:
            save_file(self.model.state_dict(), directory / "model.safetensors")
            save_file(moments, directory / "optimizer.safetensors")
        checkpoints.prune(self.options.keep)

    def report(self) -> None:
        """Evaluate the best checkpoint on text that neither trained nor chose it."""
        result = evaluate.examine(
            checkpoints.best(checkpoints.DIRECTORY), self.options.text, "test", self.device
        )
        write_json(LOGS / "evaluation.json", {**result, "where": WHERE})
        write_json(
            LOGS / "metrics.json", {**evaluate.summarize(result), "seconds": round(self.seconds, 3)}
        )
        print(
            f"test loss {result['loss']:.4f}, perplexity {math.exp(result['loss']):.2f}, "
            f"{result['accuracy']:.1%} of the next bytes, with {result['checkpoint']}",
            flush=True,
        )


def build_model() -> tuple[GPT, Tensor]:
    """Return the network and an example, for `labctl estimate train.py:build_model`."""
    shape = Shape()
    return GPT(shape), torch.zeros(1, shape.context, dtype=torch.long)


def main() -> None:
    stop = StopRequest()
    try:
        sys.exit(Training(parse_options(), stop).run())
    except (CheckpointError, text.TextError, DivergedError) as error:
        raise SystemExit(f"train: {error}") from None


if __name__ == "__main__":
    main()
