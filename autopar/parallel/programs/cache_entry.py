"""Write a compiled program as JSON with program text in it, and read it back for the model at hand.

Kept are the captured program and the one that runs. What the passes in between made (for `explain`, notes of the
search, the next program's layouts) is made again from the captured one if somebody asks. Tensors of the model are
found again where the step read them; only those that the trace made are kept themselves.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, cast, overload

import numpy as np
import torch

from autopar.capture import Captured
from autopar.capture.batch_forms import STRIDES
from autopar.capture.captured import ReturnedLeaf
from autopar.capture.inputs.containers import DictKeys, Form, Leaf, Node, SeenAgain
from autopar.capture.python.guards import Guards
from autopar.capture.python.left_values import LeftValue, Unshown
from autopar.capture.python.read_digests import Unclear
from autopar.capture.python.scalars import Scalars
from autopar.capture.step_kind import StepKind
from autopar.capture.trace.shown_memory import Shown
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.custom_ops.registry import CUSTOM_OPS
from autopar.errors import ArtifactError
from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh
from autopar.ir.ops.names import DTYPES, dtype_name
from autopar.ir.options import StepOptions
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Fixed, Plan
from autopar.ir.program import Program, record, set_record
from autopar.ir.text.text import parse_program, print_program
from autopar.parallel.programs.constants import Constants
from autopar.parallel.programs.running import Built
from autopar.report.artifact.pipeline_json import parse_pipeline, pipeline_json

_MADE_BYTES = 1 << 20  # of tensors that the trace made
_DECIDED = ("microbatches", "slices", "sequence_parallel")  # options for which a plan may have other values
_KINDS: Mapping[str, type] = {"tuple": tuple, "list": list, "dict": dict}
Passes = Callable[[Captured], Sequence[tuple[str, Program]]]
Tensors = Mapping[str, torch.Tensor]
Step = tuple[str, Program]  # a pass and what it made


class LaterHistory(Sequence[Step]):
    """The program after each pass, of which the last is known; the others are made once somebody asks for them."""

    def __init__(self, last: Step, passes: Callable[[], Sequence[Step]]) -> None:
        self._last, self._passes = last, passes

    @cached_property
    def _all(self) -> tuple[Step, ...]:
        return (*self._passes()[:-1], self._last)

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, at: int | slice) -> Step | tuple[Step, ...]:
        return self._last if at == -1 else self._all[at]

    def __len__(self) -> int:
        return len(self._all)


@dataclass(frozen=True)
class ReadBack(Lowered):
    """Programs that were compiled in an earlier run. kept: the layouts in which the step computes with parameters.
    whole: the text of one that no pipeline cuts."""

    is_read: ClassVar[bool] = True
    kept: Mapping[str, Layout] = field(default_factory=dict)
    whole: str = ""

    @property
    def searched(self) -> dict[str, Layout]:
        return dict(self.kept)

    def lines(self) -> list[str]:
        return super().lines() if self.pipeline is not None else [self.whole]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a program is made of beside the model: the mesh, the options and what is decided, as `lower` takes them."""

    mesh: Mesh
    options: StepOptions
    fixed: Fixed


# -- writing ----------------------------------------------------------------------------------------------------------


def entry_of(built: Built, bound: Bound, own: Tensors) -> dict[str, Any]:
    """A program as JSON. own: the plain tensors among the model's attributes. Raises Unclear for a program that cannot
    be read back."""
    captured, compiled = built.captured, built.compiled
    _check(captured, built.constants)
    name, program = compiled.history[-1]
    return {
        "plan": _plan_json(compiled.plan, bound),
        "captured": print_program(captured.program),
        "facts": {
            node.name: [known.flops, known.exact]
            for node in captured.program.graph.nodes
            if node.op != "output" and ((known := record(node)).flops or known.exact)
        },
        "pass": name,
        "program": print_program(program),
        "pipeline": None if compiled.pipeline is None else _pipeline_json(compiled.pipeline),
        "searched": {name: str(layout) for name, layout in compiled.searched.items()},
        "sequence": compiled.sequence,
        "constants": [[name, _constant_json(built.constants, name, own)] for name in captured.constants],
        "result": None if captured.result_form is None else _form_json(captured.result_form),
        "leaves": [_leaf_json(leaf) for leaf in captured.result_leaves],
        "frozen": sorted(captured.frozen),
        "rebound": dict(captured.rebound),
        "differentiated": sorted(captured.ran.differentiated),
        "asked": sorted(captured.ran.asked),
        "batch_dims": captured.batch_dims,
        "left": [[each.name, each.where, _left_json(each.new)] for each in captured.left],
    }


def _check(captured: Captured, constants: Constants) -> None:
    """Raise Unclear for what hangs on more than what is kept."""
    if captured.reads or captured.coins is not None or captured.host is not None:
        raise Unclear("values of the batch, or random numbers, decide the program")
    if captured.partners:
        raise Unclear("the loss calls another model")
    if captured.written:
        raise Unclear("it writes a tensor of the batch, which may lie in the memory of others at the next start")
    if captured.ran.asked - {STRIDES}:  # strides are a part of the key
        raise Unclear("what the code asks of the batch beside its values")
    if captured.ran.values:
        raise Unclear("a tensor was read as a number")
    if constants.numbers:
        raise Unclear("Python numbers are inputs")
    if any(each.spot is not None for each in captured.left):
        raise Unclear("it counts in Python outside of the model")


def _plan_json(plan: Plan, bound: Bound) -> dict[str, Any]:
    found = {name: getattr(plan.options, name) for name in _DECIDED}
    if isinstance(found["slices"], Sequence) and not isinstance(found["slices"], str):
        found["slices"] = list(found["slices"])
    made = _plan(json.loads(json.dumps(_plan_fields(plan, found))), bound)
    if made != plan:
        raise Unclear("its plan")
    return _plan_fields(plan, found)


def _plan_fields(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "options": dict(options),
        "layouts": {name: str(layout) for name, layout in plan.layouts.items()},
        "batch_replicated": plan.batch_replicated,
        "batch_dims": plan.batch_dims,
        "context_replicated": plan.context_replicated,
        "whole": sorted(plan.whole),
        "cuts_samples": plan.cuts_samples,
        "slice_lengths": list(plan.slice_lengths),
        "patterns": dict(plan.patterns),
        "frozen": sorted(plan.frozen),
    }


def _pipeline_json(pipeline: Pipeline) -> dict[str, Any]:
    graphs = [pipeline.graphs_of(place) for place in range(pipeline.flow.size)]
    texts = [{name: print_program(program) for name, program in of_rank.items()} for of_rank in graphs]
    return {"graphs": texts, "lists": pipeline_json(pipeline)}


def _constant_json(constants: Constants, name: str, own: Tensors) -> Any:
    """Where the step read a tensor, or the tensor itself."""
    if name in own:
        return name
    if name in constants.spots:
        return list(constants.spots[name])
    value = constants.made[name]
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
    if not is_plain or not value.is_contiguous() or value.requires_grad or value.nbytes > _MADE_BYTES:
        raise Unclear(f"tensor '{name}' of {value.nbytes:,} bytes, which the step does not read in the model")
    data = value.detach().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": base64.b64encode(data).decode()}


def _form_json(form: Form) -> Any:
    match form:
        case Leaf(array=None):
            return form.is_tensor
        case SeenAgain():
            return form.number
        case Node(spec=None, factory=None, attributes=()) if form.kind in _KINDS.values():
            keys = None if form.keys is None else [_leaf_json(key) for key in form.keys.values]
            return [form.kind.__name__, keys, [_form_json(child) for child in form.children]]
    raise Unclear(f"it returns {form}")


def _leaf_json(leaf: Any) -> Any:
    if leaf is None or type(leaf) in (bool, int, str):
        return leaf
    if type(leaf) is float:
        return {"float": leaf.hex()}
    if isinstance(leaf, Shown):
        return {"shown": [leaf.kind, leaf.name, leaf.lies, leaf.form]}
    if isinstance(leaf, ReturnedLeaf):
        return {"leaf": leaf.value}
    raise Unclear(f"it returns a {type(leaf).__name__}")


def _left_json(value: Any) -> Any:
    """What a run leaves in Python; what no JSON says, as a value of a class that is not known."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_left_json, value)]
    return {"plain": value} if value is None or type(value) in (bool, int, float, str) else {}


# -- reading ----------------------------------------------------------------------------------------------------------


@uncollected()
def built_of(
    content: bytes, bound: Bound, guards: Guards, own: Tensors, kind: StepKind, device: torch.device, passes: Passes
) -> Built:
    """The program of an entry, for the model at hand. guards: what it read there. own: as of `entry_of`. passes: what
    lowers the captured program.

    Raises ArtifactError, or another error of what is no entry.
    """
    says = json.loads(content)
    mesh, plan = bound.mesh, _plan(says["plan"], bound)
    program = _program(says["program"])
    pipeline = None
    if says["pipeline"] is not None:
        graphs = [{name: _program(text) for name, text in one.items()} for one in says["pipeline"]["graphs"]]
        pipeline = parse_pipeline(says["pipeline"]["lists"], mesh, graphs, program)
    constants = {name: _constant(where, guards, own) for name, where in says["constants"]}
    form = says["result"]
    dims = says["batch_dims"]
    guards.ran.differentiated.update(says["differentiated"])
    guards.ran.asked.update(says["asked"])
    captured = Captured(
        program, constants,
        None if form is None else _form(form), tuple(map(_leaf, says["leaves"])),
        frozen=frozenset(says["frozen"]), ran=guards.ran, batch_dims=dims, rebound=says["rebound"],
        left=tuple(LeftValue(name, _left(new), where) for name, where, new in says["left"]),
    )  # fmt: skip

    def history() -> Sequence[Step]:
        return passes(replace(captured, program=_with_facts(_program(says["captured"]), says["facts"])))

    later = cast(tuple[Step, ...], LaterHistory((str(says["pass"]), program), history))
    searched = {name: parse_layout(text) for name, text in says["searched"].items()}
    compiled = ReadBack(plan, later, pipeline, says["sequence"], searched, says["program"])
    return Built(captured, compiled, guards, Constants.of(captured, guards, Scalars({}), device), None, kind)


def _program(text: str) -> Program:
    return parse_program(text, CUSTOM_OPS.names())


def _with_facts(program: Program, facts: Mapping[str, Any]) -> Program:
    """The program with what its text does not say of its nodes."""
    for node in program.graph.nodes:
        if node.name in facts:
            flops, exact = facts[node.name]
            set_record(node, record(node).with_(flops=flops, exact=exact))
    return program


def _plan(says: Mapping[str, Any], bound: Bound) -> Plan:
    chosen = dict(says["options"])
    if isinstance(chosen["slices"], list):
        chosen["slices"] = tuple(chosen["slices"])
    return Plan(
        bound.mesh,
        {name: parse_layout(text) for name, text in says["layouts"].items()},
        options=replace(bound.options, **chosen),
        fixed=bound.fixed,
        batch_replicated=says["batch_replicated"],
        batch_dims=says["batch_dims"],
        context_replicated=says["context_replicated"],
        whole=frozenset(says["whole"]),
        cuts_samples=says["cuts_samples"],
        slice_lengths=tuple(says["slice_lengths"]),
        patterns=says["patterns"],
        frozen=frozenset(says["frozen"]),
        rules=CUSTOM_OPS.rows(),
    )


def _constant(where: Any, guards: Guards, own: Tensors) -> torch.Tensor:
    if isinstance(where, str):
        return own[where]
    if isinstance(where, list):
        name, place, number = where
        value = guards.index[name, place, number].value
        if not isinstance(value, torch.Tensor):
            raise ArtifactError(f"'{name}' is no tensor.")
        return value
    dtype, data = DTYPES[where["dtype"]], base64.b64decode(where["data"], validate=True)
    if not data:  # torch views no empty memory in another dtype
        return torch.empty(where["shape"], dtype=dtype, device="cpu")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype).reshape(where["shape"])


def _form(says: Any) -> Form:
    if isinstance(says, bool):
        return Leaf(says)
    if isinstance(says, int):
        return SeenAgain(says)
    kind, keys, children = says
    named = None if keys is None else DictKeys(tuple(map(_leaf, keys)), "what was returned")
    return Node(_KINDS[kind], tuple(map(_form, children)), named)


def _left(says: Any) -> Any:
    if isinstance(says, list):
        return _KINDS[says[0]](map(_left, says[1:]))
    if "shape" in says:
        return torch.empty(says["shape"], dtype=DTYPES[says["dtype"]], device="meta")
    return says["plain"] if says else Unshown()


def _shown_form(says: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape, strides, start = says
    return tuple(shape), tuple(strides), start


def _leaf(says: Any) -> Any:
    if isinstance(says, dict) and "shown" in says:
        kind, name, lies, form = says["shown"]
        return Shown(kind, name, _shown_form(lies), None if form is None else _shown_form(form))
    if isinstance(says, dict):
        return ReturnedLeaf(says["leaf"]) if "leaf" in says else float.fromhex(says["float"])
    return says
