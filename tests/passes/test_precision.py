"""Mixed precision: as near to float64 as torch.autocast, the dtype of every op, and where gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import models
import pytest
import test_rules
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from torch import Tensor, fx, nn

import autopar
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.precision_check import check_device
from autopar.errors import PlanError
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.names import find_target
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import semantic_of
from autopar.ir.options import StepOptions
from autopar.ir.program import is_getitem, record
from autopar.ir.text.text import parse_program, print_program
from autopar.passes.rules import TABLE
from autopar.runtime.executor.kernel_table import function_of
from autopar.verification.verify import Report
from autopar.verification.virtual_side import Virtual

BF16, F32 = torch.bfloat16, torch.float32
aten = torch.ops.aten


def gpt() -> models.Case:
    """One block; the head is the table of the tokens."""
    torch.manual_seed(2)
    config = GPTConfig(models.VOCABULARY, models.TIME, layers=1, heads=4, width=32)
    return models.uneven(GPT(config)), models.token_loss, (models.tokens(), models.labels())


def llama() -> models.Case:
    torch.manual_seed(3)
    model = models.uneven(models.Llama(1, 32, 4, 2, 48, models.VOCABULARY, 2 * models.TIME))
    return model, models.token_loss, (models.tokens(), models.labels())


def conv() -> models.Case:
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1, bias=False),
        nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip
    return models.uneven(model), models.class_loss, (torch.randn(12, 3, 8, 8), torch.randint(8, (12,)))


CASES = {"gpt": gpt, "llama": llama, "conv": conv}


def verified(name: str, mesh: str, **options: Any) -> Report:
    model, loss_fn, batch = CASES[name]()
    return autopar.verify(model, mesh, loss_fn=loss_fn, batch=batch, steps=1, **options)


def compiled(name: str, mesh: str, **options: Any) -> Compiled:
    model, loss_fn, batch = CASES[name]()
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch, **options)


@pytest.fixture(scope="module")
def program() -> Compiled:
    return compiled("gpt", "dp=2,tp=2", precision="bf16")


# -- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt", "dp=2", {}),
        ("gpt", "dp=2,tp=2", {}),
        ("gpt", "dp=2", {"microbatches": 3}),
        ("gpt", "pp=2", {"microbatches": 3}),
        ("gpt", "dp=2,tp=2", {"sequence_parallel": True}),
        ("llama", "tp=2", {}),
        ("conv", "dp=2", {}),
        ("llama", "dp=2", {"precision": "fp16"}),
    ],
)
def test_no_further_from_float64_than_autocast(name: str, mesh: str, options: dict[str, Any]) -> None:
    """Per tensor: at most twice torch.autocast's own error, or one rounding."""
    report = verified(name, mesh, **{"precision": "bf16", **options})
    assert report.ok, report
    rounding = 2.0**-7 if report.tolerance > 2e-3 else 2.0**-10
    gradients = [row for row in report.rows if row.kind == "gradient"]
    assert all(row.allowed is not None and row.replicas == 0.0 for row in gradients), report
    assert all(row.error <= max(2 * (row.allowed or 0.0), rounding) for row in gradients), report
    assert max(row.error for row in gradients) > 1e-6, "nothing was rounded: nothing was tested"


def test_a_wrong_program_is_seen() -> None:
    """Test the tester: a sum that is not taken is far outside of what precision explains."""
    model, loss_fn, batch = gpt()
    choices = options_of(precision="bf16")
    captured = capture(model, loss_fn, batch, {}, precision="bf16")
    good = lower(captured, parse_mesh("dp=2"), choices)
    sums = [node for node in good.program.graph.nodes if "all_reduce" in str(node.target)]
    sums[-1].replace_all_uses_with(sums[-1].args[0])  # of the gradients
    report = autopar.verification.verify.verify_compiled(model, captured, good, loss_fn=loss_fn, batch=batch, steps=1)
    assert not report.ok


# -- the dtype of every op ------------------------------------------------------------------------------------------


def calls(found: Compiled) -> Iterator[fx.Node]:
    return (node for node in found.program.calls() if not is_getitem(node))


def dtypes(node: fx.Node) -> set[torch.dtype]:
    return {t.dtype for t in record(node).types if t is not None and t.dtype.is_floating_point}


@pytest.mark.parametrize("name", ["gpt", "llama", "conv"])
def test_products_are_short_and_norms_and_losses_are_not(name: str) -> None:
    found = compiled(name, "dp=2", precision="bf16")
    kinds: dict[str, int] = {}
    for node in calls(found):
        kind = facts_of(node.target).precision
        kinds[kind] = kinds.get(kind, 0) + 1
        operands = {record(o).type.dtype for o in node.all_input_nodes if record(o).is_tensor}
        if kind == "low":
            assert BF16 in dtypes(node), node.format_node()
        if kind in ("high", "sum") and dtypes(node):
            assert dtypes(node) == {F32}, node.format_node()
        if kind == "high":
            assert BF16 not in operands, node.format_node()
        if kind == "inside":
            assert BF16 in operands, "the logits are read as they are"
    assert kinds["low"] > 4
    assert kinds["high"] > 2
    assert kinds["inside"] > 2


@pytest.mark.parametrize(("smoothing", "dtype"), [(0.0, BF16), (0.1, F32)])
def test_a_gradient_of_logits_is_rounded_once(smoothing: float, dtype: torch.dtype) -> None:
    """It is short where it enters products, and float32 where something is still taken off."""

    def loss_fn(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(x), labels, label_smoothing=smoothing)

    batch = torch.randn(6, 8), torch.randint(12, (6,))
    found = autopar.compile(nn.Linear(8, 12), "dp=1", loss_fn=loss_fn, batch=batch, precision="bf16")
    (node,) = [node for node in calls(found) if "cross_entropy_backward" in str(node.target)]
    assert dtypes(node) == {dtype}


def test_parameters_are_cast_once_and_first_of_all(program: Compiled) -> None:
    for node, entry in program.program.entries:
        casts = [user for user in node.users if user.target is aten._to_copy.default]
        assert record(node).types[0].dtype is not BF16
        assert len(casts) <= 1, entry.name
        if entry.name.endswith(("q.weight", "up.weight", "up.bias")):
            assert [record(cast).type.dtype for cast in casts] == [BF16]
            assert len(node.users) == 1, "both passes use the cast"


def test_what_leaves_has_the_dtype_of_the_model(program: Compiled) -> None:
    for node, out in program.program.leaving:
        assert node is not None
        assert record(node).type.dtype is F32, out


def test_activations_are_summed_over_tp_in_the_short_dtype(program: Compiled) -> None:
    rows = [row for row in program.collectives if row.axis == "tp" and "einsum" in row.value]
    assert rows
    assert {row.dtype for row in rows} == {BF16}


def test_the_program_says_what_is_short(program: Compiled) -> None:
    (note,) = [note for note in program.notes if note.startswith("precision")]
    assert "values are bf16" in note
    assert "f32 stay embedding_backward, native_layer_norm, native_layer_norm_backward" in note
    text = print_program(program.program)
    assert "bf16[" in text
    assert "why: %einsum takes it in bf16" in text
    assert print_program(parse_program(text)) == text


@pytest.mark.parametrize("name", sorted(TABLE))
def test_torch_computes_what_may_come_short(name: str, samples: Any) -> None:
    """Ops that are not kept in float32 have kernels for bf16 here."""

    def short(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(BF16) if value.dtype is torch.float64 else value
        if isinstance(value, (list, tuple)):
            return type(value)(map(short, value))
        return {key: short(item) for key, item in value.items()} if isinstance(value, dict) else value

    target = find_target(name)
    if facts_of(target).precision != "high":
        for one in samples[name]:
            if not any(isinstance(arg, Tensor) and arg.is_complex() for arg in one.args):
                args, semantic = list(short(one.args)), semantic_of(target)
                statistic = semantic and semantic.statistic
                if statistic is not None:
                    args[statistic] = args[statistic].float()
                function_of(target)(*args, **short(one.kwargs))


samples = test_rules.samples  # a fixture


# -- what the user casts --------------------------------------------------------------------------------------------


class Casting(nn.Module):
    """What a model may say of its dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.register_buffer("t", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        wide = torch.tanh(h.float())
        with torch.autocast("cpu", enabled=False):
            kept = F.linear(h.float(), self.b.weight).sigmoid()
        table = torch.outer(self.t, self.t) @ torch.outer(self.t, self.t)
        return (torch.sin(h) + wide + kept + torch.cos(h.bfloat16()) + torch.atan(table[0])).square().mean()


def test_casts_of_the_model_and_regions_without_autocast_are_honoured() -> None:
    found = autopar.compile(Casting(), "dp=1", batch=(torch.randn(4, 8),), precision="bf16")
    of = {
        str(node.target).split(".")[1]: record(node).type.dtype
        for node in calls(found)
        if record(node).phase == "forward" and record(node).is_tensor
    }
    assert {name: of[name] for name in ("sin", "tanh", "sigmoid", "cos", "atan")} == {
        "sin": BF16, "tanh": F32, "sigmoid": F32, "cos": BF16, "atan": F32,
    }  # fmt: skip
    products = {node.name: record(node).type.dtype for node in calls(found) if "einsum" in str(node.target)}
    assert [products[name] for name in ("einsum", "einsum_1", "einsum_2")] == [BF16, F32, F32]
    gradients = [node for node in products if record_of(found, node).phase == "backward"]
    assert [products[name] for name in gradients[:2]] == [F32, F32], "the backward pass of what is exact"


def record_of(found: Compiled, name: str) -> Any:
    return record(next(node for node in found.program.graph.nodes if node.name == name))


# -- sums in float32 ------------------------------------------------------------------------------------------------


class Uses(nn.Module):
    """One weight, used once or twice: for numbers that bf16 cannot add."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        product = F.linear(x, self.w)
        return (product if y is None else product + F.linear(y, self.w)).sum()


def gradient_of_uses(*given: list[float], **options: Any) -> float:
    model, batch = Uses(), tuple(torch.tensor(x).reshape(-1, 1) for x in given)
    choices = options_of(precision="bf16", **options)
    captured = capture(model, None, batch, {}, precision="bf16")
    found = lower(captured, parse_mesh("dp=1"), choices)
    virtual = Virtual(model, captured, found, lambda p: torch.optim.SGD(p, lr=0.0))
    return float(virtual.step(batch, {}, torch.tensor([0, 0]))["gradient", "w"])


def test_microbatches_add_up_in_float32() -> None:
    """256 + 1 is 256 in bf16."""
    x = [256.0, 1.0, 1.0, 1.0]
    assert gradient_of_uses(x, microbatches=4) == 259.0
    assert gradient_of_uses(x, microbatches=4, reduce_dtype=BF16) != 259.0, "then it is as it was asked"


def test_the_uses_of_a_weight_add_up_in_float32() -> None:
    assert gradient_of_uses([256.0], [1.0]) == 257.0


# -- what is refused ------------------------------------------------------------------------------------------------


def test_short_parameters_have_no_master_weights() -> None:
    model, loss_fn, batch = gpt()
    with pytest.raises(PlanError) as error:
        autopar.compile(model.bfloat16(), "dp=2", loss_fn=loss_fn, batch=batch, precision="bf16")
    assert str(error.value) == (
        'precision="bf16" keeps parameters in torch.float32 and casts them for each step, but 20 of 20 trained '
        "parameters are not: 'tokens.weight' (torch.bfloat16), 'positions.weight' (torch.bfloat16), "
        "'blocks.0.attn_norm.weight' (torch.bfloat16) and 17 more. Call model.float() before autopar, or leave "
        "precision out: the model is then computed as it is, with its updates rounded to its own dtype."
    )


def test_parameters_that_are_not_trained_may_be_short() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].bfloat16().requires_grad_(False)
    loss = lambda m, x: m[1](m[0](x.bfloat16()).float()).sum()  # noqa: E731
    found = autopar.compile(model, "dp=2", loss_fn=loss, batch=(torch.randn(4, 8),), precision="bf16")
    assert record(found.program.placeholders[0]).type.dtype is BF16


def test_a_device_without_bf16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(PlanError) as error:
        check_device(StepOptions(precision="bf16"), torch.device("cuda:0"))
    assert str(error.value) == (
        'precision="bf16" cannot be computed on Tesla T4: it has no such instructions. Write "fp16" or "fp32".'
    )


def test_a_device_without_fp16_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul(*_: Tensor) -> Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "matmul", matmul)
    with pytest.raises(PlanError, match="cannot be computed on cpu: \"addmm_impl_cpu_\" not implemented for 'Half'"):
        check_device(StepOptions(precision="fp16"), torch.device("cpu"))
