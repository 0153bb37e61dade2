"""Run a program of a parallel module on a batch: what this rank holds and was given becomes the inputs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from autopar.capture.capture import fake_like
from autopar.capture.data.casts import default_dtype
from autopar.capture.data.reads import OtherValues, check_reads
from autopar.errors import AutoparError, BatchError
from autopar.ir.layout import Layout, local_part
from autopar.ir.program import Input, record
from autopar.parallel.last_step import check_rows
from autopar.parallel.out_of_memory import explaining_memory
from autopar.parallel.programs.own_batch import means, of_all_places, seed_of
from autopar.parallel.programs.portions import Given
from autopar.parallel.programs.running import Running
from autopar.parallel.returned import shown
from autopar.parallel.session.session import Session
from autopar.parallel.tensors.parameter import accumulate, as_gradient, drop_gradients
from autopar.parallel.weights.gradients import Added, OfBatch, added_up, finished, guarded, held
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.kernels import host
from autopar.runtime.ranks.process_groups import default_group
from autopar.torch_compat import hooks_of


def train_step(
    session: Session, is_whole: bool, is_held: bool, running: Running, given: Given
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Run a training program: gradients are added to `.grad`, what it changes is written. The loss, and all outputs;
    is_whole: those of all ranks, and not this rank's rows. is_held: gradients wait for the loss's `backward()`."""
    _check_hooks(session, running)
    outputs = run_step(session, running, given, is_step=True)
    unused = _unused(session, running, outputs)
    is_finite = _is_finite(session, running, given, outputs)
    session.random.steps += 1
    if is_finite:
        _write(session, running, outputs)
    parameters, gradients = running.gradients(outputs, unused)
    own = outputs if is_whole and not running.asked else own_rows(outputs, running, given)
    of_batch = [own[at] for at, _ in running.asked]
    asked = [given.parts.leaves[leaf].requires_grad_() for _, leaf in running.asked]  # as the model may have done
    if is_finite and session.scale is not None:
        is_finite = session.scale.take([*gradients, *of_batch], session.settings.device)

    batch = OfBatch(asked, of_batch if is_finite else [None] * len(asked))
    mine = Added(parameters, gradients) if is_finite else Added(list(running.parameters().values()), None)

    (loss,) = (outputs[at] for at in running.losses)
    returned, _ = shown(outputs if is_whole else own, running, given)
    if is_held:
        session.sums.forget()
        later = partial(session.sums.add, take=partial(_add, session, is_held=True))
        return held(loss, later, batch, mine, as_gradient), returned
    _add(session, [mine], is_held=False)
    batch.add()
    return finished(loss), returned


def _check_hooks(session: Session, running: Running) -> None:
    """Refuse hooks on parameters of which the step itself takes a gradient: on one device they run there, too."""
    asked = running.captured.ran.differentiated
    if not asked:
        return
    parameters = running.parameters()
    hooked = sorted(name for name in asked if hooks_of(parameters[name])[0])
    session.agreement.check("hooks on the gradients of parameters", hooked)
    if hooked:
        raise AutoparError(
            f"'{hooked[0]}' has a hook on its gradient (register_hook), and the step takes a gradient of it itself "
            f"(torch.autograd.grad): one device runs the hook there too, and a compiled step behind its end alone. Do "
            f"in the loss function what the hook does, or change .grad between forward_backward() and optimizer.step()."
        )


def _add(session: Session, steps: list[Added], is_held: bool) -> None:
    """Add to `.grad` what steps give, or leave every one None if any of them overflowed. is_held: a loop called
    `backward()` itself, and knows what `zero_grad()` takes away behind it."""
    together = added_up(steps)
    if together.gradients is None:
        drop_gradients(together.parameters)
    else:
        accumulate(together.parameters, together.gradients)
    for _ in steps:
        session.announcer.stepped(together.gradients is not None and not is_held)


def _is_finite(session: Session, running: Running, given: Given, outputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether a step may change anything; True where nobody asked. A loss scale looks at the gradients itself."""
    looks = session.nonfinite
    if looks.wanted is None:
        return True
    values = running.gradients(outputs)[1] if session.scale is None else []
    gradients = dict(zip(running.trained, values, strict=bool(values)))
    inputs = partial(_inputs, session, running, given, True)
    return looks.passes(outputs[running.losses[0]], gradients, running.runner, inputs, session.random.steps)


def _unused(session: Session, running: Running, outputs: tuple[torch.Tensor, ...]) -> frozenset[str]:
    """The parameters that no rank used in this step, as random numbers and the rows of masks decided: they have no
    gradient."""
    guards = [outputs[at] for at in running.reads]
    running.mask_rows = guards[-1] if running.captured.row_uses is not None else None
    if running.mask_rows is not None and session.settings.is_own:
        guards[-1] = of_all_places(guards[-1], session.world)
    without_rows = running.captured.unused(guards)
    coins = running.captured.coins
    if coins is None or coins.uses is None:
        return without_rows
    drawn = session.random.tensor(torch.device("cpu"), True)
    places = range(session.world.places) if session.settings.is_own else (0,)
    return without_rows | frozenset.intersection(*(coins.left_out(seed_of(drawn, place)) for place in places))


def forward_step(session: Session, is_whole: bool, running: Running, given: Given) -> Any:
    """Run a forward program: buffers are written. What the model returns, which refuses a backward pass. is_whole: as
    of `train_step`."""
    outputs = run_step(session, running, given, is_step=False)
    session.random.forwards += 1
    _write(session, running, outputs)
    outputs, free = shown(outputs if is_whole else own_rows(outputs, running, given), running, given)
    return running.captured.result(guarded(outputs, given.parts.leaves, running.parameters().values(), free))


def loss_step(session: Session, is_whole: bool, running: Running, given: Given) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Run a program of the loss alone: buffers are written. The loss, and all outputs. is_whole: as of `train_step`."""
    outputs = run_step(session, running, given, is_step=False)
    session.random.forwards += 1
    _write(session, running, outputs)
    (loss,) = (outputs[at] for at in running.losses)
    return loss, shown(outputs if is_whole else own_rows(outputs, running, given), running, given)[0]


def _write(session: Session, running: Running, outputs: tuple[torch.Tensor, ...]) -> None:
    running.write_state(outputs)
    if running.writes_weights:
        session.announcer.wrote()


def own_rows(outputs: tuple[torch.Tensor, ...], running: Running, given: Given) -> tuple[torch.Tensor, ...]:
    """The outputs; of those with a row for each sample of a batch, of which ranks have parts, this rank's rows."""
    if running.rows is None or given.portion is None:
        return outputs
    rows = list(outputs)
    for at, row in enumerate(running.rows.outputs):
        if row is not None and rows[at] is not None:
            rows[at] = given.portion.part(rows[at], row.leaf, *row.split)
    return tuple(rows)


def run_step(session: Session, running: Running, given: Given, is_step: bool) -> tuple[torch.Tensor, ...]:
    """The outputs of this rank. Raises OtherValues if the program was specialised to other values than this batch has,
    before anything is changed."""
    for i, tensor in given.parts.tensors():
        if fake_like(tensor):
            where = "is on the meta device, where nothing has data"
            raise BatchError(f"{given.parts.paths[i]} {where}: only prepare() can take it.")
    lift = session.settings.lift
    explaining = explaining_memory(running.compiled, default_group().rank(), session.settings.device)
    failures = session.agreement.failures
    noted = nullcontext() if failures is None else failures.noted()
    with explaining, _own_dtypes(session.settings.device.type, lift), noted:
        outputs = running.run(_inputs(session, running, given, is_step))
    _check(session, running, outputs)
    if running.is_bounded:
        check_rows(running, session)
    return means(outputs, running.together, session.world) if session.settings.is_own else outputs


def _own_dtypes(kind: str, lift: torch.dtype | None) -> AbstractContextManager[None]:
    """Let kernels compute in the dtypes that the program says: it has the casts of torch.autocast in it, and its
    kernels would cast once more where the caller has autocast on. lift: the dtype that all is computed in, if any."""
    own = default_dtype(lift) if lift is not None else nullcontext()
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return _without_autocast(kind, own) if is_on else own


@contextmanager
def _without_autocast(kind: str, own: AbstractContextManager[None]) -> Iterator[None]:
    """Turn the caller's autocast off, around another context."""
    with torch.autocast(kind, enabled=False), own:
        yield


def _check(session: Session, running: Running, outputs: tuple[torch.Tensor, ...]) -> None:
    """Raise OtherValues if the program read other values than this step has: on every rank alike. Where each rank has a
    step of its own they may differ, and all of them refuse it."""
    found = [outputs[at] for at in running.reads]
    if not found or not session.settings.is_own:
        return check_reads(running.captured.reads, found)
    other: OtherValues | None = None
    try:
        check_reads(running.captured.reads, found)
    except OtherValues as error:
        other = error
    if session.agreement.any("values that a step reads", other is not None):
        why = ' With batch="ddp" all ranks run one program.'
        if other is not None:
            raise other.read.refused(other.values[-1], why)
        raise BatchError(f"the batch of another rank has other values than the program.{why}")
    return None


def _inputs(session: Session, running: Running, given: Given, is_step: bool) -> StepInputs:
    device, random, scale = session.settings.device, session.random, session.scale
    program, leaves, world = running.compiled.program, given.parts.leaves, session.world
    portion, mesh = given.portion, program.mesh
    gathered: dict[int, torch.Tensor] = {}  # of the tensors of which the program wants something else than was given
    if portion is not None and not portion.is_own:
        for node, entry in program.entries:
            leaf = int(entry.name) if entry.kind == "batch" else -1
            if leaf in portion.leaves and not portion.fits(leaf, record(node).layout, world):
                gathered[leaf] = portion.gathered(leaf, leaves[leaf].detach().to(device), world)

    def value(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
        if entry.kind == "scale":
            return torch.full((), scale.scale if scale else 1.0, device=device)  # no copy: it would wait for the device
        if entry.kind == "seed":
            drawn = random.tensor(device, is_step)
            return seed_of(drawn, world.place) if session.settings.is_own else drawn
        leaf = int(entry.name)
        if portion is not None and leaf not in gathered and leaf in portion.leaves:
            layout = portion.within(layout, world)
        own = gathered[leaf] if leaf in gathered else leaves[leaf].detach().resolve_conj().resolve_neg()
        part = local_part(own, layout, mesh, coord)
        # Of memory that can move, the copy is in the device's queue; of other the host waits for all before it there.
        return part.to(device, non_blocking=not host.on_host(device) and own.is_pinned())

    return running.inputs(value)
