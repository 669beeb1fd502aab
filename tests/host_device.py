"""DeviceSync without a GPU: under the strategy "onhost" parameters lie on the host and exchanges are read late, as on a
GPU. Buckets are reduced at once; the status arrives when it arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hora.parameters.buckets import Bucket
from hora.parameters.registry import ParameterRegistry
from hora.strategies.allreduce import bucket_plans, device_sync
from hora.strategies.allreduce.config import AllReduce
from hora.strategies.allreduce.device_reducer import DeviceReducer
from hora.strategies.allreduce.device_sync import DeviceSync
from hora.strategies.base import REGISTERED


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnHost(AllReduce):
    @property
    def algorithm(self) -> str:
        return "ring"

    def sync(self, registry: Any, hooks: Any) -> DeviceSync:
        return DeviceSync(registry, hooks, self)


OnHost.name = "onhost"  # now, so that it is registered only while a test uses it


class HostRecord:
    def __init__(self, handle: Any, verdict: torch.Tensor) -> None:
        self.verdict = verdict
        self._handle = handle

    @property
    def arrived(self) -> bool:
        return bool(self._handle.done)

    def read(self, check: Callable[[], None]) -> tuple[list[float], bool]:
        while not self._handle.wait_done(0.01):
            check()
        broken = self._handle.error is not None  # by an abort, which leaves a GPU with whatever is there
        return [] if broken else self._handle.wait().tolist(), bool(self.verdict)

    def exposed_s(self) -> float:
        return 0.0


class HostReducer(DeviceReducer):
    def __init__(self, group: Any, buckets: Any, keep: bool, traffic: Any, comm: Any, parameters: Any) -> None:
        self.group, self.buckets, self.keep, self.traffic, self.comm = group, buckets, keep, traffic, comm
        self._parameters = parameters
        self._flats = [torch.zeros(bucket.numel, dtype=bucket.dtype) for bucket in buckets]
        self._views = [
            [
                flat.as_strided(parameters[s.index].shape, parameters[s.index].stride(), s.offset)
                for s in bucket.segments
            ]
            for bucket, flat in zip(buckets, self._flats, strict=True)
        ]

    def open(self) -> None:
        pass

    def launch(self, bucket: Bucket, views: Sequence[torch.Tensor | None], scale: float) -> None:
        for view, grad in zip(self._views[bucket.number], views, strict=True):
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad.detach())
        flat = self._flats[bucket.number].mul_(scale * self.group.size)
        self.group.all_reduce(flat, "mean", "ring", name=f"bucket {bucket.number}")

    def views(self, bucket: Bucket) -> list[torch.Tensor]:
        return self._views[bucket.number]

    def broadcast(self, buffers: Sequence[torch.Tensor]) -> None:
        ParameterRegistry.broadcast(buffers, self.group)

    def conclude(self, row: Sequence[float]) -> Any:
        bad = not all(bool(torch.isfinite(flat).all()) for flat in self._flats)
        total = torch.tensor(row, dtype=torch.float64)
        handle = self.group.all_reduce(total, "sum", "ring", name="status", wait=False)
        return HostRecord(handle, torch.tensor(float(bad)))

    def close(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = SimpleNamespace(bucket_bytes=1500, cause=None, abort=lambda cause: None, close=lambda: None)
    monkeypatch.setitem(REGISTERED, "onhost", OnHost)
    monkeypatch.setattr(bucket_plans, "DeviceReducer", HostReducer)
    monkeypatch.setattr(device_sync, "open_comm", lambda group, device, algorithm: comm)
