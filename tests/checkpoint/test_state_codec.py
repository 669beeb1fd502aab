"""What state becomes on disk: any nest of it comes back exactly, and nothing else gets through."""

from __future__ import annotations

import collections
import enum
import json
import math
import pathlib
from typing import Any

import pytest
import torch

from hora.checkpoint import decode, encode, newest, save
from hora.errors import HoraError

LR = torch.optim.lr_scheduler


def through_json(tree: Any) -> Any:
    plain, tensors = encode(tree)
    return decode(json.loads(json.dumps(plain, allow_nan=False)), tensors)


def through_disk(directory: pathlib.Path, tree: Any) -> Any:
    plain, tensors = encode(tree)
    save(directory, 1, {"state": tensors}, {"tree": plain})
    found = newest(directory)
    assert found is not None
    return decode(found.record["tree"], found.tensors("state"))


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, with tensors compared bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return [*map(repr, a)] == [*map(repr, b)] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b) if isinstance(a, float) else a == b


PLAIN = [
    None,
    True,
    0,
    -(2**80),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "naïve \ud800 \x00 $",
    b"",
    b"\x00\xff",
    [],
    (),
    {},
    set(),
    ((1, [2, (3,)]), {"a": (None,)}),
    {0: "int", "0": "str", True + 1: "two", None: 1, 0.5: 2, b"k": 3},
    {"$": "tuple", "value": [1]},
    {"$": 1},
    {"a.b": 1, "a": {"b": 2}},
    {1, "1", 2.5, None, b"x"},
    torch.Size([2, 0, 3]),
    torch.bfloat16,
    torch.bool,
    collections.Counter({3: 2, 7: 1}),
    collections.OrderedDict([("b", 1), ("a", (2,))]),
]


@pytest.mark.parametrize("tree", PLAIN, ids=range(len(PLAIN)))
def test_every_plain_value_comes_back_exactly(tree: Any) -> None:
    assert same(through_json(tree), tree)
    assert same(through_json({"in": [tree, (tree,)]}), {"in": [tree, (tree,)]})


def test_true_stays_a_bool_and_one_an_int_as_keys() -> None:
    assert [type(key) for key in through_json({1: 0})] == [int]
    assert [type(key) for key in through_json({True: 0})] == [bool]


def test_a_defaultdict_comes_back_as_a_dict() -> None:
    assert same(through_json(collections.defaultdict(list, {"a": [1], 2: []})), {"a": [1], 2: []})


def test_an_enum_of_int_or_str_comes_back_as_its_value() -> None:
    class Color(enum.IntEnum):
        RED = 3

    class Mode(str, enum.Enum):
        MIN = "min"

    assert same(through_json([Color.RED, Mode.MIN, {Mode.MIN: 1}]), [3, "min", {"min": 1}])


def test_tensors_keep_their_place_even_where_places_read_alike() -> None:
    a, b, c, d = (torch.tensor([float(i)]) for i in range(4))
    tree = {"x.y": a, "x": {"y": b, 0: c}, "__metadata__": d, "t": (a, [a])}
    plain, tensors = encode(tree)
    assert len(tensors) == 6 and "__metadata__" not in tensors and "x[0]" in tensors
    assert same(decode(plain, tensors), tree)
    assert same(through_json(a), a)


def test_a_parameter_comes_back_as_a_tensor_without_grad() -> None:
    back = through_json(torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor and not back.requires_grad


def test_equal_sets_give_equal_plain_data() -> None:
    assert encode({str(i) for i in range(50)}) == encode({str(i) for i in reversed(range(50))})


class Thing:
    pass


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            {"scheduler": {"lr_lambdas": [lambda step: 1.0]}},
            "scheduler.lr_lambdas[0] has type function, which a checkpoint",
        ),
        ({"a": {3: (Thing(),)}}, "a[3][0] has type Thing, which"),
        (object(), "the tree has type object, which"),
        ({"a": {(1, 2): 3}}, "a key of a has type tuple"),
        ({"a": {(1, 2)}}, "a{} has type tuple"),
        ([frozenset()], "[0] has type frozenset"),
        ({"device": torch.device("cpu")}, "device has type device"),
        ({"generator": torch.Generator()}, "generator has type Generator"),
        ({"c": 1j}, "c has type complex"),
    ],
)
def test_what_cannot_be_held_is_named_by_place_and_type(tree: Any, words: str) -> None:
    with pytest.raises(ValueError) as raised:
        encode(tree)
    assert words in str(raised.value)


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(ValueError, match="contains itself"):
        encode(tree)


HOSTILE = [
    {"$": "eval", "value": "1"},
    {"$": "tuple"},
    {"$": "tuple", "value": [], "more": 1},
    {"$": "tuple", "value": {}},
    {"$": ["tuple"], "value": []},
    {"$": None, "value": []},
    {"$": "float", "value": "1e5"},
    {"$": "float", "value": 1.0},
    {"$": "bytes", "value": "!!!!"},
    {"$": "bytes", "value": "é"},
    {"$": "dtype", "value": "torch.load"},
    {"$": "dtype", "value": "load"},
    {"$": "Size", "value": [-1]},
    {"$": "Size", "value": [2**70]},
    {"$": "Size", "value": [True]},
    {"$": "set", "value": [[1]]},
    {"$": "dict", "value": [[1]]},
    {"$": "dict", "value": [[[1], 2]]},
    {"$": "dict", "value": [[{"$": "tuple", "value": [1]}, 2]]},
    {"$": "Counter", "value": {"a": 1}},
    {"$": "tensor", "value": "nobody"},
    {"$": "tensor", "value": ["t"]},
    {"a": [{"$": "__import__", "value": "os"}]},
    object(),
]


@pytest.mark.parametrize("plain", HOSTILE, ids=range(len(HOSTILE)))
def test_what_encode_does_not_write_is_refused(plain: Any) -> None:
    with pytest.raises(HoraError, match="which Hora does not write"):
        decode(plain, {"t": torch.ones(1)})


@pytest.mark.parametrize("kind", ["list", "tuple", "dict"])
def test_plain_data_nested_without_end_is_refused(kind: str) -> None:
    plain: Any = []
    for _ in range(5000):
        plain = {"list": [plain], "tuple": {"$": "tuple", "value": [plain]}, "dict": {"a": plain}}[kind]
    with pytest.raises(HoraError, match="nested deeper"):
        decode(plain, {})


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}
SCHEDULERS: dict[str, Any] = {
    "step": lambda o: LR.StepLR(o, 2, gamma=0.5),
    "multistep": lambda o: LR.MultiStepLR(o, [2, 2, 5]),
    "onecycle": lambda o: LR.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "cosine": lambda o: LR.CosineAnnealingLR(o, T_max=7),
    "restarts": lambda o: LR.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "cyclic": lambda o: LR.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "plateau": lambda o: LR.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: LR.SequentialLR(o, [LR.LinearLR(o), LR.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: LR.ChainedScheduler([LR.ConstantLR(o), LR.ExponentialLR(o, 0.9)]),
    "lambda": lambda o: LR.LambdaLR(o, lambda step: 0.9**step),
}


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def train(net: torch.nn.Module, optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if isinstance(scheduler, LR.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()


@pytest.mark.cases(3)
@pytest.mark.parametrize("word", OPTIMIZERS)
def test_a_fresh_optimizer_trains_on_from_a_checkpoint_bit_for_bit(word: str, tmp_path: pathlib.Path) -> None:
    net = model()
    optimizer = OPTIMIZERS[word](net.parameters())
    train(net, optimizer, range(4))
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    back = through_disk(tmp_path, state)
    assert same(back, state)
    train(net, optimizer, range(4, 8))

    other = model()
    fresh = OPTIMIZERS[word](other.parameters())
    other.load_state_dict(back["model"])
    fresh.load_state_dict(back["optimizer"])
    train(other, fresh, range(4, 8))
    assert same(other.state_dict(), net.state_dict())
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("word", SCHEDULERS)
def test_a_fresh_scheduler_goes_on_from_a_checkpoint(word: str, tmp_path: pathlib.Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[word](optimizer)
    train(net, optimizer, range(4), scheduler)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = through_disk(tmp_path, state)
    assert same(back, state)

    other = model()
    fresh_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    fresh = SCHEDULERS[word](fresh_optimizer)
    other.load_state_dict(back["model"])
    fresh_optimizer.load_state_dict(back["optimizer"])
    fresh.load_state_dict(back["scheduler"])
    for step in range(4, 12):
        train(net, optimizer, range(step, step + 1), scheduler)
        train(other, fresh_optimizer, range(step, step + 1), fresh)
        assert fresh_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert same(other.state_dict(), net.state_dict())


def test_a_grad_scaler_and_rng_states_come_back(tmp_path: pathlib.Path) -> None:
    import random

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    state = {"scaler": scaler.state_dict(), "torch": torch.get_rng_state(), "python": random.getstate()}
    back = through_disk(tmp_path, state)
    assert same(back, state) and back["scaler"]["scale"] == 4.0
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(back["scaler"])
    assert fresh.state_dict() == scaler.state_dict()
    expected = (torch.rand(3), random.random())
    torch.set_rng_state(back["torch"])
    random.setstate(back["python"])
    assert same((torch.rand(3), random.random()), expected)
