"""The harness: real multi-process training, traced and timed, on the machines that a predictor is for.

Needs torch >= 2.11 and the standard library alone, and imports nothing else of stepsight: copy this folder to a
cluster as ``harness`` and run ``python -m harness plan.json --out DIR`` there.  Importing it imports no torch.

==============  ==================================================================================
``launch``      ``collect(plan, out)``: checks, starts workers, shows progress, resumes
``worker``      one rank; on several nodes, what ``torchrun`` starts
``plan``        what a plan holds, and its rules
``collection``  rounds over runs, run folders, event files
``measure``     timed and profiled steps
``parallel``    a job as a sharded model, schedule and optimizer: the training step
``stand_in``    one process in the place of a rank of a larger job; ``delays`` tells what its collectives take,
                ``spinning`` lets it pass on CUDA
``model``       the transformer; ``comm`` and ``kernels`` are its autograd functions
``annotate``    what names segments, ops, collectives and waits in traces
``cores``       where a rank's threads run
``compiled``    composite ops by ``torch.compile``, where a plan asks for it
``events``      each op and collective once, by its signature; ``ops`` makes them callable
``timing``      seconds of a call, on CUDA of the device and of the host apart
``facts``       peaks, bandwidth, the price of overlap
``clocks``      clocks, temperature and power of a GPU beside all that
==============  ==================================================================================
"""

from .errors import HarnessError

__all__ = ["HarnessError"]
