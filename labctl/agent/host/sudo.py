"""Running a verb again as root, through sudo without a password."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ...wire.codec import from_json, to_json
from ...wire.verbs import Reply, Request, Verb
from ..program import PROGRAM
from ..reply import parse_reply


def describe_account(request: dict[str, Any]) -> dict[str, Any]:
    """Return the account that owns the lab, for the request that is repeated as root."""
    if "uid" in request and os.geteuid() == 0:
        return {}
    entry = pwd.getpwuid(os.getuid())
    return {"uid": os.getuid(), "gid": os.getgid(), "home": str(Path.home()), "user": entry.pw_name}


def can_sudo() -> bool:
    if not shutil.which("sudo"):
        return False
    done = subprocess.run(["sudo", "-n", "true"], capture_output=True, timeout=20, check=False)
    return done.returncode == 0


def call_as_root(verb: Verb[Request, Reply], request: Request) -> Reply:
    """Run this verb again as root; return its reply or raise its Failure."""
    return from_json(verb.reply, run_as_root(verb.name, to_json(request)))


def run_as_root(verb: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run this verb again as root; return its reply or raise its Failure."""
    program = PROGRAM / "__main__.py"
    words = ["sudo", "-n", "env", f"HOME={Path.home()}"]
    done = subprocess.run(
        [*words, sys.executable, "-I", "-S", "-B", str(program), verb],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return parse_reply(verb, done.stdout, done.stderr)
