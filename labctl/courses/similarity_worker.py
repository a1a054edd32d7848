"""The program that compares the code of submissions: `python -m labctl.courses.similarity_worker`.

It reads a `ComparisonRequest` from its standard input and writes a `ComparisonReply`. It is a
process of its own because students wrote what it parses: the caller limits its time and memory.
copydetect (winnowing over Pygments' tokens) does the work. Its hashes are Python's own, so
PYTHONHASHSEED must be set for equal results each time.
"""

from __future__ import annotations

import io
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any, Protocol

import msgspec

from labctl.decoding import decode_json
from labctl.lazy import lazy_imports
from labctl.model import Value

with lazy_imports(__name__):
    import copydetect
    from copydetect import utils

# Characters of code, without names and comments, that must match to count at all, and from which on
# a match is always found. These are copydetect's own defaults.
NOISE, GUARANTEE = 25, 30
# A shorter match of two submissions is chance: a loop, a call with usual arguments.
LEAST_MATCH = 60
LEAST_SHARE = 0.2
MOST_PAIRS = 50
MOST_FILE_PAIRS = 10
# What more than this share of the submissions, and more than so many, have in common was taught.
# A few friends in a small class are fewer.
COMMON, LEAST_COMMON = 0.25, 5.0
# seconds of processor time to read a file
FILE_S = 10.0

Spans = tuple[tuple[int, int], ...]


class CodeDocument(Value, frozen=True):
    """The code of one submission: texts by path. One of an earlier year is only compared with."""

    name: str
    files: dict[str, str]
    is_previous: bool = False


class ComparisonRequest(Value, frozen=True):
    """Submissions to compare. Code that is in `handed_out`, by path, does not count."""

    documents: tuple[CodeDocument, ...]
    handed_out: dict[str, str] = msgspec.field(default_factory=dict)


class FileMatch(Value, frozen=True):
    """Two files with code in common; `spans` are the places, from and to, in characters."""

    path: str
    other_path: str
    spans: Spans
    other_spans: Spans


class SimilarPair(Value, frozen=True):
    """Two submissions with code in common.

    `share` is the part of the first one's own code that the second one has too, from 0 to 1, and
    `other_share` the reverse. `matched` is the size of that code in characters without names.
    """

    name: str
    other: str
    share: float
    other_share: float
    matched: int
    files: tuple[FileMatch, ...]


class UncomparedFile(Value, frozen=True):
    """A file that could not be compared, and why."""

    document: str
    path: str
    why: str


class ComparisonReply(Value, frozen=True):
    pairs: tuple[SimilarPair, ...]
    skipped: tuple[UncomparedFile, ...] = ()


class _FileTimeoutError(Exception):
    """A file takes too long."""


class FileFingerprint(Protocol):
    """What this module uses of copydetect.CodeFingerprint."""

    hashes: set[int]
    hash_idx: dict[int, list[int]]
    raw_code: str
    filtered_code: str
    token_coverage: float


# by path
Fingerprints = dict[str, FileFingerprint]


def compare_documents(request: ComparisonRequest) -> ComparisonReply:
    """Return the pairs with code in common, the largest share first."""
    skipped: list[UncomparedFile] = []
    handed_out = CodeDocument(name="", files=request.handed_out)
    known: set[int] = set()
    for fingerprint in _read_fingerprints(handed_out, [], window=1).values():
        known |= fingerprint.hashes
    prints = {
        document.name: _read_fingerprints(document, skipped) for document in request.documents
    }
    owners = _find_owners(prints)
    limit = max(LEAST_COMMON, COMMON * len(prints))
    known |= {value for value, names in owners.items() if len(names) > limit}
    for fingerprints in prints.values():
        _subtract(fingerprints.values(), known)
    previous = {document.name for document in request.documents if document.is_previous}
    pairs = [
        pair
        for name, other in _choose_pairs(owners, known, previous)
        if (pair := _compare(name, prints[name], other, prints[other])) is not None
    ]
    pairs.sort(key=lambda pair: (-max(pair.share, pair.other_share), pair.name, pair.other))
    return ComparisonReply(pairs=tuple(pairs[:MOST_PAIRS]), skipped=tuple(skipped))


def _read_fingerprints(
    document: CodeDocument, skipped: list[UncomparedFile], window: int = GUARANTEE - NOISE + 1
) -> Fingerprints:
    fingerprints = {}
    for path, text in document.files.items():
        # Pygments' regular expressions can be slow on purpose. Only processor time counts: a busy
        # machine must not skip a starter, whose code would then look copied.
        signal.setitimer(signal.ITIMER_PROF, FILE_S)
        try:
            fingerprints[path] = copydetect.CodeFingerprint(
                _language_name(path), NOISE, window, fp=io.StringIO(text)
            )
        except _FileTimeoutError:
            why = f"it took more than {FILE_S:g} s"
            skipped.append(UncomparedFile(document=document.name, path=path, why=why))
        except (ValueError, IndexError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            skipped.append(UncomparedFile(document=document.name, path=path, why=why[:200]))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return fingerprints


def _language_name(path: str) -> str:
    """Return a name by which Pygments knows the language: the code of notebooks is Python."""
    return f"{path}.py" if path.lower().endswith(".ipynb") else path


def _find_owners(prints: Mapping[str, Fingerprints]) -> dict[int, set[str]]:
    """Return the documents that have each hash."""
    owners: dict[int, set[str]] = defaultdict(set)
    for name, fingerprints in prints.items():
        for fingerprint in fingerprints.values():
            for value in fingerprint.hashes:
                owners[value].add(name)
    return owners


def _subtract(fingerprints: Iterable[FileFingerprint], known: set[int]) -> None:
    """Remove hashes from fingerprints.

    copydetect's own parameter `boilerplate` also removes code that a file has twice.
    """
    for fingerprint in fingerprints:
        fingerprint.hashes -= known
        index = {value: fingerprint.hash_idx[value] for value in fingerprint.hashes}
        fingerprint.hash_idx = index
        length = len(fingerprint.filtered_code)
        fingerprint.token_coverage = utils.get_token_coverage(index, NOISE, length)


def _choose_pairs(
    owners: Mapping[int, set[str]], known: set[int], previous: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs with the most hashes in common, of at least one of this year's."""
    common: Counter[tuple[str, str]] = Counter()
    for value, names in owners.items():
        if value not in known:
            common.update(combinations(sorted(names), 2))
    # Shares are computed of more pairs than are shown: a small submission has few hashes.
    chosen = [pair for pair, _ in common.most_common() if not previous.issuperset(pair)]
    yield from chosen[: 10 * MOST_PAIRS]


def _compare(name: str, own: Fingerprints, other: str, theirs: Fingerprints) -> SimilarPair | None:
    """Return what two submissions have in common; None if it is little."""
    matched, share = _measure_share(own, theirs)
    other_matched, other_share = _measure_share(theirs, own)
    if max(share, other_share) < LEAST_SHARE or max(matched, other_matched) < LEAST_MATCH:
        return None
    matches = []
    for path, fingerprint in own.items():
        for other_path, other_fingerprint in theirs.items():
            if not fingerprint.hashes.isdisjoint(other_fingerprint.hashes):
                overlap, _, slices = copydetect.compare_files(fingerprint, other_fingerprint)
                spans = [
                    _list_spans(part, len(side.raw_code))
                    for part, side in zip(slices, (fingerprint, other_fingerprint), strict=True)
                ]
                match = FileMatch(
                    path=path, other_path=other_path, spans=spans[0], other_spans=spans[1]
                )
                matches.append((int(overlap), match))
    matches.sort(key=lambda item: -item[0])
    return SimilarPair(
        name=name,
        other=other,
        share=share,
        other_share=other_share,
        matched=max(matched, other_matched),
        files=tuple(match for _, match in matches[:MOST_FILE_PAIRS]),
    )


def _measure_share(own: Fingerprints, theirs: Fingerprints) -> tuple[int, float]:
    """Return how much of `own`, in characters without names, `theirs` has, and its share."""
    their_hashes: set[int] = set().union(*(one.hashes for one in theirs.values()))
    total = sum(float(one.token_coverage) for one in own.values())
    matched = 0.0
    for fingerprint in own.values():
        index = {value: fingerprint.hash_idx[value] for value in fingerprint.hashes & their_hashes}
        length = len(fingerprint.filtered_code)
        matched += float(utils.get_token_coverage(index, NOISE, length))
    return int(matched), (matched / total if total else 0.0)


def _list_spans(slices: Any, length: int) -> Spans:
    """Return copydetect's slices as places in the text, in order, without overlaps."""
    spans: list[tuple[int, int]] = []
    if len(slices) == 0:
        return ()
    for begin, end in sorted((int(a), int(b)) for a, b in zip(*slices, strict=True)):
        begin, end = max(begin, spans[-1][1] if spans else 0), min(end, length)
        if begin < end:
            spans.append((begin, end))
    return tuple(spans)


def _stop_file(*_: object) -> None:
    raise _FileTimeoutError


def main() -> None:
    signal.signal(signal.SIGPROF, _stop_file)
    request = decode_json(sys.stdin.buffer.read(), ComparisonRequest)
    sys.stdout.buffer.write(msgspec.json.encode(compare_documents(request)))


if __name__ == "__main__":
    main()
