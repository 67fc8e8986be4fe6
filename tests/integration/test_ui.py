"""The live page, over HTTP and in a real browser: who may see it, what it shows, and that what comes from outside stays text."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from discovery.bus import Bus
from discovery.observations import PlanMessage, PlanPool
from discovery.subjects import Subjects
from engines.types import EngineSpec, Role
from router.ui.page import PAGE_PATHS
from tests.browser import Page, browser, chromium_path
from tests.integration.nats_servers import nats_server
from tests.integration.processes import TOKEN, group
from tests.rig import Router, fleet, prompt, routing
from tests.waiting import until

HOSTILE = "</script><img src=x onerror=document.title='owned'><b>m"
IN_A_BROWSER = pytest.mark.skipif(chromium_path() is None, reason="there is no Chromium: scripts/setup-browser installs it")


async def state_of(router: Router, token: str | None = TOKEN) -> tuple[int, dict[str, Any]]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with router.session.get(f"{router.admin}/ui/state", headers=headers) as answer:
        return answer.status, await answer.json()


async def stream(router: Router, text: str, model: str = "sim") -> None:
    answer = await router.chat(text, model=model, stream=True, stream_options={"include_usage": True}, max_tokens=8)
    assert answer.status == 200


async def test_the_page_is_open_and_says_nothing_while_its_state_needs_the_token() -> None:
    async with fleet(1) as engines, routing(engines, admin_token=TOKEN) as router:
        for path in sorted(PAGE_PATHS):
            async with router.session.get(router.admin + path.decode()) as answer:
                page = await answer.text()
                assert answer.status == 200, path
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "default-src 'none'" in answer.headers["content-security-policy"]
                assert "access-control-allow-origin" not in answer.headers
                assert engines[0].url not in page
            async with router.session.post(router.admin + path.decode()) as answer:
                assert answer.status == 405
        for token in (None, "", "a-wrong-token-of-some-length"):
            assert (await state_of(router, token))[0] == 401
        async with router.session.get(f"{router.admin}/admin/engines") as answer:
            assert answer.status == 401, "the page opens nothing else"
        assert (await router.get("/ui")).status == 404, "nor is it on the clients' port"


async def test_U5_every_candidate_of_the_latest_decisions_is_shown_with_its_cost() -> None:
    async with fleet(2) as engines, routing(engines, admin_token=TOKEN) as router:
        await stream(router, prompt("a"))
        await until(lambda: known(router, prompt("a")), what="it is cached")
        await stream(router, prompt("a"))
        status, state = await state_of(router)
        assert status == 200
        latest, first = state["decisions"]
        assert (latest["reason"], first["reason"]) == ("kv", "no_shared_prefix")
        assert {one["engine"] for one in latest["candidates"]} == {engine.url for engine in engines}
        assert latest["candidates"][0]["cost"] < latest["candidates"][1]["cost"]
        assert latest["overlap_tokens"] == latest["cached_tokens"] > 0
        assert latest["ttft_s"] is not None
        assert latest["completion_tokens"] == 8
        assert state["late"]["itl"]["p50"] is not None
        assert state["troubles"] == []
        assert state["late"]["hit_rate"] == pytest.approx(state["late"]["expected_hit_rate"])
        assert sum(state["latency"]["requests"]) == 2
        assert prompt("a")[:40] not in str(state), "no word of any prompt"


async def known(router: Router, text: str) -> bool:
    return bool((await router.route(text))["overlap_tokens"])


async def test_without_an_admin_listener_nothing_is_remembered_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.proxy._ended", lambda *_: pytest.fail("remembered, and nobody can look"))
    async with fleet(1) as engines, routing(engines) as router:
        assert (await router.chat("x")).status == 200


async def test_several_processes_are_shown_as_one_router(tmp_path: Path) -> None:
    async with fleet(2) as engines, group(engines, tmp_path / "log") as routers:
        answers = await routers.through_all(2, prompt("a"))

        async def all_have_ended() -> bool:
            _, told = await state_of(routers)
            return len(told["decisions"]) == len(answers)

        await until(all_have_ended, what="every request is among the decisions")
        _, state = await state_of(routers)
        assert state["processes"] == {"up": 2, "silent": []}
        assert {one["process"] for one in state["decisions"]} == {0, 1}
        assert sum(state["latency"]["requests"]) == len(answers)
        assert {engine["id"] for engine in state["engines"]} == {engine.url for engine in engines}
        assert sum(endpoint["recent_requests"] for engine in state["engines"] for endpoint in engine["endpoints"]) == len(answers)


async def test_what_a_planner_says_on_the_bus_is_shown(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as nats, fleet(1) as engines, routing(engines, nats=nats.url, admin_token=TOKEN) as router:
        bus = Bus()
        await bus.connect(nats.url, name="a planner")
        plan = PlanMessage("p", 1, 0.0, "sim", (PlanPool("sim", Role.AGGREGATED, 3, 1, (), ("ttft above target",)),))

        async def shown() -> bool:
            bus.publish(Subjects("commutator").plans, msgspec.msgpack.encode(plan))
            _, state = await state_of(router)
            return [one["pools"][0]["replicas"] for one in state["plans"]] == [3]

        await until(shown, what="the plan is shown")
        await bus.close()


def test_the_page_s_files_name_nothing_outside_of_this_router() -> None:
    for path in files("router.ui").iterdir():
        if path.name.endswith((".html", ".css", ".js")):
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//[a-z]+\.|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), (
                path.name
            )


async def entered(page: Page) -> None:
    """As a person without a mouse does."""
    await page.until("document.activeElement?.id === 'token'")
    await page.type(TOKEN)
    await page.press("Enter")
    await page.until("!document.getElementById('main').hidden && document.querySelector('#fleet tbody tr')")


@IN_A_BROWSER
async def test_a_person_with_the_token_sees_the_fleet_decisions_and_plots_as_they_change() -> None:
    async with (
        fleet(2) as engines,
        routing([*engines, "http://127.0.0.1:9"], wait_for=2, admin_token=TOKEN) as router,
        browser() as chromium,
    ):
        await stream(router, prompt("a"))
        async with chromium.page(f"{router.admin}/ui") as page:
            await page.until("document.activeElement?.id === 'token'")
            await page.type("a-wrong-token-of-some-length")
            await page.press("Enter")
            await page.until("document.getElementById('refused').textContent")
            await entered(page)
            assert [complaint for complaint in page.complaints if "401" not in complaint] == []
            assert "Not there: http://127.0.0.1:9" in await page.text("#trouble-list")
            shown = await page.text("#fleet tbody")
            assert all(engine.url in shown for engine in engines)
            assert "serving" in shown
            assert "live" in shown
            assert await page.evaluate("document.querySelectorAll('#ttft svg path, #ttft svg circle').length") > 0

            await page.evaluate("document.querySelector('#decisions summary').click()")
            assert "(chosen)" in await page.text("#decisions table")
            assert await page.evaluate("document.querySelectorAll('#decisions tbody tr').length") == 2
            await stream(router, prompt("b"))
            await page.until("document.querySelectorAll('#decisions li').length === 2")
            assert await page.evaluate("document.querySelectorAll('#decisions details[open]').length") == 1, "what was open stays open"

            await narrow_and_dark(page)
            assert all(url.startswith((router.admin, "data:")) for url in page.requested), page.requested
        async with chromium.page(f"{router.admin}/ui") as page:
            await page.until("document.activeElement?.id === 'token'")
            assert await page.evaluate("document.getElementById('main').hidden"), "the token stays in its tab"


async def narrow_and_dark(page: Page) -> None:
    """On a phone nothing is wider than the screen; text stands out, by day and by night; everything to act on has a name."""
    for dark in (False, True):
        await page.wide(390, dark=dark)
        await page.until("document.documentElement.clientWidth === 390")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 390
        assert await page.evaluate(POOR_CONTRAST) == []
    assert await page.evaluate(NAMELESS) == []
    await page.wide(1200)


@IN_A_BROWSER
async def test_names_from_outside_are_shown_as_text() -> None:
    async with (
        fleet(1, served_model_name=HOSTILE) as engines,
        routing([EngineSpec(engines[0].url)], admin_token=TOKEN) as router,
        browser() as chromium,
        chromium.page(f"{router.admin}/ui") as page,
    ):
        await stream(router, "x", model=HOSTILE)
        await entered(page)
        assert HOSTILE in await page.text("#fleet tbody")
        assert HOSTILE in await page.text("#decisions")
        assert await page.evaluate("document.title") == "Commutator"
        assert await page.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert page.complaints == []


POOR_CONTRAST = """(() => {
  const parse = (color) => (color.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!says || !element.checkVisibility() || element.closest("noscript")) continue;
    const style = getComputedStyle(element), front = parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [high, low] = [light(front), light(behind(element))].sort((a, b) => b - a);
    if ((high + 0.05) / (low + 0.05) < 4.5) poor.push(`${element.tagName} ${element.className} ${element.textContent.slice(0, 40)}`);
  }
  return poor;
})()"""

NAMELESS = """[...document.querySelectorAll("button, input, table, section, [role=img], [role=region]")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !(element.labels?.length || element.getAttribute("aria-label") || element.getAttribute("aria-labelledby")
    || element.closest("[role=region], section")?.hasAttribute("aria-labelledby") || element.closest("[aria-label]") || element.textContent.trim()))
  .map((element) => element.outerHTML.slice(0, 80))"""
