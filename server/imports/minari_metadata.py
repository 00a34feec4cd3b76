"""What metadata.json says of a Minari dataset: its spaces, its environment, its counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.imports.episodes import Declared, Layout, parsed_spec
from server.imports.minari_spaces import declared_spaces
from server.imports.raw_file import Array, ImportRefused, last_flag
from stepwell._wording import pluralize
from stepwell.spaces import DEFAULT_ACTION, DEFAULT_OBSERVATION, EnvSpec

METADATA = "metadata.json"
SPEC = "stepwell_spec"
COLUMNS = ("rewards", "terminations", "truncations")
ROLES = {"observations": "observation", "actions": "action", "infos": "info"}
"""Names of the groups and columns of each."""
DESCRIBING = (
    *("dataset_id", "algorithm_name", "author", "code_permalink", "description"),
    *("license", "citation"),
)
"""For the job's result and the new dataset's description."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The file, or nothing of it."""

    written: Mapping[str, Any]

    @property
    def exported(self) -> bool:
        """Whether `stepwell export` wrote it, so that an episode may go on elsewhere."""
        return SPEC in self.written

    @property
    def env(self) -> str:
        """The environment's id, out of gymnasium's JSON."""
        text = self.written.get("env_spec")
        if not isinstance(text, str):
            return ""
        try:
            found = json.loads(text)
            return str(found.get("id", ""))[:256] if isinstance(found, dict) else ""
        except (ValueError, RecursionError):
            return ""

    @property
    def shown(self) -> dict[str, str]:
        found = {k: str(self.written[k])[:1024] for k in DESCRIBING if self.written.get(k)}
        return {"licence" if k == "license" else k: text for k, text in found.items()}

    def declared(self, what: str) -> Mapping[str, Declared]:
        """Spaces of "observation" or "action" by key. Raises `ImportRefused`."""
        text = self.written.get(f"{what}_space")
        default = DEFAULT_OBSERVATION if what == "observation" else DEFAULT_ACTION
        return {} if text is None else declared_spaces(text, f"{what}_space", default)

    def written_spec(self) -> EnvSpec | None:
        where = f"{SPEC} in {METADATA}"
        return parsed_spec(where, self.written[SPEC]) if self.exported else None

    def check_counts(self, layout: Layout) -> None:
        """Raises `ImportRefused` if episodes or steps are missing."""
        found = {
            "total_episodes": (len(layout.episodes) + layout.skipped, "episode"),
            "total_steps": (sum(steps for _, steps in layout.episodes), "step"),
        }
        for name, (count, word) in found.items():
            if (said := self.written.get(name, count)) != count:
                raise ImportRefused(
                    f"{word}s are missing",
                    expected=f"{name} = {said} in {METADATA}",
                    got=pluralize(count, word),
                )


def end_of(
    name: str, terminations: Array, truncations: Array, *, exported: bool
) -> tuple[bool, bool]:
    """(terminated, truncated). Raises `ImportRefused` for flags before the last step."""
    terminated = last_flag(f"{name}/{COLUMNS[1]}", terminations)
    truncated = last_flag(f"{name}/{COLUMNS[2]}", truncations)
    # Nobody says that it goes on, so it was cut off.
    open_end = not terminated and not truncated and not exported
    return terminated, (truncated and not terminated) or open_end
