"""Parent program of a command that ends the command and all its descendants when the requesting process ends.

`covey.runtime.child_process` runs it by path, so it imports only modules of the standard library that load fast. It
ends all processes when the command ends (whose exit status it takes), when the requesting process ends or closes the
pipe (if a forked process keeps the pipe open, a changed parent id shows it), or on SIGTERM, SIGINT or SIGHUP.
On Linux, descendants outside of the process group are ended as well (it is a "subreaper"), and the kernel kills the
command if this program is killed. With limits (other than 0) it also ends all processes when they use more than MEMORY
(resident bytes) or are more than PROCESSES. The command gets DESCRIPTOR (unless -1) as its file descriptor 3.

usage: guard.py PARENT_PID PIPE GRACE MEMORY PROCESSES DESCRIPTOR COMMAND [ARGUMENT ...]
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_SECONDS = 1.0  # between checks of the parent's id, for which there is no event
LIMIT_SECONDS = 0.05  # between checks of limits
OVER_MEMORY, OVER_PROCESSES = 201, 202  # exit statuses
INHERITED = 3  # number of the command's inherited descriptor, which shells can name: one digit
KILL_SECONDS = 10.0  # for the kernel to end killed processes; one that hangs in a driver is not awaited longer


def main(argv: list[str]) -> int:
    parent, pipe, grace, descriptor, command = int(argv[0]), int(argv[1]), float(argv[2]), int(argv[5]), argv[6:]
    limits = (int(argv[3]), int(argv[4])) if sys.platform.startswith("linux") else (0, 0)
    os.set_inheritable(pipe, False)
    linux = sys.platform.startswith("linux")
    if linux:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the default action does not wake `poll`
    if os.getppid() != parent:
        return 128 + signal.SIGKILL
    child = _start(command, linux, descriptor)
    if descriptor >= 0:
        os.close(descriptor)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # they are the command's: its reader must see them close when the command does
        os.dup2(quiet, stream)

    waiting = select.poll()  # `select` takes no descriptor above 1023, which the requesting process may have given
    for end in (pipe, woken):
        waiting.register(end, select.POLLIN)
    status, over = None, 0
    while status is None and not asked and not over and os.getppid() == parent:
        ready = dict(waiting.poll(1000 * (LIMIT_SECONDS if all(limits) else POLL_SECONDS)))
        if woken in ready:
            os.read(woken, 4096)
        status = _reap().get(child)
        if pipe in ready:
            break
        over = _limit_passed(*limits) if all(limits) and status is None else 0
    ended = _end(child, grace if status is None else 0.0, linux)
    status = ended.get(child, status)
    if over:
        return over
    if status is None:
        return 128 + signal.SIGKILL
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _limit_passed(memory: int, processes: int) -> int:
    """Exit status for an exceeded limit, or 0."""
    running = _listed_descendants(processes)
    if len(running) > processes:
        return OVER_PROCESSES
    return OVER_MEMORY if sum(map(_resident, running)) > memory else 0


def _start(command: list[str], linux: bool, descriptor: int) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)  # a group without this program, which is to see its end
        if linux:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:  # it was killed before the kernel knew
                os._exit(128 + signal.SIGKILL)
        if descriptor >= 0:
            os.dup2(descriptor, INHERITED)
            if descriptor != INHERITED:
                os.close(descriptor)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _reap() -> dict[int, int]:
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _end(child: int, grace: float, linux: bool) -> dict[int, int]:
    """End all processes, first with SIGTERM, then with SIGKILL. Returns the wait statuses of those that ended."""
    ended: dict[int, int] = {}
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, KILL_SECONDS)):
        signalled: set[int] = set()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ended |= _reap()
            _send(-child, number, signalled)
            left = _descendants() if linux else {child} - set(ended)
            for one in left:
                _send(one, number, signalled)
            if not left:
                return ended
            time.sleep(0.01)
    return ended


def _send(one: int, number: int, signalled: set[int]) -> None:
    """Send a signal to a process, or for a negative number to a process group."""
    if one not in signalled:
        signalled.add(one)
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or became another user's
            os.kill(one, number)


def _descendants() -> set[int]:
    """Ids of all processes below this one, by the parents of all processes."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:  # some end meanwhile
            parents[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])  # 123 (any name) S 45 ...
    found: set[int] = set()
    while new := {one for one, parent in parents.items() if parent in found | {os.getpid()}} - found:
        found |= new
    return found


def _listed_descendants(limit: int) -> set[int]:
    """Ids of all processes below this one, by the kernel's lists of children: fast, but may miss one as another ends.

    The search stops once there are more than `limit`, because a program may fork faster than they can be listed.
    """
    found: set[int] = set()
    todo = {os.getpid()}
    while todo and len(found) <= limit:
        children: set[int] = set()
        with suppress(OSError):  # it ended meanwhile
            tasks = f"/proc/{todo.pop()}/task"
            for thread in os.listdir(tasks):
                with open(f"{tasks}/{thread}/children") as file:
                    children.update(map(int, file.read().split()))
        todo |= children - found
        found |= children
    return found


def _resident(pid: int) -> int:
    """Resident bytes of a process; 0 if it has ended."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _prctl(option: int, value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
