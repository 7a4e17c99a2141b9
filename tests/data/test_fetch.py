import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset, default_collate

from hotloop.data.fetch import build_fetch, draws_nothing, is_default_collate

SHAPES = [(), (3,), (1, 8, 8), (3, 8, 8), (3, 1, 1), (2, 3, 4, 5), (0,)]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_quick_fetch_is_torch_s_in_type_value_and_layout(shape, dtype):
    rows = torch.randint(0, 100, (11, *shape)).to(dtype)
    data = Subset(TensorDataset(rows, torch.arange(11)), [3, 9, -1, 4, 4])
    for indices in ([0, 1, 2], [4], [-1, 0], [3, 3]):
        wanted = default_collate([data[i] for i in indices])
        got = build_fetch(data, default_collate, True)(indices)
        assert type(got) is type(wanted) is list
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert a.data_ptr() != rows.data_ptr() or not a.numel()


def test_a_batch_is_a_copy():
    rows = torch.arange(6.0)
    (batch,) = build_fetch(TensorDataset(rows), default_collate, True)([2, 3])
    batch.zero_()
    assert rows.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "indices",
    [[torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2]), (1, 2), [True, True], [1, torch.tensor(2)]],
    ids=str,
)
def test_indices_of_other_kinds(indices):
    data = TensorDataset(torch.arange(6.0))
    wanted = default_collate([data[i] for i in indices])
    got = build_fetch(data, default_collate, True)(indices)
    assert torch.equal(got[0], wanted[0])


def test_wrong_indices_get_torch_s_own_error():
    with pytest.raises(IndexError, match="index 9 is out of bounds for dimension 0 with size 6"):
        build_fetch(TensorDataset(torch.arange(6.0)), default_collate, True)([0, 9])


def test_tensors_out_of_the_ordinary_take_the_plain_way():
    grad = torch.ones(4, requires_grad=True)
    (batch,) = build_fetch(TensorDataset(grad), default_collate, True)([0, 1])
    batch.sum().backward()
    assert grad.grad.tolist() == [1, 1, 0, 0]
    lattice = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    data = TensorDataset(lattice)
    (batch,) = build_fetch(data, default_collate, True)([1, 2])
    assert batch.stride() == default_collate([data[1], data[2]])[0].stride()

    class Own(TensorDataset):
        def __getitem__(self, index):
            return index

    assert build_fetch(Own(torch.ones(3)), default_collate, True)([0, 2]).tolist() == [0, 2]


def test_a_changed_collate_table_is_respected(monkeypatch):
    from torch.utils.data._utils.collate import default_collate_fn_map

    assert is_default_collate(default_collate)
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_: "mine")
    assert not is_default_collate(default_collate)
    assert build_fetch(TensorDataset(torch.ones(3)), default_collate, True)([0, 1]) == ["mine"]


def test_what_cannot_draw():
    plain = TensorDataset(torch.ones(3))
    for dataset in (plain, Subset(plain, [0]), ConcatDataset([plain, plain]), [1, 2], range(4)):
        assert draws_nothing(dataset)
    assert draws_nothing(StackDataset(plain, plain))

    class Own(TensorDataset):
        pass

    for dataset in (
        Own(torch.ones(3)),
        ConcatDataset([plain, Own(torch.ones(1))]),
        Subset(Own(torch.ones(1)), [0]),
    ):
        assert not draws_nothing(dataset)


def test_batched_reading_is_used_where_a_dataset_has_it(load):
    calls = []

    class Batched(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitems__(self, indices):
            calls.append(indices)
            return indices

    got = [batch.tolist() for batch in load(DataLoader(Batched(), 2))]
    assert got == calls == [[0, 1], [2, 3], [4]]
