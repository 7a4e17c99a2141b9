"""What every test may count on, however the tests were started."""

import os
import signal

import pytest


def pytest_configure():
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests that send SIGINT to a child
    # would find it deaf.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_setting_from_outside():
    """Settings of the shell that runs the tests, or left by a test before, steer none."""
    before = {name: value for name, value in os.environ.items() if name.startswith("HOTLOOP_")}
    for name in before:
        if name != "HOTLOOP_SHARED":
            del os.environ[name]
    yield
    for name in [name for name in os.environ if name.startswith("HOTLOOP_")]:
        del os.environ[name]
    os.environ.update(before)
