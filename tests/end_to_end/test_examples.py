"""examples/: each runs at a small size, over local ranks as under torchrun, with the numbers of one device."""

from __future__ import annotations

import importlib
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from conftest import ROOT
from processes import Ranks

import autopar

EXAMPLES = ROOT / "examples"
DIFFERENCE = re.compile(r"difference (\S+)")
# what runs over two ranks, at what size; the others have tests below
OVER_TWO = {
    "lora": ["--mesh", "tp=2", "--steps", "3"],
    "own_schedule": ["--steps", "2"],
    "ppo": ["--mesh", "dp=2", "--iterations", "1"],
    "train_experts": ["--mesh", "ep=2", "--steps", "2"],
    "vit_batchnorm": ["--steps", "2", "--microbatches", "2"],
}
OTHERS = {"demo", "gpt", "llama", "long_context", "offload", "show", "train_gpt", "train_llama", "verse"}


def _shown(rank: int, name: str, arguments: list[str]) -> str:
    """What the script prints on a rank."""
    with redirect_stdout(io.StringIO()) as out:
        importlib.import_module(name).main(arguments)
    return out.getvalue()


def differences(text: str) -> list[float]:
    """How far from one device the script says that it is."""
    return [float(number) for number in DIFFERENCE.findall(text)]


@pytest.mark.gloo
@pytest.mark.parametrize("name", OVER_TWO)
def test_an_example_has_the_numbers_of_one_device(name: str, two: Ranks) -> None:
    if name == "lora":
        pytest.importorskip("transformers")
    shown, silent = two.run(_shown, name, OVER_TWO[name])
    assert differences(shown) and max(differences(shown)) < 1e-5, shown
    assert silent == ""  # one rank speaks for all
    if name == "own_schedule":  # as `inspect --timeline` draws it
        assert re.search(r"^rank 0 F0.*B0.*B1.*F2.*F3.*  idle", shown, re.MULTILINE), shown


@pytest.mark.gloo
def test_pretraining_goes_on_over_another_mesh(two: Ranks, tmp_path: Path) -> None:
    small = ["--rows", "4", "--length", "16", "--every", "1", "--folder", str(tmp_path)]
    two.run(_shown, "train_llama", ["--mesh", "dp=2", "--steps", "2", *small])
    shown, _ = two.run(_shown, "train_llama", ["--mesh", "tp=2", "--steps", "4", *small])
    assert "2 steps are done, 2 to do on tp=2" in shown
    assert max(differences(shown)) < 1e-5, shown


def test_long_sequences_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    import long_context

    monkeypatch.setattr(long_context, "LENGTH", 128)
    monkeypatch.setattr(long_context, "SHORT", 32)
    short, long, split = (float(line.split()[-1]) for line in long_context.table().splitlines()[1:])
    assert short < long and split < long
    task = long_context.job()
    assert long_context.first_loss() == pytest.approx(4.9, abs=0.3)
    assert autopar.verify(task.model, "cp=4", loss_fn=task.loss_fn, batch=task.batch, zero=1).ok


def test_offload_for_a_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import offload

    monkeypatch.setattr(offload, "STEPS", 1)
    offload.main()
    assert capsys.readouterr().out.count("the same") == 4


def test_the_table_has_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == OTHERS | set(OVER_TWO)
    assert [name for name in scripts if f"]({name}.py)" not in table] == []
