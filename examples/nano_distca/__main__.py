"""All of it, in words: ``python -m examples.nano_distca``."""

from dataclasses import replace

import torch

from examples.nano_distca.documents import random_lengths
from examples.nano_distca.exchange import Death
from examples.nano_distca.job import random_job, run
from examples.nano_distca.plan import home_plan, imbalance
from examples.nano_distca.reference import deviation, reference
from examples.nano_distca.route import BACKWARD, FORWARD, moved_bytes


def main() -> None:
    lengths = random_lengths(20, median=200, longest=1501, seed=5)
    job = replace(random_job(lengths, n_ranks=3, n_servers=4), bytes_per_second=20e6)
    print(f"documents  {len(lengths)} of {min(lengths)} to {max(lengths):,} tokens on 3 ranks")
    for lane, batch, plan in zip((0, 1), job.lanes, job.plans, strict=True):
        home = home_plan(batch, job.cost)
        print(f"lane {lane}     imbalance {imbalance(home.loads):.2f} at home", end=" -> ")
        print(f"{imbalance(plan.loads):.2f} planned; {plan.reason}")
        there, back = (moved_bytes(batch, plan, job.cost.shape, p) for p in (FORWARD, BACKWARD))
        print(f"           bytes moved: {there:,} a forward tick, {back:,} a backward tick")
    calm = run(job)
    off = deviation(calm.gradients, reference(job))
    print(f"gradients  {off:.1e} off plain attention in float64 at most, of the largest element")
    apart = run(replace(job, ping_pong=False)).seconds
    print(f"two lanes  {calm.seconds:.2f} s a step in turns, {apart:.2f} s one after the other")
    shaken = run(replace(job, death=Death(server=3, tick=5, replies=1)))
    same = all(torch.equal(shaken.gradients[name], calm.gradients[name]) for name in calm.gradients)
    print(f"a death    of server {shaken.dead} in tick 5: gradients are equal to the bit: {same}")


if __name__ == "__main__":
    main()
