"""Is what the documentation says so? Its examples run, every name it calls stable exists, and options it names are options."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import commutator
from discovery.config import options

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.glob("*.md"))
OTHERS_FLAGS = re.compile(r"--[a-z0-9][a-z0-9-]*")
STABLE = re.compile(r"^\| `((?:engines|router)\.[a-z_.]+)` \| (.*) \|$", re.MULTILINE)


def test_the_library_s_examples_are_true() -> None:
    results = doctest.testfile(str(DOCS / "library.md"), module_relative=False)
    assert results.attempted > 30
    assert results.failed == 0


def stable() -> Iterator[tuple[str, str]]:
    for module, names in STABLE.findall((DOCS / "library.md").read_text(encoding="utf-8")):
        yield from ((module, name) for name in re.findall(r"`([A-Za-z_]+)`", names))


def test_what_is_called_stable_exists() -> None:
    found = list(stable())
    assert len(found) > 20
    for module, name in found:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def flags() -> set[str]:
    known = {"--help", "--check-config", "--config", "--version"}
    return known.union(*({option.flag for option in options(commutator.settings_of(name))} for name in commutator.COMMANDS))


def told() -> Iterator[tuple[str, str]]:
    """The page and the flag, of every flag of ours that a command line or the second column of a migration table names."""
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.match(r"\s*(?:COMMUTATOR_\S+ )?commutator (?!simulate)[a-z]", line):
                line = line.partition("#")[0]  # noqa: PLW2901  the command, without what is said of it
                yield from ((page.name, flag) for flag in OTHERS_FLAGS.findall(line))
            elif page.name == "migrating.md" and line.startswith("| ") and line.count(" | ") >= 2:
                ours = line.split(" | ")[1]
                yield from ((page.name, flag) for flag in OTHERS_FLAGS.findall(ours) if "served-model-name" not in flag)


def test_every_option_of_ours_that_a_page_names_exists() -> None:
    known, found = flags(), list(told())
    assert len(found) > 60
    assert [(page, flag) for page, flag in found if flag not in known] == []


@pytest.mark.parametrize(
    "page", ["index.md", "quickstart.md", "vllm.md", "sglang.md", "several-routers.md", "live-page.md", "library.md", "migrating.md"]
)
def test_a_newcomer_finds_the_page(page: str) -> None:
    assert page in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    if page != "index.md":
        assert page in (DOCS / "index.md").read_text(encoding="utf-8")


def test_everything_that_is_installed_with_us_is_listed_with_a_licence_that_may_be_used() -> None:
    process = subprocess.run([sys.executable, ROOT / "scripts" / "licences", "--check"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
