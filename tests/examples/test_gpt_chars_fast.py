"""The recipe of the fast character GPT, small, on the CPU: its batches, that it learns, that runs are their seed's."""

import pytest
import torch
from examples import gpt_chars_fast as example

TEXT = "".join(chr(97 + (i * i + i // 7) % 13) for i in range(6000))


@pytest.fixture
def small(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setenv("HOTLOOP_PROGRESS", "0")
    gpt = example.GPT
    monkeypatch.setattr(example, "GPT", lambda *args: gpt(*args, width=32, heads=2, layers=1))
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def test_it_is_of_nanogpts_size():
    with torch.device("meta"):
        model = example.GPT(65)
    assert 10.6e6 <= sum(p.numel() for p in model.parameters()) < 10.7e6


def test_the_last_tenth_is_held_out_whole(small):
    train, held, characters = example.read_text(small, torch.device("cpu"))
    ids = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    assert characters == len(ids)
    assert train.tolist() == [ids[c] for c in TEXT[:5400]]
    assert held.shape == (2, 2, 256)
    assert held[0].flatten().tolist() == [ids[c] for c in TEXT[5400 : 5400 + 512]]
    assert held[1].flatten().tolist() == [ids[c] for c in TEXT[5401 : 5401 + 512]]


def test_batches_follow_the_stages_and_a_pass_sees_each_window_once():
    recipe = example.Recipe(updates=10, stages=((0.4, 8, 6), (0.6, 16, 3)))
    text = torch.arange(200)
    found = list(example.batches(text, recipe))
    assert [tuple(b.shape) for b in found] == [(6, 9)] * 4 + [(3, 17)] * 6
    assert all(torch.equal(row, torch.arange(row[0], row[0] + len(row))) for b in found for row in b)
    odd = example.Recipe(updates=13, stages=((0.5, 8, 6), (0.5, 16, 3)))
    assert [b.shape[1] for b in example.batches(text, odd)] == [9] * 6 + [17] * 7
    # 24 windows of 8 fit: four batches of 6 are one pass
    starts = torch.cat([b[:, 0] for b in found[:4]])
    assert len(set(starts.tolist())) == len(starts)


def test_it_learns_and_a_seed_gives_the_same_run_again(small):
    recipe = example.Recipe(updates=24, stages=((0.5, 64, 8), (0.5, 256, 4)), look_every=6, target=0.0)
    run = example.make_run(small, recipe, "off")
    _, first = run(0)
    _, again = run(0)
    _, other = run(1)
    assert [k for k, _ in first][-1] == 24
    assert first == again
    assert first != other
    uniform = torch.tensor(13.0).log().item()
    assert first[-1][1] < 0.95 * uniform


def test_it_stops_at_the_target(small):
    recipe = example.Recipe(updates=24, stages=((1.0, 64, 8),), first_look=0.2, look_every=2, target=2.4)
    _, looks = example.make_run(small, recipe, "off")(0)
    assert looks[-1][1] <= 2.4
    assert looks[-1][0] < 24
    assert all(loss > 2.4 for _, loss in looks[:-1])


@pytest.mark.parametrize("characters", [1000, 6399])
def test_a_text_shorter_than_a_batch_is_told(small, tmp_path, characters):
    """And not waited for: no window is held out, or the one batch is a character short."""
    path = tmp_path / "short.txt"
    path.write_text((TEXT + TEXT)[:characters])
    recipe = example.Recipe(updates=4, stages=((1.0, 64, 89 if characters > 1000 else 2),))
    with pytest.raises(ValueError, match=r"short\.txt is too short"):
        example.make_run(str(path), recipe, "off")
    path.write_text((TEXT + TEXT)[:6400])
    assert len(example.make_run(str(path), recipe, "off")(0)[1]) > 0
