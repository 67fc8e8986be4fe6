"""What does our site do that mkdocs does not? Folders in its navigation, and links that leave docs/."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.exceptions import PluginError

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every `FOLDER/*` of the navigation has become the pages that are there, and `*` those that nobody names."""
    pages = sorted(file.src_uri for file in files.documentation_pages())
    named = set(_names(config.nav))
    others = [page for page in pages if page not in named and not any(fnmatch(page, name) for name in named if name.endswith("/*"))]
    config.nav = _expanded(
        config.nav, {"*": others} | {name: [p for p in pages if fnmatch(p, name)] for name in named if name.endswith("/*")}
    )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """A link to a file of the project that is not on the site is its text; one to no file at all is an error."""
    docs = Path(config.docs_dir).resolve()
    here = (docs / page.file.src_uri).parent

    def linked(match: re.Match[str]) -> str:
        target = (here / match[3]).resolve()
        if ":" in match[3] or target.is_relative_to(docs):
            return match[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {match[3]}, which does not exist")
        return match[2]

    return LINK.sub(linked, markdown)


def _names(nav: Any) -> list[str]:  # noqa: ANN401  lists, dicts and strings, as YAML has them
    match nav:
        case str():
            return [nav]
        case dict():
            return [name for one in nav.values() for name in _names(one)]
        case list():
            return [name for one in nav for name in _names(one)]
    return []


def _expanded(nav: Any, meaning: dict[str, list[str]]) -> Any:  # noqa: ANN401  as above
    match nav:
        case str():
            return meaning.get(nav, nav)
        case dict():
            return {title: _expanded(one, meaning) for title, one in nav.items()}
        case list():
            return [
                part for one in nav for part in (meaning[one] if isinstance(one, str) and one in meaning else [_expanded(one, meaning)])
            ]
    return nav
