"""The client of clouds with a JSON API and a bearer key: requests, typed replies, labctl's errors.

A cloud's package describes itself (`CloudDescription`), opens an `ApiClient`, and calls it with the
type of each reply. It decides by status and documented error codes, never by a message.

May import: what a provider may. It is no provider itself.
"""

from labctl.providers.http.accounts import remember_account
from labctl.providers.http.client import ApiClient
from labctl.providers.http.description import AbsentError, CloudDescription, ErrorDetail
from labctl.providers.http.keys import find_key, resolve_endpoint

__all__ = [
    "AbsentError",
    "ApiClient",
    "CloudDescription",
    "ErrorDetail",
    "find_key",
    "remember_account",
    "resolve_endpoint",
]
