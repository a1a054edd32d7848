"""One run on the two servers of a lab, by the commands that a student types."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import ROOT, inside, wait_for
from transcripts import Session, make_program, replay

pytestmark = pytest.mark.engine

GUIDE = ROOT / "docs" / "several-gpus.md"

LAB_YAML = """\
lab: two
server: {provider: local, count: 2, executor: process}
run: python3 train.py
launch: {restarts: 1, silence: 10s}
"""
# Each process sends the step to the other and must read the same one. The first saves checkpoints,
# and all must find the same newest one.
TRAIN = """\
import json, os, socket, sys, time
from pathlib import Path

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
here = Path(os.environ["LABCTL_CHECKPOINT_DIR"])


def save(step):
    new = here / ".new"
    new.mkdir()
    (new / "step").write_text(str(step))
    files = {"step": {"size": len(str(step))}}
    (new / "manifest.json").write_text(json.dumps({"files": files, "step": step}))
    new.rename(here / f"step-{step:04d}")


saved = sorted(here.glob("step-*/manifest.json"))
step = json.loads(saved[-1].read_text())["step"] if saved else 0
print(f"rank {rank} of {size} over {os.environ['GLOO_SOCKET_IFNAME']} from step {step}", flush=True)
if rank == 0:
    peer = socket.create_server(place).accept()[0]
else:
    for _ in range(100):
        try:
            peer = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.1)
for step in range(step + 1, int(sys.argv[1]) + 1):
    peer.sendall(step.to_bytes(4, "big"))
    if int.from_bytes(peer.recv(4), "big") != step:
        sys.exit("the other process is elsewhere")
    if rank == 0 and (step < 10 or step % 20 == 0):
        save(step)
    print("step", step, flush=True)
    if Path("/tmp/fail").exists() and rank == 1:
        Path("/tmp/fail").unlink()
        sys.exit(7)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def gang(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    lab = make_lab(tmp_path_factory.mktemp("gang"), "two", base_image)
    (lab.root / "Dockerfile").unlink()
    (lab.root / "lab.yaml").write_text(LAB_YAML)
    (lab.root / "train.py").write_text(TRAIN)
    try:
        lab.labctl("up", "--yes")
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard")


def train(lab: LabDirectory, run: str, steps: int, *options: str, code: int = 0) -> str:
    words = ("run", "--id", run, *options, "--", "python3", "train.py", str(steps))
    return lab.labctl(*words, code=code).stdout


def list_servers(lab: LabDirectory) -> list[str]:
    status = lab.json("status")
    return [server["id"] for server in (status["server"], *status["servers"])]


def end_on_both(lab: LabDirectory, run: str) -> list[dict[str, object]]:
    """Return the final records of both parts, as their servers have them."""
    records = []
    for name, server in zip(("two", "two-1"), list_servers(lab), strict=True):
        path = f"/home/student/labctl/{name}/runs/{run}/.labctl/record.json"
        records.append(json.loads(inside(server, f"cat {path}", user="student")[1]))
    return records


def test_every_server_runs_its_part_as_the_page_shows(gang: LabDirectory, tmp_path: Path) -> None:
    programs = make_program(tmp_path)
    path = f"{programs}:{gang.environ['PATH']}"
    session = Session(gang.root, {**gang.environ, "PATH": path})
    assert "\n".join(replay(GUIDE, "gang", session)) == ""
    assert "has no rank 2" in gang.labctl("logs", "first", "--rank", "2", code=2).stderr
    names = gang.labctl("ssh", "--server", "1", "--", "hostname").stdout
    assert names.strip() == "two-1"
    # Asked for again, it is found on both and started on none.
    words = ("--", "python3", "train.py", "2")
    assert "run first found" in gang.labctl("run", "--id", "first", *words).stderr


@pytest.mark.long
def test_a_part_that_fails_ends_the_other_and_both_resume_from_one_checkpoint(
    gang: LabDirectory,
) -> None:
    gang.labctl("ssh", "--server", "1", "--", "touch", "/tmp/fail")
    log = train(gang, "failing", 3)
    assert "starting again (attempt 2)" in log
    assert "rank 0 of 2 over eth0 from step 1\nstep 2\nstep 3\n" in log
    assert "from step 1\n" in gang.labctl("logs", "failing", "--rank", "1").stdout


@pytest.mark.long
def test_a_run_that_fails_more_often_than_it_may_says_where(gang: LabDirectory) -> None:
    words = ("sh", "-c", "[ $RANK = 1 ] || exec sleep 60; exit 9")
    done = gang.labctl("run", "--id", "hopeless", "--", *words, code=9)
    assert "run hopeless: two-1: failed with exit code 9" in done.stderr
    assert [record["exit_code"] for record in end_on_both(gang, "hopeless")] == [143, 9]
    # To look at the log of a run that has ended starts nothing.
    gang.labctl("logs", "-f", "hopeless")
    assert [record["exit_code"] for record in end_on_both(gang, "hopeless")] == [143, 9]


@pytest.mark.long
def test_a_failure_that_nobody_watched_is_noticed_by_logs_later(gang: LabDirectory) -> None:
    words = ("sh", "-c", "[ $RANK = 1 ] || exec sleep 600; exit 9")
    gang.labctl("run", "--detach", "--id", "unwatched", "--", *words)
    # Without anyone who looks at the run, only the run's own script says that it has ended.
    end = "/home/student/labctl/two-1/runs/unwatched/.labctl/exit.json"
    second = list_servers(gang)[1]
    wait_for(lambda: inside(second, f"test -s {end}", user="student")[0] == 0)
    assert gang.seen("unwatched")["state"] == "running"
    shown = gang.labctl("logs", "-f", "unwatched").stderr
    assert "two-1: failed with exit code 9; starting unwatched again" in " ".join(shown.split())
    assert [record["exit_code"] for record in end_on_both(gang, "unwatched")] == [143, 9]


COUNT = """\
import json, os, time

for step in range(1, 4001):
    with open(os.environ["LABCTL_RUN_DIR"] + "/logs/progress.json", "w") as file:
        json.dump({"step": step, "total_steps": 4000}, file)
    time.sleep(0.05)
"""
ONE_FAILS = "import os, time\ntime.sleep(600 * (os.environ['RANK'] == '0'))\nexit(3)\n"


@pytest.mark.long
def test_a_probe_runs_on_all_servers_and_ends_on_all(gang: LabDirectory) -> None:
    gang.labctl("up", "--yes")
    (gang.root / "count.py").write_text(COUNT)
    words = ("run", "--probe", "40", "--json", "--", "python3", "count.py")
    done = json.loads(gang.labctl(*words).stdout)["probe"]
    assert (done["total_steps"], done["finished"]) == (4000, False)
    assert 150 < done["time"]["seconds"] < 600
    states = [record["state"] for record in end_on_both(gang, done["run"]["id"])]
    assert states == ["cancelled", "cancelled"]
    (gang.root / "count.py").write_text(ONE_FAILS)
    failed = gang.labctl(*words, code=None)
    assert "labctl: the probe failed: two-1: " in failed.stderr


def test_cancel_ends_all_parts(gang: LabDirectory) -> None:
    gang.labctl("run", "--detach", "--id", "long", "--", "sleep", "600")
    assert "run long: canceled (SIGTERM)" in gang.labctl("cancel", "long").stdout
    states = [record["state"] for record in end_on_both(gang, "long")]
    assert states == ["cancelled", "cancelled"]


@contextmanager
def unplugged(server: str) -> Iterator[None]:
    """Nobody reaches the server for a while."""
    network = ["docker", "network"]
    subprocess.run([*network, "disconnect", "bridge", server], check=True)
    try:
        yield
    finally:
        subprocess.run([*network, "connect", "bridge", server], check=True)


@pytest.mark.long
def test_top_shows_all_servers_and_says_which_does_not_answer(gang: LabDirectory) -> None:
    gang.labctl("run", "--detach", "--id", "shown", "--", "sleep", "600")
    shown = gang.json("top")
    assert [(one["rank"], one["name"]) for one in shown["servers"]] == [(0, "two"), (1, "two-1")]
    assert ["shown" in str(one["server"]["runs"]) for one in shown["servers"]] == [True, True]
    alone = gang.json("top", "--server", "1")
    assert alone["lab"] == "two-1"
    assert alone["server"]["cores"] > 0

    def count_answers() -> int:
        """How often the live view has shown figures of the second server."""
        text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", bytes(terminal.shown))
        return len(re.findall(rb"1 +two-1 +\S* *[\d.]+/", text))

    with gang.in_terminal("top") as terminal:
        terminal.said("2 servers, free")
        wait_for(lambda: count_answers() > 0)
        with unplugged(list_servers(gang)[1]):
            one = gang.json("top", code=None)["servers"]
            assert one[0]["server"]["cores"] > 0
            assert one[1]["server"] is None
            assert one[1]["error"]
            text = gang.labctl("top", "--once", code=75).stdout
            assert re.search(r"^0 +two +\S+/", text, re.MULTILINE), text
            assert re.search(r"^1 +two-1 +no answer", text, re.MULTILINE), text
            assert re.search(r"^0 +shown ", text, re.MULTILINE), text
            terminal.said("no answer")
        before = count_answers()
        wait_for(lambda: count_answers() > before)
        terminal.type("q")
        assert terminal.popen.wait(20) == 0
    gang.labctl("cancel", "shown")


@pytest.mark.long
def test_a_lost_server_is_replaced_and_the_run_resumes(gang: LabDirectory) -> None:
    words = ("run", "--recover", "--id", "lost", "--", "python3", "train.py", "40")
    process = gang.start(*words)
    process.said("step 5\n")
    first, second = list_servers(gang)
    subprocess.run(["docker", "rm", "-f", "-v", second], capture_output=True, check=True)
    log = process.end().stdout
    assert f"two-1: the server {second} is gone" in log
    assert "starting again (attempt 2)" in log
    assert log.endswith("step 40\n")
    assert log.count("step 3\n") == 1
    assert log.count("step 40\n") == 1
    servers = list_servers(gang)
    assert servers[0] == first
    assert servers[1] != second


@pytest.mark.long
def test_without_its_first_server_a_run_resumes_from_what_was_copied_here(
    gang: LabDirectory,
) -> None:
    words = ("run", "--recover", "--id", "headless", "--", "python3", "train.py", "400")
    process = gang.start(*words)
    process.said("step 260\n")  # 26 s or more: the outputs are copied every 20 s
    first, second = list_servers(gang)
    subprocess.run(["docker", "rm", "-f", "-v", first], capture_output=True, check=True)
    log = process.end().stdout
    (resumed,) = re.findall(r"rank 0 of 2 over eth0 from step (\d+)\n", log)[1:]
    assert int(resumed) > 50
    other = gang.labctl("logs", "headless", "--rank", "1").stdout
    assert f"rank 1 of 2 over eth0 from step {resumed}\n" in other
    assert log.endswith("step 400\n")
    assert list_servers(gang)[1] == second


@pytest.mark.long
def test_a_second_terminal_only_shows_the_log(gang: LabDirectory) -> None:
    gang.labctl("ssh", "--server", "1", "--", "rm", "-f", "/tmp/fail")
    process = gang.start("run", "--id", "watched", "--", "python3", "train.py", "60")
    process.said("step 5\n")
    second = gang.start("logs", "-f", "watched")
    second.said("this one only shows the log")
    gang.labctl("ssh", "--server", "1", "--", "touch", "/tmp/fail")
    log = process.end().stdout
    assert log.count("starting again (attempt 2)") == 1
    assert log.endswith("step 60\n")
    second.end(code=None)


@pytest.mark.long
def test_a_start_that_was_cut_off_is_completed_by_the_same_command(gang: LabDirectory) -> None:
    """The laptop is closed between the claim and the start: then no half of a run remains."""
    words = ("run", "--id", "cut", "--", "python3", "train.py", "3")
    process = gang.start(*words)
    claim = "/home/student/labctl/two/runs/cut/.labctl/gang.json"
    wait_for(lambda: inside(list_servers(gang)[0], f"test -e {claim}", user="student")[0] == 0)
    process.popen.kill()
    process.end(None)
    log = gang.labctl(*words).stdout
    assert log.endswith("step 3\n")
    states = [record["state"] for record in end_on_both(gang, "cut")]
    assert states == ["exited", "exited"]
    assert [record["exit_code"] for record in end_on_both(gang, "cut")] == [0, 0]


@pytest.mark.long
def test_a_server_that_falls_silent_ends_the_run_on_all(gang: LabDirectory) -> None:
    process = gang.start("run", "--id", "silent", "--", "python3", "train.py", "3000")
    process.said("step 5\n")
    _, second = list_servers(gang)
    with unplugged(second):
        done = process.end(code=1)
        assert "two-1: no answer for 1" in done.stderr
    gang.labctl("cancel", "silent", code=None)


@pytest.mark.long
def test_push_cp_and_forward_reach_every_server(gang: LabDirectory) -> None:
    gang.labctl("up", "--yes")
    (gang.root / "version.py").write_text("print('pushed')\n")
    pushed = gang.labctl("push").stdout
    # Files that another test's run has pushed to a server already are unchanged there.
    first, second = pushed.splitlines()
    assert re.match(r"code: [1-9]\d* uploaded", first), first
    assert re.match(r"two-1:code: [1-9]\d* uploaded", second), second
    gang.labctl("run", "--no-push", "--id", "pushed", "--", "python3", "version.py")
    assert gang.labctl("logs", "pushed", "--rank", "1").stdout == "pushed\n"
    gang.labctl("cp", "--server", "1", "version.py", "two:page.txt")
    serve = "python3 -m http.server 8123 >/dev/null 2>&1 </dev/null &"
    gang.labctl("ssh", "--server", "1", "--", "sh", "-c", serve)
    url = gang.json("forward", "8123", "--server", "1", "--detach")["forwards"][0]["url"]
    with urllib.request.urlopen(f"{url.rstrip('/')}/page.txt") as page:
        assert page.read() == b"print('pushed')\n"
    assert "8123" in gang.labctl("forward", "--stop").stdout


@pytest.mark.long
def test_cancel_ends_what_it_can_and_names_the_missing_server(gang: LabDirectory) -> None:
    gang.labctl("up", "--yes")
    gang.labctl("run", "--detach", "--id", "half", "--", "sleep", "600")
    first, second = list_servers(gang)
    subprocess.run(["docker", "rm", "-f", "-v", second], capture_output=True, check=True)
    done = gang.labctl("cancel", "half", code=None)
    assert done.code != 0
    assert "the run may still be active on two-1\n" in done.stderr
    path = "/home/student/labctl/two/runs/half/.labctl/record.json"
    assert json.loads(inside(first, f"cat {path}", user="student")[1])["state"] == "cancelled"


@pytest.mark.long
def test_run_down_removes_all_servers_and_exits_as_the_command(gang: LabDirectory) -> None:
    gang.labctl("down", "--yes")
    gang.labctl("run", "--up", "--down", "--id", "whole", "--", "sh", "-c", "exit 3", code=3)
    status = gang.json("status", "-r")
    assert status["server"] is None
    assert status["servers"] == []
    assert "two" not in gang.labctl("orphans", code=None).stdout
