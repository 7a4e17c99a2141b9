"""Which process of how many, from the variables of torchrun and Slurm; nonsense in them is named."""

import os

import pytest

import hotloop
from hotloop.errors import ProcessError
from hotloop.hardware.processes import Processes, find_local_rank, find_processes, processes_from_environment

NAMES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NODEID"),
    *("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
]


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the code sets is taken away again
        monkeypatch.delenv(name)

    def give(**variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


def test_alone(environment):
    environment()
    assert find_processes() == Processes()
    assert find_local_rank() == 0
    environment(SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_STEP_ID="0", SLURM_JOB_ID="7")
    assert find_processes() == Processes()
    # an sbatch script outside srun: several tasks are allotted, but this is one process
    environment(SLURM_PROCID="0", SLURM_NTASKS="4", SLURM_JOB_ID="7")
    assert find_processes() == Processes()


def test_torchrun(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert processes_from_environment() == Processes(5, 8, 1, 4)
    assert find_local_rank() == 1


def test_slurm(environment, monkeypatch):
    environment(
        SLURM_PROCID="9",
        SLURM_NTASKS="11",
        SLURM_LOCALID="1",
        SLURM_STEP_ID="0",
        SLURM_JOB_ID="123456",
        SLURM_NODEID="2",
        SLURM_STEP_NODELIST="gpu[003-004,9]",
        SLURM_STEP_TASKS_PER_NODE="4(x2),3",
    )
    assert processes_from_environment() == Processes(9, 11, 1, 3)
    assert find_local_rank() == 1
    assert os.environ["MASTER_ADDR"] == "gpu003"
    assert os.environ["MASTER_PORT"] == str(20000 + 123456 % 20000)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "0", "WORLD_SIZE": "2.5"}, "WORLD_SIZE is '2.5'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not in 0..1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1"),
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "not RANK"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "two"}, "SLURM_NTASKS is 'two'"),
        ({"SLURM_PROCID": "a", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID is 'a'"),
        ({"SLURM_PROCID": "4", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID and SLURM_NTASKS"),
    ],
)
def test_nonsense_is_named(environment, variables, text):
    environment(**variables)
    with pytest.raises(ProcessError) as caught:
        find_processes()
    assert text in str(caught.value)
    with pytest.raises(hotloop.HotloopError):
        hotloop.Loop(record=False, device="cpu")


@pytest.mark.parametrize(
    ("set_by", "before", "plan", "wanted"),
    [
        ("launcher", "0", None, "1"),
        ("launcher", "0", hotloop.Plan(), "1"),
        ("launcher", "0", hotloop.Plan(capture=True), "0"),
        ("", "0", None, "0"),
        ("", "3", hotloop.Plan(capture=True), "3"),
        ("", "", None, ""),
    ],
)
def test_nccl_s_errors_are_handled_unless_exchanges_are_recorded(
    environment, monkeypatch, set_by, before, plan, wanted
):
    def start(*_, **__):
        # the group reads it when it is made
        raise InterruptedError(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])

    environment(RANK="0", WORLD_SIZE="2")
    monkeypatch.setenv("HOTLOOP_NCCL_ERRORS", set_by)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
    monkeypatch.setattr("torch.distributed.init_process_group", start)
    with pytest.raises(InterruptedError) as caught:
        hotloop.Loop(record=False, device="cpu", parallel=plan)
    assert str(caught.value) == wanted


def test_what_holds_exchanges_goes_before_the_group(monkeypatch):
    import torch.distributed as dist

    from hotloop.hardware import processes

    happened = []

    class Holder:
        def __init__(self, name):
            self.name = name

        def close(self):
            happened.append(self.name)

    monkeypatch.setattr(processes, "_BEFORE_SHUT_DOWN", [])
    kept, dropped = Holder("kept"), Holder("dropped")
    for holder in (kept, dropped):
        processes.before_shut_down(holder.close)
    del holder, dropped
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: happened.append("group"))
    processes._shut_down()
    assert happened == ["kept", "group"]


@pytest.mark.parametrize("error", [RuntimeError("a device that is lost"), KeyboardInterrupt()], ids=str)
def test_an_error_of_what_holds_exchanges_keeps_nobody_from_ending(monkeypatch, capsys, error):
    import torch.distributed as dist

    from hotloop.hardware import processes

    happened = []

    class Holder:
        def close(self):
            happened.append("close")
            raise error

    monkeypatch.setattr(processes, "_BEFORE_SHUT_DOWN", [])
    holders = [Holder(), Holder()]
    for holder in holders:
        processes.before_shut_down(holder.close)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: happened.append("group"))
    if isinstance(error, Exception):
        processes._shut_down()
        assert happened == ["close", "close", "group"]
        assert capsys.readouterr().err.count("a device that is lost") == 2
    else:
        with pytest.raises(KeyboardInterrupt):
            processes._shut_down()
        assert happened == ["close", "group"]
