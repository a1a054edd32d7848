"""Templates from a git repository over https: git's own server behind TLS with a test's CA."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from own_certificate import make_certificate

from labctl.courses import git_templates
from labctl.courses.git_templates import is_fetched, read_commit


def find_backend() -> Path | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True)
    backend = Path(done.stdout.strip()) / "git-http-backend"
    return backend if backend.exists() else None


BACKEND = find_backend()
pytestmark = pytest.mark.skipif(BACKEND is None, reason="git has no http-backend here")


@dataclass
class GitSite:
    """A site with repositories below `root`, at https://127.0.0.1:`port`."""

    root: Path
    authority: Path
    port: int = 0
    asks_password: bool = False
    redirect: str = ""
    requests: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"https://127.0.0.1:{self.port}/starter.git"


class _Handler(BaseHTTPRequestHandler):
    """Runs `git http-backend` as a CGI program for each request."""

    site: GitSite

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.site.requests.append(self.path)
        if self.site.redirect:
            self.send_response(302)
            self.send_header("Location", self.site.redirect + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.site.asks_password:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status, headers, body = self._run_backend()
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _run_backend(self) -> tuple[int, list[tuple[str, str]], bytes]:
        parts = urlsplit(self.path)
        size = int(self.headers["Content-Length"] or 0)
        environ = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.site.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers["Git-Protocol"] or "",
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers["Content-Type"] or "",
            "CONTENT_LENGTH": str(size),
            "HTTP_CONTENT_ENCODING": self.headers["Content-Encoding"] or "",
        }
        done = subprocess.run(
            [str(BACKEND)],
            input=self.rfile.read(size),
            capture_output=True,
            env=environ,
            check=False,
        )
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = [tuple(line.split(": ", 1)) for line in head.decode().split("\r\n") if line]
        status = next((int(value[:3]) for name, value in headers if name == "Status"), 200)
        return status, [(name, value) for name, value in headers if name != "Status"], body


@contextmanager
def serve(site: GitSite, folder: Path) -> Iterator[None]:
    context, site.authority = make_certificate(folder)
    handler = type("Handler", (_Handler,), {"site": site})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        # Clients that distrust the certificate end the handshake.
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        site.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def run_git(repository: Path, *words: str) -> str:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.edu")
    done = subprocess.run(
        ["git", *identity, *words], cwd=repository, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(repository: Path, text: str) -> str:
    (repository / "train.py").write_text(text)
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-q", "-m", "starter")
    return run_git(repository, "rev-parse", "HEAD")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GitSite]:
    """A site with one repository, whose authority this process trusts."""
    (tmp_path / "sites" / "starter.git").mkdir(parents=True)
    run_git(tmp_path / "sites" / "starter.git", "init", "-q", "-b", "main")
    made = GitSite(tmp_path / "sites", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with serve(made, tmp_path):
        monkeypatch.setenv("GIT_SSL_CAINFO", str(made.authority))
        yield made


def test_a_commit_is_fetched_over_https_alone_and_once(site: GitSite, tmp_path: Path) -> None:
    repository = site.root / "starter.git"
    commit(repository, "print(0)\n")
    pinned = commit(repository, "print(1)\n")
    commit(repository, "print(2)\n")
    files = read_commit(site.address, pinned, tmp_path / "cache")
    assert [(file.path, file.content) for file in files] == [("train.py", b"print(1)\n")]
    assert is_fetched(site.address, pinned, tmp_path / "cache")
    count = len(site.requests)
    assert read_commit(site.address, pinned, tmp_path / "cache") == files
    assert len(site.requests) == count > 0


def read_problem(site: GitSite, sha1: str, cache: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_commit(site.address, sha1, cache)
    assert not is_fetched(site.address, sha1, cache)
    return str(caught.value)


def test_a_certificate_that_is_not_trusted_is_refused(
    site: GitSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha1 = commit(site.root / "starter.git", "print(1)\n")
    monkeypatch.delenv("GIT_SSL_CAINFO")
    problem = read_problem(site, sha1, tmp_path / "cache")
    assert f"the commit {sha1[:10]} cannot be fetched from {site.address}" in problem
    assert "certificate" in problem
    assert site.requests == []


def test_a_site_that_wants_a_password_asks_nobody(
    site: GitSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha1 = commit(site.root / "starter.git", "print(1)\n")
    site.asks_password = True
    question = tmp_path / "ask"
    question.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\necho x\n")
    question.chmod(0o755)
    monkeypatch.setenv("GIT_ASKPASS", str(question))
    monkeypatch.setenv("SSH_ASKPASS", str(question))
    assert "could not read Username" in read_problem(site, sha1, tmp_path / "cache")
    assert not (tmp_path / "asked").exists()


def test_a_redirect_to_an_address_without_tls_is_refused(site: GitSite, tmp_path: Path) -> None:
    sha1 = commit(site.root / "starter.git", "print(1)\n")
    for target in ("http://127.0.0.1:1", f"file://{site.root}"):
        site.redirect = target
        assert "cannot be fetched" in read_problem(site, sha1, tmp_path / "cache")


def test_a_missing_repository_and_one_that_is_too_large_say_so(
    site: GitSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = site.root / "starter.git"
    (repository / "noise.bin").write_bytes(os.urandom(3 * 1024**2))
    sha1 = commit(repository, "print(1)\n")
    monkeypatch.setattr(git_templates, "MOST_PACK_BYTES", 1024**2)
    assert "cannot be fetched" in read_problem(site, sha1, tmp_path / "cache")
    repository.rename(site.root / "other.git")
    assert "not found" in read_problem(site, sha1, tmp_path / "cache")
