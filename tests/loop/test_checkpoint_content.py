"""What goes into a checkpoint comes out: bits, types, ties, strides, names; the rest is refused by name."""

from __future__ import annotations

import collections
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from hotloop.errors import CheckpointError
from hotloop.loop.checkpoint import Checkpoints, Snapshot

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def round_trip(folder: pathlib.Path, **kinds: Any) -> Snapshot:
    checkpoints = Checkpoints()
    checkpoints.save(folder, Snapshot(7, **kinds))
    loaded = checkpoints.load(folder)
    assert loaded is not None
    assert loaded.step == 7
    return loaded


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_of_a_dtype_survives(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    # Random bytes hold NaNs with payloads, infinities, subnormals and negative zeros.
    raw = torch.randint(0, 256, (6 * 16,), dtype=torch.uint8).view(dtype)
    given = {"flat": raw, "scalar": raw[0].clone(), "empty": raw[:0], "square": raw[:4].reshape(2, 2)}
    loaded = round_trip(tmp_path, tensors={"part": given}).tensors["part"]
    assert list(loaded) == list(given)
    for name, tensor in given.items():
        assert loaded[name].dtype is dtype
        assert loaded[name].shape == tensor.shape
        assert bits(loaded[name]) == bits(tensor)


def test_bool_and_odd_shapes_survive(tmp_path: pathlib.Path) -> None:
    given = {
        "bool": torch.tensor([True, False, True]),
        "zero by three": torch.zeros(0, 3),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "sliced": torch.arange(12.0).reshape(3, 4)[:, ::2],
        "expanded": torch.tensor([5.0]).expand(4),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative view": torch.tensor([1 + 2j]).conj().imag,
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    loaded = round_trip(tmp_path, tensors={"part": given}).tensors["part"]
    for name, tensor in given.items():
        assert torch.equal(loaded[name], tensor), name
        assert not loaded[name].is_conj()
        assert not loaded[name].is_neg()
    # The order of memory is kept where it is dense: fused optimizers take another path if it differs.
    for name in ("transposed", "channels last"):
        assert loaded[name].stride() == given[name].stride()
    assert loaded["sliced"].is_contiguous()


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    state = model.state_dict()
    assert len(state) == 2
    loaded = round_trip(tmp_path, tensors={"model": state}).tensors["model"]
    assert loaded["0.weight"] is loaded["1.weight"]
    assert torch.equal(loaded["0.weight"], model[0].weight)
    size = (tmp_path / "step-0000000007" / "model.safetensors").stat().st_size
    assert 64 * 64 * 4 < size < 64 * 64 * 4 + 1000


def test_loaded_tensors_own_their_memory(tmp_path: pathlib.Path) -> None:
    loaded = round_trip(tmp_path, tensors={"part": {"a": torch.zeros(3), "b": torch.zeros(5)}}).tensors[
        "part"
    ]
    loaded["a"].fill_(1)
    assert loaded["b"].sum() == 0
    assert loaded["a"].untyped_storage().nbytes() == 12


def test_other_readers_of_safetensors_open_the_file(tmp_path: pathlib.Path) -> None:
    given = {
        "w": torch.randn(3, 4),
        "i": torch.arange(5),
        "b": torch.tensor([True]),
        "h": torch.ones(3).half(),
    }
    round_trip(tmp_path, tensors={"model": given})
    read = safetensors.torch.load_file(tmp_path / "step-0000000007" / "model.safetensors")
    assert read.keys() == given.keys()
    assert all(torch.equal(read[name], given[name]) for name in given)


NAMES = [
    "",
    ".",
    "..",
    "a/b",
    "/abs",
    "A",
    "a",
    "ü€ 🙂",
    "\x00\n",
    "x" * 300,
    "x" * 299 + "y",
    "manifest",
    "%2F",
    "\ud800",
]


def test_parts_tensors_and_objects_may_have_any_names(tmp_path: pathlib.Path) -> None:
    named = [*NAMES, "__metadata__", "tensor-0"]
    tensors = {
        part: {name: torch.tensor([i, j]) for j, name in enumerate(named)} for i, part in enumerate(NAMES)
    }
    loaded = round_trip(tmp_path, tensors=tensors, objects={name: i for i, name in enumerate(NAMES)})
    assert list(loaded.tensors) == NAMES
    assert loaded.objects == {name: i for i, name in enumerate(NAMES)}
    for i, part in enumerate(NAMES):
        assert list(loaded.tensors[part]) == named
        for j, name in enumerate(named):
            assert loaded.tensors[part][name].tolist() == [i, j]
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "step-0000000007",
        tmp_path.name,
    }


def test_an_empty_snapshot_is_a_checkpoint(tmp_path: pathlib.Path) -> None:
    loaded = round_trip(tmp_path, tensors={"nothing": {}})
    assert loaded.tensors == {"nothing": {}}
    assert loaded.objects == {}


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    return left == right or (left != left and right != right)


def counting(**values: Any) -> collections.defaultdict[str, Any]:
    made: collections.defaultdict[str, Any] = collections.defaultdict(list)
    made.update(values)
    return made


OBJECTS = {
    "numbers": [1, -1, 0, 2**70, -(3**5000), 1.5, math.inf, -0.0, math.nan, 1 + 2j, True, None],
    "text": ["", "ü\ud800", b"\x00\xff", bytearray(b"xy")],
    "ordered": collections.OrderedDict([("b", 1), ("a", {"x": [1, (2, 3)]})]),
    "defaultdict": counting(a=[1], b=counting(c=(1,))),
    "no factory": collections.defaultdict(None, {1: 2}),
    "counter": collections.Counter("hello"),
    "sets": [{1, "a", (2, 3)}, frozenset([1, frozenset([2])]), set()],
    "deque": collections.deque([1, [2], 3], maxlen=5),
    "int keys": {0: {1: {(2, "x"): 3}}, -1: "a", None: 4, 2.5: 5, True: 6},
    "odd keys": {torch.float32: 1, frozenset([1]): 2, np.int64(3): 3},
    "tuples": ((), (1,), ("hotloop:", "int", "0x1"), ("hotloop:",)),
    "ranges": [range(1, 10, 3), slice(None, 5), ...],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.strided, torch.channels_last],
    "version": torch.__version__,
    "path": [pathlib.Path("a/b"), pathlib.PurePosixPath("/c")],
    "tensors": {"a": torch.randn(3, dtype=torch.float64), "b": [torch.tensor(3), torch.ones(2).bfloat16()]},
    "scalars": [
        np.float32(1.5),
        np.float64(math.nan),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1j),
        np.str_("hé"),
        np.str_(""),
        np.bytes_(b"x"),
        np.datetime64("2024-01-01"),
        np.timedelta64(3, "s"),
    ],
    "arrays": [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6)[::2],
        np.array(3.0, dtype=">f4"),
        np.zeros((0, 3), dtype=np.uint16),
        np.array(["a", "bcd"]),
        np.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
        np.dtype("float32"),
    ],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_come_back_equal_and_of_the_same_types(tmp_path: pathlib.Path, name: str) -> None:
    loaded = round_trip(tmp_path, objects={name: OBJECTS[name]})
    assert same(loaded.objects[name], OBJECTS[name])
    if name == "arrays":
        assert loaded.objects[name][1].flags.f_contiguous
    if name == "deque":
        assert loaded.objects[name].maxlen == 5
    if name == "defaultdict":
        assert loaded.objects[name]["new"] == []


def test_numpy_state_goes_on_where_it_stopped(tmp_path: pathlib.Path) -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    legacy = np.random.RandomState(4)
    loaded = round_trip(
        tmp_path, objects={"new": generator.bit_generator.state, "old": legacy.get_state()}
    ).objects
    other = np.random.default_rng(0)
    other.bit_generator.state = loaded["new"]
    old = np.random.RandomState(0)
    old.set_state(loaded["old"])
    assert np.array_equal(other.random(10), generator.random(10))
    assert np.array_equal(old.rand(10), legacy.rand(10))


def test_an_optimizers_state_dict_continues_bit_for_bit(tmp_path: pathlib.Path) -> None:
    def make() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        return weight, torch.optim.AdamW([weight], lr=0.1)

    weight, optimizer = make()
    for step in range(6):
        if step == 3:
            loaded = round_trip(
                tmp_path, tensors={"model": {"w": weight.data}}, objects={"optimizer": optimizer.state_dict()}
            )
        weight.grad = weight.detach() ** 2
        optimizer.step()
    resumed, other = make()
    resumed.data.copy_(loaded.tensors["model"]["w"])
    other.load_state_dict(loaded.objects["optimizer"])
    for _ in range(3):
        resumed.grad = resumed.detach() ** 2
        other.step()
    assert bits(resumed.data) == bits(weight.data)


def test_parameters_and_gradient_flags_come_back(tmp_path: pathlib.Path) -> None:
    given = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, requires_grad=True),
        torch.ones(2),
    ]
    loaded = round_trip(tmp_path, objects={"x": given}).objects["x"]
    assert [type(tensor) for tensor in loaded] == [type(tensor) for tensor in given]
    assert [tensor.requires_grad for tensor in loaded] == [True, False, True, False]


def test_what_was_one_object_is_one_again(tmp_path: pathlib.Path) -> None:
    shared: list[Any] = [torch.zeros(2)]
    loaded = round_trip(tmp_path, objects={"x": {"a": shared, "b": shared, "t": shared[0]}}).objects["x"]
    assert loaded["a"] is loaded["b"]
    assert loaded["t"] is loaded["a"][0]


def test_objects_load_without_running_code(tmp_path: pathlib.Path) -> None:
    round_trip(tmp_path, objects=dict(OBJECTS))
    for path in (tmp_path / "step-0000000007").glob("*.pt"):
        torch.load(path, weights_only=True)
    assert len(list((tmp_path / "step-0000000007").glob("*.pt"))) == len(OBJECTS)


class Custom:
    pass


Named = collections.namedtuple("Named", "a")


def cyclic() -> list[Any]:
    made: list[Any] = []
    made.append([made])
    return made


REFUSED = [
    ({"a": [1, Custom()]}, r"objects\['x'\]\['a'\]\[1\] is of type .*Custom"),
    (lambda: 1, r"objects\['x'\] is of type builtins.function"),
    ({"n": Named(1)}, r"objects\['x'\]\['n'\] is of type .*Named"),
    ({Custom: 1}, r"key .* of objects\['x'\] is of type builtins.type"),
    (collections.defaultdict(lambda: 0), r"objects\['x'\] is a defaultdict whose default_factory"),
    (np.array([Custom()], dtype=object), r"objects\['x'\] is a numpy array of Python objects"),
    (cyclic(), r"contains itself"),
    ([torch.eye(2).to_sparse()], r"objects\['x'\]\[0\] has the layout torch.sparse_coo"),
    (torch.empty(2, device="meta"), r"objects\['x'\] is on the meta device"),
]


@pytest.mark.parametrize(("value", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_stored_is_named_before_anything_is_written(
    tmp_path: pathlib.Path, value: Any, text: str
) -> None:
    checkpoints = Checkpoints()
    checkpoints.save(tmp_path, Snapshot(1, objects={"x": 1}), wait=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=text):
        checkpoints.save(tmp_path, Snapshot(1, objects={"x": value}))
    assert sorted(tmp_path.rglob("*")) == before
    checkpoints.save(tmp_path, Snapshot(2, objects={"x": 2}), wait=True)
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert loaded.objects == {"x": 2}


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        (Snapshot(-1), "step is -1"),
        (Snapshot(1, tensors={"p": {"w": [1.0]}}), r"tensors\['p'\]\['w'\] is a builtins.list"),  # type: ignore[dict-item]
        (
            Snapshot(1, tensors={"p": {"w": torch.eye(2).to_sparse()}}),
            r"tensors\['p'\]\['w'\] has the layout",
        ),
        (Snapshot(1, tensors={"p": {1: torch.ones(1)}}), "names are strings"),  # type: ignore[dict-item]
        (Snapshot(1, meta={"a": {1: 2}}), r"meta\['a'\] has the key 1"),
        (Snapshot(1, meta={"a": [torch.ones(1)]}), r"meta\['a'\]\[0\] is of type torch.Tensor"),
    ],
)
def test_a_faulty_snapshot_is_refused(tmp_path: pathlib.Path, snapshot: Snapshot, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Checkpoints().save(tmp_path / "new", snapshot)


def test_meta_comes_back_with_the_versions(tmp_path: pathlib.Path) -> None:
    meta = {"world": 4, "nested": {"a": [1, 2.5, None, "ü"]}}
    loaded = round_trip(tmp_path, meta=meta).meta
    assert loaded.items() >= meta.items()
    assert loaded["torch"] == str(torch.__version__)
    assert loaded["format_version"] == 1
    written = json.loads((tmp_path / "step-0000000007" / "manifest.json").read_text())
    assert written["meta"] == loaded
