"""hora.ServerEmbedding: trains as nn.Embedding does, with no table on any worker, on any number of servers."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hora
import ranks
from hora.data import shard
from hora.errors import HoraError
from hora.server.embedding_table import initial
from hora.server.messages import Lookup, Push
from hora.server.rows import to_bytes
from hora.strategies.common.sync import LoopEvent
from hora.training import Training, checkpointing
from trainings import Plain, building, fail, part, same, training, uneven

ROWS, WIDTH = 50, 4
LR = 2.0**-6


def server_embedding(num_rows: int = ROWS, **options: Any) -> hora.ServerEmbedding:
    return hora.ServerEmbedding(num_rows, WIDTH, **{"dtype": torch.float64, "seed": 3, **options})


class Net(torch.nn.Module):
    """In plain PyTorch the table is an nn.Embedding with the same first rows."""

    def __init__(self, one: Any) -> None:
        super().__init__()
        with building():
            self.head = torch.nn.Linear(WIDTH, 3).double()
        self.table: torch.nn.Module = server_embedding()
        if isinstance(one, Plain):
            rows = initial(server_embedding().spec(0, 1), torch.arange(ROWS))
            self.table = torch.nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(ids)).mean(1))

    def values(self) -> list[torch.Tensor]:
        """Its parameters, the whole table among them."""
        with torch.no_grad():
            return [self.table(torch.arange(ROWS)).clone(), *(p.detach().clone() for p in self.head.parameters())]


def ids(step: int, count: int = 12) -> torch.Tensor:
    return torch.randint(0, ROWS, (count, 3), generator=torch.Generator().manual_seed(step))


def loss_of(net: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch) - 1).square().sum(1).mean()


Make = Callable[[Net], list[torch.optim.Optimizer]]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=0.1)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1)],
    "sparse_adam": lambda net: [
        torch.optim.AdamW(net.head.parameters(), lr=1e-2), torch.optim.SparseAdam(net.table.parameters(), lr=1e-2)
    ],
    "groups": lambda net: [
        torch.optim.SGD([{"params": net.table.parameters(), "lr": 0.5}, {"params": net.head.parameters()}], lr=0.1)
    ],
}  # fmt: skip


def script(optimizer: str, steps: int = 8, share: Callable[..., torch.Tensor] = part) -> Any:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        optimizers = OPTIMIZERS[optimizer](net)
        one.prepare(net, optimizers)
        for step in range(steps):
            loss_of(net, share(one, ids(step))).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return net.values()

    return run


# -- equal to plain PyTorch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["1", "2", "3", "3tcp"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sync_equals_nn_embedding_in_plain_pytorch(optimizer: str, servers: str) -> None:
    same(script(optimizer), f"ps/{servers}", size=3)


def test_uneven_batches_equal_plain_pytorch() -> None:
    same(script("adagrad", share=uneven), "ps/2", size=3)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_worker_equals_plain_pytorch(mode: str) -> None:
    same(script("sparse_adam"), f"ps:mode={mode}", size=1)


def test_adam_is_lazy_as_sparse_adam_is() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        kind = torch.optim.SparseAdam if isinstance(one, Plain) else torch.optim.Adam
        optimizers = [
            kind(net.table.parameters(), lr=1e-2, eps=1e-20),  # which the two add in different places
            torch.optim.Adam(net.head.parameters(), lr=1e-2),
        ]
        one.prepare(net, optimizers)
        for step in range(8):
            loss_of(net, part(one, ids(step, 4))).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        return net.values()

    same(run, "ps/2", rtol=1e-8)


def test_several_forwards_and_backwards_before_a_step_add_up() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(4):
            first, second = (part(one, ids(3 * step + n)) for n in range(2))
            (loss_of(net, first) + loss_of(net, second)).backward()
            loss_of(net, part(one, ids(3 * step + 2))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.values()

    same(run, "ps/2")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_cleared_are_not_applied(set_to_none: bool) -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(4):
            loss_of(net, part(one, ids(100 + step))).backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(net, part(one, ids(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return net.values()

    same(run, "ps/2")


def test_clipping_counts_and_scales_the_rows() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        if isinstance(one, Plain):
            net.table.sparse = False  # plain PyTorch has no norm of a sparse gradient
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(5):
            loss_of(net, ids(step)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        return net.values()

    same(run, "ps/1", size=1)
    same(run, "ps/2", size=2)  # both have the same batch, so each clips the same


def test_servers_clip_the_mean_with_its_rows() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        if isinstance(one, Plain):
            net.table.sparse = False
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        for step in range(5):
            loss_of(net, part(one, ids(step))).backward()
            if isinstance(one, Plain):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
        return net.values()

    same(run, "ps:clip_norm=0.3/2")


def test_a_model_of_nothing_but_a_table_trains() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        table = Net(one).table
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        one.prepare(table, optimizer)
        for step in range(4):
            (table(part(one, ids(step))) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return [table(torch.arange(ROWS)).clone()]

    same(run, "ps/2")


def test_workers_without_samples_in_a_batch_and_one_process_alone_train_the_same() -> None:
    def run(one: Any) -> list[torch.Tensor]:
        net = Net(one)
        optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        loader = shard(list(ids(0, 25)), one, global_batch=12, shuffle=True, seed=3)  # a last batch of one sample
        one.adopt(loader)
        for _ in one.epochs(2):
            for batch in loader:
                loss_of(net, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return net.values()

    (expected,) = ranks.run(1, lambda group: run(training(group, "ps")))
    for found in ranks.run(3, lambda group: run(training(group, "ps/2"))):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# -- where rows are --------------------------------------------------------------------------------------------------


def test_a_table_of_a_thousand_million_rows_trains_since_only_touched_rows_exist() -> None:
    def run(one: Any) -> tuple[int, int]:
        table = hora.ServerEmbedding(10**9, 16)
        optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
        one.prepare(table, optimizer)
        for step in range(5):
            batch = torch.randint(0, 10**9, (100,), generator=torch.Generator().manual_seed(10 * step + one.rank))
            (table(batch) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sum(p.numel() for p in table.parameters()) == 1
        saved = one.sync.snapshot().states[0]["rows"]
        return len(saved["ids"]), json.loads(one.sync.stats()[0])["load_bytes"]

    for num_rows, load_bytes in ranks.run(2, lambda group: run(training(group, "ps/2"))):
        assert 990 <= num_rows <= 1000 and load_bytes == 0


def test_rows_are_the_same_on_any_number_of_servers() -> None:
    def run(one: Any) -> torch.Tensor:
        table = server_embedding(10**9)
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        with torch.no_grad():
            return table(torch.tensor([[0, 10**9 - 1], [77, 10**8]]))

    (one,) = ranks.run(1, lambda group: run(training(group, "ps")))
    for found in ranks.run(3, lambda group: run(training(group, "ps/3"))):
        assert found.shape == (2, 2, WIDTH) and torch.equal(found, one)


def test_looking_up_without_gradients_makes_no_row() -> None:
    def run(one: Any) -> int:
        table = server_embedding()
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        one.prepare(table, optimizer)
        with torch.no_grad():
            table(torch.arange(ROWS))
        assert table(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, WIDTH)
        table(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
        return len(one.sync.snapshot().states[0]["rows"]["ids"])

    assert ranks.run(1, lambda group: run(training(group, "ps"))) == [2]


def test_only_the_rows_of_a_batch_travel() -> None:
    def run(one: Any) -> tuple[int, int, int]:
        table = server_embedding(10**6)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        one.prepare(table, optimizer)
        before = json.loads(one.sync.stats()[0])
        for step in range(3):
            table(torch.tensor([step, 7, 7, 9])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after = json.loads(one.sync.stats()[0])
        return (one.sync.traffic.sent_bytes, *(after[key] - before[key] for key in ("bytes_in", "bytes_out")))

    assert ranks.run(1, lambda group: run(training(group, "ps"))) == [(9 * (WIDTH + 1) * 8,) * 2 + (9 * WIDTH * 8,)]


# -- asynchronous ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode", ["mode=async", "mode=async,prefetch=true", "mode=ssp,staleness=1", "mode=async,sync_every=2"]
)
@pytest.mark.parametrize("servers", ["1", "2", "2tcp"])
def test_no_gradient_is_lost_when_nobody_waits(mode: str, servers: str) -> None:
    """They are whole numbers that do not depend on the table, so their sum is exact in any order."""

    def run(one: Training) -> torch.Tensor:
        table = server_embedding(init="zeros")
        optimizer = torch.optim.SGD(table.parameters(), lr=LR)
        one.prepare(table, optimizer)
        for step in range(6):
            table(ids(10 * one.rank + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert one.sync is not None
        one.sync.join(LoopEvent.FINISHED)
        one.sync.home.barrier("all have done their steps")
        with torch.no_grad():
            found = table(torch.arange(ROWS)).clone()
        one.sync.home.barrier("all have read")
        return found

    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for rank in range(2):
        for step in range(6):
            batch = ids(10 * rank + step).view(-1)
            expected.index_add_(0, batch, torch.full((len(batch), WIDTH), -LR, dtype=torch.float64))
    for found in ranks.run(2, lambda group: run(training(group, f"ps:{mode}/{servers}"))):
        assert torch.equal(found, expected)


# -- refused ---------------------------------------------------------------------------------------------------------


def test_ids_that_are_not_there_are_named() -> None:
    def run(one: Any) -> None:
        table = server_embedding()
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        for wrong in (-1, ROWS):
            with pytest.raises(IndexError, match=f"id {wrong} .* 0 to {ROWS - 1}"):
                table(torch.tensor([0, wrong]))
        with pytest.raises(TypeError, match="float32"):
            table(torch.tensor([0.5]))

    ranks.run(1, lambda group: run(training(group, "ps")))


def test_it_needs_servers() -> None:
    def run(one: Any) -> None:
        table = server_embedding()
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))

    for error in fail(run, "ring"):
        assert "a ServerEmbedding needs servers, which have its rows: say --strategy ps" in error
    for table in (server_embedding(), copy.deepcopy(server_embedding())):
        with pytest.raises(HoraError, match=r"after job\.prepare"):
            table(torch.tensor([1]))


class Mine(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("strategy", "kind", "said"),
    [
        ("ps", Mine, "in Mine, which is not known to update rows independently"),
        ("ps", torch.optim.Rprop, "in Rprop, which is not known"),
        ("ps", None, "is in no optimizer"),
        ("ps:backup=1", torch.optim.SGD, "backup needs a copy of the parameters that a worker has pulled"),
        ("ps:mode=async,correct=dc", torch.optim.SGD, "correct=dc needs a copy"),
    ],
)
def test_what_does_not_go_together_is_said_at_prepare(strategy: str, kind: Any, said: str) -> None:
    def run(one: Any) -> None:
        net = Net(one)
        chosen = kind(net.parameters(), lr=0.1) if kind else torch.optim.SGD(net.head.parameters(), lr=0.1)
        one.prepare(net, chosen)

    for error in fail(run, strategy):
        assert said in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_embeddings": 0}, "1 and more"),
        ({"init": "xavier"}, "there are: normal, uniform, zeros"),
        ({"scale": float("nan")}, "finite"),
        ({"seed": 1 << 63}, "64 bits"),
    ],
)
def test_what_it_cannot_be_made_of_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hora.ServerEmbedding(**{"num_embeddings": 5, "embedding_dim": 2, **options})


def test_workers_that_disagree_about_a_table_are_told() -> None:
    def run(one: Any) -> None:
        table = server_embedding(seed=one.rank)
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))

    assert any("differ" in error for error in fail(run, "ps"))


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def run(one: Any) -> None:
        net = Net(one)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.prepare(net, optimizer)
        (net.table(torch.tensor([1])) * float("inf")).sum().backward()
        optimizer.step()

    for error in fail(run, "ps", size=1):
        assert "the gradient of table.rows" in error and "not finite" in error


def raw(message: Any, payload: torch.Tensor | None = None) -> Callable[[Any], None]:
    """Says this to the server, past all checks of a worker."""

    def run(one: Any) -> None:
        table = server_embedding()
        one.prepare(table, torch.optim.SGD(table.parameters(), lr=0.1))
        client = one.sync._client
        client.connections[0].sockets[0].send(message, payload)
        client.get_blob(0, "stats")

    return run


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Lookup(1, 5, b""), None),
        (Lookup(1, -1, b""), None),
        (Lookup(1, 0, b"123"), None),
        (Lookup(1, 0, to_bytes(torch.tensor([ROWS]))), None),
        (Lookup(1, 0, to_bytes(torch.tensor([2, 1]))), None),
        (Push(0, 0, [0], None, [to_bytes(torch.tensor([1]))]), None),
        (Push(0, 0, [0], None, [to_bytes(torch.tensor([1]))]), torch.zeros(WIDTH + 1, dtype=torch.float64)),
        (Push(0, 0, [0], None, [to_bytes(torch.tensor([ROWS]))]), torch.zeros(WIDTH, dtype=torch.float64)),
        (Push(0, 0, [0], None, None), torch.zeros(WIDTH, dtype=torch.float64)),
        (Push(0, 0, [0, 0], None, [b""]), None),
        (Push(0, 0, [0], [True], []), None),
    ],
)
def test_a_server_refuses_what_does_not_fit_its_table(message: Any, payload: torch.Tensor | None) -> None:
    (error,) = fail(raw(message, payload), "ps", size=1)
    assert "refused this worker" in error or "lost server 0" in error


# -- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adagrad", "sparse_adam"])
def test_a_checkpoint_goes_on_with_another_number_of_servers(optimizer: str, tmp_path: pathlib.Path) -> None:
    def run(one: Any, steps: range, restored: bool) -> list[torch.Tensor]:
        net = Net(one)
        optimizers = OPTIMIZERS[optimizer](net)
        one.prepare(net, optimizers)
        if restored:
            assert checkpointing.restore(one, one.sync.home, str(tmp_path)) == 4
        for step in steps:
            loss_of(net, part(one, ids(step))).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        if not restored:
            checkpointing.save(one, one.sync.home, str(tmp_path), "ps", 2)
        return net.values()

    ranks.run(3, lambda group: run(training(group, "ps/3"), range(4), False))
    expected = script(optimizer)(Plain())
    for found in ranks.run(2, lambda group: run(training(group, "ps/2"), range(4, 8), True)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
