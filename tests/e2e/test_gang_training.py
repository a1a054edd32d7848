"""The sample project on two servers at once learns what it learns on one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import inside

from labctl.insight.scalars import read_scalars
from labctl.text import bytes_text

pytestmark = [pytest.mark.engine, pytest.mark.train, pytest.mark.long]
# Random numbers would differ: without dropout the processes compute what one computes.
WITHOUT_DROPOUT = """\
import functools, model, train
train.Classifier = functools.partial(model.Classifier, dropout=0.0)
train.main()
"""
TRAIN = ("python", "train_exactly.py", "--epochs", "1", "--batch-size", "60", "--log-every", "1")
LAUNCH = "launch: {with: torchrun, per_server: 1}\n"
TWO_PROCESSES = LAUNCH.replace("per_server: 1", "per_server: 2")
RANKS = """\
import os

rank = os.environ["RANK"]
print("first line of", rank, flush=True)
print("second line of", rank, flush=True)
"""
# Debian writes the second line on real machines. By the address of its host name, gloo would
# connect every process to its own server.
HOSTS = 'printf "127.0.0.1 localhost\\n127.0.1.1 %s\\n" "$(hostname)" >/etc/hosts'


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> LabDirectory:
    """The home of a user, who makes both labs there."""
    lab = make_lab(tmp_path_factory.mktemp("home"), "work", base_image)
    (lab.root / "lab.yaml").unlink()
    lab.environ["LABCTL_WHEELHOUSE"] = os.environ.get("LABCTL_WHEELHOUSE", "")
    return lab


@contextmanager
def with_servers(home: LabDirectory, name: str, count: int) -> Iterator[LabDirectory]:
    """A new sample project with so many servers, which are like real machines."""
    home.labctl("init", name)
    lab = LabDirectory(home.root / name, name, home.environ)
    settings = lab.root / "lab.yaml"
    count_line = rf"\1gpu: auto\n\1count: {count}"
    text = re.sub(r"^( *)gpu: auto", count_line, settings.read_text(), flags=re.MULTILINE)
    settings.write_text(text + LAUNCH)
    (lab.root / "train_exactly.py").write_text(WITHOUT_DROPOUT)
    try:
        up = lab.json("up", "--yes")
        for server in (up["server"], *up.get("servers", ())):
            code, said = inside(server["id"], HOSTS)
            assert code == 0, said
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard")


@pytest.fixture(scope="module")
def pair(home: LabDirectory) -> Iterator[LabDirectory]:
    with with_servers(home, "pair", 2) as lab:
        yield lab


def train(lab: LabDirectory, processes: int) -> dict[str, tuple[float, ...]]:
    """Train with so many processes; return the curves by tag."""
    output = lab.labctl("run", "--yes", "--id", "whole", "--", *TRAIN).stdout
    assert (f", {processes} processes" in output) == (processes > 1), output
    lab.labctl("pull", "whole")
    curves = read_scalars(lab.root / "runs" / "whole" / "logs").series
    return {curve.tag: curve.values for curve in curves}


def test_two_servers_learn_what_one_learns(home: LabDirectory, pair: LabDirectory) -> None:
    with with_servers(home, "one", 1) as lab:
        alone = train(lab, 1)
    together = train(pair, 2)
    for tag in ("train/loss", "train/gradient_norm", "val/loss", "val/accuracy"):
        assert len(alone[tag]) > 0, tag
        assert together[tag] == pytest.approx(alone[tag], rel=0.02, abs=0.01), tag


def test_two_processes_on_each_server_have_their_logs_and_a_bandwidth(
    pair: LabDirectory,
) -> None:
    settings = (pair.root / "lab.yaml").read_text().replace(LAUNCH, TWO_PROCESSES)
    (pair.root / "ranks.py").write_text(RANKS)
    with pair.holding("lab.yaml", settings):
        pair.labctl("run", "--yes", "--id", "ranks", "--", "python", "ranks.py")
        lines = pair.labctl("logs", "ranks", "--rank", "all").stdout.splitlines()
        printed = [line for line in lines if " line of " in line]
        assert printed == [
            f"[{rank}] {which} line of {rank}" for rank in range(4) for which in ("first", "second")
        ]
        assert all(re.match(r"\[[0-3]\] ", line) for line in lines), lines
        last = pair.labctl("logs", "ranks", "--rank", "all", "-n", "1").stdout.splitlines()
        assert [line for line in last if " line of " in line] == [
            f"[{rank}] second line of {rank}" for rank in range(4)
        ]
        refused = pair.labctl("logs", "-f", "ranks", "--rank", "all", code=2).stderr
        assert "labctl follows one at a time" in refused
        check_bandwidth(pair.labctl("bandwidth").stdout)


def check_bandwidth(text: str) -> None:
    """The table has a row for each size, and what is below it says the best of them."""
    numbers = r"([\d.]+ [KM]iB) +([\d.]+) (us|ms|s) +([\d.]+) Gbit/s"
    rows = [match.groups() for match in re.finditer(rf"^{numbers}$", text, re.MULTILINE)]
    assert [row[0] for row in rows] == [bytes_text(4**exponent) for exponent in range(5, 15)], text
    seconds = [float(row[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[row[2]] for row in rows]
    # A message of 1 KiB takes its time for the way, one of 256 MiB for its bytes.
    assert seconds[0] < seconds[-1]
    speeds = [float(row[3]) for row in rows]
    # Each of 4 processes sends and receives 2 (4-1)/4 of the message.
    assert speeds[-1] == pytest.approx(8e-9 * 256 * 1024**2 * 1.5 / seconds[-1], rel=0.02)
    assert 0.05 < max(speeds) < 400
    share = round(100 * max(speeds) / 10)
    told = (
        f"4 processes (CPU, gloo) on 2 servers exchange {max(speeds):.2f} Gbit/s at best "
        f"over eth0, {share}% of the 10 Gbit/s of its card."
    )
    assert told in " ".join(text.split()), text
    assert ("--link 1gbit" in text) == (max(speeds) <= 1.0), text
