"""hotloop: your own PyTorch loop, made as fast as the machine allows, and proven to be still the same loop."""

__all__ = ["__version__"]

__version__ = "0.1.0"
