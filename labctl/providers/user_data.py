"""The user data of a machine's first boot: a hook that arms the TTL, then cloud-init's config.

For every cloud whose images run cloud-init.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from labctl.errors import UsageError
from labctl.lazy import lazy_imports
from labctl.model import Boot

with lazy_imports(__name__):
    import jinja2

BOUNDARY = "labctl-first-boot"
LONGEST_HOSTNAME = 63


@functools.cache
def load_templates(templates: Path) -> jinja2.Environment:
    """Load the templates; cached, so that they are compiled only once for many servers."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )


def build_user_data(
    templates: Path,
    boot: Boot,
    user: str,
    cloud: str,
    limit_bytes: int,
    boothooks: Sequence[str] = (),
) -> str:
    """Build a MIME message for cloud-init, the same for the same Boot.

    UsageError if it is larger than `limit_bytes`, which `cloud` accepts (counted before base64).

    Its only secret is the private half of the temporary host key. `templates` is the directory of
    cloud-init's templates, `boothooks` are those of a cloud's own scripts for every boot.
    """
    environment = load_templates(templates)
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
        *(("text/cloud-boothook", name) for name in boothooks),
        ("text/cloud-config", "cloud-config.yaml.j2"),
    )
    lines = [f'Content-Type: multipart/mixed; boundary="{BOUNDARY}"', "MIME-Version: 1.0", ""]
    for kind, name in parts:
        text = environment.get_template(name).render(values)
        lines += [f"--{BOUNDARY}", f'Content-Type: {kind}; charset="utf-8"', "", text]
    message = "\n".join([*lines, f"--{BOUNDARY}--", ""])
    size = len(message.encode())
    if size > limit_bytes:
        raise UsageError(
            f"the first-boot script has {size} bytes, but {cloud} accepts only {limit_bytes}",
            why="the lab's public key is unusually long",
            hint="use an ed25519 key",
        )
    return message
