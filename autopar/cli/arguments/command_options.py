"""The options that every command takes: declared once, and put into each command's parameters.

What is read here is read before torch is imported: `--help` and slips of the pen do not wait for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from autopar.cli.arguments.target import check_target, load_job
from autopar.errors import TargetError
from autopar.ir.mesh import AUTO, parse_mesh
from autopar.ir.options import Flag, StepOptions, check_option, read_stages, short_text

if TYPE_CHECKING:
    from autopar.job import Job
    from autopar.planning.space.decisions import Decisions

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
    "cache": (None, Flag(str, "DIR", more="keep compiled programs in this folder, for the next start")),
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
DEFAULTS = {name: default for name, _, default in FLAGS}


class CommandOptions:
    """What a command line says of a job, by the names of `FLAGS`; what is None or False is left to the job. plan: of
    `--plan`, which goes before what the job says as well."""

    def __init__(self, plan: Decisions | None = None, **given: Any) -> None:
        self.plan = plan
        self.given = {name: given.pop(name, default) for name, default in DEFAULTS.items()}
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
        return self.over(load_job(target, self._said().get("seed", 0)))

    def over(self, job: Job) -> Job:
        """A job, with what the command line says of it."""
        own = {name: value for name, value in self._said().items() if name in OWN and name != "seed"}
        return replace(job, **own, **self._step())

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

    def check(self) -> None:
        """Raise the error of the first flag that cannot be, but for what only torch and the model tell."""
        for name, value in self.flags().items():
            check_option(name, value)

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
        return {name: value for name, value in self.given.items() if value != DEFAULTS[name]}


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
            path, options = given.pop("plan", None), CommandOptions(**found)
            options.check()
            named = given["target"]
            if named is not None and not Path(named).is_dir():  # what `autopar compile` wrote
                check_target(named)
            if path is not None:
                from autopar.cli.arguments.beside_plan import mesh_beside, read_beside

                options.plan = read_beside(path, options.flags())
                given["mesh"] = mesh_beside(options.plan, given["mesh"])
            elif given.get("mesh", "") is None and own.parameters["mesh"].default is inspect.Parameter.empty:
                raise TargetError("write --mesh, e.g. --mesh dp=2,tp=2, or --plan FILE.toml that `autopar plan` wrote.")
            meshes = (given.get("mesh") or AUTO).split("|", -1 if run else 0)  # of which the running job's ranks choose
            for mesh in meshes:
                if mesh != AUTO and "-1" not in mesh:
                    parse_mesh(mesh)
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
