"""Rounded weights in the sample project: torchao's values, gradients, and the table of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quantization
import torch
from model import Classifier, Shape
from template_project import TEMPLATE

pytestmark = [pytest.mark.train, pytest.mark.long]
SHAPE = Shape(tuple("0123456789"), 1, 8)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_integers_are_those_of_torchao(kind: str) -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    torch.manual_seed(0)
    weight = torch.randn(6, 3, 3, 3)
    weight[2] = 0
    low, high = quantization.RANGES[kind]
    block = [1, 3, 3, 3]
    scale, zero = primitives.choose_qparams_affine(
        weight, primitives.MappingType.SYMMETRIC, block, torch.int8, low, high, eps=1e-12
    )
    values = primitives.quantize_affine(weight, block, scale, zero, torch.int8, low, high)
    ours = quantization.round_weight(weight, kind)
    assert torch.equal(ours.values, values)
    assert torch.allclose(ours.scale.flatten(), scale.flatten())


@pytest.mark.parametrize("kind", quantization.KINDS)
def test_rounding_keeps_each_weight_near(kind: str) -> None:
    torch.manual_seed(0)
    model = Classifier(SHAPE)
    exact = [layer.weight.clone() for layer in quantization.layers(model)]
    size = sum(value.numel() * 4 for value in model.state_dict().values())
    assert quantization.quantize(model, kind) < size / (3 if kind != "int4" else 6)
    for weight, layer in zip(exact, quantization.layers(model), strict=True):
        most = weight.abs().amax(dim=tuple(range(1, weight.ndim)), keepdim=True)
        step = most / {"int8": 127, "int4": 7, "fp8": 14}[kind]
        assert ((weight - layer.weight).abs() <= step * 0.51).all()


def test_the_gradient_passes_through_the_rounding() -> None:
    torch.manual_seed(0)
    model = Classifier(SHAPE).eval()
    names = set(model.state_dict())
    images = torch.randint(0, 255, (4, 1, 8, 8), dtype=torch.uint8)
    exact = model(images)
    quantization.train_rounded(model, "int4")
    rounded = model(images)
    assert not torch.equal(exact, rounded)
    rounded.sum().backward()
    assert all(layer.weight.grad is not None for layer in quantization.layers(model))
    assert set(model.state_dict()) == names


def test_a_training_with_qat_reports_both(tmp_path: Path) -> None:
    def call(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-B", str(TEMPLATE / words[0]), *words[1:]],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
            text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    words = ("train.py", "--epochs", "3", "--batch-size", "64", "--image-size", "8")
    said = call(*words, "--qat", "int4")
    assert "epoch 3: weights are rounded to int4 (QAT)" in said
    body = json.loads((tmp_path / "logs" / "quantization.json").read_text())
    assert [row["name"] for row in body["rows"]] == ["float32", "int4 (PTQ)", "int4 (QAT)"]
    for row in body["rows"]:
        assert 0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1
        assert row["correct"] / row["total"] == row["accuracy"]
        predicted = row["predictions"]
        pairs = zip(predicted["truth"], predicted["said"], strict=True)
        assert sum(truth == said for truth, said in pairs) == row["correct"]
    orders = {row["predictions"]["order_sha256"] for row in body["rows"]}
    evaluation = json.loads((tmp_path / "logs" / "evaluation.json").read_text())
    assert orders == {evaluation["predictions"]["order_sha256"]}
    after = json.loads(call("quantize.py", "--to", "int8").splitlines()[-1])
    assert [row["name"] for row in after["rows"]] == ["float32", "int8 (PTQ)"]
    assert after["rows"][0]["predictions"] == evaluation["predictions"]
    assert after["rows"][1]["size_bytes"] * 3 < after["rows"][0]["size_bytes"]
