"""Ends in the way that its argument names, without importing torch."""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time


def fail() -> None:
    raise ValueError("boom")


class Deleted:
    def __del__(self) -> None:
        print("deleted")


how = sys.argv[1]
if how == "raise":
    fail()
elif how == "exit":
    sys.exit(3)
elif how == "words":
    sys.exit("no way")
elif how == "none":
    sys.exit()
elif how == "interrupt":
    raise KeyboardInterrupt
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "hook":
    sys.excepthook = lambda kind, error, trace: print("hooked", kind.__name__, error)
    fail()
elif how == "chain":
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("after it") from error
elif how == "syntax":
    compile("x = (", "other.py", "exec")
elif how == "late":
    kept, file = Deleted(), open(sys.argv[2], "w")  # noqa: SIM115
    file.write("flushed")
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    ctypes.CDLL(None).printf(b"from C\n")
