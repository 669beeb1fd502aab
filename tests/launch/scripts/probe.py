"""What a rank sees of itself, as JSON: the same whether it was forked or started as an interpreter."""

import json
import os
import resource
import signal
import stat
import sys
import threading

main = sys.modules["__main__"]
found = {
    "argv": sys.argv,
    "main": [__name__, main.__file__, main.__spec__ is None, type(main.__loader__).__name__, __doc__ is not None],
    "path": sys.path,
    "cwd": os.getcwd(),
    "orig": sys.orig_argv,
    "flags": str(sys.flags),
    "env": {
        name: value for name, value in os.environ.items() if name not in ("HORA_RUN", "HORA_CONTROL", "HORA_SCRATCH")
    },
    "signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals if number.name != "SIGCLD"},
    "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
    "umask": oct(os.umask(0o22)),
    "stdin": sys.stdin.read(),
    "streams": [str(stat.S_ISFIFO(os.fstat(fd).st_mode)) for fd in (1, 2)]
    + [f"{s.encoding} {s.errors} {s.line_buffering} {s.write_through}" for s in (sys.stdout, sys.stderr)],
    "descriptors": len(os.listdir("/proc/self/fd")),
    "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
    "scheduling": [os.nice(0), sorted(os.sched_getaffinity(0))],
}
if "--command" in sys.argv:
    with open("/proc/self/cmdline") as file:
        print("command", file.read().replace("\0", " ").strip())
print(json.dumps(found), flush=True)
