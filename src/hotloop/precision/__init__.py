"""Number formats: names, what a device can do, autocast, 16-bit weights, fp8, agreement with fp32."""

from typing import TYPE_CHECKING

from hotloop.deferred import deferred
from hotloop.precision.casting import autocast_context, outputs_to_float32
from hotloop.precision.formats import Precision, find_precision

if TYPE_CHECKING:
    from hotloop.precision.choice import choose_precision
    from hotloop.precision.comparison import Agreement, ModuleError, agreement
    from hotloop.precision.float8_layers import Float8Layers, choose_layers, install_float8, remove_float8
    from hotloop.precision.weights import restore_weights, store_in_bf16

__all__ = [
    "Agreement",
    "Float8Layers",
    "ModuleError",
    "Precision",
    "agreement",
    "autocast_context",
    "choose_layers",
    "choose_precision",
    "find_precision",
    "install_float8",
    "outputs_to_float32",
    "remove_float8",
    "restore_weights",
    "store_in_bf16",
]

# most runs use none of these
_LAYERS = ("Float8Layers", "choose_layers", "install_float8", "remove_float8")
__getattr__ = deferred(
    __name__,
    {
        **dict.fromkeys(("Agreement", "ModuleError", "agreement"), "hotloop.precision.comparison"),
        "choose_precision": "hotloop.precision.choice",
        "restore_weights": "hotloop.precision.weights",
        "store_in_bf16": "hotloop.precision.weights",
        **dict.fromkeys(_LAYERS, "hotloop.precision.float8_layers"),
    },
)
