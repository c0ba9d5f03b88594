"""Entry point of one rank: `torchrun --nproc-per-node 4 -m worker_agent.training --scheduler HOST:PORT …`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from scheduler_service.domain import CostModel, HydraCpError, InvalidInputError, Reason
from worker_agent.client import AgentConfig, PlanAgent
from worker_agent.training.calibration import calibrate
from worker_agent.training.config import ModelConfig, RunConfig
from worker_agent.training.documents import Documents, prepare_documents
from worker_agent.training.lifetime import die_with_parent
from worker_agent.training.model import LanguageModel
from worker_agent.training.run import Run
from worker_agent.training.topology import build_topology
from worker_agent.training.trainer import Trainer

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Longest that a rank waits for the others; longer than any wait for a plan."""


def main() -> int:
    """Train, or calibrate; 0 on success. A failure on one rank ends it with a message, and torchrun ends the rest."""
    options = _parse(sys.argv[1:])
    # torchrun starts ranks in sessions of their own: they would outlive a launcher that is killed.
    die_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        (_calibrate if options.calibrate else _train)(options)
    except HydraCpError as error:
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    defaults = RunConfig()
    parser = argparse.ArgumentParser(
        prog="torchrun … -m worker_agent.training",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--scheduler", default="127.0.0.1:7421", help="address of the scheduler's gRPC port")
    add("--job", default="quickstart", help="name of the job at the scheduler")
    add("--attempt", type=int, default=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), help="restart count")
    add("--output", type=Path, default=Path("build/run"), help="folder of metrics, ledgers and checkpoints")
    add("--documents", type=Path, help="prepared documents; default OUTPUT/documents.npz, made if it is missing")
    add("--policy", default=defaults.policy, help="scheduling policy; default: the service's")
    add("--iterations", type=int, default=defaults.iterations, help="training iterations")
    add("--batch", type=int, default=defaults.batch, help="documents of a global batch")
    add("--budget", type=int, default=defaults.pool.token_budget, help="token budget of a rank and microbatch")
    add("--ep", type=int, default=defaults.pool.ep, help="ranks that share one copy of the experts")
    add("--stages", type=int, default=defaults.pool.stages, help="pipeline stages; ranks by stages are the pool")
    add("--attention", choices=("mla", "gqa"), default=defaults.model.attention, help="kind of attention")
    add("--lookahead", type=int, default=defaults.lookahead, help="iterations that are planned ahead")
    add("--fetch-timeout", type=float, default=defaults.fetch_timeout_s, help="seconds to wait for a plan")
    add("--theta", type=float, default=defaults.cost.theta, help="cost model: seconds per token²/degree")
    add("--tau", type=float, default=defaults.cost.tau, help="cost model: seconds per token")
    add("--overhead", type=float, default=defaults.cost.overhead, help="cost model: seconds per microbatch")
    add("--seed", type=int, default=defaults.seed, help="of weights and of the order of documents")
    add("--checkpoint-every", type=int, default=0, help="iterations between checkpoints; 0 writes none")
    add("--resume-at", type=int, default=0, help="iteration to go on at, from the checkpoint before it")
    add("--calibrate", action="store_true", help="measure and print the cost model of this machine; do not train")
    return parser.parse_args(arguments)


def _run_config(options: argparse.Namespace) -> RunConfig:
    defaults = RunConfig()
    pool = replace(
        defaults.pool,
        ranks=dist.get_world_size() // max(1, options.stages),
        token_budget=options.budget,
        stages=options.stages,
        ep=options.ep,
    )
    return replace(
        defaults,
        pool=pool,
        model=replace(defaults.model, attention=options.attention),
        cost=CostModel(theta=options.theta, tau=options.tau, overhead=options.overhead),
        policy=options.policy,
        iterations=options.iterations,
        batch=options.batch,
        lookahead=options.lookahead,
        seed=options.seed,
        fetch_timeout_s=options.fetch_timeout,
    )


def _train(options: argparse.Namespace) -> None:
    config = _run_config(options)
    documents = _documents(options)
    trainer = _trainer(config, replace(config.model, vocabulary=documents.vocabulary))
    agent = PlanAgent(
        AgentConfig(
            target=options.scheduler,
            job=options.job,
            attempt=options.attempt,
            pool=config.pool,
            policy=config.policy,
            cost=config.cost,
            loader_shards=config.pool.ranks,
            fetch_timeout_s=config.fetch_timeout_s,
        ),
        trainer.topology.rank,
        trainer.topology.agent,
    )
    try:
        Run(config, documents, trainer, agent, options.output).train(options.resume_at, options.checkpoint_every)
    finally:
        agent.close()


def _documents(options: argparse.Namespace) -> Documents:
    """The prepared documents; the first rank of each node makes them if they are missing, the others wait for it.

    Raises `InvalidInputError` on every rank where the nodes do not have the same ones.
    """
    path = options.documents or options.output / "documents.npz"
    if int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            prepare_documents(path)
    dist.barrier()
    documents = Documents.load(path)
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, documents.digest)
    if len(set(digests)) > 1:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise InvalidInputError(
            Reason.INVALID_ARGUMENT,
            f"ranks {others[:8]} have other documents than rank 0: give all nodes the same {path}, "
            "or the same Python installation to make it from",
        )
    return documents


def _calibrate(options: argparse.Namespace) -> None:
    config = _run_config(options)
    cost = calibrate(_trainer(config, config.model))
    if dist.get_rank() == 0:
        print(json.dumps(asdict(cost)))


def _trainer(config: RunConfig, model: ModelConfig) -> Trainer:
    topology = build_topology(config.pool)
    stage = topology.pipeline.stage
    part = LanguageModel(model, seed=config.seed, experts=topology.experts, stage=stage, stages=config.pool.stages)
    return Trainer(part, config.pool, topology, config.optimizer)


if __name__ == "__main__":
    sys.exit(main())
