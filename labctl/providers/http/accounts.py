"""Remember which account a key belongs to: a key never moves to another account."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from labctl.config.identity import replace_file
from labctl.providers.http.description import CloudDescription
from labctl.providers.http.keys import find_key, resolve_endpoint

# (hash of key and endpoint) -> account
_ACCOUNTS: dict[str, str] = {}


def remember_account(
    cloud: CloudDescription, cache_dir: Path | None, find_account: Callable[[], str]
) -> str:
    """Return the account of the present key; `find_account` asks the cloud, once for each key.

    If it returns "", because the key may not ask, a hash of the key stands for the account: labctl
    then refuses to act with another key, even one of the same account.
    """
    secret = f"{resolve_endpoint(cloud)}\0{find_key(cloud)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()[:16]
    if digest not in _ACCOUNTS:
        cached = cache_dir / cloud.provider / f"account-{digest}" if cache_dir else None
        account = cached.read_text().strip() if cached and cached.is_file() else ""
        if not account:
            account = find_account() or f"key-{digest}"
            if cached:
                cached.parent.mkdir(parents=True, exist_ok=True)
                replace_file(cached, account.encode(), mode=0o600)
        _ACCOUNTS[digest] = account
    return _ACCOUNTS[digest]
