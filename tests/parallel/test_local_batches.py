"""Batches of which every rank has a part (batch="local"): the step is that of all parts together, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import local_cases
import pytest
import torch
from local_cases import GRADED, RIGHT, Local
from local_refusals import REFUSED, UNLIKE
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BatchError

pytestmark = pytest.mark.gloo
SIZES = ((4, 4), (5, 3), (8, 0))
FOUR = (
    ("tokens", "dp=2,tp=2", ((5, 3), (4, 4)), {}),
    ("tokens", "pp=2,dp=2", ((4, 4), (5, 3)), {"microbatches": 2}),
    ("batch norm", "dp=2,fsdp=2", ((2, 2, 2, 2), (3, 1, 4, 0)), {}),
    ("encoder", "dp=2,tp=2", ((4, 4), (3, 5)), {"microbatches": 2}),
    ("mrope, said", "dp=4", ((1, 2, 3, 2), (2, 2, 2, 2)), {"zero": 2}),
    ("mlp", "dp=2,cp=2", ((4, 4), (1, 7)), {}),
)


def parallel(case: Local, plain: nn.Module, mesh: str, **options: Any) -> Any:
    return autopar.parallelize(
        copy.deepcopy(plain), mesh, loss_fn=case.loss, batch="local", batch_dims=case.said, **options
    )


def plain_of(case: Local) -> nn.Module:
    torch.manual_seed(1)
    return case.make().double()


def call(case: Local, function: Any, batch: tuple[Any, ...]) -> Any:
    if case.kwargs is None:
        return function(*batch)
    return function(**{name: batch[at] for name, at in case.kwargs.items()})


def close(given: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(given.detach(), wanted.detach(), rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")


def own(value: Tensor, case: Local, sizes: tuple[int, ...], place: int) -> Tensor:
    """A rank's rows of what the plain module gives for the whole batch."""
    return value.split(sizes, case.dims[0] or 0)[place] if value.ndim else value


def check(name: str, case: Local, mesh: str, steps: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> None:
    """Train on parts of these sizes, and beside it plainly on the whole batch; then evaluate."""
    plain = plain_of(case)
    model = parallel(case, plain, mesh, **options)
    place = model._session.world.place
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain)]
    for sizes in steps:
        loss = call(case, model.forward_backward, case.part(sizes, place))
        wanted = call(case, plain if case.loss is None else lambda *batch: case.loss(plain, *batch), case.batch)
        wanted, *aux = wanted if isinstance(wanted, tuple) else (wanted,)
        wanted.backward()
        close(loss, wanted, f"{name}: loss")
        for given, value in zip(_tuple(model.last_aux) if aux else (), aux, strict=True):
            close(given, own(value, case, sizes, place), f"{name}: aux")
        for (path, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(p.grad.full_tensor(), q.grad, f"{name}: gradient of {path}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (path, given), value in zip(model.named_buffers(), plain.buffers(), strict=True):
        close(given, value, f"{name}: buffer {path}")
    if not case.takes:
        return
    model.eval()
    plain.eval()
    for sizes in steps[-1:]:
        part = case.part(sizes, place)[: case.takes]
        wanted = plain(*case.batch[: case.takes])
        close(model(*part), own(wanted, case, sizes, place), f"{name}: rows of this rank")
        close(model(*part, whole=True), wanted, f"{name}: whole")


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _right(rank: int) -> list[str]:
    failed = []
    for name, case in RIGHT.items():
        try:
            check(name, case, "dp=2", SIZES, {})
        except (AssertionError, AutoparError) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def test_the_parts_of_all_ranks_are_one_batch(two: Ranks) -> None:
    """With as many samples on each rank, with unlike numbers, and with none on one."""
    assert two.run(_right) == [[], []]


def _four(rank: int) -> list[str]:
    failed = []
    for name, mesh, steps, options in FOUR:
        try:
            check(f"{name} on {mesh}", RIGHT[name], mesh, steps, options)
        except (AssertionError, AutoparError) as error:
            failed.append(f"{name} on {mesh}: {type(error).__name__}: {error}")
    return failed


def test_parts_on_other_meshes(four: Ranks) -> None:
    """Several axes of the batch, beside weights that are split, in stages, micro-batches and with ZeRO."""
    assert four.run(_four) == [[]] * 4


def _refused(rank: int) -> dict[str, str]:
    found = {}
    for name, (case, _) in REFUSED.items():
        model = parallel(case, plain_of(case), "dp=2")
        before = {path: p.detach().to_local().clone() for path, p in model.named_parameters()}
        try:
            call(case, model.forward_backward, case.part((4, 4), rank))
        except AutoparError as error:
            found[name] = str(error)
        else:
            found[name] = "nothing"
        assert not model.programs
        for path, p in model.named_parameters():
            assert torch.equal(p.detach().to_local(), before[path]), path
    return found


def test_what_may_be_mistaken_is_refused_on_every_rank(two: Ranks) -> None:
    """Before anything changes, with the line to write."""
    for found in two.run(_refused):
        assert found == {name: text for name, (_, text) in REFUSED.items()}


def _unlike(rank: int) -> dict[str, str]:
    found = {}
    for name, (case, change, _) in UNLIKE.items():
        model = parallel(case, plain_of(case), "dp=2")
        try:
            call(case, model.forward_backward, change(case.part((4, 4), rank), rank))
        except AutoparError as error:
            found[name] = str(error)
        else:
            found[name] = "nothing"
    return found


def test_what_ranks_share_is_compared(two: Ranks) -> None:
    """And of what they do not share all but the number of samples."""
    for found in two.run(_unlike):
        assert found == {name: text for name, (*_, text) in UNLIKE.items()}


def _one_after_the_other(rank: int) -> list[str]:
    """Sizes as an epoch has them: the last batch is smaller, has a number of samples that dp does not divide, and as
    many as there are features; what was found for the first one stays."""
    plain = plain_of(GRADED)
    model, found = parallel(GRADED, plain, "dp=2"), []
    for sizes in ((4, 4), (3, 2), (1, 1), (6, 1), (0, 1), (4, 4)):
        begins = [sum(sizes[:rank]), sum(sizes[: rank + 1])]
        x, y = (value[: sum(sizes)] for value in GRADED.batch)
        loss = model.forward_backward(*(value[begins[0] : begins[1]] for value in (x, y)))
        wanted, out, _ = local_cases.square(plain, x, y)
        close(loss, wanted, str(sizes))
        close(model.last_aux[0], out[begins[0] : begins[1]], str(sizes))
        found.append(str(len(model.programs)))
    return found


def test_an_epoch_of_unlike_parts(two: Ranks) -> None:
    assert two.run(_one_after_the_other) == [["1", "2", "3", "4", "5", "5"]] * 2


def _first_odd(rank: int) -> None:
    plain = plain_of(GRADED)
    model = parallel(GRADED, plain, "dp=2", zero=1)
    batch = tuple(value[:7] for value in GRADED.batch)
    loss = model.forward_backward(*(value.split((4, 3))[rank] for value in batch))
    close(loss, local_cases.square(plain, *batch)[0], "7 samples")


def test_the_first_batch_may_have_samples_that_dp_does_not_divide(two: Ranks) -> None:
    two.run(_first_odd)


class Whole(nn.Module):
    """Has an argument of the name that says which rows come back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = local_cases.mlp()

    def forward(self, x: Tensor, whole: bool = False) -> Tensor:
        return 2 * self.net(x) if whole else self.net(x)


def _own_keyword(rank: int) -> None:
    plain = plain_of(Local(Whole, None, (), ()))
    model = autopar.parallelize(copy.deepcopy(plain), "dp=2", loss_fn=local_cases.square, batch="local")
    x = GRADED.part((5, 3), rank)[0]
    close(model(x, whole=True), plain(x, whole=True), "the user's own")
    close(model(x), plain(x), "rows of this rank")


def test_whole_is_the_users_own_where_they_have_it(two: Ranks) -> None:
    two.run(_own_keyword)


def _other_numbers(rank: int) -> str:
    model = parallel(GRADED, plain_of(GRADED), "dp=2")
    x, y = GRADED.part((4, 4), rank)
    model.forward_backward(x, y)
    try:
        model.forward_backward(x, y[:3])
    except BatchError as error:
        return str(error)
    return "nothing"


def test_what_was_found_has_to_fit_later_batches(two: Ranks) -> None:
    for said in two.run(_other_numbers):
        assert said == (
            'batch="local" took these dims for those that count samples, since they were alike in an earlier call; now '
            "there are 4 in dim 0 of argument 0, 3 in dim 0 of argument 1. If that is meant, say so: batch_dims=(0, 0)."
        )


class WithTable(nn.Module):
    """Reads a tensor that is no buffer, and a number that a loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table, self.factor = local_cases.mlp(), torch.linspace(0.5, 2, 4, dtype=torch.float64), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.table[0] * self.factor


def _one_rank_knows_its_size(rank: int, batch: str) -> None:
    """One rank has a program for as many samples as it is given, and the other none."""
    plain = plain_of(Local(WithTable, None, (), ()))
    plain.table = torch.linspace(0.5, 2, 4, dtype=torch.float64)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=2", loss_fn=local_cases.square, batch=batch)  # type: ignore[arg-type]
    for sizes, factor in (((4, 4), 1.0), ((4, 2), 1.0), ((4, 4), 2.0), ((4, 3), 2.0), ((2, 4), 1.0)):
        plain.factor = model.factor = factor
        parts = [value[: sum(sizes)].split(sizes) for value in GRADED.batch]
        loss = model.forward_backward(*(part[rank] for part in parts))
        if batch == "local":
            wanted = local_cases.square(plain, *map(torch.cat, parts))[0]
        else:
            wanted = sum(local_cases.square(plain, *each)[0] for each in zip(*parts, strict=True)) / 2
        close(loss, wanted, str(sizes))


@pytest.mark.parametrize("batch", ["local", "ddp"])
def test_a_last_batch_that_is_short_on_one_rank(two: Ranks, batch: str) -> None:
    """What one rank found for as many samples on all of them is no difference between ranks."""
    two.run(_one_rank_knows_its_size, batch)
