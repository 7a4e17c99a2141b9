"""Each rule on a program that has its fault and on the repaired one: found with the right price, and gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotloop.doctor import Trace, read

Program = Callable[[Any], None]


def traced(machine: Any, program: Program, path: Path, steps: int = 9, **header: Any) -> Trace:
    m = machine()
    for _ in range(steps):
        with m.step():
            program(m)
    m.header.update(header)
    return read(m.write(path))


def step_s(trace: Trace) -> float:
    return trace.case.replay.measured_us / trace.timeline.steps / 1e6


def compute(m: Any, kernels: int = 20, took: float = 40, think: float = 3) -> None:
    for _ in range(kernels):
        m.think(think)
        with m.span("aten::mm"):
            m.launch(took)


def with_item(m: Any) -> None:
    for _ in range(4):
        compute(m, 5)
        m.item()
        m.think(150)


def without_item(m: Any) -> None:
    for _ in range(4):
        compute(m, 5)
        m.think(150)


def with_loader(m: Any) -> None:
    with m.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"):
        m.think(1500)
    compute(m)


def with_workers(m: Any) -> None:
    with m.span("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation"):
        m.think(20)
    compute(m)


def pageable(m: Any) -> None:
    m.copy(400, blocking=True)
    compute(m)


def prefetched(m: Any) -> None:
    m.copy(400, blocking=False, stream=9)
    compute(m)


def thrashing(m: Any) -> None:
    for name in ("cudaMalloc", "cudaFree"):
        m.correlation += 1
        m._add("cuda_runtime", name, m.now, 700.0, correlation=m.correlation)
        m.now += 700
    compute(m)


def stalled(m: Any) -> None:
    with m.span("write the log", "user_annotation"):
        m.think(3000)
    compute(m)


def tiny_kernels(m: Any) -> None:
    compute(m, 100, took=3, think=20)


def large_kernels(m: Any) -> None:
    compute(m, 10, took=90, think=20)


def full_precision(m: Any) -> None:
    for _ in range(20):
        m.think(3)
        m.launch(60, "ampere_sgemm_128x64_tn")


def bfloat16(m: Any) -> None:
    for _ in range(20):
        m.think(3)
        m.launch(30, "ampere_bf16_s16816gemm_bf16_128x128")


def exposed(m: Any) -> None:
    compute(m)
    m.launch(300, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")


def hidden(m: Any) -> None:
    compute(m, 4)
    m.launch(300, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=20)
    compute(m, 16)


def one_by_one(m: Any) -> None:
    compute(m, 5)
    with m.span("Optimizer.step#SGD.step", "user_annotation"):
        for _ in range(80):
            m.think(8)
            m.launch(2, "void at::native::vectorized_elementwise_kernel<4, add>")


def foreach(m: Any) -> None:
    compute(m, 5)
    with m.span("Optimizer.step#SGD.step", "user_annotation"):
        for _ in range(3):
            m.think(8)
            m.launch(50, "void multi_tensor_apply_kernel<sgd>")


PAIRS: list[tuple[str, Program, Program, float]] = [
    ("host-sync", with_item, without_item, 0.1),
    ("data-loading", with_loader, with_workers, 0.1),
    ("blocking-copy", pageable, prefetched, 0.1),
    ("allocator", thrashing, compute, 0.1),
    ("host-stall", stalled, compute, 0.1),
    ("tensor-cores", full_precision, bfloat16, 0.1),
    ("optimizer", one_by_one, foreach, 0.15),
]


@pytest.mark.parametrize(("rule", "bad", "good", "within"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_a_fault_is_found_first_and_priced_by_what_its_repair_saves(
    rule: str, bad: Program, good: Program, within: float, machine, tmp_path: Path
) -> None:
    slow = traced(machine, bad, tmp_path / "slow.json")
    fast = traced(machine, good, tmp_path / "fast.json")
    finding = slow.findings()[0]
    assert finding.rule == rule
    assert finding.per_step == pytest.approx(step_s(slow) - step_s(fast), rel=within)
    assert finding.fix
    assert slow.diagnosis.verdict.startswith(finding.title)
    assert [other.rule for other in fast.findings()] == []


def test_launch_bound_is_found_and_bounded_by_the_device(machine, tmp_path: Path) -> None:
    trace = traced(machine, tiny_kernels, tmp_path / "a.json")
    (finding,) = trace.findings()
    assert finding.rule == "launch-bound"
    # half of the 24 us between two launches
    assert finding.per_step == pytest.approx(100 * 12e-6, rel=0.1)
    assert finding.high is not None
    assert finding.high / trace.timeline.steps == pytest.approx(100 * 0.9 * 24e-6, rel=0.1)
    assert traced(machine, large_kernels, tmp_path / "b.json").findings() == []


def test_python_stacks_are_said_to_slow_the_host(machine, tmp_path: Path) -> None:
    trace = traced(machine, tiny_kernels, tmp_path / "a.json", with_stack=1)
    assert any("stacks" in text for text in trace.findings()[0].evidence)


def test_exposed_collectives_are_an_upper_bound(machine, tmp_path: Path) -> None:
    trace = traced(machine, exposed, tmp_path / "a.json")
    (finding,) = trace.findings()
    assert finding.rule == "communication"
    assert finding.at_most
    assert finding.per_step == pytest.approx(300e-6, rel=0.1)
    assert traced(machine, hidden, tmp_path / "b.json").findings() == []


def test_a_wait_behind_a_busy_device_is_harmless(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        compute(m, 10, took=100)
        m.correlation += 1
        end = m.free[7] - 400
        m._add("cuda_runtime", "cudaEventSynchronize", m.now, end - m.now, correlation=m.correlation)
        m.now = end

    diagnosis = traced(machine, program, tmp_path / "a.json").diagnosis
    assert diagnosis.findings == []
    assert [(f.rule, f.seconds) for f in diagnosis.harmless] == [("host-sync", 0.0)]
    assert diagnosis.verdict.startswith("Nothing to repair")


def test_a_copy_from_pageable_memory_that_makes_no_sync_call_is_found(traces: Path) -> None:
    trace = read(next((traces / "pytorch__benchmark/_history/6c9ec42").glob("*.json")))
    finding = trace.findings()[0]
    assert finding.rule == "blocking-copy"
    assert "without any synchronising call" in finding.evidence[0]
    fixed = read(next((traces / "pytorch__benchmark/_history/33817dc").glob("*.json")))
    assert fixed.findings() == []


def test_a_straggler_gives_no_price_to_its_victim(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        for index in range(10):
            compute(m, 2)
            m.launch(60_000 if index == 5 else 20, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)")

    finding = traced(machine, program, tmp_path / "a.json").findings()[0]
    assert finding.rule == "communication"
    assert finding.seconds is None
    assert "straggler" in finding.title


def test_ranks_show_the_straggler(machine, tmp_path: Path) -> None:
    from hotloop.doctor.rules.ranks import compare_ranks

    for rank, (own, collective) in enumerate([(100, 900), (900, 100), (500, 500)]):

        def program(m: Any, own: float = own, collective: float = collective) -> None:
            compute(m, 10, took=own / 10)
            m.launch(collective, "ncclDevKernel_AllReduce")

        m = machine()
        for _ in range(4):
            with m.step():
                program(m)
        m.header["distributedInfo"] = {"rank": rank}
        (tmp_path / "run").mkdir(exist_ok=True)
        m.write(tmp_path / "run" / f"rank{rank}.json")
    trace = read(tmp_path / "run")
    ranks = compare_ranks([each.case for each in trace.ranks], [each.name for each in trace.ranks])
    assert ranks.matched
    assert ranks.straggler is not None
    assert ranks.straggler.rank == 1
    assert ranks.transfer_ms == pytest.approx(0.1)
    assert ranks.waiting_ms == pytest.approx(0.8)


def test_gradients_reduced_in_every_micro_step(machine, tmp_path: Path) -> None:
    def program(m: Any, each: bool) -> None:
        for micro in range(4):
            with m.span("DistributedDataParallel.forward", "user_annotation"):
                compute(m, 5)
            compute(m, 5)
            if each or micro == 3:
                m.launch(500, "ncclDevKernel_AllReduce_Sum_f32")
        with m.span("Optimizer.step#SGD.step", "user_annotation"):
            m.launch(20, "multi_tensor_apply_kernel")

    slow = traced(machine, lambda m: program(m, True), tmp_path / "a.json")
    fast = traced(machine, lambda m: program(m, False), tmp_path / "b.json")
    finding = next(f for f in slow.findings() if f.rule == "accumulation-sync")
    saved = slow.what_if([finding])
    assert saved.saved_s / 8 == pytest.approx(step_s(slow) - step_s(fast), rel=0.1)
    assert "accumulation-sync" not in [f.rule for f in fast.findings()]


def test_compiling_in_steady_steps(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        version = m.steps
        with m.span(f"Torch-Compiled Region: 0/{version}"):
            if m.steps > 1:
                with m.span("_compile.compile_inner", "cpu_op"):
                    m.think(5000)
            compute(m)

    slow = traced(machine, program, tmp_path / "a.json")
    steady = traced(machine, compute, tmp_path / "b.json")
    finding = slow.findings()[0]
    assert finding.rule == "recompiles"
    assert finding.per_step == pytest.approx(step_s(slow) - step_s(steady), rel=0.1)
    assert steady.findings() == []


def test_chains_of_element_wise_kernels_are_priced_by_their_bytes(machine, tmp_path: Path) -> None:
    size, rate = 50_000_000, 2e6  # elements, bytes in a microsecond
    each = 2 * 4 * size / rate

    def program(m: Any) -> None:
        for _ in range(5):
            with m.span(
                "aten::mul",
                **{
                    "External id": m.correlation + 1,
                    "Input Dims": [[size], []],
                    "Input type": ["float", "Scalar"],
                },
            ):
                m.launch(
                    each,
                    "void at::native::vectorized_elementwise_kernel<4, mul>",
                    **{"External id": m.correlation + 1},
                )
        m.launch(400, "gemm_bf16")
        for _ in range(5):
            m.launch(10, "gemm_bf16")

    (finding,) = traced(machine, program, tmp_path / "a.json").findings()
    assert finding.rule == "fusion"
    # five kernels read and write once each; one would do it once
    assert finding.per_step == pytest.approx(4 * each / 1e6, rel=0.1)


def test_first_time_costs_are_said_and_not_counted(machine, tmp_path: Path) -> None:
    m = machine()
    with m.span("aten::mm"):
        m.launch(10)
    for name in ("cudaLaunchKernel", "cudaMalloc", "cudaFree"):
        m._add("cuda_runtime", name, m.now, 40_000.0, correlation=900 + m.correlation)
        m.now += 40_000
    for _ in range(30):
        m.launch(10)
        m.think(20)
    diagnosis = read(m.write(tmp_path / "a.json")).diagnosis
    assert diagnosis.findings == []
    assert [note.rule for note in diagnosis.notes] == ["cold-start"]
    assert "one-time costs" in diagnosis.verdict


def test_a_gpu_that_is_never_used(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(60):
        with m.span("aten::addmm"):
            m.think(100)
    trace = read(m.write(tmp_path / "a.json"))
    assert [f.rule for f in trace.findings()] == ["coverage"]
    assert "never used" in trace.diagnosis.verdict


def test_lost_device_events_conclude_nothing(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(60):
        with m.span("aten::addmm"):
            m.think(100)
            m.launch(50)
    m.events = [event for event in m.events if event["cat"] != "kernel"]
    diagnosis = read(m.write(tmp_path / "a.json")).diagnosis
    assert diagnosis.findings == []
    assert "missing" in diagnosis.verdict


def test_idle_time_without_a_cause_is_called_that(traces: Path) -> None:
    trace = read(next(traces.rglob("sglang_Qwen3-8B_decode.json.gz")))
    assert trace.findings() == []
    assert trace.diagnosis.verdict.startswith("The device was idle for reasons that this trace does not show")


def test_a_comment_in_the_source_silences_a_finding(machine, tmp_path: Path) -> None:
    from hotloop.doctor.trace import places

    file = tmp_path / "train.py"

    def program(m: Any) -> None:
        with (
            m.span(f"{file}(1): step", "python_function"),
            m.span("<built-in method item of Tensor object at 0x7f>", "python_function"),
        ):
            with_item(m)

    for comment, rules in (("", ["host-sync"]), ("  # hotloop: ignore[host-sync]", [])):
        file.write_text(f"def step(loss):\n    return loss.item(){comment}\n")
        places._source.cache_clear()
        trace = traced(machine, program, tmp_path / "a.json")
        assert [f.rule for f in trace.findings()] == rules
        assert len(trace.diagnosis.silenced) == 1 - len(rules)
    places._source.cache_clear()


def test_two_waits_that_hide_each_other_are_one_finding(machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        compute(m)
        for line in (3, 9):
            with m.span(f"gone/train.py({line}): f{line}", "python_function"):
                m.item()
        m.think(600)

    (finding,) = traced(machine, program, tmp_path / "a.json").findings()
    assert finding.rule == "host-sync"
    assert "2 places" in finding.title
    assert len(finding.evidence) == 2


def test_ids_are_unique_and_documented() -> None:
    from hotloop.doctor.rules import RULES

    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    pages = Path(__file__).resolve().parents[3] / "docs" / "rules"
    assert {page.stem for page in pages.glob("*.md")} - {"index"} == set(ids)


def printing(m: Any) -> None:
    compute(m, 10)
    with m.span("aten::reshape"):
        m.think(5)
    for name in ("isfinite", "ne", "__and__", "masked_select", "abs", "min", "max"):
        m.think(20)
        with m.span(f"aten::{name}"):
            m.launch(2, "void at::native::vectorized_elementwise_kernel<4, f>")
            if name == "masked_select":
                m.sync()
    for _ in range(4):
        m.think(20)
        with m.span("aten::is_nonzero"), m.span("aten::item"):
            m.item()
    m.think(60)
    with m.span("aten::linear"):
        m.launch(40)


def no_printing(m: Any) -> None:
    compute(m, 10)
    m.think(60)
    with m.span("aten::linear"):
        m.launch(40)


def test_printing_is_priced_with_all_that_it_does(machine, tmp_path: Path) -> None:
    slow = traced(machine, printing, tmp_path / "slow.json")
    fast = traced(machine, no_printing, tmp_path / "fast.json")
    finding = slow.findings()[0]
    assert (finding.rule, finding.title) == ("host-sync", "The host waits for the device: printing a tensor.")
    assert finding.per_step == pytest.approx(step_s(slow) - step_s(fast), rel=0.1)
    assert "5 waits each" in finding.evidence[0]


def product(m: Any, took: float, name: str) -> None:
    for index in range(10):
        m.think(3)
        arguments = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["float", "float"]}
        with m.span("aten::mm", **{"External id": 10 * m.steps + index, **arguments}):
            m.launch(took, name, **{"External id": 10 * m.steps + index})


def test_tensor_cores_are_priced_by_the_operations_of_the_product(machine, tmp_path: Path) -> None:
    """2 x 4096^3 operations at three quarters of 132 x 4096 x 1.75 GHz: 194 us, as an H200 takes (186 us)."""
    name = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize256x64x8_stage3_warpsize2x2x1_ffma_aligna4_execute_kernel"
    trace = traced(machine, lambda m: product(m, 2680.0, name), tmp_path / "a.json")
    finding = trace.findings()[0]
    assert finding.rule == "tensor-cores"
    expected = 2 * 4096**3 / (0.75 * 132 * 4096 * 1.75e9)
    assert finding.per_step == pytest.approx(10 * (2680e-6 - expected), rel=0.01)
    quick = (
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x16_kernel"
    )
    assert traced(machine, lambda m: product(m, 194.0, quick), tmp_path / "b.json").findings() == []


def test_memory_given_back_by_name_is_told_by_its_line(machine, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("def step():\n    forward()\n    torch.cuda.empty_cache()\n")

    def program(m: Any) -> None:
        compute(m)
        with m.span(f"{source}(1): step", "python_function"):
            m._add("cuda_runtime", "cudaMalloc", m.now, 900.0, correlation=0)
            m.now += 900
            with m.span("torch/cuda/memory.py(212): empty_cache", "python_function"):
                m._add("cuda_runtime", "cudaFree", m.now, 300.0, correlation=0)
                m.now += 300

    place = traced(machine, program, tmp_path / "a.json").findings()[0].place
    assert place is not None
    assert (place.line, place.exact) == (3, True)


def test_a_backward_kernel_is_told_by_the_line_of_its_forward(machine, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("def step(x):\n    loss = model(x).sum()\n    loss.backward()\n")
    name = "ampere_sgemm_128x64_tn"

    def program(m: Any) -> None:
        with (
            m.span(f"{source}(1): step", "python_function"),
            m.span("nn.Module: Linear_0", "python_function"),
            m.span("aten::addmm", **{"Sequence number": m.steps, "Fwd thread id": 0}),
        ):
            m.launch(500, name)
        place = len(m.events)
        with m.span("autograd::engine::evaluate_function: AddmmBackward0", **{"Sequence number": m.steps}):
            m.launch(900, name)
        for event in m.events[place:]:
            if event["cat"] != "kernel":
                event["tid"] = 2

    place = traced(machine, program, tmp_path / "a.json").findings()[0].place
    assert place is not None
    assert (place.function, place.line, place.exact) == ("step", 2, True)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("SGD", "+ torch.optim.SGD(model.parameters(), fused=True)"),
        ("RMSprop", "+ torch.optim.RMSprop(model.parameters(), foreach=True)"),
        ("Lion", "give Lion a foreach or fused update"),
    ],
)
def test_the_fix_names_the_optimizer_of_the_trace(name: str, fix: str, machine, tmp_path: Path) -> None:
    def program(m: Any) -> None:
        compute(m, 5)
        with m.span(f"Optimizer.step#{name}.step", "user_annotation"):
            for _ in range(80):
                m.think(8)
                m.launch(2, "void at::native::vectorized_elementwise_kernel<4, add>")

    finding = traced(machine, program, tmp_path / "a.json").findings()[0]
    assert finding.rule == "optimizer"
    assert fix in finding.fix


def test_work_without_a_launch_is_not_taken_for_that_of_a_graph(machine, tmp_path: Path) -> None:
    m = machine()
    m._add("cuda_runtime", "cudaGraphLaunch", m.now, 4.0, correlation=10**6)
    m.think(10)
    for _ in range(60):
        with m.span("aten::addmm"):
            m.think(20)
            m.launch(50)
    m.events = [e for e in m.events if e["name"] != "cudaLaunchKernel"]
    verdict = read(m.write(tmp_path / "a.json")).diagnosis.verdict
    assert "graph" not in verdict
    assert "incomplete: 100%" in verdict


def test_the_loader_of_a_program_on_the_cpu_is_told(machine, tmp_path: Path) -> None:
    m = machine()
    for _ in range(8):
        with m.step():
            with m.span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation"):
                m.think(75)
            with m.span("aten::addmm"):
                m.think(25)
    del m.header["deviceProperties"]
    trace = read(m.write(tmp_path / "a.json"))
    assert trace.findings() == []
    assert "75% of the time goes by in the data loader" in trace.diagnosis.notes[0].evidence


def test_what_if_takes_one_id(machine, tmp_path: Path) -> None:
    trace = traced(machine, with_item, tmp_path / "a.json")
    assert trace.what_if("host-sync") == trace.what_if(["host-sync"])
