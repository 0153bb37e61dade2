"""ARCHITECTURE.md says what is so: the programs that it prints, and who imports whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch import nn

import autopar
from autopar import torch_compat
from autopar.ir.ops.collective_ops import COLLECTIVES
from autopar.ir.ops.ops import SEMANTIC
from autopar.ir.text.text import print_program

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
# From the top down: a room imports only what stands behind it.
ROOMS = (
    "__init__", "__main__", "cli", "integrations", "api", "ema", "verification", "checkpoint", "parallel", "compiled",
    "report", "planning", "job", "compiler", "custom_ops", "capture", "passes", "runtime", "ir", "machines", "settings",
    "text_files", "errors", "torch_shortcuts", "torch_identity", "torch_compat",
)  # fmt: skip
MOST_LINES = 600  # of a file
MOST_FILES = 15  # of a folder, beside `__init__.py`
FUNCTION = 60  # lines
LINES_ALONE = 30  # without a comment
LONGER = {  # one loop with cases, or a table in code: cut apart they would be harder to read
    "build_classes", "sums_by_stage", "instantiate", "search", "_spread", "times_of", "__torch_function__",
    "make_pipeline",
}  # fmt: skip
A_ROW_A_FILE = {"autopar.passes.rules", "autopar.runtime.kernels"}  # folders that are tables


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def test_the_programs_are_those_that_the_compiler_prints() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    compiled = autopar.compile(model, "dp=2,tp=2", loss_fn=loss_fn, batch=(torch.empty(12, 8), torch.empty(12, 4)))
    history = dict(compiled.history)
    blocks = re.findall(r"```text\n(.*?)```", TEXT, re.S)
    passes = ["capture", "propagate", "reshard", "partition", "bucket"]
    assert len(blocks) == len(passes)
    for name, block in zip(passes, blocks, strict=True):
        printed = {line.split("   #")[0].rstrip() for line in print_program(history[name]).splitlines()}
        assert [line for line in block.splitlines() if line not in printed] == [], name


# -- who imports whom -----------------------------------------------------------------------------------------------


@cache
def sources() -> dict[str, Path]:
    """The files of the package by their modules' names."""
    found = {}
    for top in ("autopar", "passes", "runtime"):
        for path in (ROOT / top).rglob("*.py"):
            words = list(path.relative_to(ROOT).with_suffix("").parts)
            words = words if top == "autopar" else ["autopar", *words]
            found[".".join(words[:-1] if words[-1] == "__init__" and len(words) > 2 else words)] = path
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """A node of a file's tree. lines: of the file."""

    module: str
    path: Path
    lines: list[str]
    node: Any

    def __str__(self) -> str:
        return f"{self.module}:{self.node.lineno}"


Look = Callable[[Seen], Iterator[Any]]


@cache
def found() -> dict[str, list[Any]]:
    """What each of `LOOKS` finds in all files, by its name: they are parsed and walked through once, which takes
    seconds."""
    results: dict[str, list[Any]] = {look.__name__: [] for looks in LOOKS.values() for look in looks}
    for name, path in sources().items():
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            for look in LOOKS.get(type(node), ()):
                results[look.__name__] += look(Seen(name, path, lines, node))
    return results


def imported(seen: Seen) -> Iterator[tuple[str, str]]:
    """The names that a file imports from modules of ours, with these modules."""
    if (seen.node.module or "").startswith("autopar"):
        for alias in seen.node.names:
            inner = f"{seen.node.module}.{alias.name}"
            yield seen.module, inner if inner in sources() else seen.node.module


@cache
def imports() -> nx.DiGraph:
    """An arrow from each file to those that it imports, at its top or in a function."""
    graph = nx.DiGraph(found()["imported"])
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def folder(module: str) -> str:
    """The folder of a file; the files of autopar/ itself stand for themselves, as in `ROOMS`."""
    path = sources()[module]
    parent = ".".join(path.parent.relative_to(ROOT).parts)
    return module if parent == "autopar" else parent


@cache
def folders() -> dict[str, list[str]]:
    """The files of each folder, without its `__init__.py`."""
    found: dict[str, list[str]] = {}
    for name, path in sources().items():
        found.setdefault(folder(name), [])
        found[folder(name)] += [path.stem] if path.stem != "__init__" else []
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


# What a user's module may have replaced, or hide behind a submodule; `capture/inputs/tables.py` asks its tables
# instead.
ASKED = {
    "named_parameters", "named_modules", "named_buffers", "named_children", "get_submodule", "get_parameter",
    "get_buffer", "modules", "children", "buffers",
}  # fmt: skip


def asks_a_module(seen: Seen) -> Iterator[str]:
    function = seen.node.func
    is_asked = isinstance(function, ast.Attribute) and function.attr in ASKED
    if is_asked and not (isinstance(function.value, ast.Name) and function.value.id == "tables"):
        yield str(seen)


def test_no_file_asks_a_module_for_what_it_holds() -> None:
    assert found()["asks_a_module"] == []


_MAKERS = {
    "arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def makes_on_any_device(seen: Seen) -> Iterator[str]:
    function = seen.node.func
    is_maker = isinstance(function, ast.Attribute) and function.attr in _MAKERS
    is_told = {keyword.arg for keyword in seen.node.keywords} & {"device", None}
    if is_maker and not is_told and ast.unparse(function.value) == "torch":
        yield f"{seen} {ast.unparse(seen.node)}"


def test_what_is_made_says_on_which_device() -> None:
    """A script may have a default device (`torch.set_default_device`), which is meant for its model alone."""
    assert found()["makes_on_any_device"] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert [sorted(files) for files in nx.strongly_connected_components(imports()) if len(files) > 1] == []


def test_a_room_imports_only_what_stands_below_it() -> None:
    level = {name: i for i, name in enumerate(ROOMS)}
    arrows = {(room(a), room(b), f"{a} -> {b}") for a, b in imports().edges}
    assert {name for a, b, _ in arrows for name in (a, b)} <= set(ROOMS)
    assert sorted(text for a, b, text in arrows if level[a] > level[b]) == []
    assert ("passes", "runtime") not in {(a, b) for a, b, _ in arrows}


def test_no_file_is_long() -> None:
    files = [*sources().values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def is_long(seen: Seen) -> Iterator[str]:
    lines = seen.node.end_lineno - seen.node.lineno + 1
    if lines > FUNCTION and seen.node.name not in LONGER:
        yield f"{seen} {seen.node.name}: {lines} lines"


def test_no_function_is_long() -> None:
    assert found()["is_long"] == []


# Functions of more than `ARGUMENTS` arguments: what torch's function, an op's schema or a kernel of Triton takes, the
# options of a command, and what users call.
ARGUMENTS = 8
MANY_ARGUMENTS = {
    "signatures of torch": (
        "attention", "multi_head_attention", "embedding_bag", "linear_cross_entropy", "raised", "stft", "istft",
    ),
    "schemas of ops": (
        "attention_backward", "compared_attention_backward", "convolution_input_backward",
        "convolution_weight_backward", "random", "dropout_of_rows", "forward",
    ),
    "kernels of Triton, and calls of them": ("_dropout", "_bits", "_elements", "_random", "_layer_norm_backward"),
    "options": ("inspect", "plan_", "parallelize", "verify", "register_rule", "capture", "__init__", "compile_step"),
    "a table in code": ("instantiate", "in_turns"),
}  # fmt: skip


_ALLOWED = {name for names in MANY_ARGUMENTS.values() for name in names}


def has_many_arguments(seen: Seen) -> Iterator[str]:
    arguments = seen.node.args
    given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    count = sum(one.arg not in ("self", "cls") for one in given)
    if count > ARGUMENTS and seen.node.name not in _ALLOWED:
        yield f"{seen} {seen.node.name}: {count} arguments"


def test_a_function_has_few_arguments() -> None:
    """Those of a call that many functions hand on are one object."""
    assert found()["has_many_arguments"] == []


WITHOUT_SUBJECT = re.compile(
    r"(Of|As|Those) |The same([,.:]| (with|without|as|by|for|of|on|in|to|where|while|at|from)\b)"
)


def lacks_a_subject(seen: Seen) -> Iterator[str]:
    first = (ast.get_docstring(seen.node) or "").partition("\n")[0]
    if WITHOUT_SUBJECT.match(first):
        yield f"{seen.module}: {first}"


def test_a_docstring_begins_with_what_it_speaks_of() -> None:
    """No first line begins "Of ...", "As ...", "Those ...", nor "The same with ..." (the same what?)."""
    assert found()["lacks_a_subject"] == []


def lacks_a_comment(seen: Seen) -> Iterator[str]:
    node = seen.node
    first = node.body[0].end_lineno or 0 if ast.get_docstring(node) else node.lineno
    inside = seen.lines[first : node.end_lineno]
    if len(inside) > LINES_ALONE and not any("#" in line for line in inside):
        yield f"{seen} {node.name}"


def test_a_hard_function_says_why_inside() -> None:
    """A function of more than `LINES_ALONE` lines, docstring apart, has a comment."""
    assert found()["lacks_a_comment"] == []


# -- folders --------------------------------------------------------------------------------------------------------


def test_a_folder_has_few_files() -> None:
    tables = {name.removeprefix("autopar.") for name in A_ROW_A_FILE}
    many = {name: len(files) for name, files in folders().items() if len(files) > MOST_FILES}
    assert {name: count for name, count in many.items() if name not in tables} == {}


def test_no_folders_import_each_other_in_a_circle() -> None:
    graph = nx.DiGraph((folder(a), folder(b)) for a, b in imports().edges)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    assert [sorted(names) for names in nx.strongly_connected_components(graph) if len(names) > 1] == []


def test_a_folder_says_which_question_it_answers() -> None:
    """In the first line of its `__init__.py`; and in its row of ARCHITECTURE.md, word by word."""
    rows = dict(re.findall(r"^\| `([a-z_/]+)/` \| (.*?) \|", TEXT, re.M))
    wrong = []
    for name in folders():
        path = ROOT.joinpath(*name.split("."))
        if path.is_dir() and path.name != "autopar":
            text = (ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or "").splitlines()[0]
            wrong += [] if "?" in text and rows.get("/".join(name.split("."))) == text else [f"{name}: {text}"]
    assert wrong == []
    assert set(rows) <= {"/".join(name.split(".")) for name in folders()}


def test_a_name_of_a_file_and_of_a_public_class_stands_once() -> None:
    stems = [path.stem for path in sources().values() if not path.stem.startswith("__")]
    assert sorted({stem for stem in stems if stems.count(stem) > 1}) == []
    classes = found()["public_classes"]
    assert sorted({name for name in classes if classes.count(name) > 1}) == []


def public_classes(seen: Seen) -> Iterator[str]:
    for node in seen.node.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


# -- names of ops ---------------------------------------------------------------------------------------------------

MOST_NAMES = 5  # of ops in one table or choice, outside of the rooms that are the tables
# What is true of an op, how it is split, how it is computed: of torch, of our own, in a Triton kernel.
ROOMS_OF_OPS = ("autopar/ir/ops/", "passes/rules/", "runtime/kernels/", "runtime/triton/lowering/")
ALLOWED = {
    "autopar/capture/ops/raised.py RAISED": "what a function of torch is raised to: a function each",
    "autopar/capture/ops/raised_random.py RANDOM": "how a function draws by our own generator: a function each",
    "autopar/capture/ops/decompositions.py decompositions": "what a trace takes apart, and how: a function each",
    "autopar/capture/data/data_sizes.py SIZED": "how a function computes with a number of rows: a function each",
    "autopar/capture/refusals/constructs.py SIZES": "what is said to a user of each function",
    "autopar/machines/workload.py STREAMS": "the calls that are measured on a machine",
    "autopar/parallel/tensors/quick.py take_short_way": "the methods of AdamW, for speed alone: each is right without",
    "autopar/parallel/tensors/split_reductions.py _TABLE": "how ranks join what each reduced of its part: a row each",
}
_OF_TORCH = re.compile(r"(?:_?aten|torch(?:\.\w+)*|F|_?Tensor)\.(\w+)(?:\.\w+)?$")
Names = set[str]


@cache
def op_names() -> frozenset[str]:
    """The names of torch's ops and of our own, without overload."""
    ours = (*(one.name for one in SEMANTIC), *(one.name for one in COLLECTIVES))
    return frozenset((*(name.split("::")[1].partition(".")[0] for name in torch_compat.op_names()), *ours))


def names_in(node: ast.AST) -> Names:
    """The ops and functions of torch that an expression names: as `aten.add.Tensor`, `F.relu`, "add" or "aten.add"."""
    if isinstance(node, ast.Attribute) and (found := _OF_TORCH.match(ast.unparse(node))):
        return {found[1]} if found[1] in op_names() or callable(getattr(F, found[1], None)) else set()
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = {re.split(r"[:.]", word.removeprefix("aten."))[0] for word in node.value.split()}
        named = {word for word in words & op_names() if not word.startswith("__")}
        return named if len(named) >= 0.8 * len(words) else set()  # else a sentence
    return {name for child in ast.iter_child_nodes(node) for name in names_in(child)}


def tables_in(tree: ast.AST, place: str = "") -> Iterator[tuple[str, Names]]:
    """The outermost tables, and the functions that compare with names, each with what it is assigned to."""
    for node in ast.iter_child_nodes(tree):
        own, names = place, set[str]()
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not place:
            own = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(node, ast.FunctionDef):
            own = node.name
            chosen = [one for one in ast.walk(node) if isinstance(one, (ast.Compare, ast.match_case))]
            names = {n for one in chosen for n in names_in(one.pattern if isinstance(one, ast.match_case) else one)}
        elif isinstance(node, (ast.Set, ast.Dict, ast.Tuple, ast.List, ast.Constant)):
            names = names_in(node)
        elif isinstance(node, ast.Call):
            names = {name for argument in node.args for name in names_in(argument)}
        if len(names) > MOST_NAMES:
            yield own, names
        else:
            yield from tables_in(node, own)


def tables_of_ops(seen: Seen) -> Iterator[tuple[str, list[str]]]:
    path = str(seen.path.relative_to(ROOT))
    if not path.startswith(ROOMS_OF_OPS):
        for place, names in tables_in(seen.node):
            yield f"{path} {place}", sorted(names)


def test_what_is_true_of_an_op_stands_in_the_rooms_of_ops() -> None:
    """Names of ops in a pass are a fact told again: it will miss `select`, `view_copy` or `aten.t`."""
    tables = dict(found()["tables_of_ops"])
    assert {place: names for place, names in tables.items() if place not in ALLOWED} == {}
    assert set(ALLOWED) <= set(tables) and len(ALLOWED) <= 8


def test_a_table_of_ops_is_seen() -> None:
    """However it is spelled."""
    six = ("exp", "log", "sin", "cos", "tan", "neg")
    for text in (
        f"TABLE = {set(six)}", f"TABLE = {dict.fromkeys(six)}", f"TABLE = frozenset('{' '.join(six)}'.split())",
        f"TABLE = ({', '.join(f'aten.{name}.default' for name in six)})",
        f"TABLE = [{', '.join(f'torch.nn.functional.{name}' for name in six)}]",
        f"TABLE = {{{', '.join(f'torch.{name}: 1' for name in six)}}}", f"TABLE = every({str(list(six))[1:-1]})",
        "def TABLE(x):\n" + "".join(f"    if x == '{name}': return 1\n" for name in six),
        "def TABLE(x):\n    match x:\n" + "".join(f"        case aten.{name}.default: pass\n" for name in six),
        f"def TABLE(x):\n    return x in {six[:3]} or x is aten.cos.default or x in {six[4:]}",
    ):  # fmt: skip
        assert list(tables_in(ast.parse(text))) == [("TABLE", set(six))], text
    assert (
        list(tables_in(ast.parse("TABLE = 'a view that is transposed, sorted or split has no copy of its own'"))) == []
    )


LOOKS: dict[type[ast.AST], tuple[Look, ...]] = {
    ast.Module: (lacks_a_subject, public_classes, tables_of_ops),
    ast.ImportFrom: (imported,),
    ast.ClassDef: (lacks_a_subject,),
    ast.FunctionDef: (lacks_a_subject, lacks_a_comment, is_long, has_many_arguments),
    ast.AsyncFunctionDef: (lacks_a_subject,),
    ast.Call: (asks_a_module, makes_on_any_device),
}
