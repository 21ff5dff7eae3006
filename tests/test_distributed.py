"""Two processes, each with half of every batch, do what one process does with the whole: DDP, FSDP2, accelerate."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import converted, train

TESTS = Path(__file__).parent


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.fixture(scope="module")
def alone():
    return train(converted(), "alone", slice(None))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp", "accelerate"])
def test_two_processes_do_what_one_does(how, alone, tmp_path):
    port = free_port()
    processes = []
    for rank in range(2):
        process = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(TESTS)}
        environment = {**os.environ, **process, **meeting}
        command = [sys.executable, str(TESTS / "distributed_worker.py"), how, str(tmp_path)]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                          text=True))  # fmt: skip
    try:
        outputs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(outputs)[-3000:]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for mine in found:
        assert mine["untouched"]
        assert mine["unused"] == []
        assert mine["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        # Each process measures its half against the variance of that half: calibration is close, not equal.
        for row, other in zip(mine["errors"], alone["errors"], strict=True):
            assert row == pytest.approx(other, rel=0.2)
    one, two = found
    assert one["errors"] == two["errors"]
    for key, most in (("calibrated", 0.05), ("tuned", 1e-5)):
        assert one[key].keys() == two[key].keys() == alone[key].keys()
        assert all(torch.equal(one[key][n], two[key][n]) for n in one[key])
        moved = max((one[key][n] - alone[key][n]).abs().max() for n in one[key])
        assert moved < most, (key, moved)
