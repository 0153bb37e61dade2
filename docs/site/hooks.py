"""MkDocs hooks: put the README and files from outside of docs/ on the site, make links right in both places, and say
the version.

A page links to files as they lie in the repository, so that it reads well there too. On the site docs/ is the root and
the files of `OUTSIDE` keep their path in the repository; README.md is the first page.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
OUTSIDE = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "SECURITY.md",
    "benchmarks/*.md",
    "benchmarks/*.py",
    "examples/*.py",
    "examples/*.md",
)
LINK = re.compile(r"(\]\()([^)#\s]+)")


def on_config(config: Any) -> Any:
    """Say at the foot of each page which version it is of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"{project['name']} {project['version']}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as index.md, and the files outside of docs/."""
    _add(files, config, "index.md", ROOT / "README.md")
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            _add(files, config, path.relative_to(ROOT).as_posix(), path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page from paths in the repository to paths on the site."""
    uri = page.file.src_uri
    source = "README.md" if uri == "index.md" else uri if _is_outside(uri) else f"docs/{uri}"
    markdown = markdown.replace("](args =", "]\\(args =")  # of an fx node in an error message: no link
    return LINK.sub(lambda match: match[1] + site_link(match[2], source, uri), markdown)


def site_link(target: str, source: str, uri: str) -> str:
    """The link from the page `uri` of the site that `target` is in the file `source` of the repository.

    site_link("../examples/gpt.py", "docs/random.md", "random.md") == "examples/gpt.py"
    """
    if "://" in target or target.startswith("mailto:"):
        return target
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    place = "index.md" if path == "README.md" else path.removeprefix("docs/")
    return posixpath.relpath(place, posixpath.dirname(uri) or ".")


def _add(files: Files, config: Any, uri: str, path: Path) -> None:
    content = path.read_text(encoding="utf-8") if path.suffix == ".md" else path.read_bytes()
    files.append(File.generated(config, uri, content=content))


def _is_outside(uri: str) -> bool:
    return not (ROOT / "docs" / uri).exists()
