"""What a micro-batch takes at least, read off a program of many rows."""

from __future__ import annotations

from plan_jobs import llama_job

from autopar.machines import named
from autopar.planning.bounds import Bounds, LeastWork
from autopar.planning.planner import layers_of
from autopar.planning.price.predict import predict
from autopar.planning.shallow.floor import Floor
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.split import Split

MACHINE = named("h100-80g")


def test_a_lookup_reads_little_of_a_large_table() -> None:
    """However many words there are, few rows read few of them; a table that is counted whole is no lower bound."""
    layers = layers_of(llama_job(layers=4, width=64, heads=1, hidden=64, words=200_000, length=16), MACHINE)
    floor = Floor.of(layers.micros.micro(Split(), layers.micros.low, "none"), layers._rest)
    assert [ask for ask in (*floor.forward, *floor.backward) if not 0 <= ask.fixed <= ask.load.moved] == []
    candidate = Candidate(1, 1, 1, 0, "none", 1, 1)
    bounds = Bounds(layers, LeastWork(0.0, 0.0, 0.0, "bfloat16"), MACHINE, layers.equal)
    assert bounds.rows(candidate) <= predict(candidate, layers, MACHINE).total
