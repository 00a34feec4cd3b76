"""The sandbox: the rights that a child process drops before it reads untrusted data. Stdlib only.

The layers are independent, so that a layer that is missing on a machine does not disable others:
    limits    rlimits: memory, CPU seconds, open files, no file may grow (always)
    uid       another user, with the parent's read access and no write access (started as root)
    files     Landlock: reads only below the named paths, writes nowhere (Linux ≥ 5.13), and
              sends no signals to other processes (≥ 6.12)
    network   seccomp: no sockets, no programs, no further processes, no signals, no access to other
              processes, no change of files or of the system (Linux, x86-64 and arm64)

`confine()` returns which layers are active; `stepwell fsck --sandbox` prints them. Call it once,
early, while the process has one thread: Landlock applies to the calling thread and to those that it
starts later.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import subprocess
import sys
from collections.abc import Iterable
from errno import ENOSYS, EPERM

NOBODY = 65534
_PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 8, 22, 38
_CAP_DAC_READ_SEARCH = 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Number of rights (files, TCP) that each ABI version of Landlock knows.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


def confine(
    reads: Iterable[str],
    *,
    address_space: int,
    cpu_seconds: int,
    open_files: int = 256,
) -> dict[str, bool]:
    """Drop all rights but reading below `reads`. Returns which layers are active.

    A former root keeps the capability to read any file: shards and Python itself may be in folders
    that only root can read (a container's /root); Landlock limits it to `reads`.
    """
    _limits(address_space, cpu_seconds, open_files)
    libc = ctypes.CDLL(None, use_errno=True)
    uid = _drop_uid(libc)
    quiet = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    files = quiet and _landlock(libc, reads)
    network = quiet and _seccomp(libc)
    return {"limits": True, "uid": uid, "files": files, "network": network}


def environment(**extra: str) -> dict[str, str]:
    """A child's whole environment: no secrets, no home, one BLAS thread, and the import path."""
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
    """Paths that Python may read later: its own files and the system's libraries."""
    paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, "/usr/lib", "/usr/lib64", "/lib"}
    paths |= {"/lib64", "/usr/local/lib", "/dev/null", "/dev/urandom", "/sys/devices/system/cpu"}
    return sorted(p for p in {*paths, _root(), *_packages()} if os.path.exists(p))


def _root() -> str:
    """The folder of the package `server`: a checkout or a site-packages."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _packages() -> list[str]:
    """Other folders of packages: the user's site, Debian's, one of `pip install --target`. Not
    everything on sys.path."""
    return [p for p in sys.path if _holds_packages(p)]


def _holds_packages(folder: str) -> bool:
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # a zip file, or a folder that is absent or of somebody else
        return False


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
    # capset(version 3, self): effective and permitted, of which exactly one is kept.
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
    if abi >= 6:
        attributes += struct.pack("=Q", 0b11)  # no abstract sockets, no signals to others
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
    """Return EPERM for every system call that affects anything outside the process."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _AUDIT:
        return False
    program = _program(machine)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    whole = Program(len(program), ctypes.cast(buffer, ctypes.c_void_p))
    return bool(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0) == 0)


# A list of denied calls, not of allowed ones: C libraries, Python and DuckDB use different calls on
# different machines, and a worker must start on all of them. Calls newer than the list return
# ENOSYS, as on an older kernel, so new calls are not allowed by default.

DENIED: dict[str, tuple[int, int]] = {
    # name: (x86-64, arm64); -1 where there is none.
    # sockets, and descriptors sent through them
    **{"socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200)},
    **{"listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "sendto": (44, 206)},
    **{"sendmsg": (46, 211), "sendmmsg": (307, 269), "recvmsg": (47, 212)},
    # other programs and processes
    **{"execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1)},
    # signals
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"pidfd_send_signal": (424, 424), "pidfd_open": (434, 434)},
    # memory, descriptors and priorities of other processes
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448)},
    **{"kcmp": (312, 272), "migrate_pages": (256, 238), "move_pages": (279, 239)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119)},
    **{"sched_setparam": (142, 118), "sched_setattr": (314, 274)},
    # memory that outlives a process, or that no limit counts
    **{"shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190)},
    **{"mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447)},
    # namespaces, file systems and files opened by handle
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431)},
    **{"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)},
    **{"open_tree_attr": (467, 467), "name_to_handle_at": (303, 264)},
    **{"open_by_handle_at": (304, 265), "fanotify_init": (300, 262), "quotactl": (179, 60)},
    **{"quotactl_fd": (443, 443), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225)},
    # kernel subsystems that exploits often use
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "keyctl": (250, 219), "add_key": (248, 217)},
    **{"request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273)},
    **{"delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294)},
    **{"iopl": (172, -1), "ioperm": (173, -1), "modify_ldt": (154, -1), "personality": (135, 92)},
    # the whole machine
    **{"reboot": (169, 142), "syslog": (103, 116), "vhangup": (153, 58), "sethostname": (170, 161)},
    **{"setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112)},
    **{"adjtimex": (159, 171), "clock_adjtime": (305, 266)},
    # files: names, lengths, owners, modes, times and attributes. Landlock does not cover all.
    **{"creat": (85, -1), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47)},
    **{"rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276)},
    **{"link": (86, -1), "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36)},
    **{"unlink": (87, -1), "unlinkat": (263, 35), "rmdir": (84, -1)},
    **{"mkdir": (83, -1), "mkdirat": (258, 34), "mknod": (133, -1), "mknodat": (259, 33)},
    **{"chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54)},
    **{"utime": (132, -1), "utimes": (235, -1), "futimesat": (261, -1), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)},
}

# (x86-64, arm64), the argument, and its allowed value.
_OF_ITSELF = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}  # the first: 0, itself
_COMMANDS = {
    # The second argument must not be one of these: a descriptor's owner receives signals.
    "fcntl": ((72, 25), (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX
    "ioctl": ((16, 29), (0x8901, 0x8902, 0x5412)),  # FIOSETOWN, SIOCSPGRP, TIOCSTI
}
_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), (435, 435), 0x10000
_NEWEST = 470
_X32 = 0x40000000
"""Numbers from here on are x86-64's other set of the same calls."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _program(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter as BPF: (code, jump if true, jump if false, value)."""
    column = list(_AUDIT).index(machine)
    load, equal, greater, least, bits, give = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
    kill, allow, deny, absent = 0x80000000, 0x7FFF0000, 0x00050000 | EPERM, 0x00050000 | ENOSYS
    number, architecture, first, second = 0, 4, 16, 24
    program = [(load, 0, 0, architecture), (equal, 1, 0, _AUDIT[machine]), (give, 0, 0, kill)]
    program += [(load, 0, 0, number)]
    program += [(least, 0, 1, _X32), (give, 0, 0, deny)]
    program += [(greater, 0, 1, _NEWEST), (give, 0, 0, absent)]
    for numbers in DENIED.values():
        if numbers[column] >= 0:
            program += [(equal, 0, 1, numbers[column]), (give, 0, 0, deny)]
    # Its arguments are in memory, which a filter cannot read: C libraries then use clone.
    program += [(equal, 0, 1, _CLONE3[column]), (give, 0, 0, absent)]
    program += [(equal, 0, 4, _CLONE[column]), (load, 0, 0, first), (bits, 1, 0, _CLONE_THREAD)]
    program += [(give, 0, 0, deny), (give, 0, 0, allow)]
    for numbers in _OF_ITSELF.values():
        program += [(equal, 0, 4, numbers[column]), (load, 0, 0, first), (equal, 1, 0, 0)]
        program += [(give, 0, 0, deny), (give, 0, 0, allow)]
    for numbers, refused in _COMMANDS.values():
        program += [(equal, 0, 2 * len(refused) + 2, numbers[column]), (load, 0, 0, second)]
        for command in refused:
            program += [(equal, 0, 1, command), (give, 0, 0, deny)]
        program += [(give, 0, 0, allow)]
    return [*program, (give, 0, 0, allow)]


# --- which layers hold on this machine: `stepwell fsck --sandbox` ---------------------------------

LAYERS = {
    "limits": "memory, CPU time, open files, and no file may grow",
    "uid": "another user, who may read and write nothing (only when started as root)",
    "files": "Landlock: reads named paths only, writes nowhere, sends no signals",
    "network": "seccomp: no sockets, programs, processes, signals or changes of files",
}
_PROBE = """
import json, sys
from server.sandbox import confine, libraries
layers = confine(libraries(), address_space=2 << 30, cpu_seconds=10)
sys.stdout.write(json.dumps(layers))
"""


def active() -> dict[str, bool]:
    """Layer → whether it is active, determined by a child process that confines itself."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-s", "-c", _PROBE],
            env=environment(),
            cwd="/",
            capture_output=True,
            timeout=30,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return dict.fromkeys(LAYERS, False)
    return {name: bool(found.get(name)) for name in LAYERS}
