"""Messages about images on a server: find, pull and build them."""

from typing import Dict, NamedTuple, Tuple

from .verbs import Empty, StreamingVerb, Verb


class FindImagesRequest(NamedTuple):
    references: Tuple[str, ...]


class FindImagesReply(NamedTuple):
    """The id of each reference's image, "" for an image that is not on the server."""

    ids: Dict[str, str]


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


class BuildOpening(NamedTuple):
    """The path of the build's log on the server."""

    log: str


class BuildResult(NamedTuple):
    """The exit code of docker; `tail` has the step that failed and its last lines."""

    code: int
    tail: Tuple[str, ...]
    log: str = ""


FIND_IMAGES = Verb("image", FindImagesRequest, FindImagesReply)
PULL_IMAGE = StreamingVerb("pull-image", PullImageRequest, Empty, BuildResult)
BUILD_IMAGE = StreamingVerb("build", BuildImageRequest, BuildOpening, BuildResult)
