"""The first-boot script of a virtual machine, as Vast.ai's `onstart`."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

from labctl.errors import UsageError
from labctl.model import Boot
from labctl.providers.user_data import load_templates

USER = "root"
# The API's description names this limit, and gzip with base64 as the way to keep it.
MOST_LETTERS = 4048


def build_first_boot(templates: Path, boot: Boot) -> str:
    """Build the script. Its only secret is the private half of the temporary host key."""
    values = {
        "host_key": boot.host_key,
        "host_private_key": boot.host_private_key.rstrip("\n"),
        "public_key": boot.public_key,
        "ttl_s": boot.ttl_s,
        "user": USER,
    }
    script = load_templates(templates).get_template("vast/first-boot.sh.j2").render(values)
    packed = base64.b64encode(gzip.compress(_strip_comments(script).encode(), mtime=0)).decode()
    text = f"echo {packed} | base64 -d | gunzip | bash"
    if len(text) > MOST_LETTERS:
        raise UsageError(
            f"the first-boot script has {len(text)} letters, but Vast.ai accepts {MOST_LETTERS}",
            why="the lab's public key is unusually long",
            hint="use an ed25519 key",
        )
    return text


def _strip_comments(script: str) -> str:
    lines = script.splitlines(keepends=True)
    return "".join(line for line in lines if not line.lstrip().startswith("# "))
