"""The options that every command takes: declared once, and put into each command's parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from autopar.cli.arguments.target import load_job
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import AUTO, mesh_of
from autopar.errors import TargetError
from autopar.ir.options import Flag, StepKeywords, StepOptions, flag_name, read_stages, short_text
from autopar.job import Job
from autopar.planning.space.decisions import Decisions, read_plan

# What stands beside `--plan` on a command line must not say another thing.


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


OWN = {  # what a run takes beside its steps
    "seed": (0, Flag(int, more="of the initial weights and of random ops")),
    "cuda_graphs": (False, Flag(bool, more="record the step on each GPU once, and replay it")),
    "on_nonfinite": (
        None,
        Flag(str, "stop|skip", more="a step whose loss or gradients are not finite"),
    ),
    "check_replicas": (None, Flag(int, "N", more="compare what ranks hold alike every N steps; 0 never does")),
    "timeout": (None, Flag(float, "SECONDS", more="how long a rank waits for the others, then all end")),
}
RUN = {  # what `run` takes alone
    "checkpoint": (None, Flag(str, "DIR", more="save the run in this folder, and go on from there")),
    "every": (None, Flag(int, "N", more="steps from one save to the next")),
    "keep": (None, Flag(int, "N", more="how many checkpoints stay")),
    "resume": (None, Flag(str, "auto|never|STEP", more="from the newest checkpoint, from none, or from this one")),
    "max_restarts": (None, Flag(int, "N", more="how often ranks are started again when one dies")),
}
STEP = {each.name: each for each in fields(StepOptions) if each.metadata["flag"] is not None}


def _flags() -> list[tuple[str, Any, Any]]:
    """Name, annotation and default of each option of a command. What is True by default is turned off by "no_"."""
    flags = [_typed(name, flag, default) for name, (default, flag) in {**OWN, **RUN}.items()]
    for name, each in STEP.items():
        is_on = each.default is True
        text = f"do not {short_text(name)}" if is_on else short_text(name)
        flags.append(_typed(f"no_{name}" if is_on else name, each.metadata["flag"], None, text))
    return flags


def _typed(name: str, flag: Flag, default: Any, text: str = "") -> tuple[str, Any, Any]:
    text = "; ".join(filter(None, (text, flag.more)))
    if flag.kind is bool:  # named, or typer would add one that says no
        how = typer.Option(f"--{name.replace('_', '-')}", help=text)
        return name, Annotated[bool, how], False
    kind = flag.kind if default is not None else flag.kind | None
    return name, Annotated[kind, typer.Option(metavar=flag.metavar, help=text)], default


FLAGS = _flags()


class CommandOptions:
    """What a command line says of a job, by the names of `FLAGS`; what is None or False is left to the job. plan: of
    `--plan`, which goes before what the job says as well."""

    def __init__(self, plan: Decisions | None = None, **given: Any) -> None:
        self.plan = plan
        self.given = {name: given.pop(name, default) for name, _, default in FLAGS}
        assert not given, given

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["given"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CommandOptions) and (self.given, self.plan) == (other.given, other.plan)

    __hash__ = None  # type: ignore[assignment]

    def job(self, target: str) -> Job:
        """The TARGET's job, with what the command line says of it."""
        own = {name: value for name, value in self._said().items() if name in OWN}
        return replace(load_job(target, own.pop("seed", 0)), **own, **self._step())

    def arguments(self) -> list[str]:
        """The same options for the process of a rank."""
        StepOptions(**self._step())  # what is wrong is said before anything starts
        arguments = [] if self.plan is None else ["--plan", self.plan.file]
        for name, value in self._said().items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, (list, tuple)):
                value = ";".join(read_stages(value))
            arguments += [flag] if value is True else [flag, str(value)]
        return arguments

    def _step(self) -> dict[str, Any]:
        """What is said of a step, by the names of `StepOptions`."""
        return {**({} if self.plan is None else self.plan.step), **self.flags()}

    def flags(self) -> dict[str, Any]:
        """What the flags alone say of a step."""
        flags: dict[str, Any] = {}
        for name, value in self._said().items():
            if name.startswith("no_"):
                flags[name.removeprefix("no_")] = False
            elif name in STEP:
                flags[name] = STEP[name].metadata["flag"].read(value)
        return flags

    def _said(self) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if value is not None and value is not False}


def takes_options(*without: str, run: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The parameter `options` of a command becomes those of `FLAGS`, but for the names in `without`, and for those of
    `RUN` unless it is `run`. One that takes `mesh` takes `--plan` in its place, too."""
    left_out = {*without, *(() if run else RUN)}
    taken = [flag for flag in FLAGS if flag[0].removeprefix("no_") not in left_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, kind, default in (*_PLAN * ("mesh" in own.parameters), *taken)
        ]
        kept = [_optional(parameter) for name, parameter in own.parameters.items() if name != "options"]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            found = {name: given.pop(name) for name, *_ in taken}
            path = given.pop("plan", None)
            options = CommandOptions(None if path is None else read_plan(path), **found)
            if "mesh" in given:
                is_needed = own.parameters["mesh"].default is inspect.Parameter.empty
                given["mesh"] = mesh_beside(options.plan, given["mesh"], is_needed)
            if options.plan is not None:
                check_beside(options.plan, options.flags())
            command(**given, options=options)

        del called.__wrapped__  # type: ignore[attr-defined]  # typer would read its signature
        called.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {name: each.annotation for name, each in called.__signature__.parameters.items()}  # type: ignore[attr-defined]
        return called

    return decorate


_PLAN_TEXT = "mesh and options that `autopar plan --out` wrote, in place of --mesh"
_PLAN = [("plan", Annotated[Path | None, typer.Option(metavar="FILE.toml", help=_PLAN_TEXT)], None)]


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter of a command by its name; a mesh may be left to a plan."""
    kept = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    if parameter.name != "mesh" or parameter.default is not inspect.Parameter.empty:
        return kept
    kind, *more = get_args(parameter.annotation)
    return kept.replace(annotation=Annotated[kind | None, *more], default=None)
