"""Precisions: what a device can do, and what the refusal of the rest says."""

import json

import pytest
import torch

import hotloop
from hotloop.errors import PrecisionError, SettingError
from hotloop.hardware import precisions
from hotloop.precision import Precision, autocast_context, find_precision, outputs_to_float32

CPU = torch.device("cpu")


@pytest.fixture
def flags(monkeypatch):
    def choose(*names):
        monkeypatch.setattr(precisions, "_cpu_flags", lambda: frozenset(names))
        precisions._cpu_precisions.cache_clear()

    yield choose
    precisions._cpu_precisions.cache_clear()


def test_a_plain_cpu_has_no_fp16_and_says_what_it_has(flags):
    flags("avx2")
    with pytest.raises(PrecisionError) as caught:
        hotloop.Loop("fp16", device="cpu", record=False)
    assert "fp16" in str(caught.value)
    assert "bf16, fp32" in str(caught.value)
    with pytest.raises(PrecisionError, match="tf32"):
        find_precision("tf32", CPU)
    assert precisions.supported_precisions(CPU)["bf16"] == "emulated, slow"


def test_a_cpu_with_fp16_in_silicon_trains_in_it(flags):
    flags("avx512_fp16", "avx512_bf16")
    assert find_precision("fp16", CPU).scaled
    assert precisions.supported_precisions(CPU)["bf16"] == "in silicon"
    loop = hotloop.Loop("fp16", device="cpu", record=False)
    torch.manual_seed(1)  # a gradient that times 65536 is an fp16 number
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = loop.prepare(model, optimizer)
    before = model.weight.detach().clone()
    x = torch.ones(2, 4)
    out = model(x)
    sign = out[0, 0].sign()
    loss = out.square().mean()
    loop.backward(loss)
    optimizer.step()
    loop.end_training()
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)
    # the gradient of mean(out^2) for rows of ones is 2 out; the scale of 65536 has gone from it again
    torch.testing.assert_close(model.weight, before - 0.1 * 2.0 * loss.sqrt() * sign, rtol=1e-2, atol=1e-3)


def test_autocast_changes_the_dtype_and_nothing_else():
    linear = torch.nn.Linear(4, 2)
    with autocast_context(CPU, torch.bfloat16):
        assert linear(torch.ones(1, 4)).dtype == torch.bfloat16
    with autocast_context(CPU, None):
        assert linear(torch.ones(1, 4)).dtype == torch.float32


def test_outputs_come_back_in_float32_whatever_holds_them():
    half = torch.ones(2, dtype=torch.bfloat16)
    ids = torch.ones(2, dtype=torch.int64)
    out = outputs_to_float32({"a": [half, ids], "b": (half, "text", None)})
    assert out["a"][0].dtype == out["b"][0].dtype == torch.float32
    assert out["a"][1] is ids
    assert out["b"][1:] == ("text", None)
    same = {"x": torch.ones(1)}
    assert outputs_to_float32(same) is same


def test_tf32_is_a_switch_of_torch(monkeypatch):
    monkeypatch.setattr(precisions, "_cpu_precisions", lambda: (("fp32", ""), ("tf32", "")))
    before = torch.get_float32_matmul_precision()
    try:
        hotloop.Loop("tf32", device="cpu", record=False).end_training()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("no", "fp32"),
        ("32-true", "fp32"),
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("BF16-True", "bf16-true"),
        ("transformer-engine", "fp8"),
    ],
)
def test_names_of_the_peers(alias, name):
    assert Precision(alias).name == name


def test_options_settle_to_one_form():
    assert hotloop.Precision is Precision
    assert Precision("bf16", weights="bf16", master="fp32") == Precision("bf16-true")
    assert Precision("bf16", weights="fp32") == Precision("bf16")
    assert Precision("bf16-true", master="none").master == "none"
    assert Precision("fp8", layers="blocks.*") == Precision("fp8", layers=["blocks.*"])
    assert hash(Precision("fp8")) == hash(Precision("fp8", gradients="e5m2", scaling="tensorwise"))
    assert Precision("fp8").options() == {
        "name": "fp8",
        "weights": "fp32",
        "layers": "measured",
        "scaling": "tensorwise",
        "gradients": "e5m2",
    }
    assert str(Precision("bf16")) == "bf16"
    assert str(Precision("bf16-true")) == "bf16-true (weights=bf16, master=fp32)"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("bf15", {}, "fp32, tf32, bf16, bf16-true, fp16, fp8, auto"),
        ("fp16", {"weights": "bf16"}, "no option weights"),
        ("bf16", {"master": "fp32"}, "no option master"),
        ("bf16-true", {"weights": "fp32"}, 'it is "bf16"'),
        ("bf16-true", {"master": "fp64"}, "fp32, none"),
        ("bf16", {"layers": "all"}, 'options of "fp8"'),
        ("fp32", {"emulated": True}, 'options of "fp8"'),
        ("fp8", {"scaling": "blockwise"}, "tensorwise, rowwise"),
        ("fp8", {"gradients": "e3m4"}, "e5m2, e4m3"),
        ("fp8", {"layers": ()}, "patterns"),
        ("fp8", {"layers": (1,)}, "patterns"),
    ],
)
def test_what_fits_nothing_is_refused(name, options, said):
    with pytest.raises(SettingError) as caught:
        Precision(name, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["fp4", "mxfp8", "nvfp4"])
def test_formats_of_blackwell_are_known_and_refused(name):
    with pytest.raises(PrecisionError) as caught:
        hotloop.Loop(name, device="cpu", record=False)
    for part in (name, "Blackwell", "B200", "fp32", "cpu"):
        assert part in str(caught.value)


def test_fp8_without_units_is_refused_with_the_way_to_try_it():
    with pytest.raises(PrecisionError) as caught:
        hotloop.Loop("fp8", device="cpu", record=False)
    for part in ("Hopper", "emulated=True", "fp32"):
        assert part in str(caught.value)
    assert find_precision(Precision("fp8", emulated=True), CPU).autocast == torch.bfloat16


def test_cards_that_have_fp8(monkeypatch):
    monkeypatch.setattr(precisions, "_cuda_precisions", precisions._cuda_precisions.__wrapped__)
    device = torch.device("cuda", 0)
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        assert ("fp8" in precisions.supported_precisions(device)) == has


def test_a_precision_is_an_argument_and_in_the_record(tmp_path, monkeypatch):
    wanted = Precision("bf16", weights="bf16", master="none")
    loop = hotloop.Loop(wanted, device="cpu", record=tmp_path / "a")
    assert loop.precision == wanted
    loop.end_training()
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    expected = {"name": "bf16-true", "weights": "bf16", "master": "none"}
    assert record["settings"]["in_force"]["precision"] == expected
    monkeypatch.setenv("HOTLOOP_OVERRIDE", "precision=fp32")
    loop = hotloop.Loop(wanted, device="cpu", record=False)
    assert loop.precision.name == "fp32"
    loop.end_training()


@pytest.mark.parametrize("source", ["variable", "file", "override"])
def test_every_source_takes_every_name(source, tmp_path, monkeypatch):
    for name in ("fp32", "bf16", "bf16-true", "auto"):
        file = None
        if source == "file":
            file = tmp_path / "settings.toml"
            file.write_text(f'precision = "{name}"\n')
        elif source == "variable":
            monkeypatch.setenv("HOTLOOP_PRECISION", name)
        else:
            monkeypatch.setenv("HOTLOOP_OVERRIDE", f"precision={name}")
        loop = hotloop.Loop(device="cpu", record=False, settings=file)
        assert loop.settings["precision"] == name
        assert loop.precision.name == name or name == "auto"
        loop.end_training()
