"""The template cuda-kernel. Without a GPU, its kernels run as C++ and in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from template_program import PATIENCE_S, finish, read_json, start, wait_for_step
from template_project import REPOSITORY

from labctl.insight.scalars import read_scalars
from labctl.runs.evaluation import read_evaluation

pytestmark = pytest.mark.train
NAME = "cuda-kernel"
SOURCE = REPOSITORY / "templates" / NAME / "add.cu"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
# A CPU that runs the threads of a grid one after the other. Each element is guarded by others that
# must keep their values, so that a kernel that writes outside is noticed.
CPU = r"""
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>
#define __global__
struct Place { unsigned x, y; };
static Place blockIdx, threadIdx, blockDim;
#include "add.cu"

template <typename Kernel>
static int count_wrong(Kernel kernel, int rows, int columns, bool by_columns) {
    const int guard = 64;
    std::vector<float> a(rows * columns), b(a), sum(a.size() + 2 * guard, -7);
    for (size_t i = 0; i < a.size(); i++) { a[i] = i; b[i] = 0.5f * i + 1; }
    int across = by_columns ? rows : columns, down = by_columns ? columns : rows;
    blockDim = {32, 8};
    for (blockIdx.y = 0; blockIdx.y < (down + 7u) / 8; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < (across + 31u) / 32; blockIdx.x++)
            for (threadIdx.y = 0; threadIdx.y < 8; threadIdx.y++)
                for (threadIdx.x = 0; threadIdx.x < 32; threadIdx.x++)
                    kernel(a.data(), b.data(), sum.data() + guard, rows, columns);
    int wrong = 0;
    for (size_t i = 0; i < a.size(); i++) wrong += sum[guard + i] != a[i] + b[i];
    for (int i = 0; i < guard; i++) wrong += sum[i] != -7 || sum[guard + a.size() + i] != -7;
    return wrong;
}

int main() {
    int shapes[][2] = {{1, 1}, {1, 65}, {31, 33}, {32, 8}, {77, 5}, {100, 64}};
    for (auto &shape : shapes)
        printf("%d %d\n", count_wrong(add_rows, shape[0], shape[1], false),
               count_wrong(add_columns, shape[0], shape[1], true));
}
"""


def run_on_cpu(source: Path, directory: Path) -> set[str]:
    """Return the numbers of wrong elements of both kernels, for each shape."""
    (directory / "cuda_runtime.h").touch()
    (directory / "main.cpp").write_text(CPU.replace("add.cu", str(source)))
    program = directory / "main"
    compiler = ["g++", "-std=c++17", "-I", str(directory), "-o", str(program)]
    subprocess.run([*compiler, str(directory / "main.cpp")], check=True)
    return set(subprocess.check_output([program], text=True).splitlines())


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_threads_of_each_cuda_kernel_add_all_elements_and_no_other(tmp_path: Path) -> None:
    assert run_on_cpu(SOURCE, tmp_path) == {"0 0"}
    # The check can fail: a kernel without its `if` writes outside.
    wrong = tmp_path / "wrong.cu"
    text = SOURCE.read_text()
    wrong.write_text(text.replace("row < rows && column < columns", "row < rows", 1))
    assert text != wrong.read_text()
    assert run_on_cpu(wrong, tmp_path) != {"0 0"}


@needs_nvcc
def test_nvcc_compiles_the_kernels_for_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        ["nvcc", "-arch=sm_80", "-ptx", "-o", tmp_path / "add.ptx", SOURCE],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    entries = re.findall(r"\.entry (\w+)", (tmp_path / "add.ptx").read_text())
    assert sorted(re.findall(r"add_(?:rows|columns)", " ".join(entries))) == [
        "add_columns",
        "add_rows",
    ]


def test_a_machine_without_a_gpu_says_so_and_measures_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = finish(start(NAME, "measure.py", "--sizes", "8", "64", "--repeat", "2", run=tmp_path))
    assert "No GPU here: torch adds on the CPU, and the kernels for GPUs do not run." in output
    reason = "compiled by nvcc, but there is no GPU here" if shutil.which("nvcc") else "has no nvcc"
    assert re.search(f"cuda: not run: .*{reason}", output)
    assert "triton: not run:" in output
    assert re.search(r"64 x 64 +torch +\d+ us +[\d.]+ GB/s", output)
    evaluation = read_evaluation(tmp_path / "logs" / "evaluation.json")
    assert (evaluation.accuracy, evaluation.items) == (1.0, 152_306)
    assert read_json(tmp_path, "progress") == {"step": 4, "total_steps": 4}
    curves = {series.tag: series.steps for series in read_scalars(tmp_path / "logs").series}
    assert curves == {"gb_per_second/copy": (8, 64), "gb_per_second/torch": (8, 64)}


@pytest.mark.long
def test_a_stopped_measurement_measures_only_what_is_missing(tmp_path: Path) -> None:
    words = ("measure.py", "--sizes", "16", "32", "2048", "1024", "--repeat", "200")
    measurement = start(NAME, *words, run=tmp_path)
    wait_for_step(measurement, tmp_path, 4)
    measurement.send_signal(signal.SIGTERM)
    output, _ = measurement.communicate(timeout=PATIENCE_S)
    assert measurement.returncode == 143, output
    assert "of 8 measurements" in output
    before = json.loads((tmp_path / "checkpoints" / "results.json").read_text())["rows"]
    output = finish(start(NAME, *words, run=tmp_path))
    assert f"continuing after {len(before)} measurements" in output
    after = json.loads((tmp_path / "checkpoints" / "results.json").read_text())["rows"]
    assert after[: len(before)] == before
    assert len(after) == 8


@pytest.mark.long
@needs_triton
def test_the_triton_kernel_adds_right_in_triton_s_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    output = finish(start(NAME, "evaluate.py", run=tmp_path))
    assert "triton: 152,306 of 152,306 sums are right" in output
    assert json.loads(output.splitlines()[-1])["total"] == 2 * 152_306
