"""Why a server does not answer, in words of the connection and not of the library.

An error of httpx often has no text of its own: what went wrong stands at the end of the chain
of its causes.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator

__all__ = ["why_unreachable"]

_RUNNING = "is a rollout server running there?"
_PLAIN = "is a rollout server running there, and without TLS? If it has TLS, say https://"
_NO_TLS = "it does not speak TLS; say http://"
_UNTRUSTED = (
    "name a file with the certificate of its authority (PEM) in the environment variable "
    "SSL_CERT_FILE"
)
_OTHER_NAME = "use the name that its certificate was made for"
_NEEDS_CERTIFICATE = (
    "it asks for a client certificate, which only a program can show: "
    "RolloutClient(http_client=...)"
)

_X509_V_ERR_HOSTNAME_MISMATCH = 62
_X509_V_ERR_IP_ADDRESS_MISMATCH = 64


def why_unreachable(error: BaseException) -> tuple[str, str]:
    """Say what a transport error comes from, and what to do.

    Args:
        error: The error as httpx raises it.

    Returns:
        The reason and the advice, neither of them with a full stop.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            other = {_X509_V_ERR_HOSTNAME_MISMATCH, _X509_V_ERR_IP_ADDRESS_MISMATCH}
            advice = _OTHER_NAME if cause.verify_code in other else _UNTRUSTED
            return f"its certificate is refused: {cause.verify_message}", advice
        if isinstance(cause, ssl.SSLError):
            reason = cause.reason or ""
            advice = _NEEDS_CERTIFICATE if "CERTIFICATE_REQUIRED" in reason else _RUNNING
            if reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"}:
                advice = _NO_TLS
            return f"TLS: {reason.lower().replace('_', ' ') or cause}", advice
    silent = type(error).__name__ == "RemoteProtocolError"
    return _deepest(error), _PLAIN if silent else _RUNNING


def _deepest(error: BaseException) -> str:
    """Name *error*, with the text nearest to the system that is there."""
    texts = [
        _text(cause)
        for cause in (error, *_causes(error))
        if not isinstance(cause, BaseExceptionGroup)
    ]
    said = [text for text in texts if text and not text.endswith("()")]
    return type(error).__name__ + (f": {said[-1]}" if said else "")


def _text(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return str(error)
    if error.errno is not None and error.errno > 0:  # below are those of name resolution
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Follow the causes; of several attempts at a connection, the first stands for all."""
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or cause.__context__
