"""Zips of folders: members are read in place, and a zip that lies is refused by name."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from server.imports.archive import Archive
from server.imports.raw_file import ImportRefused
from stepwell import InvalidData
from stepwell._folders import files_of, zipped


def made(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> io.BytesIO:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out


def opened(file: io.BytesIO, memory: int = 1 << 20) -> Archive:
    return Archive(file, len(file.getvalue()), memory)


def patched(file: io.BytesIO, old: bytes, new: bytes) -> io.BytesIO:
    data = file.getvalue()
    assert old in data
    assert len(old) == len(new)
    return io.BytesIO(data.replace(old, new))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_files_to_read_from_any_position(method: int) -> None:
    archive = opened(made({"d/a": b"0123456789", "d/b": b"other", "d/a.json": b"{}"}, method))
    assert archive.names == ["d/a", "d/a.json", "d/b"]
    file, other = archive.open("d/a"), archive.open("d/b")
    file.seek(-3, io.SEEK_END)
    assert (file.read(1), other.read(), file.read()) == (b"7", b"other", b"89")
    assert archive.size("d/a") == 10


def test_names_are_relative_to_the_outermost_folder_with_the_landmark() -> None:
    archive = opened(made({"x/y/here": b"1", "x/y/z/here": b"2", "x/y/z/f": b"3", "q": b""}))
    assert not archive.enter("elsewhere")
    assert archive.enter("here")
    assert archive.names == ["here", "z/f", "z/here"]
    assert archive.open("z/f").read() == b"3"
    with pytest.raises(ImportRefused, match="missing"):
        archive.open("q")


def encrypted() -> io.BytesIO:
    data = bytearray(made({"a": b"1"}).getvalue())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return io.BytesIO(data)


def of_another_header() -> io.BytesIO:
    data = bytearray(made({"a": b"1" * 50}).getvalue())
    place = data.index(b"PK\x01\x02")
    data[place + 42 : place + 46] = struct.pack("<I", 7)
    return io.BytesIO(data)


def twice() -> io.BytesIO:
    return patched(made({"a1": b"1", "a2": b"2"}), b"a2", b"a1")


BAD: dict[str, tuple[Callable[[], io.BytesIO], str]] = {
    "up": (lambda: made({"../a": b"1"}), "leads out"),
    "up within": (lambda: made({"d/../../a": b"1"}), "leads out"),
    "absolute": (lambda: made({"/etc/a": b"1"}), "leads out"),
    "backslash": (lambda: patched(made({"d+a": b"1"}), b"d+a", b"d\\a"), "leads out"),
    "twice": (twice, "twice"),
    "encrypted": (encrypted, "encrypted"),
    "method": (lambda: made({"a": b"1"}, zipfile.ZIP_BZIP2), "compression"),
    "bomb": (lambda: made({"a": bytes(100 << 20)}, zipfile.ZIP_DEFLATED), "far more than it holds"),
    "large": (lambda: made({"a": bytes(2 << 20)}, zipfile.ZIP_DEFLATED), "more memory"),
    "cut": (lambda: io.BytesIO(made({"a": b"1" * 50}).getvalue()[:-30]), "damaged"),
    "text": (lambda: io.BytesIO(b"PK\x03\x04 and nothing else"), "damaged"),
    "another header": (of_another_header, "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_zip_is_refused_by_name(name: str) -> None:
    make, says = BAD[name]
    with pytest.raises(ImportRefused, match=says):
        opened(make()).open("a").read()


def test_a_damaged_compressed_member_is_refused() -> None:
    data = bytes(range(256)) * 8
    file = bytearray(made({"a": data}, zipfile.ZIP_DEFLATED).getvalue())
    file[60] ^= 0xFF
    with pytest.raises(ImportRefused, match="damaged"):
        opened(io.BytesIO(file)).open("a")


@pytest.mark.parametrize(
    ("data", "says"), [(b"[1]", "not a JSON object"), (b"{", "not JSON"), (b"\xff", "not JSON")]
)
def test_json_that_is_none_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ImportRefused, match=says):
        opened(made({"a": data})).json("a")


def test_a_folder_is_always_the_same_zip(tmp_path: Path) -> None:
    files = {}
    for name in ("b", "a/c"):
        path = tmp_path / name.replace("/", "_")
        path.write_bytes(name.encode())
        files[name] = path
    with zipped(files) as one, zipped(files) as two:
        assert one.read_bytes() == two.read_bytes()
        with one.open("rb") as file:
            archive = Archive(file, one.stat().st_size, 1 << 20)
            assert [archive.open(n).read() for n in archive.names] == [b"a/c", b"b"]


def test_an_unknown_folder_is_refused_with_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidData, match="metadata.json") as caught:
        files_of(tmp_path)
    assert "notes.txt" in str(caught.value)
    with pytest.raises(InvalidData, match="a file, for format=npz"):
        files_of(tmp_path, "npz")
