"""Messages about images on a server: find, pull and build them."""

import hashlib
from typing import Dict, NamedTuple, Sequence, Tuple

from .codec import as_array
from .verbs import Empty, StreamingVerb, Verb


class FindImagesRequest(NamedTuple):
    references: Tuple[str, ...]


class FindImagesReply(NamedTuple):
    """The id and content hash of each reference's image, "" if it is not on the server.

    The id of an environment is its reference; it has no content hash.
    """

    ids: Dict[str, str]
    contents: Dict[str, str] = {}


class PullImageRequest(NamedTuple):
    """Pull `reference`, and name the image `tag` too."""

    reference: str
    tag: str = ""


class BuildImageRequest(NamedTuple):
    """Build `directory` of the lab's code, or of the code of the run `run`, as `tag`.

    With `dockerfile`, its text, the build gets only `files`, texts by their paths, and with
    `has_code` the code of Python projects too.
    """

    lab: str
    lab_id: str
    directory: str
    tag: str
    args: Dict[str, str]
    run: str = ""
    wheelhouse: bool = False
    dockerfile: str = ""
    files: Dict[str, str] = {}
    has_code: bool = False


class BuildEnvironmentRequest(NamedTuple):
    """Build the environment `reference` for runs without a container, by the shell script `script`.

    `args` are variables of the script. `run`, `files` and `has_code` as in a BuildImageRequest.
    """

    lab: str
    lab_id: str
    reference: str
    script: str
    args: Dict[str, str]
    files: Dict[str, str]
    has_code: bool = False
    run: str = ""
    wheelhouse: bool = False


class BuildOpening(NamedTuple):
    """The first reply to a build, before its output: the path of the log on the server."""

    log: str


class BuildResult(NamedTuple):
    """The exit code of the build; `tail` has the step that failed and its last lines."""

    code: int
    tail: Tuple[str, ...]
    log: str = ""


class StoreImageRequest(NamedTuple):
    """Send the image with this id to the lab's store."""

    lab: str
    lab_id: str
    image_id: str


@as_array
class StoredBlob(NamedTuple):
    """A part of a stored image: the size of its compressed file, and that of its content."""

    size: int
    content_size: int


class StoredImageRecord(NamedTuple):
    """An image in a store: its configuration and layers, by their SHA-256 hashes."""

    blobs: Dict[str, StoredBlob]


class LoadStoredImageRequest(NamedTuple):
    """Load the image with this id from the lab's store, and name it `reference`."""

    lab: str
    lab_id: str
    image_id: str
    reference: str


class LoadStoredImageReply(NamedTuple):
    """Why the image was not loaded; "" if it was."""

    why: str


def hash_image_content(created: str, layers: Sequence[str]) -> str:
    """Return a hash by which two engines recognize the same image; "" if its layers are unknown.

    Engines with different image stores give the same image different ids.
    """
    text = " ".join([created, *layers])
    return hashlib.sha256(text.encode()).hexdigest() if layers else ""


FIND_IMAGES = Verb("image", FindImagesRequest, FindImagesReply)
PULL_IMAGE = StreamingVerb("pull-image", PullImageRequest, Empty, BuildResult)
BUILD_IMAGE = StreamingVerb("build", BuildImageRequest, BuildOpening, BuildResult)
BUILD_ENVIRONMENT = StreamingVerb(
    "build-environment", BuildEnvironmentRequest, BuildOpening, BuildResult
)
# The verbs with START_ start the others in the background.
START_STORE_IMAGE = Verb("store-image", StoreImageRequest, Empty)
SEND_STORED_IMAGE = Verb("send-image", StoreImageRequest, Empty)
START_LOAD_IMAGE = Verb("start-load-image", LoadStoredImageRequest, Empty)
LOAD_STORED_IMAGE = Verb("load-image", LoadStoredImageRequest, LoadStoredImageReply)
