"""`--plan FILE.toml` of a command line: the plan, and what stands beside it, which must not say another thing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import TargetError
from autopar.ir.mesh import AUTO
from autopar.ir.options import flag_name
from autopar.planning.space.decisions import Decisions, read_plan


def read_beside(path: Path, flags: Mapping[str, Any]) -> Decisions:
    """The plan of a file. Raises TargetError for an option of the command line of which it says another thing."""
    plan = read_plan(path)
    for name in flags.keys() & plan.said.keys():
        given, decided = (getattr(options_of(**{name: of[name]}), name) for of in (flags, plan.said))  # type: ignore[misc]
        if given != decided:
            flag = flag_name(name)
            raise _two(flag if flag.startswith("--no-") else f"{flag} {given}", plan, f"{name} = {decided}")
    return plan


def mesh_beside(plan: Decisions, mesh: str | None) -> str:
    """The mesh of a plan. Raises TargetError for another one of `--mesh`."""
    if mesh == AUTO or (mesh is not None and mesh_of(mesh, plan.mesh.size if "-1" in mesh else None) != plan.mesh):
        raise _two(f"--mesh {mesh}", plan, f"mesh = '{plan.mesh}'")
    return str(plan.mesh)


def _two(flag: str, plan: Decisions, decided: str) -> TargetError:
    return TargetError(f"{flag}: plan '{plan.file}' says {decided}. Leave out the flag, or change the plan.")
