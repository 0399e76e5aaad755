"""Errors travel: between processes, and to every awaiter in a copy of its own."""

import copy
import inspect
import pickle

import httpx
import pytest

from rollout import errors
from rollout._tasks import copy_error

WITH_MORE = [
    errors.InvalidFieldError("label", "must be a string", kind="type_error"),
    errors.InvalidBodyError(
        [errors.FieldProblem(("a", 1), "is wrong", "kind"), errors.FieldProblem((), "too", "kind")]
    ),
    errors.RolloutProtocolError("answered 500", status_code=500),
    errors.IntegrationError("refused", status_code=401),
    errors.TrajectoryError("is none", ["steps: is missing"]),
    errors.DatasetError("rows.csv", "is no number", line=3, row=1, column="label"),
    errors.EvaluationInputsChangedError("changed", ["dataset: a, now b"]),
]
PLAIN = [
    kind("what happened")
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RolloutError) and kind not in {type(error) for error in WITH_MORE}
]


class OwnError(errors.RolloutError):
    """An error of somebody else's, with an argument that `args` does not have."""

    def __init__(self, *, place: int) -> None:
        super().__init__(f"at {place}")
        self.place = place


def test_every_error_is_here():
    assert {type(error).__name__ for error in WITH_MORE + PLAIN} == set(errors.__all__) - {
        "FieldProblem"
    }


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error)), copy_error],
    ids=["copy", "deepcopy", "pickle", "copy_error"],
)
@pytest.mark.parametrize(
    "error", [*WITH_MORE, *PLAIN, OwnError(place=3)], ids=lambda error: type(error).__name__
)
def test_a_copy_of_an_error_says_the_same(error, duplicate):
    twin = duplicate(error)

    assert twin is not error
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert vars(twin) == vars(error)


@pytest.mark.parametrize(
    "error",
    [errors.RolloutProtocolError("no", status_code=500), httpx.ReadError("no")],
    ids=lambda error: type(error).__name__,
)
def test_copies_have_the_notes_and_share_none(error):
    error.add_note("known before")

    first, second = copy_error(error), copy_error(error)
    first.add_note("of the first awaiter")

    assert first.__notes__ == ["known before", "of the first awaiter"]
    assert second.__notes__ == ["known before"]
    assert error.__notes__ == ["known before"]
