"""The groups of a run: how long they wait for a peer, what a second one carries, which end, without processes."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.ir.mesh import parse_mesh
from autopar.ir.schedule import Action
from autopar.runtime.ranks import process_groups
from autopar.runtime.ranks.process_groups import Group, _leave, mesh_over

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


@pytest.mark.parametrize("second", [None, "b"])
def test_sums_and_gradients_go_by_the_second_group(second: Any) -> None:
    """Where there is one: what is sent back meets nothing that is on its way forward."""
    given = [lambda: "a", *([lambda: second] if second else [])]
    group = Group(given[0], 2, None, *given[1:])  # type: ignore[arg-type]
    assert group.known == tuple(given) and group.handles == tuple(one() for one in given)
    assert (group.handle, group.of_sums) == ("a", second or "a")
    sent = {kind: group.of_messages(Action(0, kind, 0)) for kind in "FBIW"}
    assert sent == {"F": "a", **dict.fromkeys("BIW", second or "a")}


@pytest.mark.parametrize(
    ("backend", "ranks", "ended"),
    [("cpu:gloo", 2, ["all"]), ("cpu:gloo,cuda:nccl", 2, ["host"]), ("cpu:gloo,cuda:nccl", 1, ["all"]), ("", 0, [])],
)
def test_no_group_of_nccl_that_has_peers_is_destroyed_at_the_end(
    backend: str, ranks: int, ended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for them: of such a run only the groups of the hosts are, once its word is left."""
    found: list[Any] = []

    def destroy(group: str) -> None:
        time.sleep(0.02)
        found.append(group)

    monkeypatch.setattr(dist, "is_initialized", lambda: bool(backend))
    monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    monkeypatch.setattr(process_groups, "default_group", lambda: "all")
    _leave(lambda: [lambda: "host"], lambda: found.append("words"))  # type: ignore[list-item, return-value]
    assert found == (["words", *ended] if ended else [])
