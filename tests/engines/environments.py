"""Where do the real engines live, and how do they get there? `scripts/setup-engines` and the tests both ask here.

An environment is a venv in a folder named after what is in it, `vllm-<hash of its requirements>`, so that a change of the requirements
is a new folder and never a half-updated one. A stamp is written last: a folder without it is half-built and is thrown away. A file lock
beside it makes a second builder wait and then find the work done.

    .engines/
      vllm-3f0c…/        bin/python …  complete
      vllm-3f0c….lock
      model-9a41…/       the tiny model with fixed random weights

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MODEL_SOURCE = REPOSITORY / "engines" / "simulator" / "model"


class Recipe(NamedTuple):
    """What an engine's environment is made of."""

    name: str
    requirements: Path
    """Every package with its exact version: installed with --no-deps, since the resolver would add gigabytes of GPU libraries."""
    imports: str
    """What an engine process imports: compiled by importing it once, which also shows that the environment is whole."""
    shim: Path | None = None
    """On PYTHONPATH whenever the engine runs."""
    libraries: tuple[tuple[str, str], ...] = ()
    """Libraries of the system that the wheels link and do not bring, with Debian's package of each."""
    metadata: Path | None = None
    """A project of our own that only carries metadata, installed last."""
    python: str = "python3.11"

    def digest(self) -> str:
        """Names the contents of the environment."""
        parts = [self.python.encode(), self.requirements.read_bytes()]
        if self.metadata:
            parts.append((self.metadata / "pyproject.toml").read_bytes())
        return _digest(parts)


RECIPES = {
    "vllm": Recipe(
        "vllm",
        HERE / "vllm" / "requirements.txt",
        "vllm.entrypoints.cli.main, vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, "
        "vllm.model_executor.models.qwen3, vllm.benchmarks.serve, nixl_cu12, mooncake.engine",
        libraries=(("libnuma.so.1", "libnuma1"), ("libibverbs.so.1", "libibverbs1")),
        metadata=HERE / "vllm" / "metadata",
    ),
    "sglang": Recipe(
        "sglang",
        HERE / "sglang" / "requirements.txt",
        "sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3, "
        "sglang.srt.disaggregation.mooncake.conn, mooncake.engine",
        shim=HERE / "sglang" / "shim",
        libraries=(("libnuma.so.1", "libnuma1"), ("libibverbs.so.1", "libibverbs1")),
    ),
}


def root() -> Path:
    """The folder that holds all environments: `$COMMUTATOR_ENGINES_DIR`, else `.engines` in the repository."""
    return Path(os.environ.get("COMMUTATOR_ENGINES_DIR") or REPOSITORY / ".engines").absolute()


def ensure(name: str) -> Path:
    """The complete environment of engine `name`; built first, or waited for, where it is not there yet."""
    recipe = RECIPES[name]
    return _ensure(root() / f"{name}-{recipe.digest()}", lambda folder: _build(recipe, folder))


def complete() -> bool:
    """Whether the environments of all engines are there."""
    return all((root() / f"{name}-{recipe.digest()}" / ".complete").exists() for name, recipe in RECIPES.items())


def ensure_model() -> Path:
    """The folder of the tiny model: the simulator's tokenizer and configuration, with fixed random weights beside them."""
    maker = HERE / "make_weights.py"
    sources = sorted(path for path in MODEL_SOURCE.iterdir() if path.is_file())
    digest = _digest([maker.read_bytes(), *(path.read_bytes() for path in sources)])

    def build(folder: Path) -> None:
        environment = ensure("vllm")
        folder.mkdir(parents=True)
        for source in sources:
            shutil.copy(source, folder)
        _run([environment / "bin" / "python", maker, folder])

    return _ensure(root() / f"model-{digest}", build)


def clean_environment() -> dict[str, str]:
    """Our environment without what would point an engine's Python at our own packages, or keep it from storing its bytecode."""
    ours = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"}
    return {key: value for key, value in os.environ.items() if key not in ours}


def _ensure(folder: Path, build: Callable[[Path], None]) -> Path:
    stamp = folder / ".complete"
    if stamp.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(folder.name + ".lock")):
        if stamp.exists():
            return folder
        if folder.exists():
            _say(f"{folder.name}: removing what an interrupted build left")
            shutil.rmtree(folder)
        started = time.monotonic()
        build(folder)
        stamp.touch()
        _say(f"{folder.name}: complete after {time.monotonic() - started:.0f} s")
    return folder


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{path.stem}: waiting for another build of it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(recipe: Recipe, folder: Path) -> None:
    count = sum(1 for line in recipe.requirements.read_text().splitlines() if line and not line.startswith("#"))
    python = folder / "bin" / "python"
    for library, package in recipe.libraries:
        _provide(library, package)
    _say(f"{folder.name}: making the environment")
    _run([recipe.python, "-m", "venv", folder])
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-compile",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    _say(f"{folder.name}: installing {count} packages")
    _run([*pip, "--requirement", recipe.requirements])
    if recipe.metadata:
        # setuptools builds inside the source folder: give it a copy
        source = shutil.copytree(recipe.metadata, folder / "metadata")
        _run([*pip, "--no-build-isolation", source])
    # Without bytecode an engine takes twice as long to start, each time. Compiling all of the packages takes 85 s of two cores;
    # what the engine imports is a fifth of them.
    _say(f"{folder.name}: compiling")
    _run([python, "-c", f"import {recipe.imports}"], shim=recipe.shim)


def _provide(library: str, package: str) -> None:
    """Have a library of the system; installed where that is ours to do, asked for where it is not. Raises RuntimeError."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(library)
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise RuntimeError(f"the system has no {library}; on Debian: apt-get install {package}")
    _say(f"installing {package}")
    _run(["apt-get", "update", "--quiet"])
    _run(["apt-get", "install", "--quiet", "--yes", "--no-install-recommends", package])


def _run(command: list[str | Path], *, shim: Path | None = None) -> None:
    text = [str(part) for part in command]
    environment = clean_environment() | ({"PYTHONPATH": str(shim)} if shim else {})
    done = subprocess.run(text, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise RuntimeError(f"{' '.join(text)} ended with {done.returncode}:\n{tail}")


def _digest(parts: list[bytes]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()[:12]


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> None:
    """Build the environments named on the command line, or all, side by side."""
    parser = argparse.ArgumentParser(prog="setup-engines", description="Build the environments of the real engines that tests start.")
    parser.add_argument("engine", nargs="*", help=f"which of {', '.join(RECIPES)} (default: all)")
    names = parser.parse_args().engine or list(RECIPES)
    if unknown := sorted(set(names) - set(RECIPES)):
        parser.error(f"no such engine: {', '.join(unknown)}")
    if len(names) > 1:  # each keeps one core busy
        builders = [subprocess.Popen([sys.executable, __file__, name]) for name in names]
        sys.exit(max([builder.wait() for builder in builders]))
    sys.stdout.write(f"{ensure(names[0])}\n")
    if names == ["vllm"]:
        sys.stdout.write(f"{ensure_model()}\n")


if __name__ == "__main__":
    main()
