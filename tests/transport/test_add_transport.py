"""A transport is added by one new file in the transport folder: nothing else in the package names it."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

import hora.transport
from hora.collectives import Group
from hora.transport import registry
from hora.transport.base import Transport
from ranks import failures, run

PIGEON = '''
"""The "pigeon" transport: messages are files in a folder that rank 0 chooses."""

import collections
import os
import tempfile
import time

import torch

from hora.net.tensor_bytes import tensor_bytes
from hora.transport.base import Transfer, Transport


class _Send(Transfer):
    def advance(self):
        path = self.transport.path(self.transport.rank, self.peer, self.channel)
        self.transport.counts[self.transport.rank, self.peer, self.channel] += 1
        with open(path + ".part", "wb") as file:
            file.write(self.fingerprint.to_bytes(8, "little") + bytes(tensor_bytes(self.tensor)))
        os.rename(path + ".part", path)
        self.done = True
        return True


class _Recv(Transfer):
    def advance(self):
        path = self.transport.path(self.peer, self.transport.rank, self.channel)
        if not os.path.exists(path):
            return False
        self.transport.counts[self.peer, self.transport.rank, self.channel] += 1
        with open(path, "rb") as file:
            fingerprint, data = int.from_bytes(file.read(8), "little"), bytearray(file.read())
        if fingerprint != self.fingerprint or len(data) != self.tensor.numel() * self.tensor.element_size():
            raise self.transport.observer.mismatch(self.peer, self.channel)
        if data:
            (self.combine or torch.Tensor.copy_)(self.tensor, torch.frombuffer(data, dtype=self.tensor.dtype))
        self.done = True
        return True


class PigeonTransport(Transport):
    kind = "pigeon"
    send_transfer, recv_transfer = _Send, _Recv

    @classmethod
    def open(cls, context, spec, option=""):
        if spec.rank == 0:
            context.publish(f"pigeon{spec.group}", tempfile.mkdtemp(dir="LETTERS").encode())
        return cls(spec, context.published(spec.members[0].rank, f"pigeon{spec.group}").decode())

    def __init__(self, spec, folder):
        super().__init__(spec)
        self.folder = folder
        self.counts = collections.Counter()

    def path(self, source, target, channel):
        return f"{self.folder}/{source}-{target}-{channel}-{self.counts[source, target, channel]}"

    def _idle(self, transfer, rounds):
        time.sleep(0.001)
'''


@pytest.fixture
def pigeon(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name to ask for: the file lies in a folder that is a part of the package for this test."""
    folder, letters = tmp_path / "transport", tmp_path / "letters"
    folder.mkdir()
    letters.mkdir()
    (folder / "pigeon.py").write_text(PIGEON.replace("LETTERS", str(letters)))
    monkeypatch.setattr(hora.transport, "__path__", [*hora.transport.__path__, str(folder)])
    registry._import_all.cache_clear()
    yield "pigeon"
    Transport.REGISTERED.pop("pigeon", None)
    sys.modules.pop("hora.transport.pigeon", None)
    registry._import_all.cache_clear()


def test_ranks_all_reduce_over_a_transport_from_a_new_file(pigeon: str, tmp_path: pathlib.Path) -> None:
    def work(group: Group) -> tuple[str, list[list[float]]]:
        tensors = [torch.full((1000,), float(group.rank + 1)) for _ in range(4)]
        for tensor, algorithm in zip(tensors, ("ring", "tree", "halving", "star"), strict=True):
            group.all_reduce(tensor, algorithm=algorithm)
        half = group.clone()
        tensors.append(half.all_reduce(torch.ones(3), "mean"))
        half.close()
        return group.transport.kind, [sorted(set(tensor.tolist())) for tensor in tensors]

    assert run(3, work, pigeon) == [("pigeon", [[6.0]] * 4 + [[1.0]])] * 3
    assert len(list((tmp_path / "letters").glob("*/*"))) > 20, "it carried the messages"


def test_a_mismatch_over_it_is_found_as_over_any_other(pigeon: str) -> None:
    errors = failures(2, lambda group: group.all_reduce(torch.ones(3 + group.rank), algorithm="ring"), pigeon)
    assert all("called all_reduce sum of float32 [" in str(error) for error in errors), errors


def test_its_name_is_known_only_while_its_file_is_there(pigeon: str) -> None:
    assert registry.find(pigeon).kind == "pigeon"
    with pytest.raises(ValueError, match="unknown transport 'dove'; there are: auto, engine, memory, pigeon, shm, tcp"):
        registry.find("dove")
