"""The mesh: named axes, ranks with the last axis fastest. (Errors: `test_errors.py`.)"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh, axes_of_group, group_name, is_in_time, parse_mesh, time_mesh


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


def test_the_largest_axis_and_the_next() -> None:
    """On both sides of the limit, however the mesh is written."""
    for mesh in (f"dp={10**9}", {"dp": 10**9}, Mesh((("dp", 10**9),))):
        assert parse_mesh(mesh)["dp"] == 10**9
    for more, said in (
        (f"dp={10**9 + 1}", f"axis 'dp' of the mesh has size {10**9 + 1}; it is {10**9} at most"),
        ({"dp": 10**9 + 1}, f"the size of axis 'dp' is above {10**9}, which is the most"),
        ("dp=1" + "0" * 5000, f"axis 'dp' of the mesh has size 1{'0' * 19}; it is {10**9} at most"),
    ):
        with pytest.raises(MeshError, match=said):
            parse_mesh(more)


def test_slices_of_different_lengths() -> None:
    mesh = parse_mesh("dp=2, sl=6+3+3")
    assert str(mesh) == "dp=2,sl=6+3+3" and mesh.lengths == (6, 3, 3) and mesh.granule == 3 and mesh["sl"] == 3
    assert parse_mesh(str(mesh)) == parse_mesh(mesh) == mesh != parse_mesh("dp=2,sl=3")
    assert [mesh.run_of(place, 12) for place in range(3)] == [(0, 6), (6, 3), (9, 3)]
    assert [mesh.run_of(place, 4) for place in range(3)] == [(0, 2), (2, 1), (3, 1)]
    assert [mesh.run_of(place, 24) for place in range(3)] == [(0, 12), (12, 6), (18, 6)]
    with pytest.raises(MeshError, match="has 2 lengths, but 'sl' another size"):
        Mesh((("sl", 3),), (6, 3))
    with pytest.raises(MeshError, match="lengths, but 'sl' another size"):
        Mesh((("dp", 2),), (6, 3))
    for text in ("sl=6+", "sl=+6", "sl=6+-3", "sl=1234567890123+1", "dp=6+3"):
        with pytest.raises(MeshError, match="cannot read"):
            parse_mesh(text)
    assert parse_mesh("sl=6").lengths == () and parse_mesh("sl=123456789012+1").lengths == (123456789012, 1)


def test_joined_axes_and_axes_in_time() -> None:
    mesh = parse_mesh("dp=2,tp=3,cp=4")
    assert mesh["dp:cp"] == 8 and mesh["cp:tp:dp"] == 24
    assert group_name(axes_of_group("dp:cp")) == "dp:cp" and axes_of_group("dp") == ("dp",)
    with pytest.raises(KeyError):
        mesh["dp:ep"]
    assert is_in_time("mb") and is_in_time("mb:sl") and is_in_time("sl")
    assert not is_in_time("mb:dp") and not is_in_time("dp")
    assert str(time_mesh(12, 3)) == "mb=4,sl=3" and str(time_mesh(4, 2, (6, 3))) == "mb=2,sl=6+3"
