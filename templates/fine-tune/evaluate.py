"""Evaluate an adapter: how well does the model with it answer questions?

    python evaluate.py              # the best in ./checkpoints
    python evaluate.py runs/RUN     # the best one there

The loss, in nats per token, is that of the answers; the perplexity is its
exponential. Accuracy is the share of the answers' tokens that had the highest
score. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase

import base
import checkpoints
import questions
from base import BaseError
from checkpoints import Checkpoint, CheckpointError
from journal import WHERE, write_json
from questions import IGNORED, Question, QuestionsError

BATCH = 16  # questions at once


@dataclass(frozen=True)
class Score:
    """The result of a model on questions."""

    loss: float  # nats per token of the answers
    correct: int  # tokens that had the highest score
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 100.0))


def pick_device(wish: str) -> torch.device:
    """`wish` is auto (a GPU if there is one) or a device such as cpu or cuda:1."""
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wish)


def load_model(
    checkpoint: Checkpoint, device: torch.device, name: str = ""
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load the model that a checkpoint was made for, with its adapter.

    `name` is another place of the same weights. Raises CheckpointError for other weights.
    """
    state = checkpoint.state
    model, tokenizer = base.load(name or state["model"])
    if base.fingerprint(model) != state["fingerprint"]:
        raise CheckpointError(f"{checkpoint.path} is an adapter of another model, {state['model']}")
    model = base.add_adapter(model, state["rank"], dropout=0.0)
    set_peft_model_state_dict(model, load_file(checkpoint.path / "adapter_model.safetensors"))
    return model.to(device).eval(), tokenizer


@torch.inference_mode()
def score(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, part: list[Question], longest: int
) -> Score:
    """Predict each token of each answer once, from the tokens before it."""
    model.eval()
    device = next(model.parameters()).device
    loss, correct, total = 0.0, 0, 0
    for first in range(0, len(part), BATCH):
        batch = questions.encode(part[first : first + BATCH], tokenizer, longest)
        losses, is_right = compare(model, batch, device)
        loss += float(losses.double().sum())
        correct += int(is_right.sum())
        total += len(losses)
    return Score(loss / total, correct, total)


def compare(
    model: nn.Module, batch: dict[str, Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token of the answers, and whether it had the highest score."""
    ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    scores = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    # The scores at a place are for the token that comes next.
    labels = batch["labels"][:, 1:].to(device)
    is_answer = labels != IGNORED
    scores, truth = scores[:, :-1][is_answer].float(), labels[is_answer]
    return cross_entropy(scores, truth, reduction="none"), scores.argmax(1) == truth


def examine(
    checkpoint: Checkpoint, directory: Path | None, split: str, device: torch.device, name: str = ""
) -> tuple[dict[str, Any], Score]:
    """Evaluate a checkpoint; return the body of labctl's evaluation.json.

    And the score of the model as it was, before fine-tuning. Raises CheckpointError if the loss is
    NaN or infinite.
    """
    model, tokenizer = load_model(checkpoint, device, name)
    parts = questions.split(questions.load(directory)[0])
    part = parts[split]
    longest = checkpoint.state["longest"]
    result = score(model, tokenizer, part, longest)
    if not math.isfinite(result.loss):
        raise CheckpointError(f"{checkpoint.path}: its loss on {split} is {result.loss}")
    with model.disable_adapter():
        before = score(model, tokenizer, part, longest)
    body = {
        "version": 1,
        "checkpoint": checkpoint.path.resolve().name,
        "checkpoint_sha256": checkpoint.files["adapter_model.safetensors"]["sha256"],
        "data_sha256": hashlib.sha256(repr(part).encode()).hexdigest(),
        "split": split,
        # A confusion matrix of all tokens would say little.
        "classes": [],
        "confusion": [],
        "accuracy": result.accuracy,
        "items": result.total,
        "baseline_accuracy": baseline(parts["train"][:1000], part, tokenizer, longest),
        "loss": result.loss,
        "device": str(device),
        "at": round(time.time(), 3),
    }
    return body, before


def baseline(
    train: list[Question], part: list[Question], tokenizer: PreTrainedTokenizerBase, longest: int
) -> float:
    """Compute the accuracy of always saying the most frequent token of the answers."""
    usual, labels = (
        questions.encode(each, tokenizer, longest)["labels"].flatten() for each in (train, part)
    )
    usual, labels = usual[usual != IGNORED], labels[labels != IGNORED]
    return float((labels == usual.bincount().argmax()).float().mean())


def summarize(result: dict[str, Any], before: Score) -> dict[str, Any]:
    """Return what the last line says: accuracy, checkpoint and total are labctl's names."""
    names = ("accuracy", "loss", "checkpoint", "split")
    more = {"total": result["items"], "perplexity": math.exp(min(result["loss"], 100.0))}
    return {name: result[name] for name in names} | more | {"accuracy_before": before.accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("path", type=Path, nargs="?", default=checkpoints.DIRECTORY, help="or anything above it")
    add("--model", default="", help="the weights, if they are elsewhere now")
    add("--questions", type=Path, help="a directory with *.jsonl files")
    add("--split", default="test", choices=questions.SPLITS)
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    # labctl sets this variable.
    out = os.environ.get("LABCTL_EVALUATION")
    add("--out", type=Path, default=out, help="write the whole evaluation there")
    options = parser.parse_args()
    try:
        checkpoint = checkpoints.best(options.path)
        device = pick_device(options.device)
        result, before = examine(
            checkpoint, options.questions, options.split, device, options.model
        )
    except (BaseError, CheckpointError, QuestionsError) as error:
        raise SystemExit(f"evaluate: {error}") from None
    if options.out:
        write_json(options.out, {**result, "where": WHERE})
    print(json.dumps(summarize(result, before)))


if __name__ == "__main__":
    main()
