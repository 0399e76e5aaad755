"""Every id gets a folder of its own, with a name that is one everywhere."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import rollout_ids

from rollout._files.folders import folder_name

reserved = st.sampled_from(["con", "CON.txt", "nul", "com1", "a:b", "a?", "|"])
dotted = st.sampled_from(["a.", "a ", " a", ".a", "...", "~", "-rf", "a\nb", "a\u202eb"])
alike = st.sampled_from(["é", "e\u0301", "A", "a", "K", "\u212a"])
long = st.sampled_from(["x" * 200, "x" * 201, "é" * 101])
nasty = reserved | dotted | alike | long
ids = rollout_ids | nasty
cases = st.booleans()


@given(rollout_id=ids, exact_case=cases)
def test_names_are_harmless(rollout_id, exact_case):
    name = folder_name(rollout_id, exact_case=exact_case)
    assert 0 < len(name.encode()) <= 200
    assert not name.startswith((".", " "))
    assert not name.endswith((".", " "))
    assert name.isprintable()
    assert not set(name) & set('<>:"|?*/\\')
    assert name.lower().split(".")[0] not in {"con", "prn", "aux", "nul", "com1", "lpt1"}


@given(one=ids, other=ids, exact_case=cases)
def test_two_ids_never_share_a_name(one, other, exact_case):
    first, second = (folder_name(each, exact_case=exact_case) for each in (one, other))
    if one != other:
        assert first != second
        assert unicodedata.normalize("NFC", first) != unicodedata.normalize("NFC", second)
    if one != other and not exact_case:
        assert first.casefold() != second.casefold()


@given(rollout_id=ids, exact_case=cases)
def test_a_name_is_never_the_id_of_another(rollout_id, exact_case):
    name = folder_name(rollout_id, exact_case=exact_case)
    assert (folder_name(name, exact_case=exact_case) == name) == (name == rollout_id)


@pytest.mark.parametrize(
    "rollout_id", ["7f3c", "run-1_2.3", "0d1c9f8e-6f2b-4c39-9a63-3f2f0c9b2d11", "a b", "x" * 200]
)
def test_usual_ids_are_their_own_names(rollout_id):
    assert folder_name(rollout_id) == folder_name(rollout_id, exact_case=False) == rollout_id


def test_ids_that_differ_by_case():
    assert folder_name("Run") == "Run"
    assert folder_name("Run", exact_case=False).startswith("run~")
    assert folder_name("run", exact_case=False) == "run"
