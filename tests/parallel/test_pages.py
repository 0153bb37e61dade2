"""Memory that a rank on a CPU frees stays with its process, unless the environment says when it goes back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MIB = 2**20
HELD = 256  # MiB, in tensors that glibc takes from its heap
SCRIPT = f"""
import os, torch
from autopar.parallel.session.devices import compute_on
from autopar.settings import Settings

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

compute_on(torch.device("cpu"), Settings.read())
kept = torch.ones({MIB} // 4)
before = held()
tensors = [torch.ones({MIB} // 4) for _ in range({HELD})]
assert held() - before > 0.9 * {HELD * MIB}
del tensors
print((held() - before) // {MIB})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(("said", "stays"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory_stays_with_the_process(said: dict[str, str], stays: bool) -> None:
    given = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=given | said)
    assert done.returncode == 0, done.stderr
    left = int(done.stdout)
    assert left > 0.9 * HELD if stays else left < 0.1 * HELD
