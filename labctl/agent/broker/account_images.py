"""Images on a shared server: an account's own images are invisible to all other accounts.

Images that an account builds or uploads are stored under `labctl-u<uid>/`. A name refers to the
account's own image first, then to a shared one of staff or of a registry.
"""

from __future__ import annotations

import re

from ..host.engine_objects import Image
from .http import HttpRefusal
from .rules import OWNER, BrokerAccount

PRIVATE = re.compile(r"^labctl-u(\d+)/")
MOST_CHARACTERS = 384
# At any position: for the engine, docker.io/x/y and x/y are the same.
RESERVED = re.compile(r"(^|/)labctl-u\d+/")
# Excludes names that the engine corrects: it reads `x:1:` as x:1, and `x:` as all tags of x.
REFERENCE = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]{1,5}(?=/))?(/[a-z0-9][a-z0-9._-]*)*"
    r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
TAG = re.compile(r"\w[\w.-]{0,127}|sha256:[0-9a-f]{64}", re.ASCII)
IMAGE_ID = re.compile(r"(sha256:)?[0-9a-f]{12,64}")


def build_own_reference(account: BrokerAccount, reference: str) -> str:
    """Return the stored name of the account's own image. Refusal for an invalid name."""
    bare = reference.partition("@")[0]
    is_valid = len(bare) <= MOST_CHARACTERS and REFERENCE.fullmatch(reference)
    if not is_valid or RESERVED.search(bare):
        raise HttpRefusal(404, f"No such image: {reference[:200]}")
    head, slash, last = bare.rpartition("/")
    name, _, tag = last.partition(":")
    path = f"{head}{slash}{name}".replace(":", "-")
    return f"labctl-u{account.uid}/{path}:{tag or 'latest'}"


def list_candidates(account: BrokerAccount, reference: str) -> list[str]:
    """Return the references to try in the engine, in this order."""
    if IMAGE_ID.fullmatch(reference):
        return [reference]
    private = build_own_reference(account, reference)
    return [reference] if "@" in reference else [private, reference]


def is_visible(account: BrokerAccount, image: Image) -> bool:
    """Return whether an image is the account's or shared."""
    tags = image.RepoTags or ()
    owners = {match.group(1) for match in map(PRIVATE.match, tags) if match}
    if str(account.uid) in owners:
        return True
    public = [tag for tag in tags if not PRIVATE.match(tag)]
    if public or (image.RepoDigests and not owners):
        return True
    labels = image.config.Labels or {}
    return not owners and labels.get(OWNER) == str(account.uid)


def pick_tag(reference: str, tag: str) -> str:
    """Return the requested tag or digest, "" if `reference` contains it.

    Without one it is "latest": the engine would take a missing tag for all tags.
    """
    has_own_tag = "@" in reference or ":" in reference.rpartition("/")[2]
    if has_own_tag and tag:
        raise HttpRefusal(400, "an image can have only one tag")
    if tag and not TAG.fullmatch(tag):
        raise HttpRefusal(400, f"{tag[:100]!r} is neither a tag nor a digest")
    return tag if tag or has_own_tag else "latest"


def is_installed_by_staff(image: Image | None) -> bool:
    """Return whether staff installed the image here, rather than pulling it from a registry."""
    return image is not None and not image.RepoDigests
