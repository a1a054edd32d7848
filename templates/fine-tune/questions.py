"""Questions with answers to learn: your own, or sums made by this file.

    python questions.py | head      # read them

A line of a *.jsonl file is one: {"prompt": "2 + 3 = ", "answer": "5"}. The last
tenth is for testing, the tenth before it for validation.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Directories with *.jsonl files. `data: {questions: ./questions}` in lab.yaml
# sends yours.
OWN_QUESTIONS = Path(os.environ.get("LABCTL_DATA_DIR", ".")) / "questions"
SPLITS = ("train", "val", "test")
IGNORED = -100  # what cross-entropy in PyTorch and Transformers leaves out
SUMS = 1000


class QuestionsError(Exception):
    """The questions cannot be read; the message says what to change."""


@dataclass(frozen=True)
class Question:
    prompt: str
    answer: str


def write_sums(seed: int = 0) -> list[Question]:
    """Make questions whose answers follow a rule."""
    dice = random.Random(seed)
    pairs = [(dice.randint(0, 9), dice.randint(0, 9)) for _ in range(SUMS)]
    return [Question(f"What is {a} plus {b}? ", f"{a} and {b} make {a + b}.") for a, b in pairs]


def load(directory: Path | None = None) -> tuple[list[Question], str]:
    """Return the questions, and where they are from. Raises QuestionsError."""
    if directory is None and not OWN_QUESTIONS.is_dir():
        return write_sums(), "questions.py"
    directory = directory or OWN_QUESTIONS
    files = sorted(path for path in directory.rglob("*.jsonl") if path.is_file())
    questions = [question for path in files for question in read(path)]
    if len(questions) < 10:
        raise QuestionsError(f"{directory} has {len(questions)} questions in *.jsonl; 10 needed")
    return questions, str(directory)


def read(path: Path) -> list[Question]:
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            question = Question(values["prompt"], values["answer"])
            if not (isinstance(question.prompt, str) and isinstance(question.answer, str)):
                raise TypeError("prompt and answer must be texts")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise QuestionsError(f"{path}, line {number}: {error!r}") from None
        questions.append(question)
    return questions


def split(questions: list[Question]) -> dict[str, list[Question]]:
    first, second = len(questions) * 8 // 10, len(questions) * 9 // 10
    parts = (questions[:first], questions[first:second], questions[second:])
    return dict(zip(SPLITS, parts, strict=True))


def encode(batch: list[Question], tokenizer: object, longest: int) -> dict[str, Tensor]:
    """Turn questions into tokens: input_ids, attention_mask and labels, each (B, T).

    Labels are the tokens of the answer only: the model is not to learn to ask. A question
    longer than `longest` tokens loses its beginning. The end token fills up the others.
    """
    rows = []
    for question in batch:
        prompt = tokenizer(question.prompt, add_special_tokens=False).input_ids
        answer = tokenizer(question.answer, add_special_tokens=False).input_ids
        answer = [*answer, tokenizer.eos_token_id]
        tokens, labels = prompt + answer, [IGNORED] * len(prompt) + answer
        rows.append((tokens[-longest:], labels[-longest:]))
    width = max(len(tokens) for tokens, _ in rows)
    input_ids = torch.full((len(rows), width), tokenizer.eos_token_id)
    labels = torch.full((len(rows), width), IGNORED)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (tokens, targets) in enumerate(rows):
        input_ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.tensor(targets)
        mask[row, : len(tokens)] = 1
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    for each in load()[0]:
        print(each.prompt + each.answer)
