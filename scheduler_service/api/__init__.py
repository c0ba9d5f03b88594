"""REST API of the service: what people, scripts and the dashboard read."""
