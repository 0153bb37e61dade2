"""How many real models autopar carries, and how well: `python -m benchmarks.coverage`."""
