"""The character GPT: settings that cannot work are told before anything is read."""

import sys

import pytest
from examples import gpt_chars as example


def test_a_width_that_heads_do_not_divide_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt_chars.py", "--width", "40"])
    with pytest.raises(SystemExit) as stop:
        example.main()
    assert stop.value.code == 2
    assert "--width 40" in capsys.readouterr().err
