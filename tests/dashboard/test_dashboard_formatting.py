"""Formatting, colours and contrast: the small promises every page relies on."""

import re
import time
import tomllib
from pathlib import Path

import pytest

from dashboard import charts, formatting

CONFIG = Path(formatting.__file__).parent / ".streamlit" / "config.toml"
STYLE = Path(formatting.__file__).with_name("style.css")
KEYS = ("background-color", "color")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def blend(colour: str, ground: str, share: float) -> str:
    mixed = [
        round(share * int(colour[i : i + 2], 16) + (1 - share) * int(ground[i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def theme(name: str) -> dict:
    return tomllib.loads(CONFIG.read_text())["theme"][name]


@pytest.mark.parametrize("colour", [*charts.PALETTE, charts.MAIN, charts.QUIET, charts.CURSOR])
def test_lines_and_marks_stand_out_on_both_grounds(colour: str) -> None:
    assert contrast(colour, theme("light")["backgroundColor"]) >= 4.5
    assert contrast(colour, theme("dark")["backgroundColor"]) >= 3.5


@pytest.mark.parametrize("colour", charts.RUN_PALETTE)
def test_lines_of_runs_are_seen_on_both_grounds(colour: str) -> None:
    for name in ("light", "dark"):
        assert contrast(colour, theme(name)["backgroundColor"]) >= 3.0


@pytest.mark.parametrize("name", ["light", "dark"])
def test_buttons_are_seen_and_their_text_is_read(name: str) -> None:
    (rule,) = re.findall(r"stBaseButton-primary[^{]*{([^}]*)}", STYLE.read_text())
    ground, text = (re.search(rf"(?<![-\w]){key}: (#\w+);", rule) for key in KEYS)
    assert ground and text
    assert contrast(text[1], ground[1]) >= 4.5
    assert contrast(ground[1], theme(name)["backgroundColor"]) >= 3.0


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_is_readable_on_every_ground_of_the_theme(name: str) -> None:
    """Captions are drawn at 60 % of the text colour, in the page and in the sidebar."""
    colours = theme(name)
    assert contrast(charts.INK[name], colours["backgroundColor"]) >= 4.5
    for ground in (colours["backgroundColor"], colours["secondaryBackgroundColor"]):
        for text in ("textColor", "linkColor", "primaryColor", "codeTextColor"):
            assert contrast(colours[text], ground) >= 4.5, text
        assert contrast(blend(colours["textColor"], ground, 0.6), ground) >= 4.5
    for hue in ("red", "orange", "yellow", "green", "blue", "violet", "gray"):
        text, ground = colours[f"{hue}TextColor"], colours[f"{hue}BackgroundColor"]
        assert contrast(text, ground) >= 4.5, hue
        assert contrast(text, colours["backgroundColor"]) >= 4.5, hue


def test_the_page_is_private_by_default() -> None:
    """Streamlit alone listens everywhere and reports usage."""
    config = tomllib.loads(CONFIG.read_text())
    assert config["server"]["address"] == "127.0.0.1"
    assert config["browser"]["gatherUsageStats"] is False


def test_a_run_keeps_its_colour_when_others_come() -> None:
    names = [f"run-{i}" for i in range(len(charts.PALETTE))]
    seen: dict[str, str] = {}
    for i in range(1, len(names) + 1):
        now = charts.colours(names[:i])
        assert {name: now[name] for name in seen} == seen
        seen = now
    assert len(set(seen.values())) == len(charts.PALETTE)
    more = charts.colours([*names, "one-more"])
    assert {name: more[name] for name in names} == seen
    assert more["one-more"] in charts.PALETTE


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"),
     (3e15, "3000.0 TB")],
)  # fmt: skip
def test_sizes(number: float | None, text: str) -> None:
    assert formatting.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (58, "58 s ago"), (120, "2 min ago"), (7200, "2 h ago"),
     (2 * 86400, "2 d ago"), (-5, "0 s ago")],
)  # fmt: skip
def test_ages(seconds: float, text: str) -> None:
    """A clock that runs ahead must not give negative ages."""
    assert formatting.ago(time.time() - seconds) == text
    assert formatting.ago(None) == "never"


def test_names_cannot_break_out_of_a_literal() -> None:
    assert formatting.literal("x' OR '1'='1") == "'x'' OR ''1''=''1'"


def test_names_that_would_look_alike_remain_whole() -> None:
    first, second, third = (f"a-long-{x}-prefix-of-a-sweep-{y}" for x, y in ("11", "21", "12"))
    found = formatting.shortened([first, second, third, "short"], 20)
    assert [found[name] for name in (first, second, "short")] == [first, second, "short"]
    assert len(found[third]) == 20 and found[third].endswith("-sweep-2")


def test_code_in_captions_has_the_colour_of_the_text() -> None:
    """tests/browser/test_boards.py measures the contrast that this gives."""
    (rule,) = re.findall(r"stCaptionContainer[^{]* code {([^}]*)}", STYLE.read_text())
    assert "color: inherit" in rule
