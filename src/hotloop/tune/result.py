"""What tuning found: every rung with its verdict, what is kept, what it gives; as plain values too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hotloop.tune.checks import Fault
from hotloop.tune.ladder import Pruned
from hotloop.tune.measure import Gain
from hotloop.tune.proof import Verdict
from hotloop.tune.rung import Rung, join

__all__ = ["Result", "Tried"]


@dataclass
class Tried:
    """One rung after its trial.

    Attributes:
        outcome: "kept", "not faster", "rejected" (not the same training), "does not pay" (it would take more steps than
            the run has), "failed" (crash, hang, out of memory) or "not reached".
        why: in one sentence. gain: over the best before it. verdict: of the proof, where it came to that.
        fault: what is wrong with it. step_s: seconds per step, median. memory_bytes: its peak.
        extra_s: seconds that it takes once, for compiling say, more than the best before it. break_even: steps after
            which that is won back. lines: the last that a failed trial wrote.
    """

    rung: Rung
    outcome: str
    why: str = ""
    gain: Gain | None = None
    verdict: Verdict | None = None
    fault: Fault | None = None
    step_s: float | None = None
    memory_bytes: int = 0
    extra_s: float = 0.0
    break_even: int | None = None
    lines: list[str] = field(default_factory=list)


@dataclass
class Result:
    """All that tuning found.

    Attributes:
        script: as it was given. machine: its kind. facts: what was seen of the script as it is.
        findings_before, findings_after: the doctor's. step_s: seconds per step of the script as it is, median.
        spread: half the width of the 95 % interval of that median's mean, relative.
        tried, pruned: rungs. kept: those in force at the end, in order.
        gain: of all kept together over the script as it is, measured anew at the end; None if that was not reached.
        gain_fp32: likewise over fp32 eager. baseline_is_fp32: the script as it is is that already.
        horizon, seeds: of the proof. band: (first step, last step, reference, unit) of each block of the loss.
        losses: name of the run -> step -> loss, for the picture. loss: the name of the loss.
        interrupted: Ctrl-C, or the budget ended it early. seconds: that it took. trials: processes started.
        notes: what the proof could not see. total_steps: of the script's whole run, if known.
    """

    script: str
    machine: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    findings_before: dict[str, Any] | None = None
    findings_after: dict[str, Any] | None = None
    step_s: float = 0.0
    memory_bytes: int = 0
    tried: list[Tried] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    kept: list[Rung] = field(default_factory=list)
    gain: Gain | None = None
    gain_fp32: Gain | None = None
    baseline_is_fp32: bool = False
    exact: bool = False
    horizon: int = 0
    seeds: int = 0
    loss: str | None = None
    band: list[tuple[int, int, float, float]] = field(default_factory=list)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    interrupted: str = ""
    seconds: float = 0.0
    trials: int = 0
    notes: list[str] = field(default_factory=list)
    total_steps: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all kept rungs together."""
        return join(self.kept)[0]

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "script": self.script,
            "machine": self.machine,
            "settings": self.settings,
            "step_s": self.step_s,
            "gain": _gain(self.gain),
            "gain_over_fp32_eager": _gain(self.gain_fp32),
            "exact": self.exact,
            "rungs": [
                {
                    "name": t.rung.name,
                    "outcome": t.outcome,
                    "why": t.why,
                    "suggested_by": t.rung.why,
                    "gain": _gain(t.gain),
                    "steps_per_s": None if not t.step_s else 1 / t.step_s,
                    "memory_bytes": t.memory_bytes,
                    "extra_s": t.extra_s,
                    "break_even_steps": t.break_even,
                    "fault": None
                    if t.fault is None
                    else {"kind": t.fault.kind, "text": t.fault.text, "step": t.fault.step},
                    "lines": t.lines,
                }
                for t in self.tried
            ],
            "not_tried": [{"name": p.name, "why": p.why, "diff": p.diff} for p in self.pruned],
            "proof": {
                "steps": self.horizon,
                "reference_seeds": self.seeds + 1,
                "loss": self.loss,
                "metrics": {k: list(v) for k, v in self.metrics.items()},
                "notes": self.notes,
            },
            "doctor_before": self.findings_before,
            "doctor_after": self.findings_after,
            "interrupted": self.interrupted,
            "seconds": self.seconds,
            "trials": self.trials,
            "total_steps": self.total_steps,
        }


def _gain(gain: Gain | None) -> dict[str, Any] | None:
    if gain is None:
        return None
    return {
        "ratio": gain.ratio,
        "low": gain.low,
        "high": gain.high,
        "rounds": gain.rounds,
        "verdict": gain.verdict,
    }
