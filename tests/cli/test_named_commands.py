"""What labctl and its docs tell somebody to type is there: commands, options, files, examples."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import labctl.errors
from labctl.cli.exit_codes import format_next
from labctl.cli.groups import COMMANDS, cli
from labctl.errors.subject import LAB
from labctl.wire import verbs

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "labctl").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "templates").rglob("*.md")),
]
GROUPS = ("course", "receive", "rehearse", "secret", "track")
# Where a command ends in a sentence or on a shell's line.
END = re.compile(r"""["`;|>)]|\\n|&&|\s#| {2,}|, (?!-)|\.(\s|"|$)|: | or | then """)
HINT = re.compile(r'hint=f?"(labctl [^"]*)"')
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
COMMAND = re.compile(rf"(?<![\w/.'-])labctl (?:-C \S+ )?(?:{'|'.join(COMMANDS)})\b")
PROGRAM = r"(?:aws|chmod|docker|mv|newgrp|pip|python|rm|ssh|sudo|systemctl|uv) "
# What introduces a command of another program, or one that is filled in.
INTRODUCTION = re.compile(rf"[:;,] (?={PROGRAM})|\b(?:or|then):? (?={PROGRAM}|X\b)")
# What a command is a part of: a list of commands, or a command of a shell or of ssh.
INSIDE = re.compile(r" && $|\$\($|^ssh \S+ $")
# A command that the subject of an error knows.
SUBJECT = re.compile(r"(?:\w+\.)*subject\.(\w+)(?:\(.*\))?")
SCRIPT = re.compile(r"(?<![\w./-])((?:scripts/[a-z-]+(?:\.[a-z]+)?|docs/[a-z-]+\.[a-z]+))\b")


@cache
def command_of(names: tuple[str, ...]) -> click.Command | None:
    found: click.Command | None = cli
    for name in names:
        assert isinstance(found, click.Group)
        found = found.get_command(click.Context(found), name)
    return found


def every_command() -> Iterator[tuple[str, ...]]:
    def below(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        found = command_of(names)
        assert found is not None
        if names and not found.hidden:
            yield names
        if isinstance(found, click.Group):
            for name in found.list_commands(click.Context(found)):
                yield from below((*names, name))

    return below(())


def options(command: click.Command) -> set[str]:
    own = {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
    return own | {"--help", "-h"}


def amiss(words: list[str], *, sure: bool) -> str:
    """What is wrong with a call of labctl, "" for nothing. Where it is not `sure`, a first word
    that is no command is taken for prose."""
    names: list[str] = []
    words = words[2:] if words[:1] == ["-C"] else words
    while words and (not names or (names == [names[0]] and names[0] in GROUPS)):
        word = words[0]
        if word.startswith(("-", "X", ".", "…")) or word.isupper():
            return ""
        if command_of((*names, word)) is None:
            return f"there is no command {' '.join([*names, word])}" if sure or names else ""
        names.append(words.pop(0))
    found = command_of(tuple(names))
    assert found is not None
    call = words[: words.index("--")] if "--" in words else words
    for word in (word.partition("=")[0].rstrip(".,:") for word in call):
        if word.startswith("-") and len(word) > 1 and word not in options(found):
            return f"{' '.join(names)} has no option {word}"
    needed = sum(isinstance(one, click.Argument) and one.required for one in found.params)
    if (
        sure
        and needed
        and "--help" not in call
        and not [word for word in call if not word.startswith("-")]
    ):
        return f"{' '.join(names)} needs more than that"
    return ""


def calls(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        plain = re.sub(r"\{[^{}]*\}", "X", line)
        for found in re.finditer(r"(?<![\w/.'-])labctl ", plain):
            yield END.split(plain[found.end() :], maxsplit=1)[0].split()


def test_every_next_command_is_one_that_labctl_takes() -> None:
    hints = [hint for file in SOURCES for hint in HINT.findall(file.read_text())]
    assert len(hints) > 200
    wrong = {
        hint: amiss(words, sure=True) for hint in hints for words in [next(calls(hint), ["?"])]
    }
    assert {hint: why for hint, why in wrong.items() if why} == {}


def fill_in_part(part: ast.expr) -> str:
    """A part of an f-string: its text, a command of the subject, or X."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    found = SUBJECT.fullmatch(ast.unparse(part).strip("f'{}"))
    if found is None:
        return "X"
    return LAB.ssh("X") if found[1] == "ssh" else str(getattr(LAB, found[1], "X"))


def fill_in(node: ast.expr) -> Iterator[str]:
    """The texts that an expression can be, with X for each value that is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(fill_in_part(part) for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from fill_in(node.body)
        yield from fill_in(node.orelse)


def fill_in_hint(node: ast.expr, values: dict[str, list[ast.expr]]) -> list[str]:
    """The texts of a hint, which the agent also writes in parts.

    `values` has what the module assigns to a name, and what its functions return.
    """
    if isinstance(node, ast.Starred):
        return fill_in_hint(node.value, values)
    if isinstance(node, ast.Lambda):
        return fill_in_hint(node.body, values)
    if isinstance(node, ast.IfExp):
        return fill_in_hint(node.body, values) + fill_in_hint(node.orelse, values)
    if isinstance(node, ast.Tuple):
        parts = [fill_in_hint(part, values) for part in node.elts]
        return ["".join(texts) for texts in itertools.product(*parts)]
    if isinstance(node, ast.BinOp):
        left, right = fill_in_hint(node.left, values), fill_in_hint(node.right, values)
        return ["".join(texts) for texts in itertools.product(left, right)]
    if isinstance(node, ast.Name):
        part = getattr(verbs, node.id, None)
        if isinstance(part, verbs.HintPart):
            return [verbs.make_error("", "", hint=part).hint]
        others = {name: value for name, value in values.items() if name != node.id}
        return [
            text for value in values.get(node.id, []) for text in fill_in_hint(value, others)
        ] or ["X"]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "partial":
        return fill_in_hint(node.args[0], values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in values:
        return fill_in_hint(node.func, values)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "HintPart":
        kinds, *texts = [list(fill_in(argument)) for argument in node.args]
        parts_of_hint = itertools.product(kinds, *texts)
        return [verbs.make_error("", "", hint=verbs.HintPart(*part)).hint for part in parts_of_hint]
    return list(fill_in(node)) or ["X"]


def list_hints(tree: ast.Module) -> Iterator[ast.expr]:
    """Each expression of a module that is a hint, given by its name or by its position."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (word.value for word in node.keywords if word.arg in ("hint", "next", "fix"))
            name = ast.unparse(node.func)
            if name.rpartition(".")[2] in ("Failure", "make_error"):
                yield from node.args[3:4]
            elif name == "HintPart":
                yield node
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
            if name in ("hint", "next", "fix"):
                yield node.value


@cache
def parse_file(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def list_hint_lines(file: Path) -> frozenset[str]:
    """Each line of a hint that the screen shows."""
    tree = parse_file(file)
    values = find_values(tree)
    hints = [text for hint in list_hints(tree) for text in fill_in_hint(hint, values)]
    return frozenset(line for text in hints for line in format_next(text))


@cache
def list_text_lines(file: Path) -> frozenset[str]:
    """Each line of every string in a module, with X for each value that is filled in."""
    nodes = ast.walk(parse_file(file))
    texts = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr))
    return frozenset(line for node in texts for text in fill_in(node) for line in text.splitlines())


def find_values(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What a module assigns to each name, and what each of its functions returns."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
        elif isinstance(node, ast.FunctionDef):
            values[node.name] = [
                inner.value
                for inner in ast.walk(node)
                if isinstance(inner, ast.Return) and inner.value
            ]
    return values


def list_next_lines(file: Path) -> Iterator[str]:
    """Each line of a hint that is a command of labctl."""
    return (line for line in list_hint_lines(file) if line.startswith("labctl "))


def test_hints_of_the_agent_are_found(tmp_path: Path) -> None:
    """Those that have no name, and those in parts."""
    file = tmp_path / "files.py"
    file.write_text(
        "FIX = ('correct data: in ', CONFIG_FILE)\n"
        "raise Failure('missing', what, '', 'labctl pull   # then again')\n"
        "raise Failure('missing', what, '', HintPart('ssh', f'ls {path}'))\n"
        "raise Failure('missing', what, '', (HintPart('status', '--why'), '   # ', *FIX))\n"
        "raise Failure('missing', what, '', UP_COMMAND)\n"
    )
    assert set(list_next_lines(file)) == {
        "labctl pull",
        "labctl ssh -- ls X",
        "labctl status --why",
        "labctl up",
    }


def test_no_command_is_shown_in_the_middle_of_a_sentence() -> None:
    """A line that begins with a command has nothing else, but for a comment after spaces."""
    texts = {
        re.split(" {2,}", line)[0]
        for file in SOURCES
        for line in list_text_lines(file)
        if re.match("labctl [a-z]", line) and command_of((line.split()[1],)) is not None
    }
    assert len(texts) > 200
    assert [text for text in sorted(texts) if re.search(r"[,;] (or|and|then|to)\b", text)] == []


# Prints the words of each call, even of one into a file, and a mark after each line pasted.
PASTE = r"""
exec 3>&1
cd() { :; }
labctl() { printf '%s\037' "$@" >&3; printf '\035' >&3; }
while IFS= read -r line; do eval "$line" || :; printf '\036'; done
"""


def test_every_next_command_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    lines = sorted({line for file in SOURCES for line in list_next_lines(file)})
    assert len(lines) > 120
    words = [shutil.which("bash") or "bash", "--norc", "-c", PASTE]
    pasted = subprocess.run(
        words, input="\n".join(lines) + "\n", cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    outputs = pasted.stdout.split("\036")[:-1]
    assert len(outputs) == len(lines)
    wrong = {}
    for line, output in zip(lines, outputs, strict=True):
        received = [call.split("\037")[:-1] for call in output.split("\035")[:-1]]
        commands = line.replace(" ~/", f" {tmp_path}/").split(" && ")
        calls_of_labctl = [
            shlex.split(one.split(" > ")[0]) for one in commands if one.startswith("labctl ")
        ]
        intended = [words for _, *words in calls_of_labctl]
        prose = {"or", "then", "and"} & {word for words in intended for word in words}
        bad = [why for words in intended if (why := amiss([*words], sure=True))]
        if received != intended or prose or bad or re.search(r"[,;]$", line):
            wrong[line] = bad or received
    assert wrong == {}
    assert pasted.stderr == ""


def has_prose_and_command(line: str) -> bool:
    """Whether a user would have to cut a command out of the line: `fix it, then: labctl run`."""
    starts = [found.start() for found in COMMAND.finditer(line)]
    starts += [found.end() for found in INTRODUCTION.finditer(line)]
    return any(not INSIDE.search(line[:start]) for start in starts if start)


def test_a_command_of_a_hint_is_alone_on_its_line() -> None:
    """Prose stands on a line of its own, before the command or, as its comment, below it."""
    lines = {line for file in SOURCES for line in list_hint_lines(file)}
    assert sum(bool(COMMAND.match(line)) for line in lines) > 200
    assert sorted(line for line in lines if has_prose_and_command(line)) == []


def test_a_command_after_next_is_alone_on_its_line() -> None:
    """Nothing stands before `next:`, and after it either prose or a command."""
    lines = {line for file in SOURCES for line in list_text_lines(file)}
    shown = [line for line in lines if re.search(r"\bnext(, on [^:]+)?: ", line, re.IGNORECASE)]
    assert len(shown) > 15
    wrong = [
        line
        for line in shown
        if not (found := re.match(r" *next: (.*)", line)) or has_prose_and_command(found[1])
    ]
    assert sorted(wrong) == []


@pytest.mark.parametrize(
    ("line", "mixed"),
    [
        ("fix it, then: labctl run", True),
        ("fix it, then: X", True),
        ("(or: aws configure)", True),
        ("labctl up; then labctl run", True),
        ("ask an administrator: sudo mkdir X", True),
        ("fix it, then:", False),
        ("labctl up && labctl pull", False),
        ("mv X Y && labctl join", False),
        ("ssh X labctl keep --list", False),
        ("sudo usermod -aG docker X", False),
        ('eval "$(labctl completion bash)"', False),
    ],
)
def test_prose_before_a_command_is_noticed(line: str, mixed: bool) -> None:
    assert has_prose_and_command(line) is mixed


def test_every_failure_of_what_people_call_first_has_a_next_command() -> None:
    errors = {name for name in vars(labctl.errors) if name.endswith("Error")}
    flows = (
        "courses/join insight/run_report lifecycle/reclaim_drill lifecycle/restore"
        " lifecycle/sample_project lifecycle/up providers/static/machines runs/evaluate"
        " runs/saved_copies services/background_forwards services/model_serving"
        " submissions/posting sync/pull"
    )
    files = [ROOT / "labctl" / f"{name}.py" for name in flows.split()]
    files += [*(ROOT / "labctl/config").glob("*.py"), *(ROOT / "labctl/stores").glob("*.py")]
    silent = [
        f"{file.name}: {ast.unparse(call)}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Raise) and isinstance(call := node.exc, ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id in errors
        if not any(one.arg == "hint" for one in call.keywords)
    ]
    assert silent == []


def test_what_is_amiss_is_noticed() -> None:
    assert "no option" in amiss(["up", "--no-such"], sure=False)
    assert "no command" in amiss(["course", "nosuch"], sure=False)
    assert "needs more" in amiss(["cp"], sure=True)
    assert amiss(["course", "ssh", "alice", "--", "df", "-h"], sure=True) == ""


@pytest.mark.parametrize(("files", "least"), [(SOURCES, 600), (PAGES, 300)])
def test_no_option_is_named_that_a_command_does_not_have(files: list[Path], least: int) -> None:
    named = [(file.name, words) for file in files for words in calls(file.read_text())]
    assert len(named) > least
    wrong = [(name, " ".join(words), amiss(words, sure=False)) for name, words in named]
    assert [one for one in wrong if one[2]] == []


def test_every_file_that_the_pages_lead_to_is_there() -> None:
    lost = [
        (page.name, place)
        for page in PAGES
        for place in LINK.findall(page.read_text())
        if not (page.parent / place).exists()
    ]
    lost += [
        (page.name, place)
        for page in PAGES
        if page.parent in (ROOT, ROOT / "docs")
        for place in SCRIPT.findall(page.read_text())
        if not (ROOT / place).exists()
    ]
    assert lost == []


def test_every_help_has_an_example_and_fits_80_columns() -> None:
    wrong: list[tuple[str, object]] = []
    for names in every_command():
        command, call = command_of(names), " ".join(names)
        shown = {"COLUMNS": "80"}
        said = CliRunner().invoke(cli, [*names, "--help"], prog_name="labctl", env=shown)
        lines = said.output.splitlines()
        wrong += [(call, line) for line in lines if len(line) > 80]
        example = re.compile(rf"(^|&& )labctl (-C \S+ )?{call}\b")
        if not any(example.search(line.strip()) for line in lines):
            wrong.append((call, "no example"))
        assert command is not None
        wrong += [
            (call, one.opts)
            for one in command.params
            if isinstance(one, click.Option) and not one.help and not one.hidden
        ]
    assert wrong == []
