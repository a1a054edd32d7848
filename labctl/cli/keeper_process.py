"""The log and the systemd unit of a keeper's process: `labctl keep` and `labctl course serve`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from labctl.cli.exit_codes import clean
from labctl.config import Paths
from labctl.errors import LabError


def log_lines(name: str, text: str) -> None:
    """Write each line of `text` to the log with the time and, unless it is "", `name`."""
    prefix = f"{name}: " if name else ""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for line in clean(text).splitlines():
        click.echo(f"{stamp} {prefix}{line}", err=True)


def install_unit(
    paths: Paths, name: str, programs: Sequence[str], build_text: Callable[[str], str]
) -> None:
    """Write a user unit and say how to start it. `build_text` takes a PATH with the `programs`."""
    found = [shutil.which(program) for program in programs]
    directories = [str(Path(program).parent) for program in found if program]
    path = os.pathsep.join(dict.fromkeys([*directories, "/usr/local/bin", "/usr/bin", "/bin"]))
    target = paths.config_dir.parent / "systemd" / "user" / f"{name}.service"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(build_text(path))
    except OSError as error:
        raise LabError(
            f"cannot write {target}", why=error.strerror or "", hint=f"ls -ld {target.parent}"
        ) from error
    click.echo(f"wrote {target}; next:")
    click.echo(f"  systemctl --user daemon-reload && systemctl --user enable --now {name}")
    click.echo("  loginctl enable-linger\n  (keeps it running when you log out)")
    click.echo(f"  journalctl --user -u {name} -f")
