"""What people write for one value: round trips, limits, and words that help."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.config import scalars
from labctl.config.document import escape, quote
from labctl.model import NAME_PATTERN, GpuNeed

PARSERS: list[Callable[[str], object]] = [
    scalars.parse_name,
    scalars.parse_duration,
    scalars.parse_size,
    scalars.parse_price,
    scalars.parse_cpus,
    scalars.parse_port,
    scalars.parse_gpu,
    scalars.parse_env_name,
    scalars.parse_secret_name,
    scalars.parse_line,
]


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text())
def test_any_text_is_read_or_refused_in_printable_words(
    parse: Callable[[str], object], text: str
) -> None:
    said = ""
    try:
        parse(text)
    except ValueError as error:
        said = str(error)
    assert said == "" or said.isprintable()
    assert len(said) < 300


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("8h", 28_800),
        ("30m", 1_800),
        ("90s", 90),
        ("1h30m", 5_400),
        ("2d", 172_800),
        ("1d2h3m4s", 93_784),
    ],
)
def test_durations(text: str, seconds: int) -> None:
    assert scalars.parse_duration(text) == seconds


@given(st.integers(1, scalars.MAX_SECONDS))
def test_durations_come_back(seconds: int) -> None:
    assert scalars.parse_duration(scalars.format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "8", "1:30", "h", "1.5h", "-1h", "0s", "0h0m", "30m1h", "8 h", "367d", "٨h", "1h\n"],
)
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|out of range"):
        scalars.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("512MB", 512 * 10**6),
        ("2GiB", 2 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("0.1GiB", 107_374_182),
        ("8 GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("1048576", 2**20),
        ("100B", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert scalars.parse_size(text) == size


@given(st.integers(1, scalars.MAX_BYTES))
def test_sizes_come_back(size: int) -> None:
    assert scalars.parse_size(scalars.format_size(size)) == size


@pytest.mark.parametrize(
    "text", ["", "8G", "8 Gb/s", "GB", "-1GB", "0", "0GB", "1e3", "1.5", "2PB"]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit|range|bytes"):
        scalars.parse_size(text)


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("auto", GpuNeed()),
        ("none", GpuNeed(kind="none")),
        ("any", GpuNeed(kind="any", count=1)),
        ("any:2", GpuNeed(kind="any", count=2)),
        ("T4", GpuNeed(kind="T4", count=1)),
        ("t4", GpuNeed(kind="T4", count=1)),
        ("A100:2", GpuNeed(kind="A100", count=2)),
        ("A100-80GB:8", GpuNeed(kind="A100-80GB", count=8)),
        (">=24GB", GpuNeed(kind="any", count=1, min_memory_bytes=24 * 10**9)),
        (">= 24GB:2", GpuNeed(kind="any", count=2, min_memory_bytes=24 * 10**9)),
    ],
)
def test_gpus(text: str, need: GpuNeed) -> None:
    assert scalars.parse_gpu(text) == need


@given(
    kind=st.sampled_from(["any", "T4", "A100", "H100-80GB", "L40S", ">=24GB", ">=1MiB"]),
    count=st.integers(1, scalars.MAX_GPUS),
)
def test_gpus_come_back(kind: str, count: int) -> None:
    need = scalars.parse_gpu(f"{kind}:{count}")
    assert need.count == count
    assert need.is_required
    assert scalars.parse_gpu(scalars.gpu_text(need)) == need


@pytest.mark.parametrize(
    "text",
    ["", "T4:0", "T4:", "T4:65", "T4:-1", "auto:2", "none:1", ">24GB", ">=", "-T4", "T 4", "4"],
)
def test_what_is_not_a_gpu(text: str) -> None:
    with pytest.raises(ValueError):
        scalars.parse_gpu(text)


def test_a_number_alone_is_taken_for_a_number_of_gpus() -> None:
    """As in `--gpus 2` of other tools."""
    with pytest.raises(ValueError, match="for 2 of any model, write any:2"):
        scalars.parse_gpu("2")


@pytest.mark.parametrize(
    "text", ["$1.50", "0", "0.00", "-1", "1,50", "nan", "inf", "1e9", "free", ""]
)
def test_what_is_not_a_price(text: str) -> None:
    with pytest.raises(ValueError, match="plain number of dollars"):
        scalars.parse_price(text)


def test_prices_and_cpus() -> None:
    assert scalars.parse_price("1.50") == 1.5
    assert scalars.parse_cpus("1.5") == 1.5
    assert scalars.number_text(1.5) == "1.5"
    assert scalars.number_text(10.0) == "10"


@pytest.mark.parametrize("text", ["0", "65536", "-1", "80a", "", "8 0", "٨"])
def test_what_is_not_a_port(text: str) -> None:
    with pytest.raises(ValueError, match="1 to 65535"):
        scalars.parse_port(text)


@given(st.integers(1, 65535))
def test_ports(port: int) -> None:
    assert scalars.parse_port(str(port)) == port


@given(st.text())
def test_a_cleaned_name_is_always_a_name(text: str) -> None:
    assert NAME_PATTERN.fullmatch(scalars.clean_name(text))


@given(st.from_regex(NAME_PATTERN, fullmatch=True))
def test_names_pass(name: str) -> None:
    assert scalars.parse_name(name.rstrip("\n")) == name.rstrip("\n")


def test_a_bad_name_says_what_is_allowed_and_suggests_one() -> None:
    with pytest.raises(ValueError, match=r"lowercase letters.*try my-project"):
        scalars.parse_name("My Project!")
    with pytest.raises(ValueError):
        scalars.parse_name("digits\n")
    with pytest.raises(ValueError):
        scalars.parse_name("a" * 40)


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "aws_profile", "Aws_x"])
def test_aws_names_are_never_secrets(name: str) -> None:
    with pytest.raises(ValueError, match="never leave"):
        scalars.parse_secret_name(name)


@pytest.mark.parametrize("name", ["1A", "A-B", "", "A B", "A=B", "LABCTL_RUN_ID", "labctl_x", "Ä"])
def test_what_is_not_a_variable(name: str) -> None:
    with pytest.raises(ValueError):
        scalars.parse_env_name(name)


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("python train.py --epochs 5", ("python", "train.py", "--epochs", "5")),
        ("echo 'two words'", ("echo", "two words")),
        ("a --lr=0.1", ("a", "--lr=0.1")),
        ("a && b", ("sh", "-c", "a && b")),
        ("SEED=1 python a.py", ("sh", "-c", "SEED=1 python a.py")),
        ("echo $HOME", ("sh", "-c", "echo $HOME")),
        ("a\nb", ("sh", "-c", "a\nb")),
        ("ls *.py", ("sh", "-c", "ls *.py")),
    ],
)
def test_command_lines(line: str, argv: tuple[str, ...]) -> None:
    assert scalars.parse_line(line) == argv


@pytest.mark.parametrize("line", ["", "   ", "echo 'open"])
def test_what_is_not_a_command_line(line: str) -> None:
    with pytest.raises(ValueError, match=r"empty|not closed"):
        scalars.parse_line(line)


@given(st.lists(st.text("abcXYZ019 ._/=:,+-@%'\"", min_size=1), min_size=1))
def test_a_quoted_line_is_the_argv_that_it_was(words: list[str]) -> None:
    line = shlex.join(words)
    argv = scalars.parse_line(line)
    assert argv in (tuple(words), ("sh", "-c", line))


@given(st.text())
def test_whatever_is_shown_is_printable(text: str) -> None:
    assert quote(text).isprintable()
    assert escape(text).isprintable()


def test_terminal_escapes_are_shown_as_text() -> None:
    assert quote("\x1b[2J") == r"'\x1b[2J'"
    assert escape("a\x1b[2Jb\u202e") == r"a\x1b[2Jb\u202e"
