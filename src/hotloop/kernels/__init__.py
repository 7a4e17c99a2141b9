"""Kernels where the stock ones lose: each with an eager twin that says what it computes, and a measured reason."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred

if TYPE_CHECKING:
    from hotloop.kernels.adamw import adamw_eager, adamw_runs_on, fused_adamw
    from hotloop.kernels.attention import self_attention, self_attention_eager
    from hotloop.kernels.columns import column_sums, column_sums_eager
    from hotloop.kernels.cross_entropy import cross_entropy_eager, linear_cross_entropy
    from hotloop.kernels.fusion import compile_fused, rewrite
    from hotloop.kernels.gelu import bias_gelu, bias_gelu_eager
    from hotloop.kernels.heads import rotary_tables, split_heads, split_heads_eager
    from hotloop.kernels.muon import (
        muon_apply,
        muon_apply_eager,
        muon_gather,
        muon_gather_eager,
        newton_schulz,
        newton_schulz_eager,
    )
    from hotloop.kernels.normalisation import layer_norm, layer_norm_eager
    from hotloop.kernels.norms import clip_norm, clip_norm_eager, scale_all
    from hotloop.kernels.registry import RegisteredKernel, register
    from hotloop.kernels.selection import chosen, kernels_chosen, kernels_wanted
    from hotloop.kernels.sgd import fused_sgd, sgd_eager
    from hotloop.kernels.squared_relu import squared_relu, squared_relu_eager
    from hotloop.kernels.tables import Tables

__all__ = [
    "RegisteredKernel",
    "Tables",
    "adamw_eager",
    "adamw_runs_on",
    "bias_gelu",
    "bias_gelu_eager",
    "chosen",
    "clip_norm",
    "clip_norm_eager",
    "column_sums",
    "column_sums_eager",
    "compile_fused",
    "cross_entropy_eager",
    "fused_adamw",
    "fused_sgd",
    "kernels_chosen",
    "kernels_wanted",
    "layer_norm",
    "layer_norm_eager",
    "linear_cross_entropy",
    "muon_apply",
    "muon_apply_eager",
    "muon_gather",
    "muon_gather_eager",
    "newton_schulz",
    "newton_schulz_eager",
    "register",
    "rewrite",
    "rotary_tables",
    "scale_all",
    "self_attention",
    "self_attention_eager",
    "sgd_eager",
    "split_heads",
    "split_heads_eager",
    "squared_relu",
    "squared_relu_eager",
]

__getattr__ = deferred(
    __name__,
    {
        "RegisteredKernel": "hotloop.kernels.registry",
        "Tables": "hotloop.kernels.tables",
        "adamw_eager": "hotloop.kernels.adamw",
        "adamw_runs_on": "hotloop.kernels.adamw",
        "bias_gelu": "hotloop.kernels.gelu",
        "bias_gelu_eager": "hotloop.kernels.gelu",
        "chosen": "hotloop.kernels.selection",
        "clip_norm": "hotloop.kernels.norms",
        "clip_norm_eager": "hotloop.kernels.norms",
        "column_sums": "hotloop.kernels.columns",
        "column_sums_eager": "hotloop.kernels.columns",
        "compile_fused": "hotloop.kernels.fusion",
        "cross_entropy_eager": "hotloop.kernels.cross_entropy",
        "fused_adamw": "hotloop.kernels.adamw",
        "fused_sgd": "hotloop.kernels.sgd",
        "kernels_chosen": "hotloop.kernels.selection",
        "kernels_wanted": "hotloop.kernels.selection",
        "layer_norm": "hotloop.kernels.normalisation",
        "layer_norm_eager": "hotloop.kernels.normalisation",
        "linear_cross_entropy": "hotloop.kernels.cross_entropy",
        "muon_apply": "hotloop.kernels.muon",
        "muon_apply_eager": "hotloop.kernels.muon",
        "muon_gather": "hotloop.kernels.muon",
        "muon_gather_eager": "hotloop.kernels.muon",
        "newton_schulz": "hotloop.kernels.muon",
        "newton_schulz_eager": "hotloop.kernels.muon",
        "register": "hotloop.kernels.registry",
        "rewrite": "hotloop.kernels.fusion",
        "rotary_tables": "hotloop.kernels.heads",
        "scale_all": "hotloop.kernels.norms",
        "self_attention": "hotloop.kernels.attention",
        "self_attention_eager": "hotloop.kernels.attention",
        "sgd_eager": "hotloop.kernels.sgd",
        "split_heads": "hotloop.kernels.heads",
        "split_heads_eager": "hotloop.kernels.heads",
        "squared_relu": "hotloop.kernels.squared_relu",
        "squared_relu_eager": "hotloop.kernels.squared_relu",
    },
)
