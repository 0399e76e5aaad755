"""Answers of a rollout server, checked: all that the protocol does not allow becomes an error.

The error is a `RolloutProtocolError` with what the server said, as far as that is safe to repeat.
"""

from __future__ import annotations

from typing import Any, TypeVar

import httpx
from attrs import field, frozen

from rollout._logs import printable
from rollout._redaction import Redactor
from rollout.codec import parse_json, structure
from rollout.errors import InvalidBodyError, RolloutProtocolError
from rollout.types import RolloutInitRequest, RolloutInitResponse

__all__ = ["AdmissionAnswer", "Admitted", "AnswerReader", "Busy", "Refused"]

T = TypeVar("T")

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LONGEST_DETAIL = 500
_LONGEST_TYPE = 100


@frozen
class Admitted:
    """An answer that admits a rollout (202).

    Attributes:
        response: The admission.
        sent_at: When the request was sent (trio time).
    """

    response: RolloutInitResponse
    sent_at: float

    @property
    def lease_deadline(self) -> float:
        """When the lease ends unless it is renewed: counted from when the request was sent."""
        return self.sent_at + self.response.polling_lease_timeout_sec


@frozen
class Busy:
    """An answer that puts a rollout off: the server has no room (429).

    Attributes:
        retry_after: When to ask again, as in a ``Retry-After`` header; ``None`` if it is missing.
        certain: Whether a rollout server says so: one that knows admission keys then proves that
            no request with the same key was admitted. A gateway's has no detail.
    """

    retry_after: str | None
    certain: bool = True


@frozen
class Refused:
    """Any other answer to a request for admission.

    Attributes:
        error: The error for the caller, with what the server said.
        certain: Whether it proves that nothing was admitted. A 503 does if it has a detail, as
            those of a rollout server have: one of a gateway may stand for a lost answer.
    """

    error: RolloutProtocolError
    certain: bool


AdmissionAnswer = Admitted | Busy | Refused


@frozen
class AnswerReader:
    """Reads the answers of one route.

    Attributes:
        route: The route, for errors.
        secrets: Texts that no error may repeat.
    """

    route: str
    secrets: tuple[str | None, ...] = field(repr=False)

    def read(self, response: httpx.Response, kind: type[T]) -> T:
        """Check that an answer is a 200 with a body of this type.

        Raises:
            RolloutProtocolError: It is anything else.
        """
        return self._structure(self.parse(response), kind, 200)

    def parse(self, response: httpx.Response) -> Any:
        """Check that an answer is a 200; return its parsed body.

        Raises:
            RolloutProtocolError: It is not, or the body is not JSON.
        """
        body = self._parse(response)
        if response.status_code != httpx.codes.OK:
            raise self._unexpected(response.status_code, 200, _detail(body))
        if isinstance(body, RolloutProtocolError):
            raise body
        return body

    def admission(
        self, response: httpx.Response, request: RolloutInitRequest, sent_at: float
    ) -> AdmissionAnswer:
        """Read the answer to a request for admission that was sent at a time."""
        body = self._parse(response)
        retry_after = response.headers.get("Retry-After")
        return self._admission_answer(response.status_code, body, retry_after, request, sent_at)

    def outcome(
        self, outcome: dict[str, Any], request: RolloutInitRequest, sent_at: float
    ) -> AdmissionAnswer:
        """Read one outcome of a batch, whose ``status_code`` is one of HTTP."""
        code = outcome["status_code"]
        body = outcome.get("admission") if code == httpx.codes.ACCEPTED else outcome
        retry_after = outcome.get("retry_after_sec")
        header = None if retry_after is None else str(retry_after)
        if code == httpx.codes.TOO_MANY_REQUESTS:
            return Busy(header)  # no gateway answers for one rollout of a batch
        return self._admission_answer(code, body, header, request, sent_at)

    def _admission_answer(
        self,
        status_code: int,
        body: Any,
        retry_after: str | None,
        request: RolloutInitRequest,
        sent_at: float,
    ) -> AdmissionAnswer:
        if status_code == httpx.codes.ACCEPTED:
            try:
                return Admitted(self._admission(body, request), sent_at)
            except RolloutProtocolError as error:
                return Refused(error, certain=False)
        detail = _detail(body)
        if status_code == httpx.codes.TOO_MANY_REQUESTS:
            return Busy(retry_after, certain=bool(detail))
        certain = httpx.codes.is_client_error(status_code) or (
            status_code == httpx.codes.SERVICE_UNAVAILABLE and bool(detail)
        )
        return Refused(self._unexpected(status_code, 202, detail), certain)

    def _admission(self, body: Any, request: RolloutInitRequest) -> RolloutInitResponse:
        if isinstance(body, RolloutProtocolError):
            raise body
        admission = self._structure(body, RolloutInitResponse, 202)
        self.expect_id(admission.rollout_id, request.rollout_id, 202)
        token = admission.polling_lease_token
        if not (token.isascii() and token.isprintable() and token == token.strip()):
            raise self.error(202, "with a lease token that no header can carry")
        return admission

    def expect_id(self, answered: str, asked: str, status_code: int) -> None:
        """Check that an answer is about the rollout that was asked about.

        Raises:
            RolloutProtocolError: It is not.
        """
        if answered != asked:
            raise self.error(status_code, "for a different rollout_id")

    def _parse(self, response: httpx.Response) -> Any:
        """Return the parsed body, or the error that it is not JSON, which may not matter."""
        try:
            return parse_json(response.content)
        except InvalidBodyError as error:
            kind = response.headers.get("Content-Type", "no content type")
            what = f"with an invalid body ({kind[:_LONGEST_TYPE]})"
            return self.error(response.status_code, what, str(error))

    def _structure(self, body: Any, kind: type[T], status_code: int) -> T:
        try:
            return structure(body, kind)
        except InvalidBodyError as error:
            raise self.error(status_code, "with an invalid body", str(error)) from None

    def _unexpected(self, status_code: int, expected: int, detail: str) -> RolloutProtocolError:
        what = f"{status_code}, not {expected}"
        if status_code in _REDIRECTS:
            what += " (redirects are never followed; check the url)"
        return self.error(status_code, what, detail)

    def error(self, status_code: int, what: str, detail: str = "") -> RolloutProtocolError:
        """Make an error of what an answer says, without any secret that it may repeat."""
        # Hidden before it is cut: half of a secret would be found by nobody.
        said = printable(self._hide(detail))[:_LONGEST_DETAIL]
        message = printable(self._hide(f"{self.route} answered {what}"))
        return RolloutProtocolError(
            f"{message}: {said}" if said else message, status_code=status_code
        )

    def _hide(self, text: str) -> str:
        text = Redactor(self.secrets).text(text)
        for secret in self.secrets:
            if secret:  # a very short one, too: a shredded message is better than a key
                text = text.replace(secret, "[redacted]")
        return text


def _detail(body: Any) -> str:
    """Read the detail of a refusal; of a list only places and messages: inputs may be secrets."""
    detail = body.get("detail") if isinstance(body, dict) else None
    if isinstance(detail, list):
        lines = [
            ".".join(str(part) for part in item.get("loc", [])) + f": {item.get('msg', '')}"
            for item in detail
            if isinstance(item, dict) and isinstance(item.get("loc", []), list)
        ]
        detail = "; ".join(lines)
    return detail if isinstance(detail, str) else ""
