"""One module per scheduling system, each with a function `plan(batch, pool, config) -> Plan`."""
