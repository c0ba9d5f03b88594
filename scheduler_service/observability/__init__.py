"""Logging; metrics and tracing join it later."""
