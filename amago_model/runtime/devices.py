"""Whether torch has a device here."""

from __future__ import annotations

import torch


def why_no_device(device: str) -> str:
    """Why nothing can be put on a device such as "cuda:1", and what would do; "" if it can."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).split("\n")[0]
        return f"{device}: {reason}; expected a device that torch has here, as cpu"
    return ""
