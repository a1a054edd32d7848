"""The connection to Canvas's API, over canvasapi.

The token goes to the site in course.yaml only: no redirect is followed, and no password is read
from ~/.netrc. canvasapi sends one request after the other, which Canvas recommends; a request that
Canvas throttles is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from labctl.config.course_schema import CanvasConfig
from labctl.config.installation import install_command
from labctl.errors import ConfigError, ConnectError, LabError, PolicyError, ThrottledError
from labctl.http_client import open_session
from labctl.lazy import lazy_imports
from labctl.retry import retry_on
from labctl.shell import Secret

if TYPE_CHECKING:
    from requests import Response, Session

with lazy_imports(__name__):
    import requests
    from canvasapi import assignment as canvas_assignment
    from canvasapi import course as canvas_course
    from canvasapi import exceptions, requester

TOKEN = "CANVAS_TOKEN"
# seconds to connect, and between two parts of an answer
REQUEST_S = (10.0, 60.0)
THROTTLED_PAUSE_S, THROTTLED_S = 2.0, 300.0


def open_assignment(canvas: CanvasConfig, number: int, token: Secret) -> Any:
    """Return canvasapi's object of the assignment. No request is sent yet."""
    if find_spec("canvasapi") is None:
        raise LabError(
            "the canvas extra is not installed",
            why="the module canvasapi is missing",
            hint=install_command("canvas"),
        )
    connection = requester.Requester(canvas.url, token.reveal())
    connection._session = _open_guarded_session(canvas.url)
    return canvas_assignment.Assignment(connection, {"id": number, "course_id": canvas.course})


def load_assignment(assignment: Any) -> Any:
    """Return the assignment with everything that Canvas says about it."""
    course = canvas_course.Course(assignment._requester, {"id": assignment.course_id})
    return course.get_assignment(assignment.id)


def _open_guarded_session(url: str) -> Session:
    """Open a session that stays at the site, and waits while Canvas throttles it."""
    session = open_session()
    policy = retry_on(
        ThrottledError, pause_s=THROTTLED_PAUSE_S, longest_pause_s=30.0, deadline_s=THROTTLED_S
    )
    send = session.request

    def request(method: str, address: str, **options: Any) -> Response:
        options.update(allow_redirects=False, timeout=REQUEST_S)
        response = send(method, address, **options)
        _check_response(response, url)
        return response

    session.request = partial(policy, request)  # type: ignore[method-assign]
    return session


def _check_response(response: Response, url: str) -> None:
    following = response.links.get("next", {}).get("url", f"{url}/")
    if response.is_redirect or not following.startswith(f"{url}/"):
        target = response.headers.get("Location", following)
        raise PolicyError(
            "Canvas refers to another address",
            why=f"{url} answered with {target[:200]!a}, and the token is only for the first",
            hint="check canvas.url in course.yaml: it must be the address in the browser",
        )
    # Canvas documents 429; older versions answer 403 with the same text.
    if response.status_code == 429 or (
        response.status_code == 403 and "Rate Limit Exceeded" in response.text
    ):
        raise ThrottledError(
            "Canvas throttles the requests",
            why="its rate limit is exceeded",
            hint="try again later",
        )


@contextmanager
def translate_errors(canvas: CanvasConfig, name: str) -> Iterator[None]:
    """Raise LabError instead of canvasapi's errors, and of those of the connection."""
    again = f"labctl course grades {name} --to canvas   # shows what is still to be sent"
    number = canvas.assignments[name]
    try:
        yield
    except exceptions.InvalidAccessToken:
        why = "it may have expired, or been deleted in Canvas"
        hint = f"labctl secret set {TOKEN}"
        raise PolicyError("Canvas rejects the token", why=why, hint=hint) from None
    except (exceptions.Unauthorized, exceptions.Forbidden):
        raise PolicyError(
            f"Canvas does not let this token grade the assignment {number}",
            why="its owner must be a teacher of the course, and the assignment published",
            hint=f"labctl secret set {TOKEN}   # of a teacher",
        ) from None
    except exceptions.ResourceDoesNotExist:
        raise ConfigError(
            f"Canvas has no assignment {number} in the course {canvas.course}",
            why=f"the numbers in course.yaml do not exist at {canvas.url}, or the token's owner "
            "may not see them",
            hint="compare canvas in course.yaml with the address in the browser",
        ) from None
    except exceptions.CanvasException as error:
        why = str(error)[:300]
        raise LabError("Canvas reports an error", why=why, hint=again) from None
    except requests.RequestException as error:
        why = type(error).__name__
        raise ConnectError(f"no answer from {canvas.url}", why=why, hint=again) from None
    except msgspec.ValidationError as error:
        raise LabError(
            "Canvas sent an answer that labctl does not understand", why=str(error), hint=again
        ) from None
