"""The SQL editor in a real browser: colours, completion, keys, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

QUERY = """-- what is there
SELECT dataset, count(*) AS "how many", $least + 1.5
FROM trajectories
WHERE env = 'Hopper-v5' AND length > 10 /* long
ones */"""
PAPER = "[data-colours]"
PARTS = """() => [...document.querySelectorAll('[data-colours] span')]
  .map((s) => [s.textContent, getComputedStyle(s).color])"""
SAME = """() => {
  const area = document.querySelector('.st-key-q textarea');
  const paper = document.querySelector('[data-colours]');
  const a = area.getBoundingClientRect(), p = paper.getBoundingClientRect();
  return [Math.abs(a.left + area.clientLeft - p.left), Math.abs(a.top + area.clientTop - p.top),
    Math.abs(area.clientWidth - p.width), Math.abs(area.scrollTop - paper.scrollTop),
    Math.max(0, area.scrollHeight - paper.scrollHeight)].every((d) => d < 1);
}"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme,width", [("light", 1280), ("dark", 390)])
def test_the_text_has_colours_and_stays_an_editor(
    fresh_service: Any,
    dashboard: Callable[..., Any],
    person: Callable[..., Any],
    scheme: str,
    width: int,
) -> None:
    running = dashboard(fresh_service.url)
    me = person(running, width=width, scheme=scheme)
    me.opens("/sql")
    area = me.page.get_by_label("Query", exact=True).first
    paper = me.page.locator(PAPER)
    paper.wait_for(state="attached")
    area.fill(QUERY)
    assert paper.inner_text().strip() == QUERY, "painted at once"
    assert me.page.evaluate(SAME)
    me.look(f"sql-{scheme}-{width}")
    colours = dict(me.page.evaluate(PARTS))
    kinds = ("-- what is there", "SELECT", "count", '"how many"', "$least", "1.5", "'Hopper-v5'")
    assert len({colours[part] for part in kinds}) == len(kinds), colours
    assert colours["FROM"] == colours["WHERE"] == colours["SELECT"]
    assert "dataset" not in colours and "/* long\nones */" in colours

    # Completion, undo and the keys are those of the text area.
    area.press("Control+End")
    area.press_sequentially("\nORDER BY leng")
    me.page.locator("[role=option]").first.wait_for()
    area.press("Tab")
    assert area.input_value().endswith("ORDER BY length")
    assert paper.inner_text().strip() == area.input_value()
    area.press("Control+z")
    assert not area.input_value().endswith("ORDER BY length")

    # What is not typed is painted, too; a long text scrolls with its colours.
    me.clicks("Best trajectories")
    me.page.wait_for_function(
        "document.querySelector('[data-colours]').innerText.includes('LIMIT 20')"
    )
    area.fill("\n".join(f"SELECT {n}, 'text' -- {'long ' * 40}" for n in range(80)))
    area.press("Control+End")
    me.page.wait_for_function(SAME)
    took = me.page.evaluate("""() => {
      const area = document.querySelector('.st-key-q textarea'), start = performance.now();
      for (let i = 0; i < 20; i++) {
        area.value += ' ';
        area.dispatchEvent(new Event('input', { bubbles: true }));
      }
      return (performance.now() - start) / 20;
    }""")
    assert took < 200, f"{took} ms for a key"
    print(f"a key in 18,000 characters: {took:.1f} ms")
    me.opens("/runs")
    assert paper.count() == 0
    assert me.requests == []
    assert running.tracebacks() == []
