"""labctl eval --on-server: the run's own program over its checkpoints, shut in for real.

The image's python3 is a shell here: what is asked is what the container lets a program do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_directory import DOCKERFILE, LabDirectory

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
*step-2) ln -s /etc/passwd "$LABCTL_EVALUATION" ;;
*step-3) echo "broken model"; exit 3 ;;
*) cat /lab/run/checkpoints/body.json >"$LABCTL_EVALUATION" ;;
esac
echo '{"accuracy": 0.75}'
"""
BODY = {
    "version": 1,
    "checkpoint": "step-1",
    "classes": ["a", "b"],
    "confusion": [[2, 0], [1, 1]],
    "accuracy": 0.75,
    "items": 4,
    "where": "here",
}


def test_on_the_server_it_is_shut_in(lab: LabDirectory) -> None:
    line = "cd /lab/run/checkpoints; mkdir step-1 step-2 step-3; "
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
    assert "wrote no evaluation" in linked.stderr
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
