"""Harbor's own validator takes what we make, and judges other documents as our checker does.

But for one thing: Harbor reads numbers and booleans out of strings and each other, ours does not.
"""

from __future__ import annotations

import copy
import json
import re

import pytest
from hypothesis import example, given, settings
from trajectory.drawn import FULL, REPLACEMENTS, damaged, histories, places

from rollout.trajectory import build_trajectory, trajectory_problems
from rollout.types import RolloutSample


def harbors_problems(document):
    from harbor.utils.trajectory_validator import TrajectoryValidator

    validator = TrajectoryValidator()
    valid = validator.validate(document)
    assert valid == (not validator.errors)
    return validator.errors


TYPES = re.compile(
    r"must be (a whole number|a number|a string or a number|true or false), "
    r"not a (string|boolean|number)$"
)


def check_alike(document):
    ours, harbors = trajectory_problems(document), harbors_problems(document)
    if harbors:
        assert ours, harbors
    else:
        assert [line for line in ours if not TYPES.search(line)] == []


@settings(max_examples=600)
@given(history=histories)
def test_what_we_make_is_valid(history):
    sample = RolloutSample(messages=history, reward=0.5, extra_fields={"x": [1]})
    document = build_trajectory(history, rollout_id="r", sample=sample, metadata={"m": None})
    assert harbors_problems(document) == []
    assert trajectory_problems(document) == []


def test_what_we_make_is_valid_as_a_file(tmp_path):
    history = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        for url in ("https://host.invalid/a.png", "data:image/png;base64,AAAA", "a.png", "x" * 5000)
    ]
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(build_trajectory(history, rollout_id="r")))
    assert harbors_problems(path) == []


@settings(max_examples=1500)
@given(document=damaged())
@example(document={})
@example(document=FULL)
def test_both_judge_a_damaged_document_alike(document):
    check_alike(document)


@pytest.mark.parametrize("place", places(FULL)[1:], ids=str)
def test_both_judge_each_value_alike_in_each_place(place):
    *way, last = place
    for replacement in REPLACEMENTS:
        document = copy.deepcopy(FULL)
        owner = document
        for key in way:
            owner = owner[key]
        owner[last] = copy.deepcopy(replacement)
        check_alike(document)
