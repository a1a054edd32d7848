"""The command docs: the pages of the documentation that belong to this version."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from io import StringIO
from typing import ClassVar

import click

from labctl.cli.completion_values import complete_pages
from labctl.cli.tables import print_table
from labctl.cli.wrapping import read_output_width
from labctl.config.documentation import find_page, find_title, list_pages
from labctl.config.reader import find_nearest
from labctl.errors import NotFoundError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from rich import console as rich_console
    from rich import markdown as rich_markdown
    from rich import text as rich_text

# columns of a page on a wider terminal
MOST_COLUMNS = 100
# notes for the programs that check a page and build the site
NOTE = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


@click.command("docs")
@click.argument("page", default="", metavar="[PAGE]", shell_complete=complete_pages)
def docs_command(page: str) -> None:
    """Show a page of the documentation; without PAGE, list all of them.

    The pages are those of this version. A terminal shows them in your pager; leave it with q.

    \b
    labctl docs
    labctl docs student
    labctl docs lab.yaml
    """
    if not page:
        rows = [(name, find_title(name)) for name in list_pages()]
        print_table(rows, ("PAGE", "TITLE"), cut=False)
        return
    file = find_page(page)
    if file is None:
        near = find_nearest(page, list_pages())
        raise NotFoundError(
            f"the documentation has no page {page!r}" + (f"; did you mean {near}?" if near else ""),
            hint=f"labctl docs {near}".strip(),
        )
    text = NOTE.sub("", file.read_text(encoding="utf-8"))
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
    else:
        click.echo_via_pager(_render(text) if file.suffix == ".md" else text)


def _render(text: str) -> str:
    """Return Markdown as text for a terminal. Not every pager passes colors on.

    Lines of code are whole, so that they can be copied: the pager or the terminal folds them.
    """
    written = StringIO()
    width = min(read_output_width(), MOST_COLUMNS)
    console = rich_console.Console(file=written, color_system=None, width=width)
    console.print(_parse(text), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def _parse(text: str) -> rich_markdown.Markdown:
    class WholeCodeBlock(rich_markdown.CodeBlock):
        """A block of code whose lines are whole, except in a list, where rich would cut them."""

        def __rich_console__(
            self, console: rich_console.Console, options: rich_console.ConsoleOptions
        ) -> Iterator[rich_text.Text]:
            lines = str(self.text).rstrip().split("\n")
            code = "\n".join(f" {line}".rstrip() for line in lines)
            is_in_list = options.max_width < console.width
            block = rich_text.Text(f"\n{code}\n", no_wrap=not is_in_list)
            block.overflow = "fold" if is_in_list else "ignore"
            yield block

    class PageMarkdown(rich_markdown.Markdown):
        elements: ClassVar[dict[str, type[rich_markdown.MarkdownElement]]] = {
            **rich_markdown.Markdown.elements,
            "fence": WholeCodeBlock,
        }

    return PageMarkdown(text, hyperlinks=False)
