"""What all GPU tests share: torch's own notices are no faults, and no test leaves the sync debug mode on."""

import warnings

import pytest
import torch

_NOTICES = (
    "ignore:Synchronization debug mode is a prototype",
    "ignore:.*AccumulateGrad.*",
    "ignore:.*Profiler clears events",
    "ignore::DeprecationWarning",
)


def pytest_collection_modifyitems(items):
    absent = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(absent)
            for notice in _NOTICES:
                item.add_marker(pytest.mark.filterwarnings(notice))


@pytest.fixture(autouse=True)
def _no_sync_debug_mode_left():
    yield
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")
