"""What environments, files and people give as a flag, and which flag it is."""

from decimal import Decimal
from typing import Any

import numpy as np
import torch

TRUE: dict[str, Any] = {
    "bool": True,
    "numpy bool": np.bool_(True),
    "0-d array": np.array(True),
    "one-element array": np.array([True]),
    "[1, 1]": np.array([[True]]),
    "list of one": [True],
    "int": 1,
    "float": 1.0,
    "numpy int64": np.int64(1),
    "numpy uint8": np.uint8(1),
    "numpy float32": np.float32(1.0),
    "array of one int": np.array([1]),
    "array of one float": np.array([1.0], np.float32),
    "array of one object": np.array([True], object),
    "tensor": torch.tensor(True),
    "tensor of one": torch.tensor([1]),
}
FALSE: dict[str, Any] = {
    "bool": False,
    "numpy bool": np.bool_(False),
    "0-d array": np.array(False),
    "one-element array": np.array([False]),
    "list of one": [False],
    "int": 0,
    "float": 0.0,
    "minus zero": -0.0,
    "numpy int64": np.int64(0),
    "numpy float32": np.float32(0.0),
    "array of one float": np.array([0.0]),
    "tensor": torch.tensor(False),
}
NOTHING: dict[str, Any] = {"None": None, "array of one None": np.array([None])}
"""As an end: False."""
NEITHER: dict[str, Any] = {
    "2": 2,
    "-1": -1,
    "0.5": 0.5,
    "NaN": float("nan"),
    "text": "true",
    "number as text": "1",
    "bytes": b"\1",
    "array of two": np.array([True, True]),
    "list of two": [True, False],
    "no value": np.array([], np.bool_),
    "empty list": [],
    "rows of two lengths": [[True], [True, False]],
    "array of 2": np.array([2]),
    "tensor of two": torch.tensor([True, False]),
    "complex": 1 + 0j,
    "decimal": Decimal("0.5"),
    "dict": {"done": True},
    "object": object(),
}
