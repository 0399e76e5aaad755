"""The commands that hold processes of a sandbox back."""

from __future__ import annotations

import pytest

from rollout.sandbox import limits
from rollout.sandbox.limits import Limits

TOOLS = {"prlimit": "/p", "choom": "/c"}


@pytest.fixture(autouse=True)
def own_score(monkeypatch):
    monkeypatch.setattr(limits, "_own_score", lambda: 0)


CORE = "--core=1:1"
MARK = "--rttime=7"


def test_root_is_not_counted_and_others_are():
    assert Limits().prefix(TOOLS, privileged=True, mark=7) == [
        *("/p", CORE, MARK, "--", "/c", "--adjust=500", "--"),
    ]
    assert Limits(processes=9).prefix(TOOLS, privileged=False, mark=7) == [
        *("/p", CORE, MARK, "--nproc=9", "--"),
        *("/c", "--adjust=500", "--"),
    ]


def test_a_system_without_choom_does_without():
    assert Limits().prefix({"prlimit": "/p"}, privileged=True, mark=7) == ["/p", CORE, MARK, "--"]
    assert Limits(file_bytes=7).prefix({"prlimit": "/p"}, privileged=True, mark=7) == [
        *("/p", CORE, MARK, "--fsize=7", "--")
    ]


def test_a_score_cannot_be_lowered(monkeypatch):
    monkeypatch.setattr(limits, "_own_score", lambda: 800)
    assert Limits().prefix(TOOLS, privileged=True, mark=7)[-2:] == ["--adjust=800", "--"]


@pytest.mark.parametrize(
    ("own", "most", "expected"),
    [(None, None, None), (None, 5, 5), (3, None, 3), (3, 5, 3), (9, 5, 5)],
)
def test_the_smaller_size_of_files_holds(own, most, expected):
    assert Limits(file_bytes=own).with_file_bytes(most).file_bytes == expected
