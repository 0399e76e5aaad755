"""Admission keys: what makes an admission safe to repeat after its answer was lost.

Theory of operation: a caller draws a key and sends it with its request. The lease token of such
a rollout is derived from the key, and the request is kept as a digest. So a request that comes
again is recognised and gets its token again, and neither key, token nor request is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import marshal
import operator
from base64 import urlsafe_b64encode

import attrs

from rollout.types import RolloutInitRequest

__all__ = ["cancelled_digest", "lease_token", "request_digest"]

_MARSHAL_VERSION = 2
_members = operator.attrgetter(*sorted(attrs.fields_dict(RolloutInitRequest)))


def lease_token(secret: bytes, rollout_id: str, admission_key: str) -> str:
    """Derive the lease token of a rollout from its admission key and the server's secret."""
    digest = _key_digest(secret, "lease-token", rollout_id, admission_key)
    return urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def cancelled_digest(secret: bytes, rollout_id: str, admission_key: str) -> bytes:
    """Return what stands for the digest of a request that was cancelled before it arrived."""
    return _key_digest(secret, "cancelled", rollout_id, admission_key)


def _key_digest(secret: bytes, purpose: str, rollout_id: str, admission_key: str) -> bytes:
    # An id holds no NUL, so no other id and key give the same text.
    text = f"{purpose}\0{rollout_id}\0{admission_key}"
    return hmac.digest(secret, text.encode("utf-8", errors="surrogatepass"), hashlib.sha256)


def request_digest(secret: bytes, request: RolloutInitRequest) -> bytes:
    """Return a keyed digest of a request: of its known fields, the admission key included.

    Keyed, since a plain digest would let its reader try out guesses at what is secret in it.
    """
    # Of an older format: it writes equal values alike, however they are shared, and does not
    # escape, so that a large request takes half as long as JSON would.
    text = marshal.dumps(_members(request), _MARSHAL_VERSION)
    return hmac.digest(secret, b"request\0" + text, hashlib.sha256)
