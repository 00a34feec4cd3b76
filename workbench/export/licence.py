"""Whose data an export has: the licence of the version and how to cite it, in each format's way.

    parquet, lerobot    README.md: `license` and `license_name` in its header, the rest in its text
    minari              metadata.json: license, citation, description
    d4rl, npz           texts metadata/licence and metadata/citation

A dataset that is no version has neither.
"""

from __future__ import annotations

import json
import re

from workbench.export.selection import Selection

PLAIN = re.compile(r"[A-Za-z0-9.-]+")


def header(chosen: Selection) -> str:
    """Lines of YAML. Hugging Face has names of its own for licences, in lower case."""
    if not chosen.licence:
        return ""
    known = PLAIN.fullmatch(chosen.licence)
    name = json.dumps(chosen.licence, ensure_ascii=False)
    return f"license: {chosen.licence.lower() if known else 'other'}\nlicense_name: {name}\n"


def text(chosen: Selection) -> str:
    """Markdown for people."""
    found = f"\nLicence: {chosen.licence or 'not stated'}\n"
    if chosen.citation:
        cited = "\n".join(f"    {line}" for line in chosen.citation.splitlines())
        found += f"\n## Cite\n\n{cited}\n"
    return found


def texts(chosen: Selection) -> dict[str, str]:
    """licence and citation, as far as there are some."""
    both = {"licence": chosen.licence, "citation": chosen.citation}
    return {name: value for name, value in both.items() if value}
