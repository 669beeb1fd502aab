"""Feed: a live run's changes for all who watch it, as server-sent events. One poller a run, none when nobody watches.

A watcher first gets `whole`, then `change` a few times a second, and `end` when the run is over. Who does not take what
it is sent is let go: its browser comes again and begins with `whole`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from .runs import RunNotFound, StoredRuns
from .view import RunView

EVERY_S = 0.25  # between two looks at a run's memory
SILENCE_S = 10.0  # after which a comment is sent, so that a connection that is dead is found out
MAX_WAITING = 40  # messages that wait for one watcher
MAX_STREAMS = 64


class TooManyStreams(Exception):
    """As many watch as may."""


class Feeds:
    """The feeds of all runs that are watched, for one event loop."""

    def __init__(self, runs: StoredRuns) -> None:
        self._runs = runs
        self._feeds: dict[str, Feed] = {}
        self.num_streams = 0
        self.is_closing = False  # set to let everybody go after one last look

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of a run, to be sent as they are; Full, or Missing."""
        if self.num_streams >= MAX_STREAMS:
            raise TooManyStreams(
                f"{MAX_STREAMS} pages watch already, and no more are served live; ask now and then instead"
            )
        self.num_streams += 1
        try:
            feed = self._feeds.setdefault(name, Feed(self, self._runs, name))
            watcher = feed.join()
            try:
                yield watcher.events()
            finally:
                feed.leave(watcher)
                if not feed.watchers and self._feeds.get(name) is feed:
                    del self._feeds[name]
        finally:
            self.num_streams -= 1


class Subscriber:
    """One stream."""

    def __init__(self) -> None:
        self.is_new = True
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)

    def put(self, message: bytes | None) -> bool:
        """None ends the stream. Whether there was room."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    def drop(self) -> None:
        """End the stream now, whatever waits."""
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def events(self) -> AsyncIterator[bytes]:
        while True:
            try:
                message = await asyncio.wait_for(self._waiting.get(), SILENCE_S)
            except (TimeoutError, asyncio.TimeoutError):
                message = b": still here\n\n"
            if message is None:
                return
            yield message


class Feed:
    """One run's watchers, and the task that looks for them."""

    def __init__(self, feeds: Feeds, runs: StoredRuns, name: str) -> None:
        self._feeds, self._runs, self._name = feeds, runs, name
        self._task: asyncio.Task[None] | None = None
        self.watchers: set[Subscriber] = set()

    def join(self) -> Subscriber:
        watcher = Subscriber()
        self.watchers.add(watcher)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._poll())
        return watcher

    def leave(self, watcher: Subscriber) -> None:
        self.watchers.discard(watcher)
        if not self.watchers and self._task is not None:
            self._task.cancel()

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        hand = ThreadPoolExecutor(1, "hora-page-feed")  # its own, so that a slow disk holds up nobody else
        try:
            view = await loop.run_in_executor(hand, RunView, self._runs, self._name)
            over = False
            while self.watchers and not over:
                over = self._feeds.is_closing
                fresh = [watcher for watcher in self.watchers if watcher.is_new]
                for watcher in fresh:
                    watcher.is_new = False
                ended, whole, change = await loop.run_in_executor(hand, _look, view, bool(fresh))
                for watcher in [watcher for watcher in self.watchers if not watcher.is_new]:
                    self._tell(watcher, whole if watcher in fresh else change, ended)
                over = over or ended
                await asyncio.sleep(0 if over else EVERY_S)
        except RunNotFound:
            pass
        finally:
            for watcher in self.watchers:
                if not watcher.put(None):
                    watcher.drop()
            hand.shutdown(wait=False)

    def _tell(self, watcher: Subscriber, message: bytes | None, ended: bool) -> None:
        taken = message is None or watcher.put(message)
        if ended:
            taken = taken and watcher.put(_event("end", b"{}"))
        if not taken:
            watcher.drop()
            self.watchers.discard(watcher)


def _look(view: RunView, with_whole: bool) -> tuple[bool, bytes | None, bytes | None]:
    """Whether the run is over, all of it if somebody is new, and what changed. What changed is read first: who is new
    hears some of it twice then, and misses nothing."""
    if view.is_new:
        begin = view.begin()
        return view.is_over, _event("whole", begin), None
    news = view.change()
    over = view.is_over
    change = None if news is None else _event("whole" if news[1] else "change", news[0])
    return over, _event("whole", view.whole()) if with_whole else None, change


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
