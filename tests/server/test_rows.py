"""Sparse chunks: only rows that were touched travel."""

from __future__ import annotations

import collections
import random

import pytest
import torch
from simulation import LR, whole_numbers

from hora.server.block_memory import BlockMemory
from hora.server.layout import BlockLayout, Chunk, cut
from hora.server.messages import BeginStep, ChunkReady, EnterLoop, Push
from hora.server.rows import RowLog
from hora.server.state import Rules, ServerState
from hora.server.store import ParameterStore

NUM_ROWS, WIDTH = 50, 4


def make(rules: Rules, num_servers: int = 1) -> tuple[torch.nn.Parameter, BlockLayout, list[ServerState]]:
    """A sparse table of fifty rows, eight in a block, and a dense parameter."""
    dice = random.Random(0)
    table = torch.nn.Parameter(whole_numbers((NUM_ROWS, WIDTH), dice))
    servers = []
    for number in range(num_servers):
        own = [torch.nn.Parameter(table.detach().clone()), torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))]
        optimizers = [torch.optim.SGD(own, lr=LR)]
        layout = cut(own, optimizers, num_servers, 256, frozenset({0}))
        part = layout.parts[number]
        store = ParameterStore(part, BlockMemory(len(part.blocks), part.num_bytes), own, optimizers)
        for chunk in part.chunks:
            store.fill(chunk, [own[b.index].detach().reshape(-1)[b.start : b.stop] for b in chunk.blocks])
        servers.append(ServerState(store, rules, number=number, num_servers=num_servers))
    return table, layout, servers


def sparse(chunk: Chunk, gradient: torch.Tensor) -> torch.Tensor:
    """The rows of this block in which the gradient of the table is not zero."""
    block = chunk.blocks[0]
    mine = gradient.reshape(-1)[block.start : block.stop].view(-1, WIDTH)
    rows = mine.any(1).nonzero().view(1, -1)
    return torch.sparse_coo_tensor(rows, mine[rows[0]], mine.shape, check_invariants=False)


def some_rows(dice: random.Random, num_rows: int = 6) -> torch.Tensor:
    gradient = torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64)
    for row in dice.sample(range(NUM_ROWS), num_rows):
        gradient[row] = whole_numbers((WIDTH,), dice)
    return gradient


def named(ready: ChunkReady) -> list[int]:
    assert ready.rows is not None and len(ready.rows) == 1
    return torch.frombuffer(bytearray(ready.rows[0]), dtype=torch.int64).tolist() if ready.rows[0] else []


@pytest.mark.parametrize("seed", range(30))
def test_ready_names_exactly_the_rows_changed_since_that_worker_was_last_answered(seed: int) -> None:
    dice = random.Random(seed)
    table, layout, (server,) = make(Rules(mode="async"))
    expected = table.detach().clone()
    chunks = layout.parts[0].chunks
    assert sum(chunk.row_numel == WIDTH for chunk in chunks) == 7 and all(
        len(p.blocks) == 1 for p in chunks if p.row_numel
    )
    news: dict[tuple[int, int], set[int] | None] = collections.defaultdict(lambda: None)  # None: all
    for worker in range(3):
        server.join(worker)
        server.handle(worker, EnterLoop())
    steps = [0, 0, 0]
    for _ in range(40):
        worker = dice.choice([0, 0, 1, 1, 2] if dice.random() < 0.8 else [0])
        gradient = some_rows(dice)
        server.handle(worker, BeginStep(steps[worker], 0, len(chunks)))
        for chunk in chunks:
            given = sparse(chunk, gradient) if chunk.row_numel else None
            touched = [] if given is None else given.coalesce().indices()[0].tolist()
            for other in range(3):
                before = news[other, chunk.number]
                if before is not None:
                    before |= set(touched)
            base = [server.store.version(chunk.blocks[0])]
            [(_, ready)] = server.handle(worker, Push(steps[worker], chunk.number, base), [given])
            if chunk.row_numel:
                changed = news[worker, chunk.number]
                all_rows = range(chunk.blocks[0].numel // WIDTH)
                assert named(ready) == sorted(all_rows if changed is None else changed)
            else:
                assert ready.rows is None
            news[worker, chunk.number] = set()
        expected -= LR * gradient
        steps[worker] += 1
    for chunk in chunks:
        if chunk.row_numel:
            block = chunk.blocks[0]
            assert torch.equal(server.store.flats[block.number], expected.reshape(-1)[block.start : block.stop])


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_the_mean_of_sparse_gradients_is_the_dense_one(num_servers: int, clip_norm: float | None) -> None:
    for seed in range(10):
        dice = random.Random(seed)
        table, layout, servers = make(Rules(clip_norm=clip_norm), num_servers)
        reference = torch.nn.Parameter(table.detach().clone())
        optimizer = torch.optim.SGD([reference], lr=LR)
        num_workers = dice.choice([1, 2, 4])
        for server in servers:
            for worker in range(num_workers):
                server.join(worker)
        for step in range(3):
            gradients = [some_rows(dice) for _ in range(num_workers)]
            talk = []
            for number, server in enumerate(servers):
                chunks = layout.parts[number].chunks
                for worker in range(num_workers):
                    out = server.handle(worker, BeginStep(step, 0, len(chunks)))
                    for chunk in chunks:
                        given = sparse(chunk, gradients[worker]) if chunk.row_numel else None
                        out += server.handle(worker, Push(step, chunk.number, [0] * len(chunk.blocks)), [given])
                    talk += [(number, to[1], message) for to, message in out if to[0] == "server"]
            while talk:
                source, target, message = talk.pop(0)
                out = servers[target].handle_server(source, message)
                talk += [(target, to[1], message) for to, message in out if to[0] == "server"]
            reference.grad = torch.stack(gradients).mean(0)
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([reference], clip_norm)
            optimizer.step()
        for server in servers:
            assert server.now == 3
            for block in server.store.part.blocks:
                if block.index == 0:
                    expected = reference.detach().reshape(-1)[block.start : block.stop]
                    assert torch.allclose(server.store.flats[block.number], expected, rtol=1e-12)


def test_the_log_of_rows_is_bounded_though_one_worker_is_never_answered_again() -> None:
    dice = random.Random(1)
    log = RowLog(20)
    last: dict[int, int] = {}
    for version in range(1, 400):
        rows = sorted(dice.sample(range(20), dice.randint(0, 5)))
        log.touch(torch.tensor(rows, dtype=torch.int64), version)
        last.update(dict.fromkeys(rows, version))
        assert len(log) <= 40
        asked = dice.randint(0, version)
        assert log.since(asked).tolist() == sorted(row for row, at in last.items() if at > asked)


def test_the_log_forgets_what_everybody_has_seen() -> None:
    log = RowLog(1000)
    for version in range(1, 100):
        log.touch(torch.tensor([version, version + 1]), version)
        log.forget(version - 2)
        assert len(log) <= 4 and log.since(version - 1).tolist() == [version, version + 1]


def test_one_that_joins_later_is_told_all_rows_and_one_that_left_is_not_kept_for() -> None:
    _, layout, (server,) = make(Rules(mode="async"))
    chunk = layout.parts[0].chunks[0]
    server.join(0)
    server.join(1)
    server.refresh(0, -1)
    server.refresh(1, -1)
    server.leave(1)
    dice = random.Random(0)
    for step in range(200):
        server.handle(0, BeginStep(step, 0, len(layout.parts[0].chunks)))
        for each in layout.parts[0].chunks:
            given = sparse(each, some_rows(dice)) if each.row_numel else None
            server.handle(0, Push(step, each.number, [0]), [given])
    assert all(len(log) <= log.num_rows for log in server.store._row_logs.values())
    server.join(2)
    first = next(ready for _, ready in server.refresh(2, -1) if ready.chunk == chunk.number)
    again = next(ready for _, ready in server.refresh(2, -2) if ready.chunk == chunk.number)
    assert named(first) == list(range(8)) and named(again) == []


def test_filling_a_table_changes_all_its_rows() -> None:
    _, layout, (server,) = make(Rules(mode="async"))
    chunk = layout.parts[0].chunks[0]
    server.join(0)
    server.refresh(0, -1)
    server.store.fill(chunk, [torch.ones(chunk.blocks[0].numel, dtype=torch.float64)])
    told = {ready.chunk: named(ready) for _, ready in server.refresh(0, -2) if ready.rows is not None}
    assert told.pop(chunk.number) == list(range(8)) and set(map(tuple, told.values())) == {()}
