"""A table that only servers have: rows by id, made at their first gradient, each with its own optimizer state."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from hora.server.block_memory import BlockMemory
from hora.server.embedding_table import OPTIMIZERS, EmbeddingTable, TableSpec, initial, join, split
from hora.server.layout import cut
from hora.server.messages import BeginStep, EnterLoop, Push
from hora.server.state import Rules, ServerState
from hora.server.store import ParameterStore

SPEC = TableSpec(
    index=0, num_rows=40, width=3, dtype=torch.float64, init="normal", scale=1.0, seed=5, num_servers=1
)  # fmt: skip
ALL = torch.arange(40)


def sparse(rows: list[int], values: torch.Tensor, num_rows: int = 40) -> torch.Tensor:
    return torch.sparse_coo_tensor([rows], values, (num_rows, values.shape[1]), check_invariants=True).coalesce()


def tables(num_servers: int) -> list[EmbeddingTable]:
    spec = dataclasses.replace(SPEC, num_servers=num_servers)
    return [EmbeddingTable(spec, server) for server in range(num_servers)]


# -- what rows are at first ------------------------------------------------------------------------------------------


def test_a_fresh_row_depends_on_seed_and_id_alone() -> None:
    whole = initial(SPEC, ALL)
    for picked in (torch.tensor([7]), torch.tensor([39, 0, 7]), ALL.flip(0)):
        assert torch.equal(initial(SPEC, picked), whole[picked])
    assert not torch.equal(initial(dataclasses.replace(SPEC, seed=6), ALL), whole)
    assert len(whole.view(-1).unique()) == whole.numel()


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_fresh_rows_are_spread_as_their_init_says(seed: int) -> None:
    spec = dataclasses.replace(SPEC, num_rows=10**12, width=8, seed=seed, scale=2.0)
    ids = torch.arange(20_000) * 50_000_000
    normal = initial(spec, ids)
    assert abs(float(normal.mean())) < 0.02 and abs(float(normal.std()) - 2) < 0.02
    assert abs(float((normal.abs() < 2).double().mean()) - 0.6827) < 0.01  # within one standard deviation
    correlation = torch.corrcoef(normal.t())
    assert float((correlation - torch.eye(8, dtype=torch.float64)).abs().max()) < 0.05
    uniform = initial(dataclasses.replace(spec, init="uniform"), ids)
    assert float(uniform.min()) >= -2 and float(uniform.max()) < 2 and abs(float(uniform.var()) - 4 / 3) < 0.03
    assert not initial(dataclasses.replace(spec, init="zeros"), ids).any()


# -- updates ---------------------------------------------------------------------------------------------------------


def test_looking_up_makes_no_row_and_a_gradient_does() -> None:
    (table,) = tables(1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    first = initial(SPEC, ALL)
    assert torch.equal(table.look_up(ALL), first) and len(table) == 0
    table.apply(optimizer, optimizer.param_groups[0], sparse([3, 9], torch.ones(2, 3, dtype=torch.float64)))
    assert len(table) == 2
    first[[3, 9]] -= 0.5
    assert torch.equal(table.look_up(ALL), first)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_lazy_updates_are_what_the_optimizer_does_to_rows_that_are_always_touched(kind: type, num_servers: int) -> None:
    """A reference that sees all touched rows as one parameter, and counts steps as the table does."""
    dice = random.Random(0)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    if kind is torch.optim.Adagrad:
        options = {"initial_accumulator_value": 0.25}
    mine = tables(num_servers)
    shelves = []
    for table in mine:
        stand_in = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = kind([stand_in], lr=0.1, **options)
        shelves.append((EmbeddingTable(table.spec, table.server, optimizer.state.pop(stand_in, None)), optimizer))
    chosen = [4, 5, 17, 33]
    whole = torch.nn.Parameter(initial(SPEC, ALL)[chosen])
    reference = kind([whole], lr=0.1, **options)
    for _ in range(5):
        gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(dice.randrange(99)), dtype=torch.float64)
        whole.grad = gradient
        if kind is torch.optim.SparseAdam:
            whole.grad = sparse(list(range(4)), gradient, 4)
        reference.step()
        for server, (table, optimizer) in enumerate(shelves):
            here = [n for n, row in enumerate(chosen) if row % num_servers == server]
            rows = [chosen[n] // num_servers for n in here]
            table.apply(optimizer, optimizer.param_groups[0], sparse(rows, gradient[here]))
            assert not optimizer.state and not optimizer.param_groups[0]["params"]
    for server, (table, _) in enumerate(shelves):
        here = [n for n, row in enumerate(chosen) if row % num_servers == server]
        found = table.look_up(torch.tensor([chosen[n] // num_servers for n in here], dtype=torch.int64))
        torch.testing.assert_close(found, whole.detach()[here], rtol=1e-12, atol=1e-14)


def test_rows_are_updated_as_sparse_adam_updates_those_of_a_table_in_random_order() -> None:
    dice = random.Random(1)
    (table,) = tables(1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.05, eps=1e-20)
    whole = torch.nn.Parameter(initial(SPEC, ALL))
    reference = torch.optim.SparseAdam([whole], lr=0.05, eps=1e-20)  # it adds eps elsewhere
    for _ in range(30):
        rows = sorted(dice.sample(range(40), dice.choice([0, 1, 5])))
        values = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(dice.randrange(999))).double()
        table.apply(optimizer, optimizer.param_groups[0], sparse(rows, values))
        whole.grad = sparse(rows, values)
        reference.step()
    torch.testing.assert_close(table.look_up(ALL), whole.detach(), rtol=1e-9, atol=1e-12)


def test_a_saved_table_goes_on_with_another_number_of_servers() -> None:
    def step(those: list[tuple[EmbeddingTable, torch.optim.Optimizer]], seed: int) -> None:
        ids = random.Random(seed).sample(range(40), 6)
        values = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed)).double()
        for table, optimizer in those:
            count = table.spec.num_servers
            here = [n for n, each in enumerate(ids) if each % count == table.server]
            rows = [ids[n] // count for n in here]
            table.apply(optimizer, optimizer.param_groups[0], sparse(rows, values[here]))

    def make(num_servers: int) -> list[tuple[EmbeddingTable, torch.optim.Optimizer]]:
        stand_in = torch.nn.Parameter(torch.zeros(1))
        return [(table, torch.optim.Adam([stand_in], lr=0.1)) for table in tables(num_servers)]

    def whole(those: list[tuple[EmbeddingTable, torch.optim.Optimizer]]) -> torch.Tensor:
        found = torch.empty(40, 3, dtype=torch.float64)
        for table, _ in those:
            count = table.spec.num_servers
            found[table.server :: count] = table.look_up(torch.arange(table.spec.rows_on(table.server)))
        return found

    through = make(1)
    before, after = make(3), make(2)
    for seed in range(6):
        step(through, seed)
        step(before, seed)
    saved = join([table.save() for table, _ in before])
    for table, _ in after:
        table.load(split(saved, table.server, 2))
    for seed in range(6, 12):
        step(through, seed)
        step(after, seed)
    torch.testing.assert_close(whole(after), whole(through), rtol=1e-12, atol=1e-14)


def test_a_table_of_a_thousand_million_rows_holds_those_that_were_touched() -> None:
    spec = dataclasses.replace(SPEC, num_rows=10**9, width=16, dtype=torch.float32)
    table = EmbeddingTable(spec, 0)
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    for seed in range(20):
        rows = torch.randint(0, 10**9, (100,), generator=torch.Generator().manual_seed(seed)).unique().tolist()
        table.apply(optimizer, optimizer.param_groups[0], sparse(rows, torch.ones(len(rows), 16), 10**9))
    assert len(table) <= 2000 and len(table._rows) <= 4096
    table.look_up(torch.randint(0, 10**9, (100,)))
    assert len(table) <= 2000


# -- inside the state machine ----------------------------------------------------------------------------------------


def make_server(rules: Rules, num_workers: int) -> ServerState:
    stand_in, dense = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizers = [torch.optim.SGD([stand_in, dense], lr=1.0)]
    (part,) = cut([stand_in, dense], optimizers, 1, 1024, frozenset(), {0: SPEC}).parts
    assert [chunk.table is not None for chunk in part.chunks] == [False, True]
    memory = BlockMemory(len(part.blocks), part.num_bytes)
    server = ServerState(ParameterStore(part, memory, [stand_in, dense], optimizers), rules)
    for worker in range(num_workers):
        server.join(worker)
    return server


def push(server: ServerState, worker: int, step: int, rows: list[int], value: float, weight: float = 1.0) -> list[int]:
    """The chunks that may be read, of any worker."""
    out = server.handle(worker, BeginStep(step, 0, 2, weight=weight, total=weight))
    out += server.handle(worker, Push(step, 0, [0]), [torch.zeros(4, dtype=torch.float64)])
    gradient = sparse(rows, torch.full((len(rows), 3), value, dtype=torch.float64))
    out += server.handle(worker, Push(step, 1, [0]), [gradient])
    return [ready.chunk for _, ready in out]


def test_in_sync_a_table_gets_the_weighted_mean_once_all_gradients_are_in() -> None:
    server = make_server(Rules(), 2)
    chunk, first = server.store.part.chunks[1], initial(SPEC, ALL)
    assert push(server, 0, 0, [1, 2], 1.0, weight=0.5) == []
    version, found = server.store.look_up(chunk, ALL)
    assert version == 0 and torch.equal(found, first)
    assert sorted(push(server, 1, 0, [2, 3], 1.0, weight=1.5)) == [0, 0, 1, 1]
    first[1] -= 0.25
    first[2] -= 1.0
    first[3] -= 0.75
    version, found = server.store.look_up(chunk, ALL)
    assert version == 1 and torch.allclose(found, first)


def test_in_async_a_table_gets_each_gradient_as_it_comes_and_in_ssp_its_worker_waits() -> None:
    for rules, answered in ((Rules(mode="async"), [0, 1]), (Rules(mode="ssp", staleness=0), [])):
        server = make_server(rules, 2)
        for worker in range(2):
            server.handle(worker, EnterLoop())
        assert push(server, 0, 0, [1], 1.0) == answered
        version, found = server.store.look_up(server.store.part.chunks[1], torch.tensor([1]))
        assert version == 1 and torch.allclose(found, initial(SPEC, torch.tensor([1])) - 1)


def test_clip_norm_counts_the_rows_of_tables() -> None:
    server = make_server(Rules(clip_norm=1.0), 1)
    push(server, 0, 0, [1], 3.0)
    _, found = server.store.look_up(server.store.part.chunks[1], torch.tensor([1]))
    assert float((found - initial(SPEC, torch.tensor([1]))).norm()) == pytest.approx(1.0, abs=1e-5)
