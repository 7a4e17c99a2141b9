"""Batches of many lengths in few recordings: which lengths, and that padding counts for nothing."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotloop.capture import Buckets
from hotloop.capture.buckets import Padding, choose_lengths
from hotloop.errors import SettingError


def padded_sum(seen, lengths):
    return sum(count * min(b for b in lengths if b >= length) for length, count in seen.items())


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_chosen_lengths_are_the_best_there_are(most):
    generator = torch.Generator().manual_seed(most)
    seen = Counter(torch.randint(1, 60, (40,), generator=generator).tolist())
    chosen = choose_lengths(seen, most, 8)
    assert len(chosen) <= most
    assert all(length % 8 == 0 for length in chosen[:-1])
    assert chosen[-1] == max(seen)
    sizes = sorted({-(-length // 8) * 8 for length in seen})
    chosen[-1] = sizes[-1]
    best = min(
        padded_sum(seen, [*rest, sizes[-1]])
        for k in range(most)
        for rest in itertools.combinations(sizes[:-1], k)
    )
    assert padded_sum(seen, chosen) == best


def test_few_lengths_are_their_own_buckets():
    assert choose_lengths(Counter([16, 32, 32]), 6, 8) == [16, 32]
    assert choose_lengths(Counter([5]), 6, 8) == [5]


def test_a_longer_batch_makes_room_for_itself():
    padding = Padding(Buckets(after=2, most=3, multiple=4))
    assert padding.choose(5) == (5, None)
    assert padding.choose(9) == (9, None)
    to, said = padding.choose(5)
    # the longest is never exceeded: a model may take none that is longer
    assert (to, padding.lengths) == (9, [8, 9])
    assert "8, 9" in said
    padding.first = False
    assert padding.choose(5) == (8, None)
    to, said = padding.choose(30)
    assert (to, padding.lengths) == (30, [8, 9, 30])
    assert "length 30" in said
    to, said = padding.choose(31)
    assert to == 31
    assert len(padding.lengths) <= 3


def test_a_longest_length_that_is_known_is_there_from_the_beginning():
    padding = Padding(Buckets(after=2, most=2, longest=50))
    for _ in range(2):
        padding.choose(5)
    assert padding.choose(5)[0] == 50
    padding.first = False
    assert padding.choose(5) == (8, None)


def test_filling_static_tensors_is_padding():
    padding = Padding(Buckets(pad=(7.0, -100), mask="real"))
    x, y, z = torch.rand(2, 3, 5), torch.ones(2, 3, dtype=torch.int64), torch.rand(2)
    padded = padding.pad([x, y, z], 3, 8)
    expected_x = F.pad(x, (0, 0, 0, 5), value=7.0)
    assert torch.equal(padded[0], expected_x)
    assert torch.equal(padded[1], F.pad(y, (0, 5), value=-100))
    assert padded[2] is z
    assert padded[3].tolist() == [True] * 3 + [False] * 5
    statics = [torch.full_like(p, 1) for p in padded]
    padding.fill(statics, [x, y, z], 3)
    for static, value in zip(statics, padded, strict=True):
        assert torch.equal(static, value)


@pytest.mark.parametrize(
    "values", [{"most": 0}, {"dim": -1}, {"lengths": (0,)}, {"after": 0}, {"longest": 0}]
)
def test_what_buckets_cannot_be(values):
    with pytest.raises(SettingError, match="Buckets"):
        Buckets(**values)


def test_a_value_is_needed_for_each_argument():
    with pytest.raises(SettingError, match="more arguments"):
        Padding(Buckets(pad=(1, 2))).pad([torch.ones(1, 2)] * 3, 2, 4)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, x):
        return self.head(self.tokens(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def train(loop, lengths, *, captured, masked=False, **options):
    torch.manual_seed(0)
    model = Causal()
    model, optimizer = loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))

    def step(x, y):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    def weighed(x, y, real=None):
        each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        loss = each.mean() if real is None else (each * real).sum() / (real.sum() * len(each))
        loop.backward(loss)
        loop.update(optimizer)
        return loss

    run = weighed if masked else step
    if captured:
        run = loop.capture(run, **options)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for length in lengths:
        x = torch.randint(20, (3, length), generator=generator)
        losses.append(run(x, x.roll(1, 1)).detach())
    return run, torch.stack(losses)


@pytest.mark.parametrize("masked", [False, True])
def test_losses_are_those_of_the_unpadded_batches(graph_loop, masked, capsys):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 60, (70,), generator=generator).tolist()
    buckets = Buckets(pad=0, mask="real") if masked else Buckets(pad=(0, -100))
    buckets = Buckets(pad=buckets.pad, mask=buckets.mask, most=3, after=10)
    _, expected = train(graph_loop(), lengths, captured=False, masked=masked)
    run, losses = train(graph_loop(), lengths, captured=True, masked=masked, buckets=buckets)
    assert run.reason is None
    assert run.captures <= 6
    assert run.replays > 30
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert "10 batches" not in capsys.readouterr().err


def test_the_longest_is_recorded_first(graph_loop):
    run, _ = train(
        graph_loop(),
        [4, 4, 4, 4, 4, 12],
        captured=True,
        buckets=Buckets(lengths=(8, 16), pad=(0, -100)),
    )
    [entry] = [e for e in run._recordings if e.recording is not None]
    assert entry.inputs[0].shape == (3, 16)


def test_without_a_device_that_records_the_mask_is_there_all_the_same():
    import hotloop

    loop = hotloop.Loop(record=False, device="cpu")

    @loop.capture(buckets=Buckets(mask="real"))
    def count(x, real):
        return real.sum()

    assert count(torch.ones(2, 5)).item() == 5
    with loop.eager():
        assert count(torch.ones(2, 7)).item() == 7
