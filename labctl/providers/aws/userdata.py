"""The user data of a machine's first boot: a hook that arms the TTL, then cloud-init's config."""

from __future__ import annotations

import functools
from pathlib import Path

from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.model import Boot

with lazy_imports(__name__):
    import jinja2

# AWS's limit on user data, counted before base64.
LIMIT_BYTES = 16 * 1024
BOUNDARY = "labctl-first-boot"
LONGEST_HOSTNAME = 63


@functools.cache
def _load_environment(templates: Path) -> jinja2.Environment:
    """Load the templates; cached, so that they are compiled only once for many servers."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def build_user_data(templates: Path, boot: Boot, user: str) -> str:
    """Build a MIME message for cloud-init, the same for the same Boot. UsageError above 16 KB.

    Its only secret is the private half of the temporary host key. `templates` is the directory of
    cloud-init's templates.
    """
    environment = _load_environment(templates)
    values = {
        "hostname": f"labctl-{boot.lab}"[:LONGEST_HOSTNAME].rstrip("-"),
        "host_key": boot.host_key,
        "host_private_key": boot.host_private_key.rstrip("\n") + "\n",
        "public_key": boot.public_key,
        "ttl_s": boot.ttl_s,
        "user": user,
    }
    parts = (
        ("text/cloud-boothook", "boothook.sh.j2"),
        ("text/cloud-config", "cloud-config.yaml.j2"),
    )
    lines = [f'Content-Type: multipart/mixed; boundary="{BOUNDARY}"', "MIME-Version: 1.0", ""]
    for kind, name in parts:
        text = environment.get_template(name).render(values)
        lines += [f"--{BOUNDARY}", f'Content-Type: {kind}; charset="utf-8"', "", text]
    message = "\n".join([*lines, f"--{BOUNDARY}--", ""])
    size = len(message.encode())
    if size > LIMIT_BYTES:
        raise UsageError(
            f"the first-boot script has {size} bytes, but AWS accepts only {LIMIT_BYTES}",
            why="the lab's public key is unusually long",
            hint="use an ed25519 key",
        )
    return message
