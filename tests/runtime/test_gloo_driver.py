"""The torch.distributed driver over Gloo, in local processes: equal to the virtual mesh, quick to see a lost peer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import server
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import RankError
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import axes_of
from autopar.ir.program import Record, TensorType, set_record
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import make_groups
from autopar.runtime.ranks.virtual import VirtualMesh

pytestmark = pytest.mark.gloo
TIMEOUT = timedelta(seconds=20)


def _everything() -> Executable:
    """Every collective, over single and joined axes, whole dims and factors, in place and not."""
    graph = fx.Graph()
    x = graph.placeholder("x")  # [36, 36], floats that hold small integers: every sum is exact
    results: list[fx.Node] = []

    def call(name: str, *args: Any) -> fx.Node:
        return graph.call_function(op(name), args)

    for axis in ("dp", "tp", "dp:tp", "tp:dp"):
        for kind in ("sum", "max", "min", "logsumexp"):
            own = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
            results += [call("all_reduce", x, axis, kind), call("all_reduce", own, axis, kind)]
            results += [call("reduce_scatter", x, axis, dim, outer, kind) for dim, outer in ((0, 1), (1, 3))]
        results += [call("all_gather", x, axis, 0, 1), call("all_gather", x, axis, 1, 3)]
        results += [call("all_to_all", x, axis, 0, 1, 1, 1), call("all_to_all", x, axis, 1, 2, 0, 3)]
        results += [call("shift", x, axis, by) for by in (1, -1, 4)]
        results += [call("shard", x, axis, 1, 3), call("keep_first", x, axis), call("coord", axis)]
    halves = [call("all_reduce_start", graph.call_function(torch.ops.aten.neg.default, (x,)), "dp", "sum")]
    halves += [call("all_reduce_start", x, "tp", kind) for kind in ("max", "logsumexp")]
    halves += [call("shift_start", half, "dp", 1) for half in (x, results[0])]  # to the same rank at the same time
    results += [call("wait", half) for half in halves]
    # Overwrites the answer, which must not be x itself even where the axis has one rank.
    reduced = call("all_reduce", x, "tp", "sum")
    results.append(graph.call_function(torch.ops.aten.add.Tensor, (reduced, 1)))
    for node in (reduced, results[-1]):
        set_record(node, Record((TensorType((36, 36), torch.float64),)))
    results.append(x)
    graph.output(tuple(results))
    return Executable(graph)


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randint(-8, 8, (36, 36), generator=torch.Generator().manual_seed(rank)).to(dtype)
    return made.t() if rank == 1 else made  # one rank's is not contiguous


def _join(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=size, timeout=TIMEOUT)


def _spawn(work: Callable[..., None], size: int, path: Path, *args: Any) -> None:
    server()  # whose forks start in milliseconds, where `spawn` imports torch in each process
    mp.start_processes(work, args=(size, str(path), *args), nprocs=size, start_method="forkserver")


def _equal(rank: int, size: int, path: str, mesh: Mesh) -> None:
    _join(rank, size, path)
    executable = _everything()
    named = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    axes = axes_of(executable.graph)
    for device_mesh, dtype in ((None, torch.float64), (named, torch.float32)):
        driver = DistributedDriver(mesh, make_groups(mesh, axes, device_mesh, TIMEOUT))
        want = VirtualMesh(mesh).run(executable, [[_values(r, dtype)] for r in range(size)])[rank]
        for observe in (None, lambda node, value: None):
            got = driver.run(executable, [_values(rank, dtype)], observe)
            for a, b, node in zip(got, want, executable.graph.output_node().args[0], strict=True):  # type: ignore
                _compare(a, b, node)
    dist.destroy_process_group()


def _compare(got: Any, want: Any, node: fx.Node) -> None:
    if isinstance(got, int):
        assert got == want, node.name
        return
    rounded = any("logsumexp" in made.args for made in (node, *node.all_input_nodes))
    torch.testing.assert_close(
        got, want, rtol=0, atol=1e-5 if rounded else 0, msg=lambda text: f"{node.format_node()}: {text}"
    )


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3,tp=1"])
def test_equal_to_the_virtual_mesh(mesh: str, tmp_path: Path) -> None:
    parsed = parse_mesh(mesh)
    _spawn(_equal, parsed.size, tmp_path, parsed)


def _two_ranks(rank: int, size: int, path: str) -> None:
    _join(rank, size, path)
    mesh = parse_mesh("dp=2")

    graph = fx.Graph()
    graph.output((graph.call_function(op("all_reduce"), (graph.placeholder("x"), "dp", "logsumexp")),))
    executable = Executable(graph)
    inf = torch.inf
    x = torch.tensor([[-inf, -inf, 1.0, inf], [-inf, 2.0, 3.0, 0.0]])
    (got,) = DistributedDriver(mesh, make_groups(mesh, ("dp",))).run(executable, [x[rank]])
    torch.testing.assert_close(got, torch.logsumexp(x, 0))

    with pytest.raises(RankError, match="no group was made for axis 'dp', needed by %all_reduce_default"):
        DistributedDriver(mesh, {}).run(executable, [x[rank]])
    with pytest.raises(RankError, match=r"mesh 'dp=3' has 3 ranks, but 2 processes are running\."):
        make_groups(parse_mesh("dp=3"), ("dp",))
    dist.destroy_process_group()


def test_infinities_and_wrong_setups(tmp_path: Path) -> None:
    _spawn(_two_ranks, 2, tmp_path)


def _lose_a_peer(rank: int, size: int, path: str) -> None:
    _join(rank, size, path)
    mesh = parse_mesh("dp=2")
    note = Record((TensorType((2,), torch.float32),), module="blocks.0", source="gpt.py:41", made_by="reshard")
    executables: dict[str, Executable] = {}
    for name in ("all_reduce_start", "all_reduce"):
        graph = fx.Graph()
        value = graph.call_function(op(name), (graph.placeholder("x"), "dp", "sum"))
        set_record(value, note)
        graph.output((graph.call_function(op("wait"), (value,)),))
        executables[name] = Executable(graph)
    driver = DistributedDriver(mesh, make_groups(mesh, ("dp",)))
    driver.run(executables["all_reduce"], [torch.ones(2)])
    if rank == 1:
        os._exit(0)  # as a killed process: no goodbye
    for name, executable in executables.items():
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            driver.run(executable, [torch.ones(2)])
        assert time.monotonic() - start < 5
        lines = str(caught.value).splitlines()
        node = f"%{name}_default = autopar.{name}"
        assert lines[0] == f"rank 0 (dp=0) lost its peers at {node}  (made by reshard)  # blocks.0  gpt.py:41"
        assert lines[1].startswith("  Look for the first error of rank 1. The backend says:")
    os._exit(0)


def test_a_dead_peer_is_seen_in_seconds(tmp_path: Path) -> None:
    """Also between the start of an all-reduce and its wait: the error names the start."""
    _spawn(_lose_a_peer, 2, tmp_path)
