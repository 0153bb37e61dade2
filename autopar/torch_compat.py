"""Every private torch name that autopar uses, each with its reason (those for speed alone are in `torch_shortcuts.py`,
those by which a parameter becomes another one in place in `torch_identity.py`), and the
versions of torch that they were tried with.

- `torch._subclasses.FakeTensorMode`: shapes without memory during the capture. The public way to get one
  (`make_fx(tracing_mode="fake")`) needs real tensors as its inputs, which a 70B model has not.
- `torch._decomp.get_decompositions`: torch's own spelling of an op in others; export and Inductor take it from there.
- `torch.utils._pytree`: flattening of nested batches and outputs; transformers registers its outputs here, and
  the public successor does not know them.
- `torch.distributed.tensor.placement_types._StridedShard`: the placement of a fused weight whose every block is
  split (`[3:tp,-]`); DTensor has no public one.
- `DTensor._local_tensor`, `DTensor._spec` and its constructor: `to_local` and `from_local` go through autograd and cost
  200 us each; a step needs one of each for every parameter. From 2.13 on a subclass of DTensor may have its own
  `__torch_dispatch__`; before, DTensor took the ops of its subclasses itself, and a dispatch mode must come first.
- `_StridedShard._local_shard_size_and_offset`: where torch asks for the one block that a rank holds, of which a fused
  weight has several.
- `_foreach_supported_types`, of `torch.optim.optimizer` and `torch.utils._foreach_utils`: the classes of which
  optimizers and gradient clipping take lists by default. DTensor enters itself there; a subclass must as well.
- `DeviceMesh(_init_backend=False)`: the mesh of a pipeline stage of other ranks. This rank needs its name, not its
  groups, which would be as many again for every stage.
- `torch.distributed.distributed_c10d._coalescing_manager`: several collectives by one launch of NCCL.
- `DeviceMesh._pg_registry`, from torch 2.13 on: the groups that a mesh keeps after they were destroyed, with their
  threads; and the defaults of the functions of `torch.distributed.nn`, which keep the default group of their import.
- `torch.distributed.distributed_c10d._get_default_store`: where a rank leaves word for those that wait for it in a
  collective, as it fails or ends.
- `torch.distributed.distributed_c10d._set_pg_timeout`: how long the default group waits once all ranks have met in it,
  which they do minutes apart; its public timeout bounds the meeting too. Of any group: once steps were measured. From
  torch 2.15 on it is public: `set_timeout`.
- `torch._foreach_norm`: the norms of many tensors by a few kernels, as gradient clipping computes them; the public
  `torch.nn.utils.get_total_norm` gives only the norm of all.
- `_torchdynamo_orig_callable`: what `torch.compile` asks of a module first, which is the place to say that a parallel
  one is compiled already.
- `torch._C.DisableTorchFunctionSubclass`: the way to torch's own method from a class's own `__torch_function__`.
- `torch._C.DisableTorchFunction`: the way past torch function modes as well, which would see what `verify` draws.
- `torch._C._DisableTorchDispatch`: the way to the shape that a tensor subclass itself says, which ops in place change.
- `torch._C._len_torch_function_stack`, `torch._C._get_function_stack_at`: whether a function mode sees what runs, or
  that is a call of its own, and whose it is.
- `torch._C._len_torch_dispatch_stack`, `torch._C._autograd._top_saved_tensors_default_hooks`: whether the user turned a
  dispatch mode on, or hooks on what autograd saves: both run code of the user's inside of torch's functions.
- the logger `torch._subclasses.fake_tensor`: it writes a traceback of torch's own for every op whose shapes do not fit,
  which is the user's mistake and told in one message.
- `Tensor._is_param`: by which torch takes a tensor that is no `nn.Parameter` for one in `isinstance`, as one of a
  subclass. What stands for a parameter while a model is captured is asked that by a penalty, and by `get_parameter`.
- `torch._C._functorch.peek_interpreter_stack`, `torch.autograd.forward_ad._current_level`: whether `torch.func` or
  `torch.vmap` runs, or forward-mode AD, which our autograd functions cannot pass.
- `torch.utils._python_dispatch._disable_current_modes`: the way to data, of what hangs on no input while
  a step is captured.
- `torch._C._current_graph_task_id`, `Variable._execution_engine.queue_callback`: which backward pass runs, and what is
  to happen at its end, where the gradients of all losses in it are there.
- `torch._C._swap_tensor_impl`: what a capture leaves with the user is given its data where it is held.
- `UntypedStorage._cdata`: whether two tensors of a capture share memory, which has no address there.
- `Tensor._backward_hooks`, `_post_accumulate_grad_hooks`: whether the user hooked something to a gradient, and the
  way to keep it where a parameter takes another layout.
- `torch.nn.modules.module._global_forward_hooks` and the like: whether hooks for all modules came or went.
- `torch.autograd.graph._engine_run_backward`, `torch.autograd._make_grads`, `_tensor_or_tensors_to_tuple`:
  `torch.autograd.grad` is itself a torch function, so that a mode is off while it runs, and what
  `torch.utils.checkpoint` computes again in the backward pass would not be raised.
- `BackwardCFunction._forward_cls`: the custom autograd function that a node of the autograd graph belongs to.
- `torch._C._dispatch_get_all_op_names`: the names of all ops; an error says which are near one that is not there.
- `torch._ops.OpOverload`: the type of the targets of a traced graph; it has no public name.
- `OpOverload._schema`: what an op writes and what its results show; torch itself reads it there, and has no other way.
- `torch._C.DispatchKey.CompositeImplicitAutograd`: whether torch puts an op together from others.
- `OpOverload._op_dk`, `torch._C.DispatchKey.CompositeExplicitAutograd`: the kernel of an op on lists (`_foreach_*`)
  that calls the op of one tensor for each; `OpOverload.decompose` runs only the implicit ones.
- `torch._assert_async`: a check that the device makes, which nobody waits for; no public function does.
- `torch._pack_padded_sequence`, `_pad_packed_sequence`: what the functions of `torch.nn.utils.rnn` call; they alone are
  seen by a torch function mode.
- `torch._grouped_mm`: what the public `F.grouped_mm` calls; it alone is seen by a torch function mode.
- `torch._inductor.compile_fx.compile_fx`, `compile_fx_inner`: Inductor on a graph that is traced already.
  `torch.compile` would trace it again and guard every step; `inner_compile` is the way to the code that it wrote.
- `torch._functorch.config`: its `enable_autograd_cache` is off meanwhile, for a hit there never comes to
  `inner_compile`; Inductor's own cache on disk holds the code too, and stays on.
- `__wrapped__`, `_boxed_call` of what `compile_fx` returns: the function of a list within, which frees its inputs.
- `torch._dynamo.source.ConstantSource`, `ShapeEnv.create_symbol` and its like: a number that a trace does not know (the
  micro-batch); `torch.export.Dim` names sizes of tensors alone.
- `torch._inductor.cpp_builder.get_cpp_compiler`: the C++ compiler that Inductor will call, asked for before it fails.
- `torch.fx._symbolic_trace._is_fx_tracing_flag`, from torch 2.14 on `_is_fx_tracing_context`: what torch.fx sets while
  it traces; what `torch.compile` made refuses
  to run then, and would compile itself otherwise.
- `torch.ops._c10d_functional`: collectives that Inductor knows (in `runtime/compilers/functional.py`); the public
  functions of `torch.distributed._functional_collectives` are as private, and wrap their results in a tensor class.
- `torch.ops.aten._scaled_dot_product_flash_attention_for_cpu`, `_scaled_dot_product_flash_attention` and
  `_scaled_dot_product_efficient_attention`: attention that returns its logsumexp, which the public function hides (in
  `runtime/attention/attention_fused.py`).
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _make_grads, _tensor_or_tensors_to_tuple, forward_ad
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroup, Store, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx import _symbolic_trace
from torch.nn.modules import module as _modules
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.optimizer import _foreach_supported_types as _optim_lists
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _foreach_supported_types as _util_lists
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = [
    "ASKED_TO_COMPILE",
    "GROUPED_MM",
    "PACK_PADDED",
    "PAD_PACKED",
    "SUBCLASSED_DTENSORS",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "StridedShard",
    "TorchDispatchMode",
    "TreeSpec",
    "assert_async",
    "backward",
    "backward_in_mode",
    "before_steps",
    "change_in_place",
    "coalesced",
    "compile_with_inductor",
    "custom_function",
    "decompositions_of",
    "default_store",
    "dispatch_modes",
    "end_waits_after",
    "fill_in",
    "foreach_norm",
    "forget_groups",
    "function_mode",
    "function_modes",
    "fx_tracing",
    "global_module_hooks",
    "gradients",
    "gradients_in_mode",
    "has_cpp_compiler",
    "has_hooks",
    "holds_for",
    "hooks_of",
    "in_transform",
    "is_composite",
    "is_of_lists",
    "local_of",
    "maker_of",
    "mesh_elsewhere",
    "no_function_modes",
    "no_torch_function",
    "on_data",
    "one_by_one",
    "op_names",
    "quiet",
    "saved_tensor_hooks",
    "schema_of",
    "spec_of",
    "storage_of",
    "symbolic_number",
    "take_in_lists",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_map",
    "tree_unflatten",
    "with_spec",
]

GROUPED_MM: Callable[..., torch.Tensor] = torch._grouped_mm
PACK_PADDED: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._pack_padded_sequence
PAD_PACKED: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._pad_packed_sequence
ASKED_TO_COMPILE = "_torchdynamo_orig_callable"
# Of a tensor of one bool, with a message. A GPU asserts it when its stream comes there; the CPU raises at once.
assert_async: Callable[[torch.Tensor, str], None] = torch._assert_async
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
SUBCLASSED_DTENSORS = _VERSION >= (2, 13)
TRIED = ((2, 11), (2, 15))  # the oldest and the newest that autopar was tried with
TRIED_TEXT = " to ".join(f"{major}.{minor}" for major, minor in TRIED)
if TRIED[-1] < _VERSION:
    warnings.warn(
        f"torch {torch.__version__} is newer than those that autopar was tried with, {TRIED_TEXT}: it may lack a "
        f"private name that autopar uses (autopar/torch_compat.py lists them).",
        stacklevel=2,
    )


def decompositions_of(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own spelling of each overload of some ops in other ops."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(ops))


# The local part of a DTensor, the very memory. (An attrgetter: a function of ours would cost more than the look-up.)
local_of: Callable[[Any], torch.Tensor] = attrgetter("_local_tensor")
no_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
no_function_modes: Callable[[], Any] = torch._C.DisableTorchFunction
# The mesh, placements, global shape and dtype of a DTensor.
spec_of: Callable[[Any], Any] = attrgetter("_spec")


def with_spec(kind: type[Any], local: torch.Tensor, spec: Any, requires_grad: bool = False) -> Any:
    """A DTensor of a class around `local`. (`__init__` does nothing, but for 10 us.)"""
    make: Callable[..., Any] = kind.__new__
    return make(kind, local, spec, requires_grad=requires_grad)


def maker_of(kind: type[Any]) -> Callable[[torch.Tensor, Any], Any]:
    """Make what `with_spec` makes, for one class and many tensors that require no gradient."""
    return partial(kind.__new__, kind, requires_grad=False)


def change_in_place(tensor: Any, change: Callable[[Any], Any], part: torch.Tensor, spec: Any) -> None:
    """Let a DTensor hold another local part, of another shape; `change` gives the tensor itself that shape."""
    with torch._C._DisableTorchDispatch():
        change(tensor)
    tensor._local_tensor, tensor._spec = part, spec


def take_in_lists(kind: Any) -> None:
    """Let optimizers and gradient clipping work on lists of these tensors by default, where they do of others."""
    for kinds in (_optim_lists, _util_lists):
        if kind not in kinds:
            kinds.append(kind)


def default_store() -> Store:
    """The store in which the ranks of the default group met. Raises ValueError where there is no such group."""
    return distributed_c10d._get_default_store()


def end_waits_after(timeout: timedelta, group: ProcessGroup | None = None) -> None:
    """Bound how long a rank waits for another one in a group, or the default one, from now on."""
    (getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout, group)


def forget_groups(mesh: DeviceMesh | None) -> None:
    """Let go, at the end of the process, of the groups that a mesh and torch's own functions keep."""
    getattr(mesh, "_pg_registry", {}).clear()
    for function in list(vars(sys.modules.get("torch.distributed.nn.functional", _modules)).values()):
        kept = getattr(function, "__defaults__", None) or ()
        if any(isinstance(one, ProcessGroup) for one in kept):  # None is the default group, too
            function.__defaults__ = tuple(None if isinstance(one, ProcessGroup) else one for one in kept)


def mesh_elsewhere(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """A mesh without process groups: that of other ranks."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor, so that it is an instance of `nn.Parameter`, and give it back."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


def gradients(
    loss: torch.Tensor, tensors: Sequence[torch.Tensor], is_whole: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Call `torch.autograd.grad(loss, tensors, allow_unused=True)` under the torch function modes that are on.
    is_whole: by `loss.backward()`, which goes through all of the graph."""
    if is_whole:
        backward(loss)
        return tuple(tensor.grad for tensor in tensors)
    return _run_backward(loss, tuple(tensors)) if tensors else ()


def backward(loss: torch.Tensor) -> None:
    """Call `loss.backward()` under the torch function modes that are on."""
    _run_backward(loss, None)


@contextmanager
def _in_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Turn a torch function mode on again in its own `__torch_function__`."""
    TorchFunctionMode.__enter__(mode)
    try:
        yield
    finally:
        TorchFunctionMode.__exit__(mode, None, None, None)


def backward_in_mode(
    mode: TorchFunctionMode, outputs: Any, gradient: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, inputs: Any = None, grad_tensors: Any = None,
) -> None:  # fmt: skip
    """Call `torch.autograd.backward`, as a reentrant checkpoint does, or `Tensor.backward` under a mode that met this
    call and is off for it."""
    tensors, ends = (tuple(x) if isinstance(x, (tuple, list)) else (x,) for x in (outputs, inputs))
    grads = _tensor_or_tensors_to_tuple(gradient if grad_tensors is None else grad_tensors, len(tensors))
    given = _make_grads(tensors, grads, is_grads_batched=False)
    keep, ends = create_graph if retain_graph is None else retain_graph, () if inputs is None else ends
    with _in_mode(mode):
        _engine_run_backward(tensors, given, keep, create_graph, ends, allow_unreachable=True, accumulate_grad=True)


def gradients_in_mode(
    mode: TorchFunctionMode, outputs: tuple[Any, ...], inputs: tuple[Any, ...], **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """Call `torch.autograd.grad` under a torch function mode that met this call, and is off for it. options: all that
    are its. Many gradients at once are taken one by one."""
    is_many, has_graph = options["is_grads_batched"], options["create_graph"]
    given: Any = _make_grads(outputs, _tensor_or_tensors_to_tuple(options["grad_outputs"], len(outputs)), is_many)
    rows = list(zip(*(g.unbind() for g in given), strict=True)) if is_many else [given]
    keep = has_graph if options["retain_graph"] is None else options["retain_graph"]
    with _in_mode(mode):
        each = [
            _engine_run_backward(
                outputs, row, keep or at < len(rows), has_graph, inputs, options["allow_unused"], accumulate_grad=False
            )
            for at, row in enumerate(rows, 1)
        ]
    found = list[torch.Tensor | None]()
    for x, one in zip(inputs, zip(*each, strict=True), strict=True):
        made = torch.stack(one) if is_many and one[0] is not None else one[0]
        is_zero = made is None and options["materialize_grads"]
        found.append(torch.zeros_like(x, requires_grad=has_graph) if is_zero else made)
    return tuple(found)


def _run_backward(loss: torch.Tensor, tensors: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor | None, ...]:
    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, tensors or (),
        allow_unreachable=True, accumulate_grad=tensors is None,
    )  # fmt: skip
    return found


def unscale_and_check(gradients: Sequence[torch.Tensor], overflow: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply gradients by `factor`, in place; `overflow` becomes 1 if any was not finite. What GradScaler calls: one
    pass over the memory, where public functions take three."""
    parts = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]  # the kernel takes floats
    if parts:
        torch._amp_foreach_non_finite_check_and_unscale_(parts, overflow, factor)


def coalesced(group: ProcessGroup) -> AbstractContextManager[Any]:
    """Launch the collectives of one kind that are asked of a group inside at once, at the end. It gives what waits for
    them: their own works do not."""
    made: AbstractContextManager[Any] = _coalescing_manager(group, async_ops=True)
    return made


def foreach_norm(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The norm of each of some tensors of one dtype and device."""
    return tuple(torch._foreach_norm(list(tensors), order, dtype=dtype))


@contextmanager
def fx_tracing() -> Iterator[None]:
    """Say that torch.fx traces."""
    of_thread = getattr(_symbolic_trace, "_is_fx_tracing_context", None)  # from torch 2.14 on
    if of_thread is not None:
        with of_thread(True):
            yield
        return
    before = _symbolic_trace._is_fx_tracing_flag
    _symbolic_trace._is_fx_tracing_flag = True
    try:
        yield
    finally:
        _symbolic_trace._is_fx_tracing_flag = before


def op_names() -> list[str]:
    """The names of all ops that are registered with torch, as `namespace::name`."""
    return [str(name) for name in torch._C._dispatch_get_all_op_names()]


def schema_of(target: OpOverload) -> torch.FunctionSchema:
    """The schema of an op."""
    return target._schema


def is_composite(target: OpOverload) -> bool:
    """True for an op that is put together from other ops of torch, on every device."""
    keys = torch._C.DispatchKey
    has = target.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not has(keys.CPU)


def is_of_lists(target: OpOverload) -> bool:
    """True for an op that computes another one for each tensor of a list (`_foreach_*`)."""
    return target.name().startswith("aten::_foreach_")


def one_by_one(target: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What an op on lists gives, by calls of the op on one tensor. Inside of a dispatch mode torch forgets to count a
    write to a list, and a view of the list would keep the gradient of before it."""
    result = target._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    if target._schema.is_mutable:
        torch.autograd.graph.increment_version(args[0])
    return result


def custom_function(node: Any) -> type[torch.autograd.Function] | None:
    """The custom autograd function of a node of the autograd graph; None for one of torch's own ops."""
    return getattr(type(node), "_forward_cls", None)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from writing its own tracebacks of shapes that do not fit, and from looking for nan where nothing has
    data. What the model asks for stays: anomaly detection is on if it was."""
    mode, check_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True  # another level would be told to every logger there is
    try:
        with torch.autograd.set_detect_anomaly(mode, check_nan and not mode):
            yield
    finally:
        logger.disabled = before


@contextmanager
def on_data() -> Iterator[None]:
    """Compute on tensors with data while a capture runs, which sees nothing of it."""
    with _disable_current_modes(), torch.no_grad():
        yield


def storage_of(tensor: torch.Tensor) -> int | None:
    """The same number for tensors that share memory, as long as one of them lives; None for those without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


def in_transform() -> bool:
    """True inside of a function that `torch.func` or `torch.vmap` transforms, or that forward-mode AD follows."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# How many dispatch modes are on.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


# How many function modes are on, and each of them.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
function_mode: Callable[[int], object] = torch._C._get_function_stack_at


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Get the functions that take and give back what autograd saves; None where it saves itself."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


# The tables of what the user hooked to the gradient of a parameter; empty or None where there is nothing.
hooks_of: Callable[[torch.Tensor], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def has_hooks(tensor: torch.Tensor) -> bool:
    """True if the user hooked something to the gradient of a parameter."""
    return any(hooks_of(tensor))


def global_module_hooks() -> tuple[dict[int, Any], ...]:
    """The tables of the hooks that run for every module."""
    return (
        _modules._global_forward_hooks, _modules._global_forward_pre_hooks,
        _modules._global_backward_hooks, _modules._global_backward_pre_hooks,
    )  # fmt: skip


def fill_in(tensor: torch.Tensor, other: torch.Tensor, kind: type[torch.Tensor] = torch.Tensor) -> None:
    """Let a tensor without data be what `other` is, of the class `kind`, for all who hold it."""
    tensor.__class__ = kind
    torch._C._swap_tensor_impl(tensor, other)
    vars(tensor).clear()


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor | torch.SymInt]
) -> tuple[Callable[[list[Any]], Any], str]:
    """A graph of aten ops as a function of a list of values like `inputs`, which it empties, so that each is freed
    after its last use; and the code that Inductor wrote for it."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # 1 s of imports, for those who want it

    written: list[str] = []

    def compile_inner(*args: Any, **kwargs: Any) -> Any:
        made = compile_fx_inner(*args, **kwargs)
        written.append(getattr(made, "source_code", ""))
        return made

    ours = {"reorder_for_peak_memory": False}  # the order is the passes': Inductor's would wait for buckets at once
    with config.patch(enable_autograd_cache=False):
        function: Any = compile_fx(graph, inputs, inner_compile=compile_inner, config_patches=ours)
    return _of_list(function), "\n".join(written)


def _of_list(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """What `compile_fx` returns keeps its arguments alive to its end; within is a function of a list."""
    inner = function
    while inner.__qualname__.endswith("aot_module_simplified.<locals>.forward"):
        inner = inner.__wrapped__  # type: ignore[attr-defined]
    return inner if getattr(inner, "_boxed_call", False) else lambda values: function(*values)


def symbolic_number(env: ShapeEnv, name: str, count: int) -> torch.SymInt:
    """A number from 0 to `count` - 1 that a trace does not know. `count` is 2 or more."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_symbol(count - 1, source, DimDynamic.DYNAMIC, None, None, do_not_specialize_zero_one=True)
    env.constrain_symbol_range(symbol, 0, count - 1)
    return cast(torch.SymInt, env.create_symintnode(symbol, hint=count - 1, source=source))


def holds_for(env: ShapeEnv, number: torch.SymInt, value: int) -> bool:
    """Whether all that a trace took for granted of a number is true of this value of it."""
    return all(guard.expr.subs(number.node.expr, value) for guard in env.guards)


def has_cpp_compiler() -> bool:
    """Whether Inductor finds a C++ compiler here."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Step without hooks, and unseen by a scheduler: an optimizer's class has its step in a wrapper that calls them."""
    step = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


class _WhileAlive:
    """A function that is called as long as it is not forgotten."""

    def __init__(self, function: Callable[[Optimizer], None]) -> None:
        self._function: Callable[[Optimizer], None] | None = function

    def __call__(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._function is not None:
            self._function(optimizer)

    def forget(self) -> None:
        self._function = None


def before_steps(owner: object, function: Callable[[Optimizer], None]) -> None:
    """Call a function before the steps of all optimizers, as long as `owner` lives. What is registered stays behind,
    empty: where the garbage collector finds an owner in the middle of a step, torch goes through these very functions,
    and would end with "OrderedDict mutated during iteration" if one was taken out."""
    hook = _WhileAlive(function)
    register_optimizer_step_pre_hook(hook)
    weakref.finalize(owner, hook.forget)


def hook_behind_step(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    """Register the first of an optimizer's hooks behind its step; torch registers the last only."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict, whatever its annotation says
    hooks.move_to_end(handle.id, last=False)
    return handle


def current_pass() -> int | None:
    """The number of the backward pass that runs; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def is_in_pass(node: Any) -> bool:
    """Whether the backward pass that runs goes through a node of the graph, which is no leaf."""
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs, unless that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
