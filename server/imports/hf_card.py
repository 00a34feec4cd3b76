"""The YAML header of a Hugging Face dataset's README.md: which files are which split.

    configs:
    - config_name: default
      data_files:
      - {split: train, path: "data/*.parquet"}

`path` is a name or pattern below the README's folder, or a list of them; `data_files` can also be
such a path or list (split train), or a table from split to path. Untrusted: names and patterns are
compared with the names of the archive, and open nothing. Runs only in the sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import yaml

from server.imports.archive import Archive
from server.imports.raw_file import ImportRefused

README = "README.md"
MAX_HEADER = 1 << 20
MAX_PATTERN = 512
HEADER = re.compile(
    rb"\A\xef?\xbb?\xbf?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE
)
Splits = dict[str, list[str]]


@dataclass(slots=True)
class Card:
    """What a README says."""

    folder: str = ""
    """Where it is, with a slash at its end."""
    header: dict[Any, Any] = field(default_factory=dict)
    licence: str = ""
    configs: dict[str, Splits] = field(default_factory=dict)
    """Configuration → split → the files that are there, sorted; without empty ones."""
    default: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def metadata(self) -> dict[str, Any]:
        """For the job's result and the new dataset's description."""
        return {"licence": self.licence} if self.licence else {}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Without aliases, by which a short text can stand for a huge one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def read_about(archive: Archive) -> Card:
    """What a README says besides files; a header that cannot be read is a warning."""
    found = Card()
    readmes = [n for n in archive.names if n.rpartition("/")[2] == README]
    if not readmes:
        return found
    name = min(readmes, key=lambda n: (n.count("/"), n))
    found.folder = name.removesuffix(README)
    try:
        header = _header(archive, name)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        found.warnings.append(f"{name[:100]}: its header is not read, as it is no YAML: {why}")
        return found
    if isinstance(header, dict):
        found.header = header
        found.licence = _licence(header)
    return found


def read_card(archive: Archive, files: Iterable[str]) -> Card:
    """Also which files are which split; without configurations, if there is no README, or it names
    no files. `files`: those that can be read. Raises `ImportRefused`."""
    found, readable = read_about(archive), list(files)
    configs = found.header.get("configs")
    if not isinstance(configs, list):
        return found
    for number, config in enumerate(configs):
        if not isinstance(config, dict) or config.get("data_files") is None:
            continue
        called = str(config.get("config_name", f"config {number}"))[:128]
        below = _inside(config.get("data_dir") or "").rstrip("/")
        prefix = f"{found.folder}{below}/" if below else found.folder
        splits = _splits(config["data_files"], prefix, readable)
        if called == "default" or config.get("default") is True:
            found.default = called
        if splits:
            found.configs[called] = splits
    if any(isinstance(c, dict) and c.get("data_files") for c in configs) and not found.configs:
        raise ImportRefused(
            f"{README}: its data_files match no Parquet or Arrow file",
            expected="patterns of " + ", ".join(readable[:10])[:200],
            got=str(configs)[:200],
        )
    return found


def _header(archive: Archive, name: str) -> Any:
    start = archive.open(name).read(MAX_HEADER)
    header = HEADER.match(start)
    if header is None:
        return None
    return yaml.load(header[1].decode(), _Loader)


def _licence(header: dict[Any, Any]) -> str:
    """`license` is a short name, one of several, or "other" beside a `license_name`."""
    named = header.get("license_name") or header.get("license")
    several = named if isinstance(named, list) else [named]
    return ", ".join(one for one in several if isinstance(one, str))[:1024]


def _splits(given: Any, prefix: str, files: list[str]) -> Splits:
    if isinstance(given, dict):
        pairs = list(given.items())
    elif isinstance(given, list) and all(isinstance(one, dict) for one in given):
        pairs = [(one.get("split", "train"), one.get("path")) for one in given]
    else:
        pairs = [("train", given)]
    found: Splits = {}
    for split, paths in pairs:
        patterns = paths if isinstance(paths, list) else [paths]
        matched = [_inside(one).rstrip("/").split("/") for one in patterns]
        below = {f: f.removeprefix(prefix).split("/") for f in files if f.startswith(prefix)}
        if names := [f for f, name in below.items() if any(_matches(one, name) for one in matched)]:
            found[str(split)[:128]] = sorted({*found.get(str(split)[:128], ()), *names})
    return found


def _matches(pattern: list[str], name: list[str]) -> bool:
    """Part by part between slashes; `**` stands for any number of folders, and for all below."""
    reached = {0}  # how many parts of the name are matched
    for part in pattern:
        if part == "**":
            reached = {at for start in reached for at in range(start, len(name) + 1)}
        else:
            reached = {at + 1 for at in reached if at < len(name) and fnmatchcase(name[at], part)}
    return len(name) in reached


def _inside(path: Any) -> str:
    """A path below the folder. Raises `ImportRefused` for another."""
    text = path if isinstance(path, str) else ""
    plain = text.removeprefix("./")
    if (
        not isinstance(path, str)
        or len(text) > MAX_PATTERN
        or plain.startswith("/")
        or "\\" in plain
        or ":" in plain
        or ".." in plain.split("/")
    ):
        raise ImportRefused(
            f"{README}: data_files has a path that is not one below its folder",
            expected="a name or pattern such as data/train-*.parquet",
            got=str(path)[:200],
        )
    return plain
