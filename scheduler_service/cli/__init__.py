"""The `hydra-cp` command line: one module per sub-command."""
