"""A lab's directory on a server, runs in it, and stores: moto's S3 with an instance profile, a
gateway without ssh."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from labctl.agent.mirror import ssh_gateway, ssh_store, store
from labctl.wire.mirrors import StoreConfigRecord

LAB, LAB_ID = "digits", "0f1e2d3c4b5a"
ABOUT = {"lab": LAB, "lab_id": LAB_ID}
PREFIX = f"{LAB}-{LAB_ID}"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Metadata(BaseHTTPRequestHandler):
    """A machine's metadata service: tokens, and the credentials of its role."""

    def do_PUT(self) -> None:
        self._say("token")

    def do_GET(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token"] == "token"
        keys = {"Code": "Success", "AccessKeyId": "AKIAROLE", "SecretAccessKey": "of the role"}
        keys |= {"Token": "session", "Expiration": "2100-01-01T00:00:00Z"}
        role = self.path.rstrip("/").endswith("security-credentials")
        self._say("labctl-server" if role else json.dumps(keys))

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def metadata_service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Lab:
    """`~/labctl/digits` of a server whose home is `home`."""

    def __init__(self, home: Path) -> None:
        self.root = home / "labctl" / LAB
        self.moved = False
        (self.root / ".labctl").mkdir(parents=True)
        (self.root / ".labctl" / "id").write_text(LAB_ID)

    def config(self, url: str) -> None:
        (self.root / ".labctl" / store.CONFIG).write_text(json.dumps({"url": url}))

    def run(self, name: str, state: str = "exited") -> Run:
        return Run(self.root / "runs" / name, state)

    def again(self) -> None:
        """Another server of the same lab: nothing is there but what it was told of its store."""
        self.moved = True
        (self.root / "runs").rename(self.root / f"elsewhere-{len(list(self.root.iterdir()))}")


class Run:
    def __init__(self, directory: Path, state: str) -> None:
        self.directory = directory
        self.name = directory.name
        spec = {"id": self.name, **ABOUT, "outputs": ["checkpoints", "logs"], "command": ["x"]}
        spec |= {"image": "debian:12", "env": {}}
        record = {"id": self.name, "state": state, "created_at": 5.0, "told": "done"}
        self.write(".labctl/spec.json", json.dumps(spec).encode())
        self.write(".labctl/attempt-1", json.dumps({"container": "c-1"}).encode())
        if state != "running":
            self.write(".labctl/record.json", json.dumps(record).encode())
        self.write("code/train.py", b"print(1)\n")
        self.write("code/sub/go.sh", b"#!/bin/sh\n")
        (directory / "code/sub/go.sh").chmod(0o755)
        self.write(".labctl/code.json", b'["sub/go.sh", "train.py"]')
        self.write("logs/run.log", b"begun\n")

    def write(self, name: str, content: bytes) -> Path:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        old = time.time() - 60  # what was written just now may still be growing
        os.utime(path, (old, old))
        return path

    def checkpoint(self, step: int, size: int = 3000) -> str:
        """A whole one, with a manifest; its directory below the run."""
        top = f"checkpoints/step-{step:08d}"
        content = f"{step} ".encode() * size
        self.write(f"{top}/model", content)
        listed = {"model": {"size": len(content), "sha256": sha256(content)}}
        self.write(f"{top}/manifest.json", json.dumps({"step": step, "files": listed}).encode())
        return top

    def tree(self) -> dict[str, bytes]:
        """Everything but what labctl keeps of it."""
        return tree(self.directory)


def tree(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    names = {str(path.relative_to(directory)): path.read_bytes() for path in files}
    return {name: content for name, content in names.items() if not name.startswith(".labctl")}


class DirectStore(ssh_store.MirrorSshStore):
    """The gateway as sshd would start it, without an ssh in between."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            StoreConfigRecord(host="h", port=22, user="u"),
            directory.parent / "store-key",
            Path("hosts"),
            lambda: None,
        )
        directory.parent.mkdir(parents=True, exist_ok=True)
        script = directory.parent / "forced-command"
        serve = shlex.join([sys.executable, "-I", "-S", ssh_gateway.__file__, "serve"])
        script.write_text(
            "#!/bin/sh\n"
            '[ "$1" != -- ] || shift; shift\n'
            f'SSH_ORIGINAL_COMMAND="$*" exec {serve} {shlex.quote(str(directory))}\n'
        )
        script.chmod(0o755)
        self.words = [str(script)]
