"""The studies by name: ``stepsight experiment NAME`` runs one of them."""

from __future__ import annotations

from collections.abc import Mapping

from stepsight.experiments.studies import (
    bench,
    capture_agreement,
    context,
    emulation,
    memory,
    one_gpu,
    public_tables,
    search_regret,
    small_to_large,
    what_if_accuracy,
)
from stepsight.experiments.studies.study import Study

STUDIES: Mapping[str, Study] = {
    study.name: study
    for study in (
        bench.STUDY,
        capture_agreement.STUDY,
        public_tables.COLLECTIVES,
        context.STUDY,
        emulation.STUDY,
        public_tables.KERNELS,
        memory.STUDY,
        one_gpu.STUDY,
        search_regret.STUDY,
        small_to_large.STUDY,
        public_tables.TRANSFER,
        what_if_accuracy.STUDY,
    )
}
