"""What stands beside `--plan` on a command line must not say another thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import AUTO, mesh_of
from autopar.errors import TargetError
from autopar.ir.options import StepKeywords, flag_name
from autopar.planning.space.decisions import Decisions


def mesh_beside(plan: Decisions | None, mesh: str | None, is_needed: bool) -> str | None:
    """The mesh of a command line, of `--mesh` or of a plan. Raises TargetError for two, and for none that is needed."""
    if plan is None:
        if mesh is None and is_needed:
            raise TargetError("write --mesh, e.g. --mesh dp=2,tp=2, or --plan FILE.toml that `autopar plan` wrote.")
        return mesh
    if mesh == AUTO:
        raise _two(f"--mesh {mesh}", plan, f"mesh = '{plan.mesh}'")
    if mesh is not None:
        named = mesh_of(mesh, plan.mesh.size if "-1" in mesh else None)
        if named != plan.mesh:
            raise _two(f"--mesh {mesh}", plan, f"mesh = '{plan.mesh}'")
    return str(plan.mesh)


def check_beside(plan: Decisions, flags: StepKeywords | Mapping[str, Any]) -> None:
    """Raise TargetError for an option of the command line of which the plan says another thing."""
    for name in flags.keys() & plan.said.keys():
        given, decided = (getattr(options_of(**{name: of[name]}), name) for of in (flags, plan.said))  # type: ignore[literal-required, misc]
        if given != decided:
            flag = flag_name(name)
            raise _two(flag if flag.startswith("--no-") else f"{flag} {given}", plan, f"{name} = {decided}")


def _two(flag: str, plan: Decisions, decided: str) -> TargetError:
    return TargetError(f"{flag}: plan '{plan.file}' says {decided}. Leave out the flag, or change the plan.")
