"""Fine-tune a language model with LoRA. Stop it at any time; start it again.

    python train.py                                     # a tiny random model
    python train.py --model HuggingFaceTB/SmolLM2-135M  # of the hub
    python train.py --model base --questions QUESTIONS  # local weights

Only the adapter is trained and saved. Started again in the same place, it
resumes from its last complete checkpoint with the very numbers it would have
had. SIGTERM and Ctrl-C make a checkpoint first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import base
import checkpoints
import evaluate
import questions
from base import BaseError
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
from questions import Question, QuestionsError

LOG_EVERY = 10  # steps between two points of a curve


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = str(base.OWN_WEIGHTS) if base.OWN_WEIGHTS.is_dir() else base.TINY
    add = parser.add_argument
    add("--model", default=default, help="a directory, a name on the hub, or tiny")
    add("--questions", type=Path, help="a directory with *.jsonl files (sums)")
    add("--rank", type=int, default=8, help="rows of the thin matrices of each layer")
    add("--steps", type=int, default=200, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="questions per step")
    add("--accumulate", type=int, default=1, help="parts in which a step computes its questions")
    add("--longest", type=int, default=256, help="tokens of a question with its answer")
    add("--lr", type=float, default=2e-3, help="peak learning rate; 2e-4 for a trained model")
    add("--dropout", type=float, default=0.05, help="of the adapter")
    add("--amp", default="auto", choices=("auto", "bf16", "off"), help="mixed precision")
    add("--checkpoint-activations", action="store_true", help="less memory, more time")
    add("--checkpoint-every", type=int, default=50, help="steps, with a validation")
    add("--keep", type=int, default=3, help="newest checkpoints to keep, beside the best")
    add("--seed", type=int, default=int(os.environ.get("SEED", 1)), help="same seed, same run")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    options = parser.parse_args()
    counts = ("rank", "steps", "batch_size", "accumulate", "longest", "checkpoint_every", "keep")
    for name in counts:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.batch_size % options.accumulate:
        parser.error("--batch-size must be a multiple of --accumulate")
    return options


@dataclass(frozen=True)
class Window:
    """Means over the steps since the last log entry."""

    loss: float
    tokens_per_second: float


class Training:
    """One run. `step` counts the optimizer steps that are done."""

    def __init__(self, options: argparse.Namespace, stop: StopRequest) -> None:
        self.options, self.stop = options, stop
        self.device = evaluate.pick_device(options.device)
        everything, self.origin = questions.load(options.questions)
        self.parts = questions.split(everything)
        model, self.tokenizer = base.load(options.model)
        self.fingerprint = base.fingerprint(model)
        torch.manual_seed(options.seed)  # for the matrices A
        self.model = base.add_adapter(model, options.rank, options.dropout).to(self.device)
        if options.checkpoint_activations:
            # Inputs of a block need gradients: its frozen parameters do not.
            self.model.enable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, weight_decay=0.0)
        self.step, self.seconds = 0, 0.0
        if checkpoint := checkpoints.latest():
            self.resume(checkpoint)
        self.started = time.monotonic() - self.seconds
        self.journal = Journal(self.step)

    def run(self) -> int:
        """Train to the end, or until a stop is requested. Return the exit code."""
        every = sum(parameter.numel() for parameter in self.model.parameters())
        trained = sum(parameter.numel() for parameter in self.trained)
        print(f"run {RUN_ID}: {self.options.model}, questions of {self.origin}", flush=True)
        print(
            f"on {self.device}: {trained:,} of {every:,} parameters are trained "
            f"({trained / every:.1%})",
            flush=True,
        )
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
        losses, tokens, started = [], 0, time.monotonic()
        while not self.stop.exit_code:
            loss, count = self.train_step()
            losses.append(loss)
            tokens += count
            self.step += 1
            is_due = self.step % self.options.checkpoint_every == 0
            is_due |= self.step == self.options.steps
            if self.step % LOG_EVERY == 0 or is_due:
                mean = check_finite(float(torch.stack(losses).mean()))
                window = Window(mean, tokens / (time.monotonic() - started))
                self.log(window)
                losses, tokens, started = [], 0, time.monotonic()
            if is_due:
                self.validate(window)
                return

    def train_step(self) -> tuple[Tensor, int]:
        """Do one optimizer step. Return its loss, which stays on the device, and its tokens."""
        # What a step draws depends on its number alone, so a resumed run draws
        # the same.
        torch.manual_seed((self.options.seed << 32) + self.step)
        dice = random.Random((self.options.seed << 32) + self.step)
        chosen = dice.choices(self.parts["train"], k=self.options.batch_size)
        # A rise over the first 5% of the steps, then a straight line to zero.
        rise = (self.step + 1) / max(1, self.options.steps // 20)
        fall = 1 - self.step / self.options.steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, rise, fall)
        self.model.train()
        self.optimizer.zero_grad()
        loss, tokens = self.backward(chosen)
        self.norm = nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        return loss, tokens

    def backward(self, chosen: list[Question]) -> tuple[Tensor, int]:
        """Add up the gradients of the questions, a part at a time."""
        loss_sum, tokens = torch.zeros((), device=self.device), 0
        size = len(chosen) // self.options.accumulate
        parts = [chosen[first : first + size] for first in range(0, len(chosen), size)]
        batches = [questions.encode(part, self.tokenizer, self.options.longest) for part in parts]
        answers = sum(int((batch["labels"] != questions.IGNORED).sum()) for batch in batches)
        for batch in batches:
            tokens += int(batch["attention_mask"].sum())
            with self.autocast():
                losses, _ = evaluate.compare(self.model, batch, self.device)
            # Divide by the tokens of all parts, which differ in length.
            loss = losses.sum() / answers
            loss.backward()
            loss_sum += loss.detach()
        return loss_sum, tokens

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute in bf16 where the GPU has it: weights of language models are made for it."""
        wish, has_bf16 = self.options.amp, False
        if wish == "auto" and self.device.type == "cuda":
            has_bf16 = torch.cuda.get_device_capability(self.device)[0] >= 8
        if wish == "bf16" or has_bf16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def log(self, window: Window) -> None:
        figures = vars(window)
        self.journal.progress(self.step, self.options.steps, **figures)
        curves = {
            "train/loss": window.loss,
            "train/gradient_norm": float(self.norm),
            "train/learning_rate": self.optimizer.param_groups[0]["lr"],
            "speed/tokens_per_second": window.tokens_per_second,
        }
        if self.device.type == "cuda":
            curves["memory/peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.journal.scalars(self.step, curves)

    def validate(self, window: Window) -> None:
        """Measure loss and accuracy on val, and save a checkpoint."""
        score = evaluate.score(self.model, self.tokenizer, self.parts["val"], self.options.longest)
        check_finite(score.loss)
        self.journal.scalars(self.step, {"val/loss": score.loss, "val/accuracy": score.accuracy})
        self.save({"val_loss": score.loss, "val_accuracy": score.accuracy})
        print(
            f"step {self.step}/{self.options.steps}  loss {window.loss:.4f}  "
            f"val {score.loss:.4f}  {score.accuracy:.1%} of the tokens  "
            f"{window.tokens_per_second:,.0f} tokens/s",
            flush=True,
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        fixed = {"fingerprint": self.fingerprint, "rank": self.options.rank}
        for name, value in fixed.items():
            if state[name] != value:
                raise CheckpointError(
                    f"{checkpoint.path} has another {name} ({state[name]}, now {value}); use the "
                    "same --model and --rank, or delete the checkpoints"
                )
        adapter = load_file(checkpoint.path / "adapter_model.safetensors")
        set_peft_model_state_dict(self.model, adapter)
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in load_file(checkpoint.path / "optimizer.safetensors").items():
            number, name = key.split(".", 1)
            moments.setdefault(int(number), {})[name] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.step, self.seconds = checkpoint.step, state["seconds"]
        print(f"resuming from {checkpoint.path}", flush=True)

    def save(self, metrics: dict[str, float]) -> None:
        """Write a checkpoint, after the curves up to it. PEFT can load it, too."""
        self.journal.writer.flush()
        self.seconds = time.monotonic() - self.started
        moments = {
            f"{number}.{name}": value
            for number, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        state: dict[str, Any] = {
            "model": self.options.model,
            "fingerprint": self.fingerprint,
            "rank": self.options.rank,
            "longest": self.options.longest,
            "seconds": self.seconds,
            "run": RUN_ID,
        }
        with checkpoints.writing(self.step, metrics, state) as directory:
            adapter = get_peft_model_state_dict(self.model)
            save_file(adapter, directory / "adapter_model.safetensors")
            self.model.peft_config["default"].save_pretrained(str(directory))
            save_file(moments, directory / "optimizer.safetensors")
        checkpoints.prune(self.options.keep)

    def report(self) -> None:
        """Evaluate the best checkpoint on questions that neither trained nor chose it."""
        best = checkpoints.best(checkpoints.DIRECTORY)
        result, before = evaluate.examine(best, self.options.questions, "test", self.device)
        write_json(LOGS / "evaluation.json", {**result, "where": WHERE})
        summary = evaluate.summarize(result, before)
        write_json(LOGS / "metrics.json", {**summary, "seconds": round(self.seconds, 3)})
        print(
            f"test loss {result['loss']:.4f}, {result['accuracy']:.1%} of the answers' tokens "
            f"(before: {before.accuracy:.1%}), with {result['checkpoint']}",
            flush=True,
        )


def build_model() -> tuple[nn.Module, Tensor]:
    """Return the tiny model with its adapter, for `labctl estimate train.py:build_model`."""
    model, _ = base.load(base.TINY)
    return base.add_adapter(model, rank=8, dropout=0.0), torch.zeros(1, 64, dtype=torch.long)


def main() -> None:
    stop = StopRequest()
    try:
        sys.exit(Training(parse_options(), stop).run())
    except (BaseError, CheckpointError, QuestionsError, DivergedError) as error:
        raise SystemExit(f"train: {error}") from None


if __name__ == "__main__":
    main()
