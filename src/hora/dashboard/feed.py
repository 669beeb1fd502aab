"""Feeds: changes of live runs as server-sent events. One poller per run that is watched, none otherwise.

A subscriber first gets `whole`, then `change` a few times a second, and `end` when the run is over. A subscriber that
does not read is dropped: its browser reconnects and begins with `whole`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from ..http.errors import HttpError
from .catalogue import RunCatalogue, RunNotFound
from .view import RunView

EVERY_S = 0.25  # between two polls of a run database
KEEP_ALIVE_S = 10.0  # of silence, after which a comment is sent, so that a dead connection is detected
MAX_WAITING = 40  # messages queued for one subscriber
MAX_STREAMS = 64


class Feeds:
    """The feeds of all runs that are watched, for one event loop."""

    def __init__(self, catalogue: RunCatalogue) -> None:
        self._catalogue = catalogue
        self._feeds: dict[str, Feed] = {}
        self.num_streams = 0
        self.is_closing = False  # if set, every stream ends after one last poll

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of a run, encoded; HttpError 503 above MAX_STREAMS."""
        if self.num_streams >= MAX_STREAMS:
            raise HttpError(f"{MAX_STREAMS} pages are live already, which is the limit; ask now and then instead", 503)
        self.num_streams += 1
        try:
            feed = self._feeds.setdefault(name, Feed(self, self._catalogue, name))
            subscriber = feed.subscribe()
            try:
                yield subscriber.events()
            finally:
                feed.unsubscribe(subscriber)
                if not feed.subscribers and self._feeds.get(name) is feed:
                    del self._feeds[name]
        finally:
            self.num_streams -= 1


class Subscriber:
    """The queue of one stream."""

    def __init__(self) -> None:
        self.is_new = True
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)

    def put(self, message: bytes | None) -> None:
        """Queue a message; None ends the stream. A full queue is discarded, and the stream ends."""
        if self._queue.full():
            message = None
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(message)

    async def events(self) -> AsyncIterator[bytes]:
        while True:
            try:
                message = await asyncio.wait_for(self._queue.get(), KEEP_ALIVE_S)
            except asyncio.TimeoutError:
                message = b": still here\n\n"
            if message is None:
                return
            yield message


class Feed:
    """The subscribers of one run, and the task that polls for them."""

    def __init__(self, feeds: Feeds, catalogue: RunCatalogue, name: str) -> None:
        self._feeds, self._catalogue, self._name = feeds, catalogue, name
        self._task: asyncio.Task[None] | None = None
        self.subscribers: set[Subscriber] = set()

    def subscribe(self) -> Subscriber:
        subscriber = Subscriber()
        self.subscribers.add(subscriber)
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._poll())
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self.subscribers.discard(subscriber)
        if not self.subscribers and self._task is not None:
            self._task.cancel()

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "hora-page-feed")  # of its own: a slow disk delays this run only
        try:
            view = await loop.run_in_executor(thread, RunView, self._catalogue, self._name)
            over = False
            while self.subscribers and not over:
                over = self._feeds.is_closing
                new = [subscriber for subscriber in self.subscribers if subscriber.is_new]
                for subscriber in new:
                    subscriber.is_new = False
                ended, whole, change = await loop.run_in_executor(thread, _read, view, bool(new))
                for subscriber in [subscriber for subscriber in self.subscribers if not subscriber.is_new]:
                    for message in (whole if subscriber in new else change, _event("end", b"{}") if ended else None):
                        if message is not None:
                            subscriber.put(message)
                over = over or ended
                await asyncio.sleep(0 if over else EVERY_S)
        except RunNotFound:
            pass
        finally:
            for subscriber in self.subscribers:
                subscriber.put(None)
            thread.shutdown(wait=False)


def _read(view: RunView, with_snapshot: bool) -> tuple[bool, bytes | None, bytes | None]:
    """Whether the run is over, a snapshot if wanted, and the change. The change is read first: a new subscriber gets
    some of it twice, and misses nothing."""
    if view.is_new:
        snapshot = view.snapshot(restart=True)
        return view.is_over, _event("whole", snapshot), None
    news = view.change()
    over = view.is_over
    change = None if news is None else _event("whole" if news[1] else "change", news[0])
    return over, _event("whole", view.snapshot()) if with_snapshot else None, change


def _event(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
