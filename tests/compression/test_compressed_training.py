"""Training over a narrow wire between hosts: the same bits on every worker, close to full precision, and refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.compression.codec import BLOCK, make_codec
from hora.strategies import parse
from hora.strategies.common.sync import Snapshot
from rounds import SMALL, Replicas, diloco, even, uneven, work
from trainings import batch, building, fit, loss_of, mlp, net, parameters_of, part, training

CODECS = ("fp16", "bf16", "int8", "topk")
FAMILY = ("ring", "auto", "shared", "tree", "halving", "star")
HOSTS = ([0, 1, 2], [0, 0, 2, 2])


def run(hosts: list[int], script: Any, transport: str = "memory") -> list[Any]:
    return ranks.run(len(hosts), script, transport, hosts=hosts)


def assert_alike(found: list[list[torch.Tensor]]) -> None:
    """Bit for bit on every worker."""
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], other, strict=True))


def learn(group: Group, strategy: str, steps: int = 60) -> tuple[list[torch.Tensor], float, float]:
    """Which of three numbers is largest: the parameters at the end, and the loss over all samples then and before."""
    one, x = training(group, strategy), batch(0, count=96).float()
    y = x[:, :3].argmax(1)
    with building():
        model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    one.prepare(model, optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(part(one, x)), part(one, y)).backward()
        losses.append(torch.nn.functional.cross_entropy(model(x), y).item())
        optimizer.step()
    return parameters_of(model), losses[-1], losses[0]


def way(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return torch.cat([(a - b).view(-1) for a, b in zip(one, other, strict=True)]).norm().item()


# -- the all-reduce family -------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8", "topk,topk=0.1", "powersgd", "powersgd,rank=1"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_training_comes_as_far_as_in_full_precision(wire: str, hosts: list[int]) -> None:
    found = run(hosts, lambda group: learn(group, f"ring:wire={wire}"))
    full = run(hosts, lambda group: learn(group, "ring"))
    assert_alike([parameters for parameters, _, _ in found])
    assert not found[0][0][0].equal(full[0][0][0]), "nothing was compressed"
    (_, reached, _), (_, wanted, begin) = found[0], full[0]
    assert wanted < 0.3 * begin, "the problem is not learnt at all"
    assert reached < wanted + 0.1 * begin


@pytest.mark.parametrize("strategy", FAMILY)
def test_every_strategy_of_the_family_compresses(strategy: str) -> None:
    def script(group: Group) -> tuple[list[torch.Tensor], str]:
        one = training(group, f"{strategy}:wire=int8")
        return fit(one, steps=5), one.sync.describe().summary

    found = run([0, 0, 2], script)
    assert_alike([parameters for parameters, _ in found])
    assert found[0][1].startswith("wire=int8: ")


@pytest.mark.parametrize("wire", ["fp32", *CODECS])
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 2], [0, 1, 2]])
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_each_leader_sends_what_the_formula_says(wire: str, hosts: list[int], transport: str) -> None:
    """A model of whole blocks, in one bucket; besides it the workers send only what takes stock of a step."""
    num_hosts = len(set(hosts))
    numel, steps = 64 * 16 * num_hosts * 4, 4

    def script(group: Group) -> int:
        one = training(group, f"ring:wire={wire}")
        with building():
            model = torch.nn.Linear(64, numel // 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return one.sync.traffic.sent_bytes

    coded = make_codec(wire).num_bytes(numel)
    each = (num_hosts - 1) * coded if wire == "topk" else 2 * (num_hosts - 1) * coded // num_hosts
    found = run(hosts, script, transport)
    for rank, host in enumerate(hosts):
        if rank == host:
            assert found[rank] == steps * each, rank


def test_gradients_in_other_types_keep_theirs() -> None:
    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "ring:wire=int8"), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        return parameters_of(model)

    found = run([0, 1], script)
    assert_alike(found)
    assert found[0][0].dtype == torch.float64


@pytest.mark.parametrize("wire", [*CODECS, "powersgd"])
def test_a_gradient_that_is_not_finite_is_named_before_it_spoils_anything(wire: str) -> None:
    def script(group: Group) -> str:
        one, model = training(group, f"ring:wire={wire}"), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        try:
            for step in range(6):
                optimizer.zero_grad()
                loss = loss_of(model, part(one, batch(step)))
                (loss * (float("nan") if step == 4 and group.rank == 2 else 1.0)).backward()
                optimizer.step()
        except Exception as error:
            assert step == 4 and all(bool(p.isfinite().all()) for p in model.parameters())
            return str(error)
        return ""

    for said in run([0, 0, 2], script):
        assert "rank 2" in said and "is not finite" in said, said


class Slopes(torch.nn.Module):
    """Two matrices, each in a bucket of its own, whose gradients are the same in every step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.zeros(32, 32)) for _ in range(2))
        self.slopes = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(rank))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.first * self.slopes[0]).sum(), (self.second * self.slopes[1]).sum()


def descend(group: Group, wire: str, steps: int, spoilt: int = -1, restored: int = -1) -> list[torch.Tensor]:
    """`spoilt`: in this step the first gradient is not finite on the last rank. `restored`: before this step the run is
    put back to where it is."""
    one, model = training(group, f"ring:wire={wire},bucket_bytes=4096", on_nonfinite="skip"), Slopes(group.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    one.prepare(model, optimizer)
    for step in range(steps):
        if step == restored:
            kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            one.sync.restore(Snapshot(kept, {}, [{}]))
        first, second = model()
        spoil = step == spoilt and group.rank == group.size - 1
        (first * (float("nan") if spoil else 1.0) + second).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


@pytest.mark.parametrize("wire", [*CODECS, "powersgd,rank=1"])
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 2]])
def test_a_step_that_is_not_taken_pays_no_debts_of_any_bucket(wire: str, hosts: list[int]) -> None:
    found = run(hosts, lambda group: descend(group, wire, 8, spoilt=5))
    assert_alike(found)
    assert_alike([found[0], *run(hosts, lambda group: descend(group, wire, 7))])


@pytest.mark.parametrize("wire", ["topk", "powersgd,rank=1"])
def test_what_was_owed_is_forgotten_when_a_run_is_restored(wire: str) -> None:
    (once, *_), (again, *_) = (run([0, 1], lambda group, at=at: descend(group, wire, 6, restored=at)) for at in (-1, 3))
    (half, *_) = run([0, 1], lambda group: descend(group, wire, 3))
    assert not once[0].equal(again[0])
    for mine, whole in zip(half, again, strict=True):
        torch.testing.assert_close(whole, 2 * mine)


def test_a_parameter_that_is_spread_over_buckets_is_cut_into_whole_rows() -> None:
    def script(group: Group) -> tuple[list[torch.Tensor], str]:
        one = training(group, "ring:wire=powersgd,rank=1,bucket_bytes=1024")
        return fit(one, steps=40, width=40), one.sync.describe().summary

    found = run([0, 1], script)
    assert_alike([parameters for parameters, _ in found])
    assert "instead of" in found[0][1]


@pytest.mark.parametrize("strategy", ["ring:wire=int8", "local:every=2,wire=int8", "diloco:every=2,wire=int8"])
def test_on_one_host_a_wire_does_nothing_and_says_so(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = strategy.replace(",wire=int8", "").replace(":wire=int8", "")
    with caplog.at_level(logging.WARNING):
        found = run([0, 0], lambda group: work(group, strategy, 6))
    said = [record.message for record in caplog.records if "has no effect" in record.message]
    assert said == ["wire=int8 has no effect: all workers share one host, so nothing crosses a wire"]
    full = run([0, 0], lambda group: work(group, plain, 6))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found[0], full[0], strict=True))


# -- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(7)
@pytest.mark.parametrize("wire", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize(
    "strategy",
    ["diloco:every=4", "diloco:every=4,fragments=2", "diloco:every=4,overlap=2", "diloco:every=4,fragments=2,overlap=1",
     "diloco:every=4,warmup=3", "local:every=4", "local:every=4,warmup=3"],
)  # fmt: skip
@pytest.mark.parametrize("hosts", HOSTS)
def test_rounds_come_close_to_what_full_precision_gives(wire: str, strategy: str, hosts: list[int]) -> None:
    size = len(hosts)
    found = run(hosts, lambda g: work(g, f"{strategy},wire={wire}", 14, uneven(size)))
    full = run(hosts, lambda g: work(g, strategy, 14, uneven(size)))
    assert_alike(found)
    assert 0 < way(full[0], found[0]) < 0.05 * way(full[0], parameters_of(mlp(SMALL)))


@pytest.mark.parametrize("strategy", ["diloco:every=2,outer_lr=1.0,outer_momentum=0.0", "local:every=2"])
def test_topk_brings_the_rest_later(strategy: str) -> None:
    begin = parameters_of(mlp(SMALL))
    full = run([0, 1], lambda g: work(g, strategy, 80))
    found = run([0, 1], lambda g: work(g, f"{strategy},wire=topk,topk=0.2", 80))
    assert_alike(found)
    assert 0 < way(full[0], found[0]) < 0.3 * way(full[0], begin)


def test_feedback_carries_drifts_that_one_rounding_would_swallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose drift is a 500th of another's, in one block of int8: it arrives all the same, in time."""

    def script(group: Group) -> list[float]:
        one = training(group, "local:every=1,wire=int8")
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        one.prepare(model, optimizer)
        for _ in range(100):
            optimizer.zero_grad()
            (model.weight * torch.tensor([[1.0, 2e-3]])).sum().backward()
            optimizer.step()
        return model.weight.flatten().tolist()

    for large, small in run([0, 1], script):
        assert large == pytest.approx(-100.0, rel=0.01) and small == pytest.approx(-0.2, rel=0.1)
    monkeypatch.setattr("hora.compression.compressed_sum.is_finite", lambda total: False)  # then nothing new is owed
    assert all(small == 0.0 for _, small in run([0, 1], script)), "the test could not fail"


def test_checkpoints_cost_nothing_of_what_topk_owes() -> None:
    def script(group: Group, every: int) -> list[torch.Tensor]:
        one, model = training(group, "local:every=1,wire=topk,topk=0.1"), Slopes(group.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        one.prepare(model, optimizer)
        for step in range(12):
            sum(model()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == every - 1:
                one.sync.snapshot()
        return parameters_of(model)

    rare, often = (run([0, 1], lambda group, every=every: script(group, every)) for every in (12, 3))
    assert_alike([*rare, *often])


def test_double_precision_keeps_its_type_over_a_narrow_wire() -> None:
    found = run([0, 1], lambda g: work(g, "diloco:every=3,wire=int8", 7))
    assert all(p.dtype == torch.float64 for p in found[0])
    full = diloco(Replicas(2, even(2)), 7, 3)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(found[0], full, strict=True))


def test_a_worker_that_leaves_early_lends_a_hand_over_a_narrow_wire() -> None:
    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "diloco:every=3,wire=int8"), mlp(SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        for step in range(4 if group.rank else 17):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        one.depart()
        return parameters_of(model)

    assert_alike(run([0, 1, 2], script))


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("strategy", ["local", "diloco"])
def test_rounds_send_what_the_formula_says_and_tell_it(wire: str, strategy: str) -> None:
    numel = 2 * BLOCK * 8

    def script(group: Group) -> tuple[int, str]:
        one = training(group, f"{strategy}:every=4,wire={wire}")
        with building():
            model = torch.nn.Linear(64, numel // 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return one.sync.traffic.sent_bytes, one.sync.describe().summary

    coded = make_codec(wire).num_bytes(numel)
    for sent, said in run([0, 1], script):
        assert sent == 2 * coded
        assert f"wire={wire}: {coded / 1e3:.1f} kB instead of {4 * numel / 1e3:.1f} kB per round between hosts" in said


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ring:wire=int4", "wire='int4' is unknown; there are: fp32, fp16, bf16, int8, topk, powersgd"),
        ("auto:wire=bfloat16", "did you mean bf16?"),
        ("ring:topk=0.1", "topk=0.1 has an effect only with wire=topk"),
        ("ring:wire=topk,topk=2", "above 0 and up to 1, not 2.0"),
        ("ring:wire=topk,topk=nan", "above 0 and up to 1"),
        ("ring:rank=2", "rank=2 has an effect only with wire=powersgd"),
        ("ring:wire=int8,rank=2", "rank=2 has an effect only with wire=powersgd"),
        ("ring:wire=powersgd,rank=0", "rank takes a whole number of at least 1, not 0"),
        ("ring:wire=int8,update=sharded", "use update=replicated"),
        ("engine:wire=int8", "has no effect on the engine's own all-reduce"),
        ("local:wire=int8,via=ps", "wire=int8 compresses what workers send to each other"),
        ("local:wire=int8,algorithm=ring", "algorithm cannot be chosen with wire=int8"),
        ("local:wire=powersgd", "there are: fp32, fp16, bf16, int8, topk"),
    ],
)
def test_an_option_that_cannot_be_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["ring:wire=int8", "auto:wire=topk,topk=0.05", "shared:wire=powersgd,rank=2", "local:wire=bf16",
     "diloco:wire=topk,topk=0.5", "ring:wire=topk"],
)  # fmt: skip
def test_it_is_spelt_as_it_was_read(text: str) -> None:
    made = parse(text)
    assert parse(made.spell()) == made and made.spell() == text
