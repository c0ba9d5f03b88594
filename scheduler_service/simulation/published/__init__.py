"""Figures that others published, with their sources: what the simulation is checked against."""
