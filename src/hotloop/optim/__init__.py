"""Optimizers on the device, averaged weights; gradients, clipping, refused updates, rates and schedules run ahead."""

from hotloop.optim.adam import Adam, AdamW
from hotloop.optim.averaging import EMA, AveragedWeights
from hotloop.optim.courses import (
    one_cycle,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_stable_decay,
)
from hotloop.optim.curves import Curve, Mark, draw_page, draw_svg, draw_text
from hotloop.optim.gradients import as_real_dense, clip_coefficient, gradients_of, total_norm
from hotloop.optim.grouping import no_decay, split_matrices
from hotloop.optim.masters import MasterPairs, add_masters, masters_of
from hotloop.optim.muon import Muon
from hotloop.optim.orthogonal import orthogonalise
from hotloop.optim.range_test import RangeTest, Sweep, judge_range
from hotloop.optim.rate_finder import find_rate, proportions_of, put_rate
from hotloop.optim.rate_scheduler import RateScheduler
from hotloop.optim.rates import (
    Piece,
    Rate,
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    linear,
    piecewise,
)
from hotloop.optim.resident import ResidentOptimizer
from hotloop.optim.sgd import SGD
from hotloop.optim.shadow import ShadowSchedule, is_metric_driven
from hotloop.optim.skipping import MaskedStep, choose_route, device_settings, prefer_fused, takes_device_rate
from hotloop.optim.takeover import Takeover, TestOver

__all__ = [
    "EMA",
    "SGD",
    "Adam",
    "AdamW",
    "AveragedWeights",
    "Curve",
    "Mark",
    "MaskedStep",
    "MasterPairs",
    "Muon",
    "Piece",
    "RangeTest",
    "Rate",
    "RateScheduler",
    "ResidentOptimizer",
    "ShadowSchedule",
    "Sweep",
    "Takeover",
    "TestOver",
    "add_masters",
    "as_real_dense",
    "choose_route",
    "clip_coefficient",
    "constant",
    "cosine",
    "device_settings",
    "draw_page",
    "draw_svg",
    "draw_text",
    "exponential",
    "find_rate",
    "gradients_of",
    "inverse_sqrt",
    "is_metric_driven",
    "judge_range",
    "linear",
    "masters_of",
    "no_decay",
    "one_cycle",
    "orthogonalise",
    "piecewise",
    "prefer_fused",
    "proportions_of",
    "put_rate",
    "split_matrices",
    "takes_device_rate",
    "total_norm",
    "warmup_cosine",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_stable_decay",
]
