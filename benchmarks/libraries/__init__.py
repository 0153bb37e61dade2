"""How many models of other people's packages autopar takes as they are: `python -m benchmarks.libraries`."""
