"""Failures of commands: one line on stderr that says what to do, and an exit code.

Expected errors, be they of this library, of httpx or of click, never show a traceback.
Anything else is a fault of the program, and does.
"""

from __future__ import annotations

import errno
import os
import signal
import ssl
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import trio
from attrs import frozen

from rollout._files.atomic import reason_of
from rollout._tasks import sole_error
from rollout.cli.text import one_line
from rollout.errors import (
    EvaluationStoppedError,
    RolloutAdmissionTimeoutError,
    RolloutError,
    RolloutIdleTimeoutError,
    RolloutProtocolError,
)

__all__ = [
    "EXIT_FAILED",
    "EXIT_FORCED",
    "EXIT_USAGE",
    "CommandError",
    "Failure",
    "explain",
    "force_exit",
    "interrupted",
    "last_place",
    "lost_output",
    "run_async",
    "why_unreachable",
]

EXIT_FAILED = 1
"""The rollout ended otherwise than with success, the evaluation was stopped, the server did not
become idle, or what came of it could not be written."""

EXIT_USAGE = 2
"""Wrong use, or no usable answer from the server."""

EXIT_FORCED = 3
"""``rollout serve`` had to end executions that did not stop, and the process with them."""

_SIGNAL_BASE = 128

_FOREIGN = (
    "<frozen ",
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

_ELSEWHERE = "is this the base URL of a rollout server?"
_MOVED = "redirects are not followed; give the URL that this one leads to"
_ADVICE = {
    301: _MOVED,
    302: _MOVED,
    307: _MOVED,
    308: _MOVED,
    401: "name the variable that holds the server's key with --api-key-env",
    403: "another caller holds this rollout's lease",
    404: _ELSEWHERE,
    405: _ELSEWHERE,
    409: "take another --id",
    413: "send a smaller request",
    500: "the server's log says more",
    501: _ELSEWHERE,
    502: "the gateway in front of the server does not reach it",
    503: "it is shutting down or has not started; try again later",
    504: "the gateway in front of the server waits for less long than a poll takes",
}


@frozen
class Failure:
    """How a command ends when it does not succeed.

    Attributes:
        line: What happened and what to do, in one line.
        exit_code: The exit code of the process.
    """

    line: str
    exit_code: int


class CommandError(click.ClickException):
    """A command cannot go on; its message is the one line that the user sees.

    Attributes:
        code: The exit code of the process.
    """

    def __init__(self, message: str, *, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.code = exit_code


def interrupted(number: int, note: str = "") -> CommandError:
    """Build the end of a command that a signal ended."""
    name = signal.Signals(number).name
    return CommandError(
        f"interrupted by {name}" + (f"; {note}" if note else ""), exit_code=_SIGNAL_BASE + number
    )


def force_exit(number: int, note: str) -> NoReturn:
    """End the process at once, after a signal that came while it was tidying up."""
    name = signal.Signals(number).name
    click.echo(f"rollout: {one_line(f'interrupted again by {name}; {note}')}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_SIGNAL_BASE + number)


def explain(error: BaseException) -> Failure | None:
    """Return the line and exit code of an expected error, ``None`` for any other."""
    plain = sole_error(error)
    if isinstance(plain, BaseExceptionGroup):
        # Siblings that failed for the same reason: the first speaks for all.
        known = [explain(inner) for inner in plain.exceptions]
        return None if None in known else known[0]
    if lost_output(plain):
        return Failure(f"cannot write the output: {reason_of(plain)}", EXIT_FAILED)
    failure = _of_click(plain) or _of_rollout(plain) or _of_httpx(plain)
    if failure is None:
        return None
    return Failure(one_line(failure.line), failure.exit_code)


def lost_output(error: BaseException | None) -> bool:
    """Whether *error* says that what stdout leads to takes no more."""
    return isinstance(error, OSError) and error.errno in {errno.EPIPE, errno.ENOSPC, errno.EIO}


def _of_click(error: BaseException) -> Failure | None:
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return Failure("interrupted", _SIGNAL_BASE + signal.SIGINT)
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "rollout"
        return Failure(f"{error.format_message().rstrip('.')} (see {path} --help)", EXIT_USAGE)
    if isinstance(error, click.ClickException):
        code = error.code if isinstance(error, CommandError) else EXIT_USAGE
        return Failure(error.format_message(), code)
    return None


def _of_rollout(error: BaseException) -> Failure | None:
    if isinstance(error, EvaluationStoppedError):
        return Failure(str(error), EXIT_FAILED)
    if isinstance(error, RolloutIdleTimeoutError):
        return Failure(f"{error}; wait longer with --timeout-sec", EXIT_FAILED)
    if isinstance(error, RolloutAdmissionTimeoutError):
        return Failure(f"{error}; wait longer with --admission-timeout-sec", EXIT_USAGE)
    if isinstance(error, RolloutProtocolError):
        advice = _ADVICE.get(error.status_code)
        return Failure(f"{error}; {advice}" if advice else str(error), EXIT_USAGE)
    if isinstance(error, RolloutError):
        return Failure(str(error), EXIT_USAGE)
    return None


def _of_httpx(error: BaseException) -> Failure | None:
    httpx: Any = sys.modules.get("httpx")  # a command that never sent anything has not loaded it
    if httpx is None:
        return None
    if isinstance(error, httpx.InvalidURL):
        return Failure(f"the URL cannot be used: {error}", EXIT_USAGE)
    if isinstance(error, httpx.TransportError):
        where = "the server"
        request: Any = getattr(error, "_request", None)
        if request is not None:
            url = request.url
            where = f"{url.scheme}://{url.netloc.decode('ascii', 'replace').rpartition('@')[2]}"
        reason, advice = why_unreachable(error)
        return Failure(f"no answer from {where} ({reason}); {advice}", EXIT_USAGE)
    return None


def last_place(error: BaseException) -> str:
    """Return the place in the user's code that raised *error*, as ``" (app.py, line 3)"``.

    Frames of this library, of installed packages and of Python itself are passed over. Empty
    if nothing is left, or if the message says it already.
    """
    if isinstance(error, SyntaxError):
        return ""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_FOREIGN)
    ]
    return f" ({places[-1][0]}, line {places[-1][1]})" if places else ""


def run_async(function: Any, *args: Any) -> Any:
    """Run an async function to its end, as a command's body.

    Ctrl-C reaches it at a checkpoint only, so that it never tears a task apart in between.
    """
    return trio.run(function, *args, restrict_keyboard_interrupt_to_checkpoints=True)


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
    """Explain a transport error and what to do about it.

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
