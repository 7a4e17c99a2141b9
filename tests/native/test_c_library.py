"""The C side: an example program, no allocation on the path, sanitizers, valgrind, instances in threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hotloop import native
from hotloop.native.compiler import FLAGS, find_compiler, find_target

torch.set_num_threads(1)


class Small(nn.Module):
    """A little of everything: convolution, recurrence, attention, norm, table."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 12, 3, padding=1)
        self.lstm = nn.LSTM(12, 9, batch_first=True)
        self.attend = nn.MultiheadAttention(9, 3, batch_first=True)
        self.norm = nn.LayerNorm(9)
        self.table = nn.Embedding(7, 9)
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y = self.lstm(y)[0] + self.table(kind)
        y = y + self.attend(y, y, y, need_weights=False)[0]
        return torch.softmax(self.head(self.norm(y).mean(1)), -1)


EXAMPLE = r"""
#include <stdio.h>
#include "small.h"

int main(void) {
    float x[1 * 11 * 5], y[3];
    int64_t kind[1] = {4};
    for (int i = 0; i < 55; i++) x[i] = (float)(i % 7) - 3.0f;
    small *model = small_new();
    if (!model) return 1;
    small_warm(model, 2);
    for (int turn = 0; turn < 3; turn++) small_run(model, x, kind, y);
    printf("%.9g %.9g %.9g\n", y[0], y[1], y[2]);
    small_delete(model);
    return 0;
}
"""

COUNTING = r"""
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include "small.h"

static long calls;
void *__libc_malloc(size_t);
void *malloc(size_t n) { calls++; return __libc_malloc(n); }
void *__libc_calloc(size_t, size_t);
void *calloc(size_t n, size_t m) { calls++; return __libc_calloc(n, m); }
void *__libc_realloc(void *, size_t);
void *realloc(void *p, size_t n) { calls++; return __libc_realloc(p, n); }
void *__libc_memalign(size_t, size_t);
int posix_memalign(void **p, size_t a, size_t n) { calls++; *p = __libc_memalign(a, n); return !*p; }
void __libc_free(void *);
void free(void *p) { calls++; __libc_free(p); }

int main(void) {
    static float x[55], y[3];
    static int64_t kind[1];
    static char state[4096];
    small *model = small_new();
    long before = calls;
    for (int i = 0; i < 100; i++) small_run(model, x, kind, y);
    small_prep(model);
    small_reset(model);
    small_warm(model, 1);
    if (small_state_size() <= sizeof state) small_state_save(model, state), small_state_load(model, state);
    long after = calls;
    printf("%ld %ld\n", before, after - before);
    return 0;
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("native")
    model = Small().eval()
    native.build(model, (torch.randn(1, 11, 5), torch.tensor([4])), out=folder / "small.so", quiet=True)
    return folder, model


def run(folder: Path, text: str, *flags: str, before: tuple[str, ...] = (), target: str = "native") -> str:
    """Compile a program together with the model's source, run it, return what it prints."""
    program = folder / "program.c"
    program.write_text(text)
    base = [flag for flag in FLAGS if flag not in ("-fPIC", "-fvisibility=hidden")]
    command = [
        find_compiler(),
        *base,
        *find_target(target).flags,
        *flags,
        f"-I{folder}",
        "-o",
        str(folder / "program"),
    ]
    subprocess.run([*command, str(program), str(folder / "small.c")], check=True, capture_output=True)
    done = subprocess.run([*before, str(folder / "program")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wanted(model: nn.Module) -> np.ndarray:
    x = torch.tensor([float(i % 7) - 3 for i in range(55)], dtype=torch.float64).reshape(1, 11, 5)
    with torch.no_grad():
        result = model.double()(x, torch.tensor([4])).numpy()[0]
    model.float()
    return result


def test_an_example_program_compiles_and_agrees(built: tuple[Path, nn.Module]) -> None:
    folder, model = built
    values = np.array([float(v) for v in run(folder, EXAMPLE, "-Wall", "-Wno-psabi").split()])
    np.testing.assert_allclose(values, wanted(model), rtol=1e-5)


def test_no_call_allocates(built: tuple[Path, nn.Module]) -> None:
    at_start, on_path = (int(v) for v in run(built[0], COUNTING).split())
    assert at_start > 0, "the counter counts nothing"
    assert on_path == 0


def test_address_and_undefined_behaviour_sanitizers_are_silent(built: tuple[Path, nn.Module]) -> None:
    folder, model = built
    flags = (
        "-O1",
        "-g",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-fno-sanitize=alignment",
    )
    values = np.array([float(v) for v in run(folder, EXAMPLE, *flags).split()])
    np.testing.assert_allclose(values, wanted(model), rtol=1e-5)


@pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind is not installed")
def test_valgrind_is_silent(built: tuple[Path, nn.Module]) -> None:
    folder, model = built
    # valgrind knows no AVX-512
    values = run(
        folder,
        EXAMPLE,
        "-O1",
        "-g",
        target="avx2",
        before=("valgrind", "-q", "--error-exitcode=9", "--leak-check=full"),
    )
    np.testing.assert_allclose([float(v) for v in values.split()], wanted(model), rtol=1e-4)


def test_linking_it_leaves_denormals_alone(built: tuple[Path, nn.Module]) -> None:
    text = EXAMPLE.replace("return 0;", "volatile float tiny = 1e-41f; return tiny * 0.5f > 0 ? 0 : 3;")
    assert run(built[0], text)


def test_instances_run_in_threads(built: tuple[Path, nn.Module]) -> None:
    first = native.load(built[0] / "small.so")
    kind = np.array([2])
    inputs = [np.random.default_rng(k).standard_normal((1, 11, 5)).astype(np.float32) for k in range(4)]
    alone = [first(x, kind) for x in inputs]
    different: list[int] = []

    def work(index: int) -> None:
        mine = first.instance()
        for _ in range(200):
            if not np.array_equal(mine(inputs[index], kind), alone[index]):
                different.append(index)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert different == []


def test_nothing_of_this_machine_is_in_the_library(built: tuple[Path, nn.Module]) -> None:
    text = (built[0] / "small.c").read_text()
    assert os.path.dirname(__file__) not in text
    assert "malloc" not in text.replace("posix_memalign", "")
    for call in ("expf(", "tanhf(", "erff(", "logf(", "powf("):
        assert call not in text
