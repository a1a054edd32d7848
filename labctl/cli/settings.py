"""The commands config, inventory, secret and trust."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import click

from labctl.cli.course import open_course
from labctl.cli.exit_codes import clean
from labctl.cli.options import PROVIDER, json_option, open_lab, yes_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.commands.ansible import Host, build_inventory
from labctl.config import (
    Paths,
    is_trusted,
    list_secret_names,
    list_settings,
    list_trust_questions,
    remove_secret,
    set_secret,
)
from labctl.config.course import COURSE_FILE
from labctl.config.reader import LAB_FILE
from labctl.servers import gang


@click.command("config")
@json_option
@click.pass_context
def config_command(ctx: click.Context, json_: bool) -> None:
    """Show every setting, its value and where it comes from.

    \b
    labctl config
    """
    rows = list_settings(open_lab(ctx, quiet=json_).config)
    if json_:
        print_json({"settings": [{"key": k, "value": v, "origin": o} for k, v, o in rows]})
    else:
        print_table([(k, o, v) for k, v, o in rows], ("KEY", "SOURCE", "VALUE"))


@click.command("inventory")
@click.pass_context
def inventory_command(ctx: click.Context) -> None:
    """Print the lab's servers as an Ansible inventory, for your own playbooks.

    \b
    labctl inventory > hosts.yml && ansible-playbook -i hosts.yml site.yml
    """
    lab = open_lab(ctx)
    hosts = [
        Host(
            alias=server.alias,
            ssh_config=lab.context.connections.write(server),
            user=server.endpoint.user,
        )
        for server in gang.list_servers(lab.context)
    ]
    click.echo(build_inventory(hosts), nl=False)


@click.group("secret")
def secret_command() -> None:
    """Store values for the secrets that lab.yaml names, and a course's token for Canvas.

    In a course's folder, the values are those of the course. The files have mode 0600. Values are
    never in argv or logs.

    \b
    labctl secret set WANDB_API_KEY
    """


class SecretOwner(NamedTuple):
    """The lab or course whose secrets a command is about.

    `listed` are the secrets that a lab's runs get, None for a course.
    """

    paths: Paths
    id: str
    name: str
    listed: tuple[str, ...] | None = None


def _find_owner(ctx: click.Context, *, quiet: bool = False) -> SecretOwner:
    directory = Path(ctx.find_root().obj or ".")
    if (directory / COURSE_FILE).is_file() and not (directory / LAB_FILE).is_file():
        course = open_course(ctx, quiet=quiet)
        return SecretOwner(course.paths, course.folder.id, course.config.name)
    lab = open_lab(ctx, quiet=quiet)
    return SecretOwner(lab.context.paths, lab.id, lab.config.name, listed=lab.config.secrets)


@secret_command.command("set")
@click.argument("name")
@click.pass_context
def _set(ctx: click.Context, name: str) -> None:
    """Store a value for NAME, from a prompt or standard input.

    \b
    labctl secret set WANDB_API_KEY
    pass wandb | labctl secret set WANDB_API_KEY
    """
    owner = _find_owner(ctx)
    if sys.stdin.isatty():
        value = click.prompt(f"value of {name}", hide_input=True, err=True)
    else:
        value = sys.stdin.read().rstrip("\n")
    set_secret(owner.paths, owner.id, name, value)
    print_message(f"stored {name} for {owner.name}")
    if owner.listed is not None and name not in owner.listed:
        names = ", ".join([*owner.listed, name])
        print_message(f"runs do not get it until lab.yaml lists it: secrets: [{names}]")


@secret_command.command("remove")
@click.argument("name")
@click.pass_context
def _remove(ctx: click.Context, name: str) -> None:
    """Remove the value of NAME from this machine.

    \b
    labctl secret remove WANDB_API_KEY
    """
    owner = _find_owner(ctx)
    remove_secret(owner.paths, owner.id, name)
    print_message(f"removed {name} of {owner.name}")


@secret_command.command("list")
@json_option
@click.pass_context
def _list(ctx: click.Context, json_: bool) -> None:
    """List the names that have values; the values are never shown.

    \b
    labctl secret list
    """
    owner = _find_owner(ctx, quiet=json_)
    names = list_secret_names(owner.paths, owner.id)
    if json_:
        print_json({"secrets": names})
    for name in [] if json_ else names:
        click.echo(name)


@click.command("trust")
@PROVIDER
@yes_option
@click.pass_context
def trust_command(ctx: click.Context, provider: str | None, yes: bool) -> None:
    """Show what this lab.yaml may do, and ask you to approve it.

    A changed file needs a new approval. Without a terminal, only --yes approves.

    \b
    labctl trust
    """
    lab = open_lab(ctx, yes=yes, overrides={"provider": provider} if provider else None)
    questions = list_trust_questions(lab.config)
    if not questions:
        click.echo("There is nothing to approve: it uses none of your secrets, files or money.")
        return
    if yes or is_trusted(lab.context.paths, lab.config):
        for question in questions:
            print_message(f"- {clean(question)}", err=False)
    lab.require_approval()
    click.echo("approved")
