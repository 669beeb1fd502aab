"""Sparse tables under ps: nn.Embedding(sparse=True) and EmbeddingBag train as in plain PyTorch; only rows travel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import ranks
from hora.errors import HoraError
from hora.server.block_memory import BlockMemory
from hora.server.layout import cut
from hora.server.messages import ChunkReady
from hora.server.rows import checked, compensate_delay, from_bytes, to_bytes, weighted_sum
from hora.server.store import ParameterStore
from hora.strategies.common.sync import LoopEvent
from trainings import building, fail, parameters_of, part, same, training, uneven

ROWS, WIDTH = 200, 4
SPLIT = "block_bytes=1024"  # 32 rows of four doubles: the table is seven blocks
LR = 2.0**-6


class Net(torch.nn.Module):
    """A sparse table under a small dense head; float64, so that only mistakes show."""

    def __init__(self, bag: str = "", sparse: bool = True) -> None:
        super().__init__()
        with building():
            self.table: torch.nn.Module = (
                torch.nn.EmbeddingBag(ROWS, WIDTH, mode=bag, sparse=sparse)
                if bag
                else torch.nn.Embedding(ROWS, WIDTH, sparse=sparse)
            )
            self.head = torch.nn.Linear(WIDTH, 3)
            self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        return self.head(torch.tanh(rows if rows.dim() == 2 else rows.mean(1)))


def ids(step: int, count: int = 12, among: int = ROWS) -> torch.Tensor:
    """The whole batch of a step: three ids per sample, some of them twice."""
    return torch.randint(0, among, (count, 3), generator=torch.Generator().manual_seed(step))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().sum(1).mean()


Make = Callable[[Net], list[torch.optim.Optimizer]]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=0.1)],
    "momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=0.1)],
    "sparse_adam": lambda net: [
        torch.optim.Adam(net.head.parameters(), lr=1e-2), torch.optim.SparseAdam(net.table.parameters(), lr=1e-2)
    ],
}  # fmt: skip


def script(
    optimizer: str, steps: int = 8, bag: str = "", share: Callable[[Any, torch.Tensor], torch.Tensor] = part,
    batches: Callable[[int], torch.Tensor] = ids,
) -> Callable[[Any], list[torch.Tensor]]:  # fmt: skip
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(bag)
        optimizers = OPTIMIZERS[optimizer](net)
        one.prepare(net, optimizers)
        for step in range(steps):
            loss_of(net, share(one, batches(step))).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return parameters_of(net)

    return run


# -- equal to plain PyTorch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["1", "2", "3", "1tcp", "3tcp"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sync_with_a_sparse_table_split_over_servers_equals_plain_pytorch(optimizer: str, servers: str) -> None:
    same(script(optimizer), f"ps:{SPLIT}/{servers}", size=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_of_one_block_equals_plain_pytorch(optimizer: str) -> None:
    same(script(optimizer), "ps", size=2)


@pytest.mark.parametrize("bag", ["sum", "mean"])
@pytest.mark.parametrize("servers", ["1", "2tcp"])
def test_embedding_bag_equals_plain_pytorch(bag: str, servers: str) -> None:
    same(script("adagrad", bag=bag), f"ps:{SPLIT}/{servers}")


def test_workers_with_uneven_batches_equal_plain_pytorch() -> None:
    same(script("sparse_adam", share=uneven), f"ps:{SPLIT}/2", size=3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_blocks_that_a_batch_does_not_touch_count_its_step_as_plain_pytorch_does(optimizer: str) -> None:
    def batches(step: int) -> torch.Tensor:
        return ids(step, among=20) + (0 if step % 3 else 150)  # one block of seven at a time

    same(script(optimizer, batches=batches), f"ps:{SPLIT}/2")


def test_clip_norm_counts_the_rows_of_a_sparse_table() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(sparse=one.size > 1)  # plain PyTorch has no norm of a sparse gradient
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(5):
            loss_of(net, part(one, ids(step))).backward()
            if one.size == 1:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(net)

    same(run, f"ps:clip_norm=0.5,{SPLIT}/2", rtol=1e-5)


def test_backwards_that_pile_up_before_a_step_add_up() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(4):
            for number in range(2):
                loss_of(net, part(one, ids(2 * step + number))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(net)

    same(run, f"ps:{SPLIT}/2")


def test_an_accumulation_of_sparse_gradients_alone_that_was_given_up_counts_no_more() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        with building():
            table = torch.nn.Embedding(ROWS, WIDTH, sparse=True).double()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        one.prepare(table, optimizer)
        for step in range(4):
            if step % 2 == 0:
                table(part(one, ids(100 + step))).square().mean().backward()
                optimizer.zero_grad(set_to_none=step == 0)
            table(uneven(one, ids(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(table)

    same(run, f"ps:{SPLIT}", size=3)


@pytest.mark.parametrize("servers", ["1", "2", "2tcp"])
def test_with_backups_all_workers_read_the_same_rows_in_the_end(servers: str) -> None:
    same(script("adagrad"), f"ps:backup=1,{SPLIT}/1{'tcp' * servers.endswith('tcp')}", size=1)

    def run(one: Any) -> list[torch.Tensor]:
        net = Net()
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(8):
            loss_of(net, part(one, ids(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        one.sync.join(LoopEvent.FINISHED)
        one.sync.home.barrier("all have done their steps")
        one.sync.join(LoopEvent.FINISHED)
        return parameters_of(net)

    first, *others = ranks.run(3, lambda group: run(training(group, f"ps:backup=1,{SPLIT}/{servers}")))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# -- asynchronous ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["mode=async", "mode=ssp,staleness=1", "mode=async,correct=dc,dc_lambda=0", "mode=async,sync_every=2"]
)
@pytest.mark.parametrize("servers", ["1", "2", "2tcp"])
def test_no_row_is_lost_when_nobody_waits(mode: str, servers: str) -> None:
    """The gradients are whole numbers that do not depend on the table, so their sum is exact in any order."""

    def run(one: Any) -> torch.Tensor:
        with building():
            table = torch.nn.Embedding(ROWS, WIDTH, sparse=True).double()
        with torch.no_grad():
            table.weight.zero_()
        optimizer = torch.optim.SGD(table.parameters(), lr=LR)
        one.prepare(table, optimizer)
        for step in range(6):
            table(ids(10 * one.rank + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        one.sync.join(LoopEvent.FINISHED)
        one.sync.home.barrier("all have done their steps")
        one.sync.join(LoopEvent.FINISHED)  # reads what the others did since
        return table.weight.detach().clone()

    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank in range(3):
        for step in range(6):
            expected.index_add_(0, ids(10 * rank + step).view(-1), torch.full((36, WIDTH), -LR, dtype=torch.float64))
    for found in ranks.run(3, lambda group: run(training(group, f"ps:{mode},{SPLIT}/{servers}"))):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_async_of_one_worker_equals_plain_pytorch(optimizer: str) -> None:
    same(script(optimizer), f"ps:mode=async,{SPLIT}/1tcp", size=1)


def test_prefetch_with_a_sparse_table_reads_every_row_in_the_end() -> None:
    def run(one: Any) -> torch.Tensor:
        with building():
            table = torch.nn.Embedding(ROWS, WIDTH, sparse=True).double()
        first = table.weight.detach().clone()
        optimizer = torch.optim.SGD(table.parameters(), lr=LR)
        one.prepare(table, optimizer)
        for step in range(6):
            table(ids(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        one.sync.join(LoopEvent.FINISHED)
        return table.weight.detach() - first

    (found,) = ranks.run(1, lambda group: run(training(group, f"ps:mode=async,prefetch=true,{SPLIT}")))
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for step in range(6):
        expected.index_add_(0, ids(step).view(-1), torch.full((36, WIDTH), -LR, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# -- only rows travel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["1", "1tcp"])
def test_rows_that_nobody_touched_are_never_sent(servers: str) -> None:
    steps, touched, row_bytes = 5, 7, WIDTH * 8 + 8  # a row and its number

    def run(one: Any) -> tuple[int, int, int, int]:
        with building():
            table = torch.nn.Embedding(50_000, WIDTH, sparse=True).double()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        one.prepare(table, optimizer)
        one.sync.home.barrier("all have read the whole table")
        before = json.loads(one.sync.stats()[0])
        lines = one.sync._client.connections[0].sockets
        sent = sum(line.sent_bytes for line in lines)
        one.sync.home.barrier("all have asked")
        for step in range(steps):
            table(torch.arange(touched) * 1000 + step + 100 * one.rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        one.sync.home.barrier("all have done their steps")
        after = json.loads(one.sync.stats()[0])
        grown = [after[key] - before[key] for key in ("bytes_in", "bytes_out")]
        return one.sync.traffic.sent_bytes, *grown, sum(line.sent_bytes for line in lines) - sent

    for sent, came, went, over_the_line in ranks.run(2, lambda group: run(training(group, f"ps/{servers}"))):
        assert sent == steps * touched * row_bytes
        assert came == 2 * steps * touched * row_bytes  # from two workers
        assert went == 2 * 2 * steps * touched * row_bytes  # both workers' rows to both
        assert over_the_line == (steps * touched * WIDTH * 8 if servers.endswith("tcp") else 0)


def test_momentum_moves_rows_that_this_batch_did_not_touch_and_workers_get_them_alone() -> None:
    def run(one: Any) -> tuple[list[torch.Tensor], int]:
        with building():
            table = torch.nn.Embedding(2000, WIDTH, sparse=True).double()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
        one.prepare(table, optimizer)
        before = json.loads(one.sync.stats()[0])["bytes_out"]
        for step in range(5):
            table(torch.tensor([step])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(table), json.loads(one.sync.stats()[0])["bytes_out"] - before

    ((_, told),) = ranks.run(1, lambda group: run(training(group, "ps")))
    assert told == sum(range(1, 6)) * (WIDTH * 8 + 8)


class Tables:
    """One server's desk with a table of five rows, and what a worker was lent of it."""

    def __init__(self) -> None:
        own = [torch.nn.Parameter(torch.zeros(5, 2))]
        optimizers = [torch.optim.SGD(own, lr=1.0)]
        (self.part,) = cut(own, optimizers, 1, 1024, frozenset({0})).parts
        self.store = ParameterStore(self.part, BlockMemory(1, self.part.num_bytes), own, optimizers)
        self.store.join(0)
        self.copy = torch.zeros(10)
        self.store.set_copy(0, [self.copy])

    def push(self, rows: list[int]) -> None:
        gradient = torch.sparse_coo_tensor([rows], torch.ones(len(rows), 2), (5, 2), check_invariants=True)
        self.store.apply(self.part.chunks[0], [gradient], None)


def test_of_a_table_only_the_changed_rows_are_copied_for_a_worker() -> None:
    tables = Tables()
    tables.store.answer(0, [ChunkReady(0, 0, [])])
    tables.copy.fill_(7)  # what is not copied stays
    tables.push([1, 3])
    ((_, ready),) = tables.store.answer(0, [ChunkReady(1, 0, [])])
    assert from_bytes(ready.rows[0]).tolist() == [1, 3]
    assert tables.copy.view(5, 2)[:, 0].tolist() == [7, -1, 7, -1, 7]


def test_delay_compensation_shifts_the_rows_of_a_late_gradient_as_it_does_a_dense_one() -> None:
    now, then, dense = (torch.randn(5, 2, generator=torch.Generator().manual_seed(n)) for n in range(3))
    dense[[0, 2, 4]] = 0
    shifted = compensate_delay(dense.to_sparse(1), now, then, 0.5)
    torch.testing.assert_close(shifted.to_dense(), dense + 0.5 * dense * dense * (now - then))
    assert shifted.indices().tolist() == [[1, 3]]


def test_a_gradient_without_rows_makes_a_version_and_no_news() -> None:
    tables = Tables()
    tables.store.answer(0, [ChunkReady(0, 0, [])])
    tables.push([])
    ((_, ready),) = tables.store.answer(0, [ChunkReady(1, 0, [])])
    assert ready.versions == [1] and ready.rows == [b""]


# -- dense gradients of sparse tables --------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """The head's weight is the table: its gradient is dense wherever the head is used."""

    def __init__(self) -> None:
        super().__init__()
        with building():
            self.table = torch.nn.Embedding(ROWS, WIDTH, sparse=True).double()

    def forward(self, batch: torch.Tensor, head: bool = True) -> torch.Tensor:
        rows = self.table(batch).mean(1)
        return rows @ self.table.weight.t() if head else rows


def tied(optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer], head: Callable[[Any], bool]) -> Any:
    def run(one: Any) -> list[torch.Tensor]:
        net = Tied()
        chosen = optimizer(net.parameters())
        one.prepare(net, chosen)
        for step in range(5):
            (net(part(one, ids(step)), head(one)) - 1).square().sum(1).mean().backward()
            chosen.step()
            chosen.zero_grad()
        return parameters_of(net)

    return run


@pytest.mark.parametrize("servers", ["1", "2tcp"])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-2),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ],
    ids=["momentum", "adagrad", "adam"],
)
def test_a_tied_table_has_a_dense_gradient_and_equals_plain_pytorch(optimizer: Any, servers: str) -> None:
    same(tied(optimizer, lambda one: True), f"ps:{SPLIT}/{servers}")


def test_dense_and_sparse_gradients_of_one_table_add_up() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        """Rank 0 uses the head, rank 1 does not; plain PyTorch has the mean of both halves."""
        net = Tied()
        chosen = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, chosen)
        for step in range(5):
            halves = ids(step).chunk(2)
            for rank in range(2) if one.size == 1 else [one.rank]:
                loss = (net(halves[rank], (rank + step) % 2 == 0) - 1).square().sum(1).mean()
                (loss / 2 if one.size == 1 else loss).backward()
            chosen.step()
            chosen.zero_grad()
        return parameters_of(net)

    same(run, f"ps:{SPLIT}/2")


def test_half_precision_gradients_of_rows_are_rounded_once() -> None:
    rows = torch.tensor([[0, 2]])
    values = [torch.full((2, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    given = [(torch.sparse_coo_tensor(rows, each, (3, 1), check_invariants=True), 1.0) for each in values]
    assert weighted_sum(given).dtype is torch.bfloat16
    assert weighted_sum(given).to_dense().view(-1).tolist() == [258, 0, 258]
    dense = (torch.ones(3, dtype=torch.bfloat16), 2.0)
    assert weighted_sum([*given, dense]).tolist() == [260, 2, 260]


# -- refused ---------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_takes_no_sparse_gradient_is_named_with_the_remedy() -> None:
    def run(one: Any) -> None:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters())
        one.prepare(net, optimizer)
        loss_of(net, part(one, ids(0))).backward()
        optimizer.step()

    for error in fail(run, "ps"):
        assert "table.weight is sparse, and AdamW takes dense ones only" in error and "SparseAdam" in error


def test_a_dense_gradient_for_sparse_adam_is_refused() -> None:
    run = tied(lambda p: torch.optim.SparseAdam(list(p), lr=0.1), lambda one: True)
    for error in fail(run, "ps"):
        assert "SparseAdam does not support dense gradients" in error


def test_max_norm_which_writes_in_forward_is_refused() -> None:
    def run(one: Any) -> None:
        table = torch.nn.Embedding(ROWS, WIDTH, max_norm=1.0)
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))

    for error in fail(run, "ps"):
        assert "max_norm=1" in error and "forward writes" in error


@pytest.mark.parametrize("rows", [[-1], [5], [1, 1], [2, 1]])
def test_rows_that_are_not_there_or_not_in_order_are_refused(rows: list[int]) -> None:
    with pytest.raises(HoraError, match="rows"):
        checked(to_bytes(torch.tensor(rows)), 5)
    with pytest.raises(HoraError, match="bytes"):
        from_bytes(b"123")


# -- around it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "sparse_adam"])
def test_a_snapshot_goes_on_with_another_number_of_servers(optimizer: str) -> None:
    def run(one: Any, found: Any, steps: range) -> Any:
        net = Net()
        optimizers = OPTIMIZERS[optimizer](net)
        one.prepare(net, optimizers)
        if found is not None:
            one.sync.restore(found)
        for step in steps:
            loss_of(net, part(one, ids(step))).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return parameters_of(net), one.sync.snapshot()

    ((_, found), *_) = ranks.run(3, lambda group: run(training(group, f"ps:{SPLIT}/3"), None, range(4)))
    again = ranks.run(2, lambda group: run(training(group, f"ps:{SPLIT}/1"), found, range(4, 8)))
    expected = same(script(optimizer), f"ps:{SPLIT}", size=1)
    for mine, _ in again:
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_rows_travel_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", absent)
    same(script("sgd", steps=3), f"ps:{SPLIT}/2tcp")
