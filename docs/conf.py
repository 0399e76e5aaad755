"""Configuration of the documentation site; ``nox -s docs`` builds it."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version as installed_version
from typing import Any

from sphinx.domains.python import PyObject
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.nodes import make_refnode

project = "trio-rollout"
author = "trio-rollout contributors"
copyright = author
release = installed_version("trio-rollout")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinxcontrib_trio",
]
exclude_patterns = ["_build"]
needs_sphinx = "8.0"

# Docstrings put names into single backticks: a link where the name is known, code elsewhere.
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autosummary_generate = False
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
python_maximum_signature_line_length = 88

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 3

_WORTH_A_TABLE = 4
_LINKED = {"class", "exception", "function"}
_MEMBERS = {"attribute", "method", "property"}

html_theme = "furo"
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"
html_title = f"trio-rollout {release}"
html_static_path = ["_static"]
html_css_files = ["rollout.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b6e6e",
        "color-brand-content": "#0b6e6e",
    },
    "dark_css_variables": {
        "color-brand-primary": "#5cc8c0",
        "color-brand-content": "#5cc8c0",
    },
}


def _plain_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """Show ``...`` for defaults that attrs makes anew for every instance."""
    del app, what, name, obj, options
    if signature is not None:
        signature = signature.replace("= NOTHING", "= ...")
        signature = re.sub(r"= <object object[^>]*>", "= ...", signature)
    return signature, returns


def _is_described(module: str, obj: Any, name: str) -> bool:
    """Whether a module's page has an entry for a name; exceptions have a page of their own."""
    found = getattr(obj, name)
    if inspect.isclass(found) and issubclass(found, BaseException):
        return module == "rollout.errors" or "harbor" in module
    return inspect.isfunction(found) or isinstance(found, type)


def _contents_of_a_module(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Begin a module's page with what it has, a line each; leave out what says nothing."""
    del app
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()  # what a named tuple says of its fields; its own docstring says more
    if what != "module" or options.get("no-members"):
        return
    shown = [each for each in getattr(obj, "__all__", ()) if _is_described(name, obj, each)]
    if len(shown) >= _WORTH_A_TABLE:
        lines += ["", ".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   {each}" for each in shown]
        lines += [""]


def _known_by_its_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a name that is documented under another module than the one it was written in."""
    if node.get("refdomain") != "py":
        return None
    python = env.get_domain("py")
    wanted = node["reftarget"]
    if wanted.startswith("rollout."):  # the module may be one that is not documented
        wanted = wanted.rpartition(".")[2]
    found = [
        name
        for name in python.objects
        if name.startswith("rollout") and name.endswith(f".{wanted}")
    ]
    linked = _LINKED | _MEMBERS if "." in wanted else _LINKED
    # An alias is the same thing again, under the module that it was written in.
    entries = {name: python.objects[name] for name in found if not python.objects[name].aliased}
    modules = {name: entry for name, entry in entries.items() if entry.objtype in linked}
    if len(modules) != 1:
        return None
    ((name, entry),) = modules.items()
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, name)


def setup(app: Any) -> None:
    """Register the hooks above."""
    # A sentence with a colon is no type: "It was cancelled: ..." is all of the text.
    GoogleDocstring._parse_attribute_docstring = lambda self: self._dedent(  # noqa: SLF001
        self._consume_to_end()
    )
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("autodoc-process-signature", _plain_signature)
    app.connect("autodoc-process-docstring", _contents_of_a_module)
    app.connect("missing-reference", _known_by_its_name)
