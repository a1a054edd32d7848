"""Parsers of single values as users write them: `1h30m`, `8GB`, `A100:2`, `1.50`.

Every parser takes the string as typed and returns the value; ValueError says what is allowed.
Every `format_*` and `*_text` is the inverse of its parser.
"""

from __future__ import annotations

import re
import shlex

from labctl.config.document import quote
from labctl.model import NAME_PATTERN, GpuNeed

_DURATION = r"(?:([0-9]{1,4})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,9})s)?"
_DURATION_UNITS_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SIZE = r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?([A-Za-z]*)"
_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE_FACTORS = {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()} | {"": 1}
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,6})?"
_GPU_MODEL = r"[A-Z][A-Z0-9-]{0,30}"
_COUNT = r"[0-9]{1,2}"
MOST_SERVERS = 16
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
# Syntax that needs a shell. Quotes do not: shlex reads them like a shell.
_SHELL_SYNTAX = r"[|&;<>()$`*?\[\]{}~#!\\\n]|^\s*[A-Za-z_][A-Za-z0-9_]*="

MAX_SECONDS = 366 * 86_400
MAX_BYTES = 2**50
MAX_GPUS = 64


def clean_name(text: str) -> str:
    """Return the nearest valid name; "lab" if nothing of `text` remains."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return words[:39].rstrip("-") or "lab"


def parse_name(text: str) -> str:
    """Parse the name of a lab, a data set, a service or a provider."""
    if NAME_PATTERN.fullmatch(text):
        return text
    raise ValueError(
        f"{quote(text)} is not a valid name: use lowercase letters, digits and `-`, at most 39, "
        f"starting with a letter or digit; try {clean_name(text)}"
    )


def parse_duration(text: str) -> int:
    """Parse `8h`, `30m`, `90s`, `1h30m` or `2d` into seconds."""
    match = re.fullmatch(_DURATION, text)
    if not text or match is None:
        raise ValueError(f"{quote(text)} is not a duration: write 30m, 8h, 1h30m or 2d")
    parts = zip(match.groups(), _DURATION_UNITS_S.values(), strict=True)
    seconds = sum(int(count) * unit for count, unit in parts if count)
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{quote(text)} is out of range: more than 0s, at most 366d")
    return seconds


def format_duration(seconds: int) -> str:
    """Write seconds as `parse_duration` reads them: 1h30m."""
    parts = []
    for unit, length in _DURATION_UNITS_S.items():
        count, seconds = divmod(seconds, length)
        parts.append(f"{count}{unit}" if count else "")
    return "".join(parts) or "0s"


def parse_size(text: str) -> int:
    """Parse `8GB` (powers of ten), `2GiB` (powers of two) or a plain number into bytes."""
    match = re.fullmatch(_SIZE, text)
    if match is None:
        raise ValueError(f"{quote(text)} is not a size: write 8GB, 512MB, 2GiB or plain bytes")
    number, unit = match.groups()
    factor = _SIZE_FACTORS.get(unit.lower())
    if factor is None:
        units = ", ".join(_SIZE_UNITS)
        raise ValueError(f"{quote(text)}: the unit {quote(unit)} is not one of {units}")
    if not unit and "." in number:
        raise ValueError(f"{quote(text)} is not a whole number of bytes; give a unit, such as GB")
    whole, _, fraction = number.partition(".")
    size: int = int(whole) * factor + int(fraction or 0) * factor // 10 ** len(fraction)
    if not 0 < size <= MAX_BYTES:
        raise ValueError(f"{quote(text)} is out of range: more than 0, at most 1024TiB")
    return size


def format_size(size: int) -> str:
    """Write bytes as `parse_size` reads them: 8GB."""
    count, unit = _split_size(size)
    return f"{count}{unit}" if unit else str(size)


def limit_text(size: int) -> str:
    """Write a limit that a user has set, for people: 500 MB. Nothing of it is rounded."""
    count, unit = _split_size(size)
    return f"{count} {unit}" if unit else f"{count:,} bytes"


def _split_size(size: int) -> tuple[int, str]:
    """Return a size as a whole number of the largest unit; "" for plain bytes."""
    for unit, factor in sorted(_SIZE_UNITS.items(), key=lambda item: -item[1]):
        if factor > 1 and size and size % factor == 0:
            return size // factor, unit
    return size, ""


def parse_price(text: str) -> float:
    """Parse US dollars: a plain number above zero."""
    if not re.fullmatch(_NUMBER, text) or float(text) <= 0:
        raise ValueError(f"{quote(text)} is not a price: a plain number of dollars, such as 1.50")
    return float(text)


def parse_cpus(text: str) -> float:
    if not re.fullmatch(_NUMBER, text) or not 0 < float(text) <= 1024:
        raise ValueError(f"{quote(text)} is not a number of CPUs: write 4 or 1.5")
    return float(text)


def parse_process_count(text: str) -> int:
    """Parse `auto`, which is 0 (one for each GPU), or a number of processes."""
    if text == "auto":
        return 0
    if not re.fullmatch(r"[0-9]{1,3}", text) or not 1 <= int(text) <= 256:
        raise ValueError(f"{quote(text)} is not a number of processes: write auto, or 1 to 256")
    return int(text)


def parse_server_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", text) or not 1 <= int(text) <= MOST_SERVERS:
        raise ValueError(f"{quote(text)} is not a number of servers from 1 to {MOST_SERVERS}")
    return int(text)


def parse_restarts(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", text):
        raise ValueError(f"{quote(text)} is not a number of restarts from 0 to 99")
    return int(text)


def number_text(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".")


def parse_port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise ValueError(f"{quote(text)} is not a port: a number from 1 to 65535")
    return int(text)


def parse_gpu(text: str) -> GpuNeed:
    """Parse `auto`, `none`, `any`, `T4`, `A100:2`, `any:2`, `>=24GB`, `>=24GB:2`."""
    kind, colon, count_text = text.partition(":")
    allowed = 'auto, none, any, a model such as T4 or A100:2, or ">=24GB"'
    count = 1
    if colon:
        if not re.fullmatch(_COUNT, count_text) or not 1 <= int(count_text) <= MAX_GPUS:
            raise ValueError(f"{quote(text)}: expected a number from 1 to {MAX_GPUS} after `:`")
        count = int(count_text)
    if kind.startswith(">="):
        return GpuNeed(kind="any", count=count, min_memory_bytes=parse_size(kind[2:].strip()))
    if kind.lower() in ("auto", "none"):
        if colon:
            raise ValueError(f"{quote(text)}: {kind} cannot have a number; write any:{count}")
        return GpuNeed(kind=kind.lower())
    if kind.lower() == "any":
        return GpuNeed(kind="any", count=count)
    if re.fullmatch(_COUNT, text) and 1 <= int(text) <= MAX_GPUS:
        raise ValueError(f"{quote(text)} names no GPU; for {text} of any model, write any:{text}")
    if not re.fullmatch(_GPU_MODEL, kind.upper()):
        raise ValueError(f"{quote(text)} is not a GPU: {allowed}")
    return GpuNeed(kind=kind.upper(), count=count)


def gpu_text(gpu: GpuNeed) -> str:
    at_least = gpu.min_memory_bytes and gpu.kind == "any"
    kind = f">={format_size(gpu.min_memory_bytes)}" if at_least else gpu.kind
    return f"{kind}:{gpu.count}" if gpu.count > 1 else kind


def parse_env_name(text: str) -> str:
    if not re.fullmatch(_ENV_NAME, text):
        raise ValueError(f"{quote(text)} is not a variable name: use letters, digits and `_`")
    if text.upper().startswith("LABCTL_"):
        raise ValueError(f"{quote(text)}: names that start with LABCTL_ are reserved for labctl")
    return text


def parse_secret_name(text: str) -> str:
    if parse_env_name(text).upper().startswith("AWS_"):
        raise ValueError(f"{quote(text)}: AWS credentials never leave this machine")
    return text


def parse_line(text: str) -> tuple[str, ...]:
    """Parse a command line into argv; use `sh -c` only if it contains shell syntax."""
    if re.search(_SHELL_SYNTAX, text):
        return ("sh", "-c", text)
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        raise ValueError(f"{quote(text)}: a quote is not closed") from None
    if not words:
        raise ValueError("the command is empty")
    return words
