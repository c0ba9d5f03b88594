"""The part of HyDra-CP that runs in every rank of a training job: it fetches plans and carries them out."""
