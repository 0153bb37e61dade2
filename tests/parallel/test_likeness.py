"""A parallel model behaves as the user's module: methods, properties, special methods, names, signatures."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, CaptureError

pytestmark = pytest.mark.gloo


class Base(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=width)
        self.tokens, self.recurrent = nn.Embedding(12, width), nn.GRU(width, width, batch_first=True)

    def encode(self, x: Tensor) -> Tensor:
        """Tokens to features."""
        return self.recurrent(self.tokens(x))[0]  # type: ignore[no-any-return]


class Net(Base):
    """Every kind of thing that a class of the user's may have."""

    version = 3

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.norm, self.attention = nn.BatchNorm1d(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.head, self.scale = nn.Linear(width, 12), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("seen", torch.zeros(()))
        self.history: list[int] = []
        self._secret = 5

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: int = 0) -> Tensor:
        h = self.encode(x)
        h = self.norm(h.flatten(0, 1)).view_as(h)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h) * self.scale * scale + shift  # type: ignore[no-any-return]

    def encode(self, x: Tensor, twice: bool = False) -> Tensor:
        """Tokens to features, by way of the class below."""
        h = super().encode(x).tanh()
        return h * 2 if twice else h

    def generate(self, x: Tensor, count: int = 2) -> Tensor:
        """Calls the model itself."""
        self.eval()
        for _ in range(count):
            x = torch.cat([x[:, 1:], self(x)[:, -1].argmax(-1, keepdim=True)], 1)
        return x

    def sample(self, x: Tensor) -> Tensor:
        return self.forward(x, shift=1).softmax(-1)

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=rate)

    def no_weight_decay(self) -> set[str]:
        return {"tokens.weight"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return {"coarse": coarse}

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def penalty(self) -> Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()

    def remember(self, number: int) -> Any:
        self.history.append(number)
        self.last = number
        return self

    def logits_of(self, word: int) -> Tensor:
        return F.linear(torch.ones(2, self.config.width, dtype=self.scale.dtype), self.head.weight[word : word + 2])

    def branches(self) -> int:
        return 1 if self.head.weight.sum() > 0 and float(self.scale) > 1 else 2

    def names(self) -> Iterator[str]:
        for name, _ in self.named_parameters():
            yield name

    def made(self) -> tuple[nn.Module, nn.Module]:
        return self.__class__(4), type(self)(4)

    @torch.no_grad()
    def reset(self) -> None:
        nn.init.constant_(self.head.weight, 0.25)
        self.scale.fill_(1.5)
        self.seen += 1

    @classmethod
    def build(cls, width: int) -> nn.Module:
        return cls(width)

    @staticmethod
    def double_of(x: int) -> int:
        return 2 * x

    @property
    def width(self) -> int:
        return self.config.width  # type: ignore[no-any-return]

    @width.setter
    def width(self, value: int) -> None:
        self.config.width = value

    @property
    def largest(self) -> Tensor:
        return self.head.weight.abs().amax()

    @functools.cached_property
    def table(self) -> list[int]:
        return [self.version, self._secret]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> nn.Module:
        return list(self.children())[at]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def __enter__(self) -> Any:
        self.history.append(-1)
        return self

    def __exit__(self, *_: Any) -> None:
        self.history.append(-2)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def _x() -> Tensor:
    return torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(1))


def _pair(mesh: str = "dp=1", **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net().double()
    return plain, autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=_loss, **options)


def _entered(model: Any) -> Any:
    with model as inside:
        return inside is model, list(model.history)


def _groups(model: Any) -> Any:
    optimizer = model.configure_optimizers(0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    return [([names[id(p)] for p in group["params"]], group["weight_decay"]) for group in optimizer.param_groups]


# What gives the same of a plain and of a parallel model.
SAME: dict[str, Callable[[Any], Any]] = {
    "a method": lambda m: m.encode(_x()),
    "its options": lambda m: m.encode(_x(), twice=True),
    "a method that calls the model": lambda m: m.generate(_x()),
    "a method that calls forward": lambda m: m.sample(_x()),
    "an optimizer": _groups,
    "a set": lambda m: m.no_weight_decay(),
    "asked for by name": lambda m: getattr(m, "group_matcher", None)(coarse=True),
    "a default": lambda m: (getattr(m, "nothing", 7), hasattr(m, "nothing"), hasattr(m, "no_weight_decay")),
    "a count": lambda m: m.num_params(),
    "a sum over parameters": lambda m: m.penalty(),
    "a functional call on a part": lambda m: m.logits_of(3),
    "a branch on values": lambda m: m.branches(),
    "a generator": lambda m: list(m.names()),
    "returns itself": lambda m: (m.remember(3) is m, m.history, m.last),
    "others of the class": lambda m: [type(other) for other in m.made()],
    "a class method": lambda m: type(m.build(4)),
    "a static method": lambda m: m.double_of(4),
    "a class attribute": lambda m: m.version,
    "a property": lambda m: m.width,
    "a property of a parameter": lambda m: m.largest,
    "a cached property": lambda m: m.table is m.table and m.table,
    "a private name": lambda m: m._secret,
    "its length": lambda m: (len(m), bool(m)),
    "an item": lambda m: type(m[1]),
    "items": lambda m: [type(child) for child in m],
    "contains": lambda m: ("head" in m, "tail" in m),
    "a context": _entered,
    "its class": lambda m: (isinstance(m, Net), isinstance(m, Base), m.__class__ is Net, m.__class__.__name__),
    "a signature": lambda m: str(inspect.signature(m.forward)),
    "all arguments": lambda m: inspect.getfullargspec(m.forward).args[-2:],
    "the signature of a method": lambda m: str(inspect.signature(m.encode)),
    "a docstring": lambda m: (m.encode.__doc__, m.forward.__doc__, m.encode.__name__),
    "its names": lambda m: {"encode", "width", "head", "seen", "scale", "config", "version", "train"} - {*dir(m)},
    "a function of torch on a part": lambda m: m.head(torch.ones(2, 8, dtype=torch.float64)),
    "a part by name": lambda m: type(m.get_input_embeddings()),
}


@pytest.mark.parametrize("what", SAME)
def test_as_the_users_module(what: str) -> None:
    plain, model = _pair()
    plain.eval(), model.eval()
    got, want = SAME[what](model), SAME[what](plain)
    if isinstance(want, Tensor):
        assert torch.allclose(got, want, rtol=1e-9)
    else:
        assert got == want


def _values(rank: int, mesh: str, options: dict[str, Any]) -> None:
    """On ranks that hold parts: values, gradients, and what methods write."""
    plain, model = _pair(mesh, **options)
    model.eval(), plain.eval()
    for _ in range(2):  # before the first program, and as it placed parameters
        for name, function in SAME.items():
            got, want = function(model), function(plain)
            if isinstance(want, Tensor):
                assert not hasattr(got, "full_tensor") or "on a part" in name, f"{name} gives a plain tensor"
                assert torch.allclose(got, want, rtol=1e-9), name
                assert got.requires_grad == want.requires_grad, name
                if got.requires_grad and "calls" not in name:  # the output of a compiled forward has no backward pass
                    got.sum().backward(), want.sum().backward()
                    for path, parameter in plain.named_parameters():
                        gradient = dict(model.named_parameters())[path].grad
                        assert (gradient is None) == (parameter.grad is None), (name, path)
                        if gradient is not None and parameter.grad is not None:
                            assert torch.allclose(gradient.full_tensor(), parameter.grad, rtol=1e-9), (name, path)
                    plain.zero_grad(), model.zero_grad()
        model.reset(), plain.reset()
        for path, value in plain.state_dict().items():
            held = model.state_dict()[path]
            assert torch.equal(held.full_tensor() if hasattr(held, "full_tensor") else held, value), path
        loss = _loss(plain, _x())
        assert torch.allclose(model.forward_backward(_x()).detach(), loss.detach(), rtol=1e-9)
        model.zero_grad()


@pytest.mark.parametrize(("mesh", "options"), [("tp=2", {}), ("pp=2", {"microbatches": 2})])
def test_on_parameters_in_parts(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    two.run(_values, mesh, options)


def _other_data(rank: int) -> str:
    _, model = _pair("tp=2")
    with pytest.raises(Exception) as caught:
        model.head(torch.full((2, 8), float(rank), dtype=torch.float64))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_other_data_on_each_rank_is_refused_by_the_op(two: Ranks) -> None:
    for said in two.run(_other_data):
        assert said.startswith("RankError: ") and "other values" in said, said


def test_a_call_in_a_method_runs_the_program() -> None:
    _, model = _pair()
    model.generate(_x())
    assert len(model.programs) == 1 and not model.training and not model.original.training
    model.encode(_x())
    assert len(model.programs) == 1


def test_containers_of_torch() -> None:
    model: Any = autopar.parallelize(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "dp=1", loss_fn=_loss)
    assert len(model) == 3 and type(model[1]) is nn.ReLU and [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    x = torch.ones(2, 4)
    assert torch.equal(model[:2](x), model.original[:2](x)) and type(model[:2]) is nn.Sequential
    assert isinstance(model, nn.Sequential) and isinstance(model, autopar.ParallelModule)
    plain: Any = autopar.parallelize(nn.Linear(4, 4), "dp=1", loss_fn=_loss)
    assert bool(plain) and not hasattr(plain, "__len__") and not hasattr(plain, "__iter__")
    with pytest.raises(TypeError):
        len(plain)


class Overrides(nn.Module):
    """Methods in place of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.body.eval()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"own.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({n.removeprefix("own."): v for n, v in state_dict.items()}, *args, **kwargs)


def test_methods_in_place_of_torchs() -> None:
    plain = Overrides()
    model: Any = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=_loss)
    assert len(list(model.parameters())) == 2 and len(list(model.named_parameters())) == 6
    assert model.train() is model and model.training and not model.body.training and model.head.training
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict({name: torch.zeros_like(value) for name, value in plain.state_dict().items()})
    assert not model.head.weight.any()
    assert list(model.full_state_dict()) == list(nn.Module.state_dict(plain))


def test_hooks_of_state_dicts_run() -> None:
    plain = nn.Linear(2, 2)
    plain.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(extra=torch.ones(1)))
    plain.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra", None))
    model: Any = autopar.parallelize(plain, "dp=1", loss_fn=_loss)
    assert list(model.state_dict()) == ["weight", "bias", "extra"]
    model.load_state_dict(model.state_dict())


def test_setting_and_deleting() -> None:
    plain, model = _pair()
    model.extra, model._hidden, model.width = 3, 4, 6
    assert plain.config.width == 8 and model.original.extra == 3 and model.original._hidden == 4
    assert model.config.width == 6 and "extra" not in vars(model)
    model.mask = torch.ones(2)
    assert model.original.mask is model.mask
    del model.extra
    assert not hasattr(model, "extra") and not hasattr(model.original, "extra")
    for value, kind in ((nn.Linear(2, 2), "Linear"), (nn.Parameter(torch.ones(2)), "Parameter")):
        with pytest.raises(AutoparError) as caught:
            model.new = value
        assert str(caught.value) == (
            f"cannot set 'new' of a parallel model to a {kind}: its modules and tensors are distributed already. "
            f"Change the plain module before autopar.parallelize."
        )


def test_private_names_are_not_offered() -> None:
    _, model = _pair()
    assert not [name for name in dir(model) if name.startswith("_") and not name.endswith("__")]
    assert {"forward_backward", "gathered", "original", "encode"} <= {*dir(model)}
    for one in (model, model.remember(1), model._stand_in):
        with pytest.raises(AttributeError) as caught:
            one.secret  # noqa: B018
        text = "".join(traceback.format_exception(caught.value))
        assert "'Net' object has no attribute 'secret'" in text and "_secret" not in text


def test_what_is_no_part_of_a_parallel_model() -> None:
    """Neither of it nor of what methods see of it."""
    _, model = _pair()
    for one in (model, model._stand_in):
        for copied in (copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(AutoparError, match="cannot be copied or pickled"):
                copied(one)
        with pytest.raises(AutoparError, match="cannot turn the tensors"):
            one.half()
        for compiled in (torch.compile, lambda m: m.compile()):
            with pytest.raises(AutoparError) as caught:
                compiled(one)
            assert str(caught.value) == (
                "torch.compile of a parallel model: its steps are compiled already, with what moves between ranks in "
                'them. Leave torch.compile out; autopar.parallelize(..., compile="inductor") compiles what each rank '
                "computes with Inductor."
            )


class Named(nn.Module):
    """Methods by names of ours: ours win, but not within the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.compiled = nn.Linear(4, 4), "mine"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.prepare(x))  # type: ignore[no-any-return]

    def prepare(self, x: Tensor) -> Tensor:
        return x + 1

    def both(self, x: Tensor) -> Tensor:
        return self.layer(self.prepare(x)) if self.compiled == "mine" else x  # type: ignore[no-any-return]


def test_names_of_ours_win_but_not_within_the_module() -> None:
    model: Any = autopar.parallelize(Named(), "dp=1", loss_fn=_loss)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model.both(x), model(x), check_stride=False)
    assert model.compiled is None and model.original.compiled == "mine"


def test_methods_in_the_loss_of_another_model() -> None:
    """They are a part of that one's step: the partner's gradients come, and BatchNorm writes."""

    def run(is_parallel: bool) -> list[Tensor]:
        torch.manual_seed(0)
        critic: Any = Net().double()
        model: Any = nn.Linear(4, 8).double()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            h = critic.attention(model(x)[None], model(x)[None], model(x)[None])[0] if not is_parallel else None
            h = h if h is not None else critic.attend(model(x)[None])
            return h.square().sum() + critic.largest * critic.width

        Net.attend = lambda self, h: self.attention(h, h, h)[0]  # type: ignore[attr-defined]
        x = torch.randn(6, 4, dtype=torch.float64)
        if is_parallel:
            critic = autopar.parallelize(critic, "dp=1", loss_fn=_loss)
            model = autopar.parallelize(model, "dp=1", loss_fn=loss)
            value = model.forward_backward(x)
        else:
            value = loss(model, x)
            value.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for m in (model, critic) for p in m.parameters() if p.grad is not None]
        return [value.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)]

    want, got = run(False), run(True)
    assert len(want) > 5
    nonzero = [g for g in got if g.any()]
    torch.testing.assert_close(nonzero, [g for g in want if g.any()])


def test_a_part_of_another_model_is_refused() -> None:
    _, critic = _pair()
    model: Any = autopar.parallelize(nn.Linear(4, 8).double(), "dp=1", loss_fn=lambda m, x: critic.norm(m(x)).sum())
    with pytest.raises(CaptureError, match="a part of another parallel model"):
        model.forward_backward(torch.ones(3, 4, dtype=torch.float64))
