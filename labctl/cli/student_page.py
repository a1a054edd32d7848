"""The options of `labctl course serve` for the page for students."""

from __future__ import annotations

from pathlib import Path

from labctl.errors import UsageError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl.web import http_server

HINT = "labctl course serve --students --students-url https://labs.example.edu"


def read_settings(
    students: bool,
    port: int,
    url: str,
    services_port: int,
    services_url: str,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> http_server.StudentSettings | None:
    """Return the settings of the page for students, None without --students.

    UsageError for options that do not fit together.
    """
    if not students:
        if url or services_url or tls_cert or tls_key:
            raise UsageError("these options need --students", hint=HINT)
        return None
    if (tls_cert is None) != (tls_key is None):
        raise UsageError(
            "--tls-cert and --tls-key belong together",
            hint=f"{HINT} --tls-cert CERT.pem --tls-key KEY.pem",
        )
    if tls_cert is not None and not url.startswith("https://"):
        raise UsageError(
            "--tls-cert needs the https address that students open",
            why="the page accepts no other address",
            hint=f"labctl course serve --students --students-url https://labs.example.edu:{port}",
        )
    _check_addresses(url, services_url)
    return http_server.StudentSettings(
        port=port,
        url=url,
        services_port=services_port,
        services_url=services_url,
        tls_cert=str(tls_cert.absolute()) if tls_cert else "",
        tls_key=str(tls_key.absolute()) if tls_key else "",
    )


def _check_addresses(url: str, services_url: str) -> None:
    if services_url and not url:
        raise UsageError(
            "--services-url needs --students-url",
            hint=f"{HINT} --services-url https://labs-services.example.edu",
        )
    origins = [http_server.parse_origin(one) for one in (url, services_url) if one]
    if len(origins) == 2 and origins[0] == origins[1]:
        raise UsageError(
            "the page and the services need different addresses",
            why="a notebook could act in the name of its student at the page's own address",
            hint=f"{HINT} --services-url https://labs-services.example.edu",
        )


def list_options(page: http_server.StudentSettings) -> list[str]:
    """Return the options that lead to these settings, for the keeper's unit."""
    words = ["--students", "--students-port", str(page.port)]
    words += ["--services-port", str(page.services_port)]
    words += ["--students-url", page.url] if page.url else []
    words += ["--services-url", page.services_url] if page.services_url else []
    words += ["--tls-cert", page.tls_cert, "--tls-key", page.tls_key] if page.tls_cert else []
    return words
