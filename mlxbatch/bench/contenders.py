"""The two engines that are compared: ours, and mlx-lm's BatchGenerator as its batch_generate drives it."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from mlxbatch.bench.arrivals import Arrivals
from mlxbatch.bench.measured import ChatClock, Measured
from mlxbatch.bench.workloads import Workload
from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.models.loaded import LoadedModel
from mlxbatch.request import Priority, Request, SamplingParams
from mlxbatch.scheduling.plan import StepPlan


def run_ours(loaded: LoadedModel, workload: Workload) -> Measured:
    """One run on a new engine around a model that is in memory already."""
    settings: dict[str, Any] = dict(workload.settings)
    if workload.rows is not None:
        settings["max_num_seqs"] = workload.rows
    config = EngineConfig(model=loaded.name, max_num_batched_tokens=workload.max_num_batched_tokens, **settings)
    engine = LocalEngine(config, loaded=loaded)
    measured = Measured()
    clock = ChatClock(measured)

    own_observer = engine.core.observe

    def observe(plan: StepPlan, seconds: float) -> None:
        if own_observer is not None:  # the engine's cost model learns from it
            own_observer(plan, seconds)
        measured.add_iteration(seconds, has_prefill=bool(plan.chunks), tokens=len(plan.decode))

    engine.core.observe = observe
    arrivals = Arrivals(workload)
    began = time.perf_counter()
    while arrivals or engine.has_unfinished:
        for name, job in arrivals.due(time.perf_counter() - began):
            params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
            priority = Priority.INTERACTIVE if job.chat else Priority.BATCH
            engine.submit(Request(name, job.prompt, params, priority=priority))
            clock.arrived(name, job.arrives)
        for delta in engine.poll():
            if delta.request_id in arrivals.chats:
                clock.token(delta.request_id, time.perf_counter() - began)
            if delta.finish_reason is not None:
                arrivals.finished(delta.request_id)
    measured.total = time.perf_counter() - began
    clock.close()
    measured.held_over_live = float(str(engine.stats()["kv_held_over_live"]))
    engine.close()
    return measured


def run_mlx_lm(loaded: LoadedModel, workload: Workload, *, give_prefix: bool = False) -> Measured:
    """One run of mlx-lm. `give_prefix`: the shared prefix is computed once and given through prompt caches."""
    options = {} if workload.rows is None else {"completion_batch_size": workload.rows}
    generator = BatchGenerator(loaded.model, **options)
    measured = Measured()
    clock = ChatClock(measured)
    arrivals = Arrivals(workload)
    names: dict[int, str] = {}
    live: dict[int, int] = {}
    ratios: list[float] = []
    per_token = _kv_bytes_per_token(loaded)
    began = time.perf_counter()
    prefix_cache = _prefix_cache(loaded, workload) if give_prefix else None
    while arrivals or live:
        for name, job in arrivals.due(time.perf_counter() - began):
            skip = workload.prefix_len if prefix_cache is not None else 0
            caches = [_copy_cache(prefix_cache)] if prefix_cache is not None else None
            uid = generator.insert([list(job.prompt[skip:])], [job.max_tokens], caches=caches)[0]
            names[uid] = name
            live[uid] = len(job.prompt)
            clock.arrived(name, job.arrives)
        if not live:
            continue
        start = time.perf_counter()
        prompts, responses = generator.next()
        moment = time.perf_counter()
        measured.add_iteration(moment - start, has_prefill=bool(prompts), tokens=len(responses))
        for response in responses:
            name = names[response.uid]
            live[response.uid] += 1
            if name in arrivals.chats:
                clock.token(name, moment - began)
            if response.finish_reason is not None:
                del live[response.uid]
                arrivals.finished(name)
        running = [r.uid for r in responses if r.uid in live]
        if running and not prompts:
            ratios.append(generator.prompt_cache_nbytes / per_token / sum(live[uid] for uid in running))
    measured.total = time.perf_counter() - began
    clock.close()
    measured.held_over_live = sum(ratios) / len(ratios) if ratios else 0.0
    generator.close()
    mx.clear_cache()
    return measured


def _kv_bytes_per_token(loaded: LoadedModel) -> int:
    cache = make_prompt_cache(loaded.model)
    loaded.model(mx.zeros((1, 1), mx.int32), cache=cache)
    mx.eval([c.state for c in cache])
    return int(sum(c.keys[:, :, :1].nbytes + c.values[:, :, :1].nbytes for c in cache))


def _prefix_cache(loaded: LoadedModel, workload: Workload) -> list[Any]:
    cache = make_prompt_cache(loaded.model)
    loaded.model(mx.array([workload.jobs[0].prompt[: workload.prefix_len]]), cache=cache)
    mx.eval([c.state for c in cache])
    return list(cache)


def _copy_cache(cache: list[Any]) -> list[Any]:
    copies = []
    for layer in cache:
        copy = type(layer)()
        copy.state = layer.state
        copies.append(copy)
    return copies
