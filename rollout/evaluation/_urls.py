"""What may be secret in a URL: what is shown of it, and what nobody may repeat. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from rollout.errors import EvaluationError

__all__ = ["public_url", "url_secrets"]

_SENSITIVE = re.compile(r"key|token|secret|pass|credential|auth|sig", re.IGNORECASE)

_SHORTEST = 8
"""Characters of a secret that is looked for alone."""


def public_url(url: str) -> str:
    """Return a URL without what may be secret in it: user, password, query and fragment.

    Raises:
        EvaluationError: It is no URL.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        # What urllib says has parts of the URL in it, and those may be secret.
        raise EvaluationError("an url of the config is malformed") from None
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def url_secrets(url: str) -> list[str]:
    """List what must not be left of a URL where somebody repeats it, as HTTP errors do.

    Short ones, a user's name beside a password, and values of a query whose names sound
    harmless may be words of any text, so they are listed within their surroundings alone.
    """
    return list(dict.fromkeys(_secrets(url)))


def _secrets(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    alone: list[str] = []
    login = parts.netloc.rpartition("@")[0]
    if login:
        yield f"{login}@"
        user, colon, password = login.partition(":")
        secret = password if colon else user
        alone += [secret, unquote(secret)]
    for text in filter(None, (parts.query, parts.fragment)):
        yield text
        alone += [value for name, value in parse_qsl(text) if _SENSITIVE.search(name)]
    yield from (secret for secret in alone if len(secret) >= _SHORTEST)
