"""Steps that others measured, beside what the simulator says of them: `python -m benchmarks.published [FILE.csv ...]`.

Each row of a file is a model, a plan and a measured step. The model is a plain module, its programs are emitted for the
plan, and the step is simulated (`Compiled.time`) on a machine whose constants come from tables of devices and
collectives (`autopar/machines`), never from these steps. Printed are a line a row, and by file the mean and the largest
error and the rank correlation (Spearman) of measured and predicted times. Rows that cannot be emitted say why.

Files, by their names: megatron_sc21*, vtrain*, mpt*, nanotron*, with the columns of those in shared/published.
"""
