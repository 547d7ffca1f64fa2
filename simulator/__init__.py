"""How time adds up: lowering, schedules, the critical-path engine, memory, timelines."""

from stepsight.simulator.latency_model import LatencyModel, RooflineLatency
from stepsight.simulator.lowering.lower import Lowered, lower, signatures
from stepsight.simulator.simulate import Simulation, simulate

__all__ = ["LatencyModel", "Lowered", "RooflineLatency", "Simulation", "lower", "signatures", "simulate"]
