"""The manifests are what Kubernetes takes, name one another rightly, and start commands with options that there are."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import commutator
from discovery.config.specs import parse_engine_spec

FOLDER = Path(commutator.__file__).parent / "deploy" / "kubernetes"
OVERLAYS = ("vllm", "disagg")


def resources(folder: str) -> Iterator[dict[str, Any]]:
    """All that a kustomization applies."""
    told = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())
    for name in told["resources"]:
        if name.endswith(".yaml"):
            yield from yaml.safe_load_all((FOLDER / folder / name).read_text())
        else:
            yield from resources(str((FOLDER / folder / name).resolve().relative_to(FOLDER.resolve())))


def pods(folder: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each workload, with its pods' template."""
    return ((item, item["spec"]["template"]) for item in resources(folder) if "template" in item.get("spec", {}))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_resource_is_what_its_schema_says(overlay: str) -> None:
    found = list(resources(overlay))
    for item in found:
        kubernetes_validate.validate(item, "1.34", strict=True)
    assert {item["kind"] for item in found} == {"ServiceAccount", "Deployment", "Service", "PodDisruptionBudget", "StatefulSet"}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1] | {"spec": {"minReplicas": "one"}}, "1.34", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_services_and_volumes_name_what_there_is(overlay: str) -> None:
    found = list(resources(overlay))
    labels = [template["metadata"]["labels"] for _, template in pods(overlay)]
    ports = {port["name"] for _, template in pods(overlay) for one in template["spec"]["containers"] for port in one["ports"]}
    for item in found:
        selector = item.get("spec", {}).get("selector", {})
        if selector:
            assert selector.get("matchLabels", selector) in labels, item["metadata"]["name"]
        if item["kind"] == "Service":
            assert {port["targetPort"] for port in item["spec"]["ports"]} <= ports
    services = {item["metadata"]["name"] for item in found if item["kind"] == "Service"}
    for item, template in pods(overlay):
        assert item["spec"].get("serviceName", "commutator") in services
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        assert {mount["name"] for one in template["spec"]["containers"] for mount in one.get("volumeMounts", [])} == volumes
        for one in template["spec"]["containers"]:
            assert {"readinessProbe", "livenessProbe", "resources"} <= one.keys(), one["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_runs_with_the_options_and_the_engines_that_there_are(overlay: str, capsys: pytest.CaptureFixture[str]) -> None:
    (router,) = [one for _, template in pods(overlay) for one in template["spec"]["containers"] if one["name"] == "router"]
    config = FOLDER / overlay / "commutator.toml"
    arguments = [argument.replace("/etc/commutator/commutator.toml", str(config)) for argument in router["args"]]
    assert arguments != router["args"]
    code = commutator.run([*arguments, "--check-config"], {})
    assert (code, capsys.readouterr().err) == (0, "")
    replicas = {
        f"http://{item['metadata']['name']}-{number}.{item['spec']['serviceName']}:8000"
        for item in resources(overlay)
        if item["kind"] == "StatefulSet"
        for number in range(item["spec"]["replicas"])
    }
    assert {parse_engine_spec(line).url for line in tomllib.loads(config.read_text())["engine"]} == replicas


def test_kv_transfer_has_the_shared_memory_the_address_and_the_transport_it_needs() -> None:
    engines = [template["spec"] for item, template in pods("disagg") if item["kind"] == "StatefulSet"]
    assert len(engines) == 2
    for spec in engines:
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in spec["volumes"]
        (engine,) = spec["containers"]
        told = {variable["name"]: variable for variable in engine["env"]}
        assert told["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert {"UCX_TLS", "UCX_NET_DEVICES"} <= told.keys()
        assert any(argument.startswith("--kv-transfer-config=") for argument in engine["args"])
