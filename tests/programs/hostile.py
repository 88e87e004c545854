"""Programs that try to get out, to stay, to take everything, or to say what is not so.

Each is a kind: `{folder}` is a folder that must stay empty, `{pid}` a process that must live.
"""

from __future__ import annotations

# Nothing of these may succeed: a program that gets through prints ESCAPED.
ESCAPES = {
    "read a file": "print('ESCAPED', open('/etc/passwd').read())",
    "read itself": "print('ESCAPED', open('/proc/self/environ', 'rb').read())",
    "read the parent's memory": "print('ESCAPED', open('/proc/{pid}/mem', 'rb').read(1))",
    "write a file": "open('{folder}/x', 'w').write('x'); print('ESCAPED')",
    "write into the working folder": "open('x', 'w').write('x'); print('ESCAPED')",
    "low-level open": "import os; os.open('{folder}/x', os.O_CREAT | os.O_RDWR); print('ESCAPED')",
    "io.FileIO": "import io; io.FileIO('{folder}/x', 'w'); print('ESCAPED')",
    "make a folder": "import os; os.mkdir('{folder}/x'); print('ESCAPED')",
    "list a folder": "import os; print('ESCAPED', os.listdir('/'))",
    "walk": "import os; print('ESCAPED' if list(os.walk('/')) else '')",
    "stat": "import os; print('ESCAPED', os.stat('/'))",
    "change the folder": "import os; os.chdir('{folder}'); print('ESCAPED')",
    "change the root": "import os; os.chroot('{folder}'); print('ESCAPED')",
    "remove": "import os; os.remove('{folder}/there'); print('ESCAPED')",
    "rename": "import os; os.rename('{folder}/there', '{folder}/gone'); print('ESCAPED')",
    "link": "import os; os.symlink('/etc/passwd', '{folder}/x'); print('ESCAPED')",
    "chmod": "import os; os.chmod('{folder}/there', 0); print('ESCAPED')",
    "truncate": "import os; os.truncate('{folder}/there', 0); print('ESCAPED')",
    "mkfifo": "import os; os.mkfifo('{folder}/x'); print('ESCAPED')",
    "mknod": "import os; os.mknod('{folder}/x'); print('ESCAPED')",
    "shared memory file": "import os; os.memfd_create('x'); print('ESCAPED')",
    "pipe": "import os; os.pipe(); print('ESCAPED')",
    "duplicate a file": "import os; os.dup(1); print('ESCAPED')",
    "socket module": "import socket; print('ESCAPED')",
    "_socket module": "import _socket; print('ESCAPED')",
    "urllib": "import urllib.request; print('ESCAPED')",
    "fork": "import os; os.fork(); print('ESCAPED')",
    "forkpty": "import os; os.forkpty(); print('ESCAPED')",
    "fork bomb": "import os\nwhile True: os.fork()",
    "system": "import os; print('ESCAPED' if os.system('touch {folder}/x') == 0 else '')",
    "popen": "import os; os.popen('ls'); print('ESCAPED')",
    "spawn": "import os; os.spawnv(os.P_NOWAIT, '/bin/ls', ['ls']); print('ESCAPED')",
    "exec": "import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "subprocess": "import subprocess; print('ESCAPED')",
    "multiprocessing": "import multiprocessing; print('ESCAPED')",
    "thread": "import _thread; _thread.start_new_thread(print, ('ESCAPED',))",
    "threading": "import threading; threading.Thread(target=print, args=('ESCAPED',)).start()",
    "kill the worker": "import os; os.kill(os.getppid(), 9); print('ESCAPED')",
    "kill a process": "import os; os.kill({pid}, 9); print('ESCAPED')",
    "kill all": "import os; os.kill(-1, 9); print('ESCAPED')",
    "kill the group": "import os; os.killpg(0, 9); print('ESCAPED')",
    "session": "import os; os.setsid(); print('ESCAPED')",
    "user id": "import os; os.setuid(0); print('ESCAPED')",
    "nice": "import os; os.nice(-5); print('ESCAPED')",
    "raise a limit": "import resource; print('ESCAPED')",
    "scheduler": "import os; os.sched_setaffinity(0, [0]); print('ESCAPED')",
    "ctypes": "import ctypes; print('ESCAPED')",
    "_ctypes": "import _ctypes; print('ESCAPED')",
    "mmap": "import mmap; print('ESCAPED')",
    "signal module": "import signal; signal.pause(); print('ESCAPED')",
    "posix": "import posix; posix.fork(); print('ESCAPED')",
    "environment": "import os; print('ESCAPED' if 'HOME' in os.environ else '')",
    "site-packages": "import torch; print('ESCAPED')",
    "our own package": "import grouper; print('ESCAPED')",
    "input": "print('ESCAPED', input())",
    "standard input": "import os; print('ESCAPED', os.read(0, 1))",
    "another file's number": (
        "import os\n"
        "for number in range(4, 1000):\n"
        "    try: os.write(number, b'x'); print('ESCAPED')\n"
        "    except OSError: pass"
    ),
    "importlib": ("import importlib\nimportlib.import_module('socket'); print('ESCAPED')"),
    "code from the outside": "exec(open('/etc/hostname').read()); print('ESCAPED')",
    "through subclasses": (
        "found = [c for c in object.__subclasses__() if c.__name__ == '_wrap_close']\n"
        "found[0].__init__.__globals__['system']('touch {folder}/x')\n"
    ),
    "core dump": "import os; os.abort()",
}

# These only take: they have to end by the deadline or by a limit.
GLUTTONS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "memory at once": "x = bytearray(10**11)",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(10**6))",
    "big number": "print(len(str(9**9**9)))",
    "power tower": "x = 10**(10**9)",
    "long list": "x = [0] * 10**9\nprint(len(x))",
    "endless output": "while True: print('x' * 1000)",
    "output without a line": "print('x' * 10**8)",
    "deep recursion": "def f(): return f()\nf()",
    "unbounded recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return 1 + f()\nf()",
    "nested brackets": "eval('(' * 10**5)",
    "catastrophic pattern": "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
    "catch everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    ),
    "closed output": "import os; os.close(1); os.close(3)\nwhile True: pass",
    "slow text of an error": (
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"
    ),
    "long text of an error": "raise ValueError('x' * 10**7)",
    "endless generator": "import itertools; sum(itertools.count())",
    "dictionary attack": "d = {i: i for i in range(10**9)}",
    "exit while busy": "import os; os._exit(0)",
}
