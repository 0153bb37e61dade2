"""Buffers that no checkpoint keeps, of modules on the meta device: each way in which a module computes them again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.parallel.weights.rebuild import rebuilt


def frequencies(dim: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)


class Kept(nn.Module):
    """Its arguments are attributes."""

    def __init__(self, dim: int, base: float = 10000.0, device: Any = None) -> None:
        super().__init__()
        self.dim, self._base = dim, base
        self.register_buffer("freqs", frequencies(dim, base), persistent=False)


class Attribute(nn.Module):
    """The tensor is no buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.freqs = frequencies(dim, 500.0)


class Reset(nn.Module):
    """As torchtitan's models: nothing is known of the arguments."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.scale, self.how = nn.Parameter(torch.ones(width)), (width, base)
        self.register_buffer("freqs", torch.empty(width // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.freqs = frequencies(*self.how)


class Initialised(nn.Module):
    """As a model of transformers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.register_buffer("freqs", frequencies(dim, 7.0), persistent=False)
        self.other = nn.Linear(3, 3)

    def _init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "freqs"):
            module.freqs.copy_(frequencies(2 * len(module.freqs), 7.0))


class Causal(nn.Module):
    """As nanoGPT's attention: its configuration is that of the model, and it has parameters."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.project = nn.Linear(config.width, config.width)
        self.register_buffer(
            "seen", torch.ones(config.length, config.length, dtype=torch.bool).tril(), persistent=False
        )


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layers = config, nn.ModuleList(Causal(config) for _ in range(2))


class Root(nn.Module):
    """The model itself has such a buffer; nothing of its parameters is made for it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.tokens = rows, nn.Embedding(rows, 1 << 20)
        self.register_buffer("places", torch.arange(rows), persistent=False)


class Random(nn.Module):
    """Drawn, as of random features: every rank has the same, and the user's generator stays as it was."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("features", torch.randn(dim), persistent=False)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "arguments": lambda: Kept(8, 100.0),
    "a default": lambda: Kept(8),
    "inside": lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(Kept(4, 3.0), Kept(6, 3.0))),
    "an attribute": lambda: Attribute(8),
    "reset_parameters": lambda: nn.ModuleDict({"a": Reset(8, 100.0), "b": Reset(4, 2.0)}),
    "_init_weights": lambda: Initialised(8),
    "a configuration around it": lambda: Model(SimpleNamespace(width=4, length=6)),
    "in float64": lambda: Kept(8, 100.0).double(),
    "in bfloat16": lambda: nn.ModuleList([Kept(8, 100.0), Reset(8, 3.0)]).bfloat16(),
}


def unkept(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that are not in its state dict."""
    found = {name: buffer for name, buffer in model.named_buffers() if name not in model.state_dict()}
    for path, module in model.named_modules():
        found |= {f"{path}.{name}".strip("."): x for name, x in vars(module).items() if isinstance(x, Tensor)}
    return found


@pytest.mark.parametrize("name", WAYS)
def test_what_no_file_holds_is_that_of_the_plain_model(name: str) -> None:
    wanted = unkept(WAYS[name]())
    with torch.device("meta"):
        bare = WAYS[name]()
    found = rebuilt(bare, unkept(bare), seed=0)
    assert found.keys() == wanted.keys() and found
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    assert all(tensor.device.type == "meta" for tensor in (*bare.parameters(), *bare.buffers()))


def test_no_parameter_is_made() -> None:
    """A module of 4 TB of parameters computes its positions."""
    with torch.device("meta"):
        bare = Root(1 << 20)
    assert torch.equal(rebuilt(bare, unkept(bare), seed=0)["places"], torch.arange(1 << 20))


def test_random_numbers_are_those_of_the_seed() -> None:
    with torch.device("meta"):
        bare = Random(4)
    state = torch.get_rng_state()
    first, second = (rebuilt(bare, unkept(bare), seed=3)["features"] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


def test_it_is_said_how_it_was_made(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        bare = nn.Sequential(Kept(8, 100.0))
    rebuilt(bare, unkept(bare), seed=0)
    assert caplog.messages == ["'0.freqs': no file holds this; made again by Kept(dim=8, base=100.0)"]


class Unknown(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("freqs", frequencies(dim, base), persistent=False)


class Changed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim // 2
        self.register_buffer("freqs", torch.ones(8), persistent=False)


class Later(nn.Module):
    """Its buffer was made by another module."""


class Failing(Unknown):
    def reset_parameters(self) -> None:
        raise ValueError("not here")


def later() -> nn.Module:
    made = Later()
    made.register_buffer("freqs", torch.ones(3), persistent=False)
    return made


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an argument that is not kept": (lambda: Unknown(8, 3.0), "Unknown: its argument 'base' is no attribute"),
    "an argument that is changed": (
        lambda: Changed(16), "Changed: built with what it holds, its 'dim' is 4 and not 8"
    ),
    "nothing makes it": (later, "Later: built with what it holds, it has another 'freqs'"),
    "an initialisation that fails": (lambda: Failing(8, 3.0), "Failing: its argument 'base' is no attribute"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_module_says_is_refused(name: str) -> None:
    make, why = REFUSED[name]
    with torch.device("meta"):
        bare = nn.ModuleDict({"rope": make()})
    kind, why = why.split(": ", 1)
    with pytest.raises(CaptureError) as found:
        rebuilt(bare, unkept(bare), seed=0)
    assert str(found.value) == (
        f"'rope.freqs' is on the meta device, and what no checkpoint keeps; {kind} does not say how to make it: {why}. "
        f"Give {kind} a reset_parameters(), keep its arguments as attributes of the same names, or build it on a real "
        f"device."
    )


def test_parameters_with_values_stay() -> None:
    """Of a module that is on a real device but for a buffer no method runs: it would draw anew."""
    module = Reset(8, 100.0)
    kept = module.scale.data.fill_(5.0).clone()
    module.freqs = module.freqs.to("meta")
    with pytest.raises(CaptureError, match="its argument 'width' is no attribute"):
        rebuilt(module, unkept(module), seed=0)
    assert torch.equal(module.scale, kept)
