"""Sphinx: the pages of this folder, and the API from the package's docstrings. ``scripts/docs`` builds the site.

The build asks the network for nothing, and neither do the pages: formulas become MathML, diagrams are text. It writes
the results pages of the benchmarks and the light and dark forms of the pictures into folders that git ignores.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = ""
"""The address of the project's repository: empty until there is one. What would need it is left out until then."""

project = "lightning-hetero"
copyright = "the lightning-hetero developers"
version = release = re.findall('"([0-9.]+)"', (ROOT / "lightning_hetero/_version.py").read_text(encoding="utf-8"))[-1]
html_title = f"{project} {version}"
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]

extensions = ["myst_parser", "sphinx_copybutton", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # links to headings, as the code host makes them
copybutton_exclude = ".linenos, .gp, .go"

default_role = "code"  # single backticks in docstrings
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_numpy_docstring = False

RESULTS = DOCS / "results"  # a page for each benchmark: its results.md
PAPERS = DOCS / "_build" / "pictures"  # light and dark forms of pictures that hold both

INCLUDED = {
    "CONTRIBUTING.md": "reference/contributing",
    "CHANGELOG.md": "reference/changelog",
    "README.md": "index",
    **{f"benchmarks/{path.parent.name}/results.md": f"results/{path.parent.name}"
       for path in (ROOT / "benchmarks").glob("*/results.md")},
}  # fmt: skip


def write_results_pages(app: Sphinx) -> None:
    """Writes a page for each benchmark which includes its results; the search leaves these out."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir()
    for name, page in INCLUDED.items():
        if page.startswith("results/"):
            text = f"---\nnosearch: true\n---\n\n```{{include}} ../../{name}\n:relative-docs: docs/\n```\n"
            (DOCS / f"{page}.md").write_text(text, encoding="utf-8")


class BothPapers(SphinxTransform):
    """Shows a picture's form for light or for dark paper, as the site's own switch says.

    A picture in an ``<img>`` only knows what the reader's system prefers, not what the page has been switched to. One
    named ``-light`` has its dark form beside it, others hold both.
    """

    default_priority = 10
    DARK = re.compile(r"@media \(prefers-color-scheme:dark\)\{((?:[^{}]*\{[^{}]*\})*)\}")

    def apply(self, **kwargs: Any) -> None:
        for image in list(self.document.findall(nodes.image)):
            file = (Path(self.env.doc2path(self.env.docname)).parent / image["uri"]).resolve()
            if file.suffix != ".svg" or not file.exists():
                continue
            text = file.read_text(encoding="utf-8")
            name = file.stem.removesuffix("-light")
            if name != file.stem:
                papers = {"light": text, "dark": file.with_stem(f"{name}-dark").read_text(encoding="utf-8")}
            elif self.DARK.search(text) is None:
                continue
            else:
                papers = {"light": self.DARK.sub("", text), "dark": self.DARK.sub(lambda found: found[1], text)}
            shown = []
            for paper, drawn in papers.items():
                PAPERS.mkdir(parents=True, exist_ok=True)
                (PAPERS / f"{name}-{paper}.svg").write_text(drawn, encoding="utf-8")
                one = image.deepcopy()
                one["uri"] = f"/_build/pictures/{name}-{paper}.svg"
                one["classes"] = [*image["classes"], f"only-{paper}"]
                shown.append(one)
            image.parent.replace(image, shown)


class LinksBeside(SphinxTransform):
    """Links to what is not in this folder: to the page that includes it, else its path instead of a link.

    On the code host the link leads to the file; so it does on the site once `REPOSITORY` says where that host is.
    """

    default_priority = 10

    def apply(self, **kwargs: Any) -> None:
        for kind in (addnodes.download_reference, addnodes.pending_xref):
            for link in list(self.document.findall(kind)):
                target = self._target(link)
                if target is None or DOCS in target.parents:
                    continue
                name = os.path.relpath(target, ROOT)
                if name in INCLUDED:
                    link["reftarget"] = INCLUDED[name]
                elif REPOSITORY and target.exists():
                    link.replace_self(nodes.reference("", "", *link.children, refuri=f"{REPOSITORY}/blob/main/{name}"))
                elif target.exists():
                    path = [nodes.Text(" ("), nodes.literal(text=name), nodes.Text(")")]
                    link.replace_self([*link.children, *(path if name not in link.astext() else [])])

    def _target(self, link: nodes.Element) -> Path | None:
        """Returns the file or folder that a page's link leads to."""
        path = link.get("reftarget", "").partition("#")[0]
        if link.get("reftype") != "myst" or not path:
            return None
        if link.get("refdomain") == "doc":  # whatever has a page's suffix is taken for a page, and loses it
            return Path(f"{path}.md") if os.path.isabs(path) else None
        return (Path(self.env.doc2path(self.env.docname)).parent / path).resolve()


def inline_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def without_module_text(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """A module's docstring is for who reads the code; the page says what the module is for."""
    if what == "module":
        lines.clear()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(BothPapers)
    app.add_transform(LinksBeside)
    app.connect("builder-inited", write_results_pages)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-docstring", without_module_text)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
