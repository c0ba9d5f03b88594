import pickle

from scheduler_service.domain import HydraCpError, InfeasibleError, Reason


def test_an_error_keeps_reason_and_sequence_between_processes() -> None:
    error = InfeasibleError(Reason.SEQUENCE_TOO_LONG, "too long", sequence=7)
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is InfeasibleError
    assert (other.reason, other.sequence, str(other)) == (Reason.SEQUENCE_TOO_LONG, 7, "too long")
    assert isinstance(other, HydraCpError)
