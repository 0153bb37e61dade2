"""What a user gets wrong in a rule of an op: each mistake has a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from custom_op_kernels import biased_, define
from torch import Tensor

from autopar.custom_ops.registry import CustomOps, register_rule
from autopar.errors import RuleError


def rule(name: str, pattern: Any, **options: Any) -> object:
    return register_rule(name if "::" in name else f"own_tests::{name}", pattern, **options, registry=CustomOps())


def refusal(name: str, pattern: Any, **options: Any) -> str:
    with pytest.raises(RuleError) as found:
        rule(name, pattern, **options)
    return str(found.value)


OPS = {
    "own_tests::scal": "there is no op 'own_tests::scal'. Is it 'own_tests::scale'",
    "own_tests::wxyzwxyzwxyzwxyzwxyz": "there is no op 'own_tests::wxyzwxyzwxyzwxyzwxyz'. Namespace 'own_tests' has ",
    "wxyz::q": "there is no op 'wxyz::q'. Namespace 'wxyz' has no op. Import the module that defines it (torch",
    "scale.out": "'own_tests::scale.out' is no overload of 'own_tests::scale'; these are 'own_tests::scale'.",
    "aten::mm": "'aten::mm' is an op of PyTorch; autopar has the rules of these",
    "autopar::einsum": "'autopar::einsum' is an op of autopar, which has the rules of these. Rules can be",
    "::": "'::' is not the name of an op: write namespace and name, e.g. \"mylib::norm\".",
    "own_tests::": "'own_tests::' is not the name of an op",
    "write_": "'own_tests::write_' writes to its arguments or returns views of them",
    "stacked": "'own_tests::stacked' takes a list of tensors in 'xs', which no pattern can name: pass them one by one.",
    "counted": "'own_tests::counted' returns int; a rule is about ops that return tensors.",
    "made": "'own_tests::made' takes no tensor, so there is nothing to split: every rank makes its results whole.",
    "noise": "'own_tests::noise' draws random numbers, which pieces on other ranks would draw otherwise.",
    "faceless": "own_tests::faceless has no fake kernel that runs: UnsupportedOperatorException",
    "lonely": "own_tests::lonely on operands of shapes [12] raised NotImplementedError",
}


@pytest.mark.parametrize("name", OPS)
def test_ops(name: str) -> None:
    text = refusal(name, "b -> b")
    assert text.startswith(OPS[name]), text


def test_the_op_is_given_by_its_name() -> None:
    with pytest.raises(RuleError, match=r"the op is given by its name, e\.g\. \"mylib::norm\", not by a OpOverload"):
        register_rule(torch.ops.own_tests.scale.default, "b h, h -> b h")


# of own_tests::scale(x, w)
PATTERNS = {
    "b h, h": "it has no '->'",
    "b -> h -> h": "it has more than one '->'",
    "b h -> b h": "it has 1 operands, but own_tests::scale has 2 tensor arguments: 'x', 'w'",
    "b h, h -> b h, h": "it has 2 results, but own_tests::scale returns 1",
    "b h, - -> b h": "'-' stands for None, but argument 'w' is always a tensor",
    "b (h, h -> b h": "cannot read 'b (h'",
    "b h, h -> b b": "'b' stands twice in one tensor",
    "b h, h -> b k": "'k' is only in a result, so that no operand is split with it: say replicated=('k',)",
    "b 8, 8 -> b 8": "'8' is neither a name nor 1",
    "... ..., h -> h": "has two '...' in one tensor",
    "(... h), h -> h": "'...' cannot stand in parentheses",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str) -> None:
    text = refusal("scale", pattern)
    assert f'"{pattern}": {PATTERNS[pattern]}' in text, text
    assert text.startswith("the rule of own_tests::scale cannot be read:\n  ")


# Sizes that the op does not take, or does not return.
MISFITS = {
    ("halves", "b h -> b h, b h"): (
        "own_tests::halves on operands of shapes [12, 6] gives results of shapes [6], [6], "
        "which are not those of its pattern:\n  'b h -> b h, b h' does not fit a shape of (6,)"
    ),
    ("normalised", "b h -> h b"): (
        "own_tests::normalised on operands of shapes [12, 6] gives results of shapes [12, 6], "
        "which are not those of its pattern:\n  'b h -> h b': 'h' is 6 and 12"
    ),
    ("project", "b i, i o -> b o"): "own_tests::project on operands of shapes [12, 6], [6, 4] raised RuntimeError: ",
    ("scale", "b h, k -> b h"): "own_tests::scale on operands of shapes [12, 6], [4] raised RuntimeError: ",
}


@pytest.mark.parametrize(("name", "pattern"), MISFITS)
def test_sizes(name: str, pattern: str) -> None:
    text = refusal(name, pattern)
    assert MISFITS[name, pattern] in text, text


OPTIONS: list[tuple[str, Any, str]] = [
    ("replicated", "z", "replicated names 'z', which the pattern has not; it has 'b', 'h'."),
    ("linear", "h", "linear names 'h', which is no tensor argument; these are 'x', 'w'."),
    ("partial", "mean", "partial='mean' is no kind of partial result; these are 'sum', 'max', 'min', 'logsumexp'."),
    ("flops", "2*b*k", "flops=\"2*b*k\": 'k' is no name of the pattern. Write names of sizes and numbers, e.g. "),
    ("flops", "len(b)", "flops=\"len(b)\": cannot read 'len(b)'."),
    ("flops", "2 b", 'flops="2 b": it does not parse.'),
    ("size_args", {"k": "n"}, "size_args names 'k', which the pattern has not; it has 'b', 'h'."),
    ("size_args", {"h": "x"}, "size_args: 'x' is no argument that could be a size; these are no"),
    ("sizes", {"z": 2}, "sizes names 'z', which the pattern has not; it has 'b', 'h'."),
    ("sizes", {"h": 0}, "sizes has 0 for 'h', which is no size."),
    ("args", {"z": 2}, "args names 'z', which own_tests::scale has not; it has 'w', 'x'."),
    ("args", {"w": 2}, "args has 2 for tensor 'w': give a dtype, or a function of the shape."),
]


@pytest.mark.parametrize(("option", "value", "message"), OPTIONS)
def test_options(option: str, value: Any, message: str) -> None:
    text = refusal("scale", "b h, h -> b h", **{option: value})
    assert f"cannot be read:\n  {message}" in text, text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here() -> None:
    text = refusal("scale", "b h, h -> b h", device="cuda")
    assert text.startswith("device='cuda' is not here: ")


def test_an_op_without_an_autograd_kernel_is_checked_forward_only(recwarn: pytest.WarningsRecorder) -> None:
    torch.library.register_fake("own_tests::plain", torch.empty_like)
    assert str(rule("plain", "b h -> b h")).endswith("results (it has no autograd formula) checked")
    assert not recwarn.list


def test_examples() -> None:
    text = refusal("reversed_heads", "b h -> b h")
    assert "argument 'heads' of own_tests::reversed_heads has no default: give an example, args={'heads': ...}." in text
    text = refusal("reversed_heads", "b (n d) -> b (n d)", size_args={"n": "heads"}, args={"heads": 2})
    assert "args has a value for 'heads', which size_args says is a size: give it in sizes." in text
    text = refusal("scale", "b h, h -> b h", args={"w": lambda shape: torch.ones(3)})
    assert text == "args: the function for 'w' gave [3] for a tensor of shape [6]."
    text = refusal("normalised", "b h -> b h", args={"x": torch.zeros})
    assert text.startswith("own_tests::normalised on operands of shapes [12, 6] gives NaN, which checks nothing: ")


@pytest.mark.parametrize("pattern", [3, None])
def test_a_pattern_is_text(pattern: Any) -> None:
    text = refusal("scale", pattern)
    assert text == f'a pattern is a string such as "b s h, h -> b s h", or several of them, not {pattern}.'


def test_no_pattern() -> None:
    assert 'give at least one pattern, e.g. "b s h, h -> b s h".' in refusal("scale", [])


def test_all_mistakes_at_once() -> None:
    with pytest.raises(RuleError) as found:
        rule("scale", ["b h -> b k", "b h, - -> b h"])
    assert len(str(found.value).splitlines()) == 4


def test_the_fake_kernel_must_say_what_the_real_one_does() -> None:
    define("doubled", biased_, lambda x, bias=None: x.new_empty(2 * len(x)))
    with pytest.raises(
        RuleError, match=r"the fake kernel of own_tests::doubled says .*\[24\].*, but its results are .*\[12\]"
    ):
        rule("doubled", "b, - -> b")


def test_an_op_that_is_not_repeatable_is_refused() -> None:
    state = [0.0]

    def drifting(x: Tensor) -> Tensor:
        state[0] += 1.0
        return x + state[0]

    define("drifting", drifting, torch.empty_like)
    with pytest.raises(RuleError, match="gives other results when it runs again"):
        rule("drifting", "b -> b")
