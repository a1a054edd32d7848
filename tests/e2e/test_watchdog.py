"""The watchdog on a real server: every end, every sign of work, and what it survives.

The tests share one server, on which each arms its own limits; some switch it off and on again.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from calibration import computing_factor, waiting_factor
from lab_servers import LabServer, wait_for
from watch_lab import CHECKPOINT, FOREVER, PLACE, WatchLab

from labctl.commands import lease
from labctl.errors import NotFoundError, PolicyError
from labctl.wire.watchdog import WATCH, WatchRequest

pytestmark = pytest.mark.engine

LONG_S = 3600.0
TTL_MET_WITHIN_S = 5
SHARE_OF_A_CORE = 0.03
# An idle limit with a look every other second.
LOOKING_S = 40.0


@pytest.fixture(scope="module")
def one_server(
    start_lab_server: Callable[..., LabServer],
    base_image: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> WatchLab:
    server = start_lab_server("watched")
    server.load(base_image)
    return WatchLab(server, tmp_path_factory.mktemp("watch"), base_image)


@pytest.fixture
def watched(one_server: WatchLab) -> WatchLab:
    """On, whatever an earlier test did."""
    if one_server.server.found().state != "running":
        one_server.boot()
    return one_server


@pytest.fixture
def looking(watched: WatchLab) -> WatchLab:
    """Armed so that it looks often and ends nothing."""
    watched.guard("looking", idle_s=LOOKING_S, ttl_s=LONG_S)
    return watched


# Signs of work


@contextmanager
def a_run(lab: WatchLab) -> Iterator[None]:
    lab.start("sign", FOREVER)
    yield
    lab.cancel("sign")


@contextmanager
def a_container(lab: WatchLab) -> Iterator[None]:
    lab.server.ssh(f"docker run -d --rm --name other {lab.image} sh -c 'while :; do :; done'")
    yield
    lab.server.ssh("docker kill other")


@contextmanager
def a_terminal(lab: WatchLab) -> Iterator[None]:
    with lab.terminal() as terminal:
        terminal.said("$")
        terminal.type("echo he''llo\n")
        terminal.said("hello")
        yield


@contextmanager
def tmux(lab: WatchLab) -> Iterator[None]:
    with lab.terminal("tmux new-session -s typing") as terminal:
        wait_for(lambda: lab.server.ssh("tmux list-clients", check=False).stdout)
        terminal.type("echo\n")
        yield
    lab.server.ssh("tmux kill-server")


@contextmanager
def a_program(lab: WatchLab) -> Iterator[None]:
    line = "exec perl -e 'while (1) {}'"
    with subprocess.Popen([*lab.server.ssh_words(), line], stdin=subprocess.DEVNULL) as process:
        yield
        lab.server.ssh("pkill -x perl")
        process.wait()


@contextmanager
def rsync(lab: WatchLab) -> Iterator[None]:
    blob = lab.folder / "blob"
    blob.write_bytes(bytes(8_000_000))
    *ssh, _, place = lab.server.ssh_words()
    words = ["rsync", "--bwlimit=200", "-e", " ".join(ssh), str(blob), f"{place}:blob"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        yield
        process.terminate()


@contextmanager
def sftp(lab: WatchLab) -> Iterator[None]:
    blob = lab.folder / "blob"
    blob.write_bytes(bytes(8_000_000))
    ssh = lab.server.ssh_words()
    options = [w if w != "-p" else "-P" for w in ssh[1:-2]]
    words = ["sftp", "-q", "-l", "1600", *options, ssh[-1]]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.write(f"put {blob} blob2\n".encode())
        process.stdin.flush()
        yield
        process.terminate()


@contextmanager
def our_program(lab: WatchLab) -> Iterator[None]:
    """A question of ours that trickles in."""
    line = 'exec python3 -I -S "$HOME"/.cache/labctl/remote-*/__main__.py plan'
    with subprocess.Popen([*lab.server.ssh_words(), line], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with ExitStack() as stack:
            stack.callback(process.kill)
            stack.enter_context(trickling(process, bytes(16384)))
            yield


@contextmanager
def trickling(process: subprocess.Popen[bytes], block: bytes) -> Iterator[None]:
    import threading

    over = threading.Event()

    def trickle() -> None:
        assert process.stdin is not None
        while not over.wait(0.1):
            process.stdin.write(block)
            process.stdin.flush()

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


NVIDIA = "/usr/local/bin/nvidia-smi"


@contextmanager
def a_gpu(lab: WatchLab) -> Iterator[None]:
    """No GPU is here: a program that answers as nvidia-smi does."""
    lab.server.sh(f"printf '#!/bin/sh\\necho 0, 63\\n' > {NVIDIA}; chmod 755 {NVIDIA}")
    yield
    lab.server.sh(f"rm {NVIDIA}")


@contextmanager
def a_broken_gpu(lab: WatchLab) -> Iterator[None]:
    lab.server.sh(f"printf '#!/bin/sh\\necho lost; exit 15\\n' > {NVIDIA}; chmod 755 {NVIDIA}")
    lab.server.sh("touch /dev/nvidiactl")
    yield
    lab.server.sh(f"rm {NVIDIA} /dev/nvidiactl")


SIGNS = [
    (a_run, "run sign is running"),
    (a_container, "the container other used"),
    (a_terminal, "somebody typed in terminal pts/"),
    (tmux, "somebody typed in the tmux session typing"),
    (a_program, "perl (process"),
    (rsync, "rsync transfers"),
    (sftp, "sftp transfers"),
    (our_program, "labctl plan transfers"),
    (a_gpu, "GPU 0 is at 63%"),
    (a_broken_gpu, "the GPU cannot be read, which counts as work (nvidia-smi: exit 15, lost)"),
]


# A run, a person and a GPU; the others with --long.
SOME_WORK = (a_run, tmux, a_gpu)


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        pytest.param(
            *sign, id=sign[0].__name__, marks=() if sign[0] in SOME_WORK else pytest.mark.long
        )
        for sign in SIGNS
    ],
)
def test_each_sign_of_work_is_seen_and_named(
    looking: WatchLab, work: Callable[[WatchLab], object], sentence: str
) -> None:
    with work(looking):  # type: ignore[attr-defined]
        looking.busy(sentence)


@pytest.mark.long
def test_the_session_beside_a_run_is_no_typing(looking: WatchLab) -> None:
    """A run's start opens a tmux session with three terminals, in which nobody has typed."""
    looking.start("alone", FOREVER)
    panes = looking.server.ssh("tmux list-panes -a -F '#{pane_tty}'").stdout.split()
    assert len(panes) == 3
    looking.busy("run alone is running")
    assert not [sign for sign in looking.watch(0).busy if "typed" in sign]
    looking.cancel("alone")


@pytest.mark.long
def test_what_merely_waits_is_no_work(looking: WatchLab) -> None:
    """A terminal and a tmux client that nobody types in, a container and a program at rest."""
    looking.server.ssh(f"docker run -d --rm --name rests {looking.image} sleep 600")
    with looking.terminal("tmux new-session -s rests"), looking.terminal("sleep 600"):
        wait_for(lambda: looking.server.ssh("tmux list-clients", check=False).stdout)
        wait_for(lambda: looking.watch(0).idle_for_s > 9)
    looking.server.ssh("tmux kill-server; docker kill rests")


# Not the shell that waits a second before it becomes one.
RECORDER = "pgrep -u student -f '^[^ ]*python3 .* telemetry$'"


@pytest.mark.long
def test_a_recorder_of_telemetry_that_died_is_begun_again(looking: WatchLab) -> None:
    """The first one by the run's start or the watchdog, the second one by the watchdog."""

    def recorders() -> list[str]:
        return looking.server.sh(RECORDER, check=False).split()

    file = "/home/student/labctl/watched/runs/gauged/logs/telemetry.jsonl"
    looking.start("gauged", FOREVER)
    # One that finds another at work ends at once; the other one writes.
    wait_for(lambda: looking.server.sh(f"test ! -s {file} || echo yes"))
    (first,) = wait_for(lambda: found if len(found := recorders()) == 1 else None)
    looking.server.sh(f"kill -9 {first}")
    wait_for(lambda: {*recorders()} - {first})
    assert looking.server.sh(f"stat -c %U {file}").strip() == "student"
    looking.cancel("gauged")


# Ends


@pytest.mark.timed
def test_the_ttl_stops_a_run_saves_its_checkpoint_and_powers_off(watched: WatchLab) -> None:
    slowdown = waiting_factor()
    watched.start("trained", CHECKPOINT)
    wait_for(lambda: "begun" in watched.log("trained"))
    with watched.terminal() as terminal:
        terminal.said("$")
        watched.guard("ttl", ttl_s=16)
        terminal.said(" s: its time is up (16 s)")
        terminal.said("this server ends now")
        watched.wait_for_power_off()
    told = "\n".join(watched.decisions())
    for words in ("limits: ttl 16 s", "ending (ttl): its time is up (16 s)"):
        assert words in told
    assert re.search(r"run stopped: trained ended \d+\.\d s after SIGTERM", told)
    wound_down = re.search(r"wound down: (\d+) s (before|after) the ttl, \d+ s long", told)
    assert wound_down, told
    assert int(wound_down[1]) <= TTL_MET_WITHIN_S * slowdown
    assert "disk kept" in told
    assert "powering off: attempt 1" in told
    watched.boot()
    log = watched.log("trained")
    assert re.search(r"labctl: this server ends in \d+ s: its time is up \(16 s\)", log)
    assert "labctl: this server ends now: its time is up (16 s)." in log
    assert "\nlabctl: For more time: labctl extend 30m.\n" in log
    assert log.endswith("saved\n")
    watched.server.ssh("test -s labctl/watched/runs/trained/checkpoints/last/manifest.json")
    run = watched.find_run("trained")
    assert (run.state, run.stopped_by, run.exit_code) == ("lost", "ttl", 0)
    watch = wait_for(lambda: found if (found := watched.watch()).alive else None)
    assert any(each.what == "ttl restarted" for each in watch.decisions)
    assert watch.ttl_left_s > 5


def test_an_idle_server_ends_and_says_so_in_time(watched: WatchLab) -> None:
    with watched.terminal() as terminal:
        terminal.said("$")
        watched.guard("idle", idle_s=12)
        terminal.said(" s: nobody has worked on it (limit 12 s)")
        watched.extend(4)
        began = time.monotonic()
        terminal.said("this server ends now: nobody has worked on it")
        watched.wait_for_power_off()
    assert time.monotonic() - began > 4
    assert any("extended by 4 s" in each for each in watched.decisions())
    watched.boot()


@pytest.mark.long
def test_a_spent_budget_ends_it_at_once_however_busy(watched: WatchLab) -> None:
    watched.start("spends", "trap '' TERM; while :; do sleep 0.1; done")
    watch = watched.guard("budget", budget_usd=0.01, price_usd_per_hour=6.0, ending={"grace_s": 3})
    assert watch.budget_left_s == pytest.approx(6.0, abs=4.0)
    assert watch.ends_by == "budget"
    watched.wait_for_power_off()
    told = "\n".join(watched.decisions())
    assert "ending (budget): its budget of $0.01 is spent" in told
    assert "run killed: spends had not ended 3 s after SIGTERM" in told
    assert "wound down:" in told
    watched.boot()
    wait_for(lambda: watched.watch(0).alive)
    left_s = watched.watch(0).budget_left_s
    assert left_s is not None
    assert left_s < 0, "a reboot gives no money back"
    assert watched.server.found().state == "running", "but time to raise the budget"
    watched.guard("next", ttl_s=LONG_S)


def test_an_idle_server_whose_results_would_be_lost_stays_on(watched: WatchLab) -> None:
    armed = watched.guard("stays", idle_s=4, ending={"disk": "goes"})
    assert armed.cannot == ("The disk is deleted with the server. Run labctl pull first.",)
    wait_for(lambda: any(d.what == "staying on" for d in watched.watch().decisions))
    assert watched.server.found().state == "running"
    wait_for(lambda: watched.watch().unsaved.files)
    watched.guard("next", ttl_s=LONG_S)


# What it survives


def test_limits_hold_against_extensions_and_lost_clients(watched: WatchLab) -> None:
    limits = {"ttl_s": 3600, "ceiling_s": 5400, "budget_usd": 5.0, "price_usd_per_hour": 1.0}
    watch = watched.guard("limits", **limits, budget_whole_usd=5.0, elapsed_s=600.0)
    assert watch.ttl_left_s == pytest.approx(3000, abs=60)
    assert watched.extend(1800).ttl_left_s == pytest.approx(4800, abs=60)
    with pytest.raises(PolicyError, match="Cannot extend by 10 min") as refused:
        watched.extend(600)
    assert "the ceiling ends the server 1 h 30 min after its start" in refused.value.why
    # A client that has lost its state believes the server to be new and no dollar to be spent.
    lost = {**limits, "budget_usd": 9.0, "budget_whole_usd": 5.0, "ceiling_s": None}
    watch = watched.guard("limits", **lost, elapsed_s=0.0)
    assert watch.elapsed_s >= 600
    assert watch.ttl_left_s == pytest.approx(4800, abs=30)
    assert watch.budget_left_s == pytest.approx(5 * 3600 - 600, abs=30)
    assert watch.spent_usd == pytest.approx(600 / 3600, abs=0.02)
    told = [f"{d.what}: {d.why}" for d in watched.watch().decisions]
    assert any(each.startswith("extension refused: the ceiling") for each in told)


def test_a_killed_watchdog_carries_on(watched: WatchLab) -> None:
    before = watched.guard("killed", ttl_s=LONG_S, idle_s=LONG_S, elapsed_s=100.0)
    watched.server.sh(f"kill -9 {before.pid}")
    after = wait_for(lambda: found if (found := watched.watch()).pid != before.pid else None)
    assert after.alive
    assert 100 <= after.elapsed_s < 400
    assert any(d.what == "watchdog restarted" for d in after.decisions)
    assert watched.server.sh("pgrep -fc 'python3 .* [w]atchdog /var'", check=False).strip() == "1"


@pytest.mark.long
def test_a_new_version_takes_over(watched: WatchLab) -> None:
    before = watched.guard("version", ttl_s=LONG_S, elapsed_s=100.0)
    old = watched.server.ssh("cd .cache/labctl && cp -r remote-* remote-new && ls -d remote-*")
    request = '{"lab":"watched","lab_id":"77aa5500ee11","server_id":"version","elapsed_s":0,'
    request += '"limits":{"ttl_s":3600},"ending":{"kind":"poweroff"},"store":""}'
    try:
        line = "python3 -I -S .cache/labctl/remote-new/__main__.py guard"
        watched.server.ssh(line, stdin=f"{request}\n".encode())
        after = watched.watch()
        assert after.version == "remote-new"
        assert after.pid != before.pid
        assert after.elapsed_s >= 100
        assert watched.server.sh(f"ls -d {PLACE}/remote-*").split() == [f"{PLACE}/remote-new"]
    finally:
        watched.server.ssh("rm -rf .cache/labctl/remote-new")
    assert len(old.stdout.split()) == 2
    assert watched.guard("version", ttl_s=LONG_S).version == before.version


@pytest.mark.long
@pytest.mark.timed
def test_it_takes_next_to_no_time_of_the_machine(looking: WatchLab) -> None:
    """Looking every other second, more often than any real limit has it look."""
    pid = looking.watch(0).pid

    def used_s() -> float:
        fields = looking.server.sh(f"cat /proc/{pid}/stat").rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / 100

    looking.server.ssh(f"docker run -d --rm --name rests {looking.image} sleep 600")
    began, before = time.monotonic(), used_s()
    time.sleep(10)
    share = (used_s() - before) / (time.monotonic() - began)
    looking.server.ssh("docker kill rests")
    assert share < SHARE_OF_A_CORE * computing_factor()


# Shared machines


@pytest.mark.long
def test_a_shared_machine_is_given_back_and_stays_on(watched: WatchLab) -> None:
    holder = lease.Holder(
        token="aabbccdd", lab="shared", lab_id="99", owner="student", created_at=time.time()
    )
    claimed = lease.parse(watched.server.ssh(lease.claim(holder, 3600)).stdout)
    assert claimed.state == "mine"
    shared = WatchLab(
        watched.server, watched.folder, watched.image, {"lab": "shared", "lab_id": "99"}
    )
    server_id = "static-gpu1-aabbccdd"
    ending = {"kind": "release", "disk": "stays", "lease": server_id}
    shared.guard(server_id, ttl_s=20, ending=ending)
    pid = shared.watch(0).pid
    assert watched.server.sh(f"stat -c %U /proc/{pid}").strip() == "student"
    shared.start("polite", CHECKPOINT)
    wait_for(lambda: lease.parse(watched.server.ssh(lease.show("aabbccdd")).stdout).state == "free")
    wait_for(lambda: not shared.watch().alive)
    told = [each.what for each in shared.watch().decisions]
    assert [w for w in told if w in ("run stopped", "released")] == ["run stopped", "released"]
    assert shared.log("polite").endswith("saved\n")
    assert watched.server.found().state == "running"


def test_nothing_guards_a_lab_that_was_never_armed(watched: WatchLab) -> None:
    other = WatchLab(watched.server, watched.folder, watched.image, {"lab": "free", "lab_id": "12"})
    assert other.remote.call(WATCH, WatchRequest(other.about["lab_id"])).watch is None
    with pytest.raises(NotFoundError, match="this server has no watchdog"):
        other.extend(60)
