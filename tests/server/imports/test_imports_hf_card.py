"""The header of a Hugging Face README says which files are which split."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from server.imports.hf_card import _matches
from server.imports.raw_file import ImportRefused, Reading
from tests.imported import read_file


def write(folder: Path, readme: str, **lengths: int) -> Path:
    """Files of one episode each, told apart by their length; `__` in a name is a slash."""
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(readme)
    for name, length in lengths.items():
        path = folder / f"{name.replace('__', '/')}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        ones = [1.0] * length
        end = [False] * (length - 1) + [True]
        pq.write_table(pa.table({"obs": ones, "action": ones, "r": ones, "done": end}), path)
    return folder


def read(path: Path, split: str = "") -> tuple[Reading, list[int]]:
    found, made = read_file(path, kind="parquet", split=split)
    return found, [len(t) for t in made]


def card(configs: str) -> str:
    return f"---\nlicense: mit\nconfigs:\n{configs}---\n# Plays\n"


ONE = """- config_name: default
  data_files:
  - split: train
    path: ["runs/a*.parquet", more/b.parquet]
  - split: test
    path: runs/[xy]?.parquet
"""


def test_files_are_those_of_the_split(tmp_path: Path) -> None:
    folder = write(tmp_path, card(ONE), runs__a1=2, runs__a2=3, more__b=4, runs__x1=5, runs__y=6)
    assert sorted(read(folder, "train")[1]) == [2, 3, 4]
    assert read(folder, "test")[1] == [5]
    assert read(folder, "default/test")[1] == [5]
    with pytest.raises(ImportRefused, match="several splits"):
        read(folder)
    for split in ("eval", "other/test"):
        with pytest.raises(ImportRefused, match="there is no such"):
            read(folder, split)


@pytest.mark.parametrize(
    "said,expected",
    [
        ("a/*.parquet", [2]),
        ("a/**", [2, 3]),
        ("./**/b.parquet", [3, 4]),
        ("[b.parquet, 'a/a.parquet']", [2, 4]),
        ("{train: b.parquet}", [4]),
        ("'[!a].parquet'", [4]),
        ("[{path: b.parquet}, {split: train, path: a/a.parquet}]", [2, 4]),
        ("'*.parquet'\n  data_dir: a/deep", [3]),
    ],
)
def test_the_ways_to_write_it(tmp_path: Path, said: str, expected: list[int]) -> None:
    readme = card(f"- config_name: c\n  data_files: {said}\n")
    folder = write(tmp_path, readme, a__a=2, a__deep__b=3, b=4)
    assert sorted(read(folder)[1]) == expected


def test_one_of_several_configurations(tmp_path: Path) -> None:
    readme = card("".join(f"- config_name: {n}\n  data_files: {n}.parquet\n" for n in "ab"))
    folder = write(tmp_path, readme, a=2, b=3)
    with pytest.raises(ImportRefused, match="several configurations") as error:
        read(folder)
    assert error.value.expected == "split=CONFIGURATION/SPLIT, of a, b"
    assert read(folder, "b/train")[1] == [3]
    assert read(folder, "b/")[1] == [3]
    write(folder, readme.replace("a: b\n", "").replace("name: b\n", "name: b\n  default: true\n"))
    found, lengths = read(folder)
    assert lengths == [3] and "the configuration b is imported" in found.warnings[0]


def test_a_zip_made_by_hand_has_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "plays", card(ONE), runs__a1=2, runs__x1=5)
    packed = tmp_path / "plays.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in folder.rglob("*.*"):
            archive.write(path, path.relative_to(tmp_path))
    assert read(packed, "test")[1] == [5]


@pytest.mark.parametrize(
    "path",
    [
        "../secret.parquet", "a/../../b.parquet", "/etc/*", "C:/b.parquet", "hf://data/b.parquet",
        "a\\b.parquet", "3", "[[b.parquet]]", "{train: {a: b}}", "a" * 600,
    ],
)  # fmt: skip
def test_a_path_out_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    said = path if path[0] in "[{3" else f"'{path}'"
    folder = write(tmp_path, card(f"- data_files: {said}\n"), b=2)
    with pytest.raises(ImportRefused, match="not one below its folder"):
        read(folder)
    with pytest.raises(ImportRefused, match="not one below its folder"):
        read(write(tmp_path, card("- data_dir: ../x\n  data_files: b.parquet\n")))


@pytest.mark.parametrize("pattern", ["**/" * 150 + "x", "*a" * 200 + "b"])
def test_no_pattern_takes_long(pattern: str) -> None:
    """Each of these takes a backtracking search longer than the universe has existed."""
    name = ["a"] * 30 + ["a" * 200]
    assert not _matches(pattern.split("/"), name)


def test_patterns_without_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, card("- data_files: data/*.csv\n"), b=2)
    with pytest.raises(ImportRefused, match="match no Parquet or Arrow file") as error:
        read(folder)
    assert error.value.expected == "patterns of b.parquet"


BOMB = "a: &a [x, x]\n" + "".join(
    f"{n}: &{n} [*{m}, *{m}]\n" for m, n in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize(
    "header",
    [
        "data_files: [", "data_files: !!python/object/apply:os.system ['true']",
        f"{BOMB}data_files: 1",
        "data_files: " + "[" * 5000, "data_files: 2026-99-99", "data_files: \x00",
    ],
)  # fmt: skip
def test_a_header_that_is_no_yaml_is_a_warning(tmp_path: Path, header: str) -> None:
    found, lengths = read(write(tmp_path, f"---\n{header}\n---\n", b=2))
    assert lengths == [2]
    assert "README.md: its header is not read" in found.warnings[0]


@pytest.mark.parametrize(
    "readme",
    [
        "# data_files", "---\ndata_files: x", "---\n- data_files\n---",
        "---\nconfigs: x data_files\n---", card("- x data_files\n"), card("- data_files:\n"),
    ],
)  # fmt: skip
def test_a_readme_that_says_nothing_changes_nothing(tmp_path: Path, readme: str) -> None:
    found, lengths = read(write(tmp_path, readme, b=2))
    assert lengths == [2] and "README" not in " ".join(found.warnings)


@pytest.mark.parametrize(
    "header,licence",
    [
        ("license: mit", "mit"),
        ("license: [mit, cc0-1.0]", "mit, cc0-1.0"),
        ("license: other\nlicense_name: House rules", "House rules"),
        ("license: {a: b}", ""),
        ("license: 3", ""),
    ],
)
def test_the_licence_is_said(tmp_path: Path, header: str, licence: str) -> None:
    found, lengths = read(write(tmp_path, f"---\n{header}\n---\n", b=2))
    assert lengths == [2]
    assert found.metadata == ({"licence": licence} if licence else {})
