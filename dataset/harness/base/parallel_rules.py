"""Arithmetic rules of every job; standard library only, as the harness also runs where ``Job`` is not installed."""

from __future__ import annotations

MOST_CHARACTERS = 600  # of the broken rules that are shown


class Rules(list[str]):
    """The texts of broken rules."""

    def text(self) -> str:
        """The first rules in one line, up to a length that people read, and how many more there are."""
        shown = list[str]()
        for rule in self:
            if shown and sum(map(len, shown)) + len(rule) > MOST_CHARACTERS:
                break
            shown.append(rule)
        rest = len(self) - len(shown)
        return "; ".join([*shown, *([f"and {rest} more"] if rest else [])])

    def require(self, holds: bool, text: str) -> None:
        """Add the text of a rule if the rule does not hold."""
        if not holds:
            self.append(text)

    def lies(self, key: str, value: float, least: float, most: float) -> None:
        """Require that ``value`` (of ``key``) lies from ``least`` to ``most``."""
        self.require(least <= value <= most, f"{key} must lie from {least} to {most}, got {value}")

    def divides(self, divisor: int, name: str, value: int, of: str) -> None:
        """Require that ``divisor`` (called ``name``) divides ``value`` (called ``of``)."""
        self.require(
            value % divisor == 0, f"{name} must divide {of}, got {value} % {divisor} = {value % max(divisor, 1)}"
        )


def check_degrees(rules: Rules, *, tp: int, cp: int = 1, pp: int, dp: int, devices: int) -> None:
    """Check that the parallel degrees multiply to the number of devices."""
    product = tp * cp * pp * dp
    words, values = (" * cp", f" * {cp}") if cp > 1 else ("", "")
    replica = max(1, tp * cp * pp)
    whole = devices % replica == 0
    advice = f"dp = {devices // replica}" if whole else f"a multiple of {replica} devices, or smaller degrees"
    rules.require(
        product == devices,
        f"tp{words} * pp * dp must equal the number of devices, got {tp}{values} * {pp} * {dp} = {product} "
        f"!= {devices}: choose {advice}",
    )


def check_batch(rules: Rules, *, micro_batch: int, dp: int, global_batch: int) -> None:
    """Check that every replica runs the same number of whole micro-batches."""
    replica = micro_batch * dp
    least = max(1, global_batch // max(1, replica)) * replica
    rules.require(
        global_batch % replica == 0,
        f"micro_batch * dp must divide global_batch, got {global_batch} % ({micro_batch} * {dp}) "
        f"= {global_batch % replica}: choose a global batch such as {least} or {least + replica}",
    )


def check_sequence(rules: Rules, key: str, length: int, *, tp: int, cp: int = 1) -> None:
    """Check that sequence parallelism divides a sequence, after context parallelism has divided it."""
    here = length // cp
    rules.require(
        here % tp == 0,
        f"sequence_parallel needs tp to divide model.{key}{' / cp' if cp > 1 else ''}, got {here} % {tp} = {here % tp}",
    )


def check_stages(rules: Rules, *, layers: int, pp: int, virtual_stages: int = 1) -> None:
    """Check that every part of the pipeline has a layer."""
    parts = pp * virtual_stages
    words = "layers >= pp" if virtual_stages == 1 else "layers >= pp * virtual_stages"
    rules.require(layers >= parts, f"every pipeline stage needs a layer: {words}, got {layers} < {parts}")
