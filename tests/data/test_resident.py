"""Resident data: orders, positions, augmentation, windows; alone and through a loop."""

import math

import pytest
import torch
import torch.nn.functional as F

import hotloop
from hotloop.data import (
    Augment,
    Loader,
    ResidentArrays,
    ResidentImages,
    ResidentLoader,
    ResidentWindows,
    Resizing,
    whitening_filters,
    window_starts,
)
from hotloop.data.resident import permutation
from hotloop.errors import DataError, KernelError
from hotloop.hardware import Processes
from hotloop.kernels.augment import philox

CPU = torch.device("cpu")


def images(n=30, size=8, channels=3):
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, size, size, channels), dtype=torch.uint8, generator=g)


def loader_of(source, rank=0, world=1):
    alone = Loader(source, device=CPU, processes=Processes(0, 1, 0, 1, None))
    alone._feed.rank, alone._feed.world = rank, world
    from hotloop.data.order import Served

    alone._feed.served = Served([False] * world)
    return alone


def test_philox_gives_the_published_words():
    # Random123's kat_vectors: counter and key all zero, all ones, and digits of pi
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) for w in philox(0, zero, zero, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = zero + 0xFFFFFFFF
    words = philox(0xFFFFFFFFFFFFFFFF, ones, ones, 0xFFFFFFFF, 0xFFFFFFFF)
    assert [int(w) for w in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    words = philox(0x299F31D0A4093822, zero + 0x243F6A88, zero + 0x85A308D3, 0x13198A2E, 0x03707344)
    assert [int(w) for w in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_a_permutation_is_one_and_changes_with_seed_and_epoch():
    first = permutation(1000, 1, 0, CPU)
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert torch.equal(first, permutation(1000, 1, 0, CPU))
    for other in (permutation(1000, 1, 1, CPU), permutation(1000, 2, 0, CPU)):
        assert (first == other).sum() < 10
    # each place is as likely for each number: the mean place of number 0 over 400 epochs, sd 500 / sqrt(3 * 400)
    places = torch.stack([(permutation(1000, 5, e, CPU) == 0).nonzero()[0, 0] for e in range(400)])
    assert abs(places.double().mean() - 499.5) < 5 * 1000 / math.sqrt(12 * 400)


def test_batches_cover_an_epoch_once():
    x, y = torch.arange(25.0), torch.arange(25)
    loader = ResidentLoader((x, y), 4)
    assert len(loader) == 7
    batches = list(loader)
    assert [len(b[0]) for b in batches] == [4] * 6 + [1]
    seen = torch.cat([b[1] for b in batches])
    assert torch.equal(seen.sort().values, y)
    assert not torch.equal(seen, y)
    assert torch.equal(torch.cat([b[0] for b in batches]), seen.float())
    assert len(ResidentLoader(x, 4, drop_last=True)) == 6
    plain = list(ResidentLoader(x, 10, shuffle=False))
    assert torch.equal(torch.cat(plain), x)
    assert loader.epoch == 1
    assert not torch.equal(torch.cat([b[1] for b in loader]), seen)


def test_fewer_samples_than_any_batch_are_an_error_where_they_are_dropped():
    x = torch.arange(5.0)
    with pytest.raises(DataError, match="5 samples are fewer than a batch of 6"):
        ResidentLoader(x, 6, drop_last=True)
    assert [len(b) for b in ResidentLoader(x, 6)] == [5]
    assert [len(b) for b in ResidentLoader(x, 5, drop_last=True)] == [5]
    # batches of small images are larger: the smallest of all sizes counts
    small = ResidentImages(images()[:5], torch.arange(5), Augment())
    ramp = Resizing([(1, 4), (1, 8)], batch_size=5)
    assert ramp.stages[0].batch_size > 5
    loader = ResidentLoader(small, resizing=ramp, drop_last=True)
    assert [[len(y) for _, y in loader] for _ in range(2)] == [[], [5]]
    with pytest.raises(DataError, match="5 samples are fewer than a batch of 6"):
        ResidentLoader(small, resizing=Resizing([(1, 4), (1, 8)], batch_size=6), drop_last=True)


def test_a_position_is_resumed_to_the_bit_with_another_batch_size():
    source = ResidentImages(images(), torch.arange(30), Augment(translate=2, flip="alternating", cutout=3))
    whole = ResidentLoader(source, 5, seed=3)
    list(whole)
    batches = list(whole)
    again = ResidentLoader(source, 5, seed=3)
    list(again)
    rest = iter(again)
    for _ in range(2):
        next(rest)
    state = again.state_dict()
    other = ResidentLoader(source, 4, seed=3)
    other.load_state_dict(state)
    x = torch.cat([b[0] for b in other])
    assert torch.equal(x, torch.cat([b[0] for b in batches[2:]]))
    with pytest.raises(DataError, match="seed"):
        ResidentLoader(source, 4, seed=4).load_state_dict(state)


def test_an_epoch_that_is_left_early_is_over():
    loader = ResidentLoader(torch.arange(12), 4, seed=1)
    orders = [permutation(12, 1, epoch, CPU).tolist() for epoch in range(4)]
    for epoch in range(2):
        for x in loader:
            assert x.tolist() == orders[epoch][:4]
            break
        assert loader.epoch == epoch
    state = loader.state_dict()
    assert torch.cat(list(loader)).tolist() == orders[2]
    again = ResidentLoader(torch.arange(12), 4, seed=1)
    again.load_state_dict(state)
    # its position is that behind the batch handed out, and what is resumed may be left early again
    assert next(iter(again)).tolist() == orders[1][4:8]
    assert torch.cat(list(again)).tolist() == orders[2]
    again.set_epoch(0)
    assert torch.cat(list(again)).tolist() == orders[0]


def test_prepared_it_knows_its_position_like_any_loader():
    def run(interrupt):
        loop = hotloop.Loop(record=False, seed=0)
        loader = loop.prepare(ResidentLoader(torch.arange(22.0), 4, seed=1))
        assert len(loader) == 6
        seen = []
        for _ in range(3):
            for x in loader:
                seen.append(x)
                if interrupt == len(seen):
                    state = loader.state_dict()
                    loader = hotloop.Loop(record=False).prepare(ResidentLoader(torch.arange(22.0), 4, seed=1))
                    loader.load_state_dict(state)
                    assert loader.epoch == len(seen) // 6 or loader.epoch == (len(seen) - 1) // 6
                    for _ in range(3 - loader.epoch):
                        seen += list(loader)
                    return seen
        return seen

    unbroken = run(None)
    assert len(unbroken) == 18
    for place in (1, 5, 6, 8, 12):
        again = run(place)
        assert all(torch.equal(a, b) for a, b in zip(unbroken, again, strict=True))


def test_loader_attributes_tell_what_is_handed_out():
    loader = loader_of(ResidentLoader(torch.arange(10.0), 4, seed=1))
    facts = []
    for x in loader:
        assert loader.indices_of(loader.handed_out) == x.long().tolist()
        facts.append((loader.batch_samples, loader.at_last, loader.is_replay, loader.epoch))
    assert facts == [(4, False, False, 0), (4, False, False, 0), (2, True, False, 0)]
    assert loader.epoch == 1
    assert not loader.live
    loader.skip(2)
    assert [len(x) for x in loader] == [2]
    for _ in loader:  # left early: the next loop is the next epoch
        break
    assert loader.epoch == 3
    assert torch.equal(torch.cat(list(loader)), permutation(10, 1, 3, CPU).float())


@pytest.mark.parametrize("n", [24, 23, 17])
def test_ranks_share_one_order(n):
    orders = []
    for rank in range(2):
        loader = loader_of(ResidentLoader(torch.arange(float(n)), 4, seed=7), rank, 2)
        steps = []
        for x in loader._feed.open(None, 0).steps:
            steps.append((x.batch, x.samples, x.global_samples, x.replay, x.last, x.samples_done))
        orders.append(steps)
    assert len(orders[0]) == len(orders[1]) == -(-n // 8)
    joined = []
    for a, b in zip(*orders, strict=True):
        joined += [s[0] for s in (a, b) if not s[3]]
        assert a[1] + b[1] == a[2] == b[2]
        assert a[4] == b[4]
        assert a[5] == b[5]
    assert torch.equal(torch.cat(joined), permutation(n, 7, 0, CPU).float())
    assert orders[0][-1][4]
    assert not orders[0][0][4]
    if n == 17:
        assert orders[1][-1][3]
        assert orders[1][-1][1] == 0


def test_a_resumed_position_fits_other_ranks():
    source = torch.arange(32.0)
    loader = loader_of(ResidentLoader(source, 4, seed=7))
    running = iter(loader)
    next(running), next(running)
    state = loader.state_dict()
    rest = torch.cat(list(running))
    shares = []
    for rank in range(3):
        other = loader_of(ResidentLoader(source, 4, seed=7), rank, 3)
        other._feed.restore(state)
        shares.append([s.batch for s in other._feed.open(state, 0).steps if not s.replay])
    joined = [shares[r][k] for k in range(2) for r in range(3)]
    assert torch.equal(torch.cat(joined), rest)


def test_alternating_flips_see_both_ways_in_two_epochs():
    x = images(200)
    source = ResidentImages(x, how=Augment(flip="alternating"), dtype=torch.float64)
    index = torch.arange(200)
    plain = ResidentImages(x, dtype=torch.float64).cut(index, torch.tensor(0), 0, None)
    a, b, c = (source.cut(index, torch.tensor(e), 0, None) for e in range(3))
    assert torch.equal(a, b.flip(-1))
    assert torch.equal(a, c)
    same = (a == plain).flatten(1).all(1)
    assert 60 < same.sum() < 140
    assert torch.equal(a[~same], plain[~same].flip(-1))


@pytest.mark.parametrize("padding", ["reflect", "zero"])
def test_translation_equals_a_crop_of_the_padded_image(padding):
    x = images(300)
    how = Augment(translate=2, padding=padding, mean=(0.3, 0.4, 0.5), std=(0.2, 0.3, 0.4))
    out = ResidentImages(x, how=how).cut(torch.arange(300), torch.tensor(1), 9, None)
    plain = (x.permute(0, 3, 1, 2).float() / 255 - torch.tensor(how.mean)[:, None, None]) / torch.tensor(
        how.std
    )[:, None, None]
    padded = F.pad(plain, (2,) * 4, mode="reflect" if padding == "reflect" else "constant")
    shifts = torch.zeros(5, 5)
    for image, wide in zip(out, padded, strict=True):
        found = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if torch.allclose(image, wide[:, i : i + 8, j : j + 8], atol=1e-5)
        ]
        assert len(found) == 1
        shifts[found[0]] += 1
    assert (shifts > 0).all()  # 12 expected of each


def test_cutout_jitter_and_targets():
    x = images(50, size=9)
    how = Augment(cutout=4)
    plain = ResidentImages(x).cut(torch.arange(50), torch.tensor(0), 2, None)
    cut = ResidentImages(x, how=how).cut(torch.arange(50), torch.tensor(0), 2, None)
    hole = (cut != plain).any(1)
    for one in hole:
        rows, columns = one.nonzero(as_tuple=True)
        assert rows.max() - rows.min() < 4
        assert columns.max() - columns.min() < 4
    toned = ResidentImages(x, how=Augment(brightness=0.2, contrast=0.1)).cut(
        torch.arange(50), torch.tensor(0), 2, None
    )
    for a, b in zip(plain.double().flatten(1), toned.double().flatten(1), strict=True):
        c = (b.max() - b.min()) / (a.max() - a.min())
        assert 0.9 <= c <= 1.1
        assert -0.2001 <= (b / c - a).mean() <= 0.2001
        assert torch.allclose((a + (b / c - a).mean()) * c, b, atol=1e-5)
    y = torch.arange(50) % 7
    source = ResidentImages(x, y, classes=7, smoothing=0.1)
    targets = source.cut(torch.tensor([3, 8, 3]), torch.tensor(0), 0, None)[1]
    assert torch.allclose(targets, F.one_hot(y[[3, 8, 3]], 7) * 0.9 + 0.1 / 7)
    logits = torch.randn(3, 7)
    assert torch.allclose(
        F.cross_entropy(logits, targets), F.cross_entropy(logits, y[[3, 8, 3]], label_smoothing=0.1)
    )


@pytest.mark.parametrize("seed", range(25))
def test_windows_never_cross_a_group(seed):
    g = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 7, (), generator=g))
    lengths = torch.randint(0, 12, (groups,), generator=g)
    lengths[0] += 8
    n, length = int(lengths.sum()), int(torch.randint(1, 6, (), generator=g))
    stride, horizon = int(torch.randint(1, 4, (), generator=g)), int(torch.randint(0, 3, (), generator=g))
    ids = torch.repeat_interleave(torch.arange(groups) % 3, lengths)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    starts = window_starts(n, length, offsets=offsets, stride=stride, horizon=horizon)
    wanted = []
    for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        wanted += list(range(a, b - length - horizon + 1, stride))
    assert starts.tolist() == wanted
    # as runs of ids: empty groups vanish, neighbours of one id join
    runs, before = [], None
    for i, k in enumerate(ids.tolist()):
        if k != before:
            runs.append([i, i])
        runs[-1][1], before = i + 1, k
    wanted = [s for a, b in runs for s in range(a, b - length - horizon + 1, stride)]
    assert window_starts(n, length, ids=ids, stride=stride, horizon=horizon).tolist() == wanted
    data = torch.randn(n, 3, generator=g)
    target = torch.arange(n)
    source = ResidentWindows(data, length, target, ids=ids, stride=stride, horizon=horizon)
    pick = torch.randint(0, len(source), (6,), generator=g)
    x, y = source.cut(pick, torch.tensor(0), 0, None)
    for row, at, window in zip(pick.tolist(), y.tolist(), x, strict=True):
        s = wanted[row]
        assert at == s + length - 1 + horizon
        assert torch.equal(window, data[s : s + length])


def test_windows_are_normalised_and_shortened_from_the_front():
    data = torch.randn(40, 5)
    mean, std = data.mean(0), data.std(0)
    source = ResidentWindows(data, 8, torch.arange(40), mean=mean, std=std, dtype=torch.float16)
    x, y = source.cut(torch.tensor([4]), torch.tensor(0), 0, None)
    assert x.shape == (1, 8, 5)
    assert x.dtype == torch.float16
    assert torch.allclose(x[0].float(), (data[4:12] - mean) / std, atol=2e-3)
    short, same = source.cut(torch.tensor([4]), torch.tensor(0), 0, 3)
    assert torch.equal(short, x[:, -3:])
    assert torch.equal(same, y)


def test_misuse_says_what_to_do():
    with pytest.raises(DataError, match="either batch_size or resizing"):
        ResidentLoader(torch.zeros(4))
    with pytest.raises(DataError, match="no samples"):
        ResidentLoader(torch.zeros(0), 2)
    with pytest.raises(DataError, match="one length"):
        ResidentArrays(torch.zeros(3), torch.zeros(4))
    with pytest.raises(DataError, match="uint8"):
        ResidentImages(torch.zeros(3, 4, 4, 3))
    with pytest.raises(DataError, match="have no sizes"):
        list(ResidentLoader(torch.zeros(4), resizing=Resizing([(1, 8)], batch_size=2)))
    with pytest.raises(DataError, match="needs"):
        ResidentWindows(torch.zeros(4, 1), 5)
    with pytest.raises(DataError, match="offsets must rise"):
        window_starts(4, 2, offsets=torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ResidentImages(images().numpy()), "must be a tensor"),
        (lambda: ResidentImages(images(), torch.rand(30)), "integers"),
        (lambda: ResidentImages(images(), torch.arange(30)[:, None]), "integers"),
        (lambda: ResidentImages(images(), torch.arange(29)), "29 labels"),
        (lambda: ResidentImages(images(), torch.arange(30), classes=29), "from 0 to 29"),
        (lambda: ResidentImages(images(), torch.arange(30) - 1, classes=30), "from -1 to 28"),
        (lambda: ResidentImages(images(), torch.arange(30), classes=30, smoothing=1.5), "smoothing"),
        (lambda: ResidentArrays([1, 2, 3]), "takes tensors"),
        (lambda: ResidentArrays(torch.tensor(1.0)), "no samples"),
        (lambda: ResidentLoader(torch.zeros(4), 2.5), "batch_size=2.5 must be a whole"),
        (lambda: ResidentLoader(torch.zeros(4), 2, seed=None), "seed=None must be a whole"),
        (lambda: ResidentLoader(images().numpy(), 4), "no resident source"),
        (lambda: ResidentWindows(torch.ones(9, 2), 3, mean=torch.ones(3), std=torch.ones(3)), "2 columns"),
        (
            lambda: ResidentWindows(torch.ones(9, 2), 3, mean=torch.ones(2), std=torch.tensor([1.0, 0.0])),
            "column 1",
        ),
        (lambda: ResidentWindows(torch.ones(9, 2), 3, offsets=torch.tensor([])), "offsets must rise"),
        (lambda: ResidentWindows(torch.ones(9, 2).numpy(), 3), "data must be a tensor"),
        (lambda: ResidentWindows(torch.ones(9, 2), 3, torch.ones(9).numpy()), "targets must be a tensor"),
        (lambda: ResidentWindows(torch.ones(9, 2), 3, torch.ones(())), "9 rows"),
        (
            lambda: ResidentWindows(torch.ones(9, 2), 3, mean=[1.0, 1.0], std=torch.ones(2)),
            "mean must be a tensor",
        ),
        (
            lambda: ResidentWindows(
                torch.ones(9, 2), 3, mean=torch.tensor([1.0, math.nan]), std=torch.ones(2)
            ),
            "mean of column 1 is nan",
        ),
        (lambda: ResidentWindows(torch.ones(3, 2), 3, ids=["a", "a", "b"]), "ids must be numbers"),
        (lambda: ResidentLoader(ResidentImages(images()), resizing=[(1, 4)]), "resizing"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_kernel_reads_it(make, text):
    with pytest.raises(DataError, match=text):
        make()


def test_images_are_not_moved_out_of_their_reflection():
    source = ResidentImages(images(4), how=Augment(translate=7))
    far = torch.cat([source.cut(torch.arange(4), torch.tensor(e), 0, None) for e in range(50)])
    assert far.min() >= 0
    assert far.max() <= 1
    for how in (
        Augment(translate=8),
        Augment(translate=4, offset=(0, 4)),
        Augment(translate=12, padding="zero"),
    ):
        with pytest.raises(KernelError, match="too small"):
            ResidentImages(images(4), how=how).cut(torch.arange(4), torch.tensor(0), 0, None)
    with pytest.raises(KernelError, match="std"):
        Augment(std=(0.0,))


def test_groups_may_be_arrays_or_lists():
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    wanted = window_starts(7, 2, ids=ids)
    assert wanted.tolist() == [0, 1, 3, 4, 5]
    for same in ({"ids": ids.numpy()}, {"ids": ids.tolist()}, {"offsets": [0, 3, 7]}):
        assert torch.equal(window_starts(7, 2, **same), wanted)


def test_a_loop_goes_on_from_its_checkpoint_to_the_bit(tmp_path):
    def run(folder, stop):
        loop = hotloop.Loop(record=False, seed=0)
        torch.manual_seed(0)
        source = ResidentImages(images(60), torch.arange(60) % 4, Augment(2, flip="random", cutout=2))
        model, optimizer, loader = loop.prepare(
            model := torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)),
            torch.optim.SGD(model.parameters(), lr=0.05),
            ResidentLoader(source, 8, seed=1),
        )
        loop.resume(folder)
        losses = []
        for _ in loop.epochs(3):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                loop.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if loop.updates == stop:
                    loop.save_state(folder, wait=True)
                    return losses
        return losses

    whole = run(tmp_path / "whole", 0)
    assert run(tmp_path / "parts", 11) == whole[:11]
    assert run(tmp_path / "parts", 0) == whole[11:]
    # behind the last batch of an epoch
    assert run(tmp_path / "end", 8) == whole[:8]
    assert run(tmp_path / "end", 0) == whole[8:]


def test_whitened_patches_are_uncorrelated():
    g = torch.Generator().manual_seed(3)
    x = torch.nn.functional.interpolate(torch.rand(40, 3, 6, 6, generator=g), (20, 20), mode="bicubic") * 255
    x = x.clamp(0, 255).permute(0, 2, 3, 1).to(torch.uint8)
    how = Augment(translate=2, mean=(0.5, 0.4, 0.6), std=(0.2, 0.3, 0.25))
    filters = whitening_filters(x, how, eps=0.0)
    assert filters.shape == (24, 3, 2, 2)
    assert torch.equal(filters[:12], -filters[12:])
    plain = ResidentImages(x, how=Augment(mean=how.mean, std=how.std), dtype=torch.float64)
    seen = plain.cut(torch.arange(40), torch.tensor(0), 0, None)
    out = F.conv2d(seen, filters[:12].double()).permute(1, 0, 2, 3).reshape(12, -1)
    assert torch.allclose(out @ out.T / out.shape[1], torch.eye(12).double(), atol=0.02)
