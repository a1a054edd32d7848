"""The command images."""

from __future__ import annotations

import click

from labctl.cli.options import json_option, open_lab
from labctl.cli.tables import age_text, print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.errors import NotFoundError
from labctl.lazy import lazy_imports
from labctl.text import bytes_text

with lazy_imports(__name__):
    from labctl.runs import image_sources


@click.command("images")
@click.option(
    "--remove", metavar="NAME", help="Delete this image (or `all`) from this machine's archives."
)
@json_option
@click.pass_context
def images_command(ctx: click.Context, remove: str | None, json_: bool) -> None:
    """List the built images that this machine keeps, to load them on new servers.

    \b
    labctl images
    labctl images --remove all
    """
    lab = open_lab(ctx, quiet=json_, record_only=True, needs_file=False)
    cache = image_sources.open_cache(lab.context)
    if remove:
        chosen = [i for i in cache.list_images() if remove in ("all", i.reference)]
        if not chosen and remove != "all":
            raise NotFoundError(f"this machine keeps no image {remove}", hint="labctl images")
        for image in chosen:
            cache.remove(image)
    images, failures = cache.list_images(), cache.take_failures()
    for text in failures:
        print_message(text)
    if json_:
        print_json({"images": images, "failures": failures, "limit_bytes": cache.limit_bytes})
        return
    rows = [
        (i.reference, i.architecture, bytes_text(i.size_bytes), age_text(cache.get_last_use(i)))
        for i in images
    ]
    if not rows:
        print_message("This machine keeps no built images.")
        return
    print_table(rows, ("IMAGE", "ARCHITECTURE", "SIZE", "LAST USED"))
    used = bytes_text(sum(image.size_bytes for image in images))
    print_message(f"{used} of {bytes_text(cache.limit_bytes)} in {cache.directory}")
