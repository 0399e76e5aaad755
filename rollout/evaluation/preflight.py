"""One call of the model before a run begins, so that none begins against a dead endpoint."""

from __future__ import annotations

import httpx

from rollout._endpoint_failures import endpoint_failure
from rollout._logs import get_logger
from rollout._redaction import public_url, redact
from rollout.context import RolloutContext
from rollout.errors import EvaluationError, IntegrationError
from rollout.evaluation.attempts import Credentials
from rollout.evaluation.config import EvaluationConfig
from rollout.integrations.chat import chat

__all__ = ["check_endpoint"]

logger = get_logger(__name__)

_ANSWER_SEC = 60.0
_NOT_FOUND = 404
_TOO_MANY = 429


async def check_endpoint(config: EvaluationConfig, credentials: Credentials) -> None:
    """Ask the model for one token.

    An endpoint that takes this call for a wrong one is alive, and so is one that has too much to
    do, which is logged. Without a model's name, an unknown model says nothing.

    Raises:
        EvaluationError: Nobody listens or answers there, the key or the model is refused, or the
            endpoint is broken.
    """
    named = config.chat.model is not None
    context = RolloutContext(chat_completions_url=config.chat.url, api_key=credentials.chat)
    try:
        with context:
            await chat(
                [{"role": "user", "content": "Hello"}],
                model=config.chat.model or "policy",
                record=False,
                timeout_sec=_ANSWER_SEC,
                max_tokens=1,
            )
    except (IntegrationError, httpx.HTTPError, httpx.InvalidURL) as error:
        status = error.status_code if isinstance(error, IntegrationError) else None
        text = redact(str(error) or type(error).__name__, credentials.secrets)
        if status == _TOO_MANY:
            logger.warning("%s; the run begins all the same", text)
        elif endpoint_failure(error) is not None and (named or status != _NOT_FOUND):
            raise EvaluationError(
                f"a test call of the model at {public_url(config.chat.url)} failed: {text}. "
                "Nothing was started; if only the rollout server can reach the model, start "
                "with --no-check"
            ) from error
