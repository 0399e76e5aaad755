"""The journal: what a kill, an editor or a full disk may do to it, and what is read then."""

from __future__ import annotations

import errno
import math
import os
import zlib
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from evaluation.run.cases import RUN_ID, raising, record
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import EvaluationDamagedError, EvaluationError
from rollout.evaluation.folder import journal
from rollout.evaluation.folder.journal import (
    EVENTS,
    Journal,
    final_records,
    open_journal,
    read_records,
    record_at,
    record_line,
    recover,
)
from rollout.evaluation.records import AttemptOutcome, AttemptRecord

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
records = st.builds(
    record,
    row=st.integers(0, 5),
    attempt=st.integers(0, 3),
    retry=st.integers(0, 3),
    outcome=st.sampled_from(AttemptOutcome),
    reward=st.none() | finite,
    err_category=st.none() | texts,
    err_message=st.none() | texts,
    metrics=st.dictionaries(texts, finite, max_size=3),
    superseded=st.booleans(),
    prompt_tokens=st.none() | st.integers(0, 2**70),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One folder for many examples."""
    return tmp_path_factory.mktemp("journal")


@pytest.fixture
def unsynced(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


def recovered(folder, run_id: str = RUN_ID) -> list[AttemptRecord]:
    """The records of a run that goes on; each is where it is said to be."""
    found = list(recover(folder, run_id))
    with open_journal(folder) as file:
        assert [record_at(folder, file, place) for place, _ in found] == [e for _, e in found]
    return [entry for _, entry in found]


def write(folder, *entries: AttemptRecord) -> bytes:
    """Make a journal anew; return its bytes."""
    path = folder / EVENTS
    path.unlink(missing_ok=True)
    assert recovered(folder) == []
    path.write_bytes(path.read_bytes() + b"".join(map(record_line, entries)))
    return path.read_bytes()


async def append(folder, *entries: AttemptRecord) -> None:
    kept = Journal(folder)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.write)
        places = [await kept.append(entry) for entry in entries]
        kept.close()
    with open_journal(folder) as file:
        assert [record_at(folder, file, place) for place in places] == list(entries)


@settings(max_examples=40)
@given(st.lists(records, max_size=4))
def test_what_is_written_is_read(shared, entries):
    write(shared, *entries)
    assert list(read_records(shared)) == entries
    assert recovered(shared) == entries


ENTRIES = [
    record(0, err_message='line\nbreak, "crc32":"00000000"}', outcome="failure"),
    record(1, metrics={"tokens": 3, "share": 0.25}),
    record(2, reward=None, removed=True, err_message="\u2028 ü \x00 end"),
]


@pytest.mark.usefixtures("unsynced")
def test_cut_at_every_byte(tmp_path):
    """No record whose line was whole is lost, and nothing is read twice or made up."""
    entries = ENTRIES[::2]
    data = write(tmp_path, *entries)
    path = tmp_path / EVENTS
    ends = [len(line) for line in data.split(b"\n")[:-1]]
    whole_at = [sum(ends[: number + 1]) + number for number in range(len(ends))]
    seen = set()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        # A line is whole once all of it but its line break is there.
        expected = entries[: max(0, sum(end <= cut for end in whole_at) - 1)]
        assert list(read_records(tmp_path)) == expected
        assert path.read_bytes() == data[:cut]
        assert recovered(tmp_path) == expected
        path.write_bytes(path.read_bytes() + record_line(record(9)))
        assert recovered(tmp_path) == [*expected, record(9)]
        seen.add(len(expected))
    assert seen == {0, 1, 2}


def test_what_was_mended_is_on_the_disk_before_the_run_goes_on(tmp_path, monkeypatch):
    data = write(tmp_path, *ENTRIES)
    path = tmp_path / EVENTS
    path.write_bytes(data[:-5])
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, path.read_bytes()))
    )
    assert recovered(tmp_path) == ENTRIES[:-1]
    mended = b"".join(data.splitlines(keepends=True)[:-1])
    assert synced == [(path.stat().st_ino, mended), (tmp_path.stat().st_ino, mended)]


def test_torn_tail_of_zeros(tmp_path):
    """What some file systems leave after a power cut."""
    data = write(tmp_path, *ENTRIES)
    (tmp_path / EVENTS).write_bytes(data + b"\0" * 700)
    assert recovered(tmp_path) == ENTRIES
    assert (tmp_path / EVENTS).read_bytes() == data


@pytest.mark.usefixtures("unsynced")
def test_a_flipped_bit_anywhere_is_refused_with_its_line(tmp_path):
    data = write(tmp_path, *ENTRIES)
    path = tmp_path / EVENTS
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        line = data[:place].count(b"\n") + 1
        with pytest.raises(EvaluationDamagedError, match=f"{EVENTS}, line {line}: "):
            recovered(tmp_path)
        with pytest.raises(EvaluationDamagedError):
            list(final_records(tmp_path))
        assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda data: data.replace(b"\n", b"\r\n"), 1),
        (lambda data: b"\xef\xbb\xbf" + data, 1),
        (lambda data: data + b"\n", 5),
        (lambda data: data.replace(b"\n", b"\n\n", 1), 2),
        (lambda data: b"\n".join(data.split(b"\n")[1:]), 1),
        (lambda data: data + data.split(b"\n")[0] + b"\n", 5),
        (lambda data: data.replace(b'"reward":1.0', b'"reward":2.0', 1), 3),
    ],
    ids=["crlf", "bom", "blank end", "blank line", "no head", "second head", "edited"],
)
def test_edited_files_are_refused_by_line(tmp_path, edit, line):
    data = edit(write(tmp_path, *ENTRIES))
    (tmp_path / EVENTS).write_bytes(data)
    with pytest.raises(EvaluationDamagedError, match=f"line {line}: "):
        recovered(tmp_path)
    assert (tmp_path / EVENTS).read_bytes() == data


def test_editor_that_drops_the_last_line_break(tmp_path):
    data = write(tmp_path, *ENTRIES)
    (tmp_path / EVENTS).write_bytes(data[:-1])
    assert recovered(tmp_path) == ENTRIES
    assert (tmp_path / EVENTS).read_bytes() == data


def test_journal_of_another_run(tmp_path):
    write(tmp_path, *ENTRIES)
    with pytest.raises(EvaluationDamagedError, match="line 1: belongs to another run"):
        recovered(tmp_path, "another")
    assert list(read_records(tmp_path)) == ENTRIES


def test_whole_line_that_is_no_record(tmp_path):
    data = write(tmp_path, record())
    for value in ({"row": 0}, {**attrs.asdict(record()), "row": -1, "submitted_at": "1"}):
        (tmp_path / EVENTS).write_bytes(data + journal.encode_line(value))
        with pytest.raises(EvaluationDamagedError, match="line 3: is not the record of an attempt"):
            recovered(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", "1"),
        ("reward", [1]),
        ("reward", True),
        ("duration_sec", None),
        ("duration_sec", "1"),
        ("retry", 10**12),
        ("outcome", "nice"),
        ("agent_started_at", "yesterday"),
    ],
)
def test_whole_line_with_a_value_that_no_record_has(tmp_path, name, value):
    line = journal.record_line(record())
    document = {**journal.decode_line(line), name: value}
    document.pop("crc32", None)
    data = write(tmp_path, record())
    (tmp_path / EVENTS).write_bytes(data + journal.encode_line(document))
    for read in (lambda: recovered(tmp_path), lambda: final_records(tmp_path)):
        with pytest.raises(EvaluationDamagedError, match="line 3: is not the record of an attempt"):
            list(read())


@pytest.mark.parametrize("body", [b'{"row":', b'{"row":' + b"[" * 100_000, b"[1", b'{"row":\xff'])
def test_whole_line_that_is_no_json(tmp_path, body):
    data = write(tmp_path, record())
    line = body + b',"crc32":"%08x"}\n' % zlib.crc32(body)
    (tmp_path / EVENTS).write_bytes(data + line)
    with pytest.raises(EvaluationDamagedError, match="line 3: "):
        recovered(tmp_path)


def test_an_attempt_far_out_costs_no_memory(tmp_path):
    far = [record(0, 10**12), record(10**12, 0), record(0, 0)]
    write(tmp_path, *far)
    assert list(final_records(tmp_path)) == [far[2], far[0], far[1]]


def test_no_journal(tmp_path):
    assert list(read_records(tmp_path)) == []
    assert list(final_records(tmp_path)) == []
    (tmp_path / EVENTS).mkdir()
    with pytest.raises(EvaluationError, match="directory"):
        list(read_records(tmp_path))
    with pytest.raises(EvaluationError, match="directory"):
        list(final_records(tmp_path))
    with pytest.raises(EvaluationError, match="directory"):
        recovered(tmp_path)


# --- the records that count -------------------------------------------------------------------


def test_the_last_record_that_settles_an_attempt_counts(tmp_path):
    failed = record(0, 0, 0, outcome="failure")
    superseded = record(0, 1, 0, outcome="failure", superseded=True)
    entries = [
        record(7, 1),
        failed,
        superseded,
        record(0, 0, 1, outcome="cancelled"),  # was to replace the failure, and did not
        record(0, 1, 1, outcome="error"),
        record(0, 1, 2, outcome="success"),  # replaces it
        record(3, 0, 0, outcome="cancelled"),
        record(3, 0, 1, outcome="cancelled"),
        record(2, 0, 0, outcome="failure", superseded=True),
        record(1000, 2),
    ]
    write(tmp_path, *entries)
    assert list(final_records(tmp_path)) == [
        failed,
        record(0, 1, 2),
        entries[8],
        record(3, 0, 1, outcome="cancelled"),
        record(7, 1),
        record(1000, 2),
    ]


@settings(max_examples=40)
@given(st.lists(records, max_size=12))
def test_one_record_for_each_attempt_in_order(shared, entries):
    write(shared, *entries)
    final = list(final_records(shared))
    assert [entry.key for entry in final] == sorted({entry.key for entry in entries})
    for entry in final:
        rivals = [other for other in entries if other.key == entry.key]
        counting = [other for other in rivals if other.counts]
        assert entry == (counting or rivals)[-1]


# --- writing ----------------------------------------------------------------------------------


async def test_appends_that_come_together_share_a_sync(tmp_path, monkeypatch):
    write(tmp_path)
    syncs = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (syncs.append(1), sync(descriptor)))
    kept = Journal(tmp_path)
    places = {}

    async def note(row):
        places[row] = await kept.append(record(row))

    async with trio.open_nursery() as nursery:
        for row in range(50):
            nursery.start_soon(note, row)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(kept.write)
        kept.close()
    assert len(syncs) == 1
    assert sorted(entry.row for entry in read_records(tmp_path)) == list(range(50))
    with open_journal(tmp_path) as file:
        assert all(record_at(tmp_path, file, places[row]).row == row for row in range(50))


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(),
    reason="this system does not tell which file a descriptor is of",
)
async def test_nothing_counts_before_it_is_synced(tmp_path, monkeypatch):
    write(tmp_path)
    order = []
    sync = os.fsync

    def synced(descriptor):
        sync(descriptor)
        order.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", synced)
    first = tmp_path / "first"
    first.mkdir()
    kept = Journal(tmp_path, synced_first=first)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.write)
        await kept.append(record())
        assert order == [str(first), str(tmp_path / EVENTS)]
        kept.close()


async def test_a_cancelled_append_is_written_all_the_same(tmp_path):
    write(tmp_path)
    kept = Journal(tmp_path)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            scope.cancel()
            await kept.append(record(1))
        assert scope.cancelled_caught
        nursery.start_soon(kept.write)
        await kept.append(record(2))
        kept.close()
    assert [entry.row for entry in read_records(tmp_path)] == [1, 2]


async def test_cancelling_everything_loses_nothing(tmp_path):
    write(tmp_path)
    kept = Journal(tmp_path)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.write)
            scope.cancel()
            with trio.CancelScope(shield=True):
                await kept.append(record(1))
                await kept.append(record(2))
            kept.close()
    assert [entry.row for entry in read_records(tmp_path)] == [1, 2]


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("after", range(4))
async def test_full_disk_at_any_call(tmp_path, monkeypatch, call, after):
    data = write(tmp_path, record(0))
    real = getattr(os, call)
    calls = 0

    def full(descriptor, *args):
        nonlocal calls
        calls += 1
        if calls > after:
            if call == "write":
                real(descriptor, args[0][: len(args[0]) // 2])  # half of it fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, *args)

    kept = Journal(tmp_path)
    written = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.write)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(EvaluationError, match="No space left"):
                for row in range(1, 9):
                    await kept.append(record(row))
                    written.append(record(row))
            with pytest.raises(EvaluationError, match="the run stops"):
                await kept.append(record(99))
        with pytest.raises(EvaluationError, match="the run stops"):
            await kept.append(record(100))  # it does not go on behind a gap
        kept.close()
    assert len(written) == after
    assert (tmp_path / EVENTS).read_bytes() == data + b"".join(map(record_line, written))
    assert recovered(tmp_path) == [record(0), *written]


async def test_every_append_that_waits_hears_of_a_full_disk(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, "No space left on device")))
    kept = Journal(tmp_path)
    failed = []

    async def one(row):
        with pytest.raises(EvaluationError):
            await kept.append(record(row))
        failed.append(row)

    async with trio.open_nursery() as nursery:
        for row in range(5):
            nursery.start_soon(one, row)
        nursery.start_soon(kept.write)
    assert sorted(failed) == list(range(5))
    assert list(read_records(tmp_path)) == []


async def test_a_file_that_is_gone_is_an_error(tmp_path):
    write(tmp_path)
    (tmp_path / EVENTS).unlink()
    kept = Journal(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.write)
        with pytest.raises(EvaluationError, match="No such file"):
            await kept.append(record())
    assert not (tmp_path / EVENTS).exists()


async def test_nothing_is_appended_to_a_file_that_was_cut_meanwhile(tmp_path):
    data = write(tmp_path)
    kept = Journal(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.write)
        await kept.append(record(1))
        await kept.append(record(2))
        (tmp_path / EVENTS).write_bytes((tmp_path / EVENTS).read_bytes()[:-9])
        with pytest.raises(EvaluationError, match="was changed from outside: it has"):
            await kept.append(record(3))
        kept.close()
    assert recovered(tmp_path) == [record(1)]
    assert (tmp_path / EVENTS).read_bytes() == data + record_line(record(1))


async def test_appending_after_a_torn_line(tmp_path):
    data = write(tmp_path, *ENTRIES)
    (tmp_path / EVENTS).write_bytes(data[:-7])
    assert recovered(tmp_path) == ENTRIES[:2]
    await append(tmp_path, record(8), record(9))
    assert recovered(tmp_path) == [*ENTRIES[:2], record(8), record(9)]


def test_numbers_survive_exactly(tmp_path):
    values = [0.1, -0.0, 5e-324, math.nextafter(1, 2), 1e308, 3]
    write(tmp_path, record(metrics={str(key): value for key, value in enumerate(values)}))
    (entry,) = read_records(tmp_path)
    assert [repr(value) for value in entry.metrics.values()] == [repr(value) for value in values]
