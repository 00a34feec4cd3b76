"""What a launcher tells the service about its programs, so that forms can be made elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from stepwell import __version__
from stepwell._background import BackgroundLoop
from stepwell.client import Client
from stepwell.errors import StepwellError
from stepwell.messages import Program, ProgramRecipe
from workbench.launcher.launch_permissions import TEXT, Refused, document_of, may_set

log = logging.getLogger("stepwell.launcher")

PUBLISH_EVERY = 600.0
"""Seconds; repeated for a service whose index was lost."""


def program_of(role: str, plugins: Sequence[str] = ()) -> Program:
    """The settings of `stepwell ROLE` that a launch may change. Raises `Refused`."""
    document = document_of(role)
    settings = {
        name: _with_pattern(name, setting)
        for name, setting in document["properties"].items()
        if may_set(name, setting)
    }
    recipes = {
        name: ProgramRecipe(**{**found, "values": _only(settings, found["values"])})
        for name, found in document.get("recipes", {}).items()
    }
    return Program(
        version=__version__,
        settings=settings,
        common=[name for name in document.get("common", ()) if name in settings],
        required=[name for name in document.get("required", ()) if name in settings],
        recipes=recipes,
        plugins=list(plugins),
    )


def _only(settings: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in settings}


def _with_pattern(name: str, setting: dict[str, Any]) -> dict[str, Any]:
    """With the pattern of text that a launch may set, which for a list is that of its items."""
    if name not in TEXT:
        return setting
    pattern, expected = TEXT[name]
    if pattern.pattern == ".*":
        return setting
    rule = {"pattern": f"^({pattern.pattern})$", "expected": expected}
    if setting.get("type") == "array":
        return {**setting, "items": {**setting.get("items", {}), **rule}}
    return {**setting, **rule}


def start_publishing(
    client: Client, launcher: str, roles: Sequence[str], plugins: Sequence[str]
) -> BackgroundLoop:
    """Publish the programs from a thread, because each takes seconds to print its settings."""
    published: set[str] = set()

    def publish() -> None:
        for role in roles:
            if loop.stopping:
                return
            try:
                client.put_program(launcher, role, program_of(role, plugins))
            except Refused as error:
                if role not in published:
                    log.warning("no form can be made for %s: %s", role, error)
            published.add(role)

    loop = BackgroundLoop(
        "programs", publish, every=PUBLISH_EVERY, expected=(StepwellError,), longest_wait=60.0
    )
    return loop.start()
