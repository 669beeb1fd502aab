"""Starts what a launcher finds hard to find again: multiprocessing children, and one that left session and group."""

import multiprocessing
import os
import subprocess
import sys
import time


def child() -> None:
    print("child", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    for method in ("fork", "spawn"):
        multiprocessing.get_context(method).Process(target=child, daemon=False).start()
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        print("daemon", flush=True)
        time.sleep(60)
    # One write: the children write to the same pipe.
    print(f"ready {os.environ['HORA_CONTROL']}\n", end="", flush=True)
    if "end" in sys.argv:
        time.sleep(0.5)
        os._exit(0)
    time.sleep(60)
