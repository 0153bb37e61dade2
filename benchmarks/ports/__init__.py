"""How many lines of public trainers change, and do they then train alike: `python -m benchmarks.ports`."""
