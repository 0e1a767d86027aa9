"""In PYTHONPATH, it lets ranks that torchrun starts run the frameworks on a CPU, unchanged."""

import os

if "LOCAL_RANK" in os.environ:
    from tests.cluster.frameworks.cpu_devices import megatron_on_cpu, torchtitan_on_cpu

    {"torchtitan": torchtitan_on_cpu, "megatron": megatron_on_cpu}[os.environ["ON_CPU"]]()
