"""Hypothesis strategies that several test files share."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

finite_floats = st.floats(allow_nan=False, allow_infinity=False)

json_scalars = st.none() | st.booleans() | st.integers() | finite_floats | st.text(max_size=8)

json_values = st.recursive(
    json_scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)

json_objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)

messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": st.none() | st.text(max_size=12), "tool_calls": st.builds(list)},
    ),
    max_size=4,
)

rollout_ids = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\\\x00"), min_size=1, max_size=40
).filter(lambda text: text not in {".", ".."})
"""Every kind of id that the protocol allows."""

bad_rollout_ids = st.sampled_from(
    ["", ".", "..", "a/b", "/", "a\\b", "\x00", "a\x00b", "\ud800", "x" * 40_000, "é" * 20_000]
)

timeouts = st.none() | finite_floats | st.integers(-(10**300), 10**300)

numbers = (
    st.integers(-(10**300), 10**300)
    | finite_floats
    | st.booleans()
    | st.fractions(min_value=-(10**9), max_value=10**9)
    | st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9)
)
"""Everything with a value that a reward may have."""

no_numbers: st.SearchStrategy[Any] = st.sampled_from(
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        10**400,
        Fraction(10**400),
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        Decimal("1e999"),
        1 + 2j,
        "1.0",
        b"1",
        "nan",
        "",
        [],
        [1.0],
        {},
        {"item": 1},
        object(),
        float,
        Ellipsis,
    ]
)
"""Everything that no reward may become."""
