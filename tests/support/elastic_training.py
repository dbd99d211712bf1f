"""One rank that trains with others until it has been through what its test has in mind; a script.

    python elastic_training.py ADDRESS FOLDER NAME '{"num_members": 3, "goal": 2, …}'

It writes FOLDER/NAME.log, a line a step, and FOLDER/NAME.json at its end. It ends `MORE_STEPS` after the generation
``goal`` has begun, or at step ``until``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shade.gradient._elastic.elastic_engine import ElasticEngine
from shade.gradient._elastic.membership import Membership
from shade.gradient._elastic.membership_change import residual_norm
from shade.gradient._local.local_updates import LocalUpdates
from shade.gradient.optim import SparseSGD
from tests.support.gradient_ranks import digest, loss_of, network

MORE_STEPS = 20


def main() -> None:
    """Trains."""
    address, folder, name, plan_json = sys.argv[1:]
    plan = {"until": None, "goal": None, "fault": None, "fault_step": None, "staleness": 0, "every": 0}
    plan |= json.loads(plan_json)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    membership = Membership(
        address,
        plan["num_members"],
        timeout_seconds=plan["timeout_seconds"],
        patience_seconds=20.0,
        dead_seconds=3.0,
        give_up_seconds=100.0,
    )
    model = network()
    optimizer = SparseSGD(model.parameters(), lr=0.05, momentum=0.9)
    longest, until = 0.0, plan["until"]
    engine: Any
    if plan["every"]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        engine = LocalUpdates(model, every=plan["every"], fragments=2, delay=2, membership=membership)
    else:
        settings = {"density": 0.05, "bucket_bytes": 4 * 4000, "staleness": plan["staleness"]}
        engine = ElasticEngine(model, optimizer, membership, **settings)
    with (
        engine,
        Path(folder, f"{name}.log").open("w") as log,
    ):
        first_step = engine.step_count
        while until is None or engine.step_count < until:
            step, began = engine.step_count, time.monotonic()
            if step == plan["fault_step"] and plan["fault"]:
                time.sleep(2.0)  # its last status is published
                os.kill(os.getpid(), getattr(signal, plan["fault"]))
            loss_of(model, engine.rank, step).backward()
            if plan["every"]:
                optimizer.step()
                optimizer.zero_grad()
            engine.step()
            longest = max(longest, time.monotonic() - began)
            generation = membership.generation.number
            if until is None and plan["goal"] is not None and generation >= plan["goal"]:
                until = (engine.changes[-1].step if engine.changes else first_step) + MORE_STEPS
            log.write(f"{engine.step_count} {generation} {engine.world_size}\n")
            log.flush()
            time.sleep(0.02)
        engine.synchronise() if plan["every"] else engine.finish()
        outcome = {
            "digest": digest(model),
            "changes": [vars(each) for each in engine.changes],
            "counts": {} if plan["every"] else engine.counts,
            "longest": longest,
            "first_step": first_step,
            "kept": residual_norm(engine._bucket_states),
            "step": engine.step_count,
        }
    Path(folder, f"{name}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
