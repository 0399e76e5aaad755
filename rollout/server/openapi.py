"""The OpenAPI description of a server, written from the types of the protocol and their rules.

A field's schema is its annotation and what its validator says of itself in `RULES`, so a rule
that changes changes the description. What the routes check by hand is described by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import attrs

from rollout._version import package_version
from rollout.server.admission import MAX_BATCH, MAX_CANCEL_IDS
from rollout.server.feed import MAX_CLAIMS
from rollout.types import (
    POLLING_LEASE_HEADER,
    SEEN_STATE_HEADER,
    CancelRolloutsRequest,
    CancelRolloutsResponse,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutInitResponse,
    RolloutLifecycle,
    RolloutResultResponse,
    RolloutSample,
    RolloutStatus,
)
from rollout.types._fields import RULES

__all__ = ["OPENAPI_PATH", "openapi_document"]

OPENAPI_PATH = "/openapi.json"

Schema = dict[str, Any]

_REQUESTS = (RolloutInitRequest, CancelRolloutsRequest)
_RESPONSES = (
    RolloutInitResponse,
    RolloutResultResponse,
    RolloutSample,
    CancelRolloutsResponse,
    RolloutLifecycle,
)
_ENUMS = (RolloutStatus, RolloutErrorCategory)
_NEVER_SENT = {"trajectory_messages"}
_SENT_UNLESS_NULL = {"err_source", "err_phase"}
_SCALARS: dict[Any, Schema] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    datetime: {"type": "string", "format": "date-time"},
    Any: {},
}
_REFUSALS = {
    400: "The request is not HTTP/1.1.",
    401: "The API key is missing or wrong.",
    403: "The token is not that of this rollout's lease.",
    404: "There is no such rollout or feed, or the server has no model gateway or no metrics.",
    408: "The body took too long.",
    409: "The id is active or its result retained, or the rollout has not ended.",
    413: "The body is too large.",
    429: "The backend has no room; Retry-After says when to ask again.",
    431: "The head of the request is too large.",
    503: "The server is shutting down, or its state cannot be read or written now.",
}
_ALWAYS = (400, 431)
_WITH_BODY = (408, 413)


def openapi_document(
    *, authenticated: bool, limited: bool = True, metrics: bool = True
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a server.

    Args:
        authenticated: Whether the server asks for an API key.
        limited: Whether requests may name limits, for which it needs a model gateway.
        metrics: Whether it serves metrics, for which it needs an extra.
    """
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Rollout server", "version": package_version()},
        "paths": _paths((401,) if authenticated else ()),
        "components": {
            "schemas": {
                **{kind.__name__: _object(kind, sent=False) for kind in _REQUESTS},
                **{kind.__name__: _object(kind, sent=True) for kind in _RESPONSES},
                **{kind.__name__: {"type": "string", "enum": list(kind)} for kind in _ENUMS},
                **_BY_HAND,
            }
        },
    }
    if not metrics:
        del document["paths"]["/metrics"]
    if not limited:
        admission = document["components"]["schemas"]["RolloutInitRequest"]
        admission["properties"]["limits"] = {"type": "null"}
    if authenticated:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


# --- schemas of types -------------------------------------------------------------------------


def _object(kind: Any, *, sent: bool) -> Schema:
    """Describe a type; one that the server has *sent* has its fields with a default too."""
    hints = get_type_hints(kind)
    fields = [item for item in attrs.fields(kind) if item.name not in _NEVER_SENT]
    certain = {f.name for f in fields if sent or f.default is attrs.NOTHING} - _SENT_UNLESS_NULL
    return {
        "type": "object",
        "properties": {
            item.name: {**_schema(hints[item.name]), **RULES.get(item.validator, {})}
            for item in fields
        },
        "required": [item.name for item in fields if item.name in certain],
    }


def _schema(hint: Any) -> Schema:
    origin, args = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (kind,) = (arg for arg in args if arg is not NoneType)
        schema = _schema(kind)
        if "type" in schema:
            return {**schema, "type": [schema["type"], "null"]}
        return {"anyOf": [schema, {"type": "null"}]}
    if origin in {list, Sequence}:
        return {"type": "array", "items": _schema(args[0])}
    if origin in {dict, Mapping}:
        return {"type": "object", "additionalProperties": _schema(args[1]) or True}
    if attrs.has(hint) or (isinstance(hint, type) and issubclass(hint, StrEnum)):
        return _ref(hint.__name__)
    return dict(_SCALARS[hint])


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# --- what the routes check by hand ------------------------------------------------------------


def _record(required: dict[str, Any], **optional: Any) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def _one_of_three() -> Schema:
    selectors: dict[str, Schema] = {
        "ids": {"type": "array"},
        "prefix": {"type": "string"},
        "all": {"const": True},
    }
    return {
        **_ref("CancelRolloutsRequest"),
        "properties": {"ids": {"maxItems": MAX_CANCEL_IDS}},
        "oneOf": [{"properties": {k: v}, "required": [k]} for k, v in selectors.items()],
    }


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NAMES: Schema = {"type": "array", "items": _TEXT}
_TOKEN: Schema = {"type": "string", "minLength": 1}
_PROBLEM = _record(
    {
        "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
        "msg": _TEXT,
        "type": _TEXT,
    }
)
_CLAIM = _record(
    {"rollout_id": _TEXT, "polling_lease_token": _TEXT}, seen={"type": ["string", "null"]}
)
_CLAIMS: Schema = {"type": "array", "items": _CLAIM, "maxItems": MAX_CLAIMS}
_OUTCOME = _record(
    {"status_code": {"enum": [202, 409, 422, 429, 503]}},
    admission=_ref("RolloutInitResponse"),
    detail={"anyOf": [_TEXT, {"type": "array", "items": _ref("Problem")}]},
    retry_after_sec={"type": "number"},
)
_STARTED = _record({"rollout_id": _TEXT, "status_code": {"enum": [200, 403, 404, 409]}})
_BY_HAND: dict[str, Schema] = {
    "Refusal": _record({"detail": _TEXT}),
    "PauseRequest": _record(
        {}, mode={"enum": ["drain", "abort"]}, timeout_sec={"type": "number", "minimum": 0}
    ),
    "ResumeRequest": _record({}, version={"type": ["integer", "null"], "minimum": 0}),
    "PolicyState": _record(
        {
            "paused": {"type": "boolean"},
            "version": {"type": ["integer", "null"]},
            "calls_in_flight": _COUNT,
        },
        workers=_record(
            {
                "total": _COUNT,
                "current": _COUNT,
            }
        ),
    ),
    "Problem": _PROBLEM,
    "Problems": _record({"detail": {"type": "array", "items": _ref("Problem"), "minItems": 1}}),
    "Health": _record(
        {
            "status": _TEXT,
            "instance_id": _TOKEN,
            "process_id": _TOKEN,
            "version": _TOKEN,
            "application": {"type": ["string", "null"]},
            "extensions": _NAMES,
            "polling_lease_timeout_sec": {"type": "number", "exclusiveMinimum": 0},
            "lifecycle": _ref("RolloutLifecycle"),
            "counts": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        state=_record(
            {"status": {"enum": ["ok", "error"]}, "detail": {"type": ["string", "null"]}}
        ),
        policy=_ref("PolicyState"),
        gateway=_record(
            {
                "calls": _COUNT,
                "calls_waiting": _COUNT,
                "retries": _COUNT,
                "wait_sec": {"type": "number", "minimum": 0},
                "upstreams": {
                    "type": "array",
                    "items": _record(
                        {
                            "url": _TEXT,
                            "calls_in_flight": _COUNT,
                            "limit": {"type": ["integer", "null"], "minimum": 1},
                            "rollouts": _COUNT,
                            "failing": {"type": "boolean"},
                            "held_sec": {"type": "number", "minimum": 0},
                        }
                    ),
                },
            }
        ),
    ),
    "BatchRequest": _record(
        {"rollouts": {"type": "array", "items": _ref("RolloutInitRequest"), "maxItems": MAX_BATCH}},
        feed={"type": ["string", "null"], "minLength": 1},
        traceparents={"type": ["array", "null"], "items": {"type": ["string", "null"]}},
    ),
    "BatchResponse": _record(
        {"outcomes": {"type": "array", "items": _OUTCOME}, "attached": {"type": "boolean"}}
    ),
    "FeedRequest": _record({"leases": _CLAIMS}),
    "LiveUpdate": _record(
        {
            "now": {"type": "number"},
            "rows": {"type": "array", "items": _ref("LiveRow")},
            "gone": _NAMES,
        },
        server={"type": "object"},
        rollouts={"type": "object", "additionalProperties": {"type": "integer"}},
        rates={"type": "object", "additionalProperties": {"type": "number"}},
        outcomes={"type": "object", "additionalProperties": {"type": "integer"}},
        failures={"type": "object", "additionalProperties": {"type": "integer"}},
        durations={"type": "object"},
        history={"type": "object"},
        slots={"type": ["object", "null"]},
        workers={"type": ["array", "null"], "items": {"type": "object"}},
        gateway={"type": ["object", "null"]},
    ),
    "LiveRow": _record(
        {
            "id": _TEXT,
            "status": _ref("RolloutStatus"),
            "admitted_at": {"type": "number"},
        },
        run=_TEXT,
        worker=_TEXT,
        agent_started_at={"type": "number"},
        grading_at={"type": "number"},
        ended_at={"type": "number"},
        cancelling={"const": True},
        reward={"type": "number"},
        err_category=_ref("RolloutErrorCategory"),
        err_source=_TEXT,
        err_message=_TEXT,
    ),
    "LiveConversation": _record(
        {
            "now": {"type": "number"},
            "status": _ref("RolloutStatus"),
            "from": {"type": "integer", "minimum": 0},
            "steps": {"type": "array", "items": {"type": "object"}},
        },
        calls_in_flight={"type": "integer"},
        note=_TEXT,
    ),
    "RenewRequest": _record({"feed": _TOKEN}),
    "RenewResponse": _record({"renewed": _COUNT}),
    "StartRequest": _record(
        {"rollouts": {"type": "array", "items": _CLAIM, "maxItems": MAX_CLAIMS}}
    ),
    "StartResponse": _record({"outcomes": {"type": "array", "items": _STARTED}}),
}


# --- routes -----------------------------------------------------------------------------------


def _paths(asked: tuple[int, ...]) -> dict[str, Any]:
    def operation(
        name: str,
        summary: str,
        answer: dict[int, Any],
        *refusals: int,
        body: Schema | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        status = (*_ALWAYS, *asked, *refusals, *(() if body is None else _WITH_BODY))
        responses = {str(code): answer[code] for code in answer}
        responses |= {str(code): _answer(_REFUSALS[code], _ref("Refusal")) for code in status}
        if body is not None:
            content = {"application/json": {"schema": body}}
            more["requestBody"] = {"required": True, "content": content}
        if body is not None or "parameters" in more:
            problems = "A field, or the header of the lease, breaks its rule."
            responses["422"] = _answer(problems, _ref("Problems"))
        return {"operationId": name, "summary": summary, "responses": responses, **more}

    lease = {"name": POLLING_LEASE_HEADER, "in": "header", "required": True, "schema": _TOKEN}
    seen = {"name": SEEN_STATE_HEADER, "in": "header", "schema": _TEXT}
    rollout_id = {
        "name": "rollout_id",
        "in": "path",
        "required": True,
        "schema": _object(RolloutInitRequest, sent=False)["properties"]["rollout_id"],
    }
    state = _answer("How the policy stands.", _ref("PolicyState"))
    admission = _answer("It is admitted.", _ref("RolloutInitResponse"))
    admission["links"] = {
        "result": {
            "operationId": "result",
            "parameters": {
                "path.rollout_id": "$response.body#/rollout_id",
                f"header.{POLLING_LEASE_HEADER}": "$response.body#/polling_lease_token",
            },
        }
    }
    lines = {"description": "Results, one a line.", "content": {"application/x-ndjson": {}}}
    states = {
        "description": "States, one a line; the first has everything, others what has changed.",
        "content": {"application/x-ndjson": {"schema": _ref("LiveUpdate")}},
    }
    page = {"description": "The page.", "content": {"text/html": {}}}
    conversation = {
        "description": "States, one a line; steps replace what was there from a place on.",
        "content": {"application/x-ndjson": {"schema": _ref("LiveConversation")}},
    }
    return {
        "/health": {
            "get": operation(
                "health", "Say how the server is.", {200: _answer("Its health.", _ref("Health"))}
            )
        },
        "/rollout": {
            "post": operation(
                "admit",
                "Admit a rollout.",
                {202: admission},
                *(409, 429, 503),
                body=_ref("RolloutInitRequest"),
            )
        },
        "/rollout/{rollout_id}/result": {
            "get": operation(
                "result",
                "Wait for news of a rollout, and renew its lease.",
                {200: _answer("Where it stands.", _ref("RolloutResultResponse"))},
                *(403, 404, 503),
                parameters=[rollout_id, lease, seen],
            )
        },
        "/rollout/{rollout_id}/trajectory": {
            "get": operation(
                "trajectory",
                "Read the trajectory of a rollout that has ended, an ATIF document.",
                {200: _answer("The document.", {"type": "object"})},
                *(403, 404, 409, 503),
                parameters=[rollout_id, lease],
            )
        },
        "/rollout/{rollout_id}/live": {
            "get": operation(
                "live_conversation",
                "Stream the conversation of a rollout, up to its end.",
                {200: conversation},
                *(404, 503),
                parameters=[rollout_id],
            )
        },
        "/rollout/cancel": {
            "post": operation(
                "cancel",
                "Ask rollouts to stop.",
                {200: _answer("What becomes of each.", _ref("CancelRolloutsResponse"))},
                body=_one_of_three(),
            )
        },
        "/rollouts": {
            "post": operation(
                "admit_many",
                "Admit many rollouts, each with an outcome of its own.",
                {200: _answer("The outcomes, in order.", _ref("BatchResponse"))},
                body=_ref("BatchRequest"),
            )
        },
        "/rollouts/feed": {
            "post": operation(
                "feed",
                "Stream the results of rollouts; the answer has no end.",
                {200: lines},
                503,
                body=_ref("FeedRequest"),
            )
        },
        "/rollouts/live": {
            "get": operation(
                "live",
                "Stream the state of the server and of its rollouts; the answer has no end.",
                {200: states},
                503,
            )
        },
        "/rollouts/renew": {
            "post": operation(
                "renew",
                "Renew the leases of an open feed.",
                {200: _answer("How many were renewed.", _ref("RenewResponse"))},
                404,
                body=_ref("RenewRequest"),
            )
        },
        "/rollouts/start": {
            "post": operation(
                "start",
                "Let the agents of admitted rollouts start.",
                {200: _answer("What becomes of each, in order.", _ref("StartResponse"))},
                503,
                body=_ref("StartRequest"),
            )
        },
        "/policy": {
            "get": operation(
                "policy",
                "Read whether the calls of agents are sent, and the version of the policy.",
                {200: state},
                404,
            )
        },
        "/policy/pause": {
            "post": operation(
                "pause",
                "Hold back the calls of agents.",
                {200: state},
                404,
                body=_ref("PauseRequest"),
            )
        },
        "/policy/resume": {
            "post": operation(
                "resume",
                "Send the calls of agents again.",
                {200: state},
                404,
                body=_ref("ResumeRequest"),
            )
        },
        "/metrics": {
            "get": operation(
                "metrics",
                "Read what the server has counted, in the text format of Prometheus.",
                {200: {"description": "The metrics.", "content": {"text/plain": {}}}},
                404,
            )
        },
        "/ui": {
            "get": {
                **operation("ui", "Read the page that shows the server.", {200: page}, 404),
                "security": [],
            }
        },
        OPENAPI_PATH: {
            "get": operation(
                "openapi", "Describe the server.", {200: _answer("This.", {"type": "object"})}
            )
        },
    }


def _answer(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
