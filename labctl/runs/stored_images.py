"""Images in the lab's store: what one server has built, for the lab's next servers.

The ledger has the id of each image that a server of the lab has built for labctl. The id is a hash
of the content, so a server that loads the image from the store gets what was built then, whoever
else can write to the store.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from labctl.errors import LabError, LinkLostError
from labctl.events import Note, Step
from labctl.model import Server
from labctl.wire.images import (
    FIND_IMAGES,
    LOAD_STORED_IMAGE,
    START_LOAD_IMAGE,
    START_STORE_IMAGE,
    BuildImageRequest,
    FindImagesRequest,
    LoadStoredImageRequest,
    StoreImageRequest,
)

if TYPE_CHECKING:
    from labctl.servers.agent import AgentClient
    from labctl.servers.context import LabContext

# Kind of the ledger entry of an image that a server has built.
BUILT_EVENT = "image built"
LOAD_S = 3600.0
# An address with a password, or with a user name that may be a token: ssh's `git@` is neither.
_CREDENTIALS = re.compile(r"https?://[^/\s@]+@|://[^/\s@:]*:[^/\s@]+@")


def store_image(
    context: LabContext,
    server: Server,
    remote: AgentClient,
    built: BuildImageRequest,
    architecture: str,
) -> None:
    """Have the server send an image that it has just built to the lab's store, in the background.

    A failure only costs the copy, and is reported.
    """
    if not context.config.should_store_images or not architecture:
        return
    wanted, lab, lab_id = built.tag, built.lab, built.lab_id
    # The image has the lists, and its history the build arguments; others may read the store.
    if any(_CREDENTIALS.search(text) for text in (*built.args.values(), *built.files.values())):
        why = "an address in its build arguments or lists of packages contains credentials"
        context.reporter.emit(Note(text=f"{wanted} is not kept in {context.config.store}: {why}"))
        return
    try:
        image_id = remote.call(FIND_IMAGES, FindImagesRequest((wanted,))).ids.get(wanted)
        if not image_id:
            return
        detail = {"image": wanted, "id": image_id, "architecture": architecture}
        context.state.record(BUILT_EVENT, lab_id=lab_id, server_id=server.id, detail=detail)
        remote.call(START_STORE_IMAGE, StoreImageRequest(lab, lab_id, image_id))
    except LabError as error:
        text = f"{wanted} is not kept in {context.config.store}: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))


def start_load(context: LabContext, remote: AgentClient, wanted: str, architecture: str) -> None:
    """Have the server start to load an image of this lab from the store, in the background."""
    if request := _make_request(context, wanted, architecture):
        remote.call(START_LOAD_IMAGE, request)


def load_stored(context: LabContext, remote: AgentClient, wanted: str, architecture: str) -> bool:
    """Have the server load an image of this lab from the store; return whether it has."""
    request = _make_request(context, wanted, architecture)
    if request is None:
        return False
    name = f"loading {wanted} from the store"
    context.reporter.emit(Step(name=name))
    try:
        why = remote.call(LOAD_STORED_IMAGE, request, timeout_s=LOAD_S).why
    except LinkLostError:
        raise
    except LabError as error:
        why = error.what
    if why:
        context.reporter.emit(Step(name=name, done=True, brief=True))
        context.reporter.emit(Note(text=f"{wanted} was not loaded from the store: {why}"))
        return False
    context.reporter.emit(Step(name=name, done=True))
    return True


def _make_request(
    context: LabContext, wanted: str, architecture: str
) -> LoadStoredImageRequest | None:
    """Return the request to load the image; None if the store cannot have it."""
    image_id = _find_id(context, wanted, architecture) if context.config.should_store_images else ""
    if not image_id:
        return None
    return LoadStoredImageRequest(context.config.name, context.lab_id, image_id, wanted)


def _find_id(context: LabContext, wanted: str, architecture: str) -> str:
    """Return the id of the image as it was last built in this lab; "" if it was not."""
    for entry in reversed(context.state.list_events(lab_id=context.lab_id, kind=BUILT_EVENT)):
        built = (entry.detail.get("image"), entry.detail.get("architecture"))
        if built == (wanted, architecture):
            return str(entry.detail.get("id", ""))
    return ""
