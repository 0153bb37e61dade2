"""Two emulated machines train as one device does; and what torchrun on several machines asks of a command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import typer.main
from torch.distributed.run import get_args_parser

from autopar.cli.commands import app
from autopar.cli.ranks import fitting_mesh
from autopar.errors import MeshError
from benchmarks import nodes

WHY = nodes.missing()


@pytest.mark.gloo
@pytest.mark.skipif(WHY is not None, reason=f"two machines cannot be emulated: {WHY}")
def test_two_machines_train_as_one_device_and_send_what_the_program_says(tmp_path: Path) -> None:
    with nodes.two_machines():
        found = nodes.measure_bytes(tmp_path, steps=6)
    assert found["losses apart by"] < nodes.CLOSE
    # headers of TCP, and the exchange that each step makes for its batch
    assert 1 <= found["bytes a step"] / found["bytes by the program"] < 1.05


def test_no_option_of_ours_is_part_of_one_of_torchruns() -> None:
    """torchrun looks at all words, and takes the beginning of one of its options for that option."""
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = [option for one in command.params for option in one.opts if option.startswith("--")]
    assert "--losses" in options and "--cache" in options
    for option in options:
        said = ["--nnodes", "2", "-m", "autopar", "run", "job.py:job", option, "1"]
        asked: argparse.Namespace = get_args_parser().parse_args(said)
        assert asked.training_script_args == ["run", "job.py:job", option, "1"], option


def test_several_meshes_are_for_several_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = "dp=2,tp=2|dp=3|tp=2"
    assert fitting_mesh(meshes) == "dp=2,tp=2"  # outside of a job, all of them
    for world, mesh in ((4, "dp=2,tp=2"), (3, "dp=3"), (2, "tp=2")):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert fitting_mesh(meshes) == mesh
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert fitting_mesh(f"{meshes}|auto") == "auto"
    assert fitting_mesh(f"{meshes}|dp=-1") == "dp=-1"
    with pytest.raises(MeshError) as found:
        fitting_mesh(meshes)
    assert str(found.value) == (
        "--mesh 'dp=2,tp=2|dp=3|tp=2': the running job has 8 ranks, and these meshes have 4, 3, 2. Add one for 8: "
        "dp=8, or auto."
    )
    with pytest.raises(MeshError, match="known axes"):
        fitting_mesh("tp=8|xy=2")
