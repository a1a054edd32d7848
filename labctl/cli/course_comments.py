"""The command course comment: comments on lines of submissions, and saved comments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from labctl.cli.course import open_course
from labctl.cli.course_options import find_acting_person
from labctl.cli.exit_codes import clean
from labctl.cli.options import json_option
from labctl.cli.tables import print_json
from labctl.cli.unreleased import print_unseen_change
from labctl.cli.wrapping import indent_words, print_message
from labctl.courses import commenting
from labctl.decoding import convert_value
from labctl.errors import UsageError
from labctl.model import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from labctl.courses.records.comments import LineComment, SavedComment
    from labctl.courses.records.folder import CourseFolder


class CommentOptions(Value, frozen=True):
    """The words and options of the command."""

    assignment: str
    name: str
    place: str
    text: str
    use: int
    remove: int
    save: str
    forget: int
    saved: bool


@click.command("comment", short_help="Comment on lines of submissions.")
@click.argument("assignment", default="")
@click.argument("name", metavar="[STUDENT]", default="")
@click.argument("place", metavar="[FILE:LINE]", default="")
@click.argument("text", metavar="[TEXT]", default="")
@click.option("--use", type=int, default=0, metavar="NUMBER", help="Use this saved comment.")
@click.option("--remove", type=int, default=0, metavar="NUMBER", help="Remove this comment.")
@click.option("--save", default="", metavar="TEXT", help="Save a comment for reuse.")
@click.option("--forget", type=int, default=0, metavar="NUMBER", help="Remove a saved comment.")
@click.option("--saved", is_flag=True, help="List the saved comments.")
@json_option
@click.pass_context
def comment_command(ctx: click.Context, /, **options: Any) -> None:
    """Comment on a line of the submission of STUDENT for ASSIGNMENT, or list the comments.

    In a notebook, LINE is the number of a cell. Students read comments with their grade, after
    labctl course grades ASSIGNMENT --release. The course's staff shares the saved comments.

    \b
    labctl course comment hw3 alice train.py:12 "Close the file."
    labctl course comment hw3 alice
    labctl course comment hw3 --remove 17
    labctl course comment --save "Name this constant."
    labctl course comment hw3 alice train.py:30 --use 18
    """
    json_ = options["json_"]
    folder = open_course(ctx, quiet=json_).folder
    chosen = convert_value(options, CommentOptions)
    by = find_acting_person()
    if chosen.save or chosen.forget or chosen.saved:
        _change_saved(folder, chosen, by, json_)
    elif chosen.remove:
        comment = commenting.remove_comment(folder, chosen.assignment, chosen.remove, by=by)
        _print_done(folder, "removed", comment, json_)
    elif chosen.place:
        _print_done(folder, "commented on", _add(folder, chosen, by), json_)
    else:
        _print_comments(folder, chosen, json_)


def _add(folder: CourseFolder, options: CommentOptions, by: str) -> LineComment:
    if bool(options.text) == bool(options.use):
        words = f"{options.assignment} {options.name} {options.place}"
        raise UsageError(
            "a comment needs a text, or --use and the number of a saved comment",
            hint=f'labctl course comment {words} "..."\nlabctl course comment --saved',
        )
    text = options.text
    if options.use:
        text = commenting.find_saved_comment(folder, options.use).text
    place = commenting.parse_place(options.place)
    return commenting.add_comment(folder, options.assignment, options.name, place, text, by=by)


def _change_saved(folder: CourseFolder, options: CommentOptions, by: str, json_: bool) -> None:
    """Save a comment, remove a saved one, or list them."""
    if options.save:
        shown: Sequence[SavedComment] = [commenting.save_comment(folder, options.save, by=by)]
    elif options.forget:
        shown = [commenting.forget_comment(folder, options.forget, by=by)]
    else:
        shown = commenting.list_saved_comments(folder)
    if json_:
        print_json({"saved": shown})
        return
    word = "removed " if options.forget else ""
    for comment in shown:
        text = indent_words(clean(comment.text), "      ").strip()
        click.echo(f"{word}{comment.id:>4}  {text}")
    if not shown:
        click.echo("The course has no saved comments.")
        print_message('next: labctl course comment --save "..."')


def _print_done(folder: CourseFolder, word: str, comment: LineComment, json_: bool) -> None:
    if json_:
        print_json({"comment": comment})
        return
    click.echo(f"{comment.seat}: {word} {clean(comment.place)} ({comment.id})")
    print_unseen_change(folder, comment.assignment, [comment.seat])


def _print_comments(folder: CourseFolder, options: CommentOptions, json_: bool) -> None:
    if not options.assignment:
        raise UsageError("an assignment is missing", hint="labctl course comment hw3 alice")
    comments = commenting.list_comments(folder, options.assignment, options.name)
    if json_:
        print_json({"comments": comments})
        return
    seat = ""
    for comment in comments:
        if comment.seat != seat:
            click.echo(click.style(comment.seat, bold=True))
            seat = comment.seat
        by = f", {comment.by}" if comment.by else ""
        head = f"{comment.id:>4}  {comment.place}, submission {comment.number}{by}"
        click.echo(clean(head))
        click.echo(indent_words(clean(comment.text), "      "))
    if not comments:
        whose = f"{options.name}'s submission for " if options.name else ""
        click.echo(f"{whose}{options.assignment} has no comments.")
