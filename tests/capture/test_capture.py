"""What a capture says of programs as users write them: line, construct, what to write instead; or it is right."""

from __future__ import annotations

import builtins
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import capture_reads
import capture_state
import pytest
import torch
from capture_case import Case, Net, squares
from torch import Tensor, nn

import autopar
from autopar.api import compile
from autopar.cli import commands
from autopar.errors import CaptureError
from autopar.verification.verify import verify

CASES: Mapping[str, Case] = {
    name: case for module in (capture_reads, capture_state) for name, case in vars(module).items()
    if isinstance(case, Case)
}  # fmt: skip
LOSSES = [name for name in CASES if name.endswith("_loss") and name != "own_side_loss"]
INTERNALS = re.compile(r"torch/_|site-packages|Traceback|FakeTensor|[Pp]roxy|SymInt|unbacked")


def named(outcome: str) -> list[str]:
    return [name for name, case in CASES.items() if case.outcome == outcome]


def step_of(name: str) -> tuple[nn.Module, Callable[..., Any]]:
    torch.manual_seed(0)
    body = CASES[name].body
    return (Net(lambda m, x: m.linear(x)), body) if name in LOSSES else (Net(body), squares)


def compiled(name: str) -> Any:
    model, loss_fn = step_of(name)
    return compile(model, "dp=2", loss_fn=loss_fn, batch=torch.randn(4, 4))


def place_of(case: Case) -> tuple[str, int, str]:
    """File, line and text of the line that is marked."""
    body = case.body
    lines, start = inspect.getsourcelines(body)
    position = next((i for i, line in enumerate(lines) if "# HERE" in line), None)
    if position is None:
        return "", 0, ""
    return str(inspect.getsourcefile(body)), start + position, lines[position].strip()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", named("refused"))
def test_what_is_refused_names_line_construct_and_advice(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    if name == "asks_rank" and torch.distributed.is_initialized():
        pytest.skip("another test of this process left a group; then the rank is taken as a number")
    model, loss_fn = step_of(name)
    before = {key: list(value) if isinstance(value, list) else value for key, value in vars(model).items()}
    with pytest.raises(CaptureError) as found:
        compile(model, "dp=2", loss_fn=loss_fn, batch=torch.randn(4, 4))
    said = str(found.value)
    for text in CASES[name].said:
        assert text in said, said
    file, line, source = place_of(CASES[name])
    if file:
        assert f"at {file}:{line}\n    {source}\n" in said, said
    assert not INTERNALS.search(said), said
    assert "Traceback" not in capfd.readouterr().err
    assert {key: list(value) if isinstance(value, list) else value for key, value in vars(model).items()} == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", named("noted"))
def test_what_happens_at_the_capture_only_is_noted(name: str) -> None:
    file, line, _ = place_of(CASES[name])
    first, rest = CASES[name].said
    note = compiled(name).notes[0]
    assert note.startswith(f"{first} {file.rpartition('/')[2]}:{line}") and rest in note, note


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*named("works"), *named("noted"), *named("guarded")])
def test_what_is_taken_is_right(name: str) -> None:
    model, loss_fn = step_of(name)
    report = verify(model, "dp=2", loss_fn=loss_fn, batch=torch.randn(4, 4))
    assert report.ok, f"\n{report}"
    if CASES[name].outcome == "works":
        # What is taken may still be computed whole; and what is kept in a list is that of the capture.
        expected = ("has no rule", "divides no product", "kept by the model outside of itself")
        assert not [note for note in compiled(name).notes if not any(text in note for text in expected)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", named("guarded"))
def test_the_truth_of_data_is_noted_with_its_line(name: str) -> None:
    file, line, _ = place_of(CASES[name])
    notes = [
        note for note in compiled(name).notes if note.startswith(f"bool() of a tensor at {file}:{line} is taken as")
    ]
    assert notes and "each step checks that it is before anything is changed" in notes[0]


def test_a_capture_leaves_the_module_as_it_was() -> None:
    """No tensor without data in a cache of the user's, no count that went up."""
    for name in ("counts", "appends", "caches", "sets_flag", "own_side_loss"):
        model, loss_fn = step_of(name)
        compile(model, "dp=2", loss_fn=loss_fn, batch=torch.randn(4, 4))
        assert (model.counter, model.history, model.cache, model.flag) == (0, [], {}, False)
        assert not hasattr(model, "penalty")


# Modules that a capture cannot look into

WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch.compile": (
        lambda: nn.Sequential(torch.compile(nn.Linear(4, 4))),
        "the module '0' is compiled by torch.comp",
    ),
    "script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), "the model is a RecursiveScriptModule of"),
    "DataParallel": (
        lambda: nn.DataParallel(nn.Linear(4, 4)),
        "the model is wrapped in DataParallel. Give autopar the",
    ),
    "lazy": (lambda: nn.LazyLinear(4), "the parameter 'weight' has no shape yet (a lazy module). Run the plain module"),
    "compiled in place": (lambda: _compiled_in_place(), "a module or function that torch.compile made. Leave torch."),
    "a gradient hook": (
        lambda: _hooked(),
        "the parameter 'weight' has a gradient hook, which a compiled step would not",
    ),
}


def _compiled_in_place() -> nn.Module:
    model = nn.Linear(4, 4)
    model.compile()
    return model


def _hooked() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda grad: grad * 0)
    return model


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_modules(name: str) -> None:
    make, text = WRAPPED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    with pytest.raises(CaptureError) as found:
        compile(model, "dp=2", loss_fn=squares, batch=torch.randn(4, 4))
    assert text in str(found.value), str(found.value)


@pytest.mark.parametrize("backward", [False, True])
def test_module_hooks_run(backward: bool) -> None:
    inner = nn.Linear(4, 4)
    inner.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    inner.register_forward_hook(lambda module, args, result: result * 3)
    if backward:
        inner.register_full_backward_hook(lambda module, given, taken: tuple(g * 0.5 for g in given))
    report = verify(nn.Sequential(nn.Linear(4, 4), inner), "dp=2", loss_fn=squares, batch=torch.randn(4, 4))
    assert report.ok, f"\n{report}"


# Code without a file


FILELESS = ["<ipython-input-3>", "<stdin>", "<doc>", "<my template>"]


@pytest.mark.parametrize("name", FILELESS)
def test_a_loss_of_a_notebook(name: str) -> None:
    names: dict[str, Any] = {}
    text = "def loss(model, x):\n    y = model(x)\n    if int(y.sum()) > 0:\n        y = -y\n    return y.sum()\n"
    exec(builtins.compile(text, name, "exec"), names)
    with pytest.raises(CaptureError, match=rf"depends on the values in a tensor at {name}:3\n"):
        compile(nn.Linear(4, 4), "dp=2", loss_fn=names["loss"], batch=torch.randn(4, 4))


@pytest.mark.parametrize("name", FILELESS)
def test_what_a_notebook_reads_is_watched(name: str) -> None:
    """A number that code without a file reads is no constant of the program."""
    model = nn.Linear(4, 4)
    model.factor = 1.0  # type: ignore[assignment]
    names: dict[str, Any] = {}
    exec(builtins.compile("loss = lambda model, x: model(x).square().sum() * model.factor", name, "exec"), names)
    ours = autopar.parallelize(model, "dp=1", loss_fn=names["loss"])
    x = torch.randn(4, 4)
    first = ours.forward_backward(x).item()
    model.factor = 0.5  # type: ignore[assignment]
    assert ours.forward_backward(x).item() == pytest.approx(first / 2)


COUNTS = """
from torch import nn


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).sum(){}
"""


@pytest.mark.parametrize("name", FILELESS)
def test_a_model_of_no_module_tells_its_lines(name: str) -> None:
    """As a file is run by its path, or a prompt: `sys.modules` has no module of the name that its classes have."""
    names: dict[str, Any] = {"__name__": "nowhere"}
    exec(builtins.compile(COUNTS.format(""), name, "exec"), names)
    notes = compile(names["Counts"](), "dp=2", batch=torch.randn(4, 4)).notes
    assert any(note.startswith(f"'calls' is changed at {name}:11 ") for note in notes), notes
    exec(builtins.compile(COUNTS.format(" * self.calls"), name, "exec"), names)
    with pytest.raises(CaptureError, match=rf"at {name}:12\n.*: 'calls' \({name}:11\)\. "):
        compile(names["Counts"](), "dp=2", batch=torch.randn(4, 4))


def test_a_lambda() -> None:
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().sum()  # noqa: E731
    assert verify(nn.Linear(4, 4), "dp=2", loss_fn=loss, batch=torch.randn(4, 4)).ok


def test_the_command_line_shows_the_message_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import autopar\nimport torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x) * float(x.max())\n\n\n"
        "def job():\n    loss = lambda model, x: model(x).sum()\n"
        "    return autopar.Job(Net(4, 4), loss, torch.ones(4, 4))\n"
    )
    monkeypatch.setattr(
        sys, "argv", ["autopar", "compile", f"{file}:job", "--mesh", "dp=2", "--out", str(tmp_path / "o")]
    )
    with pytest.raises(SystemExit) as left:
        commands.main()
    said = capsys.readouterr().err
    assert left.value.code == 1 and not INTERNALS.search(said), said
    assert said == (
        f"autopar: the program depends on the values in a tensor at {file}:8\n"
        "    return super().forward(x) * float(x.max())\n"
        "This line has float() of a tensor. Leave it a tensor: sums, products and comparisons work alike, "
        "torch.exp(t) is math.exp(t), and what .item() gives may be in arithmetic (n ** 0.5, max(n, 1)). A value for a "
        "log is read after the step; one that is known before it is passed in as a Python number.\n"
        "Or specialize=True takes the value from the example batch, and checks at each step that it still holds.\n"
    )


class Recorder(nn.Linear):
    """Installs a hook at its first run and remembers that it did, as transformers does to collect hidden states."""

    installed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.installed:
            self.seen: list[Tensor] = []
            self.register_forward_hook(lambda module, args, result: module.seen.append(result))
            self.installed = True
        return super().forward(x)


def test_a_flag_and_the_hooks_that_it_speaks_of_are_put_back_together() -> None:
    model = nn.Sequential(Recorder(8, 8), nn.Linear(8, 4))
    compile(model, "dp=2", loss_fn=lambda m, x: m(x).square().mean(), batch=(torch.randn(6, 8),))
    model(torch.randn(6, 8))
    model(torch.randn(6, 8))
    assert len(model[0]._forward_hooks) == 1 and len(model[0].seen) == 1  # torch runs it from the second call on
    # type: ignore[arg-type]


class Promoted(nn.Linear):
    """A number and a bool add up to torch's default dtype, in the plain module and in the program."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.add(0.3333, x > 0, alpha=0.6667)


def test_a_number_and_a_bool_add_up_to_the_same_dtype() -> None:
    report = verify(Promoted(8, 8), "dp=2", loss_fn=lambda m, x: m(x).square().mean(), batch=(torch.randn(6, 8),))
    assert report.ok and report.max_error < 1e-12, report
