"""How long pipelines take, and nothing else: for planners that replay thousands of them.

The same 1F1B schedule and the same sums as `replay_pipeline`, to the last bit, for stages that take equal times and
no latency. It keeps no operation, only the last end of each stage: memory O(stages), so that one pipeline's replay
never leaves the processor's cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler_service.compiled import compiled

Seconds = npt.NDArray[np.float64]


def pipeline_spans(forward: Seconds, backward: Seconds, stages: int) -> Seconds:
    """Seconds from start to end of each pipeline, (pipelines,).

    `forward`, `backward`: seconds of each microbatch on every stage, (pipelines, microbatches), finite and not
    negative.
    """
    spans = np.empty(len(forward))
    _fill_spans(np.ascontiguousarray(forward), np.ascontiguousarray(backward), stages, spans)
    return spans


@compiled
def _fill_spans(forward: Seconds, backward: Seconds, stages: int, spans: Seconds) -> None:
    end, returned = np.empty(stages), np.empty(stages)
    for pipeline in range(len(spans)):
        spans[pipeline] = span_of(forward[pipeline], backward[pipeline], stages, end, returned)


@compiled
def span_of(forward: Seconds, backward: Seconds, stages: int, end: Seconds, returned: Seconds) -> float:
    """Span of one pipeline; `end` and `returned` are (stages,) to work in.

    Stage i runs its forward of microbatch k and then its backward of k − (stages − 1 − i), where both exist: over
    k, that is 1F1B, and what a stage needs from its neighbours is always computed by then.
    """
    microbatches = len(forward)
    end[:] = 0.0
    for k in range(microbatches + stages - 1):
        if k < microbatches:
            arrived = 0.0
            for i in range(stages):
                arrived = max(arrived, end[i]) + forward[k]
                end[i] = arrived
        for i in range(stages):
            done = k - (stages - 1 - i)
            if 0 <= done < microbatches:
                # `returned` of the next stage still holds what it did for this microbatch, one k ago.
                arrived = returned[i + 1] if i + 1 < stages else end[i]
                end[i] = max(arrived, end[i]) + backward[done]
                returned[i] = end[i]
    return end.max()
