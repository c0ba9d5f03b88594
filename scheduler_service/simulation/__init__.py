"""Simulation: how long a plan takes, and where the time goes. Pure functions."""

from scheduler_service.simulation.iteration import Forecast, forecast, microbatch_times
from scheduler_service.simulation.loads import GroupLoads, RankLoads, group_loads, rank_loads
from scheduler_service.simulation.objective import MicrobatchTimes, Objective, SimpleObjective
from scheduler_service.simulation.pipeline import Operations, PipelineReplay, Schedule, replay_pipeline, schedule_of
from scheduler_service.simulation.spans import pipeline_spans

__all__ = [
    "Forecast",
    "forecast",
    "microbatch_times",
    "GroupLoads",
    "RankLoads",
    "group_loads",
    "rank_loads",
    "MicrobatchTimes",
    "Objective",
    "SimpleObjective",
    "Operations",
    "PipelineReplay",
    "Schedule",
    "replay_pipeline",
    "schedule_of",
    "pipeline_spans",
]
