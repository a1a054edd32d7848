"""A lab, and small programs `ssh` and `docker` that stand for its server and for this machine.

The agent answers in turns; everything else is real.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab_world import Recorded, World
from test_run_start import Turn, Wire

from labctl.lifecycle import up
from labctl.model import ServerFacts
from labctl.runs import image_sources, images
from labctl.runs.image_cache import CachedImage, ImageCache
from labctl.servers.context import LabContext

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from image_archives import cut, make_archive

# Both programs stand for the server and for this machine; files in $ENGINE say what they have.
SSH = """
for line; do :; done
[ ! -e "$ENGINE/dead" ] || exit 255
# As with ssh, the command there ends with it.
exec 3<&0
on_server=yes setsid sh -c "$line" <&3 3<&- &
exec 3<&- <&-
trap "kill -- -$!" TERM
wait $!
"""
DOCKER = """
echo "${on_server:-here} $*" >> "$ENGINE/calls"
case "$1 ${on_server:-here}" in
  "image here") cat "$ENGINE/here" 2>/dev/null ;;
  "image yes") cat "$ENGINE/there" 2>/dev/null ;;
  save*)
    cat "$ENGINE/archive"
    [ ! -e "$ENGINE/save-fails" ] || { echo "no layer" >&2; exit 1; } ;;
  version*) [ ! -e "$ENGINE/stopped" ] || exit 1 ;;
  push*) [ ! -e "$ENGINE/denied" ] || { echo "denied: login required" >&2; exit 1; } ;;
  load*)
    [ ! -e "$ENGINE/ends-early" ] || { head -c 1000000 > "$ENGINE/loaded"; exit 255; }
    if [ -e "$ENGINE/pauses" ]; then
      head -c 1000000 > "$ENGINE/begun"; until [ -e "$ENGINE/go" ]; do sleep 0.05; done
    fi
    cat > "$ENGINE/loaded"; tail -c 512 "$ENGINE/loaded" | tr -d '\\0' | grep -q . && exit 1
    [ ! -e "$ENGINE/full" ] || { echo "no space left on device" >&2; exit 1; } ;;
esac
"""
PULLED = Turn({}, end={"code": 0, "tail": []})
BUILT = Turn({"log": "/x"}, end={"code": 0, "tail": [], "log": "/x"})


class Sources:
    """A lab with a Dockerfile and a server without its image."""

    def __init__(self, lab: World, engine: Path) -> None:
        self.engine = engine
        self.is_on_this_machine = False
        self.reporter = Recorded()
        (lab.home / "lab" / "Dockerfile").write_text("FROM scratch\n")
        (lab.home / "lab" / "lab.yaml").write_text("lab: digits\nimage: {build: .}\n")
        self.lab = lab
        self.server = up.up(lab.context())
        self.context().save_facts(self.server, ServerFacts(arch="x86_64"))
        self.wanted = images.image_reference(self.context())
        self.requests: list[dict[str, Any]] = []
        self.archive = make_archive(self.wanted)
        (engine / "archive").write_bytes(self.archive)

    def context(self, wire: Wire | None = None) -> LabContext:
        made = self.lab.context(self.reporter)
        if self.is_on_this_machine:
            made.provider.on_this_machine = True  # type: ignore[attr-defined]
        if wire is not None:
            made.connections.__dict__["machine"] = wire
        return made

    @property
    def tag(self) -> str:
        return self.wanted.rpartition(":")[2]

    def name_registry(self, registry: str = "registry.example/labs") -> None:
        """Let lab.yaml name a registry, which changes the image's name."""
        text = f"lab: digits\nimage: {{build: ., registry: {registry}}}\n"
        (self.lab.home / "lab" / "lab.yaml").write_text(text)
        self.wanted = images.image_reference(self.context())

    @property
    def cache(self) -> ImageCache:
        return image_sources.open_cache(self.context())

    @property
    def calls(self) -> list[str]:
        calls = self.engine / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def keep(self, architecture: str = "amd64") -> CachedImage:
        return self.cache.add(self.wanted, architecture, cut(self.archive))

    def ensure(self, *turns: Turn) -> list[str]:
        """Ensure the image; return the agent's verbs after the one that finds it absent."""
        wire = Wire([Turn({"ids": {self.wanted: ""}}), *turns])
        context = self.context(wire)
        remote = context.open_agent(self.server)
        images.ensure_image(context, self.server, remote, self.wanted)
        assert wire.turns == []
        self.requests = [request for _, request in wire.asked[1:]]
        return [verb for verb, _ in wire.asked[1:]]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def make_sources(lab: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """A lab whose programs `ssh` and `docker` are those above."""
    programs, engine = tmp_path / "bin", tmp_path / "engine"
    for folder in (programs, engine):
        folder.mkdir()
    for name, script in (("ssh", SSH), ("docker", DOCKER)):
        (programs / name).write_text(f"#!/bin/sh\n{script}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("ENGINE", str(engine))
    made = Sources(lab, engine)
    monkeypatch.setenv("PYTHONPATH", str(Path(images.__file__).parents[2]))
    return made
