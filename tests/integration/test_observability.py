"""Rules and dashboard: every query is one, every metric they name is on a page, and each alert fires for what it is about."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import yaml

from tests.integration.prometheus_servers import NONE_HERE, PROMETHEUS, asked, prometheus
from tests.rig import fleet, prompt, routing
from tests.waiting import until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "commutator.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
NAME = re.compile(r"\b(?:router|relay|planner|process)_[a-z0-9_]+")
TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
PROMTOOL = shutil.which("promtool")

WELL = {
    'router_signal_state{job="c",engine="e",rank="0",state="live"}': "1x200",
    'router_signal_state{job="c",engine="e",rank="0",state="blind"}': "0x200",
    'relay_event_lag_seconds{job="c",engine="e",rank="0"}': "0.01x200",
    'relay_lost_batches_total{job="c",engine="e",rank="0"}': "3x200",
    'router_mirror_resyncs_total{job="c",engine="e",rank="0",reason="joined"}': "0+1x200",
    'router_bus_connected{job="c",instance="r"}': "1x200",
    'router_index_refused_total{job="c"}': "0x200",
    'router_prompt_tokens_total{job="c"}': "0+1000x200",
    'router_engine_cached_tokens_total{job="c"}': "0+500x200",
    'router_cached_tokens_error_total{job="c",engine="e",rank="0",by="kv",kind="missing"}': "0+1x200",
    'router_cached_tokens_total{job="c",engine="e",rank="0",by="kv",source="predicted"}': "0+500x200",
    'relay_blocks_removed_total{job="c",engine="e",rank="0"}': "0+100x200",
    'relay_blocks_stored_total{job="c",engine="e",rank="0"}': "0+100x200",
    'router_model_engines{job="c",model="m"}': "1x200",
    'router_engine_state{job="c",engine="e",state="serving"}': "1x200",
    'router_requests_total{job="c",route="/v1/completions",status="200"}': "0+100x200",
    'router_requests_total{job="c",route="/v1/completions",status="400"}': "0+100x200",
    'router_broken_answers_total{job="c",failure="engine_closed"}': "1x200",
    'router_admission_shed_total{job="c",reason="client_left"}': "0+5x200",
    'router_admission_waiting{job="c",model="m"}': "0x200",
    'router_endpoint_requests_total{job="c",instance="r",engine="e",rank="0"}': "0+900x200",
    'router_engine_info{job="c",instance="r",engine="e",kind="vllm",role="aggregated",version="1"}': "1x200",
    'router_engine_kv_usage_ratio{job="c",instance="r",engine="e",rank="0"}': "0.9x200",
    'router_connections{job="c",instance="r"}': "500x200",
    'process_max_fds{job="c",instance="r"}': "65536x200",
    'router_kv_transfers_total{job="c",outcome="done"}': "0+5x200",
    'router_kv_transfers_total{job="c",outcome="failed"}': "2x200",
    'router_kv_transfer_seconds_bucket{job="c",le="1.0"}': "0+9x200",
    'router_kv_transfer_seconds_bucket{job="c",le="+Inf"}': "0+9x200",
    'router_prefills_total{job="c",where="remote",why="always"}': "0+5x200",
}
"""A fleet that is well, under load."""
SAYS: dict[str, tuple[str, dict[str, str]]] = {
    "CommutatorEngineBlind": ("10m", {'router_signal_state{job="c",engine="e",rank="0",state="blind"}': "1x80"}),
    "CommutatorEventLag": ("10m", {'relay_event_lag_seconds{job="c",engine="e",rank="0"}': "3x80"}),
    "CommutatorEventsLost": ("10m", {'relay_lost_batches_total{job="c",engine="e",rank="0"}': "0x20 5x60"}),
    "CommutatorResyncs": ("10m", {'router_mirror_resyncs_total{job="c",engine="e",rank="0",reason="gap"}': "0+1x80"}),
    "CommutatorBusLost": ("10m", {'router_bus_connected{job="c",instance="r"}': "0x80"}),
    "CommutatorIndexFull": ("10m", {'router_index_refused_total{job="c"}': "0+9x80"}),
    "CommutatorHitRateCollapsed": (
        "100m",
        {'router_prompt_tokens_total{job="c"}': "0+1000x400", 'router_engine_cached_tokens_total{job="c"}': "0+800x320 256000+10x80"},
    ),
    "CommutatorEvictedBeforeReuse": (
        "40m",
        {
            'router_cached_tokens_error_total{job="c",engine="e",rank="0",by="kv",kind="missing"}': "0+30x200",
            'router_cached_tokens_total{job="c",engine="e",rank="0",by="kv",source="predicted"}': "0+100x200",
        },
    ),
    "CommutatorCacheChurns": (
        "50m",
        {
            'relay_blocks_removed_total{job="c",engine="e",rank="0"}': "0+100x400",
            'relay_blocks_stored_total{job="c",engine="e",rank="0"}': "0+100x400",
            'router_prompt_tokens_total{job="c"}': "0+1000x400",
            'router_engine_cached_tokens_total{job="c"}': "0+10x400",
        },
    ),
    "CommutatorNoEngine": ("10m", {'router_model_engines{job="c",model="m"}': "0x80"}),
    "CommutatorEngineEjected": (
        "15m",
        {
            'router_engine_state{job="c",engine="e",state="serving"}': "1x4 _x80",
            'router_engine_state{job="c",engine="e",state="ejected"}': "_x4 1 _x80",
            'router_engine_state{job="c",engine="e",state="waiting"}': "_x5 1x80",
        },
    ),
    "CommutatorErrors": (
        "20m",
        {
            'router_requests_total{job="c",route="/v1/completions",status="200"}': "0+90x90",
            'router_requests_total{job="c",status="502"}': "0+10x90",
        },
    ),
    "CommutatorAnswersBroken": ("15m", {'router_broken_answers_total{job="c",failure="engine_closed"}': "0+1x80"}),
    "CommutatorSaturated": ("15m", {'router_admission_shed_total{job="c",reason="queue_full"}': "0+5x80"}),
    "CommutatorQueue": ("18m", {'router_admission_waiting{job="c",model="m"}': "7x80"}),
    "CommutatorHotSpot": (
        "20m",
        {
            f'router_endpoint_requests_total{{job="c",instance="r",engine="e{n}",rank="0"}}': f"0+{900 if n == 0 else 10}x90"
            for n in range(5)
        }
        | {f'router_engine_info{{job="c",instance="r",engine="e{n}",kind="vllm",role="aggregated",version="1"}}': "1x90" for n in range(5)},
    ),
    "CommutatorFewFiles": (
        "5m",
        {'router_connections{job="c",instance="r"}': "500x80", 'process_max_fds{job="c",instance="r"}': "1024x80"},
    ),
    "CommutatorEngineVersionsDiffer": (
        "65m",
        {f'router_engine_info{{job="c",engine="e{n}",kind="vllm",version="{n}"}}': "1x400" for n in range(2)},
    ),
    "CommutatorTransfersFail": ("10m", {'router_kv_transfers_total{job="c",outcome="failed"}': "0+1x80"}),
    "CommutatorTransfersStranded": ("15m", {'router_kv_transfers_total{job="c",outcome="stranded"}': "0+1x80"}),
    "CommutatorLinkSlow": ("15m", {'router_kv_link_slow{job="c",prefill="p#0",decode="d#0"}': "1x80"}),
    "CommutatorTransfersSaturated": (
        "15m",
        {f'router_kv_transfer_seconds_bucket{{job="c",le="{le}"}}': "0x80" if le == "1.0" else "0+9x80" for le in ("1.0", "5.0", "+Inf")},
    ),
    "CommutatorPoolsImbalanced": (
        "20m",
        {
            f'router_engine_kv_usage_ratio{{job="c",instance="r",engine="{role}",rank="0"}}': f"{use}x90"
            for role, use in (("prefill", 0.1), ("decode", 0.9))
        }
        | {
            f'router_engine_info{{job="c",instance="r",engine="{role}",kind="vllm",role="{role}",version="1"}}': "1x90"
            for role in ("prefill", "decode")
        },
    ),
    "CommutatorPrefillMissing": ("15m", {'router_prefills_total{job="c",where="local",why="no_prefill_engine"}': "0+5x80"}),
}
"""Alert → when to look, and series that it is about, one value every 15 s."""


def families(text: str) -> set[str]:
    """Names of metrics that queries use, as a page declares them."""
    return {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in NAME.findall(text)}


def test_every_alert_has_a_series_that_it_is_about_and_a_heading_of_the_troubleshooting_page() -> None:
    assert SAYS.keys() == ALERTS.keys()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^#+ `([a-z-]+)`", page, re.MULTILINE))
    assert {rule["annotations"]["runbook"] for rule in ALERTS.values()} <= headings


@pytest.mark.parametrize("query", [rule["expr"] for rule in RULES] + QUERIES)
def test_each_query_can_be_parsed(query: str) -> None:
    assert promql_parser.parse(query.replace("$__rate_interval", "1m").replace("$job", "c"))


async def test_each_metric_that_is_named_is_on_a_page() -> None:
    async with fleet(1) as engines, routing(engines) as router:
        page = (await router.get("/metrics")).body.decode()
    shown = {name for name, _ in TYPE.findall(page)}
    used = families("\n".join([*(rule["expr"] for rule in RULES), *QUERIES]))
    assert len(used) > 40
    assert used - shown == set()


def _case(name: str, series: dict[str, str], expected: dict[str, Any]) -> dict[str, Any]:
    told = [{"series": one, "values": values} for one, values in series.items()]
    return {"name": name, "interval": "15s", "input_series": told, "promql_expr_test": [expected]}


@pytest.mark.timeout(300)  # some seconds of work, of which a busy machine makes minutes
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: Debian has it in the package prometheus (scripts/setup-prometheus)")
def test_prometheus_accepts_the_rules_and_each_alert_fires_for_what_it_is_about_and_only_then(tmp_path: Path) -> None:
    well = {"expr": 'count(ALERTS{alertstate="firing"})', "eval_time": "45m", "exp_samples": []}
    cases = [_case("well", WELL, well)]
    for alert, (at, series) in SAYS.items():
        fires = {"expr": f'min(ALERTS{{alertname="{alert}",alertstate="firing"}})', "eval_time": at, "exp_samples": [{"value": 1}]}
        cases.append(_case(alert, series, fires))
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "rules.yml")], "evaluation_interval": "30s", "tests": cases}))
    for command in (["check", "rules", str(FOLDER / "rules.yml")], ["test", "rules", str(file)]):
        done = subprocess.run([str(PROMTOOL), *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMETHEUS is None, reason=NONE_HERE)
async def test_a_real_prometheus_reads_a_router_and_evaluates_the_rules(tmp_path: Path) -> None:
    async with fleet(1) as engines, routing(engines) as router, aiohttp.ClientSession() as session:
        await router.chat(prompt("x", 50), stream=True)
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "rules.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [router.url.removeprefix("http://")]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        async with prometheus(tmp_path, session) as url:

            async def evaluated() -> bool:
                async with session.get(f"{url}/api/v1/rules") as response:
                    groups = (await response.json())["data"]["groups"]
                rules = [rule for group in groups for rule in group["rules"]]
                assert not [rule for rule in rules if rule["health"] == "err"], rules
                return len(rules) == len(RULES) and all(rule["health"] == "ok" for rule in rules)

            async def scraped() -> bool:
                return await asked(session, url, 'router_time_to_first_token_seconds_count{job="commutator"}') == [1.0]

            await until(scraped, what="the router is scraped")
            await until(evaluated, what="every rule has been evaluated")
