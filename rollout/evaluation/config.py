"""The config of an evaluation: server, chat endpoint, dataset and run settings."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import attrs
from attrs import field, frozen

from rollout._checks import (
    check_number,
    is_finite_number,
    is_variable_name,
    is_whole_from_one,
    setting,
)
from rollout._redaction import SECRETS_VARIABLE
from rollout.client.http import check_url
from rollout.codec import converter, structure
from rollout.errors import (
    EvaluationError,
    FieldProblem,
    InvalidBodyError,
    InvalidFieldError,
)
from rollout.evaluation.addresses import HUB, parse_address
from rollout.evaluation.names import RUN_NAME, unused_name
from rollout.evaluation.selection import parse_rows
from rollout.evaluation.sequential import LEAST_UNTIL
from rollout.types._fields import count, instance_of, optional, timeout

__all__ = [
    "ChatConfig",
    "DatasetColumns",
    "DatasetConfig",
    "EvaluationConfig",
    "PricesConfig",
    "RunConfig",
    "SecretsConfig",
    "ServerConfig",
    "load_config",
]

T = TypeVar("T")

_text = instance_of(str, name="a string")
_MOST_ATTEMPTS = 1_000_000
MODEL_VARIABLE = "ROLLOUT_MODEL"
"""What a server that is started for a run finds the model's name in."""
_OWN_VARIABLES = {MODEL_VARIABLE: "chat.model", SECRETS_VARIABLE: "secrets.required"}
_WIDEST = 0.5
"""So much is half of what lies between 0 and 1."""
_RUNS = "runs"
_NEAR = 0.75
"""How much of a name must be right for a guess at what was meant."""
FORMATS = ("auto", "jsonl", "csv", "parquet")


def _filled(_: Any, attribute: Any, value: Any) -> None:
    _text(None, attribute, value)
    if not value.strip():
        raise InvalidFieldError(attribute.name, "must not be empty")


def _variable(_: Any, attribute: Any, value: Any) -> None:
    _text(None, attribute, value)
    if not is_variable_name(value):
        raise InvalidFieldError(
            attribute.name, "takes the name of an environment variable, not a key"
        )


def _one_up(_: Any, attribute: Any, value: Any) -> None:
    if not is_whole_from_one(value):
        raise InvalidFieldError(attribute.name, "must be a whole number from 1 up")


def _attempts(_: Any, attribute: Any, value: Any) -> None:
    if not is_whole_from_one(value) or value > _MOST_ATTEMPTS:
        raise InvalidFieldError(
            attribute.name, f"must be a whole number from 1 to {_MOST_ATTEMPTS}"
        )


def _above_zero(_: Any, attribute: Any, value: Any) -> None:
    timeout(None, attribute, value)
    if value is not None and value <= 0:
        raise InvalidFieldError(attribute.name, "must be above 0; leave it out for no limit")


def _url(_: Any, attribute: Any, value: Any) -> None:
    try:
        check_url(value)
    except InvalidFieldError as error:
        raise InvalidFieldError(attribute.name, error.reason, kind=error.kind) from None


def _chat_url(_: Any, attribute: Any, value: Any) -> None:
    """Validate a URL that a workflow gets as it is; a query is its own business."""
    _text(None, attribute, value)
    _url(None, attribute, re.split("[?#]", value, maxsplit=1)[0])


def _app(_: Any, attribute: Any, value: Any) -> None:
    _text(None, attribute, value)
    module, _colon, name = value.rpartition(":")
    if not module.strip() or not name.strip() or "\0" in value:
        raise InvalidFieldError(attribute.name, "must be MODULE:APP or FILE.py:APP")


def _workers(_: Any, attribute: Any, value: Any) -> None:
    if value != "auto" and not is_whole_from_one(value):
        raise InvalidFieldError(attribute.name, 'must be a whole number from 1 up, or "auto"')


def _model(_: Any, attribute: Any, value: Any) -> None:
    _filled(None, attribute, value)
    if not value.isprintable():
        raise InvalidFieldError(attribute.name, "must not have control characters")


def _as_path(name: str, value: Any) -> Path:
    if isinstance(value, Path):
        return value
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return Path(value)
    raise InvalidFieldError(name, "must be a path", kind="type_error")


def _dataset_path(value: Any) -> Path | str | tuple[Path, ...]:
    if isinstance(value, str) and value.startswith(HUB):
        if parse_address(value) is None:
            raise InvalidFieldError("path", f"must be {HUB}OWNER/NAME or {HUB}OWNER/NAME@REVISION")
        return value
    if isinstance(value, (list, tuple)):
        if not value:
            raise InvalidFieldError("path", "must name a file at least")
        if any(isinstance(each, str) and each.startswith(HUB) for each in value):
            raise InvalidFieldError("path", f"must be one {HUB} address, or files")
        return tuple(_as_path("path", each) for each in value)
    return _as_path("path", value)


def _output_path(value: Any) -> Path:
    return _as_path("output", value)


def _finite(_: Any, attribute: Any, value: Any) -> None:
    if not is_finite_number(value):
        raise InvalidFieldError(attribute.name, "must be a finite number")


def _until(_: Any, attribute: Any, value: Any) -> None:
    if not is_finite_number(value) or not LEAST_UNTIL <= value < _WIDEST:
        raise InvalidFieldError(
            attribute.name, f"must be a number from {LEAST_UNTIL} to below {_WIDEST}, as in 0.02"
        )


def _format(_: Any, attribute: Any, value: Any) -> None:
    if value not in FORMATS:
        raise InvalidFieldError(attribute.name, f"must be one of {', '.join(FORMATS)}")


def _column(_: Any, attribute: Any, value: Any) -> None:
    if value:
        _filled(None, attribute, value)
    else:
        _text(None, attribute, value)


def _delimiter(_: Any, attribute: Any, value: Any) -> None:
    _text(None, attribute, value)
    if len(value) != 1 or value in '"\r\n\0':
        raise InvalidFieldError(
            attribute.name, "must be one character, and neither a quote nor a line break"
        )


def _environment(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidFieldError(attribute.name, "must be a table", kind="type_error")
    for name, text in value.items():
        if not isinstance(name, str) or not is_variable_name(name):
            raise InvalidFieldError(attribute.name, f"{name!r} cannot be the name of a variable")
        if not isinstance(text, str) or "\0" in text:
            raise InvalidFieldError(
                attribute.name, f"{name} must be a string without NUL; put numbers in quotes"
            )


def _names(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(name, str) and is_variable_name(name) for name in value
    ):
        raise InvalidFieldError(
            attribute.name, "must be a list of names of environment variables, not of keys"
        )
    if len(set(value)) < len(value):
        raise InvalidFieldError(attribute.name, "has a name twice")


def _run_name(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str) or not RUN_NAME.fullmatch(value):
        raise InvalidFieldError(
            attribute.name,
            "must begin with a letter or digit, then up to 63 of these, dots, hyphens, underscores",
        )


def _rows(_: Any, attribute: Any, value: Any) -> None:
    _text(None, attribute, value)
    parse_rows(value)


@frozen(kw_only=True)
class ServerConfig:
    """The rollout server: one that runs, or one to start for the run.

    Attributes:
        url: Base URL of a server that runs. Credentials in it are sent as
            ``Authorization: Basic``, and are never written anywhere.
        app: ``MODULE:APP`` or ``FILE.py:APP``, served on a free loopback port for the run.
        workers: In how many processes the app runs its rollouts, see ``rollout serve``;
            ``"auto"``: one for each core less one. ``None``: in one, with everything else.
        api_key_env: The environment variable that holds the server's key.

    Raises:
        InvalidFieldError: Neither or both of `url` and `app` are given, one of them cannot be
            used, `workers` goes without an app, or a key is given where the name of a variable
            belongs.
    """

    url: str | None = field(default=None, validator=optional(_url), repr=False)
    app: str | None = field(default=None, validator=optional(_app))
    workers: int | str | None = field(default=None, validator=optional(_workers))
    api_key_env: str | None = field(default=None, validator=optional(_variable))

    def __attrs_post_init__(self) -> None:
        if (self.url is None) == (self.app is None):
            raise InvalidFieldError("url", "must be given, or app, but not both")
        if self.url is not None and self.workers is not None:
            raise InvalidFieldError("workers", "goes with app; a server that runs has its own")
        if self.url is not None and self.api_key_env is not None and check_url(self.url)[1]:
            raise InvalidFieldError(
                "api_key_env", "cannot be sent along with the credentials in the url: leave one out"
            )


@frozen(kw_only=True)
class ChatConfig:
    """The chat endpoint of the model that is evaluated, or a model of any provider.

    Attributes:
        url: Its OpenAI-compatible base URL, as in ``.../v1``. Without it, the evaluation itself
            serves an endpoint that asks the model through LiteLLM; agents get the address of that
            and a token for their rollout, and not the provider's key.
        api_key_env: The environment variable that holds its key. Without a `url`, the default is
            the name of the provider with ``_API_KEY``, if that is set.
        model: The model's name. It is on record in the manifest and the trajectories, and an
            app that is started for the run finds it in ``ROLLOUT_MODEL``. Without a `url` it begins
            with the provider, as in ``anthropic/claude-sonnet-4-5``.
        api_base: The provider's URL where it is not the usual one; without a `url`.
        bind: Where the evaluation serves its endpoint; port 0 takes a free one. Without a `url`.
        advertise_url: The URL under which agents reach that, for agents in containers and on other
            machines.

    Raises:
        InvalidFieldError: A URL cannot be used, the model is empty, a key stands where a variable's
            name belongs, neither URL nor provider are given, or a field goes without a `url` only.
    """

    url: str | None = field(default=None, validator=optional(_chat_url), repr=False)
    api_key_env: str | None = field(default=None, validator=optional(_variable))
    model: str | None = field(default=None, validator=optional(_model))
    api_base: str | None = field(default=None, validator=optional(_url), repr=False)
    bind: str = field(default="127.0.0.1:0", validator=_filled)
    advertise_url: str | None = field(default=None, validator=optional(_url))

    def __attrs_post_init__(self) -> None:
        if self.url is not None:
            for name in _THROUGH_LITELLM:
                if getattr(self, name) != attrs.fields_dict(type(self))[name].default:
                    raise InvalidFieldError(
                        name, "goes with a model that is asked through LiteLLM, without a url"
                    )
        elif self.model is None or not all(self.model.partition("/")[::2]):
            raise InvalidFieldError(
                "url",
                "is required, or a model of a provider without it, as in "
                'model = "anthropic/claude-sonnet-4-5"',
            )

    @property
    def key_variable(self) -> str | None:
        """The variable of the key: `api_key_env`, or what the provider's is called by custom."""
        if self.url is not None or self.api_key_env is not None:
            return self.api_key_env
        provider = (self.model or "").partition("/")[0]
        return re.sub(r"\W", "_", f"{provider}_api_key".upper(), flags=re.ASCII)


@frozen(kw_only=True)
class DatasetColumns:
    """Which columns of a dataset mean what.

    A row is either in chat form (`messages`) or has a `user_prompt` and perhaps a
    `system_prompt`. An empty name stands for no column.

    Attributes:
        system_prompt: Text of the system message; may be missing or null.
        user_prompt: Text of the user message.
        ground_truth: Becomes the rollout's label; may be missing or null.
        metadata: An object for workflow and grader; may be missing or null.
        messages: A list of messages, used where the column exists.

    Raises:
        InvalidFieldError: A column is to mean two things, or none is a prompt.
    """

    system_prompt: str = field(default="system_prompt", validator=_column)
    user_prompt: str = field(default="user_prompt", validator=_column)
    ground_truth: str = field(default="ground_truth", validator=_column)
    metadata: str = field(default="metadata", validator=_column)
    messages: str = field(default="messages", validator=_column)

    def __attrs_post_init__(self) -> None:
        taken: dict[str, str] = {}
        for role in attrs.fields_dict(type(self)):
            name = getattr(self, role)
            if name and name in taken:
                raise InvalidFieldError(
                    role,
                    f'is also the column of {taken[name]}; use each column once, or "" for none',
                )
            taken[name] = role
        if not self.user_prompt and not self.messages:
            raise InvalidFieldError("user_prompt", "must be a column, or messages")


@frozen(kw_only=True)
class DatasetConfig:
    """Files of prompts.

    Attributes:
        path: The file, or a pattern of files as in ``data/*.jsonl``, or several of these, or a
            dataset of the Hugging Face Hub as ``hf://OWNER/NAME`` or ``hf://OWNER/NAME@REVISION``.
            Rows count on from file to file.
        split: The split of a dataset of the Hub; ``None`` if it has only one.
        config: The config of a dataset of the Hub; ``None`` for its default.
        format: ``jsonl``, ``csv``, ``parquet``, or ``auto`` to tell by the file's name.
        encoding: Its text encoding; ``auto`` is UTF-8, or what a byte-order mark says.
        delimiter: What separates the cells of a CSV row; one character.
        columns: Which columns mean what.
        limit: How many of the selected rows to take, from the first on; ``None`` for all.
        rows: Which rows, from 0, as in ``0-99,150,200-``; ``None`` for all.

    Raises:
        InvalidFieldError: A field breaks its rule.
    """

    path: Path | str | tuple[Path, ...] = field(converter=_dataset_path)
    split: str | None = field(default=None, validator=optional(_filled))
    config: str | None = field(default=None, validator=optional(_filled))
    format: str = field(default="auto", validator=_format)
    encoding: str = field(default="auto", validator=_filled)
    delimiter: str = field(default=",", validator=_delimiter)
    columns: DatasetColumns = field(factory=DatasetColumns)
    limit: int | None = field(default=None, validator=optional(_one_up))
    rows: str | None = field(default=None, validator=optional(_rows))

    def __attrs_post_init__(self) -> None:
        for name in ("split", "config"):
            if getattr(self, name) is not None and not isinstance(self.path, str):
                raise InvalidFieldError(name, f"goes with a dataset of the Hub ({HUB}OWNER/NAME)")

    @property
    def location(self) -> str:
        """Where it is, as messages and the manifest name it."""
        return ", ".join(map(str, self.path)) if isinstance(self.path, tuple) else str(self.path)


@frozen(kw_only=True)
class RunConfig:
    """How the attempts are run.

    Attributes:
        output: The folder of the run.
        n: Attempts for each row.
        max_in_flight: How many attempts run at a time; ``None`` for as many as the server says
            that it runs at a time, or 16 where it does not.
        agent_timeout_sec: Time for the agent in seconds, the server's queue included.
        grader_timeout_sec: Time for the grader in seconds.
        admission_timeout_sec: Time to get an attempt admitted, in seconds.
        pass_threshold: An attempt passes if its reward is at least this.
        retry_setup_failures: How often an attempt is tried again whose agent never started.
        breaker_failures: How many attempts in a row may fail for an infrastructure reason,
            with no other end in between, before the run stops; 0 never stops it.
        until: Stop once the pass rate of all rows is known to plus or minus this; ``None``
            runs all rows. Rows are then drawn in random order, see
            `rollout.evaluation.sequential`.
        seed: Draws the rows in random order. By default the order is that of the file, and a run
            with *until* draws a seed of its own, which its manifest keeps.
        name: The run's name, if it has one; `output` ends with it then.

    Raises:
        InvalidFieldError: A field breaks its rule.
    """

    output: Path = field(converter=_output_path)
    n: int = field(default=1, validator=_attempts)
    max_in_flight: int | None = field(default=None, validator=optional(_one_up))
    agent_timeout_sec: float | None = field(default=None, validator=_above_zero)
    grader_timeout_sec: float | None = field(default=None, validator=_above_zero)
    admission_timeout_sec: float | None = field(default=None, validator=_above_zero)
    pass_threshold: float = field(default=1.0, validator=_finite)
    retry_setup_failures: int = field(default=0, validator=count)
    breaker_failures: int = field(default=20, validator=count)
    until: float | None = field(default=None, validator=optional(_until))
    seed: int | None = field(default=None, validator=optional(count))
    name: str | None = field(default=None, validator=optional(_run_name))

    def __attrs_post_init__(self) -> None:
        if self.name is not None and self.output.name != self.name:
            raise InvalidFieldError("name", "must be the last part of output")


@frozen(kw_only=True)
class SecretsConfig:
    """The secrets of a server that is started for the run; the config has their names alone.

    Attributes:
        required: Names of environment variables that the server gets. Their values come from
            outside of the config, see `rollout.evaluation.evaluate`, and are never written
            anywhere.

    Raises:
        InvalidFieldError: It is anything but names, each of them once.
    """

    required: list[str] | tuple[str, ...] = field(default=(), validator=_names)


@frozen(kw_only=True)
class PricesConfig:
    """What the model costs, for the forecast of a run.

    Attributes:
        prompt: The price of a million prompt tokens.
        completion: The price of a million completion tokens.
        currency: The currency of both, to be shown.

    Raises:
        InvalidFieldError: A price is not a finite number from 0 up.
    """

    prompt: float = field(validator=setting(check_number, least=0))
    completion: float = field(validator=setting(check_number, least=0))
    currency: str | None = field(default=None, validator=optional(_filled))


@frozen(kw_only=True)
class EvaluationConfig:
    """All of it.

    Attributes:
        server: The rollout server.
        chat: The chat endpoint.
        dataset: The prompts.
        run: How the attempts are run.
        env: Environment variables of a server that is started for the run, which are part of
            what a run is resumed with, and on record.
        secrets: Variables whose values are on record nowhere.
        prices: What the model costs, if that is to be in the forecast.

    Raises:
        InvalidFieldError: A part is something else, or variables are given that are also secrets,
            or that a server which runs already would never see.
    """

    server: ServerConfig = field(validator=instance_of(ServerConfig, name="a ServerConfig"))
    chat: ChatConfig = field(validator=instance_of(ChatConfig, name="a ChatConfig"))
    dataset: DatasetConfig = field(validator=instance_of(DatasetConfig, name="a DatasetConfig"))
    run: RunConfig = field(validator=instance_of(RunConfig, name="a RunConfig"))
    env: Mapping[str, str] = field(factory=dict, validator=_environment)
    secrets: SecretsConfig = field(
        factory=SecretsConfig, validator=instance_of(SecretsConfig, name="a SecretsConfig")
    )
    prices: PricesConfig | None = field(
        default=None, validator=optional(instance_of(PricesConfig, name="a PricesConfig"))
    )

    def __attrs_post_init__(self) -> None:
        for section, names in (("env", self.env), ("secrets", self.secrets.required)):
            if names and self.server.app is None:
                raise InvalidFieldError(
                    section, "goes with server.app; a server that runs has its own variables"
                )
            for name, by in _OWN_VARIABLES.items():
                if name in names:
                    raise InvalidFieldError(section, f"{name} is set by {by}")
        both = sorted(set(self.env) & set(self.secrets.required))
        if both:
            raise InvalidFieldError("env", f"{both[0]} is also in secrets.required")


_SECTIONS: dict[str, Any] = {
    "server": ServerConfig,
    "chat": ChatConfig,
    "dataset": DatasetConfig,
    "run": RunConfig,
    "secrets": SecretsConfig,
    "prices": PricesConfig,
}
_ENV = "env"
_THROUGH_LITELLM = ("api_base", "bind", "advertise_url")
_REPLACED = {
    ("server", "url"): ("app", "workers"),
    ("server", "app"): ("url",),
    ("chat", "url"): _THROUGH_LITELLM,
}
"""What goes out of a config when it gets a value in its place."""
_OPTIONAL = frozenset({"secrets", "prices"})


def _structure_path(value: Any, _: Any) -> Path:
    return _as_path("", value)


converter.register_structure_hook(Path, _structure_path)
converter.register_structure_hook(
    Path | str | tuple[Path, ...], lambda value, _: _dataset_path(value)
)
converter.register_structure_hook(int | str | None, lambda value, _: value)  # see `_workers`
converter.register_structure_hook(list[str] | tuple[str, ...], lambda value, _: value)  # `_names`


def load_config(
    path: Path | str, overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> EvaluationConfig:
    """Read a config from a TOML file.

    Paths in the file are relative to its folder; paths in *overrides* to the current one. A run
    that has a ``name`` is in the folder by that name below ``output``, or below ``runs`` beside the
    file. One without name and ``output`` gets a name that no folder has yet.

    Args:
        path: The file.
        overrides: Values by section and name that replace those of the file. An ``url``
            replaces an ``app`` with its variables, and the other way round; one of the chat
            endpoint what goes without it; a file as the dataset's path split and config.

    Raises:
        EvaluationError: The file cannot be read or is not TOML.
        InvalidBodyError: Fields are missing, unknown or break their rules; all are named.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
        tables = tomllib.loads(text)
    except OSError as error:
        raise EvaluationError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path} is not UTF-8 (at byte {error.start})") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise EvaluationError(f"{path} is not valid TOML: {error}") from None
    _anchor(tables, path.parent)  # before the overrides, whose paths are left alone
    for section, values in (overrides or {}).items():
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            continue
        for name in values:
            for other in _REPLACED.get((section, name), ()):
                table.pop(other, None)
                if other == "app":
                    tables.pop(_ENV, None)
                    tables.pop("secrets", None)
        table.update(values)
        if section == "dataset":
            _leave_hub(table, values)
    _name_run(tables, path.parent)
    return parse_config(tables)


def _name_run(tables: dict[str, Any], folder: Path) -> None:
    """Put a run that has a name, or no folder, into the folder of runs by its name."""
    run = tables.get("run")
    if not isinstance(run, dict) or ("output" in run and "name" not in run):
        return
    place = run.setdefault("output", str(folder / _RUNS))
    if isinstance(place, str) and place.strip() and "\0" not in place:
        name = run["name"] if "name" in run else unused_name(Path(place))
        if isinstance(name, str):
            run["name"], run["output"] = name, str(Path(place, name))


def _leave_hub(table: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Drop what goes with a dataset of the Hub where a file replaces it."""
    if not str(values.get("path", HUB)).startswith(HUB):
        for name in {"split", "config"} - values.keys():
            table.pop(name, None)


def _anchor(tables: dict[str, Any], folder: Path) -> None:
    """Make the paths of a file relative to the folder that it lies in."""
    for section, name in (("dataset", "path"), ("run", "output")):
        table = tables.get(section)
        value = table.get(name) if isinstance(table, dict) else None
        if isinstance(value, str):
            tables[section][name] = _anchored(value, folder)
        elif isinstance(value, list):
            tables[section][name] = [
                _anchored(each, folder) if isinstance(each, str) else each for each in value
            ]
    server = tables.get("server")
    if isinstance(server, dict) and isinstance(server.get("app"), str):
        file, colon, name = server["app"].rpartition(":")
        if colon and file.endswith(".py"):
            server["app"] = f"{_anchored(file, folder)}:{name}"


def _anchored(path: str, folder: Path) -> str:
    if path.startswith(HUB):
        return path
    if not path.strip() or "\0" in path:
        return path  # it is refused later on, by its name
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:  # there is no such user, so it is a name like any other
        expanded = Path(path)
    return os.path.normpath(folder / expanded)


def parse_config(tables: Mapping[str, Any]) -> EvaluationConfig:
    """Build a config from nested mappings; paths are taken as they are.

    Raises:
        InvalidBodyError: Fields are missing, unknown or break their rules; all are named.
    """
    problems = [
        FieldProblem(
            (str(name),), f"is not a section; {_meant(str(name), (*_SECTIONS, _ENV))}", "unknown"
        )
        for name in tables
        if name not in _SECTIONS and name != _ENV
    ]
    parts: dict[str, Any] = {}
    for name, kind in _SECTIONS.items():
        if name not in tables:
            if name not in _OPTIONAL:
                problems.append(FieldProblem((name,), "is required", "missing"))
            continue
        parts[name] = _section(tables[name], kind, (name,), problems)
    if problems:
        raise InvalidBodyError(problems)
    try:
        return EvaluationConfig(**parts, env=tables.get(_ENV, {}))
    except InvalidFieldError as error:
        raise InvalidBodyError([FieldProblem((error.field,), error.reason, error.kind)]) from None


def _section(
    table: Any, kind: type[T], loc: tuple[str, ...], problems: list[FieldProblem]
) -> T | None:
    """Build one section. All of its problems are added to *problems*, not the first alone."""
    if not isinstance(table, dict):
        problems.append(FieldProblem(loc, "must be a table", "type_error"))
        return None
    before = len(problems)
    fields: Any = attrs.fields_dict(attrs.resolve_types(cast("type[Any]", kind)))
    problems += [
        FieldProblem((*loc, str(name)), _unknown(str(name), fields, loc), "unknown")
        for name in table
        if name not in fields
    ]
    for name, attribute in fields.items():
        where = (*loc, name)
        if name not in table:
            if attribute.default is attrs.NOTHING:
                problems.append(FieldProblem(where, "is required", "missing"))
        elif attrs.has(attribute.type):
            _section(table[name], attribute.type, where, problems)
        else:
            problems += _value_problems(table[name], attribute, where)
    if len(problems) > before:
        return None
    try:
        return structure(table, kind)
    except InvalidBodyError as error:
        problems += [attrs.evolve(each, loc=(*loc, *each.loc)) for each in error.problems]
    return None


def _unknown(name: str, fields: Mapping[str, Any], loc: tuple[str, ...]) -> str:
    """Say what to do about a name that a section does not have."""
    places = {**_SECTIONS, "dataset.columns": DatasetColumns}
    homes = [
        f"[{place}]"
        for place, kind in places.items()
        if name in attrs.fields_dict(kind) and place != ".".join(loc)
    ]
    if homes:
        return f"is unknown here; it belongs in {' or '.join(homes)}"
    return f"is unknown; {_meant(name, fields)}"


def _meant(name: str, known: Iterable[str]) -> str:
    """Name what was meant, or all there is."""
    names = list(known)
    near = difflib.get_close_matches(name.casefold().replace("-", "_"), names, 1, _NEAR)
    return f"is {near[0]} meant?" if near else f"there are {', '.join(names)}"


def _value_problems(value: Any, attribute: Any, loc: tuple[str, ...]) -> list[FieldProblem]:
    try:
        value = converter.structure(value, attribute.type)
        if attribute.validator is not None:
            attribute.validator(None, attribute, value)
    except InvalidFieldError as error:
        return [FieldProblem(loc, error.reason, error.kind)]
    return []
