"""`autopar explain`: why a value has its layout, or what another plan would change."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.arguments.command_options import CommandOptions, takes_options
from autopar.cli.compiling import compiled_of
from autopar.cli.instead import compared
from autopar.cli.show import show, show_notes
from autopar.errors import TargetError
from autopar.ir.plan import DEVICES

Target = Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")]
MeshOption = Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2; one size may be -1")]


@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
def explain(
    target: Target,
    mesh: MeshOption,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="a parameter, a module path, or a node such as %add")
    ] = None,
    instead: Annotated[
        list[str] | None, typer.Option(metavar="tp=4", help="what would change in time and memory; may be repeated")
    ] = None,
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="of --instead")] = DEVICES,
    batch: Annotated[int | None, typer.Option(metavar="ROWS", help="of --instead; else the job's batch", min=1)] = None,
    *,
    options: CommandOptions,
) -> None:
    """Show what decided the layout of a value on each axis, what else it could have been, and what it moves. Or what
    another plan would change."""
    if (value is None) == (instead is None):
        raise TargetError("explain: write a VALUE, or --instead with what another plan decides: --instead tp=4.")
    if instead is not None:
        show(compared(target, mesh, options, instead, machine, batch))
        return
    assert value is not None
    compiled = compiled_of(target, mesh, options)
    show(str(compiled.explain(value)))
    show_notes(compiled)
