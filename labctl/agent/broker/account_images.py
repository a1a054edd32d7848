"""Images on a shared server: an account's own are seen by nobody else, and stand for nobody else's.

What an account builds or sends is kept under `labctl-u<uid>/`; a name means the account's own
image first, and then what staff or a registry gave to all.
"""

from __future__ import annotations

import re
from typing import Any

from .http import Refusal
from .rules import OWNER, Account

PRIVATE = re.compile(r"^labctl-u(\d+)/")
MOST_CHARACTERS = 384
# Wherever it stands: the engine knows docker.io/x/y and x/y for the same.
RESERVED = re.compile(r"(^|/)labctl-u\d+/")
# Nothing that the engine corrects: it takes `x:1:` for x:1, and `x:` for all tags of x.
REFERENCE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]{1,5}(?=/))?(/[a-z0-9][a-z0-9._-]*)*"
    r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
TAG = re.compile(r"\w[\w.-]{0,127}|sha256:[0-9a-f]{64}", re.ASCII)
IMAGE_ID = re.compile(r"(sha256:)?[0-9a-f]{12,64}")


def own_reference(account: Account, reference: str) -> str:
    """Where the account's own image of this name is kept; Refusal for what is no name."""
    bare = reference.partition("@")[0]
    known = len(bare) <= MOST_CHARACTERS and REFERENCE.fullmatch(reference)
    if not known or RESERVED.search(bare):
        raise Refusal(404, f"No such image: {reference[:200]}")
    head, slash, last = bare.rpartition("/")
    name, _, tag = last.partition(":")
    place = f"{head}{slash}{name}".replace(":", "-")
    return f"labctl-u{account.uid}/{place}:{tag or 'latest'}"


def candidates(account: Account, reference: str) -> list[str]:
    """What the engine is asked for, one after the other."""
    if IMAGE_ID.fullmatch(reference):
        return [reference]
    own = own_reference(account, reference)
    return [reference] if "@" in reference else [own, reference]


def visible(account: Account, found: dict[str, Any]) -> bool:
    """Whether an image, as `inspect` shows it, is the account's or everybody's."""
    tags = found.get("RepoTags") or []
    owners = {match.group(1) for match in map(PRIVATE.match, tags) if match}
    if str(account.uid) in owners:
        return True
    public = [tag for tag in tags if not PRIVATE.match(tag)]
    if public or (found.get("RepoDigests") and not owners):
        return True
    labels = (found.get("Config") or {}).get("Labels") or {}
    return not owners and labels.get(OWNER) == str(account.uid)


def tag_of(reference: str, tag: str) -> str:
    """The tag or digest that is asked for beside `reference`, "" where it stands in that. Never
    none at all: the engine takes this for all tags."""
    named = "@" in reference or ":" in reference.rpartition("/")[2]
    if named and tag:
        raise Refusal(400, "an image has one tag")
    if tag and not TAG.fullmatch(tag):
        raise Refusal(400, "that is neither a tag nor a digest")
    return tag if tag or named else "latest"


def given(found: dict[str, Any] | None) -> bool:
    """Whether an image was put here by staff and came from no registry."""
    return bool(found) and not (found or {}).get("RepoDigests")
