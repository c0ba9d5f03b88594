"""WLB-LLM: static context parallelism with packs of variable length, balanced by their predicted workload.

Follows: every sequence runs at one degree. Documents, longest first, go to the pack with the smallest predicted
workload, attention plus linear, if that stays within the token limit, else to the pack with the fewest tokens.
Source: the project's description of that system (design of planning, section 5), written anew from it.

This is the variant *without deferral*: the original defers a document that fits nowhere to a later iteration, and
holds very long documents in queues until there is one for every microbatch. Both change which samples an iteration
trains on, and need state from one iteration to the next, which a policy has not. Here the iteration gets more
microbatches instead, the fewest with which nothing is left over: first as many as the tokens fill, then, as long as
documents are left, as many more as these fill.

Departs further: the token limit of a pack is a group's budget, padding included; pack j runs in microbatch
⌊j/groups⌋; the degree need not divide the pool (ranks left over idle). The original chooses per microbatch between
splitting each document and splitting the packed stream over the ranks, by predicted kernel time; our engine splits
each document, or the heads, so that choice is not there. Without a given degree it is the one with the shortest
forecast, as for static_cp.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, CostModel, Plan, Pool
from scheduler_service.domain.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR
from scheduler_service.planning.packs import Packs
from scheduler_service.planning.policies.static_cp import usable_degrees
from scheduler_service.planning.policy import PlanningConfig, new_plan
from scheduler_service.simulation import forecast


def plan(batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    """The plan at degree `config.cap`, or else at the degree with the shortest forecast, the smaller on a tie.

    Raises `InfeasibleError` where no degree holds the longest sequence, and `InvalidInputError` where the pool has
    no groups of `config.cap` ranks. Cost: O(N log N) per degree and number of microbatches tried, and one forecast
    per degree.
    """
    plans = [_plan_at(degree, batch, pool, config) for degree in usable_degrees(batch, pool, config.cap)]
    if len(plans) == 1:
        return plans[0]
    return min(plans, key=lambda candidate: forecast(candidate, batch).iteration_s)


def _plan_at(degree: int, batch: Batch, pool: Pool, config: PlanningConfig) -> Plan:
    groups, capacity, chunks = pool.ranks // degree, pool.capacity(degree), pool.chunks(degree)
    tokens = -(-batch.lengths // chunks) * chunks
    workload = _workload(batch, tokens, config.cost)
    order = np.argsort(-batch.lengths, kind="stable").tolist()
    documents = list(zip(order, tokens[order].tolist(), workload[order].tolist(), strict=True))

    # One microbatch more than documents / groups would be empty: with so many every document has a pack of its own.
    most = -(-len(batch) // groups)
    microbatches = min(most, -(-int(tokens.sum()) // (groups * capacity)))
    packs, left = pack(documents, microbatches * groups, capacity)
    while left:
        more = -(-sum(int(tokens[document]) for document in left) // (groups * capacity))
        microbatches = min(most, microbatches + more)
        packs, left = pack(documents, microbatches * groups, capacity)

    columns = np.full((3, len(batch)), degree, np.int32)
    for number, members in enumerate(packs):
        columns[:2, members] = [[number // groups], [number % groups * degree]]
    microbatch, start, degrees = columns
    return new_plan("wlb_llm", batch, pool, config, (microbatch, start, degrees), cap=degree)


def _workload(batch: Batch, tokens: npt.NDArray[np.int64], cost: CostModel) -> npt.NDArray[np.float64]:
    """W_a + W_l of each document: seconds of one stage, forward and backward, over all of its ranks."""
    attention = (1 + BACKWARD_ATTENTION) * cost.theta * np.square(batch.lengths, dtype=np.float64)
    return attention + (1 + BACKWARD_LINEAR) * cost.tau * tokens


def pack(documents: list[tuple[int, int, float]], count: int, capacity: int) -> tuple[Packs, list[int]]:
    """Put documents (id, tokens, workload), in the order given, into `count` packs; the ids that fit in none last."""
    packs: Packs = [[] for _ in range(count)]
    tokens, workload = [0] * count, [0.0] * count
    lightest, shortest = [(0.0, number) for number in range(count)], [(0, number) for number in range(count)]
    left: list[int] = []
    for document, document_tokens, document_workload in documents:
        while lightest[0][0] != workload[lightest[0][1]]:  # a pack that has grown since has a newer entry
            heapq.heappop(lightest)
        while shortest[0][0] != tokens[shortest[0][1]]:
            heapq.heappop(shortest)
        number = next((n for n in (lightest[0][1], shortest[0][1]) if tokens[n] + document_tokens <= capacity), None)
        if number is None:
            left.append(document)
            continue
        packs[number].append(document)
        tokens[number] += document_tokens
        workload[number] += document_workload
        heapq.heappush(lightest, (workload[number], number))
        heapq.heappush(shortest, (tokens[number], number))
    return packs, left
