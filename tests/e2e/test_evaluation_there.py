"""labctl eval --on-server: the run's own program over its checkpoints, shut in for real.

The image's python3 is a shell here: what is asked is what the container lets a program do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab_directory import DOCKERFILE, UNTIL_GO, LabDirectory, Process

from labctl.runs.missing_model import EXAMPLE

pytest_plugins = ["lab_fixture"]
pytestmark = pytest.mark.engine

PYTHON = r"""RUN printf '#!/bin/sh\nexec sh "$@"\n' >/usr/bin/python3 && chmod +x /usr/bin/python3
"""
PROGRAM = """\
say() { echo "$1=$2"; }
tries() { if (eval "$2") 2>/dev/null; then say "$1" yes; else say "$1" no; fi; }
say where "$1"
say secret "${E2E_TOKEN:-hidden}"
say interfaces "$(ls /sys/class/net | tr '\\n' ' ')"
say capabilities "$(grep CapEff /proc/self/status | tr -d '\\t' | cut -d: -f2)"
tries writes_run 'echo x >/lab/run/checkpoints/x'
tries writes_code 'echo x >/lab/code/x'
tries writes_data 'echo x >/lab/data/x'
tries writes_cache 'echo x >/lab/cache/x'
tries writes_root 'echo x >/x'
tries writes_home 'echo x >~/x'
case "$1" in
*step-2) ln -s /etc/passwd "$LABCTL_EVALUATION"; echo linked; exit ;;
*step-3) echo "broken model"; exit 3 ;;
*) cat /lab/run/checkpoints/body.json >"$LABCTL_EVALUATION" ;;
esac
echo '{"accuracy": 0.75}'
"""
# The server's own Python on top of the image TAG: there is none in it, and apt takes a minute.
COPY_PYTHON = """\
set -e; to=$(mktemp -d); cd /
tar -ch --exclude=test --exclude=config-* usr/bin/python3 usr/lib/python3.11 \\
  usr/lib/*/libexpat.so.1 usr/lib/*/libz.so.1 | tar -x -C $to
printf 'FROM TAG\\nCOPY . /\\n' >$to/Dockerfile
docker build -q -t with-python $to; rm -r $to
"""
HOST = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHost"
SAVE = """\
save() {
    mkdir /lab/run/checkpoints/$1; cd /lab/run/checkpoints/$1
    printf '\\020\\0\\0\\0\\0\\0\\0\\0{}              ' >w.safetensors; echo '{}' >manifest.json
    touch -d "$2 minutes ago" *  # A pull leaves what was written within its last seconds.
}"""
EVALUATE_NEWEST = """\
import json, os, sys
from pathlib import Path
body = {"checkpoint": max(os.listdir(sys.argv[1])), "classes": ["a", "b"], "items": 4}
body |= {"confusion": [[2, 0], [1, 1]], "accuracy": 0.75}
Path(os.environ["LABCTL_EVALUATION"]).write_text(json.dumps(body))
print(json.dumps(body))
"""
CODE = {
    "train.py": """\
class Model:
    def eval(self):
        return self
    def load_state_dict(self, weights):
        assert weights == "weights"
    def __call__(self, x):
        return self
    def argmax(self, axis):
        return [0, 1, 2, 3]
def build_model():
    return Model()
def test_batches():
    yield None, [0, 1, 2, 0]
""",
    "torch.py": """\
def load(file, map_location, weights_only):
    assert weights_only
    return file.read_text()
""",
    "safetensors/torch.py": """\
def load_file(file):
    return file.read_text()
""",
}
BODY = {
    "version": 1,
    "checkpoint": "step-1",
    "classes": ["a", "b"],
    "confusion": [[2, 0], [1, 1]],
    "accuracy": 0.75,
    "items": 4,
    "where": "here",
}


@pytest.mark.long
def test_on_the_server_it_is_shut_in(lab: LabDirectory) -> None:
    line = "cd /lab/run/checkpoints; mkdir step-2 step-3; touch step-2/w step-3/w; "
    line += f"echo '{json.dumps(BODY)}' >body.json"
    with lab.holding("Dockerfile", DOCKERFILE + PYTHON), lab.holding("evaluate.py", PROGRAM):
        lab.run(line, "--id", "judged")
    found = lab.json("eval", "judged", "--on-server")["evaluation"]
    assert (found["accuracy_server"], found["accuracy_local"]) == (0.75, None)
    kept = Path(lab.root, "runs", "judged")
    for name in ("evaluation-on-server.json", "evaluation.json"):
        assert json.loads((kept / name).read_text())["where"] == "server"

    lab.labctl("pull", "judged")
    for name in ("step-2", "step-3"):
        (kept / "checkpoints" / name).mkdir(exist_ok=True)
    linked = lab.labctl("eval", f"{kept}/checkpoints/step-2", "--on-server", code=1)
    assert "reported no accuracy on the server" in linked.stderr
    said = dict(row.strip().split("=", 1) for row in linked.stderr.splitlines() if "=" in row)
    assert said.pop("where") == "/lab/run/checkpoints/step-2"
    assert said.pop("capabilities").strip("0") == ""
    assert said.pop("interfaces").split() == ["lo"]
    assert said == {
        "secret": "hidden",
        "writes_run": "no",
        "writes_code": "no",
        "writes_data": "no",
        "writes_cache": "no",
        "writes_root": "no",
        "writes_home": "yes",
    }
    failed = lab.labctl("eval", f"{kept}/checkpoints/step-3", "--on-server", code=1)
    assert "evaluate.py failed on the server with exit code 3" in failed.stderr
    assert "broken model" in failed.stderr
    left = lab.student(
        "docker ps -aq --filter label=labctl.runs.evaluation; ls -A " + lab.place("judged")
    )
    assert left.split() == [".labctl", "checkpoints", "code", "logs"]
    assert "evaluation-" not in lab.student(f"ls {lab.place('judged')}/.labctl")

    none = lab.labctl("eval", "first", "--on-server", code=4)
    assert "has no evaluate.py" in none.stderr


@pytest.mark.long
def test_the_example_evaluates_as_printed(lab: LabDirectory) -> None:
    """A run without evaluate.py, and a model in the working directory: each hint leads on."""
    with holding_python(lab), holding_code(lab):
        lab.run("printf weights >/lab/code/model.pth", "--id", "pth")
        with lab.holding("evaluate.py", EXAMPLE):
            none = lab.labctl("eval", "pth", "--on-server", code=4).stderr
            assert "run pth has no checkpoints on the server" in none
            assert "labctl pull --all pth && labctl eval --on-server runs/pth/code\n" in none
            lab.labctl("pull", "--all", "pth")
            assert evaluate(lab, "runs/pth/code") == (0.75, "model.pth", 4)
            with lab.holding("evaluate.py", "exit('broken')"):
                broken = lab.labctl("eval", "--on-server", "runs/pth/code", code=1).stderr
            assert "then:\n        labctl eval --on-server runs/pth/code\n" in broken
            lab.run("printf weights >/lab/run/checkpoints/a.safetensors", "--id", "tensors")
    # The run's own evaluate.py: the lab has none any more.
    assert evaluate(lab, "tensors") == (0.75, "a.safetensors", 4)


@pytest.mark.long
def test_submit_knows_what_is_older_than_what(
    lab: LabDirectory, followed: Callable[[str, str], Process], tmp_path: Path
) -> None:
    """Evaluated, downloaded and reported in the middle of a run, which then ends."""
    lab.labctl("receive", "init", str(tmp_path / "drop"))
    words = ("assignment", str(tmp_path / "drop"), "hw3", "--at", "ssh://a@b", "--host-key", HOST)
    assignment = lab.labctl("receive", *words).stdout
    with (
        holding_python(lab),
        lab.holding("evaluate.py", EVALUATE_NEWEST),
        lab.holding("assignment.yaml", assignment),
    ):
        process = followed("story", f"{SAVE}; save step-1 2; echo saved; {UNTIL_GO}; save step-2 1")
        process.said("saved\n")
        for command in ("eval --on-server", "pull", "report"):
            lab.labctl(*command.split(), "story")
        assert submit(lab)["stale"] == []
        lab.let_go("story")
        process.end(0)
        (stale,) = submit(lab)["stale"]
        assert stale.endswith("were downloaded before run story ended")
        fresh = submit(lab, "--fresh")
    assert (fresh["stale"], fresh["manifest"]["checkpoint"]) == ([], "step-2")


def submit(lab: LabDirectory, *options: str) -> dict[str, Any]:
    return lab.json("submit", "story", "--dry-run", *options)


@contextmanager
def holding_python(lab: LabDirectory) -> Iterator[None]:
    lab.student(f"docker tag {lab.inspected('first')['Image']} without-python")
    lab.student(COPY_PYTHON.replace("TAG", "without-python"))
    with lab.holding("Dockerfile", "FROM with-python\n"):
        yield


def evaluate(lab: LabDirectory, which: str) -> tuple[float, str, int]:
    result = lab.json("eval", "--on-server", which)["evaluation"]
    return result["accuracy_server"], result["checkpoint"], result["total"]


@contextmanager
def holding_code(lab: LabDirectory) -> Iterator[None]:
    """A project's own code, and as much of PyTorch as the example uses."""
    with ExitStack() as stack:
        (lab.root / "safetensors").mkdir()
        stack.callback(shutil.rmtree, lab.root / "safetensors")
        for name, text in CODE.items():
            stack.enter_context(lab.holding(name, text))
        yield
