"""This machine's own public address, which alone a new server's firewall admits."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

from labctl.config.document import quote
from labctl.errors import ConnectError
from labctl.http_client import open_session, read_body

CHECK_ADDRESS = "https://checkip.amazonaws.com"
ADDRESS_TIMEOUT_S = 5.0
LONGEST_ADDRESS = 64
_LOOPBACK = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?(/\S*)?")


def parse_network(text: str) -> str:
    """Parse a network such as 192.0.2.0/24; a bare address is a network of one address."""
    try:
        return str(ip_network(text.strip(), strict=True))
    except ValueError as error:
        raise ValueError(f"{quote(text)} is not a network: {error}; write 192.0.2.0/24") from None


def parse_address_source(text: str) -> str:
    """Parse an https:// URL, or an http:// one on this machine.

    On an unencrypted connection an attacker could choose the address that is admitted.
    """
    if re.fullmatch(r"https://[^\s/@]+(/\S*)?", text) or _LOOPBACK.fullmatch(text):
        return text
    raise ValueError(f"{quote(text)} is not an https:// address")


def parse_rehearsal_url(text: str) -> str:
    """Parse the http:// URL of a rehearsal on this machine.

    A lab.yaml may be somebody else's: another address would get the user's credentials.
    """
    if _LOOPBACK.fullmatch(text):
        return text
    raise ValueError(f"{quote(text)} is not the http:// address of a rehearsal on this machine")


def find_caller_network(address_from: str, setting: str) -> str:
    """Find this machine's public address; return it as a network of one address.

    `address_from` is a URL that returns it as text, `setting` the setting that replaces it.
    ConnectError if the address service does not answer.
    """
    try:
        with (
            open_session() as session,
            session.get(address_from, timeout=ADDRESS_TIMEOUT_S, stream=True) as response,
        ):
            response.raise_for_status()
            text = read_body(response, LONGEST_ADDRESS).decode("ascii").strip()
        address = ip_address(text)
    except (OSError, ValueError) as error:
        raise ConnectError(
            "this machine's own address could not be found",
            why=f"{address_from}: {error}",
            hint=f"try again, or set {setting} to the networks that may reach SSH",
        ) from error
    return f"{address}/{address.max_prefixlen}"
