"""The card of a version: what it is, in Markdown, for people and for archives."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from stepwell._wording import pluralize
from stepwell.messages import Spread, Version
from stepwell.spaces import EnvSpec, space_to_json


def card(version: Version) -> str:
    """The card as Markdown: content, statistics, layout, licence, how to cite and to select."""
    found, made = version.statistics, time.gmtime(version.created_at)
    trajectories = pluralize(found.trajectories, "trajectory", "trajectories")
    lines = [f"# {version.version}", ""]
    lines += [f"> {line}" for line in version.description.splitlines()]
    lines += [""] if version.description else []
    lines += _table(
        ("", ""),
        [
            ("content", f"{trajectories}, {pluralize(found.steps, 'step')}"),
            ("digest", f"sha256 `{version.digest}`"),
            ("licence", version.licence or "not stated"),
            ("created", f"{time.strftime('%Y-%m-%d %H:%M:%S', made)} UTC by {version.created_by}"),
            ("made from", version.parent or "the dataset"),
        ],
    )
    if version.missing:
        lines += ["", f"**Incomplete**: {version.missing} of its trajectories were lost."]
    lines += ["", "## Statistics", ""]
    names = tuple(Spread.model_fields)
    spreads = {"return": found.returns, "length": found.lengths}
    lines += _table(
        ("", *names),
        [
            (what, *(f"{getattr(spread, name):.6g}" for name in names))
            for what, spread in spreads.items()
            if spread is not None
        ],
    )
    lines += ["", f"{_share(found.terminated, found.trajectories)} of the trajectories terminated,"]
    lines += [f"{_share(found.truncated, found.trajectories)} were cut off."]
    if found.success is not None:
        lines[-1] += f" {_share(found.success, found.trajectories)} succeeded."
    for what, counts in (("environment", found.envs), ("policy", found.policies)):
        if counts:
            lines += ["", *_counts(what, counts)]
    lines += ["", "## Layout", "", *_layout(EnvSpec.from_json(version.spec))]
    lines += ["", "## Selection", ""]
    if version.where:
        lines += ["The condition that selected the trajectories when the version was created:", ""]
        lines += [*_indented(version.where), ""]
    lines += ["What selects them in SQL:", "", *_indented(version.select)]
    lines += ["", "## Cite", ""]
    lines += _indented(cite(version))
    return "\n".join([*lines, ""])


def cite(version: Version) -> str:
    """BibTeX."""
    key, year = version.version.replace("@", "-"), time.gmtime(version.created_at).tm_year
    return (
        f"@misc{{{key},\n  title = {{{version.version}}},\n  year = {{{year}}},\n"
        f"  note = {{Stepwell dataset version, SHA-256 {version.digest}}}\n}}"
    )


def _layout(spec: EnvSpec) -> list[str]:
    groups = {"obs": spec.observations, "action": spec.actions, "info": spec.infos}
    rows = []
    for group, spaces in groups.items():
        for key, space in spaces.items():
            said = space_to_json(space)
            kind = said.pop("type")
            shown = (f"{name}={said[name]}" for name in ("shape", "dtype", "n", "nvec", "start")
                     if said.get(name, 0) != 0)  # fmt: skip
            rows.append((f"{group} {key}", f"{kind} {' '.join(shown)}"))
    return _table(("", spec.env or "space"), rows)


def _counts(what: str, counts: Mapping[str, int]) -> list[str]:
    return _table((what, "trajectories"), [(name or "-", f"{n:,}") for name, n in counts.items()])


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [_row(head), _row(("---",) * len(head)), *map(_row, rows)]


def _row(cells: tuple[str, ...]) -> str:
    """A row; names come from strangers, so they end neither a cell nor the line."""
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |"
