"""Takes part in a run as hora.init() would, without torch: joins, says what it hears, and ends as its orders say.

An order is ROLE+RANK=WHAT, as worker2=kill:

kill, raise, exit, echo   a moment after the run has formed; late: killed half a second later
early                     fails before it joins
stay                      works until its line breaks
greet, host, lends        works until another worker has joined; and has gone again; so, with a block of samples
mourn                     works until a worker has died
deaf                      a server that does not end with its workers

The word `holds`: every worker says that it holds parameters; `unbound`: rank 0 does not say that all have prepared.
Without an order a worker ends well half a second after the run has formed, and a server with the last worker.
"""

import os
import signal
import socket
import sys
import threading
import time

from hora.coordinator import CoordinatorEvent, Member
from hora.coordinator.messages import BlockGrant, EpochCut, TakeBlock
from hora.rendezvous import environment
from hora.rendezvous.rendezvous import rendezvous
from hora.runs.exit_codes import SECONDARY_FAILURE

identity = environment.read()
me = Member(identity.role, identity.rank, socket.gethostname(), os.getpid())
orders = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
order = orders.get(f"{me.role}{me.rank}", orders.get(me.role, ""))


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # one write


if order == "early":
    raise ValueError("before it joined")
control = rendezvous(identity).control
control.on_lost = lambda reason: stopped.set()
workers: set[int] = set()
guests: set[int] = set()
dead: set[int] = set()
stopped = threading.Event()


def hear(event: CoordinatorEvent) -> None:
    member = event.member
    if event.kind in ("died", "left", "joined") and member is not None:
        who = f"{member.role} {member.rank}"
        say(f"heard {who} {event.kind}{f': {event.text}' if event.kind == 'died' else ''}")
        if event.kind == "joined":
            guests.add(member.rank)
        if event.kind == "died":
            dead.add(member.rank)
        if member.role == "worker":
            (workers.add if event.kind == "joined" else workers.discard)(member.rank)


reply = control.join(me, timeout_s=20, size=identity.size, servers=identity.servers or 0)
workers |= {member.rank for member in reply.members if member.role == "worker"}
control.subscribe(hear)
told = [f"{member.role} {member.rank}" for member in reply.members]
if me.role == "worker" and me.rank == 0:
    for word in sys.argv[1:]:
        if word.startswith("strategy:"):
            control.put("strategy", word.partition(":")[2].encode())
    if "unbound" not in sys.argv:
        control.put("bound", b"yes")
if me.role == "worker":
    control.put(f"step/{me.rank}", str(10 + me.rank).encode())
    if "holds" in sys.argv:
        control.put(f"parameters/{me.rank}", b"yes")
if order == "lends":
    epoch = {"loader": 0, "epoch": 0, "loop": 0, "cut": EpochCut(40, 10, 4)}
    first = control.lease_request(TakeBlock(**epoch), BlockGrant).block
    control.lease_request(TakeBlock(**epoch, done=((0, 0, first),)), BlockGrant)
say(f"joined {', '.join(told)} as {identity.role} {identity.rank} of {identity.size} servers={identity.servers}")

time.sleep(0.3)
if order == "late":
    time.sleep(0.5)
if order in ("kill", "late"):
    os.kill(os.getpid(), signal.SIGKILL)
elif order == "raise":
    raise ValueError("boom")
elif order == "exit":
    sys.exit(7)
elif order == "echo":
    sys.exit(SECONDARY_FAILURE)
elif order == "stay":
    while not stopped.wait(30.0):
        pass
elif order in ("greet", "host", "mourn", "lends"):
    while not {"greet": guests, "mourn": dead}.get(order, guests - workers):
        time.sleep(0.01)
elif order == "deaf":
    say("deaf")
    time.sleep(60)
elif me.role == "server":
    while workers:
        time.sleep(0.01)
else:
    time.sleep(0.2)
if stopped.is_set():
    sys.exit("the run is gone")
control.leave()
say("left")
control.close()
