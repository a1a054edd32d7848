"""Train a few steps of a model on the GPU: python gpu_steps.py MODEL PRECISION BATCH

Prints a JSON object: bytes that PyTorch's allocator gave out and reserved, bytes of the process in
the driver's list, and seconds of a step. A process of its own, so that each begins with no memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import estimate_models
import gpt_model
import torch

from labctl.agent.host.nvml import Nvml

WARM, TIMED = 3, 10


def build(name: str) -> tuple[Any, Any]:
    if name == "build_model":
        from train import build_model

        return build_model()
    if name == "gpt":
        return gpt_model.gpt()
    made = estimate_models.MODELS[name]()
    return made if isinstance(made, tuple) else (made, torch.zeros(1, 3, 224, 224))


def main() -> None:
    name, precision, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model, example = build(name)
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = example[:1].cuda().repeat(batch, *[1] * (example.ndim - 1))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            scores = model(inputs).flatten(0, -2)
            labels = torch.zeros(len(scores), dtype=torch.int64, device="cuda")
            loss = torch.nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(TIMED):
        step()
    torch.cuda.synchronize()
    step_s = (time.monotonic() - began) / TIMED
    mine = [one for one in Nvml().list_processes() if one.pid == os.getpid()]
    print(
        json.dumps(
            {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "of_process": mine[0].memory_bytes if mine else None,
                "step_s": step_s,
            }
        )
    )


main()
