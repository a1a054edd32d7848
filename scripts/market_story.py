"""Runs a student's week over six simulated clouds: each command as a person would type it.

The machines of three clouds boot as containers, with a stand-in for their GPU: the training runs on
this machine's CPU. Those of the others are records, whose prices compete. The last line of output
is a JSON object with the results. Everything, including HOME, is in a temporary directory that is
removed at the end.

To add a step, write a function that takes the Week and returns figures, and add it to STEPS and its
figures to EXPECTED.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from market_clouds import LABCTL, Clouds, read_remains, rehearse_clouds
from market_terminal import Answer, Follower, answer_questions

# What a step found, to compare with what is expected.
Figures = dict[str, object]
RUN = "night"
# seconds that the training would take on the first server: the move's new server starts meanwhile
TRAINING_S = 150.0
TRY_EPOCHS = 3
NOTICE_S = 30
WAIT_S = 600.0
LIMITS = {
    "# max_price: 1.50 ": "max_price: 4.00   ",
    "# budget: 5.00 ": "budget: 5.00   ",
    "# ttl: 8h ": "ttl: 8h   ",
}
# The machines have PyTorch, as the clouds' images for deep learning have: no image is built.
RESUMED = r"resuming from .*checkpoints"
PROCESS = "  executor: process\n"
IMAGE = re.compile(r"# Built on the server.*?(?=# The command)|limits:.*", re.DOTALL)
# A model as small as this one is fastest on one core, above all on a busy machine.
SEED, ONE_CORE = '  SEED: "1"\n', '  OMP_NUM_THREADS: "1"\n'
AGREE: Answer = (r"\[y/N\]: ", lambda match: "y")
# No guard ends the costs at some clouds: labctl has its user type what a month would cost.
TYPE_COST: Answer = (r"type ([\d.]+): ", lambda match: match[1])
EXPECTED: Figures = {
    "clouds_with_offers": ["aws", "azure", "gcp", "lambda", "runpod", "vast"],
    "is_first_the_cheapest_spot": True,
    "first_cloud": "azure",
    "has_parts_at_first_cloud": True,
    "second_cloud": "aws",
    "third_cloud": "vast",
    "machines_after_loss": 1,
    "machines_after_move": 1,
    "is_checkpoint_continued": True,
    "are_steps_in_order": True,
    "attempts": 3,
    "runs": ["night", "try"],
    "run_exit": 0,
    "is_accuracy_equal": True,
    "down_exit": 0,
    "orphans_exit": 0,
    "servers": ["azure", "aws", "vast"],
    "are_servers_ended": True,
    "left": {},
    "violations": {},
}


@dataclass
class Week:
    """The student's lab, the clouds, and the command that follows the run."""

    lab: Path
    clouds: Clouds
    follower: Follower | None = None

    def labctl(self, *words: str, capture: bool = False, code: int | None = 0) -> tuple[int, str]:
        """Run a command in the lab; return its exit code and what it printed, if captured."""
        print(f"\n$ labctl {shlex.join(words)}", flush=True)
        out = subprocess.PIPE if capture else None
        done = subprocess.run([LABCTL, *words], cwd=self.lab, text=True, stdout=out, check=False)
        print(done.stdout or "", end="", flush=True)
        if code is not None and done.returncode != code:
            raise SystemExit(f"labctl {shlex.join(words)} exited with code {done.returncode}")
        return done.returncode, done.stdout or ""

    def read_json(self, *words: str) -> dict[str, object]:
        """Return the output of a command with --json, without showing it."""
        command = [LABCTL, *words, "--json"]
        done = subprocess.run(command, cwd=self.lab, text=True, capture_output=True, check=False)
        if not done.stdout:
            raise SystemExit(f"labctl {shlex.join(words)}: {done.stderr}")
        body: dict[str, object] = json.loads(done.stdout)
        return body

    def find_cloud(self) -> str:
        """Return the cloud of the lab's server, as labctl has it."""
        server = self.read_json("status")["server"]
        return str(server["provider"]) if isinstance(server, dict) else ""

    def list_machines(self) -> list[tuple[str, str]]:
        """List what runs or still bills, over all clouds: (cloud, machine)."""
        return [
            (cloud.name, machine)
            for cloud in self.clouds.values()
            for machine in cloud.list_alive()
        ]


def announce(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def compare_offers(week: Week) -> Figures:
    """Compare the offers of all clouds with credentials."""
    announce("Monday: where is a GPU cheapest? labctl asks every cloud")
    week.labctl("offers", "--provider", "auto", "--gpu", "any")
    offers = week.read_json("offers", "--provider", "auto", "--gpu", "any")["offers"]
    assert isinstance(offers, list)
    return {"clouds_with_offers": sorted({offer["provider"] for offer in offers})}


def start_cheapest(week: Week) -> Figures:
    """Take the cheapest spot server with a T4, and try a few epochs there."""
    announce("A T4 will do at first: the cheapest spot server of all clouds")
    words = ("--provider", "auto", "--gpu", "T4", "--spot")
    offers = week.read_json("offers", *words)["offers"]
    assert isinstance(offers, list)
    week.labctl("up", *words, "--yes")
    server = week.read_json("status")["server"]
    assert isinstance(server, dict)
    taken, first = server["offer"], offers[0]
    # The check at the end must be able to fail.
    parts = read_remains(week.clouds)[server["provider"]]
    announce("A first run of three epochs, to see how long one takes")
    week.labctl("run", "--id", "try", "--", "python", "train.py", "--epochs", str(TRY_EPOCHS))
    week.labctl("pull", "try")
    return {
        "first_cloud": server["provider"],
        "has_parts_at_first_cloud": bool(parts),
        "is_first_the_cheapest_spot": taken["spot"]
        and (taken["provider"], taken["type"]) == (first["provider"], first["type"]),
    }


def train_and_lose_server(week: Week) -> Figures:
    """Train; the cloud takes its server back, and has no other one."""
    metrics = json.loads((week.lab / "runs" / "try" / "logs" / "metrics.json").read_text())
    epochs = max(24, round(TRAINING_S / metrics["seconds"] * TRY_EPOCHS))
    announce("Tuesday: the long training, which may lose its server")
    words = ("run", "--recover", "--yes", "--id", RUN, "--", "python", "train.py")
    week.follower = follower = Follower(*words, "--epochs", str(epochs), cwd=week.lab)
    follower.wait_for(r"epoch 3/")
    week_cloud = week.clouds[week.find_cloud()]
    announce(f"{week_cloud.name} takes its spot server back, and has no T4 any more")
    with follower.hold():
        week_cloud.send("set", {"switches": ["capacity=[{type: Standard_*_T4_v3}]"]})
        [machine] = week_cloud.list_alive()
        week_cloud.send("reclaim", {"instance": machine, "notice_s": NOTICE_S})
    follower.wait_for(RESUMED)
    steps = find_steps(follower.output)
    follower.wait_for(r"epoch \d+/", len(steps) + 2)
    machines = len(week.list_machines())
    with follower.hold():
        week.labctl("status")
    return {"second_cloud": week.find_cloud(), "machines_after_loss": machines}


def find_steps(output: str) -> list[tuple[int, int]]:
    """Return (step, epoch) of each epoch that the log reports."""
    return [
        (int(step), int(epoch))
        for epoch, step in re.findall(r"epoch (\d+)/\d+ +step (\d+)/", output)
    ]


def move_to_larger_gpu(week: Week) -> Figures:
    """Move the run to an A100, on demand, while it goes on."""
    follower = week.follower
    assert follower is not None
    announce("Wednesday: the rest on an A100 that no cloud takes back")
    before = follower.count(RESUMED)
    with follower.hold():
        week.labctl("offers", "--provider", "auto", "--gpu", "A100", "--spot", "never")
        words = ("move", "--gpu", "A100", "--spot", "never")
        answer_questions(*words, cwd=week.lab, answers=(AGREE, TYPE_COST))
    follower.wait_for(RESUMED, before + 1)
    follower.wait_for(r"epoch \d+/", len(find_steps(follower.output)) + 2)
    with follower.hold():
        week.labctl("status")
    return {"third_cloud": week.find_cloud(), "machines_after_move": len(week.list_machines())}


def read_results(week: Week) -> Figures:
    """Wait for the run's end, and download, evaluate and report its results."""
    follower = week.follower
    assert follower is not None
    code = follower.end(WAIT_S)
    announce("Thursday: the results are downloaded, evaluated and reported")
    week.labctl("pull", RUN)
    _, output = week.labctl("eval", RUN, capture=True)
    figures = dict(re.findall(r"^(here|on the server): +([\d.]+)", output, re.MULTILINE))
    week.labctl("report", RUN)
    runs = week.read_json("status")["runs"]
    assert isinstance(runs, list)
    return {
        "run_exit": code,
        "runs": sorted(run["id"] for run in runs),
        "attempts": 1 + len(re.findall(r"resuming here \(attempt \d+\)", follower.output)),
        "accuracy": float(figures["here"]),
        "is_accuracy_equal": figures["here"] == figures["on the server"],
        **check_steps(follower.output),
    }


def check_steps(output: str) -> Figures:
    """Compare where the run stopped with where it resumed, each time."""
    stopped = re.findall(r"stopped after step (\d+)", output)
    resumed = re.findall(r"resuming from \S*checkpoints/step-0*(\d+)", output)
    steps = [step for step, _ in find_steps(output)]
    return {
        "stopped_after_steps": [int(step) for step in stopped],
        "resumed_from_steps": [int(step) for step in resumed],
        "is_checkpoint_continued": len(stopped) == 2 and stopped == resumed,
        "are_steps_in_order": steps == sorted(set(steps)),
    }


def remove_everything(week: Week) -> Figures:
    """Remove the server, and look for what is left, with labctl and without it."""
    announce("Friday: nothing may go on to cost money")
    down, _ = week.labctl("down", "--yes", code=None)
    orphans, _ = week.labctl("orphans", "--provider", "auto", code=None)
    week.labctl("cost")
    costs = week.read_json("cost")["costs"]
    assert isinstance(costs, dict)
    announce("What each cloud's own API has now, without labctl")
    remains = read_remains(week.clouds)
    for name, found in remains.items():
        print(f"{name:<8}{', '.join(found) or 'nothing'}", flush=True)
    violations = {name: cloud.read_state()["violations"] for name, cloud in week.clouds.items()}
    return {
        "down_exit": down,
        "orphans_exit": orphans,
        "servers": [server["provider"] for server in costs["servers"]],
        "are_servers_ended": not any(server["running"] for server in costs["servers"]),
        "spent_usd": round(sum(server["cost_usd"] for server in costs["servers"]), 4),
        "left": {name: found for name, found in remains.items() if found},
        "violations": {name: found for name, found in violations.items() if found},
    }


STEPS = (
    compare_offers,
    start_cheapest,
    train_and_lose_server,
    move_to_larger_gpu,
    read_results,
    remove_everything,
)


def create_lab(home: Path) -> Path:
    """Create the sample project, with limits in its lab.yaml."""
    print("\n$ labctl init digits --provider auto", flush=True)
    subprocess.run([LABCTL, "init", "digits", "--provider", "auto"], cwd=home, check=True)
    file = home / "digits" / "lab.yaml"
    text = IMAGE.sub("", file.read_text()).replace(SEED, SEED + ONE_CORE)
    for comment, line in LIMITS.items():
        assert comment in text, comment
        text = text.replace(comment, line)
    (file.parent / "Dockerfile").unlink()
    file.write_text(text.replace("  gpu: auto\n", f"  gpu: auto\n{PROCESS}"))
    return file.parent


def run_week(home: Path) -> Figures:
    logs = home / "clouds"
    logs.mkdir()
    announce("Six simulated clouds; those with --boot none have prices only")
    figures: Figures = {}
    with rehearse_clouds(logs) as clouds:
        week = Week(create_lab(home), clouds)
        try:
            for step in STEPS:
                figures |= step(week)
        finally:
            if week.follower is not None:
                week.follower.stop()
    return figures


def main() -> int:
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    home = Path(tempfile.mkdtemp(prefix="labctl-demo-"))
    for name in [n for n in os.environ if n.startswith("XDG_") or n == "LABCTL_STATE_DIR"]:
        del os.environ[name]
    os.environ["HOME"] = str(home)
    try:
        figures = run_week(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    wrong = {
        name: figures.get(name) for name, value in EXPECTED.items() if figures.get(name) != value
    }
    figures["seconds"] = round(time.monotonic() - started_s, 1)
    for name, value in wrong.items():
        print(f"not as expected: {name} is {value}, not {EXPECTED[name]}", flush=True)
    print(json.dumps({**figures, "passed": not wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
