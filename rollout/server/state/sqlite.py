"""The store of a real server: an SQLite database in WAL mode.

Theory of operation: one row a rollout, and one statement a commit, however many rows it has: each
call into SQLite gives up the interpreter lock, and that is what costs next to a busy event loop.
A killed process loses nothing that was committed. A second connection reads, so no poll waits
for a commit. After an error of the storage the connection is opened anew.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import trio

from rollout._files.atomic import reason_of
from rollout._json.text import utf8
from rollout._threads import run_off_loop
from rollout.errors import InvalidFieldError, RolloutServerError, StateUnavailableError
from rollout.server.state.rows import KeptRollout, Restored
from rollout.server.state.store import StateStore
from rollout.server.state.thread import JobThread

fcntl: Any
try:
    import fcntl
except ImportError:  # a platform without these locks: nothing keeps a second server out there
    fcntl = None

__all__ = ["DURABILITIES", "Durability", "SQLiteStore", "is_held", "read_state"]

Durability = Literal["process", "power"]
DURABILITIES: tuple[str, ...] = get_args(Durability)

SCHEMA = 1
APPLICATION_ID = 0x526F6C6C

_SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}
_SECRET_BYTES = 32
_LOCKED_SEC = 5.0
_ROWS_AT_ONCE = 64
_FOUND_AT_ONCE = 256
_SWEPT_AT_ONCE = 256
_COLUMNS = ", ".join((*KeptRollout._fields, "checksum"))
_VALUES = len(KeptRollout._fields) + 1
_CREATE = f"""
BEGIN IMMEDIATE;
CREATE TABLE server (secret BLOB NOT NULL, time REAL NOT NULL);
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    token_digest BLOB NOT NULL,
    request_digest BLOB,
    agent_started_at TEXT,
    status TEXT,
    until REAL,
    body BLOB,
    checksum INTEGER NOT NULL
);
CREATE INDEX rollouts_until ON rollouts (until);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA};
"""

T = TypeVar("T")

_in_use: set[str] = set()
"""States that this process has open: its own locks do not keep it out."""


class SQLiteStore(StateStore):
    """Keeps rows in a file.

    Args:
        path: The file; made if it does not exist, for its user alone.
        durability: What commits survive: any death of the ``"process"``, or a cut of the
            ``"power"`` too, which costs a sync of the disk for each.

    Raises:
        InvalidFieldError: There is no such durability.
    """

    def __init__(self, path: str | os.PathLike[str], durability: Durability = "process") -> None:
        if durability not in DURABILITIES:
            raise InvalidFieldError("durability", f"must be one of {', '.join(DURABILITIES)}")
        self.path = Path(path).absolute()
        self.durability: Durability = durability
        self._lock = -1
        self._writer = _Connection(self.path, _SYNCHRONOUS[durability])
        self._reader = _Connection(self.path, None)
        self._thread = JobThread("rollout-state")
        self._reading = trio.CapacityLimiter(1)

    async def open(self) -> Restored:
        """Lock the file, and read what a restart needs; see `StateStore.open`."""
        try:
            return await self._thread.run(self._open)
        except BaseException:
            self._thread.end()
            raise

    async def commit(self, rows: Sequence[KeptRollout], time: float) -> Collection[int]:
        """Write rows in one transaction; see `StateStore.commit`."""
        return await self._write(partial(_commit, rows=rows, time=time))

    async def find(self, rollout_ids: Sequence[str]) -> list[KeptRollout]:
        """Read rows on a connection of its own; see `StateStore.find`."""
        find = partial(_find, rollout_ids=rollout_ids)
        return await run_off_loop(partial(self._reader.call, find), self._reading)

    async def sweep(self, time: float) -> bool:
        """Delete a few hundred rows; see `StateStore.sweep`."""
        return await self._write(partial(_sweep, time=time))

    async def close(self) -> None:
        """Close the file, which merges what its log holds into it, and unlock it."""
        await self._thread.run(self._close)
        self._thread.end()

    async def _write(self, function: Callable[[sqlite3.Connection], T]) -> T:
        return await self._thread.run(partial(self._writer.call, function))

    def _open(self) -> Restored:
        try:
            self._lock = _locked(self.path)
            try:
                _make_file(self.path)
                with self._writer.open() as connection:
                    return _prepared(connection)
            except BaseException:
                self._close()
                raise
        except _RefusedError as error:
            raise RolloutServerError(f"the state {self.path} {error}") from None
        except (sqlite3.Error, OSError, ValueError) as error:
            why = "cannot be used"
            if not isinstance(error, sqlite3.OperationalError | OSError):
                why = "is damaged, or not a database"
            raise RolloutServerError(f"the state {self.path} {why}: {reason_of(error)}") from error

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _in_use.discard(os.path.realpath(self.path))


class _RefusedError(Exception):
    """A state is not what a server may use; the text goes on from its path."""


class _Connection:
    """A connection that is opened when it is needed, and closed when it has failed.

    Args:
        path: The file.
        synchronous: How commits are synced; ``None`` for a connection that only reads.
    """

    def __init__(self, path: Path, synchronous: str | None) -> None:
        self._path = path
        self._synchronous = synchronous
        self._connection: sqlite3.Connection | None = None

    def call(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function with the connection.

        Raises:
            StateUnavailableError: The storage fails.
        """
        try:
            with self.open() as connection:
                return function(connection)
        except sqlite3.Error as error:
            done = "read" if self._synchronous is None else "written"
            raise StateUnavailableError(
                f"the state {self._path} cannot be {done}: {reason_of(error)}"
            ) from error

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection, open; an error in the block closes it."""
        try:
            if self._connection is None:
                self._connection = _connect(self._path, "ro" if self._synchronous is None else "rw")
                if self._synchronous is not None:
                    self._connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            yield self._connection
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; what is not committed is undone."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode={mode}",
        uri=True,
        timeout=_LOCKED_SEC,
        isolation_level=None,  # transactions are ours
        check_same_thread=False,  # one thread at a time uses it, but not always the same
        cached_statements=2 * _ROWS_AT_ONCE,
    )


def _locked(path: Path) -> int:
    """Lock a state for this process; return the descriptor that holds the lock.

    The lock is of the process, so that children which outlive it do not hold it.
    """
    name = os.path.realpath(path)
    if name in _in_use:
        raise _RefusedError("is in use by another server of this process")
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(f"{name}-lock", flags, 0o600)
    try:
        if fcntl is not None:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except (BlockingIOError, PermissionError):
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise _RefusedError(f"is held by another process{holder and f' ({holder})'}") from None
    except BaseException:
        os.close(descriptor)
        raise
    _in_use.add(name)
    return descriptor


def is_held(path: Path) -> bool:
    """Whether a server of another process uses a state. Blocking."""
    try:
        descriptor = _locked(path)
    except _RefusedError:
        return True
    _in_use.discard(os.path.realpath(path))
    os.close(descriptor)
    return False


def _make_file(path: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    os.close(os.open(path, flags, 0o600))  # SQLite's other files get the mode of this one


def _prepared(connection: sqlite3.Connection) -> Restored:
    """Check that a database is a state that we can use, or empty and then make one."""
    new = _is_new(connection)
    (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if mode != "wal":
        raise _RefusedError("is on a file system where SQLite's WAL mode does not work")
    if new:
        connection.executescript(_CREATE)
        secret = secrets.token_bytes(_SECRET_BYTES)
        connection.execute("INSERT INTO server VALUES (?, 0)", (secret,))
        connection.execute("COMMIT")
    ((secret, time),) = connection.execute("SELECT secret, time FROM server").fetchall()
    (last,) = connection.execute("SELECT max(number) FROM rollouts").fetchone()
    in_flight = connection.execute(
        f"SELECT {_COLUMNS} FROM rollouts WHERE until IS NULL ORDER BY number"  # noqa: S608
    )
    rows = tuple(map(_row_of, in_flight))
    return Restored(secret=secret, time=time, next_number=(last or 0) + 1, in_flight=rows)


def _is_new(connection: sqlite3.Connection) -> bool:
    """Say whether a database is empty; refuse one that is no state of ours."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables and not application_id:
        return True
    if application_id != APPLICATION_ID:
        raise _RefusedError("is a database of another program")
    if schema != SCHEMA:
        raise _RefusedError(
            f"was written by another version: its schema is {schema}, and this one reads {SCHEMA}"
        )
    return False


# --- statements -----------------------------------------------------------------------------


def _checksum(row: KeptRollout) -> int:
    # SQLite has none of its own, so a damaged page may be read without an error.
    return zlib.crc32(row.body or b"", zlib.crc32(repr(row[:-1]).encode()))


def _values_of(row: KeptRollout) -> tuple[Any, ...]:
    return (*row, _checksum(row))


def _row_of(values: tuple[Any, ...]) -> KeptRollout:
    """Make a row of what was read.

    Raises:
        sqlite3.DatabaseError: It does not fit its checksum.
    """
    row = KeptRollout._make(values[:-1])
    if values[-1] != _checksum(row):
        raise sqlite3.DatabaseError("the row of a rollout does not fit its checksum")
    return row


@cache
def _upsert(rows: int) -> str:
    values = ", ".join([f"({', '.join('?' * _VALUES)})"] * rows)
    changed = ", ".join(
        f"{name} = excluded.{name}" for name in (*KeptRollout._fields[4:], "checksum")
    )
    return (
        f"INSERT INTO rollouts ({_COLUMNS}) VALUES {values} "  # noqa: S608 - made of our own names
        f"ON CONFLICT (number) DO UPDATE SET {changed}"
    )


def _commit(
    connection: sqlite3.Connection, *, rows: Sequence[KeptRollout], time: float
) -> Collection[int]:
    try:
        if len(rows) <= _ROWS_AT_ONCE:  # the statement is the transaction
            connection.execute(
                _upsert(len(rows)), tuple(chain.from_iterable(map(_values_of, rows)))
            )
            return ()
        connection.execute("BEGIN IMMEDIATE")
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            connection.execute(
                _upsert(len(part)), tuple(chain.from_iterable(map(_values_of, part)))
            )
        connection.execute("COMMIT")
    except sqlite3.IntegrityError:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return _commit_one_by_one(connection, rows, time)
    return ()


def _commit_one_by_one(
    connection: sqlite3.Connection, rows: Sequence[KeptRollout], time: float
) -> Collection[int]:
    """Commit rows of which some have an id that is taken; return the numbers of those."""
    taken: set[int] = set()
    connection.execute("BEGIN IMMEDIATE")
    for row in rows:
        expired = (row.rollout_id, row.number, time)
        connection.execute(
            "DELETE FROM rollouts WHERE rollout_id = ? AND number != ? AND until <= ?", expired
        )
        try:
            connection.execute(_upsert(1), _values_of(row))
        except sqlite3.IntegrityError:
            taken.add(row.number)
    connection.execute("COMMIT")
    return taken


def _find(connection: sqlite3.Connection, *, rollout_ids: Sequence[str]) -> list[KeptRollout]:
    found: list[KeptRollout] = []
    known = [rollout_id for rollout_id in rollout_ids if rollout_id == utf8(rollout_id)]
    for start in range(0, len(known), _FOUND_AT_ONCE):
        part = known[start : start + _FOUND_AT_ONCE]
        marks = ", ".join("?" * len(part))
        select = f"SELECT {_COLUMNS} FROM rollouts WHERE rollout_id IN ({marks})"  # noqa: S608
        found += map(_row_of, connection.execute(select, tuple(part)))
    return found


def _sweep(connection: sqlite3.Connection, *, time: float) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE server SET time = ?", (time,))
    over = "SELECT number FROM rollouts WHERE until <= ? LIMIT ?"
    deleted = connection.execute(
        f"DELETE FROM rollouts WHERE number IN ({over})",  # noqa: S608
        (time, _SWEPT_AT_ONCE),
    )
    connection.execute("COMMIT")
    return deleted.rowcount == _SWEPT_AT_ONCE


def read_state(path: Path, *, bodies: bool) -> Iterator[tuple[KeptRollout, float]]:
    """Yield the rows of a state in order, each with the serving time; also while a server has it.

    Args:
        path: The state.
        bodies: Whether to read the results themselves.

    Raises:
        RolloutServerError: It is not a state, or cannot be read.
    """
    try:
        connection = _connect(path.absolute(), "ro")
        try:
            if _is_new(connection):
                return
            connection.execute("BEGIN")
            (time,) = connection.execute("SELECT time FROM server").fetchone()
            columns = _COLUMNS if bodies else _COLUMNS.replace("body", "NULL")
            rows = connection.execute(
                f"SELECT {columns} FROM rollouts ORDER BY number"  # noqa: S608
            )
            for values in rows:  # without its body, a row cannot fit its checksum
                yield (_row_of(values) if bodies else KeptRollout._make(values[:-1])), time
        finally:
            connection.close()
    except _RefusedError as error:
        raise RolloutServerError(f"the state {path} {error}") from None
    except (sqlite3.Error, OSError) as error:
        raise RolloutServerError(f"the state {path} cannot be read: {reason_of(error)}") from error
