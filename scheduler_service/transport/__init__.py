"""The gRPC side of the service, and the only place that sees protobuf."""

from scheduler_service.transport.server import SERVICE_NAME, GrpcServer

__all__ = ["SERVICE_NAME", "GrpcServer"]
