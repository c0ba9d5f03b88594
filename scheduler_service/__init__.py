"""The planner: pure planning and simulation, and the service that delivers plans to training jobs."""
