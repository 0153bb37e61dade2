"""Bad input gets a clear error: what is wrong, where, both numbers, what to do. Each by its exact text.

(`test_errors_model.py`: what the model or the loss gets wrong.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import models
import pytest
import torch
from models_special import ZOO
from refusals import line_of, refused
from torch import Tensor, nn

import autopar
from autopar.api import compile
from autopar.compiled import Compiled
from autopar.errors import BatchError, LayoutError, MeshError
from autopar.ir.mesh import parse_mesh
from autopar.verification.verify import verify


def compiled(
    mesh: Any = "tp=2", case: str = "mlp", shard: Mapping[str, Any] | None = None, rows: int | None = None
) -> Compiled:
    model, loss_fn, batch = ZOO[case]()
    if rows is not None:
        batch = tuple(tensor[:rows] for tensor in batch)
    return compile(model, mesh, loss_fn=loss_fn, batch=batch, shard=shard)


# Meshes

PAIRS = "Write axis=size pairs with commas, e.g. 'dp=2,tp=2'."
MESHES = {
    "dp": f"mesh 'dp': cannot read 'dp'. {PAIRS}",
    "dp=": f"mesh 'dp=': cannot read 'dp='. {PAIRS}",
    "": f"mesh '': cannot read ''. {PAIRS}",
    "2": f"mesh '2': cannot read '2'. {PAIRS}",
    "dp=2,": f"mesh 'dp=2,': cannot read ''. {PAIRS}",
    "dp=2, tp": f"mesh 'dp=2, tp': cannot read 'tp'. {PAIRS}",
    "dp=2;tp=2": f"mesh 'dp=2;tp=2': cannot read 'dp=2;tp=2'. {PAIRS}",
    "dp=2.5": f"mesh 'dp=2.5': cannot read 'dp=2.5'. {PAIRS}",
    "dp=two": f"mesh 'dp=two': cannot read 'dp=two'. {PAIRS}",
    "d-p=2": f"mesh 'd-p=2': cannot read 'd-p=2'. {PAIRS}",
    "dp=0": "mesh 'dp=0': axis 'dp' has size 0; a size is 1 or more.",
    "dp=-2": "mesh 'dp=-2': axis 'dp' has size -2; a size is 1 or more.",
    "dp=2,dp=2": "mesh 'dp=2,dp=2' names an axis twice: each axis has one name and one size.",
    "dp=-1,tp=-1": "mesh 'dp=-1,tp=-1': only one axis may be -1, not dp, tp.",
    "dp=-1": "mesh 'dp=-1': 'dp=-1' needs the number of ranks, which is not known here: write a size.",
}
NOT_MESHES = [
    ({"dp": "2"}, "mesh {'dp': '2'}: the size of axis 'dp' is '2', which is not an integer."),
    ({"dp": True}, "mesh {'dp': True}: the size of axis 'dp' is True, which is not an integer."),
    ({"dp": 0}, "mesh 'dp=0': axis 'dp' has size 0; a size is 1 or more."),
    *(
        (value, "a mesh is a string such as 'dp=2,tp=2', a dict, a named DeviceMesh or an autopar.Mesh, not "
         f"{type(value).__name__}.")
        for value in (4, None, [("dp", 2)])
    ),
]  # fmt: skip


@pytest.mark.parametrize("text", MESHES)
def test_mesh_strings(text: str) -> None:
    refused(MeshError, MESHES[text], lambda: compiled(text))
    refused(MeshError, MESHES[text], lambda: verify(nn.Linear(2, 2), text, batch=torch.zeros(4, 2)))


@pytest.mark.parametrize(("mesh", "message"), NOT_MESHES)
def test_what_is_no_mesh(mesh: object, message: str) -> None:
    refused(MeshError, message, lambda: compiled(mesh))


@pytest.mark.parametrize("mesh", ["et=2", "dp=2,pipeline=2"])
def test_axes_without_a_meaning(mesh: str) -> None:
    axis = mesh.split(",")[-1].split("=")[0]
    with pytest.raises(MeshError, match=f"^mesh '{mesh}': axis '{axis}' has no meaning; known axes are .*dp.*tp.*"):
        compiled(mesh)


def test_a_mesh_is_refused_before_the_model_runs() -> None:
    """A capture takes seconds for a large model."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        raise AssertionError("the model was captured")

    for mesh in ("et=2", "dp=0", "dp=2,dp=2"):
        with pytest.raises(MeshError):
            compile(nn.Linear(4, 4), mesh, loss_fn=loss_fn, batch=(torch.randn(4, 4),))


@pytest.mark.parametrize(
    ("mesh", "world", "message"),
    [
        ("dp=2,tp=2", 3, "mesh 'dp=2,tp=2' has 4 ranks, but 3 are running. Start 4 (autopar run, or torchrun "
         "--nproc-per-node=4), or write -1 for the axis that takes the rest."),
        ("dp=2", 1, "mesh 'dp=2' has 2 ranks, but 1 is running. Start 2 (autopar run, or torchrun "
         "--nproc-per-node=2), or write -1 for the axis that takes the rest."),
        ("dp=-1,tp=4", 6, "mesh 'dp=-1,tp=4': the other axes need a multiple of 4 ranks, but there are 6. "
         "Their product may be 1, 2, 3 or 6 here."),
    ],
)  # fmt: skip
def test_mesh_against_the_number_of_ranks(mesh: str, world: int, message: str) -> None:
    refused(MeshError, message, lambda: parse_mesh(mesh, world))


def test_the_open_axis_takes_the_rest() -> None:
    assert str(parse_mesh("dp=-1,tp=2", 6)) == "dp=3,tp=2" and str(parse_mesh({"dp": 2, "tp": -1}, 8)) == "dp=2,tp=4"


# Sizes


@pytest.mark.parametrize(
    ("rows", "mesh", "message"),
    [
        (7, "dp=2", "the batch has 7 samples (dim 0 of [7, 16], [7, 8]), which axis 'dp' (size 2) cannot divide. "
         "Use a batch size that is a multiple of 2, or a dp of 1 or 7."),
        (6, "dp=4,tp=2", "the batch has 6 samples (dim 0 of [6, 16], [6, 8]), which axis 'dp' (size 4) cannot divide. "
         "Use a batch size that is a multiple of 4, or a dp of 1, 2, 3 or 6."),
        (1, "dp=2", "the batch has 1 samples (dim 0 of [1, 16], [1, 8]), which axis 'dp' (size 2) cannot divide. "
         "Use a batch size that is a multiple of 2, or a dp of 1."),
    ],
)  # fmt: skip
def test_indivisible_batches(rows: int, mesh: str, message: str) -> None:
    refused(BatchError, message, lambda: compiled(mesh, rows=rows))


def test_a_condition_that_is_no_batch() -> None:
    """It comes first, and is not taken for the batch; where that cannot be split it is named."""
    layer = nn.Bilinear(5, 6, 3)
    batch = torch.randn(1, 5), torch.randn(8, 6), torch.randn(8, 3)

    def loss(model: nn.Module, condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(condition.expand(len(x), -1), x) - y).square().mean()

    assert autopar.verify(layer, "dp=2", loss_fn=loss, batch=batch, microbatches=2).ok
    message = (
        "the batch has 8 samples (dim 0 of [8, 6], [8, 3]), which axis 'dp' (size 3) cannot divide. Use a batch size "
        "that is a multiple of 3, or a dp of 1, 2, 4 or 8. [1, 5] has another number of rows, and is whole on every "
        "rank: if it is the batch, say so with batch_dims= (None for a condition that counts no samples); where the "
        "samples cannot be split, split parameters with shard= over another axis."
    )
    refused(BatchError, message, lambda: autopar.compile(layer, "dp=3", loss_fn=loss, batch=batch))


@pytest.mark.parametrize("batch", [(4,), (torch.tensor(3.0),)])
def test_a_batch_that_cannot_be_split(batch: tuple[Any, ...]) -> None:
    message = (
        "axis 'dp' (size 2) splits the batch, but the batch holds no tensor with a dim to split. Pass what the step "
        "works on as a tensor with a row for each sample, and not by a buffer or a global. Or leave 'dp' out, for axes "
        "that split the model (tp, pp)."
    )
    loss: Callable[..., Tensor] = lambda model, n: (model(torch.ones(2, 4)) * n).sum()  # noqa: E731
    refused(BatchError, message, lambda: compile(nn.Linear(4, 4), "dp=2", loss_fn=loss, batch=batch))


def test_weights_that_no_axis_can_split() -> None:
    message = (
        "axis 'tp' (size 2) can split no weight of the model:\n"
        "  '0.weight' [13, 7]: dim 0 (size 13) is not divisible by 2: 1 or 13 would do; "
        "dim 1 (size 7) is not divisible by 2: 1 or 7 would do\n"
        "  '2.weight' [11, 13]: dim 0 (size 11) is not divisible by 2: 1 or 11 would do; "
        "dim 1 (size 13) is not divisible by 2: 1 or 13 would do\n"
        "  '4.weight' [5, 11]: dim 0 (size 5) is not divisible by 2: 1 or 5 would do; "
        "dim 1 (size 11) is not divisible by 2: 1 or 11 would do\n"
        "Leave 'tp' out of the mesh (dp takes its ranks), or give a weight a size that 2 divides."
    )
    refused(LayoutError, message, lambda: compiled("tp=2", "odd_mlp"))


def test_a_weight_that_stays_whole_is_noted() -> None:
    """37 words and 35 wide with 5 heads: only the MLP can be split by 4, and the user is told."""
    notes = compiled("tp=4", "odd_gpt").notes
    assert "'tokens.weight' [37, 35] stays replicated on 'tp'" in notes
    assert not any("mlp" in note for note in notes)


# Layouts

SHARDS: list[tuple[dict[str, Any], str]] = [
    ({"zz": "[tp,-]"}, "shard pattern 'zz' matches no parameter. Nearest names: 0.weight, 0.bias, 2.weight."),
    ({"*.weigth": "[tp,-]"}, "shard pattern '*.weigth' matches no parameter. "
     "Nearest names: 0.weight, 4.weight, 2.weight."),
    ({"0.weight": "[tp]"}, "'0.weight' has 2 dims [32, 16], but layout [tp] has 1. "
     'From shard={"0.weight": "[tp]"}, used at models.py:LINE.'),
    ({"0.bias": "[-,-]"}, "'0.bias' has 1 dims [32], but layout [-,-] has 2. "
     'From shard={"0.bias": "[-,-]"}, used at models.py:LINE.'),
    ({"0.weight": "[xx,-]"}, "'0.weight': layout [xx,-] names axis 'xx', but mesh 'dp=2,tp=2' has dp, tp. "
     'From shard={"0.weight": "[xx,-]"}, used at models.py:LINE.'),
    ({"0.weight": "[tp,tp]"}, "shard pattern '0.weight': layout '[tp,tp]' uses axis 'tp' twice: "
     "an axis splits one dim only."),
    ({"0.weight": "[tp:dp:tp,-]"}, "shard pattern '0.weight': layout '[tp:dp:tp,-]' uses axis 'tp' twice: "
     "an axis splits one dim only."),
    ({"0.weight": "[tp,-"}, "shard pattern '0.weight': cannot read layout '[tp,-': "
     "write it like '[dp,-,tp]' or '[-,-] partial(tp)'."),
    ({"0.weight": "[tp:2,-]"}, "shard pattern '0.weight': layout '[tp:2,-]': 'tp:2' ends in an integer; "
     "what follows the last axis is not written."),
    ({"0.weight": "[1:tp,-]"}, "shard pattern '0.weight': layout '[1:tp,-]': '1' is neither an axis name, "
     "an integer above 1 nor '-'."),
    ({"0.weight": 3}, "shard pattern '0.weight': 3 is a int, not a layout such as '[tp,-]'."),
    ({"0.weight": "[-,-] partial(tp)"}, "'0.weight': a parameter cannot be partial, as layout [-,-] partial(tp) says. "
     'From shard={"0.weight": "[-,-] partial(tp)"}, used at models.py:LINE.'),
    ({"4.weight": "[-,5:tp]"}, "'4.weight' dim 1 (size 24) cannot be split over '5:tp' (5 x 2 = 10). "
     'From shard={"4.weight": "[-,5:tp]"}, used at models.py:LINE. No size of tp would do: 24 is not divisible by 5.'),
    ({"4.weight": "[-,8:tp]"}, "'4.weight' dim 1 (size 24) cannot be split over '8:tp' (8 x 2 = 16). "
     'From shard={"4.weight": "[-,8:tp]"}, used at models.py:LINE. tp may be 1 or 3 here.'),
    ({"0.weight": "[tp,-]", "*.weight": "[-,tp]"}, "'0.weight' is given two layouts: [tp,-] by shard pattern "
     "'0.weight' and [-,tp] by '*.weight'. Keep one of them."),
    # all faults at once
    ({"0.weight": "[tp]", "zz": "[-]", "2.bias": "[5:tp]"}, "'0.weight' has 2 dims [32, 16], but layout [tp] has 1. "
     'From shard={"0.weight": "[tp]"}, used at models.py:LINE.\n'
     "shard pattern 'zz' matches no parameter. Nearest names: 0.weight, 0.bias, 2.weight.\n"
     "'2.bias' dim 0 (size 24) cannot be split over '5:tp' (5 x 2 = 10). From shard={\"2.bias\": \"[5:tp]\"}, "
     "used at models.py:LINE. No size of tp would do: 24 is not divisible by 5."),
]  # fmt: skip


@pytest.mark.parametrize(("shard", "message"), SHARDS)
def test_shard_patterns(shard: dict[str, Any], message: str) -> None:
    line = line_of(models.square_loss, "mse_loss(model(x)")
    refused(LayoutError, message.replace("LINE", str(line)), lambda: compiled("dp=2,tp=2", shard=shard))


def test_a_size_that_an_axis_cannot_divide() -> None:
    line = line_of(models.square_loss, "mse_loss(model(x)")
    message = (
        "'4.weight' dim 0 (size 8) cannot be split over axis 'tp' (size 3). "
        f'From shard={{"4.weight": "[tp,-]"}}, used at models.py:{line}. tp may be 1, 2, 4 or 8 here.'
    )
    refused(LayoutError, message, lambda: compiled("tp=3", shard={"4.weight": "[tp,-]"}))


def test_conflicting_layouts_of_tied_parameters() -> None:
    message = (
        "'tokens.weight' is given two layouts: [tp,-] by shard pattern 'tokens.weight' and [-,tp] by 'head.weight' "
        "('tokens.weight' and 'head.weight' are one tied parameter). Keep one of them."
    )
    shard = {"tokens.weight": "[tp,-]", "head.weight": "[-,tp]"}
    refused(LayoutError, message, lambda: compiled("tp=2", "gpt", shard=shard))


def test_a_layout_of_either_tied_name_holds_for_both() -> None:
    layouts = compiled("tp=2", "gpt", shard={"head.weight": "[-,tp]"}).layouts
    assert str(layouts["tokens.weight"]) == "[-,tp]" and "head.weight" not in layouts
