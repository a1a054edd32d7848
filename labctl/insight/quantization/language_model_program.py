"""Rounds a language model's weights by torchao, and measures size, latency and accuracy.

labctl passes this file to the Python that has torch, transformers and torchao. Arguments: the
model's directory, the kind of weights, a text, the fewest tokens that it needs. Accuracy is the
share of the text's tokens that the model predicts as the most probable one, from at most CONTEXT
tokens before them. The last line printed is JSON.
"""

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchao import quantization
from transformers import AutoModelForCausalLM, AutoTokenizer

CONTEXT, MOST_TOKENS, TRIALS = 256, 20_000, 10


def choose_config(kind: str) -> Any:
    """Return torchao's weight-only configuration; products stay in the model's own type."""
    if kind == "int4":
        return quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        )
    if kind == "fp8":
        return quantization.Float8WeightOnlyConfig()
    return quantization.Int8WeightOnlyConfig()


def measure_size(model: Any, kind: str) -> int:
    """Return the bytes of the weights; int4 is counted as two in a byte, as it is stored."""
    total = 0
    for parameter in {id(one): one for one in model.parameters()}.values():
        parts = getattr(parameter, "tensor_data_names", None)
        if parts is None:
            total += parameter.numel() * parameter.element_size()
            continue
        for name in parts:
            part = getattr(parameter, name)
            halves = kind == "int4" and part.dtype == torch.int8 and "qdata" in name
            total += part.numel() * part.element_size() // (2 if halves else 1)
    return total


@torch.inference_mode()
def measure(name: str, model: Any, ids: Any, kind: str) -> dict[str, object]:
    correct = total = 0
    for begin in range(0, ids.numel() - 1, CONTEXT):
        part = ids[begin : begin + CONTEXT + 1]
        if part.numel() < 2:
            break
        guesses = model(part[:-1].unsqueeze(0)).logits[0].argmax(dim=-1)
        correct += int((guesses == part[1:]).sum())
        total += part.numel() - 1
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        model(ids[:32].unsqueeze(0))
        times.append((time.perf_counter() - begun) * 1000)
    return {
        "name": name,
        "size_bytes": measure_size(model, kind),
        "latency_ms": sorted(times)[TRIALS // 2],
        "correct": correct,
        "total": total,
    }


def main() -> None:
    directory, kind, text, least = sys.argv[1:5]
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, use_safetensors=True, trust_remote_code=False
    ).eval()
    ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    ids = ids[:MOST_TOKENS]
    if ids.numel() < int(least):
        raise SystemExit(f"the text has {ids.numel()} tokens; at least {least} are needed")
    before = measure(str(model.dtype).removeprefix("torch."), model, ids, "")
    rounded = copy.deepcopy(model)
    quantization.quantize_(rounded, choose_config(kind))
    after = measure(f"{kind} (PTQ)", rounded, ids, kind)
    print(json.dumps({"model": Path(directory).name, "rows": [before, after]}))


main()
