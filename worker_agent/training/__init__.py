"""The reference trainer: a small gated-MLA mixture-of-experts language model, trained by plans of the scheduler.

`python -m worker_agent.training` under torchrun is what `make run` starts, and the loop that other integrations
are compared with. Importing this package imports no torch: the launcher prepares documents without it.
"""
