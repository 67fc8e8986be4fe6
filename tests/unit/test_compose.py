from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import commutator

ROOT = Path(commutator.__file__).parent
SERVICES: dict[str, dict[str, list[str]]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def composes() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not composes(), reason="the docker client with its compose plug-in is not here")
def test_compose_accepts_the_file() -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", ROOT / "compose.yaml", "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_runs_a_command_that_takes_its_options(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = commutator.run([*SERVICES[service]["command"], "--check-config"], {})
    assert (code, capsys.readouterr().err) == (0, "")


def test_the_router_is_pointed_at_the_engines_that_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    simulate = SERVICES["engines"]["command"]
    count, port = (int(simulate[simulate.index(flag) + 1]) for flag in ("--engines", "--port"))
    serve = SERVICES["router"]["command"]
    named = [value for flag, value in pairwise(serve) if flag == "--engine"]
    assert named == [f"http://engines:{port + index}" for index in range(count)]
