"""Sources and the publisher: which parameters a predictor gets, of which moment, and which it never gets."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch

from hora.coordinator import CoordinatorEvent, InProcessCoordinator, Member
from hora.errors import HoraError, OutOfMemory
from hora.http.listening import parse_address
from hora.http.serve_config import ServeConfig, parse_batch, parse_interval
from hora.net.fd_passing import FdPassing
from hora.parameters.registry import ParameterRegistry
from hora.rendezvous.context import RunContext
from hora.serve import publisher as publishing
from hora.serve.predictor import LiveWorkers
from hora.serve.publisher import Publisher, SnapshotOffer, record_signature
from hora.serve.signature import Signature
from hora.serve.snapshot_buffer import ParameterVersion, SnapshotBuffer
from hora.serve.sources import ServerSource, SnapshotSource
from hora.server.block_memory import BlockMemory
from hora.server.layout import BlockLayout, make_layout
from hora.server.messages import BeginStep, Push
from hora.server.state import Rules, ServerState
from hora.server.store import ParameterStore
from hora.strategies import parse
from hora.strategies.common.hooks import TrainingHooks
from hora.strategies.common.sync import Sync


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(3, 2)
        self.scale = torch.nn.Parameter(torch.zeros(4), requires_grad=False)  # that no optimizer has
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("mask", torch.full((2,), float("-inf")))


def registry_of(model: Model) -> ParameterRegistry:
    return ParameterRegistry([model], [torch.optim.SGD(model.line.parameters(), lr=1.0)])


def shown(registry: ParameterRegistry) -> SnapshotBuffer:
    return SnapshotBuffer.create(registry.parameters, registry.buffers, registry.entries())


def publish(snapshot: SnapshotBuffer, registry: ParameterRegistry, value: float, version: ParameterVersion) -> None:
    parameters = [torch.full_like(parameter, value) for parameter in registry.parameters]
    snapshot.publish(parameters, {"mean": torch.full((5,), value), "mask": registry.buffers["mask"]}, version)


def values(model: Model) -> set[float]:
    tensors = [*model.parameters(), model.mean]
    return {float(value) for tensor in tensors for value in tensor.detach().reshape(-1)}  # type: ignore[union-attr]


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_the_newest_is_loaded_and_the_step_never_goes_back() -> None:
    model = Model()
    registry = registry_of(model)
    snapshot = shown(registry)
    source = SnapshotSource(registry, [snapshot])
    before = values(model)
    assert source.refresh() is None and values(model) == before
    for step in (0, 3, 3, 2, 7):
        publish(snapshot, registry, float(step), ParameterVersion(step))
        expected = max(step, 3) if step else 0
        assert source.refresh() == ParameterVersion(expected) and values(model) == {float(expected)}
    source.close()
    assert source.refresh() == ParameterVersion(7), "what is mapped stays readable after its owner's end"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_loaded(bad: float) -> None:
    model = Model()
    registry = registry_of(model)
    snapshot = shown(registry)
    source = SnapshotSource(registry, [snapshot])
    publish(snapshot, registry, bad, ParameterVersion(1))
    assert source.refresh() is None
    publish(snapshot, registry, 1.0, ParameterVersion(2))
    assert source.refresh() == ParameterVersion(2), "a mask that was infinite from the start is no obstacle"
    publish(snapshot, registry, bad, ParameterVersion(3))
    assert (
        source.refresh() == ParameterVersion(2) and source.refresh() == ParameterVersion(2) and values(model) == {1.0}
    )
    publish(snapshot, registry, 4.0, ParameterVersion(4))
    assert source.refresh() == ParameterVersion(4) and values(model) == {4.0}


def test_of_several_workers_the_later_round_counts_then_the_later_local_step() -> None:
    model = Model()
    registry = registry_of(model)
    cases = [shown(registry) for _ in range(3)]
    source = SnapshotSource(registry, cases[:2])
    source.add(cases[2])
    publish(cases[0], registry, 7.0, ParameterVersion(0, round=0, local_step=0))
    publish(cases[1], registry, float("nan"), ParameterVersion(1, round=0, local_step=1))
    assert source.refresh() == ParameterVersion(0, round=0, local_step=0) and values(model) == {7.0}, (
        "the next after a bad one"
    )
    story = [
        (0, ParameterVersion(0, round=0, local_step=0), 7.0),
        (1, ParameterVersion(3, round=0, local_step=3), 2.0),
        (2, ParameterVersion(2, round=0, local_step=2), 2.0),
        (0, ParameterVersion(8, round=1, local_step=0), 4.0),
        (1, ParameterVersion(7, round=0, local_step=7), 4.0),
        (2, ParameterVersion(9, round=1, local_step=1), 6.0),
    ]
    for number, (case, version, expected) in enumerate(story, start=1):
        publish(cases[case], registry, float(number), version)
        source.refresh()
        assert values(model) == {expected}, version


# -- servers -----------------------------------------------------------------------------------------------------------


class Servers:
    """Servers as state machines in this process, whose memory is read as a predictor reads it."""

    def __init__(self, registry: ParameterRegistry, mode: str, num_servers: int = 2) -> None:
        line = InProcessCoordinator(1).connect()
        access = RunContext(control=line, token=b"", rank=0, size=1, num_servers=num_servers)
        self.layout: BlockLayout = make_layout(registry, access, 1 << 20)
        self.memories = [BlockMemory(len(part.blocks), part.num_bytes) for part in self.layout.parts]
        self.servers = []
        for number, (part, memory) in enumerate(zip(self.layout.parts, self.memories, strict=True)):
            twin = registry_of(Model())
            store = ParameterStore(part, memory, twin.parameters, twin.optimizers)
            self.servers.append(ServerState(store, Rules(mode=mode), number=number, num_servers=num_servers))
            self.servers[-1].join(0)

    def fill(self, value: float, step: int = 0) -> None:
        for server in self.servers:
            for chunk in server.store.part.chunks:
                server.store.fill(chunk, [torch.full((block.numel,), value) for block in chunk.blocks], step)

    def begin(self, number: int, step: int, reaches: int) -> None:
        chunks = self.servers[number].store.part.chunks
        self.servers[number].handle(0, BeginStep(step, 0, len(chunks), reaches=reaches))

    def push(self, number: int, step: int, gradient: float) -> None:
        server = self.servers[number]
        for chunk in server.store.part.chunks:
            base = server.store.versions(chunk)
            gradients = [torch.full((block.numel,), gradient) for block in chunk.blocks]
            server.handle(0, Push(step, chunk.number, base), gradients)


def test_in_sync_only_parameters_of_one_step_are_read() -> None:
    model = Model()
    registry = registry_of(model)
    servers, snapshot = Servers(registry, "sync"), shown(registry)
    source = ServerSource(registry, servers.layout, servers.memories, snapshot, sync=True)
    assert source.refresh() is None
    publish(snapshot, registry, 10.0, ParameterVersion(0))
    servers.fill(10.0)
    assert source.refresh() == ParameterVersion(0) and values(model) == {10.0}
    for number in (0, 1):
        servers.begin(number, 0, reaches=1)
    servers.push(0, 0, 1.0)
    assert source.refresh() == ParameterVersion(0) and values(model) == {10.0}, "one server is a step ahead"
    servers.push(1, 0, 1.0)
    assert source.refresh() == ParameterVersion(1)
    assert {float(value) for value in model.line.weight.detach().view(-1)} == {9.0}
    assert {float(value) for value in model.mean} == {10.0}, "buffers are as rank 0 shows them"
    servers.fill(5.0, step=40)
    assert source.refresh() == ParameterVersion(40), "restored"


def test_where_servers_cannot_be_met_at_rest_rank_0s_newer_parameters_are_taken() -> None:
    model = Model()
    registry = registry_of(model)
    servers, snapshot = Servers(registry, "sync"), shown(registry)
    source = ServerSource(registry, servers.layout, servers.memories, snapshot, sync=True)
    servers.fill(10.0)
    servers.begin(0, 0, reaches=1)
    servers.push(0, 0, 1.0)
    publish(snapshot, registry, 3.0, ParameterVersion(6))
    assert source.refresh() == ParameterVersion(6) and values(model) == {3.0}


def test_in_async_the_stamp_is_the_lowest_version_and_the_spread() -> None:
    model = Model()
    registry = registry_of(model)
    servers, snapshot = Servers(registry, "async"), shown(registry)
    source = ServerSource(registry, servers.layout, servers.memories, snapshot, sync=False)
    publish(snapshot, registry, 0.0, ParameterVersion(0))
    servers.fill(0.0)
    assert source.refresh() == ParameterVersion(0, spread=0)
    for step in range(3):
        servers.begin(0, step, reaches=0)
        servers.push(0, step, 1.0)
    assert source.refresh() == ParameterVersion(3, spread=0), "a block that was never updated does not count"
    servers.begin(1, 0, reaches=0)
    servers.push(1, 0, 1.0)
    assert source.refresh() == ParameterVersion(3, spread=0), "one that begins late does not take the step back"
    bias = float(model.line.bias.detach()[0])
    for step in range(3, 9):
        servers.begin(0, step, reaches=0)
        servers.push(0, step, 1.0)
    for step in range(1, 5):
        servers.begin(1, step, reaches=0)
        servers.push(1, step, 1.0)
    assert source.refresh() == ParameterVersion(5, spread=4) and float(model.line.bias.detach()[0]) < bias
    servers.begin(1, 5, reaches=0)
    servers.push(1, 5, float("nan"))
    assert source.refresh() == ParameterVersion(5, spread=4), "it is not finite"
    servers.fill(1.0, step=100)
    assert source.refresh() == ParameterVersion(100, spread=0) and float(model.line.bias.detach()[0]) == 1.0


def test_a_block_has_its_new_origin_before_it_is_at_rest_again() -> None:
    servers = Servers(registry_of(Model()), "async", 1)
    (memory,) = servers.memories

    class Watched:
        def __setitem__(self, number: int, value: int) -> None:
            assert memory.counters[number] & 1, "a reader may meet the version without its origin"

    memory.origins = Watched()  # type: ignore[assignment]
    servers.fill(1.0, step=7)


def test_a_reader_of_blocks_never_meets_half_an_update() -> None:
    model = Model()
    registry = registry_of(model)
    servers, snapshot = Servers(registry, "async", 1), shown(registry)
    source = ServerSource(registry, servers.layout, servers.memories, snapshot, sync=False)
    publish(snapshot, registry, 0.0, ParameterVersion(0))
    servers.fill(0.0)
    assert source.refresh() is not None, "before there is a writer: on a busy machine a read may give up"
    stop = threading.Event()

    def train() -> None:
        step = 0
        with torch.no_grad():
            while not stop.is_set():
                servers.begin(0, step, reaches=0)
                servers.push(0, step, -1.0)
                step += 1

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(300):
            source.refresh()
            for parameter in model.line.parameters():
                assert len(set(parameter.detach().view(-1).tolist())) == 1, "a block is of two versions"
            time.sleep(0)
    finally:
        stop.set()
        trainer.join()


# -- the publisher -----------------------------------------------------------------------------------------------------


def trained(rounds: int | None = None) -> tuple[Model, Sync]:
    model = Model()
    sync = parse("ring").sync(registry_of(model), TrainingHooks())
    sync.rounds = rounds
    return model, sync


def publisher(
    sync: Sync, rank: int = 0, all_ranks: bool = False, **options: object
) -> tuple[Publisher, SnapshotOffer | None]:
    hub = InProcessCoordinator(1)
    control = hub.connect()
    control.join(Member("worker", 0, "here", 1))
    made = Publisher(ServeConfig(**options), rank, sync, control, b"t" * 32, all_ranks)  # type: ignore[arg-type]
    words = hub.coordinator.values(f"snapshot/{rank}").get(f"snapshot/{rank}")
    return made, None if words is None else msgspec.msgpack.decode(words, type=SnapshotOffer)


def newest(made: Publisher) -> ParameterVersion | None:
    assert made._snapshot is not None
    return made._snapshot.newest()


@pytest.mark.parametrize(
    ("every", "expected"),
    [("step", [1, 2, 3, 4, 5]), ("2", [0, 2, 2, 4, 4]), ("3600s", [0] * 5), ("0s", [1, 2, 3, 4, 5])],
)
def test_parameters_are_shown_when_they_are_due(every: str, expected: list[int]) -> None:
    _, sync = trained()
    made, offer = publisher(sync, every=every)
    assert offer is not None and offer.address and newest(made) == ParameterVersion(0), "at once"
    found = []
    for step in range(1, 6):
        made.publish(step)
        version = newest(made)
        assert version is not None
        found.append(version.step)
    assert found == expected
    made.publish(5, force=True)
    assert newest(made) == ParameterVersion(5)
    made.close(clean=True)


def shown_by(made: Publisher, model: Model) -> tuple[ParameterVersion | None, float]:
    """The newest version, and what the first bias is there."""
    assert made._snapshot is not None
    room = [torch.empty_like(parameter) for parameter in model.parameters()]
    version = made._snapshot.read([each.detach() for each in room], {})
    return version, float(room[[name for name, _ in model.named_parameters()].index("line.bias")][0])


def at(model: Model, sync: Sync, value: float, rounds: int, local_steps: int) -> None:
    torch.nn.init.constant_(model.line.bias, value)
    sync.rounds, sync.local_steps = rounds, local_steps


def test_with_rounds_what_was_agreed_upon_is_shown_and_only_then() -> None:
    model, sync = trained(rounds=0)
    at(model, sync, 0.0, rounds=0, local_steps=0)
    made, _ = publisher(sync, every="step")
    assert shown_by(made, model) == (ParameterVersion(0, round=0, local_step=0), 0.0)
    at(model, sync, 3.0, rounds=0, local_steps=3)
    made.publish(3)
    assert shown_by(made, model) == (ParameterVersion(0, round=0, local_step=0), 0.0)
    at(model, sync, 8.0, rounds=1, local_steps=0)
    made.publish(8)
    assert shown_by(made, model) == (ParameterVersion(8, round=1, local_step=0), 8.0)
    at(model, sync, 10.0, rounds=1, local_steps=2)
    made.publish(10, force=True)
    assert shown_by(made, model) == (ParameterVersion(8, round=1, local_step=0), 8.0), "it is still of the round's end"
    at(model, sync, 17.0, rounds=2, local_steps=1)
    made.publish(17)
    assert shown_by(made, model) == (ParameterVersion(8, round=1, local_step=0), 8.0), "a step went over the average"
    at(model, sync, 24.0, rounds=3, local_steps=0)
    made.publish(24)
    assert shown_by(made, model) == (ParameterVersion(24, round=3, local_step=0), 24.0)
    made.close(clean=True)


def test_an_average_that_is_kept_is_shown_though_steps_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sync = trained(rounds=0)
    kept = [torch.full_like(parameter, 5.0) for parameter in sync.registry.parameters]
    monkeypatch.setattr(sync, "agreed_parameters", lambda: kept)
    made, _ = publisher(sync, every="step")
    at(model, sync, 9.0, rounds=1, local_steps=2)
    made.publish(10)
    assert shown_by(made, model) == (ParameterVersion(10, round=1, local_step=0), 5.0)
    made.close(clean=True)


def test_in_the_warm_up_every_step_is_common() -> None:
    model, sync = trained(rounds=0)
    sync.warming_up = True
    made, _ = publisher(sync, every="2")
    found = []
    for step in range(1, 5):
        at(model, sync, float(step), rounds=0, local_steps=step)
        made.publish(step)
        found.append(shown_by(made, model))
    zero, two, *_, four = found[0], found[1], found[3]
    assert zero[0] == ParameterVersion(0, round=0, local_step=0)
    assert (two, four) == (
        (ParameterVersion(2, round=0, local_step=0), 2.0),
        (ParameterVersion(4, round=0, local_step=0), 4.0),
    )
    at(model, sync, 5.0, rounds=0, local_steps=0)
    sync.warming_up = False
    made.publish(5)
    assert shown_by(made, model) == (ParameterVersion(5, round=0, local_step=0), 5.0), "its end is where rounds begin"
    made.close(clean=True)


def test_newest_shows_every_workers_own_parameters_within_the_round() -> None:
    _, sync = trained(rounds=0)
    made, offer = publisher(sync, rank=1, every="2", source="newest")
    assert offer is not None
    sync.local_steps = 2
    made.publish(2)
    assert newest(made) == ParameterVersion(2, round=0, local_step=2)
    made.close(clean=True)
    other, offer = publisher(sync, rank=1)
    assert offer is None and other._snapshot is None, "the average is rank 0's to show"


def test_too_little_memory_is_a_warning_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> SnapshotBuffer:
        raise OutOfMemory("3 MiB of shared memory wanted, 2 MiB left")

    monkeypatch.setattr(publishing.SnapshotBuffer, "create", refuse)
    _, sync = trained()
    made, offer = publisher(sync)
    assert offer is not None and "2 MiB left" in offer.problem
    made.publish(1, force=True)
    made.close(clean=True)
    assert len([record for record in caplog.records if "2 MiB left" in record.message]) == 1


def test_a_buffer_that_changes_its_shape_ends_the_showing_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    model, sync = trained()
    made, offer = publisher(sync, every="step")
    assert offer is not None
    model.mean = torch.zeros(6)
    made.publish(1)
    made.publish(2)
    other = FdPassing(b"t" * 32)
    with pytest.raises(HoraError, match="buffer mean"):
        other.fetch(offer.address, offer.key)
    other.close()
    made.close(clean=True)
    assert len([record for record in caplog.records if "buffer mean" in record.message]) == 1


def test_a_worker_that_is_done_does_not_wait_for_a_predictor_that_has_died() -> None:
    _, sync = trained()
    made, _ = publisher(sync, after=True)
    made._on_event(CoordinatorEvent(kind="died", generation=1, member=Member("predictor", 0, "here", 2)))
    begin = time.monotonic()
    made.close(clean=True)
    assert time.monotonic() - begin < publishing.LINGER_S / 2


def test_a_worker_that_joins_again_is_no_longer_gone() -> None:
    control = InProcessCoordinator(1).connect()
    control.join(member := Member("worker", 0, "here", 1))
    workers = LiveWorkers(control)
    for kind, all_gone in (("died", True), ("joined", False), ("left", True)):
        workers._on_event(CoordinatorEvent(kind=kind, generation=1, member=member))
        assert workers.all_gone == all_gone


def test_where_a_run_outlives_rank_0_everybody_shows() -> None:
    _, sync = trained(rounds=0)
    made, offer = publisher(sync, rank=1, all_ranks=True)
    assert offer is not None and newest(made) == ParameterVersion(0, round=0, local_step=0)
    made.close(clean=True)


def test_the_signature_is_that_of_the_first_forward_in_training() -> None:
    model = torch.nn.Linear(3, 2)
    told: list[bytes] = []
    record_signature(model, told.append)
    model.eval()(torch.zeros(1, 3))
    with torch.no_grad():
        model.train()(torch.zeros(1, 3))
    assert told == []
    model(torch.zeros(4, 3))
    model(torch.zeros(4, 3))
    (words,) = told
    signature = msgspec.json.decode(words, type=Signature)
    assert [(spec.name, spec.shape) for spec in signature.inputs] == [("input", [-1, 3])]
    assert [(spec.name, spec.shape) for spec in signature.outputs] == [("output", [-1, 2])]
    assert not model._forward_hooks
    record_signature(torch.jit.script(torch.nn.Linear(3, 2)), told.append)
    assert len(told) == 1, "a module without hooks has none, and that is no error"


# -- what was asked for ------------------------------------------------------------------------------------------------


def test_addresses_times_and_batches_as_they_are_spelled() -> None:
    assert parse_address("8000") == parse_address(":8000") == ("127.0.0.1", 8000)
    assert parse_address("0.0.0.0:1") == ("0.0.0.0", 1) and parse_address("[::1]:80") == ("::1", 80)
    assert (parse_interval("step").steps, parse_interval("12").steps, parse_interval("0.5s").seconds) == (1, 12, 0.5)
    assert parse_batch("64,2") == (64, 2.0) and parse_batch("8") == (8, 2.0)
    for wrong in ("", "x", "70000", "a b:1", "-1"):
        with pytest.raises(ValueError, match="--serve takes"):
            parse_address(wrong)
    for wrong in ("", "0", "1.5", "-1s", "s"):
        with pytest.raises(ValueError, match="--serve-every takes"):
            parse_interval(wrong)
    config = ServeConfig(host="::", port=1, hosts=("a",), every="2", source="newest", after=True, checkpoint="c")
    assert ServeConfig.from_json(config.to_json()) == config and config.url == "http://[::]:1"
