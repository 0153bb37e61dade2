"""What is counted of a call: bytes and sizes that nobody sees in its values."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.measure import widened_bytes
from autopar.ir.text.text import parse_program

LOGITS = """\
LOCAL program on tp=2
%logits: {0}[4,8] of [4,16] [-,tp] = batch "0"
%gradient: {0}[4] [-] = batch "1"
%index: i64[4] [-] = batch "2"
%sums: {0}[4] [-] partial(logsumexp:tp) = autopar.logsumexp.default(%logits)
%whole: {0}[4] [-] = autopar.all_reduce.default(%sums, "tp", "logsumexp")
%back: {0}[4,8] of [4,16] [-,tp] = autopar.cross_entropy_backward.default(%gradient, %logits, %whole, %index, offset=0)
%exp: {0}[4,8] of [4,16] [-,tp] = aten.exp.default(%logits)
return loss "loss" = %whole
return value "back" = %back
return value "exp" = %exp
"""


@pytest.mark.parametrize(
    ("dtype", "sums", "back"), [("bf16", 4 * 8 * 4, 4 * 8 * 4), ("f32", 4 * 8 * 4, 0), ("f64", 4 * 8 * 4, 0)]
)
def test_logits_are_computed_with_in_float32(dtype: str, sums: int, back: int) -> None:
    """Those of one rank. A gradient is computed in what is as wide already."""
    program = parse_program(LOGITS.format(dtype))
    mesh = parse_mesh("tp=2")
    found = {node.name: widened_bytes(node, mesh) for node in program.calls()}
    assert found == {"sums": sums, "whole": 0, "back": back, "exp": 0}
