"""The sample project, reclaimed again and again: every run arrives where it would have anyway.

LABCTL_RECLAIMS says how often, at random moments (scripts/test --long: twenty times); every second
server goes without notice. Runs follow each other until there were so many. The store is a
directory on an SSH server.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lab_directory import LabDirectory, Process, make_lab
from lab_servers import wait_for
from store_lab import StoreLab, store_box

from labctl.lab import Lab
from labctl.providers.local import cache, engine
from labctl.wire.watchdog import RECLAIM_NOTICE, ReclaimNoticeRequest

pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.long]

RECLAIMS = int(os.environ.get("LABCTL_RECLAIMS", "2"))
EVERY, EPOCHS = 25, 20
STEPS = 40 * EPOCHS
NOTICE_S = 60.0
MIRROR_S = 5.0
# An owner of its own, so that what an interrupted run left behind is not in the way.
OWNER = f"tests-{secrets.token_hex(4)}"
RUN = (
    "env OMP_NUM_THREADS=1 "  # on a busy machine two threads mostly wait for each other
    f"python train.py --epochs {EPOCHS} --checkpoint-every {EVERY} --log-every 1"
)
# Where packages come from the network: a fraction of the download.
CPU = (
    "    TORCH: torch==2.13.0+cpu\n    PIP_EXTRA_INDEX_URL: https://download.pytorch.org/whl/cpu\n"
)
JUPYTER = ' jupyterlab "jupyter-server>=2.20"'
BEGUN = re.compile(r"run \S+: [\d,]+ images")
GAP = re.compile(r"\(attempt \d+\) ---\n(?:.*\n)*?resuming from \S+/step-(\d+)")


@dataclass
class Reclaim:
    """The step that the run had to go on from at the least: with notice the one that it had told,
    without one that of the newest checkpoint in the store."""

    announced: bool
    step: int


@dataclass
class Watched:
    """One run that is followed, and how often its server was taken away."""

    stored: StoreLab
    id: str
    process: Process
    reclaims: list[Reclaim] = field(default_factory=list)

    @property
    def lab(self) -> LabDirectory:
        return self.stored.lab

    @property
    def ended(self) -> bool:
        return self.process.popen.poll() is not None

    def attempts(self) -> int:
        """How many have begun to train."""
        return len(BEGUN.findall(self.process.out.decode(errors="replace")))

    def watch(self, span_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.popen.wait(span_s)

    def told(self) -> int:
        """The step that the run itself last told."""
        text = self.lab.student(f"cat {self.lab.place(self.id)}/logs/progress.json", check=False)
        with suppress(ValueError):
            return int(json.loads(text)["step"])
        return 0

    def mirrored(self) -> int:
        """The step of the newest checkpoint in the store."""
        names = " ".join(self.stored.index(self.id))
        return max(map(int, re.findall(r"step-(\d+)/manifest\.json", names)), default=0)


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[StoreLab]:
    """The sample project with a store."""
    folder = tmp_path_factory.mktemp("twenty")
    with store_box(folder, "2g") as (store, socket):
        made = make_lab(folder, "unused", base_image)
        made.environ["SSH_AUTH_SOCK"] = socket
        # The next server gets the layers of the one before it, and nobody else's.
        made.environ["LOGNAME"] = made.environ["LABCTL_CACHE_POOL"] = OWNER
        if wheels := os.environ.get("LABCTL_WHEELHOUSE", ""):
            made.environ["LABCTL_WHEELHOUSE"] = wheels
        made.labctl("init", "twenty", "--provider", "local")
        made.root, made.name = made.root / "twenty", "twenty"
        without_jupyter(made.root / "Dockerfile")
        about = made.root / "lab.yaml"
        text = about.read_text().replace("gpu: auto ", "gpu: none ")
        if not wheels:
            text = text.replace("BASE: python:3.11-slim\n", f"BASE: python:3.11-slim\n{CPU}", 1)
        about.write_text(f"{text}\nstore: {store.url}\nmirror: {MIRROR_S:.0f}s\n")
        try:
            made.server_id = made.json("up", "--yes")["server"]["id"]
            yield StoreLab(made, store)
        finally:
            made.labctl("down", "--yes", "--discard")
            with engine.connect() as docker:
                for volume in docker.volumes.list(filters={"label": f"{cache.LABEL}={OWNER}"}):
                    volume.remove()


def without_jupyter(dockerfile: Path) -> None:
    """Nobody opens a notebook here, and it is the half of what the image installs."""
    text = dockerfile.read_text()
    assert JUPYTER in text
    dockerfile.write_text(text.replace(JUPYTER, ""))


def test_every_run_ends_where_it_would_have(stored: StoreLab) -> None:
    chance = random.Random(20)  # the moments are random anyway; this shares them out evenly
    runs: list[Watched] = []
    while (done := sum(len(run.reclaims) for run in runs)) < RECLAIMS:
        # A run may end before its server goes, but not again and again.
        assert len(runs) < RECLAIMS + 5, [run.process.stderr for run in runs[-2:]]
        name = f"run-{len(runs)}"
        words = ("run", "--recover", "--yes", "--id", name, "--", *RUN.split())
        run = Watched(stored, name, stored.lab.start(*words))
        runs.append(run)
        reclaimed_until_it_ends(run, RECLAIMS - done, chance)
    for run in runs:
        arrived(run)
    unannounced = [reclaim for run in runs for reclaim in run.reclaims if not reclaim.announced]
    if len(unannounced) > 3:  # the first may come before the first checkpoint
        assert any(reclaim.step for reclaim in unannounced), "nothing ever came to the store"


def reclaimed_until_it_ends(run: Watched, most: int, chance: random.Random) -> None:
    while len(run.reclaims) < most:
        attempts = len(run.reclaims) + 1
        wait_for(lambda n=attempts: run.ended or run.attempts() >= n, 600)  # type: ignore[misc]
        if run.ended:
            break
        announced = len(run.reclaims) % 2 == 0
        run.watch(chance.uniform(0.2, 2.0) if announced else chance.uniform(0.5, 9.0))
        if not run.ended and not taken(run, announced):
            break
    run.process.end(0, deadline_s=900)


def taken(run: Watched, announced: bool) -> bool:
    """The server goes; False where the run had ended before."""
    lab, before = run.lab, run.lab.server_id
    context = Lab.load(lab.root, environ=lab.environ).context
    if announced:
        step = run.told()
        notice = ReclaimNoticeRequest(context.lab_id, NOTICE_S, source="the test")
        context.open_agent(context.get_server()).call(RECLAIM_NOTICE, notice)
    else:
        with engine.connect() as docker:
            docker.containers.get(before).remove(force=True, v=True)
        step = run.mirrored()

    def replaced() -> bool:
        server = context.state.get_lab_server(context.lab_id)
        return run.ended or (server is not None and server.id != before)

    wait_for(replaced, 300)
    if run.ended:
        return False
    server = context.state.get_lab_server(context.lab_id)
    assert server is not None
    lab.server_id = server.id
    run.reclaims.append(Reclaim(announced, step))
    return True


def arrived(run: Watched) -> None:
    said = run.process.stdout
    assert f"step {STEPS}/{STEPS}" in said
    resumed = [int(step) for step in GAP.findall(said)]
    assert len(resumed) == len(run.reclaims), said
    for reclaim, step in zip(run.reclaims, resumed, strict=True):
        assert step >= reclaim.step, (reclaim, resumed)
    assert resumed == sorted(resumed)
    run.lab.labctl("pull", run.id)
    here = run.lab.root / "runs" / run.id
    assert (here / "checkpoints" / f"step-{STEPS:08d}" / "manifest.json").exists()
    # What TensorBoard shows: each step once, whoever did it, and no break in the values.
    steps, losses = zip(*loss_curve(here / "logs"), strict=True)
    assert list(steps) == list(range(1, STEPS + 1))
    for step in resumed:
        around = losses[max(0, step - 40) : step + 40]
        assert max(around) < 3.0, (step, around)
    assert sum(losses[-40:]) / 40 < 0.5 * sum(losses[:40]) / 40


def loss_curve(logs: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events = EventAccumulator(str(logs), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]
