"""`import hotloop` alone reaches what the documentation names, and loads none of it before."""

import subprocess
import sys

import pytest

import hotloop

PROGRAM = """
import sys
import hotloop
assert "torch" not in sys.modules
found = hotloop
for name in sys.argv[1].split("."):
    found = getattr(found, name)
print(found.__module__ if hasattr(found, "__module__") else found.__name__)
"""


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("optim.AdamW", "hotloop.optim.adam"),
        ("precision.agreement", "hotloop.precision.comparison"),
        ("kernels.register", "hotloop.kernels.registry"),
        ("capture.Buckets", "hotloop.capture.buckets"),
        ("native", "hotloop.native"),
        ("metrics.TensorBoard", "hotloop.metrics.tensorboard"),
        ("accelerate.Accelerator", "hotloop.accelerate.accelerator"),
        ("doctor", "hotloop.doctor"),
        ("runs", "hotloop.runs"),
        ("tune", "hotloop.tune"),
        ("errors.CaptureError", "hotloop.errors"),
        ("Loop", "hotloop.loop.loop"),
    ],
)
def test_parts_are_reached_by_the_package_alone(name, home):
    done = subprocess.run([sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == home, done.stderr


def test_what_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hotloop' has no attribute 'optimizers'"):
        hotloop.optimizers


def test_a_function_that_has_its_modules_name():
    code = "from hotloop.kernels import squared_relu; print(type(squared_relu).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "function", done.stderr
