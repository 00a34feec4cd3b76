"""Writing one HDF5 file in the layout of D4RL (Fu et al., 2020). Reading is the service's business.

    row i              observations[i] actions[i] rewards[i] next_observations[i]
    terminals[i]       the task ended here: row i + 1 begins another episode
    timeouts[i]        somebody stopped watching here: likewise, but next_observations[i] is no end
    metadata/...       scalars and small arrays about the file

All episodes end to end in flat columns, gzip 4, no HDF5 attributes, no episode index.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from stepwell.errors import InvalidData

_REQUIRED = ("observations", "actions", "rewards", "terminals")
_FLAGS = ("terminals", "timeouts")

Columns = Mapping[str, NDArray[np.generic]]
Metadata = Mapping[str, str | int | float | NDArray[np.generic]]


def write_d4rl(path: str | Path, columns: Columns, metadata: Metadata) -> None:
    """Write `columns` (name -> array, all with the same N >= 1 rows) and `metadata` to `path`.

    Names may hold slashes (`infos/qpos`). Strings in `metadata` become bytes, as D4RL has them.
    The file appears whole or not at all, and replaces an older one; the same input gives the same
    bytes.

    Raises InvalidData when the columns break the layout, OSError when the disk refuses.
    """
    path = Path(path)
    _check(columns)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            with h5py.File(file, "w") as h5:
                for name, column in columns.items():
                    h5.create_dataset(name, data=column, compression="gzip", compression_opts=4)
                for name, value in metadata.items():
                    leaf = np.bytes_(value) if isinstance(value, str) else value
                    h5.create_dataset(f"metadata/{name}", data=leaf)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's files are readable by the owner only
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check(columns: Columns) -> None:
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise InvalidData(f"D4RL columns without {missing}", expected=f"at least {_REQUIRED}")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or lengths["rewards"] == 0:
        raise InvalidData("D4RL columns", expected="one common length >= 1", got=str(lengths))
    if columns["rewards"].ndim != 1:
        shape = str(columns["rewards"].shape)
        raise InvalidData("rewards", expected="one number a row, shape (N,)", got=shape)
    for name in _FLAGS:
        if name in columns and (columns[name].dtype != np.bool_ or columns[name].ndim != 1):
            got = f"{columns[name].dtype} {columns[name].shape}"
            raise InvalidData(name, expected="bool (N,)", got=got)
