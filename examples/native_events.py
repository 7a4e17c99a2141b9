"""A decision for every event, with no server in between: 1,000,000 replayed events through a compiled state machine.

    python examples/native_events.py [--events 1000000] [--model lstm|tcn]

A series is replayed event by event. On arrival the machine's commit gives a value and a threshold turns it into a
decision; then, off the critical path, `prep()` computes what does not depend on the next event. Printed: microseconds
from arrival to decision, clock included, and the machine's answer at the end beside PyTorch's.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop import native

FEATURES = 32


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(FEATURES, 64, 2, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(FEATURES, FEATURES, 3, dilation=d) for d in (1, 2, 4, 8))
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = torch.relu(conv(F.pad(x, (2 * conv.dilation[0], 0)))) + x
        return self.head(x[:, :, -1])


def replay(machine: native.CompiledModel, events: np.ndarray, threshold: float) -> tuple[np.ndarray, int]:
    """Nanoseconds from each event's arrival to its decision, and how many decisions were taken."""
    clock, scalar, prep = time.perf_counter_ns, machine.scalar, machine.prep
    latencies = np.zeros(len(events), np.int64)
    taken = 0
    machine.warm()
    gc.disable()
    for index, event in enumerate(events):
        arrival = clock()
        if scalar(event) > threshold:
            taken += 1
        latencies[index] = clock() - arrival
        prep()
    gc.enable()
    return latencies, taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--model", choices=("lstm", "tcn"), default="tcn")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = (LSTM() if options.model == "lstm" else TCN()).eval()
    window = torch.randn(1, 64, FEATURES)
    with tempfile.TemporaryDirectory() as folder:
        machine = native.build(model, window, streaming=True, out=Path(folder) / "machine.so")
        rng = np.random.default_rng(0)
        events = rng.standard_normal((options.events, FEATURES), np.float32)
        latencies, taken = replay(machine, events, 0.0)
        p50, p99, p999 = np.percentile(latencies, (50, 99, 99.9)) / 1e3
        print(
            f"{options.events:,} events, {taken:,} decisions: arrival to decision p50 {p50:.2f} us, p99 {p99:.2f}, "
            f"p99.9 {p999:.2f}, slowest {latencies.max() / 1e3:.0f}"
        )
        # the machine has seen more than a window; the memory of a TCN is shorter than that, an LSTM's has faded
        last = torch.from_numpy(events[-64:])[None]
        machine.reset()
        for event in events[-64:]:
            value = machine.scalar(event)
        with torch.no_grad():
            print(f"last window: {value:.6f}, in PyTorch {model(last).item():.6f}")


if __name__ == "__main__":
    main()
