"""``rollout top URL``: a rollout server on a terminal, by its live state."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import click
import httpx
import trio
from attrs import define, field
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout._tasks import background_tasks
from rollout.cli.eval.progress import duration_text, reward_text
from rollout.cli.failures import CommandError, interrupted, run_async, why_unreachable
from rollout.cli.interrupts import interrupts
from rollout.cli.options import api_key_option, json_option, server_key_from_env, url_argument
from rollout.cli.remote import open_client
from rollout.cli.terminal import can_draw, make_console
from rollout.cli.text import one_line, print_json
from rollout.client import RolloutClient, RolloutProtocolError
from rollout.client.http import check_url
from rollout.client.wire import Wire
from rollout.codec import parse_json
from rollout.errors import InvalidBodyError, RolloutError

__all__ = ["LiveState", "TopView", "command", "follow", "keys_of"]

_PATH = "/rollouts/live"
_READ_SEC = 20.0
"""A server says something every five seconds."""

_RETRY_SEC = 2.0
_DRAW_SEC = 1.0
_LONGEST_LINE = 256 * 1024 * 1024
_ENDED = frozenset({"success", "failure", "cancelled"})
_STYLES = {
    "queued": "dim",
    "running": "cyan",
    "grading": "blue",
    "success": "green",
    "failure": "red",
    "cancelled": "yellow",
}
_SHOWN = ("all", "active", "ended")
_BARS = " ▁▂▃▄▅▆▇█"
_HELP = (
    "s S sort  r reverse  / filter  a all/active/ended  ↑↓ select  c cancel  C cancel all shown  "
    "q quit"
)


@click.command("top")
@url_argument
@click.option("--once", is_flag=True, help="Print the state once, as without a terminal.")
@api_key_option
@json_option
def command(url: str, once: bool, api_key_env: str | None, as_json: bool) -> None:
    """Show what the rollout server at URL does: figures, and a table of its rollouts.

    The table is sorted and filtered by keys, which the last line names; c cancels the rollout
    that is selected, after a question. When the server goes, it is tried again. Without a
    terminal, with --once or with --json the state is printed once.
    """
    key = server_key_from_env(api_key_env)
    console = make_console(highlight=False)
    if as_json or once or not (can_draw(console) and sys.stdin.isatty()):
        state: LiveState = run_async(_once, url, key)
        if as_json:
            print_json({**state.sections, "rows": list(state.rows.values())})
        else:
            _print(TopView(state, url), console)
        return
    run_async(_watch, url, key, console)


# --- the state ------------------------------------------------------------------------------------


@define
class LiveState:
    """What the lines of a server add up to.

    Attributes:
        sections: The figures.
        rows: The rollouts, by their ids.
        at: When the last line came, by the monotonic clock.
    """

    sections: dict[str, Any] = field(factory=dict)
    rows: dict[str, dict[str, Any]] = field(factory=dict)
    at: float = 0.0

    def take(self, line: dict[str, Any], *, first: bool) -> None:
        """Take a line; the first of a stream has everything."""
        if first:
            self.sections, self.rows = {}, {}
        for row in line["rows"]:
            self.rows[row["id"]] = row
        for gone in line["gone"]:
            self.rows.pop(gone, None)
        self.sections |= {name: line[name] for name in line.keys() - {"rows", "gone"}}
        self.at = time.monotonic()

    def now(self) -> float:
        """The server's time."""
        now: float = self.sections.get("now", 0.0)
        return now + time.monotonic() - self.at


async def follow(wire: Wire, state: LiveState, on_line: Callable[[], None]) -> None:
    """Read one stream to its end.

    Raises:
        CommandError: The server has no such stream.
        RolloutProtocolError: It answered outside of the protocol.
        httpx.TransportError: There was no answer, or it broke off.
    """
    async with wire.stream(_PATH, None, read_timeout_sec=_READ_SEC) as answer:
        if answer.status_code in {404, 405, 501}:
            raise CommandError(
                f"the server at {wire.url} does not stream its live state (GET {_PATH} is "
                f"{answer.status_code}), or is not a rollout server; rollout health has its counts"
            )
        if answer.status_code != httpx.codes.OK:
            code = answer.status_code
            raise wire.reader(f"GET {_PATH}").error(code, f"{code}, not 200")
        first = True
        async with aclosing(_lines(answer.data)) as lines:
            async for line in lines:
                try:
                    state.take(parse_json(line), first=first)
                except (InvalidBodyError, TypeError, LookupError):
                    reader = wire.reader(f"GET {_PATH}")
                    raise reader.error(200, "with a line that is not a live state") from None
                first = False
                on_line()


async def _lines(data: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    pieces: list[bytes] = []
    size = 0
    async for piece in data:
        *whole, rest = piece.split(b"\n")
        for end in whole:
            yield b"".join([*pieces, end])
            pieces, size = [], 0
        pieces.append(rest)
        size += len(rest)
        if size > _LONGEST_LINE:
            raise RolloutProtocolError(f"a line of GET {_PATH} is too long", status_code=200)


async def _once(url: str, api_key: str | None) -> LiveState:
    state = LiveState()
    async with open_client(url, api_key) as client:
        with trio.CancelScope() as scope:
            await follow(_wire(client, url, api_key), state, scope.cancel)
    if not state.sections:
        raise CommandError(f"the server at {client.url} ended the stream before its first line")
    return state


def _wire(client: RolloutClient, url: str, api_key: str | None) -> Wire:
    return Wire(client.url, client.http_client, api_key, check_url(url)[1])


# --- the view -------------------------------------------------------------------------------------


@define
class TopView:
    """What is drawn of a state, and what the keys do to it.

    Attributes:
        state: The state.
        url: Where the server is.
        notice: What is said on the last line but one.
        asked: The ids that a question is about.
        over: Whether it is to end.
        to_cancel: The ids whose cancel was confirmed; whoever cancels them empties it.
    """

    state: LiveState
    url: str
    notice: str = ""
    asked: list[str] = field(factory=list)
    over: bool = False
    to_cancel: list[str] = field(factory=list)
    _sort: int = 4
    _up: bool = False
    _shows: int = 0
    _query: str = ""
    _typing: bool = False
    _selected: str | None = None
    _place: int = 0

    def columns(self) -> list[tuple[str, Callable[[dict[str, Any]], Any]]]:
        """The columns by name, each with what it shows of a row; texts or numbers."""
        return [
            ("id", lambda row: row["id"]),
            ("status", lambda row: row["status"]),
            ("run", lambda row: row.get("run")),
            ("worker", lambda row: row.get("worker")),
            ("time", self._age),
            ("waited", self._waited),
            ("reward", lambda row: row.get("reward")),
            ("error", lambda row: row.get("err_category")),
        ]

    def rows(self) -> list[dict[str, Any]]:
        """The rows that are shown, in their order: what is active first, what is missing last."""
        shows, query = _SHOWN[self._shows], self._query.lower()
        found = [
            row
            for row in self.state.rows.values()
            if shows == "all" or (row["status"] in _ENDED) is (shows == "ended")
        ]
        if query:
            names = ("id", "status", "run", "worker", "err_category", "err_message")
            found = [
                row for row in found if any(query in str(row.get(n, "")).lower() for n in names)
            ]
        of = self.columns()[self._sort][1]
        known = [(value, row) for row in found if (value := of(row)) is not None]
        known.sort(key=lambda pair: pair[0], reverse=not self._up)
        ordered = [row for _, row in known] + [row for row in found if of(row) is None]
        return sorted(ordered, key=lambda row: row["status"] in _ENDED)

    def key(self, key: str) -> None:
        """Do what a key asks for; keys are characters, and names of `keys_of`."""
        if key == "\x03":
            self.over = True
        elif self._typing:
            self._type(key)
        elif self.asked:
            self.notice = "" if key in "yY" else "nothing is cancelled"
            self.to_cancel += self.asked if key in "yY" else []
            self.asked = []
        else:
            self._command(key)

    def _type(self, key: str) -> None:
        if key in {"\r", "\n"}:
            self._typing = False
        elif key == "esc":
            self._typing, self._query = False, ""
        elif key in {"\x7f", "\b"}:
            self._query = self._query[:-1]
        elif key.isprintable() and len(key) == 1:
            self._query += key

    def _command(self, key: str) -> None:
        self.notice = ""
        moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -20, "page down": 20}
        moves |= {"home": -len(self.state.rows), "end": len(self.state.rows)}
        if key == "q":
            self.over = True
        elif key in {"s", "S"}:
            self._sort = (self._sort + (1 if key == "s" else -1)) % len(self.columns())
        elif key == "r":
            self._up = not self._up
        elif key == "/":
            self._typing = True
        elif key == "esc":
            self._query = ""
        elif key == "a":
            self._shows = (self._shows + 1) % len(_SHOWN)
        elif key in moves:
            rows = self.rows()
            place = max(0, min(self._find(rows) + moves[key], len(rows) - 1))
            self._selected = rows[place]["id"] if rows else None
        elif key in {"c", "C"}:
            self._ask(every=key == "C")

    def _ask(self, *, every: bool) -> None:
        rows = self.rows()
        found = rows if every else rows[self._find(rows) :][:1]
        self.asked = [row["id"] for row in found if row["status"] not in _ENDED]
        if not self.asked:
            self.notice = "there is nothing to cancel: what is selected has ended"

    def _find(self, rows: list[dict[str, Any]]) -> int:
        """Return the place of the selected row: where it was, if it is shown no longer."""
        places = (place for place, row in enumerate(rows) if row["id"] == self._selected)
        self._place = max(0, min(next(places, self._place), len(rows) - 1))
        return self._place

    def _age(self, row: dict[str, Any]) -> float:
        age: float = row.get("ended_at", self.state.now()) - row["admitted_at"]
        return max(0.0, age)

    def _waited(self, row: dict[str, Any]) -> float:
        waited: float = (
            row.get("agent_started_at", row.get("ended_at", self.state.now())) - row["admitted_at"]
        )
        return max(0.0, waited)

    # --- drawing ------------------------------------------------------------------------------

    def draw(self, height: int) -> RenderableType:
        """Draw all of it into so many lines."""
        figures = list(self.figures())
        if self._typing:
            last = Text(f"filter: {self._query}▏  (Enter keeps it, Esc drops it)", "bold")
        elif self.asked:
            several = f"{len(self.asked):,} rollouts"
            what = one_line(self.asked[0]) if len(self.asked) == 1 else several
            last = Text(f"cancel {what}? y/n", "bold yellow")
        else:
            last = Text(self.notice, "yellow")
        rows = self.rows()
        room = max(1, height - len(figures) - 4)
        place = self._find(rows)
        first = max(0, min(place - room // 2, len(rows) - room))
        table = self.table(rows[first : first + room], selected=place - first)
        filtered = f" with “{one_line(self._query)}”" if self._query else ""
        shown = Text(f"{len(rows):,} rollouts ({_SHOWN[self._shows]}){filtered}", "dim")
        help_ = Text(_HELP, "dim")
        for line in (*figures, shown, last, help_):
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*figures, shown, table, last, help_)

    def table(self, rows: list[dict[str, Any]], *, selected: int | None = None) -> Table:
        """Draw rows; columns that none of the server's rollouts has are left out."""
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True)
        columns = []
        for place, (name, of) in enumerate(self.columns()):
            optional = name in {"run", "worker"}
            if optional and not any(name in row for row in self.state.rows.values()):
                continue
            columns.append((name, of))
            sorts = place == self._sort and selected is not None
            mark = ("▲" if self._up else "▼") if sorts else ""
            right = name in {"time", "waited", "reward"}
            table.add_column(
                name + mark, no_wrap=True, overflow="ellipsis", justify="right" if right else "left"
            )
        table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
        for place, row in enumerate(rows):
            cells = [_cell(name, row, of(row)) for name, of in columns]
            message = Text(one_line(row.get("err_message", "")), "dim")
            table.add_row(*cells, message, style="reverse" if place == selected else "")
        return table

    def figures(self) -> Iterator[Text]:
        """Write the figures, a line each."""
        found = self.state.sections
        server, counts, rates = found["server"], found["rollouts"], found["rates"]
        line = Text(f"{one_line(self.url)}  ", "bold")
        line.append(f"trio-rollout {one_line(str(server['version']))}  ", "not bold dim")
        line.append(f"up {duration_text(self.state.now() - server['started_at'])}", "not bold dim")
        if not server["accepting"]:
            line.append("  admits nothing", "yellow")
        if server["state"] is not None:
            line.append(f"  {one_line(str(server['state']))}", "red")
        yield line
        line = Text(f"active {counts['active']:,}: ")
        phases = ("queued", "running", "grading")
        line.append(", ".join(f"{counts[name]:,} {name}" for name in phases))
        if (slots := found["slots"]) and slots.get("max_concurrent") is not None:
            line.append(f"   slots {slots.get('running')} of {slots['max_concurrent']}")
        line.append(f"   in {rates['admitted']:.2f}/s  out {rates['ended']:.2f}/s")
        yield line
        line = Text(f"ended {counts['ended']:,}: ")
        parts = [f"{count:,} {name}" for name, count in found["outcomes"].items()]
        line.append(", ".join(parts) or "none yet")
        history = found["history"]
        rewards = sum(history["rewards"])
        if rewards:
            pairs = zip(history["rewards"], history["mean_reward"], strict=True)
            total = sum(count * mean for count, mean in pairs if count)
            line.append(f"   mean reward {reward_text(total / rewards)}")
        if failures := sorted(found["failures"].items(), key=lambda pair: -pair[1]):
            named = ", ".join(f"{count:,} {one_line(name)}" for name, count in failures[:4])
            line.append(f"   failures: {named}", "red")
        yield line
        bounds, durations = found["durations"]["bounds_sec"], found["durations"]
        line = Text(
            "   ".join(
                f"{word} {_within(durations[name]['counts'], bounds, 0.5)} (half), "
                f"{_within(durations[name]['counts'], bounds, 0.95)} (95%)"
                for word, name in (("waited", "queued"), ("ran", "ran"))
            )
        )
        ends = [
            sum(bin_)
            for bin_ in zip(
                history["success"], history["failure"], history["cancelled"], strict=True
            )
        ][-40:]
        line.append(f"   ended in each {history['bin_sec']:g} s ")
        line.append("".join(_BARS[round(8 * each / (max(ends) or 1))] for each in ends), "cyan")
        yield line
        if workers := found["workers"]:
            down = [each for each in workers if each.get("status") != "up"]
            names = ", ".join(one_line(str(each.get("name"))) for each in down)
            up = f"workers {len(workers) - len(down)} up"
            yield Text(f"{up}, not up: {names}" if down else up)


def _cell(name: str, row: dict[str, Any], value: Any) -> Text:
    if value is None:
        return Text("")
    if name == "status":
        status = one_line(value)
        return Text("cancelling" if row.get("cancelling") else status, _STYLES.get(status, ""))
    if name in {"time", "waited"}:
        return Text(duration_text(value))
    return Text(reward_text(value) if name == "reward" else one_line(str(value)))


def _within(counts: list[int], bounds: list[float], share: float) -> str:
    """Say within which bound so large a share lies."""
    wanted, so_far = share * sum(counts), 0
    for place, count in enumerate(counts):
        so_far += count
        if count and so_far >= wanted:
            known = place < len(bounds)
            return f"<{bounds[place]:g}s" if known else f">{bounds[-1]:g}s"
    return "-"


def _print(view: TopView, console: Console) -> None:
    for line in view.figures():
        click.echo(line.plain)
    if rows := view.rows():
        if not console.is_terminal:
            console.width = 200
        console.print(view.table(rows))


# --- the terminal ---------------------------------------------------------------------------------

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO.|.", re.DOTALL)
_NAMES = {
    "\x1b": "esc",
    **{f"\x1b{lead}{letter}": name for lead in "[O" for letter, name in (
        ("A", "up"), ("B", "down"), ("H", "home"), ("F", "end"),
    )},
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
}  # fmt: skip


def keys_of(data: bytes) -> list[str]:
    """Tell the keys in what a terminal sends: characters, and names such as ``page up``."""
    return [_NAMES.get(key) or key for key in _KEY.findall(data.decode("utf-8", "replace"))]


@contextmanager
def _keyboard() -> Generator[int, None, None]:
    """Have the terminal send each key as it comes, Ctrl-C too, for the length of the block."""
    try:
        import termios  # noqa: PLC0415 - not on every system
    except ImportError:
        raise CommandError(
            "the table needs a POSIX terminal; print the state with --once"
        ) from None
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    now = termios.tcgetattr(stdin)
    now[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG)
    termios.tcsetattr(stdin, termios.TCSADRAIN, now)
    try:
        yield stdin
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


async def _watch(url: str, api_key: str | None, console: Console) -> None:
    state = LiveState()
    async with interrupts(hang_up=True) as signals, open_client(url, api_key) as client:
        with signals.work:
            await _Terminal(client, _wire(client, url, api_key), state, console).run()
    if signals.number is not None:
        raise interrupted(signals.number)


@define
class _Terminal:
    """The tasks of the view on a terminal."""

    client: RolloutClient
    wire: Wire
    state: LiveState
    console: Console
    _view: TopView = field(init=False)
    _changed: trio.Event = field(factory=trio.Event, init=False)

    async def run(self) -> None:
        self._view = TopView(self.state, self.client.url)
        with trio.CancelScope() as first:  # what is wrong from the start is an error of the command
            await follow(self.wire, self.state, first.cancel)
        if not self.state.sections:
            raise CommandError(f"the server at {self.client.url} is shutting down")
        with (
            _keyboard() as stdin,
            Live(console=self.console, screen=True, auto_refresh=False) as live,
        ):
            read = lambda: self._read(stdin)  # noqa: E731 - a task
            async with background_tasks(self._follow, read, self._cancel):
                while not self._view.over:
                    live.update(self._view.draw(self.console.height), refresh=True)
                    with trio.move_on_after(_DRAW_SEC):
                        await self._changed.wait()
                    self._changed = trio.Event()

    async def _follow(self) -> None:
        """Read streams, one after the other."""
        while True:
            try:
                await follow(self.wire, self.state, lambda: self._say(""))
                reason = "the server has ended the stream"
            except RolloutProtocolError as error:
                reason = str(error)
            except httpx.TransportError as error:
                reason = f"no answer from the server ({why_unreachable(error)[0]})"
            self._say(f"{reason}; trying again")
            await trio.sleep(_RETRY_SEC)

    def _say(self, notice: str) -> None:
        lost = self._view.notice.endswith("trying again")
        if notice or lost:
            self._view.notice = notice
        self._changed.set()

    async def _read(self, stdin: int) -> None:
        while True:
            await trio.lowlevel.wait_readable(stdin)
            data = os.read(stdin, 1024)
            if not data:
                self._view.over = True
            for key in keys_of(data):
                self._view.key(key)
            self._changed.set()

    async def _cancel(self) -> None:
        """Cancel what was confirmed."""
        while True:
            if not self._view.to_cancel:
                await self._changed.wait()
                continue
            ids, self._view.to_cancel = self._view.to_cancel, []
            try:
                answer = await self.client.cancel_rollouts(ids=ids)
                found = list(answer.dispositions.values())
                missing = found.count("not_found")
                asked = f"{len(found) - missing} asked to stop"
                self._say(asked + (f", {missing} had ended" if missing else ""))
            except (RolloutError, httpx.TransportError) as error:
                self._say(f"not cancelled: {one_line(str(error) or type(error).__name__)}")
