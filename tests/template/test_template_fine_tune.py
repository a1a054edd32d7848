"""The template fine-tune: LoRA on a tiny random Llama, and on one from a directory."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from own_modules import load_modules
from safetensors.torch import load_file
from template_program import PATIENCE_S, finish, read_json, start, wait_for_step

from labctl.insight.scalars import read_scalars
from labctl.runs.evaluation import read_evaluation

NAME = "fine-tune"
SHORT = ("--checkpoint-every", "10", "--batch-size", "4", "--steps")
pytestmark = pytest.mark.train
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="the template fine-tune needs packages: pip install transformers peft",
)


class Characters:
    """A tokenizer whose tokens are the characters."""

    eos_token_id = 0

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return type("Encoding", (), {"input_ids": [ord(character) for character in text]})


def test_only_answers_are_learned() -> None:
    (questions,) = load_modules(NAME, "questions")
    batch = [questions.Question("ab", "c"), questions.Question("d", "efg")]
    encoded = questions.encode(batch, Characters(), longest=4)
    assert encoded["input_ids"].tolist() == [[97, 98, 99, 0], [101, 102, 103, 0]]
    assert encoded["labels"].tolist() == [[-100, -100, 99, 0], [101, 102, 103, 0]]
    encoded = questions.encode(batch, Characters(), longest=100)
    assert encoded["labels"].tolist() == [[-100, -100, 99, 0, -100], [-100, 101, 102, 103, 0]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "line", ['{"prompt": "a"}', '["a", "b"]', '{"prompt": 1, "answer": "b"}', "{", "[" * 100_000]
)
def test_a_file_with_other_lines_is_refused_by_line(tmp_path: Path, line: str) -> None:
    (questions,) = load_modules(NAME, "questions")
    good = json.dumps({"prompt": "a", "answer": "b"})
    (tmp_path / "own.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(questions.QuestionsError, match=r"own\.jsonl, line 3"):
        questions.load(tmp_path)
    (tmp_path / "own.jsonl").write_text(f"{good}\n" * 9)
    with pytest.raises(questions.QuestionsError, match="9 questions"):
        questions.load(tmp_path)


def begin(*words: str, run: Path) -> subprocess.Popen[str]:
    """Start a program of the template, whose libraries warn of each other."""
    return start(NAME, *words, run=run, warnings_are_errors=False)


@pytest.mark.long
@needs_peft
def test_it_learns_and_is_evaluated_and_answers(tmp_path: Path) -> None:
    output = finish(begin("train.py", run=tmp_path))
    evaluation = read_evaluation(tmp_path / "logs" / "evaluation.json")
    assert evaluation.accuracy > 0.8, output
    assert evaluation.baseline_accuracy == pytest.approx(0.2, abs=0.1)
    assert read_json(tmp_path, "metrics")["accuracy_before"] < 0.05
    tags = {series.tag for series in read_scalars(tmp_path / "logs").series}
    assert {"train/loss", "val/loss", "val/accuracy", "speed/tokens_per_second"} <= tags
    said = json.loads(finish(begin("evaluate.py", run=tmp_path)).splitlines()[-1])
    assert (said["accuracy"], said["total"]) == (evaluation.accuracy, evaluation.items)
    answer = finish(begin("predict.py", "What is 3 plus 4? ", run=tmp_path))
    # A library may print lines before them.
    after, before = answer.splitlines()[-2:]
    assert " make " in after
    assert before.startswith("before fine-tuning: ")


@pytest.mark.long
@needs_peft
@pytest.mark.parametrize("switch", [(), ("--accumulate", "2", "--checkpoint-activations")])
def test_a_stopped_training_goes_on_with_the_same_numbers(
    tmp_path: Path, switch: tuple[str, ...]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "stopped"
    words = ("train.py", *SHORT, "30", *switch)
    finish(begin(*words, run=whole))
    training = begin(*words, run=run)
    wait_for_step(training, run, 10)
    training.send_signal(signal.SIGTERM)
    output, _ = training.communicate(timeout=PATIENCE_S)
    assert training.returncode == 143, output
    assert ", with a checkpoint" in output
    output = finish(begin(*words, run=run))
    assert "resuming from" in output
    first, second = (load_file(adapter(each)) for each in (whole, run))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(first) == 2 * 2 * 7, "A and B of 7 linear layers in 2 blocks"
    assert read_json(whole, "metrics")["loss"] == read_json(run, "metrics")["loss"]


def adapter(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*")) / "adapter_model.safetensors"


@pytest.mark.long
@needs_peft
def test_local_weights_are_fine_tuned_and_peft_loads_the_adapter(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    (base,) = load_modules(NAME, "base")
    weights = tmp_path / "base"
    model, tokenizer = base.make_tiny()
    model.save_pretrained(weights)
    tokenizer.save_pretrained(weights)
    words = ("train.py", *SHORT, "10", "--model", str(weights))
    run = tmp_path / "run"
    assert "step 10/10" in finish(begin(*words, run=run))
    loaded = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(weights), adapter(run).parent
    )
    stored = load_file(adapter(run))
    own = {name.replace(".default", ""): value for name, value in loaded.state_dict().items()}
    assert all(torch.equal(own[name], stored[name]) for name in stored)
    # An adapter of other weights says nothing about these.
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
    model.save_pretrained(weights)
    output = finish(begin("evaluate.py", run=run), 1)
    assert "is an adapter of another model" in output
    (weights / "model.safetensors").rename(weights / "model.bin")
    output = finish(begin("evaluate.py", run=run), 1)
    assert f"evaluate: {weights} cannot be loaded" in output
