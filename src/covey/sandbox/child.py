"""The process that starts sandboxed code and watches it. Run by path with one JSON argument; nothing imports it.

Three processes: this one gives up access to the network and other resources, and waits; it forks the watcher, which is
the first process of its namespace if there is one, and checks time, memory and number of processes; the third runs the
code. Each ends when the one above it ends. The outcome is written to the pipe `report` as JSON lines.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import struct
import sys
import time

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1  # the numbers of every Linux port
SYS_LANDLOCK, PR_SET_NO_NEW_PRIVS, PR_SET_SECUREBITS = 444, 38, 28
WRITE_FILE, WRITING, MOVING, TRUNCATING = 0x2, 0x1FF2, 0x2000, 0x4000
SIGNALS_AND_SOCKETS = 0x3
AWAITED = {signal.SIGCHLD, signal.SIGTERM}
POLL_SECONDS = 0.02

libc = ctypes.CDLL(None, use_errno=True)
linux = sys.platform == "linux"


def main() -> None:
    limits = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it has passed that on
    guards = isolate(limits["folder"]) if linux and limits["namespaces"] else []
    if "files" not in guards and linux and restrict(limits["folder"]):
        guards.append("files")
    say(limits, guards=guards)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    set_on_linux(PR_SET_PDEATHSIG, signal.SIGTERM)
    set_on_linux(PR_SET_CHILD_SUBREAPER, 1)  # orphans come here instead of getting away
    watcher = os.fork()
    if watcher == 0:
        set_on_linux(PR_SET_PDEATHSIG, signal.SIGKILL)
        watch(limits)
        os._exit(0)
    if os.getppid() != limits["caller"]:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
    while signal.sigwait(AWAITED) == signal.SIGTERM:  # the caller is gone
        os.kill(watcher, signal.SIGTERM)
    os.waitpid(watcher, 0)
    end_all()  # of a watcher that the code has killed


def say(limits: dict, **facts: object) -> None:
    os.write(limits["report"], (json.dumps(facts) + "\n").encode())


# --- leaving what could be harmed --------------------------------------------------------------------------------


def isolate(folder: str) -> list:
    """Enter as many namespaces as the kernel allows; returns the active guards."""
    uid, gid = os.getuid(), os.getgid()
    apart = CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID
    full = apart | CLONE_NEWNS
    for flags in (CLONE_NEWUSER | full, full, CLONE_NEWUSER | apart, CLONE_NEWUSER | CLONE_NEWNET):
        if libc.unshare(flags) == 0:
            break
    else:
        return []
    if flags & CLONE_NEWUSER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            # Where this fails the code runs as a user without rights.
            with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    guards = ["network"]
    if flags & CLONE_NEWPID:
        guards.append("processes")
    if flags & CLONE_NEWNS and protect_files(folder):
        guards.append("files")
    return guards


def protect_files(folder: str) -> bool:
    path = folder.encode()
    libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if libc.mount(path, path, None, MS_BIND, None) != 0 or set_read_only(b"/", AT_RECURSIVE, True) != 0:
        return False
    writable = set_read_only(path, 0, False) == 0
    if not writable:  # better no guard than a program that cannot write at all
        set_read_only(b"/", AT_RECURSIVE, False)
    os.chdir(folder)
    return writable


def set_read_only(path: bytes, flags: int, on: bool) -> int:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY if on else 0, 0 if on else MOUNT_ATTR_RDONLY, 0, 0)
    return libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, attributes, ctypes.sizeof(attributes))


def restrict(folder: str) -> bool:
    """Forbid, by Landlock, writing outside of `folder`, and reading, signalling and connecting to other processes.

    Signals (`kill(-1, 9)` would end every process of the user) since Linux 6.12; of sockets only abstract ones.
    """
    version = libc.syscall(SYS_LANDLOCK, None, 0, 1)
    rights = WRITING | (MOVING if version > 1 else 0) | (TRUNCATING if version > 2 else 0)
    handled = struct.pack("=QQQ", rights, 0, SIGNALS_AND_SOCKETS)[: 24 if version > 5 else 8]
    rules = libc.syscall(SYS_LANDLOCK, handled, len(handled), 0) if version > 0 else -1
    if rules < 0:
        return False
    for path, allowed in ((folder, rights), ("/dev", WRITE_FILE)):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        libc.syscall(SYS_LANDLOCK + 1, rules, 1, struct.pack("=Qi", allowed, place), 0)
        os.close(place)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return libc.syscall(SYS_LANDLOCK + 2, rules, 0) == 0


def set_on_linux(option: int, value: int) -> None:
    if linux:
        libc.prctl(option, value, 0, 0, 0)


# --- watching ----------------------------------------------------------------------------------------------------


def watch(limits: dict) -> None:
    set_on_linux(PR_SET_CHILD_SUBREAPER, 1)
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        execute(limits)
    stopped, status = None, None
    while status is None and stopped is None:
        wait_for_a_child()
        status = reap(child)
        stopped = None if status is not None else reached(limits, time.monotonic() - started)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # at once, so that nothing is forked in between
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    duration = time.monotonic() - started
    if os.getpid() != 1:  # as the first process of a namespace, ending is enough
        end_all()
    code = os.waitstatus_to_exitcode(status)
    stopped = "time" if stopped is None and code == -signal.SIGXCPU else stopped
    say(limits, exit_code=code, stopped=stopped, duration=duration)


def wait_for_a_child() -> None:
    if hasattr(signal, "sigtimedwait"):
        signal.sigtimedwait({signal.SIGCHLD}, POLL_SECONDS)
    else:
        time.sleep(POLL_SECONDS)


def reap(child: int):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid in (0, child):
            return status if pid == child else None


def reached(limits: dict, elapsed: float):
    """The limit that was reached, or None."""
    if elapsed > limits["timeout"] or signal.SIGTERM in signal.sigpending():
        return "time"
    running = descendants(limits["max_processes"])
    if len(running) > limits["max_processes"]:
        return "processes"
    return "memory" if sum(map(resident, running)) > limits["memory"] else None


def descendants(limit: int) -> list:
    """Ids of all descendants of this process, as numbered in /proc; empty if /proc does not list children.

    The search stops once there are more than `limit`: a fork bomb makes processes faster than they can be counted.
    """
    found: list = []
    todo = ["self"]
    while todo and len(found) <= limit:
        tasks = f"/proc/{todo.pop()}/task"
        try:
            for thread in os.listdir(tasks):
                with open(f"{tasks}/{thread}/children") as file:
                    children = file.read().split()
                found += children
                todo += children
        except OSError:  # it ended meanwhile
            continue
    return found


def resident(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def end_all() -> None:
    """Kill all descendants, repeatedly, because new ones may have been started during the last round."""
    for _ in range(100):
        running = descendants(1000)
        if not running:
            return
        for pid in running:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
        reap(-2)


# --- the code ----------------------------------------------------------------------------------------------------


def execute(limits: dict) -> None:
    try:
        set_on_linux(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        os.close(limits["report"])
        set_on_linux(PR_SET_SECUREBITS, 1)  # root keeps no capabilities: it could remount and look into other processes
        seconds = math.ceil(limits["timeout"])
        set_limit(resource.RLIMIT_CPU, seconds, seconds + 1)
        set_limit(resource.RLIMIT_FSIZE, limits["max_file"])
        set_limit(resource.RLIMIT_AS, limits["memory"])
        set_limit(resource.RLIMIT_NOFILE, 256)
        set_limit(resource.RLIMIT_CORE, 0)
        if os.getppid() == 1 and linux:  # a namespace of its own, where processes are counted from 0
            set_limit(resource.RLIMIT_NPROC, limits["max_processes"] + 2)
        os.execv(sys.executable, [sys.executable, "-I", "-B", "main.py"])
    except BaseException as error:
        os.write(2, f"the sandbox could not start the code: {error}\n".encode())
        os._exit(126)


def set_limit(kind: int, soft: int, hard: int = -1) -> None:
    ceiling = resource.getrlimit(kind)[1]
    hard = soft if hard < 0 else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    with contextlib.suppress(ValueError, OSError):  # some systems know a limit and do not let it be set
        resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    main()
