"""The device memory that a job needs, per pipeline stage.

Blocks say what each step keeps for its backward and what it works on; parts add their blocks up; a schedule says how
many micro-batches are between forward and backward; conventions say how many bytes a parameter costs.  The peak is the
largest of the moments of an iteration, not the sum of largest parts.
"""

from stepsight.simulator.memory.estimate import Memory as Memory
from stepsight.simulator.memory.estimate import StageMemory as StageMemory
from stepsight.simulator.memory.estimate import estimate_memory as estimate_memory
from stepsight.simulator.memory.estimate import estimate_moments as estimate_moments
from stepsight.simulator.memory.estimate import is_tight as is_tight
