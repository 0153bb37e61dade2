"""What all tests share: the example models can be imported, and runs are repeatable."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # until all is imported and collected: what is made by then stays
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start: threads that wait, spin

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
for folder in (
    ROOT / "examples",
    *(each for each in (ROOT / "tests").iterdir() if each.is_dir()),
    ROOT / "tests",
    ROOT,
):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from costs import COSTS, Cost, beyond_budget, function_of, read_costs, write_costs  # noqa: E402  # of these folders
from cpu_time import cpu_seconds  # noqa: E402
from off_host import off_host  # noqa: E402
from processes import Ranks, collect_rarely, ranks_of  # noqa: E402

from benchmarks.yardstick import told, yardstick  # noqa: E402

# pytest listens to every logger that does not propagate; of this one torch takes a listener as the wish for a trace of
# all tensors that a capture meets, each with its stack.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    """Each test starts from one seed, on one thread: the models are small and the cores few. What a benchmark that was
    run by a test kept from the log is told again."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack once for each kind of device
    torch.set_num_threads(1)
    logging.disable(logging.NOTSET)


@pytest.fixture(params=["host", "device"])
def each_side(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once as on the CPU, and once with the branches that a GPU takes."""
    with off_host() if request.param == "device" else nullcontext():
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """What a module trained in this process itself is no concern of the next one, nor is what it left in memory: the
    looks for circles and for living tensors, ours and autopar's own, are at what the module itself made."""
    gc.collect()
    gc.freeze()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate.state" in sys.modules:  # one state for a process, which keeps the precision of the first
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two ranks, for all tests of a module."""
    with ranks_of(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four ranks, for all tests of a module."""
    with ranks_of(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def six() -> Iterator[Ranks]:
    """Six ranks, for all tests of a module: for axes of unequal sizes."""
    with ranks_of(6) as ranks:
        yield ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help=f"write what the tests cost into {COSTS.name}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to `make test-all` what a dear test has too many of. A test that is asked for by name runs."""
    if not any("::" in each for each in config.args):
        for item in beyond_budget(items, read_costs()):
            item.add_marker(pytest.mark.beyond)


def pytest_collection_finish() -> None:
    gc.collect()
    collect_rarely()


CPU = pytest.StashKey[float]()
SPENT = pytest.StashKey[dict[str, Cost]]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not item.config.getoption("costs"):
        yield
        return
    before = cpu_seconds()
    yield
    spent, name = item.config.stash.setdefault(SPENT, {}), function_of(item.nodeid)
    spent[name] = spent.get(name, Cost()) + Cost(1, cpu_seconds() - before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that started it, which does not see the ranks."""
    if hasattr(session.config, "workeroutput"):
        spent = session.config.stash.get(SPENT, {})
        session.config.workeroutput["cpu"] = cpu_seconds()
        session.config.workeroutput["spent"] = {name: (cost.cases, cost.seconds) for name, cost in spent.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output, stash = getattr(node, "workeroutput", {}), node.config.stash
    stash[CPU] = stash.get(CPU, 0.0) + output.get("cpu", 0.0)
    spent = stash.setdefault(SPENT, {})
    for name, (cases, seconds) in output.get("spent", {}).items():
        spent[name] = spent.get(name, Cost()) + Cost(cases, seconds)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What the whole suite cost, where several processes ran it, and each test where that was asked for."""
    if CPU in config.stash:
        mine = sum(os.times()[:2])  # without the workers, which have told theirs
        terminalreporter.write_line(f"all processes: {told(config.stash[CPU] + mine, yardstick())}")
    if config.getoption("costs"):
        spent, stick = config.stash.get(SPENT, {}), yardstick()
        write_costs({name: Cost(each.cases, each.seconds / stick) for name, each in spent.items()})


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
