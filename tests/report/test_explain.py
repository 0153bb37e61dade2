"""What `explain` says of a value: who decided, what else was possible at what price, what it moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpt import GPT, GPTConfig
from models import nanogpt
from models_special import hybrid
from pipeline_case import compiled_as
from torch import nn
from train_gpt import loss_fn

import autopar
from autopar.cli import commands as cli
from autopar.compiled import Compiled
from autopar.errors import ValueNameError
from autopar.passes.search.explain import (
    CHOSEN,
    COST,
    FORBIDDEN,
    IMPOSSIBLE,
    INTENT,
    POSSIBLE,
    RULE,
    SEARCH,
    SIZE,
    UNTRIED,
    USER,
    Alternative,
    Decision,
)
from autopar.report.explanation import BESIDE, GRADIENT, SUM

UP = "blocks.0.mlp.up.weight"

EXPECTED = """
parameter "blocks.0.mlp.up.weight": f32[64,32] of [128,32] [tp,-]
  used at gpt.py:56 in blocks.0.mlp.up

dp (2 ranks): replicated, decided by intent: 'dp' splits the batch; all other inputs are replicated
  [-,-]   chosen
  [dp,-]  forbidden    moves +16 B  it would all-gather 'blocks.0.mlp.up.weight', which 'dp' forbids
  [-,dp]  forbidden    moves +16 B  it would all-gather 'blocks.0.mlp.up.weight', which 'dp' forbids

tp (2 ranks): splits dim 0, decided by cost: the cheapest of 2 states within the intent
  [tp,-]  chosen
  [-,-]   forbidden               moves +16.4 kB  'tp' splits a weight wherever it can and never gathers it
  [-,tp]  possible   cost +82 kB  moves +57.4 kB  it would all-reduce %einsum_27 of blocks.0.mlp.down, all-reduce \
%einsum_4 of blocks.0.mlp.up and move 2 more and not all-reduce %einsum_29 of blocks.0.mlp.up, all-reduce \
%einsum_5 of blocks.0.mlp.down

collectives that it causes
  all_reduce  tp  8.19 kB  gpt.py:56 blocks.0.mlp.up backward  a sum that it leaves over tp: %einsum_29 is [dp,-,-] \
partial(tp), but %native_layer_norm_backward_3 wants [dp,-,-]
  all_reduce  dp  8.19 kB  gpt.py:56 blocks.0.mlp.up backward  its gradient: %einsum_30 is [tp,-] partial(dp), but \
it leaves as the gradient of 'blocks.0.mlp.up.weight' in [tp,-] (in a bucket of 57 kB)
""".strip()


def compiled_gpt(mesh: str = "dp=2,tp=2", shard: dict[str, str] | None = None, vocabulary: int = 64) -> Compiled:
    model = GPT(GPTConfig(vocabulary=vocabulary, context=16, layers=2, heads=4, width=32))
    x = torch.zeros(8, 16, dtype=torch.long)
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=(x, x), shard=shard)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compiled_gpt()


def moved(compiled: Compiled, axis: str) -> float:
    """Bytes per rank that the collectives of an axis really move, by ring algorithms."""
    share = (compiled.mesh[axis] - 1) / compiled.mesh[axis]
    factors = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share / 2}
    # What gradients move on tp counts too: every row of the axis is counted, whoever reads it.
    return sum(factors[row.op] * row.bytes for row in compiled.collectives if row.axis == axis)


def on(compiled: Compiled, value: str, axis: str) -> Decision:
    return next(one for one in compiled.explain(value).decisions if one.axis == axis)


def the(decision: Decision, layout: str) -> Alternative:
    return next(one for one in decision.alternatives if str(one.layout) == layout)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the names and numbers are those of torch 2.13")
def test_golden(compiled: Compiled):
    assert str(compiled.explain(UP)) == EXPECTED


@pytest.mark.parametrize("value", [UP, "blocks.1.attn.o.weight", "tokens.weight", "norm.bias", "%einsum_5", "%pick"])
def test_no_alternative_is_cheaper_than_the_plan(compiled: Compiled, value: str):
    for decision in compiled.explain(value).decisions:
        assert [one.verdict for one in decision.alternatives].count(CHOSEN) == 1
        for one in decision.alternatives:
            assert (one.cost is None) == (one.verdict in (FORBIDDEN, IMPOSSIBLE, UNTRIED)), one
            assert one.cost is None or one.cost >= 0, one
            assert one.why or one.verdict in (CHOSEN, POSSIBLE), one


@pytest.mark.parametrize(("value", "layout"), [(UP, "[-,tp]"), ("blocks.0.mlp.down.weight", "[tp,-]")])
def test_the_difference_is_what_compiling_with_that_layout_moves(compiled: Compiled, value: str, layout: str):
    """The search's bytes are those of the programs, but for the fixed price of a collective (16 bytes)."""
    alternative = the(on(compiled, value, "tp"), layout)
    assert alternative.verdict == POSSIBLE and alternative.moved is not None
    with_it = compiled_gpt(shard={value: layout})
    assert str(with_it.layouts[value]) == layout
    more = moved(with_it, "tp") - moved(compiled, "tp")
    assert abs(more - alternative.moved) <= 16 * len(with_it.collectives), (more, alternative.moved)


def test_what_the_search_does_not_try_is_not_called_impossible(compiled: Compiled):
    untried = the(on(compiled, "%einsum_5", "dp"), "[-,dp,-]")
    assert (untried.verdict, untried.why) == (UNTRIED, "a split of the batch does not reach this dim")


def test_the_users_layout_names_its_pattern():
    decision = on(compiled_gpt(shard={"blocks.*.up.weight": "[-,tp]"}), UP, "tp")
    assert (decision.by, decision.because) == (USER, 'shard={"blocks.*.up.weight": "[-,tp]"}')
    better = the(decision, "[tp,-]")
    assert better.verdict == POSSIBLE and better.cost is not None and better.cost < 0, "the search's own choice"


def test_who_decides(compiled: Compiled):
    assert on(compiled, UP, "dp").by == INTENT
    assert on(compiled, UP, "tp").by == COST
    assert on(compiled, "tokens.weight", "tp").by == INTENT  # a vocabulary is split by rows
    assert on(compiled, "norm.weight", "tp").by == RULE
    odd = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.zeros(4, 6), torch.zeros(4, 3)
    small = autopar.compile(odd, "tp=4", loss_fn=lambda m, x, y: (m(x) - y).square().mean(), batch=batch)
    decision = on(small, "2.bias", "tp")
    assert decision.by == SIZE and the(decision, "[tp]").why == "dim 0 (size 3) is not divisible by 4"


def test_a_split_that_cuts_through_an_earlier_one():
    model, loss, batch = nanogpt()
    fused = autopar.compile(model, "tp=2,dp=2", loss_fn=loss, batch=batch)
    name = next(name for name, layout in fused.layouts.items() if "3:tp" in str(layout) and name.endswith("weight"))
    alternative = the(on(fused, name, "dp"), str(fused.layouts[name]).replace("3:tp", "dp"))
    assert alternative.verdict == IMPOSSIBLE and "cut through" in alternative.why


def test_collectives(compiled: Compiled):
    links = [(caused.link, caused.row.op, caused.row.axis) for caused in compiled.explain(UP).collectives]
    assert links == [(f"{SUM} over tp", "all_reduce", "tp"), (GRADIENT, "all_reduce", "dp")]
    (bucketed,) = [caused for caused in compiled.explain(UP).collectives if caused.bucket]
    assert bucketed.bucket == max(row.bytes for row in compiled.collectives if row.axis == "dp")


def test_module(compiled: Compiled):
    found = compiled.explain("blocks.0.mlp")
    assert found.kind == "module" and not found.decisions
    assert [part.name for part in found.parts][:4] == [
        f"blocks.0.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert dict(found.parts[0].by) == {"dp": INTENT, "tp": SEARCH}
    assert [part.kind for part in found.parts[4:]] == ["result"]
    assert len(found.collectives) == 2 and "2 collectives" in str(found)


def test_tied_and_later_names(compiled: Compiled):
    assert compiled.explain("head.weight").head == compiled.explain("tokens.weight").head
    made = next(node.name for node in compiled.program.calls() if node.name.startswith("all_reduce"))
    assert compiled.explain(f"%{made}").decisions, "a moved value is the value that it holds"


def test_unknown_names(compiled: Compiled, tmp_path: Path):
    with pytest.raises(ValueNameError, match=r"no parameter, module or node 'blocks\.0\.mlp\.upp\.weight'\. Nearest "
                                             r"names: blocks\.0\.mlp\.up\.weight, "):  # fmt: skip
        compiled.explain("blocks.0.mlp.upp.weight")
    with pytest.raises(ValueNameError, match="%flat was made by bucket, with nothing to decide"):
        compiled.explain("%flat")
    compiled.save(tmp_path / "saved")
    with pytest.raises(ValueNameError, match="explain the TARGET itself"):
        autopar.load(tmp_path / "saved").explain(UP)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    target = f"{Path(__file__).resolve().parents[2]}/examples/train_gpt.py:job"
    monkeypatch.setattr("sys.argv", ["autopar", "explain", target, UP, "--mesh", "tp=2"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "decided by cost" in capsys.readouterr().out


def test_what_moves_between_the_pieces_of_a_value():
    model, loss, batch = hybrid()
    compiled = autopar.compile(model, "cp=2", loss_fn=loss, batch=batch)
    names = [node.name for node in compiled.history[-1][1].calls()]
    wanted = {"convolution": "halo", "pad_rows": "halo", "convolution_input_backward": "halo_sum"}
    for value, op in {**wanted, "convolution_weight_backward": "halo"}.items():
        assert value in names
        (caused,) = compiled.explain(value).collectives
        assert (caused.row.op, caused.link) == (op, BESIDE)
    (caused,) = [one for one in compiled.explain("%running_sum").collectives if one.link == BESIDE]
    assert caused.row.op == "all_gather" and "the pieces before it end with" in caused.row.reason


def test_a_pipeline_says_where_a_value_lies():
    found = compiled_as("pp=2,dp=2,tp=2", 2)
    weight = str(found.explain("blocks.1.mlp.up.weight"))
    assert "kept by stage 1 of 2 (pp=1), its first user" in weight
    assert "mb (2 micro-batches): replicated, decided by intent" in weight and "all_reduce  mb" not in weight
    assert "computed in forward_0" in str(found.explain("%einsum"))
    assert "blocks.1.attn" in str(found.explain("blocks.1.attn"))


def test_what_waits_in_the_host_s_memory_is_told_with_its_bytes_and_its_time():
    model = GPT(GPTConfig(vocabulary=64, context=16, layers=2, heads=4, width=32))
    x = torch.zeros(8, 16, dtype=torch.long)
    both = ["parameters", "activations"]
    found = autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=(x, x), zero=3, offload=both)
    assert found.explain(UP).hosted == (
        "16.4 kB come back in 2 copies a step, 0 us of the link: parameters wait in the host's memory",
        "8.19 kB go there in 1 copy a step, 0 us of the link: gradients wait in the host's memory",
    )
    value = found.explain("%gelu").hosted
    assert [line.split(" in ")[0] for line in value] == ["32.8 kB go there", "32.8 kB come back"]
    assert "what of it waits in the host's memory\n  " in str(found.explain("blocks.0.mlp"))
    staged = autopar.compile(model, "pp=2", loss_fn=loss_fn, batch=(x, x), microbatches=2, offload="activations")
    assert len(staged.explain("%gelu").hosted) == 2 and not compiled_gpt().explain("%gelu").hosted
