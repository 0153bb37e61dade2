"""`plan`: the fastest way to train a model on so many devices of a machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.compiler.garbage import uncollected
from autopar.errors import AutoparError, BatchError, PlanError, divisors, first_sentence, one_of
from autopar.ir.ops.measure import human
from autopar.ir.options import STAGE_AND_LAYERS
from autopar.ir.program import Program, record
from autopar.job import Job
from autopar.machines import Machine
from autopar.planning.bounds import LeastWork
from autopar.planning.find_plan import FITS, HOST, SAME, FoundPlans, search, with_host, with_stages
from autopar.planning.jobs import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.step_time import tokens_of
from autopar.planning.shallow.captures import LEAST_ROWS
from autopar.planning.space.batch_sizes import OF_A_BATCH
from autopar.planning.space.candidates import (
    ACTIVATIONS,
    BY_STAGE,
    GPIPE,
    LAYERS,
    OFFLOAD,
    ON_DISK,
    RESHARD,
    Candidate,
    Model,
    Space,
)
from autopar.planning.space.fixed import fixed_text

Tell = Callable[[int, int], None]
_WAITS = f"backward passes read what all forward passes add up to: micro-batches have schedule {GPIPE}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be planned. gpus: devices. batch: rows of a step. memory: bytes that a rank may hold, by default what
    of a device's memory is left to a program. fixed: fields of a candidate (`tp`) that are decided. top: plans.
    may_offload: True if states and parameters may wait in the host's memory."""

    gpus: int
    batch: int
    machine: Machine
    memory: float | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    top: int = 10
    may_offload: bool = True

    @property
    def limit(self) -> float:
        return FITS * self.machine.device.memory if self.memory is None else self.memory


@dataclass(frozen=True, slots=True)
class Planned:
    """found: the plans. tokens: of a step. programs: that costs are read off. experts: what an axis ep would do, of a
    model that has some."""

    asked: Asked
    found: FoundPlans
    tokens: int
    work: LeastWork
    model: Model
    programs: Layers
    experts: str = ""

    @property
    def rate(self) -> float:
        """Tokens that the best plan trains on in a second."""
        return self.tokens / self.found.best[0].total * 1e6

    @property
    def certificate(self) -> str:
        """How many candidates there were, what became of them, and what none of them has."""
        none = {"cp": self.model.whole, "micro-batches or pp": first_sentence(self.model.coupled)}
        more = "".join(f"; none with {what}: {why}" for what, why in none.items() if why)
        more += f"; {_WAITS}" if self.model.waits else ""
        return f"{self.found.certificate}{more}{self.experts and '; '}{self.experts}"


@uncollected(lives_on=True)
def plan(job: Job, asked: Asked, tell: Tell = lambda done, all_: None, layers: Layers | None = None) -> Planned:
    """Search all plans for a job's model (`planned`). layers: what `layers_of` gave for this job and machine; what it
    knows is not made again."""
    return planned(layers or layers_of(job, asked.machine), asked, tell)


@uncollected(lives_on=True)
def planned(layers: Layers, asked: Asked, tell: Tell = lambda done, all_: None) -> Planned:
    """Search all plans (`planning/find_plan.py`). tell: of progress, (done, all).

    Raises PlanError if no plan fits, with the least memory that any would take, and for a batch that no number of
    devices divides.
    """
    _check_waits(asked)
    model = model_of(layers, asked)
    work = _work(layers.whole, layers, asked)
    space = space_of(asked, model)
    if next(space.drawn(), None) is None:
        raise _none_divides(asked, model)
    found = search(space, layers, work, asked.machine, asked.limit, asked.top, tell)
    found = with_stages(found, space, layers, work, asked.machine, asked.limit, asked.top)
    if asked.may_offload:
        found = with_host(found, space, layers, work, asked.machine, asked.limit, asked.top)
    if not found.best:
        raise _none_fits(asked, found, model)
    return Planned(asked, found, tokens_of(layers.whole) // LEAST_ROWS * asked.batch, work, model, layers)


def candidates_of(asked: Asked, model: Model) -> list[Candidate]:
    """All plans for what is asked."""
    return list(space_of(asked, model).candidates())


def is_divided(asked: Asked, layers: Layers) -> bool:
    """True if there is a plan that divides the batch, whether it fits or not."""
    return next(space_of(asked, model_of(layers, asked)).drawn(), None) is not None


def space_of(asked: Asked, model: Model) -> Space:
    """What there is to choose from."""
    machine = asked.machine
    return Space(asked.gpus, asked.batch, machine.ranks, model, asked.fixed, asked.limit, machine.disk_folder)


def model_of(layers: Layers, asked: Asked) -> Model:
    """What of the model says which plans there are."""
    whole, micros = _no_context(layers, asked), layers.micros
    attention = micros.options.attention
    heads = frozenset[tuple[int, int]]() if attention == "gather" else micros.captures.heads
    return Model(layers.equal, whole, micros.coupled, layers.first, heads, attention == "ring", micros.waits)


def _no_context(layers: Layers, asked: Asked) -> str:
    """Why no rank of cp has less to do than all of it, by the program of the fewest ranks; empty where it has."""
    if asked.gpus == 1 or not asked.fixed.keys().isdisjoint(("cp", "ulysses")):
        return ""
    size = divisors(asked.gpus, asked.gpus)[1]
    try:
        part = layers.part(size)
    except BatchError:  # a length that this size does not divide
        return ""
    except AutoparError as error:
        return first_sentence(str(error))
    fair = 1 / size
    return f"of {size} ranks each would compute {part:.0%} of the products" if part > (1 + fair) / 2 else ""


def _work(whole: Program, layers: Layers, asked: Asked) -> LeastWork:
    """The products of a step, and the bytes of its parameters."""
    flops, least, dtype = layers.products()
    bytes_ = {entry.name: record(node).type.bytes_ for node, entry in whole.parameters()}
    trained = sum(bytes_[out.name] for out in whole.outputs if out.kind == "gradient")
    parameters = sum(bytes_.values())
    return LeastWork(flops * asked.batch, least * asked.batch, parameters, dtype, parameters - trained)


def _check_waits(asked: Asked) -> None:
    """Raise PlanError for what cannot wait elsewhere as it is fixed."""
    waits, fixed = asked.fixed.get(OFFLOAD, ""), asked.fixed
    if waits.endswith(ON_DISK) and not asked.machine.disk_folder:
        raise PlanError(
            f"{OFFLOAD}={waits}: machine {asked.machine.name} says nothing of a disk. `autopar machine measure --disk "
            f"DIR` measures one, or write disk_folder and disk_memory into its file."
        )
    said = [name for name in ("recompute", RESHARD) if name in fixed] if ACTIVATIONS in waits else []
    if said:
        raise PlanError(
            f"{OFFLOAD}={waits} with {fixed_text({name: fixed[name] for name in said})}: where activations wait, "
            f"memory= decides that too. Leave {' and '.join(said)} out."
        )


def _none_divides(asked: Asked, model: Model) -> PlanError:
    given = f" with {fixed_text(asked.fixed)}" if asked.fixed else ""
    return PlanError(f"no plan for {asked.gpus} devices and {asked.batch} rows a step{given}: {_room(asked, model)}")


def _room(asked: Asked, model: Model) -> str:
    """What the sizes of a plan may be, and the numbers of devices near by that a plan divides."""
    some = one_of(divisors(asked.batch, asked.gpus))
    alone = max(divisors(asked.batch, asked.gpus))
    fewer = f" Of {alone} devices each could take {asked.batch // alone} of the rows." if not asked.fixed else ""
    pipeline = f"a pipeline has at most a rank for each of the {model.layers} equal layers, and a micro-batch for each"
    if model.coupled:
        pipeline = f"there is no pipeline ({first_sentence(model.coupled)})"
    elif not model.layers:
        pipeline = "no pipeline is planned, since the model has no equal layers"
    elif model.waits:
        pipeline += f" ({_WAITS})"
    return (
        f"the data axes must divide the rows ({some} here), tp, cp, ulysses and pp the devices, and {pipeline}. Change "
        f"the batch or what is fixed.{_part(asked, model)}{fewer}"
    )


def _part(asked: Asked, model: Model) -> str:
    """What it takes to decide what is of some plans alone, where that is fixed."""
    found = ""
    if asked.fixed.get("recompute") == LAYERS:
        found += f" recompute={LAYERS} is of models with 2 or more equal layers ({model.layers} here)."
    if asked.fixed.get("recompute") in BY_STAGE:
        found += f" recompute={asked.fixed['recompute']} is of plans with 2 or more micro-batches, or with pp."
    if not asked.fixed.get(RESHARD, True):
        found += f" {RESHARD}=false is of plans with zero=3, over 2 or more ranks of dp, fsdp, cp and ulysses together."
    return found + _rows_text(asked)


def _rows_text(asked: Asked) -> str:
    """Which batches have the micro-batches that are fixed."""
    given = {name: asked.fixed[name] for name in OF_A_BATCH if name in asked.fixed}
    words, unit = fixed_text(given), math.prod(given.values())
    if len(given) == len(OF_A_BATCH):
        return f" With {words} it is {unit} rows for each rank of dp and fsdp: leave --batch out, and it follows."
    if asked.batch % unit:
        return f" With {words} it is a multiple of {unit}, as {-(-asked.batch // unit) * unit} is."
    return ""


def _none_fits(asked: Asked, found_plans: FoundPlans, model: Model) -> PlanError:
    if found_plans.counts[SAME] and "recompute" in asked.fixed:  # else they were there without recomputation
        return PlanError(
            f"no plan for {asked.gpus} devices with {fixed_text(asked.fixed)}: {found_plans.counts[SAME]} fit in "
            f"{human(asked.limit)} a device with no layer computed again. Write recompute=none, or less memory."
        )
    if found_plans.least is None:
        reasons = "; ".join(f"{count} {what.replace(':)', ')')}" for what, count in found_plans.counts.most_common(3))
        return PlanError(
            f"no plan for {asked.gpus} devices: of the candidates {reasons}. {_capital(_room(asked, model))}"
        )
    least, lacks = found_plans.least, found_plans.least_host
    if lacks is not None and least.memory <= asked.limit:
        is_on_disk = bool(lacks.candidate.folder)
        share = asked.machine.disk_share if is_on_disk else asked.machine.host_share
        return PlanError(
            f"no plan for {asked.gpus} devices: {lacks.candidate} fits in {human(asked.limit)} a device, and takes "
            f"{human(lacks.host)} of {'the disk' if is_on_disk else HOST}, of which a rank may take "
            f"{human(share(asked.gpus))}. More {'room there' if is_on_disk else 'host memory'}, more "
            f"nodes, or a model in bfloat16, whose gradients and states are half as large, would do."
        )
    return PlanError(
        f"no plan fits in {human(asked.limit)} a device on {asked.gpus} devices: the least memory is "
        f"{human(least.memory)}, with {least.candidate}. About {-(-asked.gpus * least.memory // asked.limit):.0f} "
        f"devices, a smaller batch, or a device with more memory would do.{_freed(asked, model)}"
        f"{_of_host(asked, found_plans)}"
    )


def _of_host(asked: Asked, found_plans: FoundPlans) -> str:
    """Whether the host's memory was looked at, and what it lacks."""
    if not asked.may_offload or OFFLOAD in asked.fixed:
        return ""
    if not asked.machine.host_memory:
        return f" Of the host's memory machine {asked.machine.name} says nothing (host_memory): nothing was put there."
    has = human(asked.machine.host_share(asked.gpus))
    return f" That is with what may wait in the host's memory, of which a rank may take {has}."


def _freed(asked: Asked, model: Model) -> str:
    """What is fixed and takes memory."""
    least = (STAGE_AND_LAYERS,) if model.waits else ("full", LAYERS, *BY_STAGE)
    recompute, reshard = asked.fixed.get("recompute", least[0]), asked.fixed.get(RESHARD, True)
    text = f" recompute={recompute} is fixed: {least[0]} keeps less." if recompute not in least else ""
    return text if reshard else f"{text} {RESHARD}=false is fixed: true keeps less."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
