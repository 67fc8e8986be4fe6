"""Engines in Kubernetes, through lists and watches as its API server has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from discovery.sources.kubernetes import KubernetesSource
from engines.types import Role
from tests.integration.conftest import Log
from tests.integration.sources import KubernetesApi, finding
from tests.waiting import until

A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


def pod(name: str, number: int, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {"app": "vllm"} | {f"commutator.io/{key}": value for key, value in labels.items()},
        },
        "spec": {"containers": [{"ports": [{"containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": f"10.0.0.{number}"},
    }


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as made:
        made.put(pod("a", 1, role="prefill"))
        made.put(pod("b", 2))
        yield made


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discovery.sources.finder.PAUSE_MIN_S", 0.05)


def source(api: KubernetesApi, folder: Path, relist_s: float = 3600.0) -> KubernetesSource:
    return KubernetesSource("app=vllm", kubeconfig=api.kubeconfig(folder), relist_s=relist_s)


async def test_pods_are_listed_page_by_page_and_then_watched(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discovery.sources.kubernetes.PAGE", 1)
    api.put(pod("other", 9) | {"metadata": {"name": "other", "namespace": "ns", "labels": {"app": "web"}}})
    async with finding(source(api, tmp_path)) as (_, heard):
        await until(lambda: heard.urls == [A, B], what="those that the selector chooses")
        assert heard.specs[A].role is Role.PREFILL
        assert len(api.lists) == 2
        await until(lambda: api.heard)
        api.put(pod("c", 3))
        await until(lambda: heard.urls == [A, B, C], what="one that comes")
        ending = pod("a", 1)
        api.put(ending | {"metadata": ending["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        await until(lambda: heard.urls == [B, C], what="one that is told to end")
        api.delete("b")
        await until(lambda: heard.urls == [C], what="one that is gone")
    assert (len(api.lists), len(api.watches)) == (2, 1)


async def test_a_watch_that_breaks_off_goes_on_from_the_last_version(api: KubernetesApi, tmp_path: Path) -> None:
    async with finding(source(api, tmp_path)) as (_, heard):
        await until(lambda: api.heard)
        api.put(pod("c", 3))
        await until(lambda: C in heard.urls)
        api.bookmark()
        marked = api.version
        api.put(pod("b", 4))
        await until(lambda: "http://10.0.0.4:8000" in heard.urls)
        api.break_off()
        api.delete("c")
        await until(lambda: C not in heard.urls, what="what happened meanwhile is told by the next watch")
    assert len(api.lists) == 1
    assert int(api.watches[1]["resourceVersion"]) == marked + 1


async def test_a_version_that_is_gone_is_answered_by_a_list(api: KubernetesApi, tmp_path: Path) -> None:
    async with finding(source(api, tmp_path)) as (finder, heard):
        await until(lambda: api.heard)
        api.lose = True
        api.delete("a")
        api.lose = False
        api.expire()
        await until(lambda: heard.urls == [B], what="told amid a watch")
        await until(lambda: api.heard == 1 and len(api.watches) == 2)
        api.lose = True
        api.put(pod("c", 3))
        api.lose = False
        api.compact()
        api.break_off()
        await until(lambda: heard.urls == [B, C], what="told at the beginning of the next watch")
        assert not any(finder.failures.values())
    assert len(api.lists) == 3


async def test_bookmarks_keep_a_quiet_watch_from_growing_too_old(api: KubernetesApi, tmp_path: Path) -> None:
    async with finding(source(api, tmp_path)):
        await until(lambda: api.heard)
        api.bookmark()
        await until(lambda: len(api.watches) == 1 and api.heard)
        api.compact()
        api.break_off()
        await until(lambda: len(api.watches) == 2 and api.heard, what="it goes on")
    assert len(api.lists) == 1


async def test_H1_a_delete_that_was_lost_is_made_good_by_the_next_list(api: KubernetesApi, tmp_path: Path) -> None:
    async with finding(source(api, tmp_path, relist_s=0.2)) as (_, heard):
        await until(lambda: heard.urls == [A, B])
        api.lose = True
        api.delete("a")
        await until(lambda: heard.urls == [B], what="nobody told of it, and it is known")


async def test_an_api_server_that_refuses_or_is_away_lets_nobody_go(api: KubernetesApi, tmp_path: Path, logged: Log) -> None:
    async with finding(source(api, tmp_path)) as (finder, heard):
        (name,) = finder.states
        await until(lambda: api.heard)
        api.refuse = 500
        api.break_off()
        await until(lambda: "answered 500: etcdserver: leader changed" in finder.states[name].failure, what="it is said")
        assert heard.urls == [A, B]
        api.refuse = 0
        api.delete("a")
        await until(lambda: heard.urls == [B], what="it answers again")
    assert logged.lines("source failed; what it said last stands")[0]["engines"] == 2


async def test_without_the_right_token_it_says_so(api: KubernetesApi, tmp_path: Path) -> None:
    kubeconfig = api.kubeconfig(tmp_path)
    api.token = "another"
    async with finding(KubernetesSource("app=vllm", kubeconfig=kubeconfig)) as (finder, heard):
        await until(lambda: [state.failure for state in finder.states.values()] == ["the API server answered 401: Unauthorized"])
        assert heard.urls == []


async def test_without_any_configuration_it_says_so(tmp_path: Path) -> None:
    async with finding(KubernetesSource("app=vllm", kubeconfig=str(tmp_path / "none"))) as (finder, _):
        await until(lambda: "no way to the API server is configured" in next(iter(finder.states.values())).failure)
