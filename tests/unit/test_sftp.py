"""Single files over SFTP, by the transports that reach a real sshd of this account."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_sshd import ensure_key_pair, find_free_port, find_lacks, run_sshd

from labctl.errors import BusyError, NotFoundError
from labctl.events import SilentReporter
from labctl.model import Endpoint
from labctl.servers.connections import Connections
from labctl.sync.single_file import download_file, upload_file
from labctl.transports import Transport, sftp
from labctl.transports.fabric import FabricTransport

pytestmark = pytest.mark.skipif(bool(find_lacks()), reason=f"needs {find_lacks()}")

# An SFTP server that greets, and then answers no request until the connection ends.
GREETS = """\
import sys
sys.stdin.buffer.read(9)
sys.stdout.buffer.write(b"\\0\\0\\0\\5\\2\\0\\0\\0\\3")
sys.stdout.buffer.flush()
while sys.stdin.buffer.read1():
    pass
"""


@contextmanager
def serve(kind: str, folder: Path, server: str) -> Iterator[Transport]:
    """A transport of this kind to an sshd whose SFTP server is `server`."""
    port = find_free_port()
    (folder / "authorized_keys").write_text(ensure_key_pair(folder / "user") + "\n")
    endpoint = Endpoint(
        host="127.0.0.1",
        port=port,
        user=getpass.getuser(),
        identity=str(folder / "user"),
        host_key=ensure_key_pair(folder / "host"),
    )
    with run_sshd(folder, port, f"Subsystem sftp {server}\n"):
        connections = Connections(folder / "ssh", folder / "none")
        fabric = kind == "fabric"
        transport = FabricTransport(endpoint) if fabric else connections.connect(endpoint)
        try:
            yield transport
        finally:
            transport.close()


@pytest.mark.parametrize("kind", ["openssh", "fabric"])
def test_a_file_of_many_requests_arrives(kind: str, tmp_path: Path) -> None:
    """More than 100 requests are under way at once, so that answers are read between them."""
    (tmp_path / "a").write_bytes(bytes(range(256)) * 32 * 1024)
    with serve(kind, tmp_path, "internal-sftp") as transport:
        upload_file(transport, tmp_path / "a", str(tmp_path / "b"), SilentReporter())
        download_file(transport, str(tmp_path / "b"), tmp_path / "c", SilentReporter())
        assert transport.run("echo in").stdout == "in\n"
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()


def test_a_missing_file_is_named_with_its_server(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with serve("fabric", tmp_path, "internal-sftp") as transport:
        with pytest.raises(NotFoundError, match=r"there is no a/none on digits$") as caught:
            download_file(transport, "a/none", tmp_path / "b", SilentReporter(), "digits")
        assert caught.value.hint.startswith("labctl ssh -- ls a ")
        missing = str(tmp_path / "new")
        with pytest.raises(NotFoundError, match=rf"no directory {missing} on digits$") as caught:
            upload_file(transport, tmp_path / "a", f"{missing}/a", SilentReporter(), "digits")
        assert caught.value.hint == f"labctl ssh -- mkdir -p {missing}"


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("kind", ["openssh", "fabric"])
def test_an_sftp_server_that_hangs_ends_the_copy(
    kind: str, greets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sftp, "SILENCE_S", 1.0)
    (tmp_path / "hangs.py").write_text(GREETS)
    server = f"{sys.executable} {tmp_path}/hangs.py" if greets else "cat >/dev/null"
    with serve(kind, tmp_path, server) as transport:
        with pytest.raises(BusyError, match="SFTP request within 1 s"):
            download_file(transport, "/etc/hostname", tmp_path / "b", SilentReporter())
        assert transport.run("echo in").stdout == "in\n"
    assert not (tmp_path / "b").exists()
