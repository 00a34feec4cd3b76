"""Parquet and Arrow files of anybody → trajectories. Untrusted: runs only in the sandbox.

One file, or the zip of a folder of them, such as a dataset on the Hugging Face Hub, or one that
Hugging Face's `datasets` has saved to disk (Arrow files, and state.json beside them). A README can
say which files are which split (hf_card.py), else their names do. The roles of
columns are given or guessed (column_map.py); rows become episodes in table_episodes.py.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from server.imports.archive import Archive
from server.imports.arrow_file import is_arrow
from server.imports.column_map import column_map
from server.imports.episodes import Episodes
from server.imports.hf_card import Card, Splits, read_card
from server.imports.parquet_table import Table, damaged
from server.imports.raw_file import ImportOptions, ImportRefused, check_magic
from server.imports.table_episodes import TableEpisodes

SHARD = re.compile(r"(.+?)-\d+-of-\d+\.(?:parquet|arrow)")
SPLIT = re.compile("train|training|test|testing|valid|validation|val|dev|eval")
"""Names of folders that are splits, whatever their files are called."""
STATE = "state.json"


@contextmanager
def opened(
    file: BinaryIO, options: ImportOptions, memory: int, max_rows: int
) -> Iterator[Episodes]:
    """Errors of pyarrow inside are an `ImportRefused`, too."""
    with reported():
        files, card = _files(file, options, memory)
        table = Table(files, options.size, memory, max_rows)
        columns = column_map(table.columns, options.columns)
        source = TableEpisodes(table, columns, options, memory)
        source.metadata = card.metadata
        source.layout.warnings[:0] = card.warnings
        yield source


@contextmanager
def reported() -> Iterator[None]:
    try:
        yield
    except ImportRefused:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise damaged(str(error) or type(error).__name__) from None


def _files(
    file: BinaryIO, options: ImportOptions, memory: int
) -> tuple[list[tuple[str, BinaryIO]], Card]:
    """Names and files, and what a README says."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        head = file.read(8)
        file.seek(0)
        if not is_arrow(head):
            expected = "a .parquet or .arrow file, or a folder of them"
            check_magic(file, b"PAR1", "a Parquet or Arrow file", expected)
        return [("the file", file)], Card()
    archive = Archive(file, options.size, memory)
    names = [name for name in archive.names if name.endswith(".parquet")] or _saved(archive)
    if {"spec.json", "trajectories.parquet"} <= {n.rpartition("/")[2] for n in archive.names}:
        raise ImportRefused(
            "the zip is a folder of stepwell export, whose rows are T+1 for each trajectory",
            expected="stepwell import FOLDER, which sends its trajectories",
        )
    card = read_card(archive, names)
    if card.configs:
        configuration, _, split = options.split.rpartition("/")
        chosen = _one_split(_configuration(card, configuration), split)
    else:
        chosen = _by_names(names, options)
    return [(name, archive.open(name)) for name in chosen], card


def _configuration(card: Card, asked: str) -> Splits:
    """The files of the one configuration that is asked for, or is the only or default one."""
    name = asked or (next(iter(card.configs)) if len(card.configs) == 1 else card.default)
    if name in card.configs:
        if not asked and len(card.configs) > 1:
            others = ", ".join(n for n in card.configs if n != name)[:300]
            card.warnings.append(
                f"the configuration {name} is imported; there are {others}: split=NAME/SPLIT"
            )
        return card.configs[str(name)]
    raise ImportRefused(
        "there is no such configuration"
        if asked
        else "the folder has several configurations of a dataset",
        expected="split=CONFIGURATION/SPLIT, of " + ", ".join(card.configs)[:300],
        got=asked or None,
    )


def _by_names(names: list[str], options: ImportOptions) -> list[str]:
    """The files of one split, as far as their names say what they are."""
    found = {name: split for name in names if (split := _split_of(name))}
    splits: Splits = {}
    for name, (_, known) in found.items():
        splits.setdefault(known, []).append(name)
    if options.split or len(splits) > 1:
        names = _one_split(splits, options.split)
    folders = sorted({found[name][0] for name in names if name in found})
    if len(folders) > 1:
        raise ImportRefused(
            "the folder has several configurations of a dataset",
            expected="the folder of one of them",
            got=", ".join(folder or "." for folder in folders)[:300],
        )
    return names


def _one_split(splits: Splits, asked: str) -> list[str]:
    known = sorted(splits)
    if asked in splits:
        return splits[asked]
    if asked:
        raise ImportRefused(
            "there is no such split", expected=", ".join(known) or "no split=", got=asked
        )
    if len(known) > 1:
        raise ImportRefused(
            "the folder has several splits", expected="split=NAME", got=", ".join(known)[:300]
        )
    return splits[known[0]]


def _saved(archive: Archive) -> list[str]:
    """Arrow files; those of each `save_to_disk` as its state lists them."""
    found = []
    for name in archive.names:
        folder, _, last = name.rpartition("/")
        state_name = f"{folder}/{STATE}".lstrip("/")
        if last == STATE:
            state = archive.json(name)
            if state.get("_indices_data_files"):
                raise ImportRefused(
                    f"{name[:200]} chooses rows by indices, which are not read",
                    expected="a dataset saved after flatten_indices()",
                )
            listed = state.get("_data_files")
            try:
                found += [f"{folder}/{one['filename']}".lstrip("/") for one in listed or ()]
            except (TypeError, KeyError):
                raise ImportRefused(f"{name[:200]} lists no files", got=str(listed)[:200]) from None
        elif last.endswith(".arrow") and not archive.has(state_name):
            found.append(name)
    return found


def _split_of(name: str) -> tuple[str, str] | None:
    """Folder of the dataset and name of the split, by the names that Hugging Face gives to files;
    None for another name.

        data/train-00000-of-00001.parquet
        default/train/0000.parquet
        train/data-00000-of-00001.arrow
    """
    folder, _, last = name.rpartition("/")
    parent, _, above = folder.rpartition("/")
    shard = SHARD.fullmatch(last)
    if shard and shard[1] != "data":
        return folder, shard[1]
    if above and (shard or SPLIT.fullmatch(above)):
        return parent, above
    return None
