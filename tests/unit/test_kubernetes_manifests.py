"""The manifests are what Kubernetes takes, name one another rightly, and start commands with options that there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import commutator
from discovery.sources.objects import KINDS, found_in
from engines.types import Role

FOLDER = Path(commutator.__file__).parent / "deploy" / "kubernetes"
OVERLAYS = ("vllm", "disagg")
IPS = {"vllm": "10.0.0.1", "prefill": "10.0.0.2", "decode": "10.0.0.3"}
ENGINES = {
    "vllm": [("http://10.0.0.1:8000", None)],
    "disagg": [("http://10.0.0.2:8000", Role.PREFILL), ("http://10.0.0.3:8000", Role.DECODE)],
}


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
    assert {item["kind"] for item in found} == {"ServiceAccount", "Role", "RoleBinding", "Deployment", "Service", "PodDisruptionBudget"}
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
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= of_a_pod.items() for of_a_pod in labels), item["metadata"]["name"]
        if item["kind"] == "Service":
            assert {port["targetPort"] for port in item["spec"]["ports"]} <= ports
    for _, template in pods(overlay):
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        assert {mount["name"] for one in template["spec"]["containers"] for mount in one.get("volumeMounts", [])} == volumes
        for one in template["spec"]["containers"]:
            assert {"readinessProbe", "livenessProbe", "resources"} <= one.keys(), one["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_finds_the_engines_that_there_are_and_may_ask_for_them(overlay: str, capsys: pytest.CaptureFixture[str]) -> None:
    (router,) = [one for _, template in pods(overlay) for one in template["spec"]["containers"] if one["name"] == "router"]
    code = commutator.run([*router["args"], "--check-config"], {})
    assert (code, capsys.readouterr().err) == (0, "")
    (selector,) = [argument.partition("=")[2] for argument in router["args"] if argument.startswith("--discover-kubernetes=")]
    name, _, value = selector.partition("=")
    running = [_running(template) for _, template in pods(overlay) if template["metadata"]["labels"].get(name) == value]
    found = found_in(KINDS["pods"], running, {})
    assert found.faults == ()
    assert [(spec.url, spec.role) for spec in found.specs] == ENGINES[overlay]
    (role,) = [item for item in resources(overlay) if item["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def _running(template: dict[str, Any]) -> dict[str, Any]:
    """A pod of the template, as the API server tells of it."""
    name = template["metadata"]["labels"]["app.kubernetes.io/name"]
    return template | {"metadata": template["metadata"] | {"name": name}, "status": {"phase": "Running", "podIP": IPS[name]}}


def test_kv_transfer_has_the_shared_memory_the_address_and_the_transport_it_needs() -> None:
    engines = [template["spec"] for item, template in pods("disagg") if item["metadata"]["name"] in IPS]
    assert len(engines) == 2
    for spec in engines:
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in spec["volumes"]
        (engine,) = spec["containers"]
        told = {variable["name"]: variable for variable in engine["env"]}
        assert told["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert {"UCX_TLS", "UCX_NET_DEVICES"} <= told.keys()
        assert any(argument.startswith("--kv-transfer-config=") for argument in engine["args"])
