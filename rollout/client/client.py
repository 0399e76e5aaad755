"""The client of a rollout server."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Collection,
    Hashable,
    Iterable,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import httpx
import trio

from rollout._checks import check_api_key, check_flag, check_number
from rollout._moved import moved_names
from rollout._tasks import sole_error
from rollout.client.admission import AdmissionNotices, Progress, WhenBusy, admit
from rollout.client.answers import Admitted
from rollout.client.bulk import Runner, run_many
from rollout.client.extensions import ServerExtensions
from rollout.client.finished import FinishedRollout, RolloutRetry
from rollout.client.groups import FirstSuccesses, RolloutGroup, first_successes, run_groups
from rollout.client.handle import RolloutHandle
from rollout.client.http import check_url, own_http_client
from rollout.client.idle import wait_until_idle
from rollout.client.polling import Poller
from rollout.client.replay import ReplayWindow
from rollout.client.trajectories import TrajectoryFetcher
from rollout.client.wire import Wire
from rollout.errors import (
    InvalidFieldError,
    NotOnTrioError,
    RolloutCancelTimeoutError,
    RolloutClientClosedError,
    RolloutClientEnteredError,
    RolloutClientNotEnteredError,
)
from rollout.trajectory import Trajectory
from rollout.types import (
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    MessageDict,
    RolloutInitRequest,
    RolloutResultResponse,
)

__all__ = ["RolloutClient"]

if not TYPE_CHECKING:
    __getattr__ = moved_names(__name__)

CANCEL_TIMEOUT_SEC = 5.0
_CLOSE_TIMEOUT_SEC = 2.0


_PAUSE_GRACE_SEC = 10.0
"""How long the answer to a pause may take beyond the time that it waits for calls."""


class RolloutClient:
    """Submits rollouts to a server and polls for their results.

    As an async context manager it owns a nursery in which handles are polled::

        async with RolloutClient(url="http://127.0.0.1:8000") as client:
            handle = await client.run_rollout_async(...)
            result = await handle

    Leaving the block waits for handles that still poll, as a nursery waits for its children.
    An exception in the block cancels them, and comes out as it is. If polling failed and
    nobody ever awaited that handle, the errors are raised at the end of the block, grouped;
    where the block itself raised, they are notes on its exception.

    Everything but `run_rollout_async` also works on a client that was not entered; close it
    with `aclose` then.

    Args:
        url: Base URL of the server. Credentials in it are sent as ``Authorization: Basic`` and
            kept out of `url`.
        http_client: Sends the requests; the caller closes it, and keeps it open until all
            handles are done. Give it a connection for every rollout that is polled at a time
            (`httpx.Limits`): polls that wait for one may time out, and httpx can lose
            connections when requests are cancelled while others wait. Without one the client
            makes its own, fit for long polls.
        admission_timeout_sec: Bounds each admission, requests and waits included, in seconds.
            It does not limit what follows. ``None`` asks for as long as it takes.
        api_key: Sent as ``Authorization: Bearer`` with every request. No redirect is ever
            followed, so it goes to no other place.
        feed: Whether an entered client asks for admissions in batches and follows all its
            rollouts through one streamed response, where the server offers that. It makes no
            difference but to speed.

    Raises:
        ValueError: The URL, the timeout or the key cannot be used; the message says why.
    """

    def __init__(
        self,
        *,
        url: str,
        http_client: httpx.AsyncClient | None = None,
        admission_timeout_sec: float | None = None,
        api_key: str | None = None,
        feed: bool = True,
    ) -> None:
        check_number("admission_timeout_sec", admission_timeout_sec, none=True)
        check_flag("feed", feed)
        key = check_api_key(api_key)
        self.url, credentials = check_url(url)
        if key is not None and credentials is not None:
            raise InvalidFieldError(
                "api_key", "cannot be sent along with the credentials in the url: leave one out"
            )
        self.admission_timeout_sec = admission_timeout_sec
        self._owns_http = http_client is None
        self._wire = Wire(self.url, http_client or own_http_client(self.url), key, credentials)
        self._nursery_manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None
        self._handles: set[RolloutHandle] = set()
        self._failed: list[RolloutHandle] = []
        self._handle_ended = trio.Event()
        self._wants_feed = feed
        self._extensions: ServerExtensions | None = None
        self._notices = AdmissionNotices()
        self._replay = ReplayWindow(self._wire)
        self._trajectories = TrajectoryFetcher(self._wire)
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "entered" if self._nursery else "open"
        count = sum(not handle.done() for handle in self._handles)
        polling = f", polling {count}" if count else ""
        return f"<RolloutClient {self.url} {state}{polling}>"

    @property
    def http_client(self) -> httpx.AsyncClient:
        """The HTTP client that sends the requests."""
        return self._wire.http

    # --- lifetime -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._check_usable()
        if self._nursery is not None:
            raise RolloutClientEnteredError("this client was entered already")
        self._nursery_manager = trio.open_nursery()
        self._nursery = await self._nursery_manager.__aenter__()
        if self._wants_feed:
            self._extensions = ServerExtensions(self._wire, self._nursery)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        nursery, manager = self._nursery, self._nursery_manager
        assert nursery is not None  # noqa: S101 - __aenter__ came before
        assert manager is not None  # noqa: S101
        if exc is not None:
            nursery.cancel_scope.cancel()
        elif self._extensions is not None:
            nursery.start_soon(self._stop_extensions_after_handles, self._extensions)
        outside: BaseException | None = None
        try:
            await manager.__aexit__(None, None, None)
        except (trio.Cancelled, BaseExceptionGroup) as error:
            # Handles keep their errors, so this came from outside: a cancellation, an interrupt.
            outside = sole_error(error)
        finally:
            self._nursery = self._nursery_manager = self._extensions = None
            await self._close()
        leaving = exc
        if outside is not None and (exc is None or not _is_cancellation(outside)):
            leaving = outside
        unseen = [failure for handle in self._failed if (failure := handle._unseen_failure)]  # noqa: SLF001
        self._failed.clear()
        message = f"polling failed for {len(unseen)} rollout(s) that nobody awaited"
        if leaving is None:
            if unseen:
                raise ExceptionGroup(message, unseen)
            return
        if unseen and _is_cancellation(leaving):
            # The scope that was cancelled takes its own part out; the failures remain.
            raise BaseExceptionGroup(message, [leaving, *unseen])
        for failure in unseen:
            leaving.add_note(f"a rollout that nobody awaited failed too: {failure!r}")
        if leaving is not exc:
            raise leaving

    async def _stop_extensions_after_handles(self, extensions: ServerExtensions) -> None:
        while self._handles:
            await self._handle_ended.wait()
        extensions.stop()

    async def aclose(self) -> None:
        """Cancel handles that still poll and close the client's own HTTP client.

        Calling it twice is fine. Calls that come later raise `RolloutClientClosedError`.
        """
        for handle in list(self._handles):
            handle.cancel()
        await self._close()
        await trio.lowlevel.checkpoint()

    async def _close(self) -> None:
        self._closed = True
        if self._owns_http:
            with trio.move_on_after(_CLOSE_TIMEOUT_SEC, shield=True):
                await self._wire.http.aclose()

    def _check_usable(self) -> None:
        if not trio.lowlevel.in_trio_task():
            raise NotOnTrioError(
                "RolloutClient runs on trio: start the program with trio.run(main), "
                "not with asyncio.run(main())"
            )
        if self._closed:
            raise RolloutClientClosedError("this client was closed")

    # --- rollouts -----------------------------------------------------------------------------

    async def run_rollout(
        self,
        initial_messages: list[MessageDict],
        chat_completions_url: str,
        rollout_id: str,
        llm_api_key: str | None = None,
        label: str | None = None,
        metadata: dict[str, Any] | None = None,
        grade: bool = True,
        agent_timeout_sec: float | None = None,
        grader_timeout_sec: float | None = None,
        extra_fields: dict[str, Any] | None = None,
        run: str | None = None,
        limits: dict[str, Any] | None = None,
    ) -> RolloutResultResponse:
        """Run one rollout and return its terminal result, whether success or failure.

        The arguments are the fields of `rollout.types.RolloutInitRequest`.

        Raises:
            InvalidFieldError: A field breaks its rule; nothing was sent.
            RolloutAdmissionTimeoutError: ``admission_timeout_sec`` ran out.
            RolloutProtocolError: The server answered outside of the protocol.
            RolloutPollTimeoutError: A result trickled in past the end of the lease.
            httpx.TransportError: A request failed, and the retries that it may have.

        Cancelling this sends nothing to the server: an admitted rollout runs on until its
        lease ends. Call `cancel_rollout` to end it at once.
        """
        return await self._run_own(
            RolloutInitRequest(
                initial_messages=initial_messages,
                label=label,
                metadata=metadata,
                rollout_id=rollout_id,
                chat_completions_url=chat_completions_url,
                llm_api_key=llm_api_key,
                grade=grade,
                agent_timeout_sec=agent_timeout_sec,
                grader_timeout_sec=grader_timeout_sec,
                extra_fields=extra_fields,
                run=run,
                limits=limits,
            )
        )

    async def _run_own(
        self, request: RolloutInitRequest, progress: Progress | None = None
    ) -> RolloutResultResponse:
        """Run a rollout whose trajectory may be fetched afterwards, whatever becomes of it."""
        progress = progress or Progress()
        try:
            return await self._run(request, progress)
        finally:
            self._trajectories.remember(progress.admission)

    async def _run(
        self,
        request: RolloutInitRequest,
        progress: Progress | None = None,
        when_busy: WhenBusy = "wait",
    ) -> RolloutResultResponse:
        progress = progress or Progress()
        extensions = self._extensions
        admitted = await self._admit(request, progress, when_busy)
        poller = Poller(self._wire, admitted, progress.hear)
        follow = Poller.run if extensions is None else extensions.follow
        result = await follow(poller)
        progress.body = poller.body
        return result

    async def run_rollout_async(
        self,
        initial_messages: list[MessageDict],
        chat_completions_url: str,
        rollout_id: str,
        llm_api_key: str | None = None,
        label: str | None = None,
        metadata: dict[str, Any] | None = None,
        grade: bool = True,
        agent_timeout_sec: float | None = None,
        grader_timeout_sec: float | None = None,
        extra_fields: dict[str, Any] | None = None,
        run: str | None = None,
        limits: dict[str, Any] | None = None,
    ) -> RolloutHandle:
        """Return a handle once the rollout is admitted; polling goes on in the background.

        Takes the arguments of `run_rollout` and raises what it raises until admission.

        Raises:
            RolloutClientNotEnteredError: The client was not entered, so it has no nursery.

        Cancelling this may leave an admitted rollout behind, which ends with its lease.
        """
        self._check_usable()
        if self._nursery is None:
            raise RolloutClientNotEnteredError(
                "run_rollout_async polls in the background, so it needs the client's nursery: "
                "use it inside 'async with RolloutClient(...) as client:' "
                "(run_rollout works without)"
            )
        admitted = await self._admit(
            RolloutInitRequest(
                initial_messages=initial_messages,
                label=label,
                metadata=metadata,
                rollout_id=rollout_id,
                chat_completions_url=chat_completions_url,
                llm_api_key=llm_api_key,
                grade=grade,
                agent_timeout_sec=agent_timeout_sec,
                grader_timeout_sec=grader_timeout_sec,
                extra_fields=extra_fields,
                run=run,
                limits=limits,
            )
        )
        self._check_usable()
        if self._nursery is None:
            raise RolloutClientClosedError("this client was left during the admission")
        self._trajectories.remember(admitted.response)
        handle = RolloutHandle(rollout_id)
        try:
            self._nursery.start_soon(self._poll, handle, admitted, name=f"poll {rollout_id}")
        except RuntimeError:  # the last handle has just ended, and with it the nursery
            raise RolloutClientClosedError("this client was closed during the admission") from None
        self._handles.add(handle)
        return handle

    async def _admit(
        self,
        request: RolloutInitRequest,
        progress: Progress | None = None,
        when_busy: WhenBusy = "wait",
    ) -> Admitted:
        self._check_usable()
        return await admit(
            self._wire.admit if self._extensions is None else self._extensions.admit,
            request,
            timeout_sec=self.admission_timeout_sec,
            replay=self._replay,
            progress=progress,
            notices=self._notices,
            when_busy=when_busy,
        )

    async def _poll(self, handle: RolloutHandle, admitted: Admitted) -> None:
        try:
            poller = Poller(self._wire, admitted, handle._observe)  # noqa: SLF001 - its own handle
            extensions = self._extensions
            follow = Poller.run if extensions is None else extensions.follow
            await handle._poll(follow, poller)  # noqa: SLF001
        finally:
            self._handles.discard(handle)
            self._handle_ended.set()
            self._handle_ended = trio.Event()
            # Those that were awaited since then need no keeping.
            self._failed = [
                failed
                for failed in (*self._failed, handle)
                if failed._unseen_failure is not None  # noqa: SLF001
            ]

    @asynccontextmanager
    async def run_rollouts(
        self,
        requests: Iterable[RolloutInitRequest] | AsyncIterable[RolloutInitRequest],
        *,
        max_in_flight: int,
        key: Callable[[RolloutInitRequest], Hashable] | None = None,
        max_in_flight_per_key: int | None = None,
        retry: RolloutRetry | None = None,
    ) -> AsyncGenerator[trio.MemoryReceiveChannel[FinishedRollout], None]:
        """Run many rollouts, and receive their outcomes in order of completion.

        Example::

            async with client.run_rollouts(requests, max_in_flight=256) as finished:
                async for request, outcome in finished:
                    ...

        The next request is pulled only when a place is free, so *requests* may be endless. One
        failure does not end the others: ``outcome`` is the terminal result, or the error that
        `run_rollout` raised. An exception of *requests* itself ends the block.

        Args:
            requests: The requests, an iterable or an async iterable.
            max_in_flight: How many may be in flight at a time, from admission to result.
            key: Sorts requests into groups, for *max_in_flight_per_key*.
            max_in_flight_per_key: How many of one group may be in flight at a time. Requests of
                full groups are set aside, up to 10,000 of an iterator, and others are pulled.
            retry: Which rollouts are run again, under a new id; none by default. A rollout keeps
                its place until then, and only its last attempt is handed over.

        Raises:
            ValueError: A limit is not a whole number from 1 up.

        Leaving the block, in whatever way, cancels what is left, on the server too: one cancel
        request, shielded and bounded, for what this block has admitted, and for admissions under
        way. Those are not started when they arrive, if the server is known to have
        ``admission-keys``; else such a rollout ends with its lease.
        """
        self._check_usable()
        async with run_many(
            self._runner(retry),
            requests,
            max_in_flight=max_in_flight,
            key=key,
            max_in_flight_per_key=max_in_flight_per_key,
        ) as finished:
            yield finished

    @asynccontextmanager
    async def run_groups(
        self,
        prompts: Iterable[RolloutInitRequest] | AsyncIterable[RolloutInitRequest],
        *,
        samples: int = 8,
        deadline_sec: float | None = None,
        min_samples: int | None = None,
        max_in_flight: int = 256,
        retry: RolloutRetry | None = None,
    ) -> AsyncGenerator[trio.MemoryReceiveChannel[RolloutGroup], None]:
        """Run several rollouts of each prompt, and receive groups in order of completion.

        Example::

            async with client.run_groups(prompts, samples=8, deadline_sec=600) as groups:
                async for group in groups:
                    rewards = [sample.reward for sample in group.samples]
                    print(len(group.failures), "failed", len(group.stragglers), "were too slow")

        Every prompt gets a group, and every rollout of it is in the group: with its sample, with
        its failure, or as a straggler. The next prompt is pulled when a place is free.

        Args:
            prompts: A request for each prompt. Its rollouts have its ``rollout_id`` with
                ``-0``, ``-1`` and so on behind it.
            samples: How many rollouts a prompt gets.
            deadline_sec: How long a group may take, in seconds, from when its first rollout
                starts. What has ended by then is kept; the rest is cancelled, on the server too.
            min_samples: How many samples are enough: the rest of the group is cancelled once it
                has them. By default all of its rollouts are waited for.
            max_in_flight: How many rollouts may be in flight at a time, of all groups.
            retry: Which rollouts are run again, under a new id; none by default.

        Raises:
            ValueError: A number is not a whole number from 1 up, or the deadline is not positive
                and finite.

        Leaving the block, in whatever way, cancels what is left, as `run_rollouts` does.
        """
        self._check_usable()
        async with run_groups(
            self._runner(retry),
            prompts,
            samples=samples,
            max_in_flight=max_in_flight,
            deadline_sec=deadline_sec,
            min_samples=min_samples,
        ) as groups:
            yield groups

    async def first_successes(
        self,
        requests: Iterable[RolloutInitRequest],
        k: int,
        *,
        max_in_flight: int | None = None,
        retry: RolloutRetry | None = None,
    ) -> FirstSuccesses:
        """Run a group of rollouts until *k* of them have succeeded; cancel the rest.

        Args:
            requests: The group.
            k: How many successes are wanted.
            max_in_flight: How many may be in flight at a time; all of them by default.
            retry: Which rollouts are run again, under a new id; none by default.

        Returns:
            At most *k* finished rollouts, in order of completion; fewer if not enough succeed.
            ``failures`` of this list has those that ended without success.

        Raises:
            ValueError: A number is not a whole number from 1 up.
        """
        self._check_usable()
        return await first_successes(self._runner(retry), requests, k, max_in_flight=max_in_flight)

    def _runner(self, retry: RolloutRetry | None) -> Runner:
        async def cancel(rollouts: dict[str, str | None]) -> None:
            keys = {name: key for name, key in rollouts.items() if key is not None}
            if not self._replay.length_sec:
                # By its id alone, what is on its way could be somebody else's rollout.
                rollouts, keys = {name: None for name in rollouts if name not in keys}, {}
            if rollouts:
                await self.cancel_rollouts(ids=list(rollouts), admission_keys=keys)

        return Runner(self._run_own, cancel, retry)

    async def fetch_trajectory(self, rollout_id: str) -> Trajectory:
        """Return the trajectory of a rollout that this client has run and that has ended.

        Example::

            trajectory = await client.fetch_trajectory(result.rollout_id)
            for call in trajectory.calls:
                print(call.prompt_token_ids, call.completion_token_ids, call.logprobs)

        The client remembers the leases of the last 65,536 rollouts that it has run, in whatever
        way, also after their handles have ended. The server has a trajectory for as long as the
        result can be polled, if its backend keeps files. Of a rollout that was run again
        (`RolloutRetry`), the id is that of the result.

        Raises:
            TrajectoryUnavailableError: The rollout has not ended, is unknown or forgotten, nothing
                was kept, or the server does not hand out trajectories.
            TrajectoryError: What the server has breaks a rule of the format.
            RolloutProtocolError: The server answered outside of the protocol.
            httpx.TransportError: The request failed, and the retries that it may have.

        Cancelling this changes nothing.
        """
        self._check_usable()
        return await self._trajectories.fetch(rollout_id)

    async def cancel_rollout(self, rollout_id: str) -> CancelRolloutsResponse:
        """Ask the server to stop one rollout; asking again is fine.

        The answer acknowledges the request; the terminal result follows once the server has
        cleaned up, so keep polling for it.

        Raises:
            RolloutCancelTimeoutError: Five seconds of wall clock were not enough, waiting for
                a connection included. The server may have received the request all the same.
            RolloutProtocolError: The server answered outside of the protocol.
            httpx.TransportError: The request failed; it is not sent again.
        """
        return await self.cancel_rollouts(ids=[rollout_id])

    async def cancel_rollouts(
        self,
        *,
        ids: list[str] | None = None,
        prefix: str | None = None,
        all: bool = False,
        admission_keys: dict[str, str] | None = None,
    ) -> CancelRolloutsResponse:
        """Ask the server to stop many rollouts: by ids, by prefix, or all of them.

        Args:
            ids: These ids.
            prefix: Every id that starts with this.
            all: Every rollout.
            admission_keys: Admission keys by id, of rollouts whose admission may not have
                arrived yet; a server that announces ``admission-keys`` does not start them then,
                and leaves rollouts of these ids alone that have other keys.

        Raises:
            ValueError: Not exactly one of the three is given, or one has the wrong type.

        Otherwise as `cancel_rollout`.
        """
        self._check_usable()
        given: Any = ids
        if isinstance(given, Collection) and not isinstance(given, str):
            given = list(given)
        wanted = cast("list[str] | None", given)  # the request refuses what is something else
        request = CancelRolloutsRequest(
            ids=wanted, prefix=prefix, all=all, admission_keys=admission_keys or None
        )
        if request.selectors != 1:
            raise InvalidFieldError("ids", "or prefix or all: give exactly one of the three")
        with trio.move_on_after(CANCEL_TIMEOUT_SEC):
            return await self._wire.cancel(request, timeout_sec=CANCEL_TIMEOUT_SEC)
        raise RolloutCancelTimeoutError(
            f"the server did not answer a cancel request within {CANCEL_TIMEOUT_SEC:g} s; "
            "it may have received it"
        )

    # --- the server ---------------------------------------------------------------------------

    async def health(self) -> dict[str, Any]:
        """Return the payload of ``GET /health``.

        Raises:
            RolloutProtocolError: The server answered outside of the protocol.
            httpx.TransportError: The request failed.
        """
        self._check_usable()
        return await self._wire.health()

    async def policy(self) -> dict[str, Any]:
        """Return the state of the policy behind the server's model gateway.

        Returns:
            ``paused``, ``version``, and ``calls_in_flight``. Of the front of a pool also
            ``workers``: their ``total``, and how many are ``current``, which have this state.

        Raises:
            RolloutProtocolError: The server has no gateway, or answered outside of the protocol.
            httpx.TransportError: The request failed.
        """
        self._check_usable()
        return await self._wire.policy()

    async def pause_policy(
        self, *, mode: Literal["drain", "abort"] = "drain", timeout_sec: float = 60.0
    ) -> dict[str, Any]:
        """Hold back the calls of all agents to their model, and return the state as `policy` does.

        The answer comes once no call is in flight, or the time is up. A call that comes
        meanwhile waits until `resume_policy`, within the gateway's bound.

        Args:
            mode: ``drain`` lets calls in flight come to their end. ``abort`` cancels them; they
                are sent again afterwards, but for streams that have begun, which end with an
                error.
            timeout_sec: How long to wait for the calls in flight, in seconds. The pause goes on
                afterwards.

        Cancelling this may leave the policy paused.

        Raises:
            RolloutProtocolError: The server has no gateway, or answered outside of the protocol.
            httpx.TransportError: The request failed; it may have arrived.
        """
        self._check_usable()
        return await self._wire.policy(
            "pause",
            {"mode": mode, "timeout_sec": timeout_sec},
            timeout_sec=timeout_sec + _PAUSE_GRACE_SEC,
        )

    async def resume_policy(self, *, version: int | None = None) -> dict[str, Any]:
        """Send the calls of agents again, and return the state as `policy` does.

        Args:
            version: The new version of the policy, a whole number, which calls are stamped with.

        Raises:
            RolloutProtocolError: The server has no gateway, or answered outside of the protocol.
            httpx.TransportError: The request failed; it may have arrived.
        """
        self._check_usable()
        return await self._wire.policy("resume", {"version": version})

    async def wait_idle(
        self,
        *,
        timeout_sec: float = 120,
        poll_interval_sec: float = 1,
        process_id: str | None = None,
    ) -> dict[str, Any]:
        """Wait until the server has no active rollout; return that health payload.

        This observes; it does not stop new admissions.

        Args:
            timeout_sec: How long to wait, in seconds.
            poll_interval_sec: How long between two looks, in seconds.
            process_id: The server process that is meant, from an earlier health payload.
                Without it, the first one that answers.

        Raises:
            RolloutIdleTimeoutError: The time ran out (a `TimeoutError`). Until then transport
                errors and HTTP 408, 429, 500, 502, 503 and 504 are waited out.
            RolloutProtocolError: Another process answered, or the server reports no
                lifecycle, or refused the request.
            ValueError: A time is not positive and finite.
        """
        self._check_usable()
        return await wait_until_idle(
            self._wire,
            timeout_sec=timeout_sec,
            poll_interval_sec=poll_interval_sec,
            process_id=process_id,
        )


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)
