"""All that a GPU has to be asked, in one command: `python -m benchmarks.gpu`.

Sections (see `sections.py`) run one after another, each in a process of its own with a limit of its own: one that fails
or hangs is reported, and the others go on. The results are written to benchmarks/GPU.md with device, date and versions;
what is not done after nine minutes is named there. `--only` runs some of the sections.

Without a GPU it is a dry run: the same code on the CPU at tiny sizes, which writes nothing but to standard output. Its
figures mean nothing.
"""
