"""Settings of glibc's malloc that make the process keep freed memory.

By default glibc returns large freed blocks to the kernel immediately. The activations of the next
update then need new pages, which the kernel zeroes: up to half of an update's time on a CPU.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's settings in malloc.h
_BLOCK = 1 << 30


def keep_freed_memory() -> bool:
    """Make this process reuse freed blocks of up to 1 GiB instead of returning them to the kernel.

    The process then keeps its peak memory. Returns whether the C library accepted the settings;
    False if it is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, 2 * _BLOCK - 1))
