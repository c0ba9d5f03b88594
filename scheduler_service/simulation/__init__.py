"""Simulation: how long a plan takes, and where the time goes. Pure functions."""
