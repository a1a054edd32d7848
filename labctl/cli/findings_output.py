"""The output of findings: what was found, its evidence, and what to try next."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean, format_next
from labctl.cli.wrapping import read_output_width
from labctl.text import decimal_bytes_text

if TYPE_CHECKING:
    from labctl.insight.explain.evidence import Finding

MAX_WIDTH = 110
INDENT = "  "
# width of the labels `seen`, `next` and `source`
LABEL = 8
MARKS = {"problem": ("✗", "red"), "advice": ("!", "yellow"), "good": ("✓", "green")}


def print_finding(finding: Finding) -> None:
    print_headline(finding)
    print_wrapped(finding.why, indent=INDENT, first=INDENT)
    for number, evidence in enumerate(finding.evidence):
        text = f"{evidence.text} [{evidence.source}]"
        print_labeled("seen" if number == 0 else "", text)
    if finding.level != "good":
        print_labeled("next", finding.next, bold=True)
    _print_levers(finding)
    print_labeled("source", f"{finding.source.title}; {finding.source.url}", dim=True)


def _print_levers(finding: Finding) -> None:
    """Print the ways to need less memory, each with its price and what to type."""
    for number, lever in enumerate(finding.levers, start=1):
        size = f": {decimal_bytes_text(lever.total_bytes)}" if lever.total_bytes else ""
        fits = {True: ", fits", False: ", does not fit", None: ""}[lever.fits]
        text = f"{number}. {lever.name}{size}{fits}. Price: {lever.price}."
        print_labeled("levers" if number == 1 else "", text)
        if lever.next and lever.next != finding.next:
            print_labeled("", lever.next)


def print_headline(finding: Finding) -> None:
    mark, color = MARKS[finding.level]
    bold = finding.level != "good"
    print_wrapped(finding.what, first=f"{mark} ", indent=INDENT, color=color, bold=bold)


def print_labeled(label: str, text: str, *, bold: bool = False, dim: bool = False) -> None:
    start = f"{INDENT}{label:<{LABEL}}"
    if not any(line.startswith("labctl ") for line in text.splitlines()):
        print_wrapped(text, first=start, indent=" " * len(start), dim=dim)
        return
    # Commands are not wrapped: people copy them from the terminal as one line.
    for number, line in enumerate(format_next(text)):
        before = " " * len(start) if number else start
        if line.startswith("labctl "):
            click.echo(before + click.style(line, bold=bold and number == 0))
        else:
            margin = 1 if line.startswith("(") else 0
            print_wrapped(line, first=before, indent=" " * (len(start) + margin))


def print_wrapped(
    text: str,
    *,
    first: str,
    indent: str,
    color: str | None = None,
    bold: bool = False,
    dim: bool = False,
) -> None:
    width = read_output_width(MAX_WIDTH)
    wrapped = textwrap.fill(
        clean(text).replace("\n", " "),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    click.echo(click.style(wrapped, fg=color, bold=bold or None, dim=dim or None))
