from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: nbclient, zmq and their event loops leave warnings that are none of ours.
NOTEBOOK = """
import sys, warnings
warnings.simplefilter("ignore")
import nbformat
from nbclient import NotebookClient

code = '''
import time
from hotloop.metrics import Progress
updates = 0
progress = Progress(clock=lambda: (updates, 0))
progress.set_totals(total_updates=3)
for updates in range(1, 4):
    time.sleep(0.3)
progress.close()
'''
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
NotebookClient(notebook, timeout=200, startup_timeout=200, kernel_name="python3").execute()
outputs = notebook.cells[0].outputs
assert len(outputs) == 1, outputs
data = outputs[0]["data"]
assert data["text/plain"].startswith("3/3 100%"), data
assert '<progress value="3" max="3"' in data["text/html"], data
print("one output, at its end")
"""


@pytest.mark.slow
def test_a_real_kernel_shows_one_output_that_reaches_the_end() -> None:
    pytest.importorskip("nbclient")
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one output, at its end\n"
