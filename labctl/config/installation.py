"""How this labctl was installed, and the command that adds one of its extras."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def install_command(extra: str) -> str:
    """Return the command that installs labctl again with `extra`, from the clone it came from.

    The extra `train` comes along, as in the README: an installation would lose it otherwise.
    """
    extras = ",".join(dict.fromkeys(["train", extra]))
    wanted = shlex.quote(f"{_find_source()}[{extras}]")
    if Path(sys.prefix, "uv-receipt.toml").exists():
        return f"uv tool install --force {wanted}"
    if Path(sys.prefix, "pipx_metadata.json").exists():
        return f"pipx install --force {wanted}"
    return f"{shlex.quote(sys.executable)} -m pip install {wanted}"


def _find_source() -> str:
    """Return the directory that labctl was installed from; its name if it came from an index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").exists():
        return str(clone)
    try:
        origin = json.loads(distribution("labctl").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return "labctl"
    address = urlsplit(str(origin.get("url", "")))
    return unquote(address.path) if address.scheme == "file" else "labctl"
