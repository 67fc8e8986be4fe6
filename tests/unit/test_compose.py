from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec.models import ComposeSpecification

import commutator

ROOT = Path(commutator.__file__).parent
FILE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
OURS = [name for name, service in SERVICES.items() if service["image"] == "commutator:local"]
PROFILES = sorted({profile for service in SERVICES.values() for profile in service["profiles"]})


def composes() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not composes(), reason="the docker client with its compose plug-in is not here")
def test_compose_accepts_the_file() -> None:
    done = subprocess.run(
        ["docker", "compose", "-f", ROOT / "compose.yaml", "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_file_is_what_the_compose_specification_allows() -> None:
    plain = {key: value for key, value in FILE.items() if not key.startswith("x-")}
    assert ComposeSpecification.model_validate(plain, extra="forbid").services is not None
    with pytest.raises(ValueError, match="Extra inputs"):
        ComposeSpecification.model_validate(plain | {"service": {}}, extra="forbid")


def test_what_is_started_without_a_profile_is_one_of_the_profiles() -> None:
    (line,) = [line for line in (ROOT / ".env").read_text().splitlines() if not line.startswith("#")]
    assert line.partition("=")[::2] == ("COMPOSE_PROFILES", "simulated")
    assert PROFILES == ["disagg", "observability", "sglang", "simulated", "vllm"]


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_service_depends_on_and_mounts_is_there(service: str) -> None:
    for other in SERVICES[service].get("depends_on", []):
        assert set(SERVICES[service]["profiles"]) <= set(SERVICES[other]["profiles"])
    for volume in SERVICES[service].get("volumes", []):
        source = volume.partition(":")[0]
        assert source in FILE["volumes"] or (ROOT / source).exists(), volume


@pytest.mark.parametrize("service", OURS)
def test_every_service_runs_a_command_that_takes_its_options(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = commutator.run([*SERVICES[service]["command"], "--check-config"], {})
    assert (code, capsys.readouterr().err) == (0, "")


def test_the_router_is_pointed_at_the_engines_that_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    simulate = SERVICES["engines"]["command"]
    count, port = (int(simulate[simulate.index(flag) + 1]) for flag in ("--engines", "--port"))
    serve = SERVICES["router"]["command"]
    named = [value for flag, value in pairwise(serve) if flag == "--engine"]
    assert named == [f"http://engines:{port + index}" for index in range(count)]
