"""Configuration of the documentation site; ``nox -s docs`` builds it."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "trio-rollout"
author = "trio-rollout contributors"
copyright = author
release = installed_version("trio-rollout")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib_trio",
]
exclude_patterns = ["_build"]
needs_sphinx = "8.0"

# Docstrings put names into single backticks: a link where the name is known, code elsewhere.
default_role = "py:obj"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
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
