"""The options that every command takes: declared once, and put into each command's parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

import typer

from autopar.cli.target import load_job
from autopar.compiler.options import compiler_of
from autopar.ir.plan import DTYPES, Policy, Recompute
from autopar.job import Job
from autopar.passes.schedules import SCHEDULES

_SCHEDULES = f"{', '.join(SCHEDULES)}, or a CSV file"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a job; what is None or False leaves to the job what it says itself."""

    seed: Annotated[int, typer.Option(help="of the initial weights and of random ops")] = 0
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="split activations over tp on the sequence, between the weights")
    ] = False
    specialize: Annotated[
        bool, typer.Option("--specialize", help="take values that the model reads from tensors from the example batch")
    ] = False
    compile: Annotated[
        str | None,
        typer.Option("--compile", metavar="inductor", help="run the programs as code that Inductor writes"),
    ] = None
    microbatches: Annotated[
        int | None, typer.Option(metavar="N", help="parts of a rank's batch, one after another")
    ] = None
    schedule: Annotated[str | None, typer.Option(metavar="NAME|FILE.csv", help=f"of the axis pp: {_SCHEDULES}")] = None
    chunks: Annotated[int | None, typer.Option(metavar="V", help="stages on a rank")] = None
    stages: Annotated[
        list[str] | None,
        typer.Option(metavar='"a,b;c,d"', help="modules of the stages, ';' between stages; or once for each stage"),
    ] = None
    stage_memory: Annotated[int | None, typer.Option(metavar="BYTES", help="that a stage may hold")] = None
    zero: Annotated[
        int | None, typer.Option(metavar="0-3", help="split optimizer states (1), gradients (2), parameters (3)")
    ] = None
    no_reshard_after_forward: Annotated[
        bool, typer.Option("--no-reshard-after-forward", help="with --zero 3: keep what was gathered for the backward")
    ] = False
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="none|selective|full|BYTES|PART|MODULE=...,MODULE=...",
            help="what the backward pass computes again; a whole number is bytes, one with a point a part",
        ),
    ] = None
    precision: Annotated[str | None, typer.Option(metavar="bf16|fp16|fp32", help="to compute in")] = None
    reduce_dtype: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp16", help="of sums of gradients")] = None
    bucket_bytes: Annotated[int | None, typer.Option(metavar="BYTES", help="that move together")] = None
    check_replicas: Annotated[
        int | None, typer.Option(metavar="N", help="compare what ranks hold alike every N steps; 0 never does")
    ] = None

    def job(self, target: str) -> Job:
        """The TARGET's job, with what the command line says of it."""
        compiler = compiler_of(self.compile)
        said: dict[str, Any] = {name: value for name, value in self._said().items() if name != "seed"}
        said |= {"compile": compiler} if compiler is not None else {}
        said |= {"stages": self._stages()} if self.stages is not None else {}
        if said.pop("no_reshard_after_forward", False):
            said["reshard_after_forward"] = False
        if self.recompute is not None:
            said["recompute"] = _recompute(self.recompute)
        if self.reduce_dtype is not None:
            said["reduce_dtype"] = DTYPES.get(self.reduce_dtype, self.reduce_dtype)
        return replace(load_job(target, self.seed), **said)

    def arguments(self) -> list[str]:
        """The same options for the process of a rank."""
        compiler_of(self.compile)  # what is wrong is said before anything starts
        found = []
        for name, value in self._said().items():
            flag = f"--{name.replace('_', '-')}"
            if name == "stages":
                value = ";".join(self._stages())
            found += [flag] if value is True else [flag, str(value)]
        return found

    def _said(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def _stages(self) -> tuple[str, ...]:
        return tuple(part.strip() for entry in self.stages or () for part in entry.split(";") if part.strip())


def _recompute(text: str) -> Recompute:
    """`full`, `1000000`, `0.5` or `blocks.0-3=full,*=selective`."""
    if "=" not in text:
        return _policy(text)
    pairs = (entry.partition("=") for entry in text.split(","))
    return {pattern.strip(): _policy(policy) for pattern, _, policy in pairs}


def _policy(text: str) -> Policy:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text.strip()


def takes_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The parameter `options` of a command becomes the fields of `Options`, but those in `without`."""
    hints = get_type_hints(Options, include_extras=True)
    taken = [each for each in fields(Options) if each.name not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        added = [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name]
            )
            for each in taken
        ]
        kept = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in own.parameters.items()
            if name != "options"
        ]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            found = {each.name: given.pop(each.name) for each in taken}
            command(**given, options=Options(**found))

        del called.__wrapped__  # type: ignore[attr-defined]  # typer would read its signature
        called.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {name: each.annotation for name, each in called.__signature__.parameters.items()}  # type: ignore[attr-defined]
        return called

    return decorate
