"""What may be secret in a URL: what is shown of it, and what nobody may repeat. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

__all__ = ["public_url", "url_secrets"]

_SHORTEST = 6
"""Characters of a secret that is looked for alone."""


def public_url(url: str) -> str:
    """Return a URL without what may be secret in it: user, password, query and fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "[malformed URL]"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def url_secrets(url: str) -> list[str]:
    """List what must not be left of a URL where somebody repeats it, as HTTP errors do.

    Short ones, a user's name beside a password, and the version of an API may be words of any
    text, so they are listed within their surroundings alone.
    """
    try:
        return list(dict.fromkeys(_secrets(url)))
    except ValueError:  # it is no URL, so nobody can say which part of it is secret
        return [url]


def _secrets(url: str) -> Iterator[str]:
    parts = urlsplit(url)
    alone: list[str] = []
    login = parts.netloc.rpartition("@")[0]
    if login:
        yield f"{login}@"
        user, colon, password = login.partition(":")
        if colon:
            yield unquote(login)  # what basic authentication encodes
        secret = password if colon else user
        alone += [secret, unquote(secret)]
    for text in filter(None, (parts.query, parts.fragment)):
        yield text
        alone += [value for name, value in parse_qsl(text) if "version" not in name.lower()]
    yield from (secret for secret in alone if len(secret) >= _SHORTEST)
