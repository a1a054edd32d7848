"""Threads that are the first to decode a type, all at the same time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Twelve nested types for each of 40 rounds, which eight threads decode from both ends. With
# msgspec.json.decode this process ends with a segmentation fault.
PROGRAM = """\
import sys, threading, types
from labctl.decoding import decode_json
sys.setswitchinterval(1e-6)
lines = ["from __future__ import annotations", "import msgspec"]
lines += ["class S0(msgspec.Struct):", "    a: int = 0"]
bodies = [b'{"a": 1}']
for n in range(1, 12):
    lines += [f"class S{n}(msgspec.Struct):"]
    lines += [f"    f{i}: S{n - 1} | None = None" for i in range(6)]
    bodies.append(b'{"f0": %s}' % bodies[-1])
source = compile("\\n".join(lines), "kinds", "exec")
for number in range(40):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(source, module.__dict__)
    work = list(zip(bodies, [getattr(module, f"S{n}") for n in range(12)]))
    gate = threading.Barrier(8)
    def decode(work):
        gate.wait()
        for body, kind in work:
            decode_json(body, kind)
    threads = [threading.Thread(target=decode, args=(work[::step],)) for step in (1, -1) * 4]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""
# These have no thread: the agent, and what it shares with labctl.
ROOMS_WITHOUT_THREADS = ("agent", "wire")


def test_a_type_is_examined_by_one_thread() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_threads_decode_goes_through_it() -> None:
    # Without a type, msgspec has nothing to examine.
    unsafe = re.compile(r"msgspec\.(convert\(|\w+\.decode\([^()]*(\([^()]*\))*[^()]*type=)")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sorted((ROOT / "labctl").rglob("*.py"))
        if file.relative_to(ROOT / "labctl").parts[0] not in (*ROOMS_WITHOUT_THREADS, "decoding.py")
        for line in file.read_text().splitlines()
        if unsafe.search(line)
    ]
    assert found == []
