"""Files made to hurt, or that are something else. Each is refused with a typed error, quickly.

Some of each kind (with --all, each) go through the whole service: child process, job, index.
Afterwards nothing of any of them is stored, no file outside was read, and a good file still
imports.
"""

from __future__ import annotations

import io
import pickle
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest

from server.imports.raw_file import ImportRefused
from tests.imported import read_file

from .conftest import Importing, table, write

SECRET = 777.25
MAKERS: dict[str, Callable[[Path], Path]] = {}


def hostile(maker: Callable[[Path], Path]) -> Callable[[Path], Path]:
    MAKERS[maker.__name__] = maker
    return maker


def good(**changes: Any) -> dict[str, Any]:
    return table(20, timeouts=[9, 19]) | changes


def edit(path: Path, change: Callable[[h5py.File], Any], **arrays: Any) -> Path:
    write(path, good(**arrays))
    with h5py.File(path, "a") as file:
        change(file)
    return path


def secret(path: Path) -> Path:
    """A file of ours that no import may read."""
    with h5py.File(path.with_name("secret.h5"), "w") as file:
        file["x"] = np.full((20, 3), SECRET, np.float32)
    path.with_name("secret.bin").write_bytes(np.full(60, SECRET, np.float32).tobytes())
    return path


def npz(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(array: np.ndarray, **options: Any) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, **options)
    return out.getvalue()


def good_npz(**changes: Any) -> dict[str, bytes]:
    return {f"{k}.npy": npy(np.asarray(v)) for k, v in good().items()} | changes


# --- HDF5 that reaches out ------------------------------------------------------------------------


@hostile
def external_link(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["observations"]
        file["observations"] = h5py.ExternalLink(str(path.with_name("secret.h5")), "x")

    return edit(secret(path), change)


@hostile
def external_link_in_infos(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        file["infos/x"] = h5py.ExternalLink(str(path.with_name("secret.h5")), "x")

    return edit(secret(path), change)


@hostile
def external_link_as_metadata(path: Path) -> Path:
    return edit(path, lambda f: f.__setitem__("metadata", h5py.ExternalLink("/etc/passwd", "/")))


@hostile
def soft_link(path: Path) -> Path:
    return edit(path, lambda f: f.__setitem__("infos/x", h5py.SoftLink("/observations")))


@hostile
def dangling_soft_link(path: Path) -> Path:
    return edit(path, lambda f: f.__setitem__("virtual", h5py.SoftLink("/nowhere")))


@hostile
def virtual_dataset(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["observations"]
        layout = h5py.VirtualLayout((20, 3), np.float32)
        layout[:] = h5py.VirtualSource(str(path.with_name("secret.h5")), "x", (20, 3))
        file.create_virtual_dataset("observations", layout)

    return edit(secret(path), change)


@hostile
def external_storage(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["observations"]
        place = [(str(path.with_name("secret.bin")), 0, 240)]
        file.create_dataset("observations", (20, 3), np.float32, external=place)

    return edit(secret(path), change)


@hostile
def loop_of_groups(path: Path) -> Path:
    return edit(path, lambda f: f.create_group("infos").__setitem__("again", f["/"]))


@hostile
def nested_too_deep(path: Path) -> Path:
    return edit(path, lambda f: f.create_dataset("infos/" + "/".join("a" * 40), data=np.zeros(20)))


@hostile
def too_many_members(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        group = file.create_group("infos")
        for number in range(600):
            group[f"k{number}"] = np.zeros(20)

    return edit(path, change)


@hostile
def virtual_info(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((20, 3), np.float32)
        layout[:] = h5py.VirtualSource(str(path.with_name("secret.h5")), "x", (20, 3))
        file.create_virtual_dataset("infos/x", layout)

    return edit(secret(path), change)


@hostile
def external_info_of_texts(path: Path) -> Path:
    """It would not be kept anyway; it is refused all the same."""

    def change(file: h5py.File) -> None:
        place = [(str(path.with_name("secret.bin")), 0, 240)]
        file.create_dataset("infos/x", (24,), "S10", external=place)

    return edit(secret(path), change)


# --- HDF5 that is not numbers ---------------------------------------------------------------------


@hostile
def vlen_strings(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["rewards"]
        file.create_dataset("rewards", data=["a"] * 20, dtype=h5py.string_dtype())

    return edit(path, change)


@hostile
def vlen_arrays(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["observations"]
        file.create_dataset("observations", (20,), h5py.vlen_dtype(np.float32))

    return edit(path, change)


@hostile
def references(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["terminals"]
        file.create_dataset("terminals", (20,), h5py.ref_dtype)

    return edit(path, change)


@hostile
def compound(path: Path) -> Path:
    kind = np.dtype([("a", "f4"), ("b", "i8")])
    return write(path, good(observations=np.zeros(20, kind)))


@hostile
def complex_numbers(path: Path) -> Path:
    return write(path, good(rewards=np.zeros(20, np.complex64)))


@hostile
def opaque_bytes(path: Path) -> Path:
    return write(path, good(observations=np.zeros((20, 3), "V4")))


@hostile
def a_named_type(path: Path) -> Path:
    return edit(path, lambda f: f.__setitem__("type", np.dtype("f4")))


@hostile
def observations_as_a_group_of_texts(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["observations"]
        file["observations/a"] = np.array([b"far"] * 20)

    return edit(path, change)


@hostile
def unknown_filter(path: Path) -> Path:
    def change(file: h5py.File) -> None:
        del file["actions"]
        file.create_dataset("actions", data=np.arange(2000).reshape(20, 100), scaleoffset=0)

    return edit(path, change)


# --- HDF5 that is too much, or too little ---------------------------------------------------------


@hostile
def bomb_of_zeros(path: Path) -> Path:
    """80 MB of zeros in a tenth of a megabyte."""
    zeros = np.zeros((1_000_000, 20), np.float32)
    return write(path, good(observations=zeros), compression_opts=9)


@hostile
def bomb_never_written(path: Path) -> Path:
    """40 GB that only the header claims."""

    def change(file: h5py.File) -> None:
        del file["observations"]
        file.create_dataset("observations", (10**9, 10), np.float32, chunks=(1000, 10))

    return edit(path, change)


@hostile
def bomb_in_an_array_that_is_not_read(path: Path) -> Path:
    return edit(path, lambda f: f.create_dataset("other", (10**9, 10), "f4", chunks=(1000, 10)))


@hostile
def no_steps(path: Path) -> Path:
    return write(path, {k: v[:0] for k, v in good().items()}, compression=None)


@hostile
def nan_observation(path: Path) -> Path:
    arrays = good()
    arrays["observations"][7, 1] = np.nan
    return write(path, arrays)


@hostile
def infinite_action(path: Path) -> Path:
    arrays = good()
    arrays["actions"][7, 1] = -np.inf
    return write(path, arrays)


@hostile
def reward_beyond_float32(path: Path) -> Path:
    return write(path, good(rewards=np.full(20, 1e300)))


@hostile
def wrong_length(path: Path) -> Path:
    return write(path, good(rewards=np.zeros(19, np.float32)))


@hostile
def missing_terminals(path: Path) -> Path:
    arrays = good()
    del arrays["terminals"]
    return write(path, arrays)


@hostile
def empty_hdf5(path: Path) -> Path:
    return write(path, {})


@hostile
def too_many_dimensions(path: Path) -> Path:
    return write(path, good(observations=np.zeros((20, *[1] * 9), np.float32)))


@hostile
def truncated_in_the_middle(path: Path) -> Path:
    data = write(path, good()).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


@hostile
def only_a_signature(path: Path) -> Path:
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    return path


@hostile
def signature_and_noise(path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 255, 4000, np.uint8).tobytes()
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + noise)
    return path


@hostile
def damaged_chunk(path: Path) -> Path:
    data = bytearray(write(path, good(), fletcher32=True).read_bytes())
    with h5py.File(path) as file:
        where = file["observations"].id.get_chunk_info(0)
    data[where.byte_offset + 5] ^= 0xFF
    path.write_bytes(bytes(data))
    return path


# --- something else -------------------------------------------------------------------------------


class Harm:
    def __reduce__(self) -> Any:
        return (open, ("/tmp/stepwell-pickle-was-run", "w"))


@hostile
def a_pickle(path: Path) -> Path:
    path.write_bytes(pickle.dumps(Harm()))
    return path


@hostile
def a_zip_named_hdf5(path: Path) -> Path:
    return npz(path, good_npz())


@hostile
def a_web_page(path: Path) -> Path:
    path.write_text("<!DOCTYPE html><html><body>404</body></html>")
    return path


@hostile
def a_text(path: Path) -> Path:
    path.write_text("observations,actions\n1,2\n")
    return path


@hostile
def npz_is_hdf5(path: Path) -> Path:
    return write(path, good())


@hostile
def npz_of_objects(path: Path) -> Path:
    array = np.array([Harm()] * 20, dtype=object)
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=True)
    return npz(path, good_npz(**{"observations.npy": out.getvalue()}))


@hostile
def npz_with_a_path(path: Path) -> Path:
    return npz(path, good_npz(**{"../../evil.npy": npy(np.zeros(20))}))


@hostile
def npz_with_an_absolute_path(path: Path) -> Path:
    return npz(path, good_npz(**{"/tmp/evil.npy": npy(np.zeros(20))}))


@hostile
def npz_with_a_nested_archive(path: Path) -> Path:
    return npz(path, good_npz(**{"inner.zip": b"PK\x03\x04" + bytes(100)}))


@hostile
def npz_bomb(path: Path) -> Path:
    zeros = npy(np.zeros((1_000_000, 20), np.float32))
    return npz(path, good_npz(**{"observations.npy": zeros}))


@hostile
def npz_header_claims_too_much(path: Path) -> Path:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 10), }"
    header += b" " * (118 - len(header)) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(240)
    return npz(path, good_npz(**{"observations.npy": data}))


@hostile
def npz_negative_shape(path: Path) -> Path:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (-20, -3), }"
    header += b" " * (117 - len(header)) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(240)
    return npz(path, good_npz(**{"observations.npy": data}))


@hostile
def npz_header_is_code(path: Path) -> Path:
    header = b"__import__('os').system('touch /tmp/stepwell-pickle-was-run')"
    header += b" " * (117 - len(header)) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(240)
    return npz(path, good_npz(**{"observations.npy": data}))


@hostile
def npz_huge_header(path: Path) -> Path:
    header = (
        b"{'descr': '<f4', 'shape': (20, 3), 'fortran_order': False" + b" " * 9_000_000 + b"}\n"
    )
    data = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header + bytes(240)
    return npz(path, good_npz(**{"observations.npy": data}), zipfile.ZIP_STORED)


@hostile
def npz_twice_the_same_name(path: Path) -> Path:
    npz(path, good_npz())
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("rewards.npy", npy(np.ones(20, np.float32)))
    return path


@hostile
def npz_many_members(path: Path) -> Path:
    return npz(path, good_npz(**{f"k{n}.npy": npy(np.zeros(1)) for n in range(80)}))


@hostile
def npz_cut_short(path: Path) -> Path:
    data = npz(path, good_npz()).read_bytes()
    path.write_bytes(data[:-200])
    return path


@hostile
def npz_strings(path: Path) -> Path:
    return npz(path, good_npz(**{"rewards.npy": npy(np.array(["1"] * 20))}))


@hostile
def npz_other_compression(path: Path) -> Path:
    return npz(path, good_npz(), zipfile.ZIP_LZMA)


THROUGH_THE_SERVICE = (
    *("external_link", "virtual_dataset", "external_storage", "loop_of_groups", "vlen_strings"),
    *("bomb_never_written", "truncated_in_the_middle", "a_pickle", "npz_bomb", "npz_of_objects"),
    *("npz_with_a_path", "npz_header_is_code"),
)


@pytest.fixture(scope="module")
def outcomes(
    importing: Importing, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """What came of the imports, and how long they took."""
    folder = tmp_path_factory.mktemp("hostile")
    before = importing.files()
    rss = psutil.Process().memory_info().rss
    found: dict[str, Any] = {}
    for name in MAKERS if request.config.getoption("--all") else THROUGH_THE_SERVICE:
        (folder / name).mkdir()
        path = MAKERS[name](folder / name / "file")
        began = time.monotonic()
        job = importing.run(path, "victim", format=kind_of(name))
        found[name] = (job, time.monotonic() - began)
    return {
        "jobs": found,
        "grown": psutil.Process().memory_info().rss - rss,
        "files": importing.files() - before,
    }


def kind_of(name: str) -> str:
    return "npz" if name.startswith("npz") else "d4rl"


@pytest.mark.parametrize("name", MAKERS)
def test_refused(tmp_path: Path, name: str) -> None:
    """With anything but an `ImportRefused` the child process would die."""
    path = MAKERS[name](tmp_path / "file")
    began = time.monotonic()
    with pytest.raises(ImportRefused) as caught:
        read_file(path, kind=kind_of(name))
    error = caught.value
    check_refusal(error.status, error.code, error.detail, time.monotonic() - began)
    assert str(SECRET) not in f"{error.detail} {error.expected} {error.got}"


def test_the_service_refuses(outcomes: dict[str, Any]) -> None:
    for name, (job, seconds) in outcomes["jobs"].items():
        assert job.state == "failed", f"{name} was taken: {job.result}"
        check_refusal(job.error.status, job.error.code, job.error.detail, seconds)
        assert "died" not in job.error.detail, f"{name}: refused only because the child crashed"
        assert str(SECRET) not in job.error.model_dump_json()


def check_refusal(status: int, code: str, detail: str, seconds: float) -> None:
    assert status in (413, 422), (status, detail)
    assert code in ("import_refused", "body_too_large"), (code, detail)
    assert detail
    assert seconds < 10, "a refusal takes long"


def test_nothing_of_them_is_left(outcomes: dict[str, Any], importing: Importing) -> None:
    assert outcomes["files"] == set()
    assert outcomes["grown"] < 300 << 20
    assert not Path("/tmp/stepwell-pickle-was-run").exists()
    assert importing.rows("select count(*) from datasets where name = 'victim'") == [[0]]


def test_a_good_file_still_imports(
    outcomes: dict[str, Any], importing: Importing, tmp_path: Path
) -> None:
    assert importing.run(write(tmp_path / "good.hdf5", good()), "after").state == "succeeded"
    job = importing.run(npz(tmp_path / "good.npz", good_npz()), "after-npz", format="npz")
    assert job.state == "succeeded", job.error


def test_texts_in_metadata_do_not_hurt(importing: Importing, tmp_path: Path) -> None:
    """Newer writers keep them as variable-length strings: left unread, the data is taken."""

    def change(file: h5py.File) -> None:
        file["metadata/note"] = "a text"
        file["metadata/lots"] = ["many", "texts"]

    job = importing.run(edit(tmp_path / "a.hdf5", change), "texts")
    assert job.state == "succeeded", job.error
