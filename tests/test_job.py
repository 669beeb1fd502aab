"""Job in a world of one, and what `hora` shows before anything is started."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import hora
from hora.job import job as job_module


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """No job before, none after."""
    yield
    if job_module._current is not None:
        job_module._current.close()


def test_alone_a_script_is_a_world_of_one() -> None:
    job = hora.init()
    assert (job.rank, job.size, job.local_rank, job.role, job.step) == (0, 1, 0, "worker", 0)
    assert job.group.size == 1
    assert repr(job) == "<hora.Job worker 0 of 1, strategy auto>"


def test_alone_every_collective_gives_back_what_it_was_given() -> None:
    hora.init()
    wanted = torch.arange(6.0).view(3, 2)
    for algorithm in ("auto", "star", "ring", "tree", "halving", "shared", "engine"):
        given = wanted.clone()
        assert hora.all_reduce(given, algorithm=algorithm) is given and given.equal(wanted), algorithm
    for op in ("sum", "mean", "min", "max", "prod"):
        assert hora.all_reduce(wanted.clone(), op).equal(wanted), op
    assert hora.broadcast(wanted.clone()).equal(wanted)
    assert hora.reduce(wanted.clone(), op="mean").equal(wanted)
    assert hora.reduce_scatter(wanted.clone()).equal(wanted)
    assert [part.tolist() for part in hora.all_gather(wanted)] == [wanted.tolist()]
    assert [part.tolist() for part in hora.gather(wanted)] == [wanted.tolist()]
    assert hora.scatter([wanted]).equal(wanted)
    assert [part.tolist() for part in hora.all_to_all(wanted)] == [wanted.tolist()]
    assert hora.all_reduce(wanted.clone(), wait=False).wait().equal(wanted)
    hora.barrier()
    group = hora.new_group([0])
    assert group is not None and hora.all_reduce(wanted.clone(), group=group).equal(wanted)
    with pytest.raises(ValueError, match="rank 0 cannot exchange with rank 0"):
        hora.send(wanted, 0)


def test_a_second_init_returns_the_same_job() -> None:
    job = hora.init()
    assert hora.init() is job
    assert hora.init("ring") is job


def test_close_may_be_called_again_and_a_new_job_begun() -> None:
    job = hora.init()
    job.close()
    job.close()
    with pytest.raises(hora.HoraError, match=r"call hora\.init\(\) first"):
        hora.barrier()
    again = hora.init()
    assert again is not job
    hora.barrier()


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_a_collective_before_init_says_what_to_call(name: str) -> None:
    with pytest.raises(hora.HoraError, match=r"there is no job: call hora\.init\(\) first"):
        getattr(hora, name)(torch.ones(1))


def test_a_strategy_is_given_as_text_or_as_a_dataclass() -> None:
    job = hora.init("engine:backend=gloo")
    assert job.strategy == hora.Engine(backend="gloo") and job.group.algorithm == "engine"
    job.close()
    assert hora.init(hora.Auto(deterministic=True)).strategy.spell() == "auto:deterministic=true"


@pytest.mark.parametrize("given", ["ring", hora.Ring()])
def test_the_command_lines_strategy_beats_the_scripts_and_one_line_says_so(
    given: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HORA_STRATEGY", "tree")
    with caplog.at_level(logging.WARNING):
        job = hora.init(given)
    assert job.strategy == hora.Tree() and job.group.algorithm == "tree"
    assert [record.getMessage() for record in caplog.records] == [
        "strategy: tree from the command line, not ring from the script"
    ]


def test_nothing_is_said_where_script_and_command_line_agree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HORA_STRATEGY", "ring")
    with caplog.at_level(logging.WARNING):
        assert hora.init(hora.Ring()).strategy == hora.Ring()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("rong", r"unknown strategy 'rong'; did you mean 'ring'\? there are: auto, diloco, engine"),
        ("ring:speed=9", "strategy 'ring' has no option 'speed'; its options are: update, overlap, bucket_bytes"),
        ("engine:backend=smoke", "there are: auto, gloo, nccl, mpi"),
        ("auto:deterministic=maybe", "takes true or false, not 'maybe'"),
    ],
)
def test_a_bad_strategy_says_what_exists(strategy: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hora.init(strategy)
    with pytest.raises(hora.HoraError, match="there is no job"):
        hora.barrier()


def test_a_bad_transport_says_what_exists() -> None:
    with pytest.raises(ValueError, match="unknown transport 'pigeon'; there are: auto, engine, memory, shm, tcp"):
        hora.init(transport="pigeon")
    assert hora.init().size == 1


@pytest.mark.parametrize("transport", ["shm", "tcp", "engine"])
def test_alone_every_transport_is_the_same_path(transport: str) -> None:
    job = hora.init(transport=transport)
    assert job.group.transport.kind == transport
    assert hora.all_reduce(torch.ones(3), "mean").tolist() == [1, 1, 1]
    hora.barrier()


def test_without_cuda_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hora.init().device == torch.device("cpu")


def test_with_cuda_ranks_beyond_the_number_of_gpus_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job = hora.init()
    job.local_rank = 3
    assert job.device == torch.device("cuda", 1)


def test_init_in_a_forked_child_is_refused() -> None:
    hora.init()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        said = "nothing"
        try:
            hora.init()
        except hora.HoraError as refusal:
            said = str(refusal)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as pipe:
        assert f"a child of the process that is this rank (pid {os.getpid()})" in pipe.read()
    assert hora.all_reduce(torch.ones(1)).item() == 1


def test_importing_hora_loads_no_torch_and_shows_its_names() -> None:
    code = "import sys, hora; dir(hora); hora.PeerLost; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_an_unknown_name_lists_what_exists() -> None:
    with pytest.raises(AttributeError, match=r"hora has no 'all_redcue'; it has: .*all_reduce.*init"):
        hora.all_redcue  # noqa: B018
    assert set(hora.__all__) <= set(dir(hora))
    for name in hora.__all__:
        assert getattr(hora, name) is not None


def test_an_unknown_on_nonfinite_says_what_exists() -> None:
    with pytest.raises(ValueError, match="on_nonfinite='typo' is unknown; there are: raise, skip"):
        hora.init(on_nonfinite="typo")


def test_the_ledger_can_be_printed_once_there_is_a_loader() -> None:
    job = hora.init()
    with pytest.raises(hora.HoraError, match="no loader yet"):
        job.ledger()
    job.shard([1, 2, 3], batch_size=2)
    assert str(job.ledger()).startswith("all workers: 0 of 2 batches done, 0 leased, 2 pending; 0 of 3 samples done")


def test_what_needs_prepare_says_so() -> None:
    job = hora.init()
    with pytest.raises(hora.HoraError, match=r"comes after job.prepare\(\)"), job.accumulate():
        pass
    for call in (lambda: job.weight(1), lambda: job.traffic, lambda: job.save("x"), lambda: job.restore("x")):
        with pytest.raises(hora.HoraError, match=r"comes after job.prepare\(\)"):
            call()


def test_prepare_is_called_once() -> None:
    job, model = hora.init(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer)
    with pytest.raises(hora.HoraError, match="call it once"):
        job.prepare(model, optimizer)
