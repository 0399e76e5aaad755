"""The public names and the wire, listed in public_face.txt: what a change of either breaks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollout
from rollout.server.openapi import openapi_document

HERE = Path(__file__).parent
LISTED = HERE / "public_face.txt"
ROOT = Path(rollout.__file__).parents[1]
API_PAGES = HERE.parent / "docs" / "api"


def documented_modules() -> list[str]:
    """The modules that the pages of the API describe, as a whole or a member of theirs."""
    found: set[str] = set()
    for page in API_PAGES.glob("*.md"):
        for name in re.findall(r"auto\w+:: (rollout[\w.]*)", page.read_text("utf-8")):
            module = name
            while not source_of(module).exists():  # from a class to its module
                module = module.rpartition(".")[0]
            found.add(module)
    return sorted(found)


def source_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(name: str) -> list[str]:
    """A module's ``__all__``, read without importing what an extra may lack."""
    for node in ast.parse(source_of(name).read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    raise AssertionError(f"{name} has no __all__")


def shape(schema: dict[str, Any]) -> str:
    """A schema in a word or two."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(shape(each) for each in schema["anyOf"])
    kind = schema.get("type", "any")
    text = " | ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{text} of {shape(schema['items'])}" if "items" in schema else text


def body(part: dict[str, Any]) -> str:
    content = part.get("content", {})
    return ", ".join(f"{kind} {shape(each.get('schema', {}))}" for kind, each in content.items())


def face() -> Iterator[str]:
    """The lines of public_face.txt."""
    for name in documented_modules():
        yield f"{name}: {' '.join(exported(name))}"
    document = openapi_document(authenticated=True)
    for path, operations in sorted(document["paths"].items()):
        for method, operation in sorted(operations.items()):
            yield f"{method.upper()} {path}"
            for each in operation.get("parameters", []):
                need = "required" if each.get("required") else "optional"
                yield f"  {each['in']} {each['name']} ({need})"
            if "requestBody" in operation:
                yield f"  request {body(operation['requestBody'])}"
            for status, response in sorted(operation["responses"].items()):
                yield f"  {status} {body(response)}"
    for name, schema in sorted(document["components"]["schemas"].items()):
        if "enum" in schema:
            yield f"{name}: {' '.join(sorted(schema['enum']))}"
            continue
        yield f"{name}: {shape(schema)}"
        for field, inner in sorted(schema.get("properties", {}).items()):
            need = "" if field in schema.get("required", []) else " (optional)"
            yield f"  {field}: {shape(inner)}{need}"


def test_public_names_and_the_wire_are_those_that_are_listed():
    """A new line is a new promise, and one that goes breaks a caller: change the list with care."""
    assert list(face()) == LISTED.read_text("utf-8").splitlines()
