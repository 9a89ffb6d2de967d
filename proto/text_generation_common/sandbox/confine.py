"""Confinement of a worker: no new files, sockets, processes, threads or privileges, for the rest of the process's life.

A seccomp filter allows the system calls that computing needs and refuses all others with EPERM. Resource limits do the
same in part where the kernel has no seccomp. Only Linux confines; elsewhere workers have limits of memory and time alone.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

UNPRIVILEGED_ID = 65534
"""User and group of a worker whose parent runs as root."""
CAP_KILL = 5
"""Number of the capability with which a parent may kill workers of another user."""

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1
ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000

COMPUTING = {
    "x86_64": "0 1 3 5 7 8 9 10 11 12 13 14 15 19 20 23 24 25 28 35 38 39 60 96 97 98 100 102 104 107 108 128 131 "
    "186 201 202 204 218 228 229 230 231 270 271 273 318 334",
    "aarch64": "57 62 63 64 65 66 72 73 80 93 94 96 98 99 101 103 113 114 115 123 124 132 134 135 137 139 153 163 "
    "165 169 172 174 175 176 177 178 214 215 216 222 226 233 278 293",
}
"""Numbers of the allowed system calls: read, write, close, fstat, poll, lseek, memory, signal handlers, clocks, timers, sleeping,
futexes, own ids and resource use, random numbers, exit."""
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {"audit": 0xC000003E, "seccomp": 317, "kill": 62, "tgkill": 234},
    "aarch64": {"audit": 0xC00000B7, "seccomp": 277, "kill": 129, "tgkill": 131},
}
"""Per machine: its number for seccomp filters, and the system calls that are allowed in part."""


def confine() -> list[str]:
    """Confine this process; return the measures that the kernel refused, each with the reason."""
    if sys.platform != "linux":
        return ["no measures on this system"]
    time.localtime()  # reads the file of the time zone
    refused = []
    measures: tuple[Callable[[], None], ...] = (_change_user, _limit_resources, _allow_no_new_privileges, _filter_calls)
    for measure in measures:
        try:
            measure()
        except (OSError, ValueError) as error:
            refused.append(f"{measure.__name__.strip('_').replace('_', ' ')}: {error}")
    return refused


def _change_user() -> None:
    """Give up the privileges of root if this process has them and its parent may still kill it."""
    if os.geteuid() != 0:
        return
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    if not int(status["CapEff"], 16) >> CAP_KILL & 1:
        raise PermissionError("the parent could not kill a worker of another user")
    os.setgroups([])
    os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel forgets it when the user changes


def _limit_resources() -> None:
    """Allow no new descriptor, no growing file and, unless the user is root, no new process or thread."""
    # The list's own descriptor, which is closed by now, is the lowest that was free.
    descriptors = max(map(int, os.listdir("/proc/self/fd")))
    for limit, value in (
        (resource.RLIMIT_NOFILE, descriptors),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _allow_no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (prctl(2)). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _filter_calls() -> None:
    """Install the filter for all threads."""
    machine = platform.machine()
    if machine not in NUMBERS:
        raise OSError(errno.ENOSYS, f"no filter for {machine}")
    code = _program(machine, os.getpid())
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (NUMBERS[machine]["seccomp"], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC)
    if libc.syscall(*map(ctypes.c_long, numbers), program):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _program(machine: str, pid: int) -> bytes:
    """Return the filter in classic BPF. Offsets in struct seccomp_data: 0 call, 4 machine, 16 first argument."""
    numbers = NUMBERS[machine]
    load, equal, answer = 0x20, 0x15, 0x06

    def line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, value)

    return b"".join(
        (
            line(load, 4),
            line(equal, numbers["audit"], 1),
            line(answer, KILL_PROCESS),
            line(load, 0),
            *(
                part
                for call in map(int, COMPUTING[machine].split())
                for part in (line(equal, call, 0, 1), line(answer, ALLOW))
            ),
            line(equal, numbers["kill"], 1),
            line(equal, numbers["tgkill"], 0, 2),
            line(load, 16),
            line(equal, pid, 1),
            line(answer, REFUSE),
            line(answer, ALLOW),
        )
    )
