"""What the event path says of itself: every family of a page is in the reference, and counters are counters."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from discovery.feed import FeedCounts
from discovery.readings import _BY_ENDPOINT, _BY_KIND, Readings
from discovery.sync import Why

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "bus.md").read_text(encoding="utf-8")


def test_each_family_is_of_a_field_that_is_counted_and_is_in_the_reference_as_it_is_in_the_page() -> None:
    fields = set(FeedCounts.__struct_fields__)
    for name, text, field in (*_BY_ENDPOINT, *_BY_KIND):
        assert field in fields
        assert f"| `{name}` | {text} |" in PAGE
    assert {field for _, _, field in (*_BY_ENDPOINT, *_BY_KIND)} == fields, "what is counted is shown"


def test_each_reason_for_a_resync_is_in_the_reference() -> None:
    assert all(f"| `{why.value}` | " in PAGE for why in Why)


def test_a_name_that_ends_in_total_is_a_counter() -> None:
    registry = CollectorRegistry()
    registry.register(Readings(lambda: [("a_total", "A.", ("x",), [(("1",), 2.0)]), ("b", "B.", (), [((), 3.0)])]))
    page = generate_latest(registry).decode()
    assert "# TYPE a_total counter" in page
    assert 'a_total{x="1"} 2.0' in page
    assert "# TYPE b gauge" in page
