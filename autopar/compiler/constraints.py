"""Check the user's layouts, batch and micro-batches against the model and the mesh, before any search."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence

from autopar.errors import BatchError, LayoutError, PlanError, divisors, one_of
from autopar.ir.layout import Layout, factor_sizes, parse_layout, spelled
from autopar.ir.mesh import CONTEXT, DATA_AXES, EXPERT, GRADIENT_AXES, PIPELINE, Mesh, axes_of_group, group_name
from autopar.ir.modules import module_paths, unknown_pattern
from autopar.ir.plan import Plan
from autopar.ir.program import PARTNER, Input, Program, TensorType, record
from autopar.passes.search.intents import INTENTS, BatchDims, batch_dims_of, batch_size, context_axes


def parse_shard(shard: Mapping[str, str | Layout] | None, program: Program, mesh: Mesh) -> dict[str, Layout]:
    """`{"blocks.*.up.weight": "[tp,-]"}` as a layout for each parameter that matches, by its first name.

    Raises LayoutError, with all faults at once: a pattern that matches nothing (with the nearest names), a layout
    of another number of dims, an unknown axis, a size that an axis cannot divide, two patterns that disagree.
    """
    faults: list[str] = []
    chosen: dict[str, tuple[str, Layout]] = {}
    parameters = _parameters(program)
    for pattern, text in (shard or {}).items():
        if not isinstance(text, (str, Layout)):
            what = f"{text!r} is a {type(text).__name__}"
            faults.append(f"shard pattern '{pattern}': {what}, not a layout such as '[tp,-]'.")
            continue
        try:
            layout = parse_layout(text) if isinstance(text, str) else text
        except LayoutError as error:
            faults.append(f"shard pattern '{pattern}': {error}")
            continue
        matched = [p for p in parameters if any(_matches(name, pattern) for name in p[0].names)]
        if not matched:
            faults.append(_nothing(pattern, [name for entry, _, _ in parameters for name in entry.names]))
        for entry, type_, used in matched:
            origin = f'From shard={{"{pattern}": "{text}"}}{used}'
            misfit = _misfit(entry, type_, layout, mesh, origin)
            faults += misfit
            before = chosen.get(entry.name)
            if not misfit and before is not None and before[1] != layout:
                faults.append(
                    f"'{entry.name}' is given two layouts: {before[1]} by shard pattern '{before[0]}' and {layout} by "
                    f"'{pattern}'{_tied(entry)}. Keep one of them."
                )
            chosen[entry.name] = (pattern, layout)
    if faults:
        raise LayoutError("\n".join(faults))
    return {name: layout for name, (_, layout) in chosen.items()}


def patterns_of(shard: Mapping[str, str | Layout] | None, program: Program) -> dict[str, str]:
    """`shard={"blocks.*.up.weight": "[tp,-]"}` for each parameter that the pattern gives its layout."""
    return {
        entry.name: f'shard={{"{pattern}": "{text}"}}'
        for pattern, text in (shard or {}).items()
        for entry, _, _ in _parameters(program)
        if any(_matches(name, pattern) for name in entry.names)
    }


def _matches(name: str, pattern: str) -> bool:
    """True if a pattern means a name: `*` is none of another model's."""
    return name.startswith(PARTNER) == pattern.startswith(PARTNER) and fnmatch.fnmatchcase(name, pattern)


def _parameters(program: Program) -> list[tuple[Input, TensorType, str]]:
    parameters = []
    for node, entry in program.entries:
        if entry.kind == "parameter":
            sources = [record(user).source for user in node.users if record(user).source]
            parameters.append((entry, record(node).type, f", used at {sources[0]}" if sources else ""))
    return parameters


def _nothing(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern.replace("*", "0"), names, n=3, cutoff=0.3) or names[:3]
    return f"shard pattern '{pattern}' matches no parameter. Nearest names: {', '.join(near)}."


def _tied(entry: Input) -> str:
    return f" ({' and '.join(repr(name) for name in entry.names)} are one tied parameter)" if entry.names[1:] else ""


def _misfit(entry: Input, type_: TensorType, layout: Layout, mesh: Mesh, origin: str) -> list[str]:
    """Why a layout does not fit a parameter; nothing if it does."""
    if len(layout.dims) != len(type_.shape):
        return [
            f"'{entry.name}' has {len(type_.shape)} dims {list(type_.shape)}, but layout {layout} has "
            f"{len(layout.dims)}. {origin}."
        ]
    if layout.partial:
        return [f"'{entry.name}': a parameter cannot be partial, as layout {layout} says. {origin}."]
    if layout.owned:
        return [f"'{entry.name}': a parameter has no owners ('@'), as layout {layout} says. {origin}."]
    if any(isinstance(factor, int) and factor < 0 for dim in layout.dims for factor in dim):
        return [f"'{entry.name}': a parameter cannot be mirrored ('~'), as layout {layout} says. {origin}."]
    unknown = sorted({axis for axis in layout.axes if axis not in mesh})
    if unknown:
        return [
            f"'{entry.name}': layout {layout} names axis '{unknown[0]}', but mesh '{mesh}' has "
            f"{', '.join(mesh.names)}. {origin}."
        ]
    faults = []
    for dim, (size, factors) in enumerate(zip(type_.shape, layout.dims, strict=True)):
        needed = math.prod(factor_sizes(factors, mesh))
        if size % needed:
            axis = next(factor for factor in factors if isinstance(factor, str))
            text, product = spelled(factors), " x ".join(map(str, factor_sizes(factors, mesh)))
            what = f"axis '{axis}' (size {mesh[axis]})" if len(factors) == 1 else f"'{text}' ({product} = {needed})"
            others = needed // mesh[axis]
            allowed = f"{axis} may be {one_of(divisors(size // others))} here." if size % others == 0 else (
                f"No size of {axis} would do: {size} is not divisible by {others}."
            )  # fmt: skip
            faults.append(f"'{entry.name}' dim {dim} (size {size}) cannot be split over {what}. {origin}. {allowed}")
    return faults


_NO_ROWS = (
    "the batch holds no tensor with a dim to split. Pass what the step works on as a tensor with a row for each "
    "sample, and not by a buffer or a global."
)


def check_batch(program: Program, mesh: Mesh, said: BatchDims | None) -> None:
    """Raise BatchError if the batch cannot be split over the axes that split it. said: as `Plan.batch_dims`."""
    entries = _entries(program)
    size = batch_size(entries, said)
    for axis, ranks in mesh.axes:
        if axis in INTENTS and INTENTS[axis].batch_split and ranks > 1:
            if size is None:
                raise BatchError(
                    f"axis '{axis}' (size {ranks}) splits the batch, but {_NO_ROWS} Or leave '{axis}' out, for axes "
                    f"that split the model (tp, pp)."
                )
            if size % ranks:
                raise BatchError(
                    f"the batch has {size} samples ({_counted(entries, said)}), which axis '{axis}' (size {ranks}) "
                    f"cannot divide. Use a batch size that is a multiple of {ranks}, or a {axis} of "
                    f"{one_of(divisors(size))}.{_odd(entries, said)}"
                )


def _counted(entries: Sequence[tuple[Input, TensorType]], said: BatchDims | None) -> str:
    """`dim 0 of [6, 8], [6]`: what counts the samples."""
    shapes = {entry.name: type_.shape for entry, type_ in entries if entry.kind == "batch"}
    found: dict[int, list[str]] = {}
    for name, dim in batch_dims_of(entries, said).items():
        found.setdefault(dim, []).append(str(list(shapes[name])))
    return ", ".join(f"dim {dim} of {', '.join(shown)}" for dim, shown in found.items())


def _odd(entries: Sequence[tuple[Input, TensorType]], said: BatchDims | None) -> str:
    """What is said of batch tensors with other numbers of rows than those that count the samples."""
    dims = batch_dims_of(entries, said)
    odd = [list(type_.shape) for entry, type_ in entries if entry.kind == "batch" and entry.name not in dims]
    if said is not None or not odd:
        return ""
    return (
        f" {', '.join(map(str, odd))} has another number of rows, and is whole on every rank: if it is the batch, say "
        "so with batch_dims= (None for a condition that counts no samples); where the samples cannot be split, split "
        "parameters with shard= over another axis."
    )


def _entries(program: Program) -> list[tuple[Input, TensorType]]:
    return [(entry, record(node).type) for node, entry in program.entries]


def check_plan(plan: Plan) -> None:
    """Raise PlanError for options that the mesh does not go with, or each other."""
    for check in (check_zero, check_host, check_slices, check_experts):
        check(plan)


def check_zero(plan: Plan) -> None:
    """Raise PlanError if ZeRO has no axis to split states over."""
    if plan.zero and not any(axis in plan.mesh for axis in GRADIENT_AXES):
        raise PlanError(
            f"zero={plan.zero} splits states over a data axis, but mesh '{plan.mesh}' has none. Add dp, fsdp or cp to "
            f"it, e.g. 'dp=2,{plan.mesh}', or leave zero out."
        )


def check_patterns(plan: Plan, program: Program) -> None:
    """Raise PlanError for patterns of reshard_after_forward, or of optimizer states that wait, that no module has."""
    wanted, states = plan.options.reshard_after_forward, plan.options.offloaded.get("optimizer")
    said = dict[str, str]()
    if isinstance(wanted, Mapping):
        said |= {f"reshard_after_forward={{{one!r}: {again}}}": one for one, again in wanted.items()}
    if isinstance(states, Sequence):
        said |= {f'offload={{"optimizer": [{one!r}]}}': one for one in states}
    if said:
        paths = module_paths(program, program.calls())
        faults = [f"{text}: {fault}" for text, one in said.items() if (fault := unknown_pattern(one, paths))]
        if faults:
            raise PlanError("\n".join(faults))


def check_host(plan: Plan) -> None:
    """Raise PlanError where parameters in the host's memory would be on the device all the time."""
    if not plan.offloads("parameters"):
        return
    asked = f"offload={plan.options.offload!r}"
    if plan.zero_axes and plan.options.reshard_after_forward is not True:
        raise PlanError(
            f"{asked} with reshard_after_forward={plan.options.reshard_after_forward} on mesh '{plan.mesh}': every "
            f"rank would keep all parameters that it has gathered for the rest of the step. Leave "
            f"reshard_after_forward out."
        )


def check_experts(plan: Plan) -> None:
    """Raise PlanError where rows cannot go to other ranks: for a compiler of fixed shapes, and where ranks know nothing
    of each other's batches."""
    if plan.options.experts is not None:
        _check_expert_axis(plan, plan.options.experts)
    if not plan.expert_axes:
        return
    if plan.fixed.is_own:
        raise PlanError(
            f"batch=\"ddp\" computes each rank's batch apart, and on mesh '{plan.mesh}' rows go to the experts of "
            f'other ranks. Use batch="local", whose means are over the rows of all ranks, or '
            + ("leave experts out." if plan.options.experts else f"dp in place of {EXPERT}.")
        )
    if plan.options.compile == "inductor" and (plan.options.expert_rows is None or plan.is_staged):
        raise PlanError(
            f"compile=\"inductor\" is for shapes that are known, and on mesh '{plan.mesh}' as many rows come to a rank "
            f"as choose its experts. Bound them with expert_rows=1.25, in a step of one graph (without pp and "
            f"micro-batches), leave compile out, or {_instead_of_experts(plan)}."
        )


def _check_expert_axis(plan: Plan, axis: str) -> None:
    """Raise PlanError for experts over what is no axis of the mesh that rows may go along."""
    said, may = f"experts={axis!r}", [one for one in plan.mesh.names if one in (*DATA_AXES, CONTEXT)]
    joined = f", or both, '{group_name(may)}'" if len(may) == 2 else ", or several joined" if may[2:] else ""
    ways = f"It may be {one_of(may)}{joined}" if may else "Add ep, or dp, to the mesh"
    if EXPERT in plan.mesh and axis != EXPERT:
        raise PlanError(f"{said}, and mesh '{plan.mesh}' has an axis {EXPERT} for them: leave one of both out.")
    if not set(axes_of_group(axis)) <= set(may):
        raise PlanError(f"{said} is no axis of mesh '{plan.mesh}' that splits rows. {ways}.")


def _instead_of_experts(plan: Plan) -> str:
    return "leave experts out" if plan.options.experts else f"give the ranks of {EXPERT} to dp or tp"


def check_slices(plan: Plan) -> None:
    """Raise PlanError for slices where there are no stages that they could fill."""
    if plan.slices > 1 and plan.ranks_of_pipeline == 1:
        wider = ",".join(filter(None, (str(plan.mesh), "pp=2")))
        raise PlanError(
            f"slices={plan.slices} fill a pipeline, but mesh '{plan.mesh}' has none. Add pp to it, e.g. '{wider}', or "
            f"leave slices out: cp splits a sequence over ranks."
        )


def divides_batch(program: Program, mesh: Mesh, said: BatchDims | None) -> bool:
    """True if the axes that split the batch divide it. said: as `Plan.batch_dims`."""
    return (batch_size(_entries(program), said) or 0) % batch_ranks(mesh) == 0


def batch_ranks(mesh: Mesh) -> int:
    """Into how many parts the mesh splits the batch."""
    return math.prod(size for axis, size in mesh.axes if axis in INTENTS and INTENTS[axis].batch_split)


def microbatches_of(
    program: Program,
    mesh: Mesh,
    wanted: int | None,
    said: BatchDims | None = None,
    *,
    replicated: bool,
    uneven: bool,
    slices: int = 1,
) -> int:
    """The number of micro-batches: the one that is wanted; by default one without a pipeline, and with one as many as
    divide a rank's samples, up to four for each rank: then the bubble is a fifth (arXiv 2104.04473, section 2.2).

    slices: into how many each is cut, so that fewer will do. replicated: every rank computes the whole batch. uneven:
    take more and smaller ones rather than refuse. Raises BatchError if the micro-batches do not divide the samples of a
    rank.
    """
    stages = dict(mesh.axes).get(PIPELINE, 1)
    if wanted == 1 or (wanted is None and stages == 1):
        return 1
    size = batch_size(_entries(program), said)
    if size is None:
        if wanted is None or uneven:
            return 1
        raise BatchError(f"microbatches={wanted}: {_NO_ROWS} Or leave microbatches out.")
    ranks = 1 if replicated else batch_ranks(mesh)
    samples = size // ranks
    if wanted is not None and samples % wanted and not uneven:
        split = f" ({size} over {ranks} ranks)" if ranks > 1 else ""
        raise BatchError(
            f"microbatches={wanted} does not divide the {samples} samples{split} that a rank computes. "
            f"It may be {one_of(divisors(samples))} here, or take a batch size that is a multiple of {wanted * ranks}."
        )
    if wanted is not None:
        return next(count for count in range(min(wanted, samples), samples + 1) if samples % count == 0)
    return max(count for count in range(1, min(max(4 * stages // slices, 1), samples) + 1) if samples % count == 0)


def is_sequence_parallel(program: Program) -> bool:
    """True if partial sums are scattered over an axis that splits weights, and not only summed."""
    axes = {axis for axis, intent in INTENTS.items() if intent.weights_split}
    return any("reduce_scatter" in str(node.target) and node.args[1] in axes for node in program.calls())


def no_sequence(program: Program, plan: Plan) -> str:
    """Why nothing could be split on the sequence."""
    mesh = plan.mesh
    axes = [(axis, size) for axis, size in mesh.axes if axis in INTENTS and INTENTS[axis].weights_split and size > 1]
    if not axes:
        return f"sequence_parallel=True: mesh '{mesh}' has no axis 'tp' of more than one rank."
    axis, size = axes[0]
    shapes = [
        f"batch tensor {entry.name} {list(record(node).type.shape)}"
        for node, entry in program.entries
        if entry.kind == "batch"
    ]
    context = context_axes(plan.layout_mesh)
    pieces = size * math.prod(ranks for _, ranks in context)
    mirrored = f", or of {2 * pieces} where attention is causal" if context_axes(mesh) else ""
    return (
        f"sequence_parallel=True: no activation can be split over '{axis}' (size {size}) on its sequence. The batch is "
        f"{'; '.join(shapes)}: a dim after the first must be a multiple of {pieces}{mirrored}. "
        f'sequence_parallel="auto" goes on without.'
    )
