"""Saving and restoring a run: the contents of a checkpoint, gathered from all workers and distributed to them.

Rank 0 writes and reads; the others send and receive their part. What is written does not depend on the number of
workers, except for the states of the random generators, of which each worker has its own.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from .. import checkpoint
from ..collectives import objects
from ..collectives.group import Group
from ..errors import HoraError
from ..strategies.common.sync import Snapshot
from . import Training

BUFFER_PREFIX = "buffer:"  # before the name of one in a checkpoint, since a parameter might be called the same


def save(training: Training, group: Group, directory: str, strategy: str, keep: int) -> str:
    """Collective. Returns the path of the checkpoint; a failure on rank 0 is raised on every rank."""
    sync = training.sync
    if sync is None:
        raise HoraError("job.save() comes after job.prepare(): there is nothing to save yet")
    training.depart()
    training.idle(True)
    for shard in training.shards:
        shard.settle()
    group.barrier("job.save")
    snapshot = sync.snapshot(group.rank == 0)
    generators = group.gather(objects.pack(msgspec.msgpack.encode(_generators())), name="random generators")
    path = problem = ""
    if generators is not None:
        step = training.step if sync.unison else _next_number(directory, training.step)
        try:
            states, tensors = checkpoint.encode(snapshot.states)
            loops, loop_tensors = checkpoint.encode(_loop_state(training))
            record = {
                "step": step,
                "strategy": strategy,
                "extra": bool(snapshot.extra),
                "workers": group.size,
                "epoch": training.next_epoch(),
                "optimizers": states,
                "groups": [_groups(optimizer) for optimizer in training.optimizers],
                "loop": loops,
                "shards": [{**shard.state(), "global_batch": shard.global_batch} for shard in training.shards],
                "signature": training.signature.decode(),
            }
            files = {
                "model": {
                    **snapshot.parameters,
                    **{BUFFER_PREFIX + name: snapshot.buffers[name] for name in _kept(training)},
                },
                "optimizer": tensors,
                "strategy": snapshot.extra,
                "loop": loop_tensors,
                "rng": {f"rank-{rank}": packed for rank, packed in enumerate(generators)},
            }
            infinite = {BUFFER_PREFIX + name for name in training.infinite}
            path = str(checkpoint.save(directory, step, files, record, keep, infinite))
        except (HoraError, ValueError) as error:
            problem = str(error)
    path, problem = objects.broadcast_object(group, [path, problem], "the checkpoint")
    training.idle(False)
    if problem:
        raise HoraError(f"no checkpoint of step {training.step}: {problem}")
    return path


def restore(training: Training, group: Group, directory: str) -> int | None:
    """Collective. The step of the newest valid checkpoint, whose state all workers now have; None if there is none."""
    sync = training.sync
    if sync is None:
        raise HoraError("job.restore() comes after job.prepare(): there is nothing yet to restore into")
    found, problem = None, ""
    if group.rank == 0:
        try:
            found = checkpoint.newest(directory)
        except HoraError as error:
            problem = str(error)
    there, problem = objects.broadcast_object(group, [found is not None, problem], "a checkpoint?")
    if problem:
        raise HoraError(problem)
    if not there:
        return None
    record = objects.broadcast_object(group, found.record if found else None, "record")
    files = {stem: _read(group, found, stem) for stem in ("model", "optimizer", "loop", "rng")}
    sync.registry.refresh_buffers()
    parameters = dict(zip(sync.registry.names, sync.registry.parameters, strict=True))
    wanted = {**parameters, **{BUFFER_PREFIX + name: sync.registry.buffers[name] for name in _kept(training)}}
    _check_model(wanted, files["model"], record, training)
    buffers = {name: files["model"].get(BUFFER_PREFIX + name, own) for name, own in sync.registry.buffers.items()}
    training.step = int(record["step"])
    extra = _read(group, found, "strategy") if record.get("extra") else {}
    states = checkpoint.decode(record["optimizers"], files["optimizer"])
    sync.restore(Snapshot({name: files["model"][name] for name in parameters}, buffers, states, extra))
    for optimizer, groups in zip(training.optimizers, record["groups"], strict=True):
        for group_of_parameters, saved in zip(optimizer.param_groups, groups, strict=True):
            _load_group(group_of_parameters, saved)
    state = checkpoint.decode(record["loop"], files["loop"])
    for scheduler, saved in zip(training.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if training.scaler is not None and state["scaler"]:
        training.scaler.load_state_dict(state["scaler"])
    training.resume(record["shards"], record["epoch"])
    mine = files["rng"].get(f"rank-{group.rank}")
    if mine is not None:
        _set_generators(mine)
    else:  # a worker more than before: a generator of its own, the same in every such run
        torch.manual_seed(record["step"] * 1_000_003 + group.rank)
    group.barrier("restored")
    return int(record["step"])


def _next_number(directory: str, step: int) -> int:
    """Where workers count their own steps, another may have written before this one, at a higher number."""
    written = [found.group(1) for name in _names_in(directory) if (found := re.fullmatch(r"step-(\d+)", name))]
    return max([step, *(int(number) + 1 for number in written if int(number) >= step)])


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _check_model(
    wanted: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], record: dict[str, Any], training: Training
) -> None:
    """HoraError, before anything was changed, if the checkpoint is of another model or other optimizers."""
    for name, tensor in wanted.items():
        if name not in saved:
            raise HoraError(f"the checkpoint has no {name.removeprefix(BUFFER_PREFIX)}: it is of another model")
        if saved[name].shape != tensor.shape:
            raise HoraError(
                f"{name.removeprefix(BUFFER_PREFIX)} has shape {list(saved[name].shape)} in the checkpoint and "
                f"{list(tensor.shape)} here: it is of another model"
            )
    groups = [len(optimizer.param_groups) for optimizer in training.optimizers]
    if groups != [len(theirs) for theirs in record["groups"]]:
        raise HoraError(
            f"the checkpoint has {[len(theirs) for theirs in record['groups']]} parameter groups, by optimizer, and "
            f"here there are {groups}: prepare the same optimizers"
        )


def _kept(training: Training) -> list[str]:
    """The buffers that belong to the model's state: not those registered with persistent=False."""
    assert training.sync is not None
    registry = training.sync.registry
    passing = {
        f"{prefix}{place}{'.' if place else ''}{name}"
        for prefix, model in registry._prefixed()
        for place, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [name for name in registry.buffers if name not in passing]


def _loop_state(training: Training) -> dict[str, Any]:
    scaler = training.scaler.state_dict() if training.scaler is not None else {}
    return {"schedulers": [scheduler.state_dict() for scheduler in training.schedulers], "scaler": scaler}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: checkpoint.encode(_number(value))[0] for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _load_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        plain = checkpoint.decode(value, {})
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(plain)
        else:
            group[key] = plain


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _read(group: Group, found: checkpoint.Checkpoint | None, stem: str) -> dict[str, torch.Tensor]:
    """One file of the checkpoint, read by rank 0 and sent to all: they need not see the same disk."""
    data = objects.broadcast(group, found.read(stem) if found else b"", f"file {stem}")
    return checkpoint.parse(data, f"what rank 0 sent as {stem}")


# -- random generators -----------------------------------------------------------------------------------------------


def _generators() -> dict[str, Any]:
    """This worker's random generators: torch's, Python's, and numpy's if it is in use."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": objects.unpack(torch.get_rng_state()),
        "python": [version, list(numbers), gauss],
        "cuda": [objects.unpack(one) for one in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return state


def _set_generators(packed: torch.Tensor) -> None:
    state = msgspec.msgpack.decode(objects.unpack(packed))
    torch.set_rng_state(objects.pack(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([objects.pack(one) for one in state["cuda"]])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
