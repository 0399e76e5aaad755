"""The commands that hold processes of a sandbox back."""

from __future__ import annotations

import pytest

from rollout.sandbox import Limits, _limits


@pytest.fixture(autouse=True)
def own_score(monkeypatch):
    monkeypatch.setattr(_limits, "_own_score", lambda: 0)


CORE = "--core=1:1"
MARK = "--rttime=7"


def test_root_is_not_counted_and_others_are():
    assert Limits().command(privileged=True, mark=7) == [
        *("prlimit", CORE, MARK, "--", "choom", "--adjust=500", "--"),
    ]
    assert Limits(processes=9).command(privileged=False, mark=7) == [
        *("prlimit", CORE, MARK, "--nproc=9", "--", "choom", "--adjust=500", "--"),
    ]


def test_a_score_cannot_be_lowered(monkeypatch):
    monkeypatch.setattr(_limits, "_own_score", lambda: 800)
    assert Limits().command(privileged=True, mark=7)[-2:] == ["--adjust=800", "--"]


@pytest.mark.parametrize(
    ("own", "most", "expected"),
    [
        (None, None, []),
        (None, 5, ["--fsize=5"]),
        (3, None, ["--fsize=3"]),
        (3, 5, ["--fsize=3"]),
        (9, 5, ["--fsize=5"]),
    ],
)
def test_the_smaller_size_of_files_holds(own, most, expected):
    command = Limits(file_bytes=own).command(privileged=True, mark=7, max_file_bytes=most)
    assert [each for each in command if each.startswith("--fsize")] == expected
