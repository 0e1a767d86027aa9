"""The machines of servers and ranks load neither tensors nor a network, their packages included."""

from __future__ import annotations

import pytest

from tests.support.programs import ran_python


@pytest.mark.parametrize("module", ["attention_node.machine.server", "trainer_client.machine.rank"])
def test_the_machines_need_no_torch_and_no_grpc(module: str) -> None:
    program = (
        f"import sys, {module} as _; "
        "print([name for name in ('torch', 'grpc', 'ucxx', 'nixl') if name in sys.modules])"
    )
    found = ran_python(program, check=True)
    assert found.stdout.strip() == "[]"
