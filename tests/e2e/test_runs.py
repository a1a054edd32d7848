"""Runs through the real command: codes, logs, exactly once, snapshots, secrets, limits, tmux."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from guide_session import GUIDE
from lab_directory import COUNTING, DOCKERFILE, TOKEN, UNTIL_GO, LabDirectory, Process
from lab_servers import wait_for
from transcripts import Session, make_program, replay

pytest_plugins = ["lab_fixture"]
pytestmark = pytest.mark.engine

Followed = Callable[..., Process]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("sh", "-c", "echo out; echo err >&2"), 0, "done"),
        (("sh", "-c", "echo out; echo err >&2; exit 3"), 3, "failed with exit code 3"),
        (("sh", "-c", "echo out; echo err; kill -USR1 $$"), 138, "ended by SIGUSR1 (exit 138)"),
    ],
)
def test_the_commands_own_code_passes_through(
    lab: LabDirectory, words: tuple[str, ...], code: int, told: str
) -> None:
    done = lab.labctl("run", "--", *words, code=code)
    assert done.stdout.split()[:2] == ["out", "err"]
    assert f": {told}\n" in done.stderr
    assert ("labctl explain" in done.stderr) == (code != 0)


def test_a_command_that_is_not_there_is_127(lab: LabDirectory) -> None:
    done = lab.labctl("run", "--", "no-such-program", code=127)
    assert "no-such-program" in done.stdout
    assert "the command was not found in the image" in done.stderr


def test_a_long_log_arrives_whole_and_in_order(lab: LabDirectory) -> None:
    many = "$i = 0; print 'line ', $i++, qq(\\n) while $i < 100000"
    done = lab.labctl("run", "--", "perl", "-e", many)
    assert done.stdout == "".join(f"line {i}\n" for i in range(100_000))


def test_ctrl_c_detaches_and_the_run_goes_on(lab: LabDirectory, followed: Followed) -> None:
    process = followed("detached")
    process.said("line 3\n")
    process.interrupt()
    process.end(130)
    for word in (
        "is still running",
        "labctl logs -f detached",
        "labctl cancel detached",
        "labctl down",
    ):
        assert word in process.stderr
    assert lab.seen("detached")["state"] == "running"
    again = lab.start("logs", "-f", "detached")
    again.said("line 3\n")
    lab.let_go("detached")
    again.end(0)
    assert again.stdout == lab.log("detached")
    assert again.stdout.endswith("last\n")
    assert "run detached: done" in again.stderr


def test_one_id_is_one_run(lab: LabDirectory) -> None:
    line = "echo once >> /lab/run/logs/count; echo hello"
    first, second = lab.run(line, "--id", "once"), lab.run(line, "--id", "once")
    assert first.stdout == second.stdout == "hello\n"
    assert ("started" in first.stderr, "found" in second.stderr) == (True, True)
    assert lab.student(f"cat {lab.place('once')}/logs/count") == "once\n"
    other = lab.run("echo other", "--id", "once", code=255)
    assert 'A run named "once" already exists on this server' in other.stderr
    assert "labctl run --id" in other.stderr


@pytest.mark.parametrize("turn", range(3))
def test_three_at_once_with_one_id_are_one_container(lab: LabDirectory, turn: int) -> None:
    run, line = f"at-once-{turn}", "echo once >> /lab/run/logs/count; echo hello"
    words = ("run", "--id", run, "--", "sh", "-c", line)
    processes = [lab.start(*words) for _ in range(3)]
    ended = [process.end(0) for process in processes]
    assert [process.stdout for process in ended] == ["hello\n"] * 3
    assert sum(f"run {run} started" in process.stderr for process in ended) == 1
    assert len(lab.containers(run)) == 1
    assert lab.student(f"cat {lab.place(run)}/logs/count") == "once\n"


def test_a_push_changes_nothing_in_a_run(lab: LabDirectory, followed: Followed) -> None:
    with lab.holding("value.txt", "old\n"):
        process = followed("snapshot", f"cat value.txt; {UNTIL_GO}; cat value.txt; ls")
        process.said("old\n")
        (lab.root / "value.txt").write_text("new\n")
        (lab.root / "late.txt").write_text("late\n")
        lab.labctl("push")
        lab.let_go("snapshot")
        process.end(0)
        assert process.stdout.split()[:2] == ["old", "old"]
        assert "late.txt" not in process.stdout
        assert lab.run("cat value.txt late.txt").stdout == "new\nlate\n"
    (lab.root / "late.txt").unlink()


@pytest.mark.long
def test_new_files_outside_the_outputs_are_named_and_can_be_had(lab: LabDirectory) -> None:
    line = "echo m > model.pth; echo e > /lab/run/extra.bin; echo c > /lab/run/checkpoints/c"
    done = lab.run(line, "--id", "leaves")
    named = done.stderr.split("new files outside outputs: ")[1]
    assert named.splitlines()[0] == "code/model.pth, extra.bin (labctl pull --all)"
    pulled = lab.labctl("pull", "leaves")
    assert "its outputs are up to date" in pulled.stdout
    assert (
        "left on the server: code/model.pth (2 B), extra.bin (2 B) were written outside outputs: "
        "labctl pull --all leaves\n"
    ) in pulled.stderr
    assert "outputs: [checkpoints, logs, code/model.pth, extra.bin]\n" in pulled.stderr
    here = lab.root / "runs" / "leaves"
    assert (here / "checkpoints" / "c").read_text() == "c\n"
    assert not (here / "extra.bin").exists()
    assert "everything is up to date" in lab.labctl("pull", "leaves", "--all").stdout
    assert "left on the server" not in lab.labctl("pull", "leaves").stderr
    assert (here / "extra.bin").read_text() == "e\n"
    assert (here / "code" / "model.pth").read_text() == "m\n"
    # The printed line works as it is: the files of the next run are outputs.
    outputs = next(part for part in pulled.stderr.split("in lab.yaml: ") if part.startswith("out"))
    config = (lab.root / "lab.yaml").read_text()
    assert "outputs: [checkpoints, logs]\n" in config
    with lab.holding("lab.yaml", config.replace("outputs: [checkpoints, logs]\n", outputs)):
        lab.labctl("trust", "--yes")
        assert "new files outside" not in lab.run(line, "--id", "leaves-again").stderr
        lab.labctl("pull", "leaves-again")
        assert (lab.root / "runs/leaves-again/code/model.pth").read_text() == "m\n"
        assert (lab.root / "runs/leaves-again/extra.bin").read_text() == "e\n"


def test_a_secret_is_inside_the_run_and_nowhere_else(lab: LabDirectory, followed: Followed) -> None:
    hashed = 'printf %s "$E2E_TOKEN" | sha256sum | cut -d" " -f1'
    process = followed("secretive", f"{hashed}; {UNTIL_GO}")
    process.said(hashlib.sha256(TOKEN.encode()).hexdigest())
    word = TOKEN.splitlines()[1]
    assert word not in str(lab.inspected("secretive"))
    assert "E2E_TOKEN=" not in str(lab.inspected("secretive"))
    assert word not in lab.sh("ps -eo args")
    kept = f"grep -rlsF -- {_quoted(word)} /home/student /var/lib/docker/containers /tmp /run || :"
    assert lab.sh(kept) == ""
    shown = lab.student("stat -c '%a %n' /dev/shm/labctl-1000 /dev/shm/labctl-1000/secretive/*")
    assert [row.split()[0] for row in shown.splitlines()] == ["700", "600"]
    lab.let_go("secretive")
    process.end(0)
    assert lab.student("ls /dev/shm/labctl-1000") == ""
    assert word.encode() not in process.out + process.err
    home = Path(lab.environ["HOME"])
    files = [path for path in [*home.rglob("*"), *lab.root.rglob("*")] if path.is_file()]
    assert any(path.name == "labctl.db" for path in files)
    assert [path for path in files if word.encode() in path.read_bytes()] == []


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def test_out_of_memory_is_told_with_limit_and_peak(lab: LabDirectory) -> None:
    done = lab.labctl("run", "--", "perl", "-e", "$x = 'a' x 300_000_000", code=137)
    assert "out of memory: killed at its limit of 91.6 MiB (peak 91." in done.stderr
    (found,) = [f for f in lab.json("explain")["findings"] if f["level"] == "problem"]
    assert (found["rule"], found["evidence"][0]["of"]) == ("out-of-memory", "the run's record")


def test_a_runs_container_is_limited_and_the_students(
    lab: LabDirectory, followed: Followed
) -> None:
    questions = "id -un; id -u; echo $SEED $FROM_ENTRYPOINT $LABCTL_RUN_ID; pwd; touch $HOME/w"
    process = followed("limited", f"{questions} && echo home; touch /lab/data/x; {UNTIL_GO}")
    process.said("Read-only")
    found = lab.inspected("limited")
    host = found["HostConfig"]
    megabyte = 1000**2
    assert host["Memory"] in (96 * megabyte, 96 * 2**20)
    assert host["MemorySwap"] == host["Memory"]
    assert host["NanoCpus"] == 1_500_000_000
    assert host["ShmSize"] in (32 * megabyte, 32 * 2**20)
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert not host["DeviceRequests"]
    assert not host["Privileged"]
    assert found["Config"]["User"] == "1000:1000"
    lab.let_go("limited")
    process.end(0)
    assert process.stdout.splitlines()[:5] == ["lab", "1000", "7 yes limited", "/lab/code", "home"]


def test_data_on_the_server_is_mounted_read_only(lab: LabDirectory) -> None:
    lab.sh("mkdir -p /datasets/v1 && echo owl > /datasets/v1/a && ln -sfn v1 /datasets/birds")
    lab.sh("chmod -R a+rwX /datasets && ln -sfn /etc /datasets/system")
    before = (lab.root / "lab.yaml").read_text()
    with lab.holding("lab.yaml", before + "data: {birds: server:/datasets/birds}\n"):
        refused = lab.run("true", code=255)
        assert "let its programs read /datasets/birds on the server" in refused.stderr
        lab.labctl("trust", "--yes")
        line = "cat $LABCTL_DATA_DIR/birds/a; touch /lab/data/birds/new || echo refused"
        done = lab.run(line, "--id", "birds")
        assert done.stdout.splitlines()[0] == "owl"
        assert "Read-only file system" in done.stdout
        assert done.stdout.endswith("refused\n")
        assert lab.sh("ls /datasets/v1") == "a\n"
    for name, why, hint in (
        ("none", "the server has no directory /datasets/none", "labctl ssh -- ls /datasets\n"),
        ("system", "/datasets/system, which leads to /etc on the server,", "fix data: in lab.yaml"),
        ("v1/a", "/datasets/v1/a on the server is not a directory", "fix data: in lab.yaml"),
    ):
        with lab.holding("lab.yaml", before + f"data: {{birds: server:/datasets/{name}}}\n"):
            lab.labctl("trust", "--yes")
            failed = lab.run("true", code=255)
            assert why in failed.stderr
            assert hint in failed.stderr
            pushless = lab.run("true", "--no-push", code=255)
            assert why in pushless.stderr


def test_cancel_lets_it_write_first(lab: LabDirectory, followed: Followed) -> None:
    saves = "trap 'echo saved > /lab/run/checkpoints/last; exit 4' TERM"
    process = followed("saves", f"{saves}; echo ready; while :; do sleep 0.02; done")
    process.said("ready\n")
    told = lab.labctl("cancel", "saves", "--grace", "30")
    assert told.stdout == "run saves: canceled (exit code 4)\n"
    assert "start: ./runs/saves/checkpoints" in told.stderr
    process.end(4)
    assert lab.student(f"cat {lab.place('saves')}/checkpoints/last") == "saved\n"
    assert "had already ended" in lab.labctl("cancel", "saves").stdout
    assert lab.seen("saves")["state"] == "cancelled"


def test_cancel_kills_what_does_not_stop(lab: LabDirectory, followed: Followed) -> None:
    process = followed("deaf", "trap '' TERM; echo ready; while :; do sleep 0.02; done")
    process.said("ready\n")
    told = lab.labctl("cancel", "deaf", "--grace", "1")
    assert "did not stop in time and was killed" in told.stdout
    assert told.stderr == "labctl pull deaf    download its logs\n"
    process.end(137)
    assert lab.inspected("deaf")["State"]["Running"] is False


def test_the_session_beside_a_run_can_be_killed_and_comes_back(
    lab: LabDirectory, followed: Followed
) -> None:
    process = followed("seen")
    process.said("line 1\n")
    windows = "tmux list-windows -t =labctl-seen -F '#W'"
    assert lab.student(windows).split() == ["run", "monitor", "shell"]
    before = lab.inspected("seen")["State"]
    lab.student("tmux kill-server")
    wait_for(lambda: "seen" not in lab.student("tmux ls", check=False))
    _attach_and_leave(lab, "seen")
    assert lab.student(windows).split() == ["run", "monitor", "shell"]
    after = lab.inspected("seen")["State"]
    assert (after["Running"], after["Pid"]) == (True, before["Pid"])
    inside = lab.labctl("exec", "seen", "--", "sh", "-c", "echo $LABCTL_RUN_ID; exit 5", code=5)
    no_gpu = lab.labctl("exec", "seen", "--", "nvidia-smi", code=255)
    assert no_gpu.stderr.startswith("labctl: this server has no GPU\n")
    assert inside.stdout == "seen\n"
    shown = f"pgrep -af {lab.place('seen')}/logs/run.log || true"
    assert "tail" in lab.student(shown)
    lab.let_go("seen")
    assert process.end(0).stdout == lab.log("seen")
    lab.seen("seen")  # the agent ends the session when it notices that the run has ended
    wait_for(lambda: "labctl-seen" not in lab.student("tmux ls 2>&1", check=False))
    wait_for(lambda: "tail" not in lab.student(shown))
    wait_for(lambda: lab.student("pgrep -x top || true") == "")
    _attach_and_leave(lab, "seen", "Run seen has ended. Ctrl-b d leaves its session")


def _attach_and_leave(
    lab: LabDirectory,
    run: str,
    message: str = "The session of run seen. Leave it with Ctrl-b d; the run continues.",
) -> None:
    """`labctl attach` in a terminal of its own, left with Ctrl-b d."""
    with lab.in_terminal("attach", run) as terminal:
        terminal.said(message)
        shown = f"tmux list-clients -t =labctl-{run} 2>/dev/null"
        wait_for(lambda: lab.student(shown, check=False))
        terminal.type("\x02d")
        assert terminal.popen.wait(120) == 0


def test_top_in_a_terminal_lists_its_keys_and_quits(lab: LabDirectory) -> None:
    with lab.in_terminal("top") as terminal:
        terminal.said("processor")
        terminal.said("? lists the keys")
        terminal.type("?")
        terminal.said("q or Ctrl-C: quit")
        terminal.type("q")
        assert terminal.popen.wait(60) == 0


def test_a_run_with_a_terminal_asks_and_is_answered(lab: LabDirectory) -> None:
    line = "test -t 0 && echo a terminal; read -r name; echo hello $name; exit 3"
    with lab.in_terminal("run", "-it", "--id", "asks", "--", "sh", "-c", line) as terminal:
        terminal.said("a terminal")
        terminal.type("ada\n")
        terminal.said("hello ada")
        terminal.said("run asks: failed with exit code 3")
        assert terminal.popen.wait(120) == 3
    recorded = json.loads(lab.labctl("status", "--json").stdout)["runs"]
    assert next(run["state"] for run in recorded if run["id"] == "asks") == "exited"
    seen = lab.seen("asks")
    assert (seen["state"], seen["exit_code"]) == ("exited", 3)
    assert "hello ada" in lab.labctl("logs", "asks").stdout


def test_ctrl_c_reaches_a_command_in_its_terminal(lab: LabDirectory) -> None:
    line = 'trap \'echo saved on""ce; exit 5\' INT; echo rea""dy; while :; do sleep 0.1; done'
    with lab.in_terminal("run", "-it", "--id", "stopped", "--", "sh", "-c", line) as terminal:
        terminal.said("ready")
        terminal.type("\x03")
        assert terminal.popen.wait(60) == 5
    assert terminal.shown.count(b"saved once") == 1


def test_the_command_of_a_started_run_is_wrapped_at_words(lab: LabDirectory) -> None:
    words = [f"--option-{number}" for number in range(20)]
    with lab.in_terminal("run", "--detach", "--id", "many", "--", "true", *words) as terminal:
        assert terminal.popen.wait(60) == 0
    shown = bytes(terminal.shown).decode().partition("run many started: ")[2]
    lines = shown.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 100
    assert " ".join(shown.split()).startswith(" ".join(["true", *words]))


def test_ctrl_c_in_a_followed_log_ends_on_one_line(lab: LabDirectory) -> None:
    lab.run(COUNTING, "--id", "counts", "--detach")
    with lab.in_terminal("logs", "-f", "counts") as terminal:
        terminal.said("line 1")
        terminal.popen.send_signal(signal.SIGINT)  # as Ctrl-C does in a shell
        assert terminal.popen.wait(60) == 130
    lab.let_go("counts")
    # What the terminal wrote of the key, ^C, is erased.
    last = bytes(terminal.shown).decode().splitlines()[-1].removeprefix("\x1b[K")
    assert last == "the run is still running; to follow it again: labctl logs -f counts"


def test_a_short_command_with_a_terminal_loses_nothing(lab: LabDirectory) -> None:
    with lab.in_terminal(
        "run", "-it", "--id", "brief", "--", "sh", "-c", "echo a b; exit 4"
    ) as tty:
        tty.said("a b")
        assert tty.popen.wait(120) == 4
    assert (lab.seen("brief")["state"], lab.seen("brief")["exit_code"]) == ("exited", 4)


def test_a_refused_start_with_a_terminal_does_not_look_like_the_command(lab: LabDirectory) -> None:
    broken = f"{DOCKERFILE}RUN mv /bin/sh /bin/shell\n"
    words = ("run", "-it", "--id", "refused", "--", "true")
    with lab.holding("Dockerfile", broken), lab.in_terminal(*words) as terminal:
        assert terminal.popen.wait(120) == 255
        terminal.said("next: labctl doctor")
        text = terminal.shown.decode()
    assert "labctl: the container of run refused did not start\r\n" in text
    assert '"/bin/sh": ' in text


def test_a_killed_labctl_leaves_a_run_that_the_same_command_finds(
    lab: LabDirectory, followed: Followed
) -> None:
    process = followed("orphan")
    process.said("line 3\n")
    process.popen.kill()
    process.end(-9)
    again = followed("orphan")
    again.said("found")
    again.said("line 3\n")
    assert len(lab.containers("orphan")) == 1
    lab.let_go("orphan")
    assert again.end(0).stdout == lab.log("orphan")
    refused = lab.labctl("exec", "orphan", "--", "true", code=255)
    assert "run orphan has ended" in refused.stderr


def test_exec_in_a_run_that_ended_unseen_does_not_look_like_the_command(lab: LabDirectory) -> None:
    lab.labctl("run", "--detach", "--id", "short", "--", "sleep", "1")
    wait_for(lambda: not lab.inspected("short")["State"]["Running"])
    refused = lab.labctl("exec", "short", "--", "true", code=255)
    assert "the container of run short is not running" in refused.stderr


def test_the_guide_shows_what_labctl_prints_with_a_server(
    lab: LabDirectory, tmp_path: Path
) -> None:
    environ = {**lab.environ, "PATH": f"{make_program(tmp_path)}:{lab.environ['PATH']}"}
    with lab.holding("train.sh", "echo trained\n"):
        assert "\n".join(replay(GUIDE, "server", Session(lab.root, environ))) == ""


def test_json_is_one_object_and_keeps_the_code(lab: LabDirectory) -> None:
    words = ("run", "--json", "--id", "told", "--", "sh", "-c", "echo noise; exit 3")
    said = json.loads(lab.labctl(*words, code=3).stdout)
    assert (said["run"]["id"], said["run"]["exit_code"]) == ("told", 3)


def test_an_unchanged_image_is_not_built_again(lab: LabDirectory) -> None:
    with lab.holding("train.sh", "echo edited\n"):
        done = lab.labctl("run")
    assert done.stdout == "edited\n"
    assert "building" not in done.stderr
    assert "sending" not in done.stderr


def test_a_dockerfile_that_fails_shows_its_last_lines(lab: LabDirectory) -> None:
    bad = "ARG BASE\nFROM ${BASE}\nRUN echo one\nRUN echo no such wheel >&2; exit 9\n"
    with lab.holding("Dockerfile", bad):
        done = lab.labctl("run", "--id", "unbuilt", code=255)
    assert "the image build failed" in done.stderr
    assert "no such wheel" in done.stderr
    hint = next(row for row in done.stderr.splitlines() if "labctl ssh -- cat" in row)
    log = hint.split("cat ")[1]
    assert "no such wheel" in lab.student(f"cat {log}")
    assert lab.student(f"ls {lab.place('unbuilt')}", check=False).startswith("ls: cannot access")


def test_a_run_is_refused_where_its_name_or_command_is_no_good(lab: LabDirectory) -> None:
    assert "is not a valid run name" in lab.run("true", "--id", "Not/This", code=255).stderr
    assert "there is no run never" in lab.labctl("cancel", "never", code=4).stderr


def test_status_counts_what_goes_on(lab: LabDirectory, followed: Followed) -> None:
    progress = """echo '{"step": 3, "total_steps": 9}' > /lab/run/logs/progress.json; echo ok"""
    process = followed("steps", f"{progress}; {UNTIL_GO}")
    process.said("ok\n")
    assert lab.seen("steps")["progress"] == {"step": 3.0, "total_steps": 9.0}
    row = next(r for r in lab.labctl("status").stdout.splitlines() if r.strip().startswith("steps"))
    assert "running" in row
    assert "3/9" in row
    assert "run steps is still running on this server; this run started beside it" in " ".join(
        lab.run("true").stderr.split()
    )
    lab.let_go("steps")
    process.end(0)


def test_logs_shows_the_end_of_a_log(lab: LabDirectory) -> None:
    lab.run("for i in 1 2 3 4 5; do echo $i; done", "--id", "tailed")
    assert lab.labctl("logs", "tailed", "-n", "2").stdout == "4\n5\n"
    assert lab.labctl("logs", "tailed").stdout == "1\n2\n3\n4\n5\n"


STEPS = """\
cd /lab/run/logs; i=0; while :; do i=$((i+1))
printf '{"step": %d, "total_steps": 100000}' $i > p; mv p progress.json; sleep 0.1; done"""


def test_a_probe_tells_what_the_whole_run_takes_and_ends(lab: LabDirectory) -> None:
    said = lab.labctl("run", "--json", "--probe", "10", "--", "sh", "-c", STEPS).stdout
    found = json.loads(said)["probe"]
    assert found["run"]["state"] == "cancelled"
    assert found["total_steps"] == 100000
    time = found["time"]
    assert time["low_s"] < time["seconds"] < time["high_s"]
    assert time["seconds"] > 10_000  # a tenth of a second each, at the least
    assert lab.seen(found["run"]["id"])["state"] == "cancelled"


def test_single_files_are_copied_both_ways(lab: LabDirectory, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("from here\n")
    sent = lab.labctl("cp", str(tmp_path / "notes.txt"), f"{lab.name}:")
    assert "copied" in sent.stdout
    there = lab.labctl("ssh", "--", "cat notes.txt; echo from there > back.txt")
    assert there.stdout == "from here\n"
    lab.labctl("cp", f"{lab.name}:back.txt", str(tmp_path))
    assert (tmp_path / "back.txt").read_text() == "from there\n"
    missing = lab.labctl("cp", f"{lab.name}:none.txt", str(tmp_path), code=4)
    assert "there is no none.txt" in missing.stderr


def test_stop_keeps_the_disk_and_start_continues_with_it(lab: LabDirectory) -> None:
    lab.run("echo kept > /lab/run/checkpoints/c", "--id", "kept")
    stopped = lab.labctl("stop", "--yes")
    assert "labctl start      start it again" in stopped.stdout
    refused = lab.run("true", code=255)
    assert "is stopped" in refused.stderr
    assert "next: labctl start" in refused.stderr
    assert lab.json("status")["stopped"]["usd_per_month"] == 0.0
    assert "is ready" in lab.labctl("start").stdout
    assert lab.student(f"cat {lab.place('kept')}/checkpoints/c") == "kept\n"
    assert lab.run("echo again").stdout == "again\n"
