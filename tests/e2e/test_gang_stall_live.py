"""A run on two servers in which one process hangs, while both servers answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import inside
from test_gang import LAB_YAML, TRAIN, list_servers

pytestmark = [pytest.mark.engine, pytest.mark.long]

# A rank says for a while that it waits for the other one, as NCCL and gloo do.
RECEIVE = """\
def receive():
    peer.settimeout(1)
    for _ in range(5):
        try:
            return peer.recv(4)
        except TimeoutError:
            print("waiting", flush=True)
    peer.settimeout(None)
    return peer.recv(4)


for step in range(step + 1"""


@pytest.fixture
def lab(tmp_path: Path, base_image: str, server_image: str) -> Iterator[LabDirectory]:
    made = make_lab(tmp_path, "stall", base_image)
    (made.root / "Dockerfile").unlink()
    settings = LAB_YAML.replace("lab: two", "lab: stall").replace("10s}", "10s, stall: 30s}")
    (made.root / "lab.yaml").write_text(settings)
    program = TRAIN.replace("for step in range(step + 1", RECEIVE)
    (made.root / "train.py").write_text(program.replace("(peer.recv(4),", "(receive(),"))
    try:
        made.labctl("up", "--yes")
        yield made
    finally:
        made.labctl("down", "--yes", "--discard")


def test_a_stopped_process_ends_the_run_on_both_servers_and_both_start_again(
    lab: LabDirectory,
) -> None:
    process = lab.start("run", "--id", "night", "--", "python3", "train.py", "160")
    process.said("step 80\n")
    _, second = list_servers(lab)
    code, output = inside(second, "pkill -STOP -f '^python3 train.py'", user="student")
    assert code == 0, output
    done = process.end()
    said = " ".join(done.stderr.split())
    stall = re.search(r"stalled: no rank has shown any progress for (\d+) s; (.*?); starting", said)
    assert stall is not None, said
    assert 30 <= int(stall[1]) < 60
    time = r"\d\d:\d\d:\d\d UTC"
    last = rf"the last was rank 0 \(stall\) at {time}"
    first = rf"rank 1 \(stall-1\) fell silent first, at {time}"
    assert re.fullmatch(f"{last}; {first}", stall[2]), stall[2]
    # Both go on from the newest checkpoint, and the stopped process is gone.
    (resumed,) = re.findall(r"rank 0 of 2 over eth0 from step (\d+)\n", done.stdout)[1:]
    assert int(resumed) == 80
    assert done.stdout.endswith("step 160\n")
    assert done.stdout.count("step 160\n") == 1
    other = lab.labctl("logs", "night", "--rank", "1").stdout
    assert f"rank 1 of 2 over eth0 from step {resumed}\n" in other
    assert inside(second, "pgrep -f '^python3 train.py'", user="student")[0] == 1
