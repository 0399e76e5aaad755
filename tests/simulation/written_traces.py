"""Traces written by hand: a small text format, and one rollout that goes well."""

from __future__ import annotations

import json
from typing import Any

from attrs import frozen

from rollout.simulation import Event, RolloutPlan, ServerOptions, Trace, Violation, check_trace

INSIDE = {"server", "network", "workflow", "grader"}

WELL = """
    0 world server-up process=1
    1 caller called r caller=wait
    1 client sent r route=admit request=1 fault=none
    1 network arrived r route=admit request=1 lease=
    1 server admitted r status=queued
    1 server execution-started r status=queued
    1 server agent-started r status=running
    1 server status r status=running
    1 workflow workflow-started r
    1 network server-answered r route=admit request=1 status=202
    1 client answered r route=admit request=1 status=202
    2 client sent r route=poll request=2 fault=none
    2 network arrived r route=poll request=2 lease=own
    2 server lease-renewed r status=running
    2 network server-answered r route=poll request=2 status=200 state=running started=T about=r
    2 client answered r route=poll request=2 status=200 state=running started=T about=r
    3 client sent r route=poll request=3 fault=none
    3 network arrived r route=poll request=3 lease=own
    3 server lease-renewed r status=running
    9 workflow workflow-ended r
    9 server finished r status=success category=null
    9 server execution-ended r status=success
    9 network server-answered r route=poll request=3 status=200 state=success started=T about=r \
category=null digest=d1 reward=null
    9 client answered r route=poll request=3 status=200 state=success started=T about=r \
category=null digest=d1 reward=null
    9 caller result r state=success category=null started=T reward=null
    909 server forgotten r status=success
    910 world shutdown-begins process=1
    910 world shutdown-ends process=1
    910 world server-gone process=1
    910 world server-down process=1
"""
"""Eight seconds of work that is not graded, on a server with the default options."""


def lines(text: str) -> list[str]:
    """The lines of a text, without what is around them."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def changed(text: str, *, without: str = "", plus: str = "") -> str:
    """The text without the lines that begin like those of *without*, and with those of *plus*.

    A time alone stands for all lines of that time. A new line comes after all others of its time.
    """
    gone = lines(without)
    kept = [line for line in lines(text) if not any(_begins(line, part) for part in gone)]
    return "\n".join(sorted(kept + lines(plus), key=lambda line: float(line.split()[0])))


def _begins(line: str, part: str) -> bool:
    return line.startswith(part if " " in part else f"{part} ")


def trace_of(text: str) -> Trace:
    """Read a trace: time, who, what, for which rollout if for one, details."""
    trace = Trace()
    for line in lines(text):
        time, who, what, *rest = line.split()
        rollout_id = rest.pop(0) if rest and "=" not in rest[0] else ""
        detail = dict(_detail(word) for word in rest)
        if who in INSIDE:
            detail.setdefault("process", 1)
        trace.events.append(Event(float(time), who, what, rollout_id, detail))
    return trace


def _detail(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


PLAN = RolloutPlan(rollout_id="r", agent_sec=8.0, grade=False)
ONE_SLOT = ServerOptions(max_concurrent=1)


def violations(
    text: str, options: ServerOptions | None = None, *plans: RolloutPlan
) -> list[Violation]:
    """What is found in a trace, by default that of `PLAN` on a server with its defaults."""
    return check_trace(trace_of(text), options or ServerOptions(), plans or (PLAN,))


@frozen
class Bad:
    """A bad trace, and what is to be found in it."""

    invariant: str
    says: str
    text: str
    options: ServerOptions | None = None
    plans: tuple[RolloutPlan, ...] = ()


def poll(time: float, request: int, end: str, at: float | None = None, lease: str = "own") -> str:
    """A poll that the server answers as *end* says."""
    at = time if at is None else at
    return f"""
        {time} client sent r route=poll request={request} fault=none
        {time} network arrived r route=poll request={request} lease={lease}
        {at} network server-answered r route=poll request={request} {end}
        {at} client answered r route=poll request={request} {end}
    """


RUNNING = "status=200 state=running started=T about=r"
QUEUED = "status=200 state=queued started=null about=r"
SUCCESS = "status=200 state=success started=T about=r category=null digest=d1 reward=null"
NOT_FOUND = "status=404"

# The caller is gone after its admission, and the lease ends.
SILENT = changed(
    WELL,
    without="2\n3\n9\n909",
    plus="""
        1 caller vanished r
        121 server finished r status=failure category=lease_expired
        121 server stop-requested r status=failure
        121 workflow workflow-ended r
        121 server execution-ended r status=failure
    """,
)
LONG = RolloutPlan(rollout_id="r", agent_sec=800.0, grade=False)
SHORT = ServerOptions(result_retention_sec=0.0)

STOPPED = changed(
    WELL,
    without="9\n909\n910\n3",
    plus="""
        5 world shutdown-begins process=1
        15 server stop-requested r status=running
        15 workflow workflow-ended r
        15 server finished r status=cancelled category=null
        15 server execution-ended r status=cancelled
        16 world shutdown-ends process=1
        16 world server-gone process=1
        16 world server-down process=1
    """,
)
STUCK = changed(
    changed(STOPPED, plus=poll(100, 7, RUNNING, 130)),
    without="15 workflow\n15 server finished\n15 server execution\n16",
    plus="""
        145 server finished r status=cancelled category=null
        146 world shutdown-ends process=1
        150 workflow workflow-ended r
        150 server execution-ended r status=cancelled
        150 world server-gone process=1
        150 world server-down process=1
    """,
)
HANDLE = changed(
    WELL,
    without="3\n9",
    plus="""
        3 client sent r route=poll request=3 fault=none
        3 network arrived r route=poll request=3 lease=own
        4 caller handle-cancelled r was_polling=true
        4 network disconnected r route=poll request=3
        4 client gave-up r route=poll request=3
        9 workflow workflow-ended r
        9 server finished r status=success category=null
        9 server execution-ended r status=success
    """,
)
CANCELLED = changed(
    WELL,
    without="9",
    plus="""
        4 caller cancels r done=false
        4 client sent r route=cancel request=4 fault=none
        4 network arrived r route=cancel request=4 lease=
        4 server stop-requested r status=running
        4 network server-answered r route=cancel request=4 status=200
        4 client answered r route=cancel request=4 status=200
        4 caller keeps-polling r polling=true
        9 workflow workflow-ended r
        9 server finished r status=cancelled category=null
        9 server execution-ended r status=cancelled
        9 network server-answered r route=poll request=3 status=200 state=cancelled started=T \
about=r category=null digest=d1 reward=null
        9 client answered r route=poll request=3 status=200 state=cancelled started=T about=r \
category=null digest=d1 reward=null
        9 caller result r state=cancelled category=null started=T reward=null
    """,
)
RETRIED = changed(
    WELL,
    without="3\n9 client\n9 network",
    plus="""
        3 client sent r route=poll request=3 fault=lost-before
        3 client failed r route=poll request=3 error=WriteError
        3.1 client sent r route=poll request=4 fault=gateway
        3.1 client answered r route=poll request=4 status=503
        3.35 client sent r route=poll request=5 fault=none
        3.35 network arrived r route=poll request=5 lease=own
        9 network server-answered r route=poll request=5 """
    + SUCCESS
    + """
        9 client answered r route=poll request=5 """
    + SUCCESS,
)
PAUSED = changed(
    SILENT,
    without="121",
    plus="""
        50 world paused seconds=100.0
        221 server finished r status=failure category=lease_expired
        221 server stop-requested r status=failure
        221 workflow workflow-ended r
        221 server execution-ended r status=failure
    """,
)
