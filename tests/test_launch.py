"""What a rank that fails leaves for the launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from autopar.launch import report


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def failure(error_file: Path) -> ProcessFailure:
    """As torchrun reads it."""
    return ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file=str(error_file))


def test_torchrun_reads_what_a_rank_said(error_file: Path):
    report(ValueError("no data left"))
    assert failure(error_file).message["message"] == "ValueError: no data left"


def test_a_rank_ended_while_it_reports_leaves_nothing_torchrun_chokes_on(
    error_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """A peer that loses its peers reports while the launcher ends it: half a file made torchrun raise itself."""

    def ended_in_the_middle(path: Path, text: str):
        with path.open("w") as half:
            half.write(text[: len(text) // 2])
        raise SystemExit(1)

    monkeypatch.setattr(Path, "write_text", ended_in_the_middle)
    with pytest.raises(SystemExit):
        report(ValueError("no data left"))
    assert failure(error_file).error_file_data["message"] == "<NONE>"


def test_half_a_file_is_what_torchrun_chokes_on(error_file: Path):
    """The reason for the test above: should torchrun learn to read it, both can go."""
    error_file.write_text('{"message": ')
    with pytest.raises(json.JSONDecodeError):
        failure(error_file)
