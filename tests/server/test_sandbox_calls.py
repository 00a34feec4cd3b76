"""The system calls that a confined child can no longer make, each tried in a real one.

seccomp stands alone here: no other uid, no Landlock, no limits. What EPERM answers could otherwise
be another layer's work.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import sandbox
from server.sandbox import environment

MACHINE = platform.machine()
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or MACHINE not in ("x86_64", "aarch64"), reason="no filter here"
)
COLUMN = 1 if MACHINE == "aarch64" else 0

ALONE = """
import ctypes, errno, json, os, sys
from server import sandbox
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
    return [result, errno.errorcode.get(ctypes.get_errno(), "")]
def alone():
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert sandbox._seccomp(libc)
column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
out = {}
"""
END = "\nsys.stdout.write(json.dumps(out))\nsys.stdout.flush()\nos._exit(0)\n"


def run(program: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-c", ALONE + program + END, *arguments],
        env=environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process of the same user, which nobody may signal."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    assert process.poll() is None, "it was killed"
    process.kill()
    process.wait()


def test_every_denied_call_answers_eperm() -> None:
    """Arguments are nonsense: without the filter these would fail too, but otherwise."""
    out = run(
        """
names = {n: numbers[column] for n, numbers in sandbox.DENIED.items() if numbers[column] >= 0}
alone()
if call(names["kill"], os.getppid(), 0)[1] == "EPERM":  # the filter is there: now all of them
    for name, number in names.items():
        out[name] = call(number, -1, -1, -1, -1, -1, -1)
"""
    )
    expected = [name for name, numbers in sandbox.DENIED.items() if numbers[COLUMN] >= 0]
    assert sorted(out) == sorted(expected)
    assert {name for name, answer in out.items() if answer != [-1, "EPERM"]} == set()


def test_the_parent_cannot_be_signalled(bystander: int) -> None:
    """Without the filter each of these reaches it: signal 0 asks whether it may."""
    program = """
n = {name: numbers[column] for name, numbers in sandbox.DENIED.items()}
pid = int(sys.argv[1])
fd = call(n["pidfd_open"], pid, 0)[0] if sys.argv[2] == "open" else -1
if sys.argv[2] != "free":
    alone()
for name, arguments in {
    "kill": (pid, 0),
    "tkill": (pid, 0),
    "tgkill": (pid, pid, 0),
    "pidfd_open": (pid, 0),
    **({"pidfd_send_signal": (fd, 0, 0, 0)} if fd >= 0 else {}),
}.items():
    out[name] = call(n[name], *arguments)[1]
for name, target in (("parent", os.getppid()), ("everybody", -1), ("group", 0)):
    out[name] = call(n["kill"], target, 0)[1]
"""
    assert set(run(program, str(bystander), "open").values()) == {"EPERM"}
    free = run(program, str(bystander), "free")
    assert {free[name] for name in ("kill", "tkill", "tgkill", "pidfd_open", "parent")} == {""}


def test_a_descriptors_owner_cannot_be_signalled(bystander: int) -> None:
    """F_SETOWN and F_SETSIG have the kernel send any signal to a process of the same user."""
    program = """
import fcntl, struct
if sys.argv[2] == "filtered":
    alone()
read, write = os.pipe()
def attempt(name, action):
    try:
        action()
        out[name] = ""
    except OSError as error:
        out[name] = errno.errorcode[error.errno]
pid = int(sys.argv[1])
attempt("F_SETOWN", lambda: fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid()))
attempt("F_SETSIG", lambda: fcntl.fcntl(read, 10, 23))
owner = struct.pack("=ii", 0, pid)  # a thread
attempt("F_SETOWN_EX", lambda: fcntl.fcntl(read, 15, owner))
for name, number in (("FIOSETOWN", 0x8901), ("SIOCSPGRP", 0x8902), ("TIOCSTI", 0x5412)):
    attempt(name, lambda: fcntl.ioctl(read, number, b"\\0" * 8))
attempt("F_GETFL", lambda: fcntl.fcntl(read, fcntl.F_GETFL))
attempt("F_SETFL", lambda: fcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK))
attempt("FIONREAD", lambda: fcntl.ioctl(read, 0x541B, b"\\0" * 8))
"""
    out = run(program, str(bystander), "filtered")
    harmless = {"F_GETFL", "F_SETFL", "FIONREAD"}
    assert {out.pop(name) for name in harmless} == {""}
    assert len(out) == 6 and set(out.values()) == {"EPERM"}
    free = run(program, str(bystander), "free")
    assert free["F_SETOWN"] == free["F_SETSIG"] == free["F_SETOWN_EX"] == ""


@pytest.mark.skipif(MACHINE != "x86_64", reason="x32 is of x86-64")
def test_x32_numbers_are_refused() -> None:
    """The same calls under other numbers: the bit 0x40000000, whatever comes with it."""
    out = run(
        """
bit = 0x40000000
numbers = [0, 1, 39, 41, 57, 59, 62, 101, 520, 522, 545, 547, 400, 511, 512, 0x3FFFFFFF]
alone()
for number in numbers:
    out[str(number)] = call(bit | number, -1, 0, 0, 0, 0, 0)
"""
    )
    assert len(out) == 16
    assert {str(answer) for answer in out.values()} == {str([-1, "EPERM"])}


def test_what_is_newer_than_the_list_is_absent() -> None:
    newest = sandbox._NEWEST
    out = run(
        """
alone()
for number in (sandbox._NEWEST + 1, sandbox._NEWEST + 2, 600, 4000, 0x3FFFFFFF):
    out[str(number)] = call(number, -1, -1, -1, -1, -1, -1)[1]
"""
    )
    assert set(out.values()) == {"ENOSYS"} and str(newest + 1) in out
    known = max(max(numbers) for numbers in sandbox.DENIED.values())
    assert known <= newest, "a call on the list is beyond its end"


def test_processes_cannot_be_made_and_threads_can() -> None:
    """A child of the child would outlive its parent's SIGKILL."""
    out = run(
        """
import threading
alone()
ran = []
thread = threading.Thread(target=ran.append, args=(1,))
thread.start()
thread.join()
out["thread"] = ran
popen = lambda: __import__("subprocess").run(["true"])
for name, action in {"fork": os.fork, "popen": popen}.items():
    try:
        if action() == 0:
            os._exit(0)
        out[name] = "made"
    except OSError as error:
        out[name] = errno.errorcode[error.errno]
clone, clone3 = sandbox._CLONE[column], sandbox._CLONE3[column]
out["clone"] = call(clone, 17, 0, 0, 0, 0)[1]
out["namespace"] = call(clone, 17 | 0x10000000, 0, 0, 0, 0)[1]
out["clone3"] = call(clone3, 0, 0)[1]
"""
    )
    assert out == {
        "thread": [1],
        "fork": "EPERM",
        "popen": "EPERM",
        "clone": "EPERM",
        "namespace": "EPERM",
        "clone3": "ENOSYS",
    }


def test_limits_and_cores_of_others_are_theirs(bystander: int) -> None:
    program = """
prlimit, affinity = (sandbox._OF_ITSELF[n][column] for n in ("prlimit64", "sched_setaffinity"))
import ctypes, resource
limits = (ctypes.c_ulong * 2)()
cores = ctypes.create_string_buffer(b"\\xff" * 128)
pid, other = os.getpid(), int(sys.argv[1])
alone()
for name, whose in (("itself", 0), ("by number", pid), ("other", other)):
    out[f"limits of {name}"] = call(prlimit, whose, 7, 0, ctypes.addressof(limits))[1]
    out[f"cores of {name}"] = call(affinity, whose, 128, ctypes.addressof(cores))[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
out["own"] = "" if resource.getrlimit(resource.RLIMIT_NOFILE) == (50, 50) else "not set"
"""
    assert run(program, str(bystander)) == {
        "limits of itself": "",
        "cores of itself": "",
        "limits of by number": "EPERM",
        "cores of by number": "EPERM",
        "limits of other": "EPERM",
        "cores of other": "EPERM",
        "own": "",
    }


def test_files_are_read_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    out = run(
        """
path = sys.argv[1]
alone()
def attempt(name, action):
    try:
        action()
        out[name] = "done"
    except OSError as error:
        out[name] = errno.errorcode[error.errno]
attempt("read", lambda: open(path + "/file").read())
attempt("list", lambda: os.listdir(path))
attempt("remove", lambda: os.remove(path + "/file"))
attempt("rename", lambda: os.rename(path + "/file", path + "/other"))
attempt("mkdir", lambda: os.mkdir(path + "/folder"))
attempt("chmod", lambda: os.chmod(path + "/file", 0))
attempt("utime", lambda: os.utime(path + "/file", (0, 0)))
attempt("truncate", lambda: os.truncate(path + "/file", 0))
attempt("link", lambda: os.link(path + "/file", path + "/other"))
attempt("symlink", lambda: os.symlink(path + "/file", path + "/other"))
attempt("setxattr", lambda: os.setxattr(path + "/file", b"user.x", b"1"))
attempt("socket", lambda: __import__("socket").socket())
attempt("pair", lambda: __import__("socket").socketpair())
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, 19))
""",
        str(tmp_path),
    )
    assert (out.pop("read"), out.pop("list")) == ("done", "done")
    assert set(out.values()) == {"EPERM"} and len(out) == 13
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(MACHINE != "x86_64", reason="32-bit calls of x86")
def test_calls_of_another_architecture_end_the_process() -> None:
    """`int 0x80` is the 32-bit way in, with other numbers."""
    program = """
import mmap
code = bytes.fromhex("b814000000" "cd80" "c3")  # mov eax, 20 (getpid); int 0x80; ret
page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
alone()
ctypes.CFUNCTYPE(ctypes.c_long)(address)()
"""
    done = subprocess.run(
        [sys.executable, "-P", "-s", "-c", ALONE + program + END],
        env=environment(),
        cwd="/",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode in (-signal.SIGSYS, -signal.SIGSEGV)  # SIGSEGV: no 32-bit calls at all


def test_landlock_alone_keeps_signals_in(bystander: int) -> None:
    """Where the kernel knows how (6.12): without seccomp, and as the same user."""
    out = run(
        """
assert libc.prctl(38, 1, 0, 0, 0) == 0
out["abi"] = libc.syscall(444, None, 0, 1)
out["on"] = sandbox._landlock(libc, sandbox.libraries())
try:
    os.kill(int(sys.argv[1]), 0)
    out["kill"] = ""
except OSError as error:
    out["kill"] = errno.errorcode[error.errno]
os.kill(os.getpid(), 0)
try:
    open("/etc/passwd")
    out["read"] = ""
except OSError as error:
    out["read"] = errno.errorcode[error.errno]
""",
        str(bystander),
    )
    if out["on"]:
        assert out["read"] == "EACCES"
        assert out["kill"] == ("EPERM" if out["abi"] >= 6 else "")


def test_limits_alone_hold() -> None:
    out = run(
        """
import resource
sandbox._limits(1 << 30, 7, 33)
for name in ("AS", "CPU", "NOFILE", "FSIZE", "CORE"):
    out[name] = list(resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
sandbox._limits(2 << 30, 9, 99)  # a lower hard limit stays
out["again"] = list(resource.getrlimit(resource.RLIMIT_CPU))
try:
    bytearray(2 << 30)
    out["memory"] = ""
except MemoryError:
    out["memory"] = "refused"
"""
    )
    assert out == {
        "AS": [1 << 30] * 2,
        "CPU": [7, 7],
        "NOFILE": [33, 33],
        "FSIZE": [0, 0],
        "CORE": [0, 0],
        "again": [7, 7],
        "memory": "refused",
    }


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root has a uid to drop")
def test_the_uid_alone_drops_all_but_reading(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "file").chmod(0o600)
    out = run(
        """
out["dropped"] = sandbox._drop_uid(libc)
out["ids"] = [*os.getresuid(), *os.getresgid(), *os.getgroups()]
caps = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Cap"))
out["caps"] = {name: int(value, 16) for name, value in caps.items()}
out["read"] = open(sys.argv[1] + "/file").read()
for name, action in {
    "write": lambda: open(sys.argv[1] + "/file", "w"),
    "kill": lambda: os.kill(os.getppid(), 0),
    "back": lambda: os.setuid(0),
}.items():
    try:
        action()
        out[name] = ""
    except OSError as error:
        out[name] = errno.errorcode[error.errno]
""",
        str(tmp_path),
    )
    assert out["dropped"] and out["ids"] == [65534] * 6
    assert out["caps"]["CapEff"] == out["caps"]["CapPrm"] == 1 << 2  # CAP_DAC_READ_SEARCH
    assert out["read"] == "content"
    assert (out["write"], out["kill"], out["back"]) == ("EACCES", "EPERM", "EPERM")


def test_the_numbers_are_those_of_the_kernels_headers() -> None:
    """Where headers are installed: both columns, by name."""
    files = {
        0: (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"#define __NR_(\w+) (\d+)"),
        1: (
            Path("/usr/include/asm-generic/unistd.h"),
            r"#define __NR(?:3264)?_(\w+)\s+(\d+)",
        ),
    }
    names = {
        **sandbox.DENIED,
        **sandbox._OF_ITSELF,
        **{name: numbers for name, (numbers, _) in sandbox._COMMANDS.items()},
        "clone": sandbox._CLONE,
        "clone3": sandbox._CLONE3,
    }
    for column, (path, pattern) in files.items():
        if not path.exists():
            continue
        real = {name: int(number) for name, number in re.findall(pattern, path.read_text())}
        known = {name: real[name] for name in names if name in real}
        assert len(known) > 90
        assert {n: names[n][column] for n in known} == known
        absent = {n for n, numbers in names.items() if numbers[column] == -1}
        assert not absent & set(real)


def test_no_number_stands_twice() -> None:
    for column, machine in enumerate(("x86_64", "aarch64")):
        used = [numbers[column] for numbers in sandbox.DENIED.values() if numbers[column] >= 0]
        assert len(used) == len(set(used))
        assert len(sandbox._program(machine)) < 4096  # the kernel's limit
