"""`compile="inductor"`: the same numbers as one device in float32, from code that Inductor really wrote and ran."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mixtures import Kind, mixture_case
from models_special import hybrid
from processes import Ranks, ranks_of
from torch import Tensor, nn

import autopar
from autopar.capture.inputs.containers import take_call_apart
from autopar.compiler.lowered import collectives_of
from autopar.errors import BatchError, CompileError, RankError
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import op
from autopar.parallel.module import ParallelModule
from autopar.parallel.programs.portions import Given
from autopar.parallel.stepping import run_step
from autopar.runtime.compilers.functional import FunctionalCollectives
from autopar.runtime.compilers.inductor import InductorCode, InductorProgram
from autopar.runtime.executor.executor import Request
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import make_groups
from autopar.runtime.ranks.recorder import Recorder
from autopar.torch_compat import has_cpp_compiler
from autopar.verification.plain import Plain

TOLERANCE = 1e-5  # of float32
PARTS = ("loss", "gradient", "weight")
needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler (apt install g++)")


@pytest.fixture(scope="module", autouse=True)
def vector_instructions() -> None:
    """Inductor asks the compiler once a process what the machine can do: before a test puts another in its place."""
    if has_cpp_compiler():
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        assert pick_vec_isa() is not None


@pytest.fixture
def alone() -> Iterator[None]:
    """A test that trains in this process leaves no group behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# -- the numbers of one device --------------------------------------------------------------------------------------


def gpt() -> models.Case:
    """With dropout, and labels of which each rank counts another number."""
    torch.manual_seed(2)
    config = models.GPTConfig(models.VOCABULARY, models.TIME, layers=1, heads=4, width=32, dropout=0.1)
    return models.uneven(models.GPT(config)), models.token_loss, (models.tokens(), models.labels())


def tied_llama() -> models.Case:
    """RMSNorm, rotary positions, grouped heads, SwiGLU; the head is the table of the tokens."""
    torch.manual_seed(3)
    model = models.uneven(models.Llama(1, 32, 4, 2, 48, models.VOCABULARY, 2 * models.TIME))
    model.head.weight = model.tokens.weight
    return model, models.token_loss, (models.tokens(), models.labels())


class Tied(nn.Module):
    """The least with all kinds of a GPT's collectives on tp: a table that is also the head, a split layer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(models.VOCABULARY, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        h = h + F.dropout(self.down(F.gelu(self.up(h))), 0.1)
        return F.linear(h, self.tokens.weight)


def tied() -> models.Case:
    torch.manual_seed(4)
    return models.uneven(Tied()), models.token_loss, (models.tokens(), models.labels())


MAKE = {"gpt": gpt, "llama": tied_llama, "tied": tied, "hybrid": hybrid}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_close(got: dict[Any, Tensor], want: dict[Any, Tensor]) -> None:
    """Norm-wise per tensor, and for one that is small beside its kind (a key's bias) against the largest."""
    assert set(got) == set(want)
    largest = {part: max(float(v.norm()) for (kind, _), v in want.items() if kind == part) for part in PARTS}
    for (kind, name), value in want.items():
        error = float((got[kind, name] - value).norm())
        norm = max(float(value.norm()), 1e-2 * largest[kind])
        assert error <= TOLERANCE * norm, f"{kind} '{name}': off by {error:.2e}, norm {norm:.2e}"


def _train(rank: int, name: str, mesh: str, options: dict[str, Any]) -> tuple[list[str], int]:
    """Two steps beside the plain module; what the profiler saw of the second, and how many collectives there are."""
    plain_model, loss_fn, batch = MAKE[name]()
    plain = Plain(copy.deepcopy(plain_model), loss_fn, sgd)
    model = autopar.parallelize(plain_model, mesh, loss_fn=loss_fn, compile="inductor", seed=5, **options)
    model.prepare(*batch)
    optimizer = sgd(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        with torch.profiler.profile() as profile:
            loss = model.forward_backward(*batch)
        found = {("gradient", key): value for key, value in model.full_gradients().items()}
        optimizer.step()
        found |= {("weight", key): value for key, value in model.full_state_dict().items()}
        if rank == 0:
            found["loss", "loss"] = loss
            want = plain.step(batch, {}, torch.tensor([5, step]))
            for tied in {key for key in found if key not in want}:
                del found[tied]  # a state dict has both names of a tied weight
            assert_close(found, {key: value for key, value in want.items() if key[0] in PARTS})
    assert "async_compile.cpp_pybinding" in str(model.generated_code)
    return [event.name for event in profile.events()], len(list(collectives_of(model.prepare(*batch).program)))


def assert_inductor_ran(seen: tuple[list[str], int]) -> None:
    """Its code was called, and moved the data: not our executor."""
    events, collectives = seen
    assert sum("Call CompiledFxGraph" in event for event in events) == 1, sorted(set(events))
    started = [event for event in events if event.startswith("_c10d_functional::") and "wait" not in event]
    assert len(started) >= collectives  # a logsumexp is two
    assert "aten::gelu" not in events and "aten::silu" not in events  # fused


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_one_rank(name: str, alone: None) -> None:
    assert_inductor_ran(_train(0, name, "dp=1", {}))


@needs_compiler
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("tied", "tp=2", {}),  # Inductor's C++ takes the time: a GPT has many more kernels
        pytest.param("gpt", "tp=2", {}, marks=pytest.mark.slow),
        pytest.param("gpt", "dp=2", {}, marks=pytest.mark.slow),
        pytest.param("llama", "tp=2", {"sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("gpt", "dp=2", {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("hybrid", "cp=2", {}, marks=pytest.mark.slow),
        pytest.param("llama", "dp=2", {"zero": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp=2", {"zero": 3, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("gpt", "tp=2", {"recompute": "full", "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("llama", "cp=2", {"attention": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks(two: Ranks, name: str, mesh: str, options: dict[str, Any]) -> None:
    for seen in two.run(_train, name, mesh, options, timeout=400):
        assert seen[1] > 0
        assert_inductor_ran(seen)


@pytest.mark.slow
@needs_compiler
@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("dp=2,tp=2", {}), ("dp=2,cp=2", {"zero": 3})], ids=str)
def test_two_axes(four: Ranks, mesh: str, options: dict[str, Any]) -> None:
    for seen in four.run(_train, "gpt", mesh, options, timeout=500):
        assert_inductor_ran(seen)


def _wide(rank: int) -> str | None:
    torch.manual_seed(6)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1200, 1200), nn.Tanh())]  # 46 MB of gradients
    model = autopar.parallelize(nn.Sequential(*layers), "dp=2", loss_fn=models.square_loss, compile="inductor")
    model.prepare(torch.randn(12, 1200), torch.randn(12, 1200))
    return model.generated_code


@pytest.mark.slow
@needs_compiler
@pytest.mark.gloo
def test_gradients_are_reduced_while_others_are_computed(two: Ranks) -> None:
    """Buckets start between the products of the backward pass, and nobody waits before the last of these."""
    for code in two.run(_wide, timeout=400):
        calls = re.findall(r"^ +(?:torch\.ops\.\w+\.|extern_kernels\.)(all_reduce_|wait_tensor|mm)\b", str(code), re.M)
        last = len(calls) - calls[::-1].index("mm")
        assert calls[:last].count("all_reduce_") >= 2, calls
        assert "wait_tensor" not in calls[calls.index("all_reduce_") + 2 : last], calls


class Noisy(nn.Module):
    """Random ops other than dropout, and a buffer that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x + 0.1 * torch.randn_like(x)))
        return self.down(h * torch.bernoulli(torch.full_like(h, 0.5)))


def noisy(compile: str) -> tuple[ParallelModule, tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    model = autopar.parallelize(Noisy(), "dp=1", loss_fn=models.square_loss, seed=9, compile=compile)
    return model, (torch.randn(12, 16), torch.randn(12, 8))


@pytest.mark.slow
@needs_compiler
def test_random_ops_buffers_and_forward_are_those_of_the_executor(alone: None) -> None:
    (ours, batch), (model, _) = noisy("executor"), noisy("inductor")
    for _ in range(2):
        torch.testing.assert_close(model.forward_backward(*batch), ours.forward_backward(*batch), rtol=1e-6, atol=0)
    assert model.random_state.steps == 2
    for (name, want), got in zip(ours.full_state_dict().items(), model.full_state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(model.eval()(batch[0]), ours.eval()(batch[0]), rtol=1e-5, atol=1e-6)
    strided = torch.randn(16, 12).t()  # the code was written for contiguous batches
    torch.testing.assert_close(model(strided), ours(strided), rtol=1e-5, atol=1e-6)
    assert model.prepare(*batch).text() == ours.prepare(*batch).text()  # a way to run, not another program


# -- the collectives, one by one ------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Any, ...]] = {
    "all_reduce": ("sum",),
    "all_reduce max": ("max",),
    "all_reduce min": ("min",),
    "all_reduce logsumexp": ("logsumexp",),
    "all_gather": (1, 1),
    "all_gather outer": (1, 2),
    "reduce_scatter": (0, 1, "sum"),
    "reduce_scatter outer": (1, 2, "max"),
    "reduce_scatter logsumexp": (0, 1, "logsumexp"),
    "all_to_all": (0, 1, 1, 2),
    "shift": (1,),
    "shift back": (-1,),
    "shard": (1, 2),
    "keep_first": (),
}


def _both(rank: int, text: str, axis: str) -> None:
    """Each collective, functional and of the driver, on data that differs by rank."""
    mesh = parse_mesh(text)
    groups = make_groups(mesh, [axis])
    driver, functional = DistributedDriver(mesh, groups), FunctionalCollectives(mesh, mesh.coord(rank), groups)
    torch.manual_seed(rank)
    x = torch.randn(12, 8).t().contiguous().t()  # dense, not contiguous
    x[0] = -torch.inf if rank else 1.0
    for name, rest in CALLS.items():
        target = op(name.split()[0])
        value = x if "min" not in name else -x
        want = driver._answer(Request(None, target, False, (value, axis, *rest)), overlap=False)  # type: ignore[arg-type]
        torch.testing.assert_close(functional.trace(target, (value, axis, *rest)), want, rtol=1e-6, atol=1e-6)
    for name, rest in (("all_reduce", ("sum",)), ("shift", (1,))):
        started = functional.trace(op(f"{name}_start"), (x, axis, *rest))
        done = functional.trace(op("wait"), (started,))
        torch.testing.assert_close(done, functional.trace(op(name), (x, axis, *rest)))


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "axis"), [("dp=2,tp=2", "tp"), ("dp=2,tp=2", "dp"), ("dp=4,tp=1", "dp:tp")])
def test_functional_collectives_are_the_drivers(four: Ranks, mesh: str, axis: str) -> None:
    four.run(_both, mesh, axis)


def _reversed(rank: int) -> None:
    """torch sorts the ranks of a group; the axes of a joined one may say another order."""
    _both(rank, "tp=2,dp=2", "dp:tp")


@pytest.mark.gloo
def test_a_group_in_another_order(four: Ranks) -> None:
    four.run(_reversed)


# -- errors ---------------------------------------------------------------------------------------------------------


def small(compile: Any) -> ParallelModule:
    return autopar.parallelize(nn.Linear(16, 8), "dp=1", loss_fn=models.square_loss, compile=compile)


def test_an_unknown_compiler(alone: None) -> None:
    with pytest.raises(CompileError) as caught:
        small("gcc")
    assert str(caught.value) == "compile='gcc': write auto, executor, inductor or triton."


def test_no_compiler_on_the_machine(alone: None) -> None:
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}), pytest.raises(CompileError) as caught:
        small("inductor")
    assert str(caught.value).startswith('compile="inductor" needs a C++ compiler, and none was found. Install one (')
    assert "apt install g++" in str(caught.value)


def test_a_failure_of_inductor_names_the_graph(alone: None) -> None:
    import torch._inductor.config as inductor

    model, batch = small("inductor"), (torch.randn(12, 16), torch.randn(12, 8))
    nothing = inductor.patch({"cpp.cxx": (None, "/bin/true"), "fx_graph_cache": False})  # "compiles" nothing
    with nothing, pytest.raises(CompileError) as caught:
        model.prepare(*batch)
    assert "Inductor cannot compile graph 'step' of rank 0 on mesh 'dp=1'" in str(caught.value)
    assert caught.value.__cause__ is not None


@needs_compiler
def test_a_wrong_index_is_an_error_with_its_place(alone: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 8))
    parallel = autopar.parallelize(model, "dp=1", loss_fn=models.square_loss, compile="inductor")
    x, y = torch.randint(40, (12,)), torch.randn(12, 8)
    parallel.forward_backward(x, y)
    x[3] = 41
    with pytest.raises(BatchError, match=r"index 41 is out of range: the table has 40 entries[^%]*In %checked_index"):
        parallel.forward_backward(x, y)


def test_a_trace_sees_the_code_as_a_whole() -> None:
    program, recorder = InductorProgram(InductorCode(lambda values: tuple(values), "", 0, ((1,),))), Recorder(step=4)
    inputs = {("x", -1): torch.ones(2)}
    program.record(recorder)
    (given,) = program.run(inputs)
    program.record(None)
    program.run(inputs)
    (event,) = recorder.events
    assert given is inputs["x", -1] and (event.name, event.step) == ("the code that Inductor wrote", 4)
    assert event.end_us > event.start_us


def _leave(rank: int) -> float:
    model = autopar.parallelize(nn.Linear(16, 8), "dp=2", loss_fn=models.square_loss, compile="inductor")
    batch = torch.ones(12, 16), torch.ones(12, 8)
    model.prepare(*batch)
    if rank == 1:
        raise SystemExit(3)
    driver = next(iter(model.programs))
    return float(run_step(model._session, driver, Given(take_call_apart(batch, {})), is_step=True)[0])


@needs_compiler
@pytest.mark.gloo
def test_a_rank_that_is_lost_is_named() -> None:
    with ranks_of(2) as ranks:
        first, second = ranks.attempt(_leave, timeout=120)
    assert second.died and first.error is not None
    assert first.error.startswith(f"{RankError.__name__}: rank 0 lost its peers in the code that Inductor wrote, at")
    assert "Look for the first error of the other ranks." in first.error


def _disagree(rank: int) -> None:
    compile: Any = "inductor" if rank else "auto"
    autopar.parallelize(nn.Linear(16, 8), "dp=2", loss_fn=models.square_loss, compile=compile)


@pytest.mark.gloo
def test_ranks_must_agree_on_it(two: Ranks) -> None:
    for outcome in two.attempt(_disagree):
        assert outcome.error is not None and outcome.error.startswith("RankError: ranks disagree on the options")
        assert "'compile=inductor' where the others have 'compile=executor'" in outcome.error


def _experts(rank: int) -> str:
    """Experts over two ranks, in code of fixed shapes; then more rows than they have room for, and fewer again."""
    module, batch = mixture_case(Kind(blocks=1))
    plain, text = copy.deepcopy(module.double()), ""
    model = autopar.parallelize(module, "ep=2", compile="inductor", expert_rows=1.9)
    for skew in (0.0, 9.0, 0.0):
        for each in (model, plain):
            with torch.no_grad():
                each.mixed[0].skew.copy_(torch.tensor([skew] * 2 + [0.0] * 6))  # type: ignore[union-attr, index]
        if skew:
            with pytest.raises(BatchError) as error:
                model.forward_backward(*batch)
            text = str(error.value)
            continue
        loss = plain(*batch)
        loss.backward()
        assert model.forward_backward(*batch).item() == pytest.approx(loss.item(), rel=1e-12)
        for (name, mine), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, rtol=1e-10, atol=1e-12, msg=name)  # type: ignore[union-attr]
        assert sum(model.last.experts[0].by_expert) == 96
        model.zero_grad()
        plain.zero_grad()
    return text


@needs_compiler
@pytest.mark.gloo
@pytest.mark.slow
def test_experts_whose_rows_are_bounded(two: Ranks) -> None:
    first, second = two.run(_experts, timeout=200)
    assert first == second and first.startswith("48 rows go from part 0 of the batch to the experts of part 0 on axis")
