"""`specialize=True`: values read from tensors are taken from the example batch, and checked at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from shares import pairs
from torch import Tensor, nn

import autopar
from autopar.capture.data.reads import Read
from autopar.errors import BatchError, CaptureError
from autopar.parallel.programs import programs

LINE = __file__


class Masked(nn.Module):
    """As models of transformers do: a mask that leaves everything in is not applied."""

    def __init__(self, body: Callable[[Masked, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.down(F.gelu(self.body(self, x, mask)))


def branch(model: Masked, x: Tensor, mask: Tensor) -> Tensor:
    h = model.up(x)
    if mask.all():
        return h
    return h * mask.unsqueeze(-1)


def numbers(model: Masked, x: Tensor, mask: Tensor) -> Tensor:
    """Several reads: a length, a sum that scales, a loop."""
    x = x[:, : int(mask.sum(1).max())]
    scale = mask.float().mean().item()
    for _ in range(int(mask[0, 0]) + 1):
        x = x * scale
    h = model.up(x)
    return F.pad(h, (0, 0, 0, mask.shape[1] - h.shape[1]))


def asserted(model: Masked, x: Tensor, mask: Tensor) -> Tensor:
    """The read stands behind an `except Exception`, and in-place ops before it."""
    h = model.up(x)
    seen = mask.clone()
    seen[:, 0] = 1
    try:
        assert (seen.sum(1) > 0).all()
    except Exception:
        h = h * 0
    return h * mask.unsqueeze(-1)


def of_weight(model: Masked, x: Tensor, mask: Tensor) -> Tensor:
    h = model.up(x)
    return h * float(h.abs().max())


def of_chance(model: Masked, x: Tensor, mask: Tensor) -> Tensor:
    h = model.up(x)
    return h * float(torch.rand(()) + x.mean())


def loss_fn(model: nn.Module, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return (model(x, mask) - y).square().mean()


def batch(hidden: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    mask = torch.ones(6, 5, dtype=torch.int64)
    mask[:, 5 - hidden :] = 0
    return torch.randn(6, 5, 8) * torch.arange(1, 7).view(-1, 1, 1), mask, torch.randn(6, 5, 4)


def model(body: Callable[..., Tensor] = branch) -> Masked:
    torch.manual_seed(1)
    return Masked(body)


@pytest.mark.parametrize(
    ("body", "mesh", "hidden"),
    list(pairs((branch, numbers, asserted), ("dp=2,tp=2", "dp=3", "dp=2,tp=3"), (0, 2))),
)
def test_the_numbers_are_those_of_one_device(body: Any, mesh: str, hidden: int) -> None:
    """Every body on every mesh, and with each of the two; all three together in `make test-all`."""
    report = autopar.verify(model(body), mesh, loss_fn=loss_fn, batch=batch(hidden), specialize=True)
    assert report.ok and report.max_error < 1e-10, report


def test_each_value_is_noted_and_leaves_as_a_guard() -> None:
    found = autopar.compile(model(numbers), "dp=3", loss_fn=loss_fn, batch=batch(), specialize=True)
    assert [out.kind for out in found.program.outputs].count("guard") == 3
    taken = [note for note in found.notes if "is taken as" in note]
    assert [note.partition(" is taken as ")[2].partition(",")[0] for note in taken] == ["3", "0.6000000238418579", "1"]
    assert all(f"{LINE}:" in note for note in taken)
    assert not [out for out in autopar.compile(model(), "dp=2", loss_fn=lambda m, x, y: m.up(x).sum(),
                                               batch=batch()[:2], specialize=True).program.outputs
                if out.kind == "guard"]  # fmt: skip


def plain_gradients(given: tuple[Tensor, Tensor, Tensor], body: Any = branch) -> tuple[Tensor, dict[str, Tensor]]:
    plain = model(body).double()
    loss = loss_fn(plain, *given)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def double(hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    x, mask, y = batch(hidden)
    return x.double(), mask, y.double()


def _alternating(rank: int, mesh: str, body: Any, options: dict[str, Any]) -> list[int]:
    """Every loss and gradient, with how many programs there are after each step."""
    parallel = autopar.parallelize(model(body).double(), mesh, loss_fn=loss_fn, specialize=True, **options)
    counts = []
    for hidden in (2, 0, 2, 0, 0, 1, 2, 1):
        parallel.zero_grad()
        loss = parallel.forward_backward(*double(hidden))
        want, gradients = plain_gradients(double(hidden), body)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)  # `numbers` scales by a float32
        found = parallel.full_gradients()
        for name, value in gradients.items() if rank == 0 else ():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)
        counts.append(len(parallel.programs))
    return counts


def test_a_batch_with_another_value_has_a_program_of_its_own() -> None:
    assert _alternating(0, "dp=1", branch, {}) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_a_program_is_found_by_the_values_that_lead_to_it() -> None:
    assert _alternating(0, "dp=1", numbers, {}) == [1, 2, 2, 2, 2, 3, 3, 3]


def test_beyond_the_most_programs_a_batch_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "VALUES", 1)
    parallel = autopar.parallelize(model(), "dp=1", loss_fn=loss_fn, specialize=True)
    parallel.forward_backward(*batch(2))
    gradients, steps = parallel.full_gradients(), parallel.random_state.steps
    with pytest.raises(BatchError) as caught:
        parallel.forward_backward(*batch(0))
    text = str(caught.value)
    assert text.startswith(f"bool() of a tensor at {LINE}:") and "if mask.all():" not in text
    assert "is True for this batch, but the program was compiled for False, as in the example" in text
    assert "1 programs were compiled for other values already. Nothing was changed by this step." in text
    assert parallel.random_state.steps == steps
    for name, value in parallel.full_gradients().items():
        assert torch.equal(value, gradients[name])
    torch.testing.assert_close(parallel(*batch(2)[:2]), model()(*batch(2)[:2]))
    with pytest.raises(BatchError):
        parallel(*batch(0)[:2])


def test_a_value_that_no_program_meets_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float that is summed in another order than at the capture is not compiled for again and again."""
    monkeypatch.setattr(Read, "is_", lambda *_: False)
    parallel = autopar.parallelize(model(), "dp=1", loss_fn=loss_fn, specialize=True)
    with pytest.raises(BatchError, match="It was compiled for this very batch"):
        parallel.forward_backward(*batch(2))
    assert len(parallel.programs) == 1


def test_the_branch_is_the_examples() -> None:
    """With nothing hidden the mask is read, and multiplied by nowhere."""
    texts = [
        autopar.compile(model(), "dp=2", loss_fn=loss_fn, batch=batch(hidden), specialize=True).text()
        for hidden in (0, 2)
    ]
    assert ["unsqueeze" in text for text in texts] == [False, True]
    assert all("guard" in text for text in texts)


@pytest.mark.parametrize(
    ("body", "what"),
    [(of_weight, "a value that is read from a tensor and depends on parameter 'up.weight': each step has another"),
     (of_chance, "a value that is read from a tensor and depends on random numbers: each step has another")],
)  # fmt: skip
def test_what_changes_with_each_step_is_refused(body: Any, what: str) -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(model(body), "dp=2", loss_fn=loss_fn, batch=batch(), specialize=True)
    assert what in str(caught.value) and f"{LINE}:" in str(caught.value)


def test_without_data_there_is_no_value() -> None:
    with torch.device("meta"):
        x, mask, y = torch.empty(6, 5, 8), torch.empty(6, 5, dtype=torch.int64), torch.empty(6, 5, 4)
    with pytest.raises(CaptureError) as caught:
        autopar.compile(model(numbers), "dp=2", loss_fn=loss_fn, batch=(x, mask, y), specialize=True)
    assert "batch tensor '1', on which it depends, has no data" in str(caught.value)


def test_it_is_offered_and_never_taken_by_itself() -> None:
    with pytest.raises(CaptureError, match="specialize=True takes the value from the example batch"):
        autopar.compile(model(numbers), "dp=2", loss_fn=loss_fn, batch=batch())


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {}), ("pp=2", {"microbatches": 2}), ("tp=2", {})])
def test_all_ranks_take_the_same_program(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    first, second = two.run(_alternating, mesh, branch, options, timeout=120)
    assert first == second == [1, 2, 2, 2, 2, 2, 2, 2]
