"""TLS contexts of clients, from what the environment names."""

from __future__ import annotations

import os
import ssl

import httpx

from rollout.errors import InvalidFieldError

__all__ = ["tls_context"]

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""Variables that name trusted certificates; the first that is set counts."""
_KEY_LOG = "SSLKEYLOGFILE"


def tls_context(url: httpx.URL | str) -> ssl.SSLContext:
    """Return what verifies the server at a URL; for plain http, one that trusts nobody.

    Raises:
        InvalidFieldError: A file that the environment names cannot be used.
    """
    if httpx.URL(url).scheme == "http":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        if error.filename is not None and error.filename == os.environ.get(_KEY_LOG):
            reason = f"names a file that cannot be written: {error.strerror}"
            raise InvalidFieldError(_KEY_LOG, reason) from error
        named = next((name for name in _CERTIFICATES if os.environ.get(name)), "the system")
        raise InvalidFieldError(
            named, f"names certificates that cannot be read: {error}"
        ) from error
