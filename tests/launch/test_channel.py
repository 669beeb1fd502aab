"""Messages over two descriptors: whole, in order, never blocking, and an end that is noticed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import msgspec
import pytest

from hora.launch.channel import MessageChannel
from hora.launch.messages import FromAgent, Heartbeat, ProcessOutput, decode_from_agent

Channel = MessageChannel[FromAgent]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """Two connected channels over pipes."""
    (first_read, second_write), (second_read, first_write) = os.pipe(), os.pipe()
    yield (
        MessageChannel(first_read, first_write, decode_from_agent),
        MessageChannel(second_read, second_write, decode_from_agent),
    )
    for fd in (first_read, first_write, second_read, second_write):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_messages_arrive_whole_and_in_order_though_the_pipe_is_smaller(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    sent = [ProcessOutput("worker", rank, 1, bytes([rank]) * 100_000) for rank in range(5)]
    for message in sent:
        sender.send(message)
    assert sender.pending_bytes > 0, "it does not wait for the reader"
    received: list[FromAgent] = []
    while len(received) < len(sent):
        received += receiver.receive() or []
        sender.flush()
    assert received == sent and sender.pending_bytes == 0 and receiver.receive() == []
    assert receiver.received_bytes > 500_000


def test_the_end_of_the_stream_is_told_from_silence(ends: tuple[Channel, Channel]) -> None:
    sender, receiver = ends
    assert receiver.receive() == []
    sender.send(Heartbeat())
    os.close(sender.write_fd)
    assert receiver.receive() == [Heartbeat()]
    assert receiver.receive() is None


def test_a_reader_that_is_gone_breaks_the_channel_and_what_is_sent_later_is_dropped(
    ends: tuple[Channel, Channel],
) -> None:
    sender, receiver = ends
    os.close(receiver.read_fd)
    sender.send(Heartbeat())
    assert sender.broken
    sender.send(Heartbeat())
    assert sender.pending_bytes == 0


@pytest.mark.parametrize("junk", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1"], ids=["length", "body"])
def test_bytes_that_are_no_message_are_refused(ends: tuple[Channel, Channel], junk: bytes) -> None:
    sender, receiver = ends
    os.write(sender.write_fd, junk)
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        receiver.receive()
