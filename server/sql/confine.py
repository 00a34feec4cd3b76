"""What a child process gives up before it touches anything a stranger wrote. Standard library only.

Layers, each independent of the others, so that one that is missing here is not a hole:
    limits    rlimits: memory, CPU seconds, open files, no file may grow (always)
    uid       another user, who may read what we could and write nothing (when started as root)
    files     Landlock: reading below the named paths only, writing nowhere (Linux ≥ 5.13)
    network   seccomp: no sockets, no exec, no ptrace (Linux, x86-64 and arm64)

`confine()` answers which are on; `stepwell fsck --sandbox` prints that. Call it once, early, while
the process has one thread: Landlock binds only the calling thread and those it starts later.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable

NOBODY = 65534
_PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 8, 22, 38
_CAP_DAC_READ_SEARCH = 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# How many rights (files, TCP) each ABI version of Landlock knows.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


def confine(
    reads: Iterable[str],
    *,
    address_space: int,
    cpu_seconds: int,
    open_files: int = 256,
) -> dict[str, bool]:
    """Give up everything but reading below `reads`. Returns which layers hold.

    A former root keeps the one capability to read: shards and Python itself may lie where only
    root may look (a container's /root), and Landlock says where that ends.
    """
    _limits(address_space, cpu_seconds, open_files)
    libc = ctypes.CDLL(None, use_errno=True)
    uid = _drop_uid(libc)
    quiet = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    files = quiet and _landlock(libc, reads)
    network = quiet and _seccomp(libc)
    return {"limits": True, "uid": uid, "files": files, "network": network}


def environment(**extra: str) -> dict[str, str]:
    """A child's whole environment: no secrets, no home, one BLAS thread, and how to import us."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONPATH": os.pathsep.join([_root(), *_packages()]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HDF5_PLUGIN_PRELOAD": "::",  # HDF5 must not load filters from disk
        **extra,
    }


def libraries() -> list[str]:
    """What Python itself may have to read later: its own files and the system's libraries."""
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr/lib", "/usr/lib64", "/lib"}
    paths |= {"/lib64", "/usr/local/lib", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu"}
    return sorted(p for p in {*paths, _root(), *_packages()} if os.path.exists(p))


def _root() -> str:
    """Where the package `server` lies: a checkout or a site-packages."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _packages() -> list[str]:
    """Where else packages lie: a user's own site, Debian's. Not whatever else is on the path."""
    return [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]


def _limits(address_space: int, cpu_seconds: int, open_files: int) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def _drop_uid(libc: ctypes.CDLL) -> bool:
    if os.getuid() != 0:
        return False
    try:
        libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return False
    # capset(version 3, self): effective and permitted, of which we keep exactly one.
    header = struct.pack("=Ii", 0x20080522, 0)
    bit = 1 << _CAP_DAC_READ_SEARCH
    return bool(libc.capset(header, struct.pack("=6I", bit, bit, 0, 0, 0, 0)) == 0)


def _landlock(libc: ctypes.CDLL, reads: Iterable[str]) -> bool:
    if sys.platform != "linux":
        return False
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if abi < 1:
        return False
    files = (1 << _FILE_RIGHTS.get(abi, 16)) - 1
    attributes = struct.pack("=Q", files)
    if abi >= 4:
        attributes += struct.pack("=Q", 0b11)  # no TCP bind, no TCP connect
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in reads:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
            rule = struct.pack("=Qi", allowed, fd)
            libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)
            os.close(fd)
        return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _seccomp(libc: ctypes.CDLL) -> bool:
    """Answer EPERM to every system call by which a process reaches out of itself."""
    # audit architecture, then: socket socketpair connect bind execve execveat ptrace
    # process_vm_readv process_vm_writev mount io_uring_setup bpf keyctl
    tables: dict[str, tuple[int, list[int]]] = {
        "x86_64": (0xC000003E, [41, 53, 42, 49, 59, 322, 101, 310, 311, 165, 425, 321, 250]),
        "aarch64": (0xC00000B7, [198, 199, 203, 200, 221, 281, 117, 270, 271, 40, 425, 280, 219]),
    }
    if sys.platform != "linux" or platform.machine() not in tables:
        return False
    architecture, denied = tables[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | 1
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(equal, len(denied) - i, 0, number) for i, number in enumerate(denied)]
    program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    whole = Program(len(program), ctypes.cast(buffer, ctypes.c_void_p))
    return bool(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0) == 0)
