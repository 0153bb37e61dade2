"""How long a step takes on a machine that is not here: a simulation of the programs that the compiler emits."""

from autopar.planning.price.step_report import StepTime
from autopar.planning.price.step_time import step_time

__all__ = ["StepTime", "step_time"]
