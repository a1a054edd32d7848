"""The options of `labctl course serve` for the page for students."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import UsageError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl.web import http_server


def read_settings(
    students: bool, port: int, url: str, tls_cert: Path | None, tls_key: Path | None
) -> http_server.StudentSettings | None:
    """Return the settings of the page for students, None without --students."""
    hint = "labctl course serve --students --students-url https://labs.example.edu"
    if not students:
        if url or tls_cert or tls_key:
            raise UsageError("these options need --students", hint=hint)
        return None
    if (tls_cert is None) != (tls_key is None):
        raise UsageError(
            "--tls-cert and --tls-key belong together",
            hint=f"{hint} --tls-cert CERT.pem --tls-key KEY.pem",
        )
    if tls_cert is not None and not url.startswith("https://"):
        raise UsageError(
            "--tls-cert needs the https address that students open",
            why="the page accepts no other address",
            hint=f"labctl course serve --students --students-url https://labs.example.edu:{port}",
        )
    if url:
        http_server.parse_origin(url)
    return http_server.StudentSettings(
        port=port,
        url=url,
        tls_cert=str(tls_cert.absolute()) if tls_cert else "",
        tls_key=str(tls_key.absolute()) if tls_key else "",
    )


def list_options(page: http_server.StudentSettings) -> list[str]:
    """Return the options that lead to these settings, for the keeper's unit."""
    words = ["--students", "--students-port", str(page.port)]
    words += ["--students-url", page.url] if page.url else []
    words += ["--tls-cert", page.tls_cert, "--tls-key", page.tls_key] if page.tls_cert else []
    return words
