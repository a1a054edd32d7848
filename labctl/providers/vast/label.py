"""How an instance records whose it is: its label, the only text that Vast.ai keeps for it.

`labctl LAB LABID token=... owner=... created=... key=... next=... ttl=... TAG=VALUE ...`

`created` is in Unix milliseconds, `ttl` in seconds; a key is the 43 letters that stand for an
ed25519 public key, and `next` the one that is replacing it. Everything after LABID has no order,
and a word that has no value is left out. Vast.ai allows 1024 letters.

An SSH key of the account belongs to labctl if its comment is `labctl-LABID-LAB`.
"""

from __future__ import annotations

import re
import time

from labctl.model import CreateServerRequest, Value
from labctl.providers.ed25519_code import decode_host_key, encode_host_key
from labctl.providers.vast.api import VastInstance

OURS = "labctl"
LONGEST_LABEL = 1024
_OWN_WORDS = ("token", "owner", "created", "key", "next", "ttl")
_NOT_IN_WORDS = re.compile(r"[^A-Za-z0-9_.:@/+-]")
_COMMENT = re.compile(r"labctl-([0-9a-f]{12})-([a-z0-9][a-z0-9-]{0,38})")


class VastLabel(Value, frozen=True):
    """The contents of a label. Keys are public key lines, "" for none."""

    lab: str
    lab_id: str
    token: str = ""
    owner: str = ""
    created_ms: int = 0
    host_key: str = ""
    next_host_key: str = ""
    ttl_s: int | None = None
    tags: tuple[tuple[str, str], ...] = ()


def make_label(request: CreateServerRequest, owner: str) -> VastLabel:
    return VastLabel(
        lab=request.lab,
        lab_id=request.lab_id,
        token=request.token,
        owner=owner,
        created_ms=round(time.time() * 1000),
        host_key=request.host_key,
        ttl_s=request.need.ttl_s,
        tags=tuple(request.tags.items()),
    )


def format_label(label: VastLabel) -> str:
    """Return the text of a label; tags that do not fit are left out."""
    words = {
        "token": label.token,
        "owner": _clean(label.owner),
        "created": str(label.created_ms),
        "key": encode_host_key(label.host_key) if label.host_key else "",
        "next": encode_host_key(label.next_host_key) if label.next_host_key else "",
        "ttl": "" if label.ttl_s is None else str(label.ttl_s),
    }
    text = f"{OURS} {label.lab} {label.lab_id}"
    tags = {_clean(name): _clean(value) for name, value in label.tags}
    for name, value in {**tags, **words}.items():
        word = f" {name}={value}"
        if value and (name in words or len(text) + len(word) < LONGEST_LABEL // 2):
            text += word
    return text


def parse_label(text: str | None) -> VastLabel | None:
    """Return what a label says; None if labctl did not write it."""
    words = (text or "").split()
    if len(words) < 3 or words[0] != OURS:
        return None
    pairs = [(name, value) for name, _, value in (word.partition("=") for word in words[3:])]
    values = dict(pairs)
    created, ttl = values.get("created", ""), values.get("ttl", "")
    return VastLabel(
        lab=words[1],
        lab_id=words[2],
        token=values.get("token", ""),
        owner=values.get("owner", ""),
        created_ms=int(created) if created.isdigit() else 0,
        host_key=decode_host_key(values.get("key", "")),
        next_host_key=decode_host_key(values.get("next", "")),
        ttl_s=int(ttl) if ttl.isdigit() else None,
        tags=tuple((name, value) for name, value in pairs if name not in _OWN_WORDS),
    )


def get_label(instance: VastInstance) -> VastLabel:
    """Return the label of an instance of labctl."""
    label = parse_label(instance.label)
    assert label is not None, "labctl lists its own instances alone"
    return label


def make_key_line(request: CreateServerRequest) -> str:
    """Return the lab's public key with the comment that says whose it is."""
    words = " ".join(request.public_key.split()[:2])
    return f"{words} {OURS}-{request.lab_id}-{request.lab}"


def parse_key_line(line: str) -> tuple[str, str] | None:
    """Return (lab, lab id) of a public key line; None if labctl did not add the key."""
    match = _COMMENT.fullmatch(line.strip().partition(" ")[2].partition(" ")[2])
    return (match[2], match[1]) if match else None


def _clean(text: str) -> str:
    """Replace what would end a word, or what Vast.ai might not allow."""
    return _NOT_IN_WORDS.sub("-", text)[:128]
