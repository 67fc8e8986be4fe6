"""How the engines' environments come to be: once, whole, and whoever else is building them."""

from __future__ import annotations

import subprocess
import sys
import threading  # noqa: TID251  a second builder beside the first
from pathlib import Path

import pytest

from tests.engines import environments
from tests.engines.environments import RECIPES, REPOSITORY, Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """An environment of no packages, whose build imports one module."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# nothing\n")
    return Recipe("none", requirements, "json", python=sys.executable)


@pytest.fixture(autouse=True)
def own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> Path:
    monkeypatch.setenv("COMMUTATOR_ENGINES_DIR", str(tmp_path / "engines"))
    monkeypatch.setitem(environments.RECIPES, "none", recipe)
    return tmp_path / "engines"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that were built, in place of building them."""
    built: list[Path] = []

    def build(_: Recipe, folder: Path) -> None:
        folder.mkdir()
        (folder / "made").touch()
        built.append(folder)

    monkeypatch.setattr(environments, "_build", build)
    return built


def test_an_environment_is_built_once_and_then_found(builds: list[Path]) -> None:
    assert environments.ensure("none") == environments.ensure("none") == builds[0]
    assert len(builds) == 1


def test_other_requirements_are_another_environment(builds: list[Path], recipe: Recipe) -> None:
    first = environments.ensure("none")
    recipe.requirements.write_text("# nothing else\n")
    assert environments.ensure("none") != first
    assert first.exists()


def test_what_an_interrupted_build_left_is_thrown_away(builds: list[Path]) -> None:
    folder = environments.ensure("none")
    (folder / ".complete").unlink()
    (folder / "half").touch()
    assert environments.ensure("none") == folder
    assert len(builds) == 2
    assert not (folder / "half").exists()


def test_a_build_that_fails_is_not_taken_for_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Recipe, folder: Path) -> None:
        folder.mkdir()
        raise RuntimeError("no such package")

    with monkeypatch.context() as patched:
        patched.setattr(environments, "_build", fail)
        with pytest.raises(RuntimeError, match="no such package"):
            environments.ensure("none")
    monkeypatch.setattr(environments, "_build", lambda _, folder: (folder / "made").mkdir(parents=True))
    assert (environments.ensure("none") / "made").exists()


def test_two_at_once_build_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, built = threading.Event(), []

    def build(_: Recipe, folder: Path) -> None:
        folder.mkdir()
        built.append(folder)
        assert waiting.wait(10)

    def say(text: str) -> None:
        if "waiting" in text:
            waiting.set()

    monkeypatch.setattr(environments, "_build", build)
    monkeypatch.setattr(environments, "_say", say)
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(environments.ensure("none"))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(20)
    assert len(built) == 1
    assert found == [built[0], built[0]]


def test_a_real_build_makes_a_python_of_its_own_and_keeps_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: Recipe) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    shim = tmp_path / "shim"
    shim.mkdir()
    (shim / "told.py").write_text("")
    monkeypatch.setitem(RECIPES, "none", recipe._replace(imports="told", shim=shim))
    # an empty list of requirements makes pip ask no index
    folder = environments.ensure("none")
    prefix = subprocess.run(
        [folder / "bin" / "python", "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True, timeout=30
    )
    assert prefix.stdout.strip() == str(folder)
    assert list(shim.rglob("told*.pyc"))


def test_an_environment_that_cannot_be_imported_says_why() -> None:
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        environments._run([sys.executable, "-c", "import no_such_module"])


def test_a_library_the_system_lacks_is_asked_for_where_it_cannot_be_installed(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setitem(RECIPES, "none", recipe._replace(libraries=(("libnosuch.so.9", "libnosuch9"),)))
    with pytest.raises(RuntimeError, match="apt-get install libnosuch9"):
        environments.ensure("none")


def test_the_script_refuses_an_engine_it_does_not_know() -> None:
    told = subprocess.run([REPOSITORY / "scripts" / "setup-engines", "tgi"], capture_output=True, text=True, check=False, timeout=30)
    assert told.returncode == 2
    assert "no such engine: tgi" in told.stderr
