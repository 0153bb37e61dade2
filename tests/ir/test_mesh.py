"""The mesh: named axes, ranks with the last axis fastest. (Errors: `test_errors.py`.)"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh, parse_mesh


def draw_mesh(draw: random.Random) -> Mesh:
    names = draw.sample(["dp", "tp", "cp", "ep", "pp", "x_1"], draw.randrange(5))
    return Mesh(tuple((name, draw.randint(1, 4)) for name in names))


def test_ranks_and_coordinates() -> None:
    mesh = parse_mesh("dp=2,tp=3")
    assert (mesh.names, mesh.shape, mesh.size, mesh["tp"]) == (("dp", "tp"), (2, 3), 6, 3)
    assert "dp" in mesh and "cp" not in mesh
    assert mesh.coord(4) == {"dp": 1, "tp": 1} and mesh.rank({"dp": 1, "tp": 1}) == 4
    assert mesh.group(4, "tp") == (3, 4, 5) and mesh.group(4, "dp") == (1, 4)
    assert [tuple(coord.values()) for coord in mesh.coords()] == list(itertools.product(range(2), range(3)))
    with pytest.raises(KeyError):
        mesh["cp"]


def test_random_meshes() -> None:
    draw = random.Random(5)
    print("seed 5")
    for _ in range(200):
        mesh = draw_mesh(draw)
        assert mesh.size == math.prod(mesh.shape) == len(mesh.coords())
        assert parse_mesh(mesh) == parse_mesh(dict(mesh.axes)) == mesh
        if mesh.axes:
            assert parse_mesh(str(mesh)) == mesh
        for rank, coord in enumerate(mesh.coords()):
            assert mesh.coord(rank) == coord and mesh.rank(coord) == rank
            for axis in mesh.names:
                group = mesh.group(rank, axis)
                assert group[coord[axis]] == rank and len(group) == mesh[axis]
                assert all(mesh.group(member, axis) == group for member in group)


def test_groups_of_an_axis_cover_the_ranks_once() -> None:
    mesh = parse_mesh("dp=2,tp=3,cp=4")
    for axis in mesh.names:
        groups = {mesh.group(rank, axis) for rank in range(mesh.size)}
        assert sorted(itertools.chain(*groups)) == list(range(mesh.size))


def test_spaces_and_sizes_of_one() -> None:
    assert parse_mesh(" dp = 2 , tp=1 ") == Mesh((("dp", 2), ("tp", 1)))
    assert str(parse_mesh({"dp": 2, "tp": 1})) == "dp=2,tp=1"
    assert Mesh(()).size == 1 and Mesh(()).coords() == [{}] and parse_mesh({}) == Mesh(())


@pytest.mark.parametrize("world", [1, 2, 6, 7, 12])
def test_the_rest_of_the_world(world: int) -> None:
    for size in (1, 2, 3, 4):
        if world % size:
            with pytest.raises(MeshError, match=f"need a multiple of {size} ranks, but there are {world}"):
                parse_mesh({"dp": -1, "tp": size}, world)
        else:
            assert parse_mesh({"dp": -1, "tp": size}, world) == Mesh((("dp", world // size), ("tp", size)))
            assert parse_mesh(f"tp={size},dp=-1", world).size == world


def test_a_mesh_is_data() -> None:
    mesh = parse_mesh("dp=2,tp=3")
    assert mesh == parse_mesh("dp=2,tp=3") != parse_mesh("tp=3,dp=2") and hash(mesh) == hash(parse_mesh("dp=2,tp=3"))
    with pytest.raises(AttributeError):
        mesh.axes = ()  # type: ignore[misc]
