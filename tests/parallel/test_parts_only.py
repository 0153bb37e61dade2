"""No rank ever holds more than its parts and one whole parameter, from `parallelize` to the end of training."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.errors import CaptureError
from autopar.parallel.weights.distribute import SMALL
from autopar.report.memory.track import Tracker
from autopar.torch_compat import FakeTensor, local_of

WIDTH, ROWS = 256, 2048


class Stack(nn.Module):
    """Parameters of which most are too large to wait whole, one among them that no axis divides."""

    def __init__(self, layers: int = 6, odd: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS + odd, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, ROWS + odd, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


BATCH = torch.arange(64).view(8, 8)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def sizes(model: nn.Module) -> tuple[int, int]:
    """The bytes of all parameters, and of the largest."""
    found = [p.numel() * p.element_size() for p in model.parameters()]
    return sum(found), max(found)


def held(model: nn.Module) -> int:
    """The bytes of this rank's parts."""
    return sum(local_of(p).untyped_storage().nbytes() for p in model.parameters())


@pytest.fixture(params=[0, 5])
def eight(request: pytest.FixtureRequest) -> Iterator[int]:
    """One rank of eight whose group moves nothing."""
    dist.init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


MESHES = {
    "dp=8": {"zero": 3}, "dp=2,tp=4": {"zero": 3}, "pp=2,dp=4": {"zero": 3, "microbatches": 2}, "tp=8": {},
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_its_parts_after_parallelize(eight: int, mesh: str) -> None:
    plain = Stack()
    whole, largest = sizes(plain)
    model = autopar.parallelize(plain, mesh, loss_fn=loss_fn, **MESHES[mesh])
    small = sum(p.numel() * p.element_size() for p in model.parameters() if p.numel() < SMALL)
    assert held(model) <= (whole - small) / 8 + small
    assert held(model) < whole / 8 + largest / 8
    model.prepare(BATCH)
    assert held(model) <= whole / (8 if mesh != "pp=2,dp=4" else 4) + largest


class Real(Tracker):
    """Without what a capture computes on, which has no memory."""

    def _see(self, tensor: Tensor, kind: str = "", name: str = "") -> None:
        if not isinstance(tensor, FakeTensor):
            super()._see(tensor, kind, name)


SOURCES = ("cpu", "meta", "files")
# Each source on each mesh, on one of the ranks by turns: each rank meets every source and every mesh.
IN_TURNS = [((0, 5)[(i + j) % 2], source, mesh) for i, source in enumerate(SOURCES) for j, mesh in enumerate(MESHES)]


@pytest.mark.parametrize(("eight", "source", "mesh"), IN_TURNS, indirect=["eight"])
def test_no_more_than_one_parameter_is_ever_whole(eight: int, mesh: str, source: str, tmp_path: Path) -> None:
    """All memory that is new on this rank, from `parallelize` to the end of the first compilation."""
    if source == "files":
        save(Stack(), tmp_path)
    plain = Stack() if source == "cpu" else on_meta(Stack)
    whole, largest = sizes(plain)
    gc.collect()
    with Real() as tracker:
        options: dict[str, Any] = {**MESHES[mesh], "weights": tmp_path if source == "files" else None}
        model = autopar.parallelize(plain, mesh, loss_fn=loss_fn, **options)
        at_once = tracker.peak_bytes()
        model.prepare(BATCH)
    assert at_once <= 1.05 * (whole / 8 + largest * 9 / 8)
    assert tracker.peak_bytes() <= 1.05 * (max(held(model), whole / 8) + largest * 9 / 8)


def test_a_llama_of_transformers_reads_its_parts(eight: int, tmp_path: Path) -> None:
    """Its frequencies, which no file holds, are those of rotary modules alone: no parameter is made for them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, vocab_size=ROWS, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    save(transformers.LlamaForCausalLM(config), tmp_path)
    plain = on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config))
    whole, largest = sizes(plain)
    gc.collect()
    with Real() as tracker:
        model = autopar.parallelize(
            plain, "fsdp=8", loss_fn=lambda m, x: m(input_ids=x, labels=x).loss, zero=3, weights=tmp_path
        )
        at_once = tracker.peak_bytes()
    assert held(model) <= 1.05 * whole / 8 and at_once <= 1.05 * whole / 8 + largest


def test_what_the_user_had_is_given_up_one_by_one(eight: int) -> None:
    """A model in this process's memory and its parts are never there together."""
    plain = Stack()
    whole, largest = sizes(plain)
    with Real() as tracker:
        for parameter in plain.parameters():
            tracker.add(parameter.detach(), "given")
        model = autopar.parallelize(plain, "dp=8", loss_fn=loss_fn, zero=3)
        assert tracker.total <= 1.05 * held(model)
    assert tracker.peak_bytes() <= 1.05 * (whole + largest / 8)


@pytest.mark.parametrize("mesh", ["dp=8", "dp=2,tp=4"])
def test_a_size_that_no_axis_divides_costs_one_more_copy_of_that_parameter(eight: int, mesh: str) -> None:
    plain = on_meta(lambda: Stack(odd=1))
    whole, largest = sizes(plain)
    with Real() as tracker:
        model = autopar.parallelize(plain, mesh, loss_fn=loss_fn, zero=3)
        model.prepare(BATCH)
    assert tracker.peak_bytes() <= 1.05 * (max(held(model), whole / 8) + largest * 17 / 8)


def save(model: nn.Module, folder: Path) -> None:
    """As `save_pretrained` does: two files, a tied tensor once."""
    safetensors = pytest.importorskip("safetensors.torch")
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != "head.weight"}
    names = sorted(state)
    for at, half in enumerate((names[::2], names[1::2])):
        safetensors.save_file({name: state[name] for name in half}, folder / f"model-{at}.safetensors")


# -- the values -----------------------------------------------------------------------------------------------------


def by_hand(make: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    """What one device gives a meta model."""
    model = on_meta(make).to_empty(device="cpu")
    model.head.weight = model.tokens.weight
    torch.manual_seed(seed)
    for module in reversed(list(model.modules())):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    if hasattr(model, "_init_weights"):
        for module in reversed(list(model.modules())):
            model._init_weights(module)
    return model.state_dict()


class Odd(Stack):
    """Rows that no axis divides, and a module that reads the memory of its weights."""

    def __init__(self) -> None:
        super().__init__(layers=1, odd=1)
        self.layers.append(Reading())


class Reading(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.weight.is_meta:  # while it is built
            return
        with torch.no_grad():
            self.weight.mul_(float(abs(self.weight.numpy()).max()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :WIDTH]


class Scale(nn.Module):
    """As norms of transformers: it has a weight, and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Initialised(Stack):
    """As models of transformers: what a layer is given is the model's to say."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.layers.append(Scale())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Scale):
            nn.init.ones_(module.weight)


def equal(rank: int, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if rank == 0:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def _reset(rank: int, mesh: str) -> None:
    for make in (Stack, Odd, Initialised):
        made = autopar.parallelize(on_meta(make), mesh, seed=7, loss_fn=loss_fn)
        equal(rank, made.full_state_dict(), by_hand(make, 7))


def _unlike(rank: int, on_first: bool) -> None:
    torch.manual_seed(3)
    plain = Stack(layers=1)
    expected = by_hand(lambda: Stack(layers=1), 7) if on_first else copy.deepcopy(plain.state_dict())
    given = on_meta(lambda: Stack(layers=1)) if (rank == 0) == on_first else plain
    made = autopar.parallelize(given, "dp=2,tp=2", seed=7, loss_fn=loss_fn)
    equal(rank, made.full_state_dict(), expected)


@pytest.mark.gloo
@pytest.mark.parametrize("on_first", [False, True])
def test_what_the_first_rank_has_counts(four: Ranks, on_first: bool) -> None:
    """One rank loads a model, and the others have it on the meta device; or the other way round."""
    four.run(_unlike, on_first)


def _read(rank: int, mesh: str, folder: str) -> None:
    made = autopar.parallelize(on_meta(Odd), mesh, loss_fn=loss_fn, weights=folder)
    torch.manual_seed(3)
    plain = Odd()
    equal(rank, made.full_state_dict(), plain.state_dict())
    expected, found = loss_fn(plain, BATCH), made.forward_backward(BATCH)
    torch.testing.assert_close(found, expected)
    equal(rank, made.full_state_dict(), plain.state_dict())


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "pp=2,dp=2", "dp=4"])
def test_split_tensors_reset_to_the_values_of_one_device(four: Ranks, mesh: str) -> None:
    four.run(_reset, mesh)


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=4"])
def test_each_rank_reads_its_parts_of_files(four: Ranks, mesh: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    save(Odd(), tmp_path)
    four.run(_read, mesh, str(tmp_path))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    save(Stack(layers=1), tmp_path)
    with pytest.raises(CaptureError) as error:
        autopar.parallelize(on_meta(lambda: Stack(layers=2, odd=1)), "dp=1", weights=tmp_path)
    assert str(error.value) == (
        f"weights='{tmp_path}' does not fit the model: 'tokens.weight' is [2048, 256] there and [2049, 256] in the "
        f"model; 'layers.1.0.weight', 'layers.1.0.bias', 'layers.1.1.weight' and 3 more are on the meta device and in "
        f"no file (give files that have them, or build them on a real device)."
    )


def _states(rank: int) -> None:
    """Adagrad makes its states when it is made."""
    torch.manual_seed(3)
    plain, start = Stack(layers=1), Stack(layers=1)
    start.load_state_dict(plain.state_dict())
    model = autopar.parallelize(start, "tp=4", loss_fn=loss_fn)
    theirs, ours = (torch.optim.Adagrad(m.parameters(), initial_accumulator_value=0.1) for m in (plain, model))
    for _ in range(2):
        loss_fn(plain, BATCH).backward()
        model.forward_backward(BATCH)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    for p, states in ours.state.items():
        assert states["sum"].place is p.place
    found = model.full_state_dict()
    for name, value in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(found[name], value)


@pytest.mark.gloo
def test_states_of_before_the_first_program_go_along(four: Ranks) -> None:
    four.run(_states)
