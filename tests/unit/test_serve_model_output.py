"""The output of `labctl serve --model`."""

from __future__ import annotations

import pytest

from labctl.cli import serve_model_output, tables


def test_a_long_row_continues_below_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables.wrapping, "UNLIMITED", 40)
    serve_model_output._print_row("memory", "weights 435 KiB + KV cache 256 KiB + overhead 1.0 GiB")
    assert capsys.readouterr().out == (
        "memory    weights 435 KiB + KV cache 256\n          KiB + overhead 1.0 GiB\n"
    )


def test_a_closed_forward_is_not_shown_as_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    serve_model_output.print_continuation("./my model")
    text = capsys.readouterr().err
    assert "labctl serve --model './my model'" in text
    assert "labctl serve --stop" in text
    assert "http" not in text
