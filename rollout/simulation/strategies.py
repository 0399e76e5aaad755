"""Hypothesis strategies for rollouts, networks and servers, for property tests of a harness.

Needs Hypothesis (``pip install "trio-rollout[simulation]"``); the rest of `rollout.simulation`
does not. Everything is drawn as what it differs in from the default, so it shrinks to what a
person would write down: the shortest list, the rollout that is nothing special, the fate in
which nothing goes wrong, the server with its defaults, and whole seconds::

    @given(plans=workloads(), plan=fault_plans())
    def test_no_invariant_breaks(plans, plan):
        assert not simulate_workload(0, faults="none", plans=plans, plan=plan).violations

Times are drawn on the borders of a server more often than chance would: exactly the result
wait, the read timeout of a poll, the lease, the retention, and the moments around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from attrs import evolve

from rollout.codec import MAX_JSON_DEPTH, dump_json, dump_request, parse_json
from rollout.rules.retry import RESULT_READ_GRACE_SEC
from rollout.server import ShutdownBudget
from rollout.simulation.faults import GATEWAY_BODIES, Fate, Fault, ScriptedFaults
from rollout.simulation.workload import Caller, Course, RolloutPlan
from rollout.simulation.world import ServerOptions
from rollout.types import RolloutInitRequest
from rollout.types._fields import MAX_QUOTED_ID_LENGTH

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "rollout.simulation.strategies needs Hypothesis; install it with "
        'pip install "trio-rollout[simulation]"',
        name=missing.name,
    ) from missing

__all__ = [
    "durations",
    "fates",
    "fault_plans",
    "latencies",
    "request_bodies",
    "requests",
    "rollout_ids",
    "rollout_plans",
    "server_options",
    "workloads",
]

_LONGEST_SEC = 1000.0
_LONGEST_LATENCY_SEC = 10.0
_SHORT_SEC = 20
_MOST_STEPS = 25
_DEFAULTS = ServerOptions()


def _changes(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw values for some of the fields, none at best.

    Hypothesis deletes runs of at most five choices when it shrinks. Drawn like this, a thing
    that is nothing special costs one, and each of its peculiarities about four, so all that does
    not matter goes; a strategy that draws every field of a list's items could not lose an item.
    """
    change = st.one_of(*(st.tuples(st.just(name), values) for name, values in fields.items()))
    return st.lists(change, max_size=len(fields)).map(dict)


# --- timings ------------------------------------------------------------------------------------


def _around(moment: float) -> tuple[float, ...]:
    """Return a moment and its neighbours, a millisecond and one float to either side."""
    return (
        moment,
        moment + 0.001,
        max(0.0, moment - 0.001),
        math.nextafter(moment, math.inf),
        max(0.0, math.nextafter(moment, -math.inf)),
    )


def _borders(options: ServerOptions) -> list[float]:
    """Return the times at which something changes on a server and in its clients."""
    wait = options.result_wait_timeout_sec
    moments = (wait, wait + RESULT_READ_GRACE_SEC, options.polling_lease_timeout_sec)
    return [near for moment in (*moments, options.result_retention_sec) for near in _around(moment)]


def durations(
    *, options: ServerOptions | None = None, longest_sec: float = _LONGEST_SEC
) -> st.SearchStrategy[float]:
    """Seconds that something takes, from 0 up.

    Args:
        options: The server whose borders are drawn; the default one if left out: the result
            wait of 30 s, the read timeout of 40 s, the lease of 120 s, the retention of 900 s.
        longest_sec: No duration is longer.
    """
    borders = [near for near in _borders(options or _DEFAULTS) if near <= longest_sec]
    whole = math.floor(longest_sec) + 1
    short = min(whole, _SHORT_SEC)

    def pick(index: int) -> float:
        if index < whole:
            return float(index)
        index, other = divmod(index - whole, 2)
        return float(index % short) if other or not borders else borders[index % len(borders)]

    # One choice for all of it: among branches of their own, shrinking would get stuck on a
    # border that happens to do.
    return st.integers(0, 4 * whole).map(pick) | st.floats(0.0, longest_sec)


def latencies(*, longest_sec: float = _LONGEST_LATENCY_SEC) -> st.SearchStrategy[float]:
    """Seconds that a request or an answer is on its way; the usual 0.01 s is the simplest.

    Args:
        longest_sec: None is longer.
    """
    usual = [near for near in (0.01, 0.0, 0.1, 0.5, 1.0, 5.0, 10.0) if near <= longest_sec]
    return st.sampled_from(usual) | st.floats(0.0, longest_sec)


# --- requests -----------------------------------------------------------------------------------

_EDGE_IDS = (
    "...",
    " ",
    "result",
    "%2F..%2f",
    "?#;=&+",
    "\x01\x7f\u0085",
    "ünïcödé-\U0001f3b2",
    "xy" + "é" * ((MAX_QUOTED_ID_LENGTH - 2) // 6),
)
_EDGE_TIMEOUTS = (
    0.0,
    -0.0,
    -1.0,
    5e-324,
    0.001,
    1.7976931348623157e308,
    -1.7976931348623157e308,
    10**300,
)


def rollout_ids() -> st.SearchStrategy[str]:
    """Ids that the protocol allows, the longest and the strangest among them."""
    characters = st.characters(exclude_categories=["Cs"], exclude_characters="/\\\x00")
    drawn = st.text(characters, min_size=1, max_size=20).filter(
        lambda text: text not in {".", ".."}
    )
    return drawn | st.sampled_from(_EDGE_IDS)


@lru_cache
def _json_values() -> st.SearchStrategy[Any]:
    scalars = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(), max_size=8)
    )
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    )


def _nested(levels: int) -> dict[str, Any]:
    """Return an object that nests that many levels deep, itself included."""
    value: Any = {}
    for _ in range(levels - 1):
        value = {"": value}
    found: dict[str, Any] = value
    return found


def _objects() -> st.SearchStrategy[dict[str, Any]]:
    drawn = st.dictionaries(st.text(max_size=5), _json_values(), max_size=3)
    # The body is one level more, which makes it the deepest that a server reads.
    return drawn | st.builds(_nested, st.just(MAX_JSON_DEPTH - 1))


def _messages() -> st.SearchStrategy[list[dict[str, Any]]]:
    usual = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
        optional={"content": st.none() | st.text(st.characters(), max_size=12)},
    )
    odd = st.dictionaries(st.text(max_size=5), _json_values(), max_size=3)
    return st.lists(usual | odd, max_size=4)


def _timeouts() -> st.SearchStrategy[float]:
    return (
        durations()
        | st.sampled_from(_EDGE_TIMEOUTS)
        | st.floats(allow_nan=False, allow_infinity=False)
    )


def _text() -> st.SearchStrategy[str]:
    # Lone surrogates too: JSON can carry them, and models do write them.
    return st.text(st.characters(), max_size=12) | st.sampled_from(["", "\ud800", "a\udfff\ud83d"])


def _request(changes: dict[str, Any]) -> RolloutInitRequest:
    return evolve(
        RolloutInitRequest(
            rollout_id="r0", initial_messages=[], chat_completions_url="http://model.invalid/v1"
        ),
        **changes,
    )


def requests() -> st.SearchStrategy[RolloutInitRequest]:
    """Admission requests that a server takes, at the borders of every field."""
    return _changes(
        {
            "rollout_id": rollout_ids(),
            "initial_messages": _messages(),
            "chat_completions_url": st.sampled_from(["http://model/v1", "HTTPS://é:1/?a=b"]),
            "llm_api_key": st.text(st.characters(), min_size=1, max_size=12),
            "label": _text(),
            "metadata": _objects(),
            "extra_fields": _objects(),
            "grade": st.just(False),
            "agent_timeout_sec": _timeouts(),
            "grader_timeout_sec": _timeouts(),
            "run": st.text(st.characters(), min_size=1, max_size=12),
        }
    ).map(_request)


_REQUIRED = ("rollout_id", "initial_messages", "chat_completions_url")
_OPTIONAL = (
    "llm_api_key",
    "label",
    "metadata",
    "extra_fields",
    "grade",
    "agent_timeout_sec",
    "grader_timeout_sec",
    "run",
    "confirm_start",
    "limits",
)
_LONG_ID = "é" * (MAX_QUOTED_ID_LENGTH // 6 + 1)
_WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "rollout_id": (None, "", 7, ".", "..", "a/b", "a\\b", "a\x00b", "\ud800", True, _LONG_ID),
    "initial_messages": (None, {}, "hello", [None], [[]], ["hello"], [{}, 1], True),
    "chat_completions_url": (None, 7, True, [], {}, "", "file:///v1", "http:///v1", "http://a\n"),
    "llm_api_key": ("", 7, True, [], {}),
    "label": (42, True, [], {}),
    "metadata": ([], "{}", 7, False),
    "extra_fields": ([], "{}", 7, False),
    "grade": (None, 0, 1, "true", [], {}),
    "agent_timeout_sec": ("7", True, [], {}, 10**400),
    "grader_timeout_sec": ("7", False, [], {}, 10**400),
    "run": ("", 7, False, [], {}, "r" * 257),
    "confirm_start": (None, 0, 1, "true", [], {}),
    "limits": ([], "{}", 7, {"calls": -1}, {"calls": 1.5}, {"cost_usd": True}, {"other": 1}),
}


@st.composite
def _valid_bodies(draw: st.DrawFn) -> bytes:
    body = dump_request(draw(requests()))
    shape = draw(st.sampled_from(["as it is", "white space", "another order", "fewer", "more"]))
    if shape == "as it is":
        return body
    if shape == "white space":
        return b" \r\n\t" + body.replace(b'":', b'" :') + b"\n"
    fields = parse_json(body)
    if shape == "another order":
        fields = {name: fields[name] for name in draw(st.permutations(list(fields)))}
    elif shape == "fewer":
        left_out = draw(st.sets(st.sampled_from(_OPTIONAL), min_size=1))
        fields = {name: value for name, value in fields.items() if name not in left_out}
    else:
        fields["a_newer_field"] = draw(_json_values())
    return dump_json(fields)


_BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "white space": lambda _: b" \n\t ",
    "cut short": lambda body: body[:-1],
    "followed by more": lambda body: body + b"}",
    "not UTF-8": lambda body: body[:-1] + b',"a_newer_field":"\xff"}',
    "UTF-16": lambda body: body.decode("ascii").encode("utf-16"),
    "a byte order mark": lambda body: b"\xef\xbb\xbf" + body,
    "NaN": lambda body: body[:-1] + b',"a_newer_field":NaN}',
    "Infinity": lambda body: body[:-1] + b',"a_newer_field":-Infinity}',
    "1e400": lambda body: body[:-1] + b',"a_newer_field":1e400}',
    "too many digits": lambda body: body[:-1] + b',"a_newer_field":' + b"9" * 5000 + b"}",
    "nested too deep": lambda body: (
        body[:-1] + b',"a_newer_field":' + b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH + b"}"
    ),
    "an array": lambda body: b"[" + body + b"]",
    "a string": lambda body: b'"' + body.hex().encode() + b'"',
    "null": lambda _: b"null",
    "a key twice": lambda body: body[:-1] + b',"rollout_id":"again"}',
}
"""Ways to break a valid body, which is an object that is not empty."""


@st.composite
def _invalid_bodies(draw: st.DrawFn) -> bytes:
    fields: dict[str, Any] = parse_json(dump_request(_request({})))
    kind = draw(st.sampled_from(["missing field", "wrong value", "no JSON object"]))
    if kind == "missing field":
        del fields[draw(st.sampled_from(_REQUIRED))]
    elif kind == "wrong value":
        name = draw(st.sampled_from(sorted(_WRONG_VALUES)))
        fields[name] = draw(st.sampled_from(_WRONG_VALUES[name]))
    body = dump_json(fields)
    if kind == "no JSON object":
        return _BROKEN[draw(st.sampled_from(sorted(_BROKEN)))](body)
    return body


def request_bodies(*, valid: bool | None = None) -> st.SearchStrategy[bytes]:
    """Bodies of ``POST /rollout``.

    Args:
        valid: ``True`` for bodies that a server takes, ``False`` for those that it answers
            with 422, both if left out.
    """
    if valid is None:
        return _valid_bodies() | _invalid_bodies()
    return _valid_bodies() if valid else _invalid_bodies()


# --- workloads ----------------------------------------------------------------------------------


def rollout_plans(
    rollout_id: str = "r0", *, options: ServerOptions | None = None
) -> st.SearchStrategy[RolloutPlan]:
    """Plans of one rollout; the simplest has the defaults of `RolloutPlan`.

    Its times are whole microseconds.

    Args:
        rollout_id: Its id.
        options: The server whose borders are drawn as times.
    """
    # In a world whose clock has moved on, single floats drown in the rounding of sums, and a
    # grader that is faster than its deadline by one of them is not.
    seconds = durations(options=options).map(lambda drawn: round(drawn, 6))
    return _changes(
        {
            "arrival_sec": seconds,
            "agent_sec": seconds,
            "agent": st.sampled_from(Course),
            "grade": st.booleans(),
            "grader_sec": seconds,
            "grader": st.sampled_from(Course),
            "reward": st.sampled_from([0.0, 0.5, -1.0, 1e300]),
            "agent_timeout_sec": seconds,
            "grader_timeout_sec": seconds,
            "caller": st.sampled_from(Caller),
            "caller_sec": seconds,
        }
    ).map(lambda changes: RolloutPlan(rollout_id=rollout_id, **changes))


def workloads(
    *, min_size: int = 1, max_size: int = 8, options: ServerOptions | None = None
) -> st.SearchStrategy[list[RolloutPlan]]:
    """Workloads: plans with the ids ``r0``, ``r1`` and so on.

    Args:
        min_size: At least so many rollouts.
        max_size: At most so many.
        options: The server whose borders are drawn as times.
    """
    return st.lists(rollout_plans(options=options), min_size=min_size, max_size=max_size).map(
        # Numbered afterwards, so that a plan can be dropped without a change to the others.
        lambda plans: [evolve(plan, rollout_id=f"r{n}") for n, plan in enumerate(plans)]
    )


# --- faults -------------------------------------------------------------------------------------

_RETRY_AFTERS = ("1", "0", "0.2", "60", "120", "-5", "soon", "nan", "1e400")


@st.composite
def _fates(draw: st.DrawFn, details: dict[Fault, st.SearchStrategy[dict[str, Any]]]) -> Fate:
    fault = draw(st.sampled_from(list(details)))
    return Fate(fault=fault, **draw(details[fault]))


def _details(fault: Fault) -> st.SearchStrategy[dict[str, Any]]:
    fields: dict[str, st.SearchStrategy[Any]] = {"out_sec": latencies(), "back_sec": latencies()}
    if fault is Fault.GATEWAY:
        fields["status"] = st.sampled_from([502, 504])
        fields["body"] = st.sampled_from(GATEWAY_BODIES[1:])
    elif fault is Fault.BUSY:
        fields["retry_after"] = st.sampled_from(_RETRY_AFTERS)
    elif fault in {Fault.LOST_DURING, Fault.LATE, Fault.TRICKLE}:
        if fault is Fault.LOST_DURING:
            fields["after_steps"] = st.integers(1, _MOST_STEPS)
        fields["after_sec"] = durations(longest_sec=_DEFAULTS.polling_lease_timeout_sec)
    return _changes(fields)


def fates(*, faults: Sequence[Fault] = tuple(Fault)) -> st.SearchStrategy[Fate]:
    """Fates of one request; the simplest is the one in which nothing goes wrong.

    Args:
        faults: What may go wrong, the most harmless first.

    Raises:
        ValueError: There is no fault to choose from.
    """
    if not faults:
        raise ValueError("faults must hold at least one fault; Fault.NONE stands for none")
    return _fates({fault: _details(fault) for fault in faults})


def fault_plans(
    *, max_size: int = 12, faults: Sequence[Fault] = tuple(Fault)
) -> st.SearchStrategy[ScriptedFaults]:
    """Fault plans: the fates of the first requests of a run. Later ones go well.

    Args:
        max_size: At most so many fates.
        faults: What may go wrong, the most harmless first.

    Raises:
        ValueError: There is no fault to choose from.
    """
    return st.lists(fates(faults=faults), max_size=max_size).map(ScriptedFaults)


# --- servers ------------------------------------------------------------------------------------


def _waits_and_leases() -> st.SearchStrategy[tuple[float, float]]:
    return st.sampled_from(
        [
            (wait, lease)
            for wait in (30.0, 5.0, 60.0)
            for lease in (
                wait * 4,
                wait + RESULT_READ_GRACE_SEC + 1.0,
                wait + RESULT_READ_GRACE_SEC,
                wait + 0.001,
                math.nextafter(wait, math.inf),
            )
        ]
    )


def _options(changes: dict[str, Any]) -> ServerOptions:
    wait, lease = changes.pop("times", None) or (
        _DEFAULTS.result_wait_timeout_sec,
        _DEFAULTS.polling_lease_timeout_sec,
    )
    return ServerOptions(result_wait_timeout_sec=wait, polling_lease_timeout_sec=lease, **changes)


def server_options() -> st.SearchStrategy[ServerOptions]:
    """Options of a simulated server; the simplest are the defaults.

    The lease may be so short that it exceeds the result wait by nothing but a float, in which
    case even a caller who polls without pause may lose it to latency.
    """
    no_time = {"drain_sec": 0.0, "cleanup_sec": 0.0, "forced_sec": 0.0}
    return _changes(
        {
            "max_concurrent": st.sampled_from([1, 2, None]),
            "max_queue_depth": st.sampled_from([1, 2, 5]),
            "max_graders": st.sampled_from([1, 2]),
            "times": _waits_and_leases(),
            "result_retention_sec": st.sampled_from([0.0, 0.001, 5.0, 120.0]),
            "shutdown": st.sampled_from(
                [
                    ShutdownBudget(**no_time),
                    ShutdownBudget(**no_time, delivery_sec=0.0, backend_sec=0.0),
                ]
            ),
        }
    ).map(_options)
