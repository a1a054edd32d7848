"""Runs to report on: an ordinary one, and parts to spoil it with."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import msgspec

from labctl.insight.report.facts import (
    Bill,
    Checkpoint,
    LostServer,
    ReportFacts,
)
from labctl.insight.scalars import Scalars, Series
from labctl.insight.telemetry import GpuSample, Sample
from labctl.model import Run
from labctl.runs.evaluation import Evaluation, Mistake
from labctl.runs.provenance import MachineGpu, RunOrigin, ServerHardware

BEGAN = 1_763_700_000.0
GIB = 1024**3


def png(width: int = 8, height: int = 8) -> bytes:
    """A PNG that says that it is so large; its pixels are those of one row."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + bytes(range(8)) for _ in range(8)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def data_uri(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def evaluation(classes: tuple[str, ...] = ("cat", "dog"), **changes: Any) -> Evaluation:
    """Right are 8 of 10 of the first class and all of the others' 10."""
    size = len(classes)
    rows = [[10 if row == column else 0 for column in range(size)] for row in range(size)]
    rows[0][0], rows[0][1] = 8, 2
    found = Evaluation(
        checkpoint="step-00000030",
        classes=classes,
        confusion=tuple(map(tuple, rows)),
        accuracy=(10 * size - 2) / (10 * size),
        items=10 * size,
        checkpoint_sha256="c" * 64,
        data_sha256="d" * 64,
        baseline_accuracy=1 / size,
        device="cpu",
        at=BEGAN + 900,
        worst=(
            Mistake(
                item=f"{classes[0]}/1.png",
                truth=classes[0],
                predicted=classes[1],
                probability=0.91,
                picture=data_uri(png()),
            ),
        ),
    )
    return msgspec.structs.replace(found, **changes)


def series(tag: str, *values: float) -> Series:
    steps = tuple(10 * (place + 1) for place in range(len(values)))
    return Series(tag=tag, steps=steps, values=values, times=tuple(map(float, steps)))


def sample(at_s: float, **figures: Any) -> Sample:
    gpu = {"uuid": "GPU-1", "name": "NVIDIA T4", "use_percent": 80.0, "power_w": 60.0}
    gpu |= {"memory_bytes": 8 * GIB, "memory_total_bytes": 16 * GIB, **figures.pop("gpu", {})}
    body = {"cpu_cores": 3.0, "cores": 4.0, "memory_bytes": 2 * GIB, **figures}
    return Sample(at=BEGAN + at_s, gpus=(GpuSample(**gpu),), **body)


def facts(**changes: Any) -> ReportFacts:
    """A run of ten minutes on a T4, evaluated here and on the server."""
    found = ReportFacts(
        lab="digits",
        run=Run(
            id="first",
            lab_id="l1",
            server_id="s1",
            state="exited",
            command=("python", "train.py"),
            image="labctl/digits:1",
            image_id="sha256:" + "a" * 64,
            exit_code=0,
            summary="done",
            created_at=BEGAN,
            started_at=BEGAN,
            ended_at=BEGAN + 600,
        ),
        evaluation=evaluation(),
        here=evaluation(),
        server=evaluation(where="server"),
        server_accuracy=evaluation().accuracy,
        scalars=Scalars(
            series=(
                series("train/loss", 2.0, 1.0, 0.5, 0.4),
                series("val/loss", 1.8, 1.1, 0.6, 0.7),
                series("val/accuracy", 0.3, 0.6, 0.9, 0.88),
            ),
            files=1,
        ),
        samples=tuple(sample(10.0 * i, gpu={"energy_j": 1000.0 + 600 * i}) for i in range(60)),
        checkpoints=(
            Checkpoint(name="step-00000030", step=30, epoch=3, metrics={"val_accuracy": 0.9}),
            Checkpoint(name="step-00000040", step=40, epoch=4, metrics={"val_accuracy": 0.88}),
        ),
        chosen_step=30,
        code=RunOrigin(
            commit="e" * 40,
            branch="main",
            dirty=False,
            command=("python", "train.py"),
            env={"SEED": "1"},
        ),
        machine=ServerHardware(
            os="Debian 12",
            arch="x86_64",
            kernel="6.1",
            docker="26.0",
            cpus=4,
            memory_bytes=16 * GIB,
            gpus=(MachineGpu(name="NVIDIA T4", memory_bytes=16 * GIB, driver="550.90"),),
        ),
        bill=Bill(
            provider="aws",
            type="g4dn.xlarge",
            spot=True,
            price_usd_per_hour=0.18,
            run_hours=1 / 6,
            run_usd=0.03,
            lab_usd=0.11,
            lab_complete=True,
            idle_share=0.25,
        ),
        reclaims=(
            LostServer(at=BEGAN + 300, reason="taken back", last_step=25, from_step=20, took_s=95),
        ),
        made_at=BEGAN + 1000,
        labctl="0.1.0",
    )
    return msgspec.structs.replace(found, **changes)
