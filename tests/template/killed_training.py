"""Trains in children that are killed, again and again, and looks at what each of them left.

    PYTHONPATH=templates/image-classifier python killed_training.py DATA FOLDER KILLS

Children are forks. Every second one gets SIGTERM first and NOTICE_S to
end by itself, the others kill -9 alone; the last may go on to the end. FOLDER/killed is the run,
FOLDER/whole one that nobody disturbed. Prints a JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import torch
import train
from options import parse_options
from places import from_environment

EVERY = 5
ARGUMENTS = ("--batch-size", "16", "--log-every", "1", "--seed", "1")
NOTICE_S = 30.0
# A step takes a few milliseconds, its checkpoint some more.
WITHIN_S = 0.02


def epochs(kills: int) -> int:
    """Of ten steps each: enough that the run has not ended before it was killed so often."""
    return 6 + kills


class Watched(train.Training):
    """Tells every step that it has done, in `told`."""

    told = -1

    def _log(self, rate: float) -> None:
        super()._log(rate)
        os.pwrite(self.told, b"%12d" % self.at.step, 0)


def child(data: Path, run: Path, more: list[str], told: int) -> int:
    """One start of train.py, but for the imports."""
    stop = train.StopRequest()
    Watched.told = told
    words = ["--data", str(data), "--checkpoint-every", str(EVERY), *ARGUMENTS, *more]
    here = from_environment({"LABCTL_RUN_DIR": str(run)})
    return Watched(parse_options("", words), here, stop).run()


def begun(data: Path, run: Path, more: list[str], told: int, log: int) -> int:
    """The process id of a child that goes its own way."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = child(data, run, more, told)
    finally:
        sys.stdout.flush()
        os._exit(code)


def step_of(told: int) -> int:
    return int(os.pread(told, 12, 0) or 0)


def wait_for_step(pid: int, told: int, step: int) -> None:
    """Until the child has done it, or has ended."""
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while step_of(told) < step and not os.waitid(os.P_PID, pid, ended):
        time.sleep(0.0005)


def killed(pid: int, notice: bool) -> tuple[int, float]:
    """(its exit code, minus a signal; seconds from SIGTERM to its end)."""
    began = time.monotonic()
    end = began + NOTICE_S
    os.kill(pid, signal.SIGTERM if notice else signal.SIGKILL)
    while not (found := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(found[1]), time.monotonic() - began


def newest(run: Path) -> int:
    """The step of the newest whole checkpoint; whatever bears a checkpoint's name must be whole."""
    directory = run / "checkpoints"
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("step-*"):
        checkpoints.verify(checkpoints.read(path))
    found = checkpoints.latest(directory)
    return found.step if found else 0


class Course:
    """One run, and all that was done to it."""

    def __init__(self, data: Path, run: Path, kills: int) -> None:
        self.run = run
        self.begun = partial(begun, data, run, ["--epochs", str(epochs(kills))])
        run.mkdir()
        self.told = os.open(run.with_suffix(".told"), os.O_RDWR | os.O_CREAT)
        self.log = os.open(run.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.saved = 0
        self.lost: list[int] = []
        self.slowest_s = 0.0
        self.numbers = itertools.count()

    def kill(self, moments: random.Random, notice: bool) -> None:
        """A child begins, and is killed some steps later."""
        os.pwrite(self.told, b"%12d" % self.saved, 0)
        pid = self.begun(self.told, self.log)
        wait_for_step(pid, self.told, self.saved + moments.randint(1, 2 * EVERY))
        time.sleep(moments.uniform(0, WITHIN_S))
        code, took_s = killed(pid, notice)
        self.number_events()
        done, before, self.saved = step_of(self.told), self.saved, newest(self.run)
        assert self.saved >= before, f"{self.saved} after {before}"
        assert code == (143 if notice else -signal.SIGKILL), f"exit {code} after {took_s:.1f} s"
        if notice:
            assert self.saved == done, f"step {done} was done, {self.saved} saved"
            self.slowest_s = max(self.slowest_s, took_s)
        else:
            self.lost.append(done - self.saved)

    def number_events(self) -> None:
        """Name the child's event file after the children before it.

        TensorBoard reads these files in the order of their names: second, host, process id. Here
        several children begin in one second, and a process id may be smaller than the one before.
        A start of train.py takes longer than a second.
        """
        for path in (self.run / "logs").glob("events.out.tfevents.*.*"):
            path.rename(path.with_name(f"events.out.tfevents.{next(self.numbers):010d}"))

    def finish(self) -> dict[str, Any]:
        """A child goes on to the end."""
        pid = self.begun(self.told, self.log)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = {"code": code, "lost": self.lost, "slowest_s": self.slowest_s}
        return said | {"step": newest(self.run)}


def main() -> None:
    data, folder, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)  # a fork of a process that has worker threads would wait for them
    torch.optim.AdamW([torch.zeros(1)])  # imports much, once for all
    moments = random.Random(1)
    whole, course = (Course(data, folder / name, kills) for name in ("whole", "killed"))
    for number in range(kills):
        course.kill(moments, notice=number % 2 == 0)
    print(json.dumps({"whole": whole.finish(), "killed": course.finish()}))


if __name__ == "__main__":
    main()
