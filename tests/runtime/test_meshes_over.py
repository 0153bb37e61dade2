"""The device mesh of a run: how long its groups wait for a peer, without processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.ir.mesh import parse_mesh
from autopar.runtime.ranks import process_groups
from autopar.runtime.ranks.process_groups import mesh_over

MINUTE = timedelta(seconds=60)


@pytest.mark.parametrize(
    ("mesh", "timeout", "groups"),
    [
        ("dp=2", None, None), ("dp=1", None, None), ("dp=1,tp=1", MINUTE, None), ("dp=2", MINUTE, [("dp", MINUTE)]),
        ("dp=1,tp=2", MINUTE, [("dp", MINUTE), ("tp", MINUTE)]),
    ],
)  # fmt: skip
def test_a_timeout_is_that_of_every_group(
    mesh: str, timeout: timedelta | None, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch makes the groups of a mesh for which no other time was asked, or that has nobody to wait for."""
    made: list[tuple[str, timedelta]] = []

    def new_group(mesh: Any, axis: str, ranks: Any, timeout: timedelta) -> str:
        made.append((axis, timeout))
        return axis

    class Mesh:
        @staticmethod
        def from_group(groups: list[str], device: str, ranks: torch.Tensor, mesh_dim_names: Any) -> Any:
            assert groups == list(mesh_dim_names) and device == "cpu"
            return tuple(ranks.shape), ranks.flatten().tolist()

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(process_groups, "init_device_mesh", lambda device, shape, mesh_dim_names: (device, shape))
    monkeypatch.setattr(process_groups, "_new_group", new_group)
    monkeypatch.setattr(process_groups, "DeviceMesh", Mesh)
    asked = parse_mesh(mesh)
    found: Any = mesh_over(asked, "cpu", timeout)
    assert found == (("cpu", asked.shape) if groups is None else (asked.shape, list(range(asked.size))))
    assert made == (groups or [])
