"""The type of an option that takes a whole number in a range."""

from __future__ import annotations

from typing import Any

import click


class NumberRange(click.IntRange):
    """A whole number in a range. Its error shows the option with `example` as the value."""

    def __init__(self, example: int, min: int | None = None, max: int | None = None) -> None:
        super().__init__(min, max)
        self.example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            option = param.opts[0] if param is not None else ""
            self.fail(
                f"{value!r} is not {self._describe()}; for example: {option} {self.example}",
                param,
                ctx,
            )

    def _describe(self) -> str:
        if self.max is not None:
            return f"a whole number from {self.min or 0} to {self.max}"
        return f"a whole number of at least {self.min or 0}"
