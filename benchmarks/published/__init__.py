"""Steps that others measured, beside what the cost model says of them: `python -m benchmarks.published [FILE.csv ...]`.

Each row of a file is a model, a plan and what was measured: the time of a step, of a layer's forward and backward pass,
or a rank's memory at its peak. The model is a plain module, its programs are emitted for the plan, and the step is
simulated (`Compiled.time`, `Compiled.memory`) on a machine whose constants come from tables of devices and collectives
(`autopar/machines`), never from these rows. Printed are a line for each quantity, and by file the mean and the largest
error, the rank correlation (Spearman) of measured and predicted values, and regret: of the plans of one model on as
many devices with one batch, how much longer the one takes that is predicted fastest than the fastest measured one.
Rows that cannot be emitted say why. `--plan` adds the planner's own best for each row.

Files, by their names: megatron_sc21*, vtrain*, mpt*, nanotron*, with the columns of those in shared/published, and
those in this folder, whose first lines say where they are from. Without an argument all of them are run.
"""
