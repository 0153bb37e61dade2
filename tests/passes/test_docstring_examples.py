"""Every example in a docstring runs: programs before and after a pass, orders of schedules, `>>>`.

A program and what a pass makes of it stand indented, with a line `becomes` between. What the plan says stands before
the program, as in golden files (`plan_text.py`); `stage 0: ...` names the nodes of a stage. After `becomes` a line may
leave out its comment.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from plan_text import read_plan
from test_golden import STEPS, compare
from test_golden_pipeline import text_of
from torch import fx

from autopar.ir.check.check_levels import verify
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program, TensorType, is_gathered_input
from autopar.ir.schedule import Action, Costs, Flow, Work
from autopar.ir.text.text import parse_program, print_program
from autopar.passes import PASSES, make_pipeline
from autopar.passes.collectives.check_rules import check_rules
from autopar.passes.pipeline.cuts.action_graphs import Places
from autopar.passes.pipeline.cuts.cut import Stages
from autopar.passes.pipeline.cuts.gathers import gathered_by_stage
from autopar.passes.pipeline.cuts.rematerialized import kept_across
from autopar.passes.pipeline.cuts.sums import sums_by_stage
from autopar.passes.pipeline.cuts.when import times_of
from autopar.passes.pipeline.stages import split_into_stages
from autopar.passes.schedules import SCHEDULES, parse_schedule, with_transfers

_TWO = re.compile(r"((?:^    .*\n)+)becomes\n((?:^    .*\n?)+)", re.M)
_PROGRAM = re.compile(rf"^    (?:{'|'.join(Level.__members__)}) program.*\n(?:^    .*\n?)+", re.M)
_SHOWN = re.compile(r">>> |^ +%| program", re.M)  # in a file that may have an example
_VALUE = re.compile(r" +%\w+.* = ")
_ORDER = re.compile(
    r"(?:(\w+) stages on each of )?(\w+) ranks, (\w+) micro-batch(?:es)?:\n\n((?:^    .*\n)+)", re.M | re.I
)
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}


@dataclass(frozen=True)
class Doc:
    """A docstring, with the module and the name of what it belongs to ("" for the module itself)."""

    module: str
    name: str
    text: str

    @property
    def programs(self) -> list[tuple[str, str]]:
        """What stands before and after each `becomes`, if it is a program."""
        return [(unindented(a), unindented(b)) for a, b in _TWO.findall(f"{self.text}\n") if " program" in a]


def docs_in(path: Path) -> Iterator[Doc]:
    words = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(("autopar", *words) if words[0] != "autopar" else words).removesuffix(".__init__")
    text = path.read_text()
    open_: list[ast.AST] = [ast.parse(text)] if _SHOWN.search(text) else []
    while open_:
        node = open_.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (said := ast.get_docstring(node)):
            yield Doc(module, getattr(node, "name", ""), said)
        open_ += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]


def unindented(block: str) -> str:
    return "".join(line[4:] for line in block.splitlines(keepends=True))


DOCS = [doc for top in ("autopar", "passes", "runtime") for path in (ROOT / top).rglob("*.py") for doc in docs_in(path)]
OF_PASSES = [doc for doc in DOCS if doc.module.startswith("autopar.passes")]
EXAMPLES = {
    f"{doc.module}.{doc.name}.{i}": (doc.name, before, after)
    for doc in OF_PASSES
    for i, (before, after) in enumerate(doc.programs)
}


# -- programs ---------------------------------------------------------------------------------------------------------


def made_by(name: str, program: Program, plan: Plan, stages: Stages) -> str:
    """The text of what a function of the passes makes of a program."""
    internal: dict[str, Callable[[], Any]] = {
        "make_pipeline": lambda: text_of(make_pipeline(program, plan)),
        "split_into_stages": lambda: text_of(
            split_into_stages(program, plan, Places((0,), split=False, in_flight=(1,)))
        ),
        "gathered_by_stage": lambda: print_program(gathered_by_stage(program, gathered(program), stages)[0]),
        "kept_across": lambda: print_program(kept_across(program, stages)[0]),
        "sums_by_stage": lambda: print_program(sums_by_stage(program, times_of(program, plan.microbatches), stages)[0]),
    }
    if name in internal:
        return internal[name]()
    step, level = STEPS[name]
    after = step(program, plan)
    verify(after, level)
    if level == Level.SHARDED:
        check_rules(after, plan)
    return print_program(after)


def gathered(program: Program) -> set[fx.Node]:
    return {node for node in program.nodes if is_gathered_input(node)}


def read(before: str) -> tuple[str, Plan, dict[str, int]]:
    """The program's text, the plan, and the stages of nodes by name."""
    lines = before.splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if re.match(r"[A-Z]+ program", line))
    staged = [re.match(r"stage (\d+): (.*)", line) for line in lines[:start]]
    stages = {name: int(match[1]) for match in staged if match for name in match[2].split()}
    said = [line for line, match in zip(lines, staged, strict=False) if not match]
    text = "".join(lines[start:])
    return text, read_plan(said, parse_program(text).mesh), stages


def as_shown(made: str, shown: str) -> str:
    """What was made, without the comments that the example leaves out."""
    pairs = zip_longest(made.splitlines(), shown.splitlines(), fillvalue="")
    return "".join(f"{a if '   #' in b else a.partition('   #')[0]}\n" for a, b in pairs)


def check(name: str, before: str, after: str) -> None:
    text, plan, by_name = read(before)
    program = parse_program(text)
    assert print_program(program) == text, "the text before is not as the printer writes it"
    verify(program, program.level)
    stages = {node: by_name[node.name] for node in program.calls() if node.name in by_name}
    made = made_by(name, program, plan, stages)
    assert as_shown(made, after) == after, f"{name} makes\n{made}"


@pytest.mark.parametrize("which", EXAMPLES)
def test_a_pass_makes_what_its_docstring_shows(which: str) -> None:
    check(*EXAMPLES[which])


@pytest.mark.parametrize("which", [which for which, (name, *_) in EXAMPLES.items() if name in STEPS])
def test_both_programs_of_a_docstring_compute_the_same(which: str) -> None:
    _, before, after = EXAMPLES[which]
    text, plan, _ = read(before)
    compare(text, after, plan, seed=1)


def test_every_pass_has_an_example() -> None:
    shown = {name for name, *_ in EXAMPLES.values()}
    public = [*(step for step, _ in PASSES), make_pipeline]
    assert [step.__name__ for step in public if step.__name__ not in shown] == []


def test_no_program_in_a_docstring_of_a_pass_is_left_untested() -> None:
    for doc in OF_PASSES:
        shown = [line.strip() for pair in doc.programs for text in pair for line in text.splitlines() if "%" in line]
        values = [line for line in doc.text.splitlines() if _VALUE.match(line)]
        assert [line.strip() for line in values if line.strip() not in shown] == [], f"{doc.module}.{doc.name}"


def test_other_programs_in_docstrings_are_as_the_printer_writes_them() -> None:
    found = [text for doc in DOCS if not doc.programs for text in _PROGRAM.findall(f"{doc.text}\n")]
    assert found, "autopar/ir/text/text.py shows one"
    for text in map(unindented, found):
        assert print_program(parse_program(text)) == text


def test_a_wrong_example_is_noticed() -> None:
    """Test the tester: another number after, another mesh, one line more and one less."""
    name, before, after = EXAMPLES["autopar.passes.collectives.partition.partition.0"]
    check(name, before, after)
    assert "tp=2" in before and "[8])" in after
    for wrong in (
        (before, after.replace("[8])", "[24])")),
        (before.replace("tp=2", "tp=4"), after),
        (before, f'{after}return loss "loss" = %reshape\n'),
        (before, "\n".join(after.splitlines()[:-1])),
    ):
        with pytest.raises(AssertionError):
            check(name, *wrong)


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_prints_its_order(name: str) -> None:
    entry = SCHEDULES[name]
    *words, order = _ORDER.search(cleandoc(entry.order.__doc__ or "")).groups()  # type: ignore[union-attr]
    chunks, ranks, microbatches = (_NUMBERS[word.lower()] if word else entry.chunks for word in words)
    found = parse_schedule(name, ranks, microbatches, chunks * ranks)
    rows = [" ".join("|".join(map(str, turn.actions)) for turn in turns) for turns in found.orders]
    assert unindented(order).splitlines() == rows


def test_transfers_are_those_of_the_docstring() -> None:
    ((before, after),) = _TWO.findall(cleandoc(with_transfers.__doc__ or ""))
    orders = [
        [Action(int(word[0]), word[1], int(word[2])) for word in line.split()]
        for line in unindented(before).splitlines()
    ]
    works = {
        (0, "F"): Work(writes=("x",)), (1, "F"): Work(reads=("x",)),
        (1, "B"): Work(writes=("g",)), (0, "B"): Work(reads=("g",)),
    }  # fmt: skip
    types = dict.fromkeys(("x", "g"), TensorType((4,), torch.float32))
    made = with_transfers(orders, Flow((0, 1), 1, works, types), Costs())
    assert [", ".join(map(str, line)) for line in made] == unindented(after).splitlines()


# -- doctests ---------------------------------------------------------------------------------------------------------


def failures(doc: Doc) -> int:
    """How many lines with `>>>` print something else than what stands below them."""
    names = vars(importlib.import_module(doc.module)) if ">>> " in doc.text else {}
    test = doctest.DocTestParser().get_doctest(doc.text, dict(names), f"{doc.module}.{doc.name}", None, 0)
    return doctest.DocTestRunner(verbose=False).run(test).failed


def test_doctests() -> None:
    assert [f"{doc.module}.{doc.name}" for doc in DOCS if failures(doc)] == []
    assert failures(Doc("autopar.ir.mesh", "", ">>> parse_mesh('dp=2').size\n2")) == 0
    assert failures(Doc("autopar.ir.mesh", "", ">>> parse_mesh('dp=2').size\n3")) == 1
