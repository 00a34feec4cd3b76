"""Freed memory kept by the process, where the C library is glibc.

By default glibc gives large freed blocks back to the kernel at once, and every activation of the
next update comes back as fresh pages, zeroed one by one: up to half of an update's time on a CPU.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's settings in malloc.h
_BLOCK = 1 << 30


def keep_freed_memory() -> bool:
    """From now on this process reuses freed blocks of up to 1 GiB instead of giving them back.

    The process then holds what it once needed at its peak. True if the C library took it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, 2 * _BLOCK - 1))
