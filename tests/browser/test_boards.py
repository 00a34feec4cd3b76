"""Leaderboard and runs in a browser: what only shows there, such as clicks on cells and colours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepwell import Client
from stepwell.messages import MetricPoint

ENVS = ("Hopper-v5", "Plain-v0", "Walker2d-v5")
LONG = "a-sweep-with-a-very-long-name-of-many-words-lr-{}-seed-0"
CONTRAST = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], under) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((x) => x / 255)
      .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (element) => {
    const chain = [];
    for (let at = element; at; at = at.parentElement) chain.unshift(getComputedStyle(at));
    // What lies below the part with an opacity, then that part on it.
    let ground = [255, 255, 255], opacity = 1, below = null;
    for (const style of chain) {
      if (style.opacity !== '1') { opacity *= Number(style.opacity); below = ground; }
      ground = over(numbers(style.backgroundColor), ground);
    }
    let ink = numbers(chain.at(-1).color);
    if (below) [ink, ground] = [over([...ink, opacity], below), over([...ground, opacity], below)];
    const [dark, light] = [luminance(ink), luminance(ground)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const found = document.querySelectorAll('[data-testid="stCaptionContainer"] :is(p, code)');
  return [...found].map((element) => [element.tagName, contrast(element)]);
}"""


def fill(client: Client) -> None:
    for number, rate in enumerate((0.1, 0.2)):
        run = LONG.format(rate)
        client.create_run(run, "train", config={"agent": {"lr": rate}})
        points = [MetricPoint(key="loss/all", step=s, value=float(s), time=0.0) for s in range(9)]
        client.log_metrics(run, points)
        client.patch_run(run, status="finished")
        for env in ENVS:
            client.create_evaluation(
                policy=f"{run}/1", env=env, seeds=[0, 1], returns=[10.0 + number, 20.0], mean=15.0,
                iqm=15.0, ci_low=10.0, ci_high=20.0,
            )  # fmt: skip


@pytest.mark.timeout(600)
def test_a_cell_opens_its_environment_and_runs_are_found_by_conditions(
    fresh_service: Any, dashboard: Callable[..., Any], person: Callable[..., Any]
) -> None:
    fill(fresh_service.client())
    running = dashboard(fresh_service.url)
    me = person(running)
    me.opens("/evaluation")
    me.sees_cell("1.08")  # normalised
    me.look("boards-all")
    box = me.page.locator('[data-testid="stDataFrame"]').first.bounding_box()
    me.page.mouse.click(box["x"] + 430, box["y"] + 55)
    me.page.wait_for_url("**env=*")
    me.rests()
    me.sees("Who is better?")
    me.look("boards-one")

    me.opens("/runs")
    for rate in (0.1, 0.2):
        me.sees_cell(LONG.format(rate))  # whole, for who reads or copies it
    me.types("Settings and metrics", "agent.lr = 0.1 and loss/all >= 8")
    me.page.wait_for_url("**where=agent.lr*")
    me.page.locator("canvas [role=gridcell]", has_text="lr-0.2").first.wait_for(state="detached")
    me.types("Settings and metrics", "lr = 0.1")
    me.sees("expected for example agent.lr")
    me.look("boards-runs")
    assert me.requests == []
    assert running.tracebacks() == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_code_in_captions_is_read(
    scheme: str, fresh_service: Any, dashboard: Callable[..., Any], person: Callable[..., Any]
) -> None:
    fill(fresh_service.client())
    me = person(dashboard(fresh_service.url), scheme=scheme)
    me.opens("/evaluation")
    me.sees("Rows to compare with")
    found = me.page.evaluate(CONTRAST)
    assert {tag for tag, _ in found} == {"P", "CODE"}
    assert min(contrast for _, contrast in found) >= 4.5, found
