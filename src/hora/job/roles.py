"""What `job.prepare` does besides training: a server serves parameters, a predictor answers requests, and a worker
publishes parameters for the predictor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer

from ..errors import PeerLost
from ..parameters.registry import ParameterRegistry
from ..runs.exit_codes import SECONDARY_FAILURE
from ..strategies import PS, LocalSGD
from ..training import as_list
from .exit_hooks import exit_process

if TYPE_CHECKING:
    from .job import Job

FAILED_SERVER_S = 10.0  # a server whose error server 0 reports waits this long for the launcher to end it


def serve_parameters(job: Job, model: Any, optimizer: Any) -> NoReturn:
    """A server's whole life: returns by SystemExit once all workers have left."""
    from ..server.process import serve

    strategy = job.strategy
    assert isinstance(strategy, PS | LocalSGD)
    models, optimizers = as_list("model", model, torch.nn.Module), as_list("optimizer", optimizer, Optimizer)
    try:
        with torch.no_grad():
            registry = ParameterRegistry(models, strategy.served(optimizers))
            serve(job._context, registry, strategy.rules(), strategy.block_bytes)
    except ValueError:  # about the model: all servers find the same, and server 0 reports it
        if job._context.rank == 0:
            raise
        time.sleep(FAILED_SERVER_S)
        job._failed = True
        exit_process(SECONDARY_FAILURE)
    if job._coordinator_lost:
        raise PeerLost(job._coordinator_lost, (0,), secondary=True)
    raise SystemExit(0)


def answer_requests(job: Job, model: Any, optimizer: Any, predict: Callable[[Any, Any], Any] | None) -> NoReturn:
    """A predictor's whole life: returns by SystemExit once the run is over, or it is told to end."""
    from ..serve import predictor

    context, config, strategy = job._context, job._context.serve, job.strategy
    assert config is not None
    models, optimizers = as_list("model", model, torch.nn.Module), as_list("optimizer", optimizer, Optimizer)
    registry = ParameterRegistry(models, optimizers)
    if config.checkpoint:
        predictor.serve_checkpoint(config, registry, predict)
    else:
        servers = strategy if isinstance(strategy, PS) else None
        if servers is not None and servers.mode == "sync" and len(optimizers) > 1:
            servers = None  # they are idle between the optimizers of a step; only rank 0 knows when it is complete
        publishers = job.size if config.source == "newest" or _all_ranks_publish(job) else 1
        predictor.serve(config, registry, predict, context, publishers, servers)
    raise SystemExit(0)


def publish_parameters(job: Job) -> None:
    """Publishes this worker's parameters if the run has a predictor; rank 0 records the model's signature."""
    from ..serve.publisher import Publisher, record_signature

    training, context = job.training, job._context
    assert training.sync is not None
    publisher: Publisher | None = None
    if context.serve is not None:
        publisher = Publisher(
            context.serve, training.rank, training.sync, context.control, context.token, _all_ranks_publish(job)
        )
        job._publisher = publisher
        training.show = lambda at_once: publisher.publish(training.step, at_once)

    def sign(signature: bytes) -> None:
        training.signature = signature
        if publisher is not None:
            publisher.set_signature(signature)

    if training.rank == 0:
        record_signature(training.models[0], sign)


def _all_ranks_publish(job: Job) -> bool:
    """Whether the run can go on without rank 0, so that any worker may have the newest parameters."""
    return job.strategy.elastic and job.strategy.unit == "round"
