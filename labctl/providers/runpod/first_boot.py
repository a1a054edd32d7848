"""The first-boot script of a pod, and the command that runs it at each start of the container."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import UsageError
from labctl.model import Boot
from labctl.providers.runpod.api import WORKSPACE
from labctl.providers.runpod.tags import FIRST_BOOT, USER
from labctl.providers.user_data import load_templates

# Linux accepts 128 KiB for one environment variable; base64 takes a third more.
MOST_BYTES = 64 * 1024
SCRIPT = "/run/labctl-first-boot"
# RunPod hands this to the image's entrypoint, in place of the image's own command.
COMMAND = (
    f"bash -c 'mkdir -p /run; printenv {FIRST_BOOT} | base64 -d > {SCRIPT} && exec bash {SCRIPT}'"
)


def build_first_boot(templates: Path, boot: Boot) -> str:
    """Build the script. Its only secret is the private half of the temporary host key."""
    values = {
        "host_private_key": boot.host_private_key.rstrip("\n"),
        "public_key": boot.public_key,
        "ttl_s": boot.ttl_s,
        "user": USER,
        "workspace": WORKSPACE,
    }
    script = load_templates(templates).get_template("runpod/first-boot.sh.j2").render(values)
    if len(script.encode()) > MOST_BYTES:
        raise UsageError(
            f"the first-boot script has {len(script)} bytes, more than the {MOST_BYTES} allowed",
            why="the lab's public key is unusually long",
            hint="use an ed25519 key",
        )
    return script
