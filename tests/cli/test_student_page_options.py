"""The options of `labctl course serve` for the page for students."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from labctl.cli import student_page
from labctl.courses.records.folder import make_private
from labctl.web import http_server

URL, SERVICES = "https://labs.example.edu", "https://labs-services.example.edu"


@pytest.fixture
def course(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = home / "ml"
    folder.mkdir()
    (folder / "course.yaml").write_text("course: ml\nserver: {provider: local}\n")
    (folder / "roster.csv").write_text("id,name\nalice,Alice\n")
    make_private(folder)
    monkeypatch.chdir(folder)
    for name in ("cert.pem", "key.pem"):
        (folder / name).write_text("x")
    return folder


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--students-url", URL), "need --students"),
        (("--students", "--tls-cert", "cert.pem"), "belong together"),
        (("--students", "--tls-cert", "cert.pem", "--tls-key", "key.pem"), "--tls-cert needs"),
        (("--students", "--services-url", SERVICES), "needs --students-url"),
        (("--students", "--students-url", URL, "--services-url", f"{URL}/"), "different addresses"),
        (("--students", "--students-url", f"{URL}/course"), "is not the address of a page"),
        (("--students", "--students-url", URL, "--oidc-issuer", URL), "belong together"),
        (
            (
                *("--students", "--students-url", URL, "--oidc-issuer", "http://x"),
                *("--oidc-client-id", "labs", "--oidc-secret", "key.pem"),
            ),
            "must be an https address",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    labctl: Any, course: Path, options: tuple[str, ...], text: str
) -> None:
    result = labctl("course", "serve", *options)
    assert result.code == 2
    assert text in result.err
    assert "labctl course serve --students" in result.err or "--students-url" in result.err


def test_the_unit_gets_the_same_options(labctl: Any, course: Path, home: Path) -> None:
    options = ("--students", "--students-url", URL, "--services-url", SERVICES)
    options += ("--tls-cert", "cert.pem", "--tls-key", "key.pem", "--services-port", "8700")
    assert labctl("course", "serve", "--install", *options).code == 0
    (unit,) = home.rglob("labctl-course-ml.service")
    words = unit.read_text()
    for word in (*options[:5], str(course / "cert.pem"), "8700"):
        assert word in words
    settings = student_page.read_settings(
        students=True,
        students_port=8610,
        students_url=URL,
        services_port=8700,
        services_url=SERVICES,
        tls_cert=None,
        tls_key=None,
        oidc_issuer="",
        oidc_client_id="",
        oidc_secret=None,
    )
    assert settings is not None
    assert student_page.list_options(settings)[-2:] == ["--services-url", SERVICES]


def test_the_keeper_serves_both_pages_until_it_stops(course: Path, home: Path) -> None:
    (course / "course.yaml").write_text(
        "course: ml\nserver: {provider: static, gpu: none, "
        "static: {hosts: [192.0.2.1], user: labctl}}\n"
    )
    words = ["course", "serve", "--dashboard", "--port", "0", "--students", "--students-port", "0"]
    keeper = subprocess.Popen(
        [sys.executable, "-m", "labctl", *words, "--services-port", "0"],
        cwd=course,
        env={**os.environ, "HOME": str(home)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert keeper.stderr is not None
        log = ""
        while "page for students: " not in log:
            line = keeper.stderr.readline()
            assert line, log
            log += line
        assert "dashboard: http://127.0.0.1:" in log
        url = log.rpartition("page for students: ")[2].strip()
        with urllib.request.urlopen(f"{url}/", timeout=60) as answer:
            assert answer.url == f"{url}/sign-in"
            assert "join file" in answer.read().decode()
    finally:
        keeper.terminate()
        _, rest = keeper.communicate(timeout=60)
    assert keeper.returncode == 0, rest


@pytest.mark.parametrize(
    "options", [("--dashboard",), ("--students",), ("--dashboard", "--install")]
)
def test_a_missing_web_extra_is_named_before_the_keeper_starts(
    labctl: Any, course: Path, home: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(http_server, "REQUIRED_MODULES", ("no_such_web_module",))
    result = labctl("course", "serve", *options)
    assert result.code == 1
    assert "not installed: no_such_web_module" in result.err
    assert "started with" not in result.err
    assert not list(home.rglob("labctl-course-*.service"))
