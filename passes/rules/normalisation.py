"""Norms: the dims that a statistic runs over are replicated; gradients of weights are partial over the others."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import argument, named, replace_dim, replicated_rule
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Arguments, Call, Pieces, Row, Rule


def _present(call: Call, specs: Mapping[int, str]) -> str:
    """The specs of those arguments (by position) that are tensors, not None."""
    return ", ".join(spec for at, spec in specs.items() if argument(call, at, "") is not None)


def _masked(specs: tuple[str, ...], mask: tuple[bool, ...]) -> str:
    """The specs of the results that are asked for; the others are None."""
    return ", ".join(spec for spec, wanted in zip(specs, mask, strict=True) if wanted)


def _names(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


def _layer_norm(call: Call) -> Rule:
    count = len(argument(call, 1, "normalized_shape"))
    norm, ones = _names("h", count), " ".join(["1"] * count)
    operands = _present(call, {0: f"... {norm}", 2: norm, 3: norm})
    spec = f"{operands} -> ... {norm}, ... {ones}, ... {ones}"
    return instantiate(spec, call, replicated=norm.split())


def _layer_norm_backward(call: Call) -> Rule:
    count = len(argument(call, 2, "normalized_shape"))
    norm, ones = _names("h", count), " ".join(["1"] * count)
    full, stat = f"... {norm}", f"... {ones}"
    operands = _present(call, {0: full, 1: full, 3: stat, 4: stat, 5: norm, 6: norm})
    results = _masked((full, norm, norm), argument(call, 7, "output_mask"))
    return instantiate(f"{operands} -> {results}", call, replicated=norm.split(), linear=({0},))


def _rms_norm(call: Call) -> Rule:
    count = len(argument(call, 1, "normalized_shape"))
    norm, ones = _names("h", count), " ".join(["1"] * count)
    operands = _present(call, {0: f"... {norm}", 2: norm})
    return instantiate(f"{operands} -> ... {norm}, ... {ones}", call, replicated=norm.split())


def _rms_norm_backward(call: Call) -> Rule:
    count = len(argument(call, 2, "normalized_shape"))
    norm, ones = _names("h", count), " ".join(["1"] * count)
    full = f"... {norm}"
    operands = _present(call, {0: full, 1: full, 3: f"... {ones}", 4: norm})
    results = _masked((full, norm), argument(call, 5, "output_mask"))
    return instantiate(f"{operands} -> {results}", call, replicated=norm.split(), linear=({0},))


def _row_norm(call: Call) -> Rule:
    norm, ones = _row_names(call.operands[1].shape)
    return instantiate(f"... {norm}, {norm} -> ... {norm}, ... {ones}", call, replicated=norm.split())


def _row_norm_backward(call: Call) -> Rule:
    norm, ones = _row_names(call.operands[2].shape)
    full = f"... {norm}"
    spec = f"{full}, {full}, {norm}, ... {ones} -> {full}, {norm}"
    return instantiate(spec, call, replicated=norm.split(), linear=({0},))


def _row_names(shape: tuple[int, ...]) -> tuple[str, str]:
    """The dims of a weight, and as many ones."""
    return _names("h", len(shape)), " ".join("1" for _ in shape)


def _group_norm(call: Call) -> Rule:
    operands = _present(call, {0: "n (g i) ...", 1: "(g i)", 2: "(g i)"})
    spec = f"{operands} -> n (g i) ..., n g, n g"
    return instantiate(spec, call, replicated={"i", "..."}, sizes={"g": call.args[6]})


def _group_norm_backward(call: Call) -> Rule:
    full = "n (g i) ..."
    operands = _present(call, {0: full, 1: full, 2: "n g", 3: "n g", 4: "(g i)"})
    results = _masked((full, "(g i)", "(g i)"), call.args[9])
    spec = f"{operands} -> {results}"
    return instantiate(spec, call, replicated={"i", "..."}, sizes={"g": call.args[8]}, linear=({0},))


def _group_norm_local(at: int) -> Row:
    """N, C, HxW and the number of groups are arguments, from position `at`."""

    def local(pieces: Pieces) -> Arguments:
        args, sizes = pieces.call.args, pieces.sizes
        numbers = (sizes["n"], sizes["g"] * sizes["i"], args[at + 2], sizes["g"])
        return (*args[:at], *numbers, *args[at + 4 :]), dict(pieces.call.kwargs)

    return Row(_group_norm if at == 3 else _group_norm_backward, local=local)


def _batch_norm_results(call: Call, count: int) -> str:
    """The dims of the results behind the first: a statistic of each channel, or empty."""
    channels = call.operands[0].shape[1]
    return ", ".join("c" if result.shape == (channels,) else "e" for result in call.results[1 : 1 + count])


def _batch_norm(call: Call) -> Rule:
    """New running statistics do not depend on n in evaluation, yet have no n: it is replicated even then."""
    statistics = ", ".join("c" for _ in call.operands[1:])
    spec = f"n c ..., {statistics} -> n c ..., {_batch_norm_results(call, 4)}"
    if not statistics:
        spec = f"n c ... -> n c ..., {_batch_norm_results(call, 4)}"
    return instantiate(spec, call, replicated={"n", "e", "..."})


def _batch_norm_evaluation(call: Call) -> Rule:
    """No statistic is taken; the saved ones are empty (or, on some devices, those it was given)."""
    statistics = ", ".join("c" for _ in call.operands[1:])
    saved = _batch_norm_results(call, 2)
    replicated = {"n", "..."} if "c" in saved else set()
    return instantiate(f"n c ..., {statistics} -> n c ..., {saved}", call, replicated={"e", *replicated})


def _batch_norm_backward(call: Call) -> Rule:
    full, shapes = "n c ...", iter(call.operands[2:])
    given = [at for at in range(2, 7) if call.args[at] is not None]
    saved = {at: "e" if next(shapes).shape == (0,) else "c" for at in given}
    operands = _present(call, {0: full, 1: full, **saved})
    results = _masked((full, "c", "c"), call.args[9])
    replicated = {"e", "n", "..."} if call.args[7] else {"e"}
    return instantiate(f"{operands} -> {results}", call, replicated=replicated, linear=({0},))


def _weight_norm(call: Call) -> Rule:
    """g has size 1 but along the kept dim, whose names alone may be split."""
    dims = named(call.operands[0].shape)
    small = next(i for i in range(len(call.operands)) if call.operands[i].shape != call.operands[0].shape)
    shape = call.operands[small].shape
    kept = [at for at, size in enumerate(shape) if size != 1]
    if len(kept) != 1 or len(shape) != len(dims):
        return replicated_rule(call)
    norm = replace_dim(((),) * len(dims), kept[0], dims[kept[0]])
    tensors = [dims if t.shape == call.operands[0].shape else norm for t in (*call.operands, *call.results)]
    count = len(call.operands)
    sizes = {dim[0]: size for dim, size in zip(dims, call.operands[0].shape, strict=True) if dim}
    return Rule(
        tuple(tensors[:count]),
        tuple(tensors[count:]),
        sizes,
        frozenset(sizes) - frozenset(dims[kept[0]]),
        linear=(frozenset({0}),) if count == 4 else (),
    )


ROWS: Mapping[str, Row] = {
    "aten.native_layer_norm.default": Row(_layer_norm),
    "aten.native_layer_norm_backward.default": Row(_layer_norm_backward),
    "aten._fused_rms_norm.default": Row(_rms_norm),
    "aten._fused_rms_norm_backward.default": Row(_rms_norm_backward),
    "autopar.rms_norm.default": Row(_row_norm),
    "autopar.rms_norm_backward.default": Row(_row_norm_backward),
    "autopar.running_average.default": Row(replicated_rule),
    "aten.native_group_norm.default": _group_norm_local(3),
    "aten.native_group_norm_backward.default": _group_norm_local(5),
    "aten._native_batch_norm_legit_functional.default": Row(_batch_norm),
    "aten.native_batch_norm.default": Row(_batch_norm),
    "aten._native_batch_norm_legit_no_training.default": Row(_batch_norm_evaluation),
    "aten.native_batch_norm_backward.default": Row(_batch_norm_backward),
    "aten._weight_norm_interface.default": Row(_weight_norm),
    "aten._weight_norm_interface_backward.default": Row(_weight_norm),
}
