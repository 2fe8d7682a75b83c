"""Reward functions as bad as they get, by the completion that sets each off. Sent to workers; imports no torch."""

import os
import signal
import time

IMPORTS = "import contextlib, ctypes, os, re, resource, signal, subprocess, sys, threading, time\n"
LOOP = "\nwhile True: pass"
WRITE = "\n    for n in range(3, 9):\n        with contextlib.suppress(OSError): os.write"

NO_REWARD = {
    "exits": "os._exit(0)",
    "exits with 3": "os._exit(3)",
    "calls sys.exit": "sys.exit()",
    "segfaults": "ctypes.string_at(0)",
    "aborts": "os.abort()",
    "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)",
    "stops its parent": f"os.kill(os.getppid(), signal.SIGSTOP){LOOP}",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "has an alarm": "signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(60)",
    "becomes another program": "os.execv('/bin/sleep', ['sleep', '600'])",
    "loops": LOOP,
    "catches everything": "while True:\n    try:\n        time.sleep(60)\n    except BaseException: pass",
    "backtracks": "re.match('(a*)*b', 'a' * 60)",
    "sleeps with signals blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); time.sleep(60)",
    "ignores SIGTERM": f"signal.signal(signal.SIGTERM, signal.SIG_IGN){LOOP}",
    "holds a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "holds the interpreter": "ctypes.PyDLL(None).sleep(60)",
    "leaves its session": f"os.fork() or os.setsid(){LOOP}",
    "loses its death signal": f"ctypes.CDLL(None).prctl(1, 0, 0, 0, 0){LOOP}",
    "leaks": "held = []\nwhile True: held.append(b'x' * (1 << 22))",
    "leaks in a child": "os.fork()\nheld = []\nwhile True: held.append(b'x' * (1 << 22))",
    "allocates 4 GB": "b'x' * (4 << 30)",
    "forks": "for _ in range(60):\n    os.fork() or time.sleep(60)\ntime.sleep(60)",
    "forks into sessions": "for _ in range(60):\n    os.fork() or (os.setsid(), time.sleep(60))\ntime.sleep(60)",
    "forks twice": "for _ in range(5): os.fork()\ntime.sleep(60)",
    "starts programs": "for _ in range(30): subprocess.Popen(['sleep', '60'])\ntime.sleep(60)",
    "starts threads": "for _ in range(50): threading.Thread(target=time.sleep, args=[60]).start()\ntime.sleep(60)",
    "recurses": "f = lambda: f()\nf()",
    "recurses deeply": "sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "closes all files": "os.closerange(0, 256)",
    "writes to all files": "for n in range(3, 32):\n    try: os.write(n, b'rubbish')\n    except OSError: pass",
    "asks for input": "input()",
    "raises": "raise KeyError('no')",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises what hangs when printed": "class E(Exception):\n    def __str__(self): time.sleep(60)\nraise E",
    "is NaN": "result = float('nan')",
    "is text": "result = 'good'",
    "is a generator": "result = (one for one in 'abc')",
    "cannot be pickled": "result = threading.Lock()",
    "hangs when pickled": "class R:\n    def __reduce__(self): time.sleep(60)\nresult = R()",
    "is 100 MB": "result = 'x' * 100_000_000",
    "logs too few values": "log_extra('column', [])",
    "sleeps when read": "class R:\n    def __reduce__(self): return time.sleep, (60,)\nresult = R()",
    "ends its reader": "class R:\n    def __reduce__(self): return os._exit, (7,)\nresult = R()",
    "logs what ends it": "class R:\n    def __reduce__(self): return os._exit, (7,)\nresult = log_extra(R(), [1])",
    "kills its parent and stays": f"ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.kill(os.getppid(), 9){LOOP}",
    "answers without end": f"while True:{WRITE}(n, b'[]\\n')",
    "is late in its finalizer": "class R:\n    def __del__(self): time.sleep(60)\nR()",
    "is nested without end": "result = []\nresult.append(result)",
    "is a list of lists of lists": "result = [1]\nfor _ in range(40): result = [result] * 10",
    "adopts orphans": f"ctypes.CDLL(None).prctl(36, 1)\nos.fork() or (os.setsid(), os.fork()){LOOP}",
    "is in a pool": "from concurrent.futures import ProcessPoolExecutor as P\nP(2).submit(time.sleep, 60).result()",
    "waits for itself": "import asyncio\nasync def f(): await asyncio.Event().wait()\nasyncio.run(f())",
    "compiles without end": "eval('(' * 90 + '1' + ')' * 90)\nint('9' * 4000) ** 10**8",
    "blocks in a thread": "t = threading.Thread(target=time.sleep, args=[60]); t.start(); t.join()",
    "has no files left": "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); open('/dev/null')",
}
HARMLESS = {
    "forks and returns": "os.fork()",
    "leaves a daemon": "if os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(600)\n    os._exit(0)",
    "leaves a program": "subprocess.Popen(['sleep', '600'], start_new_session=True)",
    "closes stdout": "sys.stdout.close()",
    "prints": "print('{}' * 10_000)",
    "changes its directory": "os.chdir('/')",
    "forges an answer": f"if 1:{WRITE}(n, b'[]\\n')",
    "breaks json": "import json\njson.dumps = lambda *a, **k: '?'",
    "answers later": f"def f():\n    time.sleep(0.1){WRITE}(n, b'rubbish\\n')\nthreading.Thread(target=f).start()",
    "exits at its end": "import atexit; atexit.register(time.sleep, 60)",
    "ends when collected": "import faulthandler; faulthandler.dump_traceback_later(60, exit=True)",
    "clears its environment": "os.environ.clear()",
    "changes its limits": "resource.setrlimit(resource.RLIMIT_CPU, (50, 50)); os.nice(10)",
    "sets handlers": "[signal.signal(n, lambda *a: None) for n in (1, 2, 3, 10, 12, 15, 17)]",
    "stops collecting": "import gc; gc.disable(); sys.setrecursionlimit(60); sys.setswitchinterval(9)",
    "is late by a thread": "threading.Thread(target=time.sleep, args=[600]).start()",
}


def hostile(completions, log_extra, **kwargs):
    rewards = []
    for text in completions:
        scope = {"result": 1.0, "log_extra": log_extra}
        exec(IMPORTS + {**NO_REWARD, **HARMLESS}.get(text, ""), scope)
        rewards.append(scope["result"])
    return rewards


def reads_everything(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
    log_extra("answers", answer)
    log_metric("step", trainer_state.global_step)
    return [len(one) + len(ids) for one, ids in zip(completions, completion_ids, strict=True)]


async def waits(completions, **kwargs):
    assert kwargs["trainer_state"] is None and "environments" not in kwargs
    return [1.0 for _ in completions]


def needs_environments(completions, environments):
    return [1.0 for _ in completions]


def where(completions, **kwargs):
    return [float(os.getpid()) for _ in completions]


def kills_itself_once(completions, **kwargs):
    flag = kwargs["flag"][0]
    if len(completions) > 1 and not os.path.exists(flag):
        open(flag, "w").close()
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(text)) for text in completions]


def shares_of_digits(completions, **kwargs):
    if kwargs["trainer_state"].global_step == 99:
        raise SystemExit
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
