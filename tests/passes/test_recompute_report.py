"""What recomputation refuses, and what it says that it does."""

from __future__ import annotations

import pytest
from recompute_case import with_policy

from autopar.errors import PlanError
from autopar.report.inspection import memory_of
from autopar.report.memory.saved import recomputed_values, saved_text, saved_values


def test_a_budget_that_cannot_be_met_says_what_can() -> None:
    program = with_policy("llama", "dp=2", "none")
    kept, full = memory_of(program).activations, memory_of(with_policy("llama", "dp=2", "full")).activations
    with pytest.raises(PlanError) as caught:
        with_policy("llama", "dp=2", 0.25)
    least = int(str(caught.value).split("at least ")[1].split(" ")[0])
    assert str(caught.value) == (
        f"recompute=0.25 ({int(0.25 * kept)} of {kept} bytes): a rank has to save at least {least} bytes of the "
        f"forward pass, {least / kept:.2f} of what 'none' saves, since under a budget neither products nor collectives "
        f'are computed again. Allow {least} bytes or more, or write recompute="full", which computes whole layers '
        f"again and saves {full} bytes."
    )
    assert memory_of(with_policy("llama", "dp=2", least)).activations <= least
    with pytest.raises(PlanError, match=rf"^recompute={least - 1}: a rank has to save at least {least} bytes"):
        with_policy("llama", "dp=2", least - 1)


def test_unknown_modules_are_named_with_those_that_exist() -> None:
    with pytest.raises(PlanError) as caught:
        with_policy("llama", "dp=2", {"blocks.0-5": "full", "blcks.*": 0.5, "*": "none"})
    first, second = str(caught.value).splitlines()
    assert first == (
        "recompute={'blocks.0-5': 'full'}: the pattern 'blocks.0-5' names no module ('blocks.4', 'blocks.5'). "
        "Nearest names: 'blocks.3', 'blocks.2', 'blocks.1'."
    )
    assert second.startswith("recompute={'blcks.*': 0.5}: the pattern 'blcks.*' names no module. Nearest names: ")


def test_the_report_says_what_is_kept_and_why() -> None:
    program = with_policy("written_out", "tp=2", "selective")
    saved, again = saved_values(program), recomputed_values(program)
    assert sum(row.bytes for row in saved) == memory_of(program).activations
    assert not {row.value for row in saved} & {row.value for row in again}
    assert {row.why for row in saved if row.module.endswith(".q")} == {"read by einsum again, einsum"}
    text = saved_text(program)
    assert "saved for the backward pass" in text and "recomputed: selective, attention core (" in text
    shallow, deep = (len(saved_text(with_policy(name, "dp=1", "full")).splitlines()) for name in ("llama", "deep"))
    assert shallow == deep, "equal layers share a line"
