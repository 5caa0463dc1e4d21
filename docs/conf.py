"""Configuration of the documentation as a site: `python -m sphinx -W -b html docs build/site`.

The pages are Markdown that GitHub shows as well. The reference is generated from docstrings. The
build fails if a link has no target, a page is in no table of contents, or a public name is in no
page of the reference.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # the checkout, also if another version is installed

import batched  # noqa: E402  # from the checkout

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

project = "batched"
version = release = batched.__version__
project_copyright = "the authors of batched, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "changelog.md", "contributing.md", "design"]
nitpicky = True
# names outside this library have no target: the build needs no network
nitpick_ignore_regex = [("py:.*", r"(?!batched\.(?!_)).*")]
suppress_warnings = ["myst.header"]  # a page may go on with a heading of level 3

myst_heading_anchors = 4
default_role = "py:obj"  # docstrings have names in single backticks

autodoc_mock_imports = ["apache_beam", "llguidance", "torch", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {
    "Address": "str",
    "Amount": "float",
    "Count": "int",
    "OnFull": "str",
    "Prices": "tuple[float, float]",
    "Seconds": "float",
    "Text": "str",
}
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "batched"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_show_sphinx = False

OBTAINED = {
    "AsyncBatched",
    "AsyncBatchedInference",
    "AsyncContinuous",
    "Batched",
    "BatchedInference",
    "BatchRecord",
    "BatchedMethod",
    "ChatAnswer",
    "Continuous",
    "DeadLetter",
    "Estimate",
    "FailedPrediction",
    "Future",
    "Generation",
    "Percentiles",
    "Report",
    "Row",
    "Rows",
    "Snapshot",
    "Stats",
    "StepCounts",
    "Stream",
    "Usage",
}
"""Classes that only the library instantiates: their constructors are not shown."""


def public_names() -> dict[str, list[str]]:
    """Return the public modules that can be imported, each with its public names."""
    names = {}
    for info in [None, *pkgutil.walk_packages(batched.__path__, "batched.")]:
        name = info.name if info else "batched"
        private = any(part.startswith("_") for part in name.split("."))
        if private or name.startswith("batched.offline."):
            continue
        module = importlib.import_module(name)
        names[name] = list(module.__all__)
    return names


def check_reference(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Warn of each public name that no page of the reference describes."""
    from sphinx.ext.autodoc.mock import mock
    from sphinx.util import logging

    described = env.domains.python_domain.objects
    with mock(app.config.autodoc_mock_imports):
        for module, names in public_names().items():
            for name in names:
                value = getattr(sys.modules[module], name)
                home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
                if not {f"{module}.{name}", home} & described.keys():
                    logging.getLogger(__name__).warning("%s.%s is in no page", module, name)
    return []


def shorten_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Leave out constructors that a reader cannot call, and marks of missing arguments."""
    if what == "exception" or (what == "class" and obj.__name__ in OBTAINED):
        return "" if signature else None, None
    if what == "function" and isinstance(obj, type):
        returns = None
    if what == "class" and "__init__" in vars(obj) and signature == "(*args: Any, **kwargs: Any)":
        # the base class is a mock
        signature = str(inspect.signature(obj.__init__)).replace("self, ", "", 1)
        signature = re.sub(r": '([^']*)'", r": \1", signature.partition(" -> ")[0])
    if signature:
        signature = signature.replace("func=<missing>, /, ", "").replace("<factory>", "...")
        signature = re.sub(r" ?= ?<missing>", "", signature)
        signature = re.sub(r"args: [~\w.]*P\b", "args: Any", signature)
        signature = re.sub(r"TypeAliasForwardRef\('([^']*)'\)", r"\1", signature)
    return signature, returns


def read_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Translate the sections of a docstring to reStructuredText.

    A class that is called as a function is described by its constructor. The docstring of an
    attribute begins with no type, even if it has a colon; napoleon's own hook would take one for
    the mark of a type.
    """
    from sphinx.ext.napoleon import Config, GoogleDocstring
    from sphinx.util.docstrings import prepare_docstring

    if what == "function" and isinstance(obj, type):
        lines[:] = prepare_docstring(inspect.getdoc(obj.__init__) or "")
    kind = "" if what in ("attribute", "data", "property") else what
    lines[:] = GoogleDocstring(lines, Config(), app, kind, name, obj, options).lines()


def adapt_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Offer saved results of benchmarks as downloads, and enter the settings in the index.

    So a search for a setting finds its row first.
    """
    link = r"\[([^\]]*)\]\(((?:\.\./)+benchmarks/results/\w+\.md)\)"
    source[0] = re.sub(link, r"{download}`\1 <\2>`", source[0])
    if docname == "settings":
        row, entered = r"^\| `(\w+)` \|", "| `\\1`{index}`\u200b <! single: \\1>` |"
        source[0] = re.sub(row, entered, source[0], flags=re.MULTILINE)


def find_class(app: Sphinx, env: BuildEnvironment, node: Any, contnode: Any) -> Any:
    """Link the name of a class without its module, if there is only one class of that name."""
    from sphinx.util.nodes import make_refnode

    target = node["reftarget"]
    if node.get("refdomain") != "py" or not target[:1].isupper():
        return None
    objects = env.domains.python_domain.objects
    found = {
        (entry.docname, entry.node_id)
        for name, entry in objects.items()
        if name.rpartition(".")[2] == target
    }
    if len(found) != 1:
        return None
    (docname, anchor), *_ = found
    return make_refnode(app.builder, node["refdoc"], docname, anchor, contnode)


def setup(app: Sphinx) -> None:
    """Register the functions of this file."""
    from sphinx.pycode import ModuleAnalyzer

    calls = ModuleAnalyzer.for_module("batched._function.batched")
    calls.analyze()
    del calls.overloads["Batched.__call__"]  # Sphinx cannot print their `P.args`
    app.connect("source-read", adapt_source)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("missing-reference", find_class)
    app.connect("env-check-consistency", check_reference)
