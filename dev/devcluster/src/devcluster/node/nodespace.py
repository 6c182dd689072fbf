"""A node's machine: namespaces held by a process that is PID 1 in them.

machine.py runs it by path, without an import (`python3 -I -S nodespace.py init|run JSON`), as it
leaves the host's namespaces. Killing that PID 1 is pulling the plug: the kernel ends every process
of the node and takes its mounts and network with it. The node has its own /run, /var/lib and
/var/log, sees its own cgroup as the root of all, and has copies of the kernel settings that a
kubelet writes, so nothing of it shows on the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x20000, 0x2000000, 0x4000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
ALL = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWPID | CLONE_NEWNET
MNT_DETACH = 2
MS_BIND, MS_REC, MS_PRIVATE, MS_SHARED = 0x1000, 0x4000, 0x40000, 0x100000
COVERED = ("/run", "/var/lib")
SETTINGS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError for a failed libc call."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    check(libc.mount(*arguments), f"mount {kind or 'bind'} {source} on {target}")


def join(cgroup: str, hierarchies: list[list[str]]) -> None:
    """Move this process into a cgroup, in every hierarchy."""
    for where, _, _ in hierarchies:
        with open(f"{where}/{cgroup}/cgroup.procs", "w") as procs:  # noqa: PTH123
            procs.write("0")


def share_out(cgroup: str, hierarchies: list[list[str]]) -> None:
    """Let what is below a cgroup use its controllers, where that has to be said (v2)."""
    for where, kind, _ in hierarchies:
        if kind == "cgroup2":
            with open(f"{where}/{cgroup}/cgroup.controllers") as controllers:  # noqa: PTH123
                wanted = controllers.read().split()
            for one in wanted:
                try:
                    with open(f"{where}/{cgroup}/cgroup.subtree_control", "w") as control:  # noqa: PTH123
                        control.write(f"+{one}")
                except OSError:
                    continue


def furnish(config: dict[str, Any]) -> None:
    """Give the node its own mounts: /proc, cgroups, /run, /var/lib, /var/log, settings."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("none", "/", flags=MS_REC | MS_SHARED)  # peers within the node only: volumes propagate
    mount("proc", "/proc", "proc")
    with open("/proc/sys/net/ipv4/ip_forward", "w") as forward:  # noqa: PTH123
        forward.write("1")  # of the node's network only: it routes for its pods
    for where, kind, options in config["hierarchies"]:
        check(libc.umount2(where.encode(), MNT_DETACH), f"umount {where}")
        mount("cgroup", where, kind, options=options)
    covered = tuple(f"{directory}/" for directory in COVERED)
    kept = {path: os.open(path, os.O_PATH) for path in config["keep"] if path.startswith(covered)}
    for directory in COVERED:
        mount("tmpfs", directory, "tmpfs", options="mode=755")
    for path, handle in kept.items():
        if os.path.isdir(f"/proc/self/fd/{handle}/"):  # noqa: PTH112 - no pathlib in here
            os.makedirs(path, exist_ok=True)  # noqa: PTH103
        mount(f"/proc/self/fd/{handle}", path, flags=MS_BIND | MS_REC)
        os.close(handle)
    mount(config["logs"], "/var/log", flags=MS_BIND)
    os.makedirs("/run/kernel")  # noqa: PTH103
    for name in SETTINGS:
        imitate(f"/proc/sys/{name}", f"/run/kernel/{name.replace('/', '.')}")


def imitate(setting: str, copy: str) -> None:
    """Put a file with the same value over a kernel setting, if there is one."""
    try:
        with open(setting) as source, open(copy, "w") as target:  # noqa: PTH123
            target.write(source.read())
    except FileNotFoundError:
        return
    mount(copy, setting, flags=MS_BIND)


def init(config: dict[str, Any]) -> None:
    """Make the namespaces; print PID 1's pid on the host, and `ready`; reap for ever."""
    # The namespace's root is the cgroup it is made in; processes live one below, since cgroup v2
    # shares out controllers only from cgroups without any.
    join(config["cgroup"], config["hierarchies"])
    check(libc.unshare(ALL), "unshare")
    join(f"{config['cgroup']}/machine", config["hierarchies"])
    share_out(config["cgroup"], config["hierarchies"])
    child = os.fork()
    if child:
        print(child, flush=True)
        return
    os.setsid()
    os.chdir("/")
    socket.sethostname(config["hostname"])
    furnish(config)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    print("ready", flush=True)
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    reap()


def reap() -> NoReturn:
    """Bury the orphans of the node, which is PID 1's duty."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait([signal.SIGCHLD])


def run(config: dict[str, Any]) -> None:
    """Start a program in the namespaces of process ``init``; print its pid on the host."""
    log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    join(f"{config['cgroup']}/machine", config["hierarchies"])
    handle = os.pidfd_open(config["init"])
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    check(libc.setns(handle, ALL), "setns")
    child = os.fork()
    if child == 0:
        if os.fork():
            os._exit(0)  # so that the program is a child of the node's PID 1, which buries it
        its.send(b".")
        execute(config["argv"], log)
    os.waitpid(child, 0)
    # With the message the kernel gives the sender's pid as the receiver, on the host, sees it.
    _, ((_, _, sender),), _, _ = mine.recvmsg(1, socket.CMSG_SPACE(12))
    print(struct.unpack("3i", sender)[0], flush=True)


def execute(argv: list[str], log: int) -> NoReturn:
    """Become a program, its output appended to ``log``."""
    os.setsid()
    os.chdir("/")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    {"init": init, "run": run}[sys.argv[1]](json.loads(sys.argv[2]))
