"""The options of `labctl course serve` for the page for students."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from labctl.cli.number_range import NumberRange
from labctl.errors import UsageError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl.web import http_server

READABLE_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
HINT = "labctl course serve --students --students-url https://labs.example.edu"


_OPTIONS = (
    click.option("--students", is_flag=True, help="Also serve the page for students."),
    click.option(
        "--students-port",
        type=NumberRange(8600, 0, 65535),
        default=8610,
        show_default=True,
        help="Port of the page for students: on all addresses with --tls-cert, else on 127.0.0.1.",
    ),
    click.option("--students-url", default="", help="Address that students open, without a path."),
    click.option(
        "--services-port",
        type=NumberRange(8600, 0, 65535),
        default=8611,
        show_default=True,
        help="Port of the students' Jupyter and TensorBoard.",
    ),
    click.option(
        "--services-url", default="", help="Their address; use another host name than the page's."
    ),
    click.option("--tls-cert", type=READABLE_FILE, help="Certificate for both addresses (PEM)."),
    click.option("--tls-key", type=READABLE_FILE, help="Private key of that certificate (PEM)."),
    click.option("--oidc-issuer", default="", help="OpenID Connect issuer for signing in, too."),
    click.option("--oidc-client-id", default="", help="Client that is registered there."),
    click.option("--oidc-secret", type=READABLE_FILE, help="File with the client's secret (0600)."),
)


def add_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets them as the arguments of `read_settings`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_settings(
    *,
    students: bool,
    students_port: int,
    students_url: str,
    services_port: int,
    services_url: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    oidc_issuer: str,
    oidc_client_id: str,
    oidc_secret: Path | None,
) -> http_server.StudentSettings | None:
    """Return the settings of the page for students, None without --students.

    UsageError for options that do not fit together.
    """
    if not students:
        if any((students_url, services_url, tls_cert, tls_key, oidc_issuer)):
            raise UsageError("these options need --students", hint=HINT)
        return None
    _check_certificate(students_url, students_port, tls_cert, tls_key)
    _check_addresses(students_url, services_url)
    _check_oidc(students_url, oidc_issuer, oidc_client_id, oidc_secret)
    return http_server.StudentSettings(
        port=students_port,
        url=students_url,
        services_port=services_port,
        services_url=services_url,
        tls_cert=_make_absolute(tls_cert),
        tls_key=_make_absolute(tls_key),
        oidc_issuer=oidc_issuer,
        oidc_client_id=oidc_client_id,
        oidc_secret_file=_make_absolute(oidc_secret),
    )


def _make_absolute(file: Path | None) -> str:
    return str(file.absolute()) if file is not None else ""


def _check_certificate(url: str, port: int, tls_cert: Path | None, tls_key: Path | None) -> None:
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


def _check_oidc(url: str, issuer: str, client_id: str, secret_file: Path | None) -> None:
    given = [bool(one) for one in (issuer, client_id, secret_file)]
    if any(given) and not (all(given) and url):
        raise UsageError(
            "--oidc-issuer, --oidc-client-id, --oidc-secret and --students-url belong together",
            hint=f"{HINT} --oidc-issuer https://login.example.edu --oidc-client-id labs "
            "--oidc-secret FILE",
        )
    if issuer and not issuer.startswith("https://"):
        raise UsageError(
            "--oidc-issuer must be an https address",
            why="what it sends would not be protected",
            hint=f"{HINT} --oidc-issuer https://login.example.edu",
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
    if page.oidc_issuer:
        words += ["--oidc-issuer", page.oidc_issuer, "--oidc-client-id", page.oidc_client_id]
        words += ["--oidc-secret", page.oidc_secret_file]
    return words
