"""A lab.yaml, which may be a stranger's, cannot send the user's credentials to another address."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.errors import ConfigError
from labctl.lab import Lab


@pytest.mark.parametrize("provider", ["azure", "gcp"])
def test_only_a_rehearsal_on_this_machine_replaces_a_clouds_address(
    tmp_path: Path, provider: str
) -> None:
    def load(url: str) -> Lab:
        settings = f"{{provider: {provider}, {provider}: {{endpoint_url: '{url}'}}}}"
        text = f"lab: digits\nserver: {settings}\n"
        (tmp_path / "lab.yaml").write_text(text)
        return Lab.load(tmp_path, environ={"HOME": str(tmp_path / "home")})

    for url in ("https://example.com", "http://127.0.0.1:80@example.com", "http://example.com"):
        with pytest.raises(ConfigError) as refused:
            load(url)
        assert "rehearsal on this machine" in "\n".join(map(str, refused.value.problems))
    load("http://127.0.0.1:8080")
