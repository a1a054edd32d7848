"""Small archives as `docker save` writes them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

REFERENCE = "labctl/built:0123456789abcdef"


def make_archive(
    *references: str, layers: tuple[bytes, ...] = (b"layer",), lost: bool = False
) -> bytes:
    """An archive with these layers and names; with `lost`, the first is named but not there."""
    config = json.dumps({"layers": len(layers)}).encode()
    files = {f"{hashlib.sha256(config).hexdigest()}.json": config}
    files |= {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    entry = {"Config": next(iter(files)), "Layers": [*files][1:]}
    entry["RepoTags"] = [*references] or [REFERENCE]
    if lost:
        del files["0/layer.tar"]
    files["manifest.json"] = json.dumps([entry]).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def make_manifest_archive(manifest: bytes) -> bytes:
    """An archive with nothing but this manifest."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    return buffer.getvalue()


def cut(data: bytes, size: int = 4096) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
