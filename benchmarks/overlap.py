"""How much of a slow network hides behind the computing, with data parallelism over two processes.

The network is the real one plus a wait for each collective, one after the other, as on a link that carries one at a
time. Hidden perfectly, a step takes as long as the longer of computing and communication.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from torch import Tensor

from megalite.config.schema import RunConfig
from megalite.distributed.launch import Environment
from megalite.distributed.layout import Layout
from megalite.distributed.mesh import Group, Mesh
from megalite.distributed.pool import ProcessPool
from megalite.optimizer.transport import TimedPending, Transport
from megalite.training.prepare import prepare_config
from megalite.training.run import build_run
from megalite.verify.configs import resolved
from megalite.verify.layouts import SHARDINGS


class SlowTransport(Transport):
    """Another `delay` seconds for each collective. `busy`: seconds of delay since it was last set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.delay = self.busy = 0.0
        self._free = 0.0  # when the link is

    def _slow(self, pending: TimedPending) -> TimedPending:
        self._free = max(self._free, time.perf_counter()) + self.delay
        self.busy += self.delay
        return _Slow(pending, self._free)

    def all_reduce(self, tensor: Tensor, group: Group) -> TimedPending:
        return self._slow(super().all_reduce(tensor, group))

    def reduce_scatter(self, result: Tensor, tensor: Tensor, group: Group) -> TimedPending:
        return self._slow(super().reduce_scatter(result, tensor, group))

    def all_gather(self, result: Tensor, part: Tensor, group: Group) -> TimedPending:
        return self._slow(super().all_gather(result, part, group))


class _Slow(TimedPending):
    def __init__(self, pending: TimedPending, until: float):
        self._pending, self._until, self.begin, self.end = pending, until, pending.begin, until * 1e3

    def wait(self) -> None:
        self._pending.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))


def config_of(sharding: str, *, overlap: bool, layers: int, hidden: int, length: int) -> RunConfig:
    """A model without a large vocabulary, in buckets of about a layer, one microbatch a step."""
    config = RunConfig()
    model, layout, training = config.model, config.layout, config.training
    model.num_layers, model.hidden_size, model.num_attention_heads = layers, hidden, 4
    model.max_position_embeddings, model.hidden_dropout, model.attention_dropout = length, 0.0, 0.0
    model.untie_embeddings_and_output_weights, model.make_vocab_size_divisible_by = True, 1
    config.data.seq_length, config.data.mock_data, config.data.num_workers = length, True, 0
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", 130
    training.micro_batch_size, training.global_batch_size, training.train_iters = 4, 8, 1000
    config.learning_rate.lr, config.validation.eval_iters = 1e-4, 0
    layout.device, layout.threads_per_rank = "cpu", 1
    layout.data_parallel_sharding_strategy = sharding
    layout.overlap_grad_reduce = overlap
    layout.overlap_param_gather = overlap and sharding != "no_shard"
    if sharding != "optim_grads_params":
        layout.ddp_bucket_size = 12 * hidden * hidden
    return config


def measure(
    mesh: Mesh, values: dict[str, dict[str, Any]], shares: list[float], steps: int
) -> list[tuple[float, float]]:
    """(median step, communication) in seconds without delays, and with delays of these shares of that step."""
    size = mesh.world.size
    transport = SlowTransport()
    environment = Environment(mesh.rank, size, mesh.rank, size)
    run = build_run(prepare_config(RunConfig.from_dict(values), environment), mesh, transport=transport)
    results: list[tuple[float, float]] = []
    for share in [0.0, *shares]:
        before = transport.collectives
        run.trainer.step()  # warms up, and counts
        run.optimizer.finish_gathers()
        count = transport.collectives - before
        transport.delay = share * results[0][0] / count if results else 0.0
        run.trainer.step()
        times, transport.busy = [], 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            run.trainer.step()
            times.append(time.perf_counter() - begin)
        results.append((statistics.median(times), transport.busy / steps))
        run.optimizer.finish_gathers()
        transport.delay = 0.0
    run.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    shares = [0.4, 1.5]
    print(f"{'sharding':20} overlap  {'computing':>9}  {'network':>8}  {'step':>8}   of the longer")
    with ProcessPool(2) as pool:
        for sharding in SHARDINGS:
            for overlap in (False, True):
                config = config_of(
                    sharding, overlap=overlap, layers=args.layers, hidden=args.hidden, length=args.length
                )
                given = resolved(config, 2)
                layout = Layout.from_config(given.layout, 2)
                results = pool.run(measure, 2, given.to_dict(), shares, args.steps, layout=layout, timeout=300)[0]
                computing = results[0][0]
                for step, network in results[1:]:
                    print(
                        f"{sharding:20} {'yes' if overlap else 'no':7}  {computing * 1e3:6.0f} ms  "
                        f"{network * 1e3:5.0f} ms  {step * 1e3:5.0f} ms   {step / max(computing, network):.3f}"
                    )


if __name__ == "__main__":
    main()
