"""Groups that are opened and closed many times on one port, as a program with several phases does under a launcher."""

import contextlib
import os
import random
import socket
import subprocess
import sys

import pytest

ROUNDS = 50
RANKS = 2
PROGRAM = """
import os, random, sys, time, peerlane

rounds, calls = int(sys.argv[1]), sys.argv[2:]
rank = int(os.environ["RANK"])
delays = random.Random(rank)

def pause():
    if delays.random() < 0.2:
        time.sleep(delays.uniform(0, 0.01))

for number in range(rounds):
    with peerlane.init(backend="host", start_timeout=8, timeout=8) as group:
        assert (group.rank, group.size) == (rank, int(os.environ["WORLD_SIZE"]))
        if "exchange" in calls:
            assert group.exchange(bytes([number, rank])) == [bytes([number, each]) for each in range(group.size)]
        if "barrier" in calls:
            group.barrier()
        pause()
    pause()
"""


@contextlib.contextmanager
def reserved_port():
    """Reserves a port at which nobody listens, as the tests in Rust do.

    It is not one of those that the kernel gives to sockets that ask for any, and a socket with a name for the port keeps other
    tests from it.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as ends:
        first, last = map(int, ends.read().split())
    ports = [port for port in range(10_000, 65_536) if not first <= port <= last]
    random.shuffle(ports)
    for port in ports:
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as free:
            try:
                claim.bind(f"\0peerlane-test-port-{port}")
                free.bind(("0.0.0.0", port))
            except OSError:
                continue
            free.close()
            yield port
            return
    raise OSError("no port is free")


@pytest.mark.parametrize("calls", [[], ["barrier"], ["exchange"], ["exchange", "barrier"]])
def test_a_group_is_opened_again_on_the_same_port(calls):
    with reserved_port() as port:
        run(calls, port)


def run(calls, port):
    """Runs the program on all ranks, which find each other at the port."""
    launched = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", PROGRAM, str(ROUNDS), *calls]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": os.path.dirname(__file__)}
    ranks = [subprocess.Popen(command, env=launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **options) for rank in range(RANKS)]
    try:
        # Every opening and every call has a timeout of its own.
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(said)
