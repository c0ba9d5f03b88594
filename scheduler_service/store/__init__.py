"""The plan history in a database. Implements `scheduler_service.app.history.History`."""

from scheduler_service.store.history import Retention, SqlHistory

__all__ = ["Retention", "SqlHistory"]
