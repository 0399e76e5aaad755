"""A row of a dataset, made from the columns of a file of any format."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from attrs import fields_dict, frozen

from rollout.evaluation.datasets._place import Place, shown

if TYPE_CHECKING:
    from rollout.evaluation.config import DatasetColumns

__all__ = ["DatasetRow", "Record", "RowBuilder", "label_columns"]

_LABEL = "label"
_SHOWN_COLUMNS = 12
_REMEMBERED_SHAPES = 256


@frozen(kw_only=True)
class DatasetRow:
    """One prompt of a dataset.

    Attributes:
        index: The row in the whole file, from 0; neither a header nor a blank line is one.
        line: The line where it begins, from 1; ``None`` in a format that has no lines.
        initial_messages: The prompt; empty if metadata is all that the row has.
        label: The ground truth as text.
        metadata: An object for workflow and grader.
    """

    index: int
    line: int | None
    initial_messages: list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any] | None


class Record(Protocol):
    """A row as its format has it. Each way to read a column gives ``None`` for null.

    Attributes:
        names: The columns that this row has.
    """

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """The columns that this row has."""

    def text(self, column: str) -> str | None:
        """Read a text.

        Raises:
            DatasetError: It is something else.
        """

    def label(self, column: str) -> str | None:
        """Read any value as the text that it is written as.

        Raises:
            DatasetError: It has none that is faithful.
        """

    def value(self, column: str) -> Any:
        """Read a value of JSON's types.

        Raises:
            DatasetError: It has another type.
        """


def label_columns(columns: DatasetColumns) -> tuple[str, ...]:
    """The columns that a row's label may stand in; the first one that is not empty counts.

    Many datasets call the ground truth ``label``, so that name is taken too, unless the mapping
    says otherwise.
    """
    names = [getattr(columns, role) for role in fields_dict(type(columns))]
    standard: Any = fields_dict(type(columns))["ground_truth"].default
    if columns.ground_truth == standard and _LABEL not in names:
        return columns.ground_truth, _LABEL
    return (columns.ground_truth,) if columns.ground_truth else ()


def _folded(name: str) -> str:
    """A name without what people mistake: case, white space, and what joins words."""
    return "".join(name.split()).casefold().replace("_", "").replace("-", "").strip("\ufeff")


def _listed(names: Collection[str]) -> str:
    some = [shown(name) for name in list(names)[:_SHOWN_COLUMNS]]
    more = len(names) - len(some)
    return ", ".join(some) + (f" and {more} more" if more > 0 else "")


class RowBuilder:
    """Makes rows of records by the mapping of columns.

    Args:
        columns: Which columns mean what; an empty name stands for none.
        place: Where the reader of the records is.
    """

    def __init__(self, columns: DatasetColumns, place: Place) -> None:
        self._columns = columns
        self._labels = label_columns(columns)
        self._place = place
        names: dict[str, str] = {
            role: getattr(columns, role) for role in fields_dict(type(columns))
        }
        self._used = {role: name for role, name in names.items() if name}
        standard = {
            role: attribute.default for role, attribute in fields_dict(type(columns)).items()
        }
        self._unseen = {name for role, name in self._used.items() if name != standard[role]}
        self._shapes: set[tuple[str, ...]] = set()

    def check_header(self, names: Collection[str]) -> None:
        """Check the columns of a file in which all rows have the same ones.

        Raises:
            DatasetError: One that is needed is missing, or has nearly the name.
        """
        self._check_names(names)
        self._unseen.difference_update(names)
        if self._unseen:
            raise self._place.file_error(
                f"there is no such column, only {_listed(names)}", column=min(self._unseen)
            )

    def check_mapped(self) -> None:
        """Check that each column that was named in the mapping was in some row.

        Raises:
            DatasetError: One was not.
        """
        if self._unseen:
            raise self._place.file_error(
                "none of the selected rows has it", column=min(self._unseen)
            )

    def _check_names(self, names: Collection[str]) -> None:
        has_prompt = self._used.get("user_prompt") in names
        has_messages = self._used.get("messages") in names
        by_fold = {_folded(name): name for name in names}
        for role, name in self._used.items():
            if name in names:
                continue
            if (role == "messages" and has_prompt) or (role.endswith("prompt") and has_messages):
                continue
            wanted = self._labels if role == "ground_truth" else (name,)
            if any(each in names for each in wanted):
                continue
            near = next(filter(None, (by_fold.get(_folded(each)) for each in wanted)), None)
            if near is not None and near not in self._used.values():
                raise self._place.error(
                    f"there is no such column, but there is {shown(near)}; map the one that is "
                    f'meant with columns.{role}, or none with ""',
                    column=name,
                )
        if not has_prompt and not has_messages and self._used.get("metadata") not in names:
            prompts = [
                shown(self._used[role])
                for role in ("user_prompt", "messages")
                if role in self._used
            ]
            raise self._place.error(
                f"there is no column {' or '.join(prompts)}, only {_listed(names) or 'none'}; "
                "map yours with columns.user_prompt or columns.messages" + self._advice(names)
            )

    @staticmethod
    def _advice(names: Collection[str]) -> str:
        only = next(iter(names)) if len(names) == 1 else ""
        for mark, name in ((";", "';'"), ("\t", "a tab"), ("|", "'|'"), (",", "','")):
            if mark in only:
                return f" (the delimiter seems to be {name})"
        return ""

    def build(self, record: Record) -> DatasetRow:
        """Make the row at the current place.

        Raises:
            DatasetError: It cannot be taken faithfully.
        """
        names = record.names
        shape = tuple(names)
        if shape not in self._shapes:
            self._check_names(names)
            self._unseen.difference_update(names)
            if len(self._shapes) >= _REMEMBERED_SHAPES:
                self._shapes.clear()
            self._shapes.add(shape)
        columns = self._columns

        def used(name: str) -> bool:
            return bool(name) and name in names

        def text(name: str) -> str | None:
            return (record.text(name) if used(name) else None) or None

        messages = record.value(columns.messages) if used(columns.messages) else None
        system, user = text(columns.system_prompt), text(columns.user_prompt)
        metadata = self._metadata(record) if used(columns.metadata) else None
        if messages is None:
            initial = self._prompt(system, user, metadata)
        else:
            initial = self._chat(messages, system, user)
        index = self._place.row
        if index is None:
            raise self._place.error("is built before the first row")
        return DatasetRow(
            index=index,
            line=self._place.line,
            initial_messages=initial,
            label=self._label(record),
            metadata=metadata,
        )

    def _prompt(
        self, system: str | None, user: str | None, metadata: dict[str, Any] | None
    ) -> list[dict[str, Any]]:
        if user is None and metadata is None:
            column = self._columns.user_prompt or self._columns.messages
            raise self._place.error(
                "is empty, and the row has no other prompt and no metadata", column=column
            )
        said = {"system": system, "user": user}
        return [
            {"role": role, "content": content}
            for role, content in said.items()
            if content is not None
        ]

    def _chat(self, messages: Any, system: str | None, user: str | None) -> list[dict[str, Any]]:
        column = self._columns.messages

        def refusal(reason: str) -> Exception:
            return self._place.error(reason, column=column)

        for name, value in (
            (self._columns.system_prompt, system),
            (self._columns.user_prompt, user),
        ):
            if value is not None:
                raise refusal(
                    f"is given together with {shown(name)}, but a row takes one of them; map the "
                    'other to ""'
                )
        if not isinstance(messages, list):
            raise refusal("must be a list of messages")
        if not messages:
            raise refusal("must hold a message at least")
        for at, message in enumerate(messages):
            if not isinstance(message, dict):
                raise refusal(f"must be a list of objects; message {at} is not one")
            role = message.get("role")
            if not isinstance(role, str) or not role:
                raise refusal(f"message {at} has no role, or one that is not a string")
        return messages

    def _label(self, record: Record) -> str | None:
        labels = (record.label(name) for name in self._labels if name in record.names)
        return next(filter(None, labels), None)

    def _metadata(self, record: Record) -> dict[str, Any] | None:
        column = self._columns.metadata
        value = record.value(column)
        if value is not None and not isinstance(value, dict):
            raise self._place.error("must be an object or null", column=column)
        return value or None
