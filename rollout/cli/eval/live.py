"""The page of ``rollout eval run --live``: the report of a run while it fills."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import trio
from quart import Response, abort, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from rollout._files.atomic import reason_of
from rollout._http import is_loopback_host
from rollout._tasks import background_tasks, sole_error
from rollout.cli.eval.progress import Speed, rate_text
from rollout.cli.failures import CommandError
from rollout.codec import dump_json
from rollout.demo.chat import chat_server
from rollout.errors import EvaluationError, RolloutServerError
from rollout.evaluation import EvaluationRun
from rollout.evaluation.folder.layout import REPORT, TRAJECTORIES
from rollout.evaluation.report.live import LiveReport
from rollout.server.binding import bound_socket

__all__ = ["LivePage", "live_page"]

_LEAST_SEC = 1.0
_SHARE = 0.1
"""So much of a processor at most goes into updates of the page."""

_LOOKER_SEC = 5.0
"""A page that has not asked for so long was closed; an open one asks every second."""

_LINGER_SEC = 15.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
_HTML = "text/html; charset=utf-8"
_WAITING = (
    "<!doctype html><meta http-equiv=refresh content=1><title>evaluation</title>"
    "<p>The run is getting ready."
)


class LivePage:
    """What pages of a run ask for, and who looks at one.

    Nothing is read for a page while nobody looks.
    """

    def __init__(self) -> None:
        self._token = secrets.token_hex(8)
        self._run: EvaluationRun | None = None
        self._report: LiveReport | None = None
        self._speed: Speed | None = None
        self._over: str | None = None
        self._trouble: str | None = None
        self._lookers: dict[str, float] = {}
        self._asked = trio.Event()
        self._left = trio.Event()
        self._ended = trio.Event()

    def begin(self, run: EvaluationRun) -> None:
        """Follow a run."""
        self._run = run
        self._report = LiveReport(run.folder, run.manifest)
        self._speed = Speed(trio.current_time(), run.progress.settled)

    def move(self) -> None:
        """Note that an attempt has ended."""
        if self._run is not None and self._speed is not None:
            self._speed.move(trio.current_time(), self._run.progress.settled)

    async def keep_current(self) -> None:
        """Read for the pages what is new, as long as somebody asks; until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            again_at = trio.current_time() + _LEAST_SEC
            busy_sec = await self._update()
            await trio.sleep_until(max(again_at, again_at - _LEAST_SEC + busy_sec / _SHARE))

    async def linger(self) -> None:
        """Say that the run is over, and wait for a moment until open pages know."""
        if self._run is None or self._report is None:
            await trio.lowlevel.checkpoint()
            return
        if self._looking():
            await self._update()
        self._over = "complete" if self._run.complete else "stopped"
        self._ended.set()
        with trio.move_on_after(_LINGER_SEC):
            while self._looking():
                self._left = trio.Event()
                with trio.move_on_after(_LOOKER_SEC):
                    await self._left.wait()

    def close(self) -> None:
        """Remove what was kept for the pages."""
        if self._report is not None:
            self._report.close()

    def app(self) -> QuartTrio:
        """Build the application that answers pages."""
        app = QuartTrio("rollout.cli.eval.live", static_folder=None)
        app.before_request(_check_host)
        app.errorhandler(HTTPException)(_refuse)
        app.add_url_rule("/", view_func=self._get_page)
        app.add_url_rule("/news", view_func=self._get_news)
        app.add_url_rule("/attempt/<int:row>-<int:attempt>", view_func=self._get_attempt)
        app.add_url_rule("/trajectories/<name>", view_func=self._get_trajectory)
        app.add_url_rule("/report.html", view_func=self._get_report)
        app.add_url_rule("/favicon.ico", view_func=_nothing)
        app.add_url_rule("/bye", view_func=self._bye)
        return app

    async def _get_page(self) -> Response:
        self._asked.set()
        await trio.lowlevel.checkpoint()
        body = b"" if self._report is None else self._report.page
        return Response(body or _WAITING, headers=_HEADERS, content_type=_HTML)

    async def _get_news(self) -> Response:
        report, start = self._report, request.args.get("from", type=int)
        if report is None or not report.page or start is None or start < 0:
            await trio.lowlevel.checkpoint()
            abort(404, "there is nothing yet")
        self._asked.set()
        self._lookers[_looker()] = trio.current_time()
        # Here, since browsers slow the timers of hidden pages down.
        with trio.move_on_after(_LEAST_SEC if "wait" in request.args else 0):
            await self._ended.wait()
        version = report.version
        rows, more = report.rows(start)
        state = {**self._state(), "version": version, "next": start + len(rows), "more": more}
        return Response(dump_json(state) + b"\n" + rows, headers=_HEADERS)

    async def _get_attempt(self, row: int, attempt: int) -> Response:
        if self._report is None:
            await trio.lowlevel.checkpoint()
            abort(404, "there is nothing yet")
        try:
            found = await trio.to_thread.run_sync(self._report.entry, row, attempt)
        except (EvaluationError, OSError) as error:
            abort(503, str(error))
        if found is None:
            abort(404, "this attempt has not ended")
        return Response(found, headers=_HEADERS, content_type="application/json")

    async def _get_trajectory(self, name: str) -> Response:
        """Return the file of a conversation, whose name has no folder in it."""
        if self._run is None or "\\" in name or ".." in name:
            await trio.lowlevel.checkpoint()
            abort(404, "there is no such file")
        try:
            body = await trio.Path(self._run.folder / TRAJECTORIES / name).read_bytes()
        except OSError as error:
            abort(404, reason_of(error))
        return Response(body, headers=_HEADERS, content_type="application/json")

    async def _get_report(self) -> Response:
        if self._run is None or self._over != "complete":
            await trio.lowlevel.checkpoint()
            abort(404, "the report is written when the run is complete")
        body = await trio.Path(self._run.folder / REPORT).read_bytes()
        return Response(body, headers=_HEADERS, content_type=_HTML)

    async def _bye(self) -> Response:
        """A page has all that it needs of a run that is over."""
        await trio.lowlevel.checkpoint()
        self._lookers.pop(_looker(), None)
        self._left.set()
        return Response("", headers=_HEADERS)

    def _state(self) -> dict[str, Any]:
        assert self._run is not None  # noqa: S101 - begun, like the report
        assert self._speed is not None  # noqa: S101
        progress, now = self._run.progress, trio.current_time()
        rate = self._speed.rate(now)
        return {
            "run": self._token,
            "over": self._over,
            "trouble": self._trouble,
            "total": progress.total,
            "settled": progress.settled,
            "in_flight": progress.in_flight,
            "rate": None if rate is None else rate_text(rate),
            "remaining_sec": self._speed.remaining_sec(now, progress.total),
        }

    async def _update(self) -> float:
        """Read what is new; return how many seconds of a processor that took."""
        if self._report is None:
            await trio.lowlevel.checkpoint()
            return 0.0
        self._trouble, busy_sec = await trio.to_thread.run_sync(_updated, self._report)
        return busy_sec

    def _looking(self) -> bool:
        now = trio.current_time()
        return any(now - asked < _LOOKER_SEC for asked in self._lookers.values())


def _updated(report: LiveReport) -> tuple[str | None, float]:
    began, trouble = time.thread_time(), None
    try:
        report.update()
    except (EvaluationError, OSError) as error:
        trouble = str(error)
    return trouble, time.thread_time() - began


def _looker() -> str:
    return str(request.args.get("page", ""))[:64]


async def _check_host() -> None:
    """Refuse other names of this machine: pages of the web may lead theirs here."""
    await trio.lowlevel.checkpoint()
    if not is_loopback_host(urlsplit(f"//{request.host}").hostname or ""):
        abort(421, "this page is for the machine that it runs on, by its address")


async def _nothing() -> Response:
    await trio.lowlevel.checkpoint()
    return Response("", 204, _HEADERS)


async def _refuse(error: HTTPException) -> Response:
    await trio.lowlevel.checkpoint()
    text = error.description or error.name
    return Response(text, error.code, _HEADERS, content_type="text/plain; charset=utf-8")


@asynccontextmanager
async def live_page(bind: str) -> AsyncGenerator[tuple[LivePage, str], None]:
    """Serve the page of a run for the length of the block, and until open pages know of its end.

    Args:
        bind: Where to listen.

    Raises:
        CommandError: Nothing can listen there.
    """
    try:
        with bound_socket(bind):
            pass  # a name for the error; the server binds by itself
    except RolloutServerError as error:
        raise CommandError(
            f"{error}; choose another address with --live-bind (port 0 takes a free one)"
        ) from None
    page = LivePage()
    try:
        async with chat_server(page.app(), bind) as url, background_tasks(page.keep_current):
            try:
                yield page, url
            finally:
                with trio.CancelScope(shield=True):
                    await page.linger()
    except BaseExceptionGroup as group:
        raise sole_error(group) from None
    finally:
        page.close()
