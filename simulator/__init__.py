"""How time adds up: lowering, schedules, the critical-path engine, memory, timelines."""

from stepsight.simulator.durations.latency_model import LatencyModel, RooflineLatency
from stepsight.simulator.iteration.simulate import Simulation, simulate
from stepsight.simulator.programs.lower import Lowered, lower, signatures

__all__ = ["LatencyModel", "Lowered", "RooflineLatency", "Simulation", "lower", "signatures", "simulate"]
