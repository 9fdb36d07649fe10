"""Bad input, lost ranks, Ctrl-C, forks and the end of the interpreter."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy
import pytest

import peerlane

# In this folder, where no other package of the name is found than the installed one.
PROCESS = {"capture_output": True, "text": True, "timeout": 60, "cwd": os.path.dirname(__file__)}


def bad_arguments(group):
    size = group.size
    good, output = numpy.zeros(4, "float32"), numpy.zeros(4 * size, "float32")
    readonly = numpy.zeros(4 * size, "float32")
    readonly.flags.writeable = False
    with pytest.raises(peerlane.InvalidArgument, match="expected a contiguous array"):
        group.all_gather(numpy.zeros((4, 4), "float32")[:, :1], output)
    with pytest.raises(peerlane.InvalidArgument, match=r"output has 3 elements, expected 8 for 2 ranks"):
        group.all_gather(good, numpy.zeros(3, "float32"))
    with pytest.raises(peerlane.InvalidArgument, match="output has elements of f64, expected f32"):
        group.all_gather(good, numpy.zeros(4 * size))
    with pytest.raises(peerlane.InvalidArgument, match="read-only"):
        group.all_gather(good, readonly)
    with pytest.raises(peerlane.InvalidArgument, match="is a list, expected a tensor"):
        group.all_gather([1, 2], output)
    with pytest.raises(peerlane.InvalidArgument, match="root is 7"):
        group.broadcast(good, root=7)
    with pytest.raises(peerlane.InvalidArgument, match="3 elements, expected a multiple of 2"):
        group.all_to_all(numpy.zeros(3), numpy.zeros(3))
    with pytest.raises(peerlane.InvalidArgument, match="expected 2 numbers with that sum"):
        group.all_to_all(numpy.zeros(3), numpy.zeros(3), splits=([1, 1], [2, 1]))
    with pytest.raises(peerlane.InvalidArgument, match='reduction is "product", expected one of sum'):
        group.all_reduce(good, reduction="product")
    with pytest.raises(
        peerlane.InvalidArgument,
        match="elements of complex64, which can be moved but not reduced; expected an integer, f16, bf16, f32 or f64",
    ):
        group.all_reduce(numpy.zeros(2, "complex64"))
    with pytest.raises(peerlane.InvalidArgument, match="elements of complex128, which can be moved but not reduced"):
        group.all_reduce(numpy.zeros(2, "complex128"))
    with pytest.raises(peerlane.InvalidArgument, match="elements of bool"):
        group.all_reduce(numpy.zeros(2, bool))
    assert group.all_gather(numpy.array([1j]), numpy.zeros(size, complex)).tolist() == [1j] * size
    with pytest.raises(peerlane.InvalidArgument, match="dtype is 'f31', expected one of u8"):
        group.prepare("all-gather", "f31", 1)
    assert group.prepare("all-gather", float, 2).input.nbytes == 16 and group.prepare("all-gather", "f4", 2).input.nbytes == 8
    with pytest.raises(peerlane.InvalidArgument, match="timeout is nan, expected a finite number of seconds"):
        group.all_gather(good, output, timeout=numpy.nan)
    with pytest.raises(peerlane.InvalidArgument, match="stream is given, expected none"):
        group.all_gather(good, output, stream=1)
    with pytest.raises(peerlane.InvalidArgument, match="counts are given, expected none"):
        group.all_reduce(good, counts=[2, 2])
    with pytest.raises(peerlane.InvalidArgument, match='collective is "all-sum"'):
        group.prepare("all-sum", "f32", 1)
    with pytest.raises(peerlane.InvalidArgument, match="timeout is -1"):
        peerlane.open(timeout=-1)
    with pytest.raises(peerlane.InvalidArgument, match="init was called before"):
        peerlane.init()
    with pytest.raises(peerlane.InvalidArgument, match="a start is open"):
        gather = group.prepare("all-gather", "f32", 1)
        future = gather.start()
        try:
            gather.run()
        finally:
            future.wait()
    assert isinstance(peerlane.InvalidArgument(""), ValueError)
    with pytest.raises(peerlane.InvalidArgument, match="elements of >f4"):
        group.all_reduce(numpy.zeros(2, ">f4"))
    assert group.all_gather(numpy.ones(2, ">f4"), numpy.zeros(2 * size, ">f4")).tolist() == [1] * 2 * size
    with pytest.raises(peerlane.InvalidArgument, match="input is a float64, which is a value without memory"):
        group.all_reduce(numpy.float64(1), numpy.zeros(1))
    with pytest.raises(peerlane.InvalidArgument, match="count is -1, expected a whole number from 0"):
        group.prepare("all-gather", "f32", -1)
    with pytest.raises(peerlane.InvalidArgument, match="shape is -1"):
        group.empty(-1)
    assert group.empty((numpy.int64(2), 3)).shape == (2, 3)
    with pytest.raises(peerlane.InvalidArgument, match="expected a pair: a window"):
        group.prepare("all-gather", "f32", 1, output=group.window(64))
    with pytest.raises(peerlane.InvalidArgument, match="begin is 1 and nbytes 8, expected multiples of 4"):
        group.window(64).memory(1, 8, "f32")
    # The group goes on.
    group.all_gather(good, output)
    group.close()
    with pytest.raises(peerlane.Error):
        group.empty(4)


def test_bad_arguments_are_errors():
    peerlane.spawn(bad_arguments, 2)


def different_on_ranks(group):
    count = 3 + group.rank
    with pytest.raises(peerlane.Mismatch) as caught:
        group.prepare("all-gather", "f32", count)
    assert caught.value.rank == 1 and caught.value.kind == "mismatch" and "ranks disagree" in str(caught.value)
    dtype = ["float32", "int32"][group.rank]
    with pytest.raises(peerlane.Mismatch, match="dtype"):
        group.all_gather(numpy.zeros(2, dtype), numpy.zeros(4, dtype))
    group.all_gather(numpy.zeros(100, "int8"), numpy.zeros(200, "int8"))
    with pytest.raises(peerlane.Mismatch) as caught:
        group.all_gather(numpy.zeros(count, "int8"), numpy.zeros(2 * count, "int8"))
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value), caught.value
    group.abandon()


def test_ranks_that_differ_are_named():
    peerlane.spawn(different_on_ranks, 2, timeout=5)


def splits_that_differ(group, calls_before):
    me = group.rank
    source, target = numpy.full(3, 10.0 + me), numpy.full(3, -1.0)
    for _ in range(calls_before):
        # Other values in the memory for copies, and an operation that is prepared.
        group.all_to_all(numpy.full(6, 77.0), numpy.empty(6), splits=([3, 3], [3, 3]))
    # Rank 1 sends 1 element to rank 0, which expects 2, and the other way round.
    with pytest.raises(peerlane.Mismatch) as caught:
        group.all_to_all(source, target, splits=([1, 2], [1, 2]))
    assert caught.value.kind == "mismatch"
    assert "rank 1 sends 1 elements to rank 0, which expects 2" in str(caught.value)
    assert (target == -1).all()
    # The ranks have compared them before anything moved, so the group goes on.
    swapped = group.all_to_all(numpy.full(2, me), numpy.zeros(2, int), splits=([1, 1], [1, 1]))
    assert swapped.tolist() == [0, 1]


@pytest.mark.parametrize("calls_before", [0, 1, 3])
def test_splits_that_differ_are_named_on_all_ranks(calls_before):
    peerlane.spawn(splits_that_differ, 2, calls_before, timeout=8)


def other_call_than_splits(group):
    with pytest.raises(peerlane.Mismatch, match='rank 1 calls "exchange"'):
        if group.rank == 1:
            group.exchange(b"text")
        else:
            group.all_to_all(numpy.zeros(2), numpy.zeros(2), splits=([1, 1], [1, 1]))


def test_another_call_than_splits_is_named():
    peerlane.spawn(other_call_than_splits, 2)


def numbers_that_are_none(group):
    size = group.size
    source, target = numpy.full(size, 1.0), numpy.full(size, -1.0)
    for number in (1, 1000, 1 << 20, 1 << 28, 1 << 62, 1 << 64, 1 << 100_000):
        # The sum fits, and the single numbers do not.
        side = [size + number, -number] + [0] * (size - 2)
        for splits in [(side, side), ([1] * size, side), (side, [1] * size)]:
            with pytest.raises(peerlane.InvalidArgument, match="expected a whole number from 0|expected 2 numbers with that sum"):
                group.all_to_all(source, target, splits=splits)
        with pytest.raises(peerlane.InvalidArgument, match=r"counts is .*, expected a whole number from 0|has \d+ elements, expected"):
            group.all_gather(source, target, counts=side)
    for wrong in [3, [1, 1], ([1, 1],), ([1, 1], 5), ([1.0, 1.0], [1, 1]), (["a", "b"], [1, 1]), ([1], [1, 1]), ([], []),
                  ([1, 1], [1, 1], [1, 1]), "ab", ([None, 1], [1, 1]), (numpy.ones(2), [1, 1])]:  # fmt: skip
        with pytest.raises(peerlane.InvalidArgument, match="splits"):
            group.all_to_all(source, target, splits=wrong)
        with pytest.raises(peerlane.InvalidArgument, match="counts"):
            group.all_gather(source, target, counts=[1, 1, 1] if wrong == [1, 1] else wrong)
    assert (target == -1).all()
    # Whole numbers of any kind are.
    one = numpy.ones(size, "int16")
    assert group.all_to_all(source, target, splits=(one, one.tolist())) is target
    assert group.all_gather(source[:1].copy(), target, counts=one).tolist() == [1.0] * size

    for root in (-1, size, 1 << 64, 0.0, "0", None, [0]):
        with pytest.raises(peerlane.InvalidArgument, match="root is"):
            group.broadcast(source, root=root)
        if root is not None:
            with pytest.raises(peerlane.InvalidArgument, match="root"):
                group.prepare("broadcast", "f32", 1, root=root)
    group.broadcast(source, root=numpy.int8(0))
    for nbytes in (-5, 1 << 64, 2.5, "64", None):
        for call in (group.window, group.reserve):
            with pytest.raises(peerlane.InvalidArgument, match="nbytes is"):
                call(nbytes)
    for call in (group.window, group.reserve):
        with pytest.raises(peerlane.Error):
            call((1 << 63) - 1)
    for shape in (2.5, -5, (2, -1), (2.5,), "ab", None, 1 << 64, (1 << 40, 1 << 40), numpy.ones(2)):
        with pytest.raises(peerlane.InvalidArgument, match="shape is"):
            group.empty(shape)
    assert group.empty(numpy.array([2, 3])).shape == (2, 3) and group.empty(numpy.int64(2)).shape == (2,)
    for color in (-1, 1 << 32, 0.5, "a"):
        with pytest.raises(peerlane.InvalidArgument, match=r"color is .*, expected a whole number from 0 to 4294967295"):
            group.split(color)
    for key in (1 << 63, 0.5, None):
        with pytest.raises(peerlane.InvalidArgument, match="key is"):
            group.split(0, key)
    for ranks in (5, [-1], [1 << 32], [0.5], None, "a"):
        with pytest.raises(peerlane.InvalidArgument, match="rank"):
            group.subgroup(ranks)
    for count in (-1, 2.5, 1 << 64, [1] * size + [-1], "a", None, ([1, 1], [1, -1]), ([1, 1], [1, 0.5]), numpy.ones(2)):
        with pytest.raises(peerlane.InvalidArgument, match="count is"):
            group.prepare("all-to-all", "f32", count)
    with pytest.raises(peerlane.Error):
        group.prepare("all-gather", "f64", (1 << 63) - 1)
    assert group.prepare("all-gather", "f32", numpy.array([1, 2])).input.nbytes == 4 * (1 + group.rank)

    window = group.window(64)
    for options in [{"chunks": -1}, {"chunks": 1 << 32}, {"chunks": 0.5}, {"input": (window, -1)}, {"output": (window, 0.5)},
                    {"output": (window, 1 << 64)}, {"matrix": 5}, {"matrix": (-1, "both")}, {"matrix": (2, 3)}, {"timeout": "1"},
                    {"timeout": float("nan")}, {"in_place": 3}, {"reduction": 3}, {"algorithm": 3}, {"strict": 5},
                    {"beside_compute": 5}]:  # fmt: skip
        with pytest.raises(peerlane.InvalidArgument, match=next(iter(options))):
            group.prepare("all-gather", "f32", 1, **options)
    part = group.prepare("all-gather", "f32", 1, resizable=True, in_place=True, output=(window, 0))
    for options in [{"count": -1}, {"count": 1 << 64}, {"count": 0.5}, {"count": 1, "output": -1}, {"count": 1, "output": 0.5}]:
        with pytest.raises(peerlane.InvalidArgument, match=r"(count|output) is"):
            part.resize(**options)
    part.resize(numpy.int64(1), output=numpy.uint8(2))
    for stream in (-1, 1 << 64):
        with pytest.raises(peerlane.InvalidArgument, match="stream is"):
            part.start_on(stream)
    for timeout in (float("nan"), float("inf"), -float("inf"), 1 << 64, "1", [1], 1 << 20_000):
        expected = r"timeout is (?s:.)*, expected a finite number of seconds below 2\^63"
        with pytest.raises(peerlane.InvalidArgument, match=expected):
            group.all_reduce(source, timeout=timeout)
        with pytest.raises(peerlane.InvalidArgument, match=expected):
            part.run(timeout)
        with pytest.raises(peerlane.InvalidArgument, match=expected):
            part.wait(timeout)
    for name in ("timeout", "start_timeout"):
        for timeout in (0, -1, float("nan"), float("inf")):
            with pytest.raises(peerlane.InvalidArgument, match=f"{name} is .*, expected a positive number of seconds"):
                peerlane.open(**{name: timeout})
    for begin, nbytes in [(-1, 4), (0.5, 4), (0, -4), (0, 1 << 64), (1 << 64, 4), ("0", 4)]:
        with pytest.raises(peerlane.InvalidArgument, match="(begin|nbytes) is"):
            window.memory(begin, nbytes)
    with pytest.raises(peerlane.InvalidArgument):
        window.memory(64, (1 << 64) - 1)
    for arguments in [(-1, 8, "f32", (1, 0)), (1 << 64, 8, "f32", (1, 0)), (0, 8, "f32", (1, 0)), (64, -8, "f32", (1, 0)),
                      (64, 0.5, "f32", (1, 0)), (64, 8, 5, (1, 0)), (64, 8, "f32", 5), (64, 8, "f32", (1, 1 << 40))]:  # fmt: skip
        with pytest.raises(peerlane.InvalidArgument, match="address|nbytes|dtype|device"):
            peerlane.Memory(*arguments, None)
    with pytest.raises(peerlane.InvalidArgument, match="data is"):
        group.exchange("text")
    for reduction in (3, None, ["sum"]):
        with pytest.raises(peerlane.InvalidArgument, match="reduction is"):
            group.all_reduce(source, reduction=reduction)
    for ranks in (-1, 1 << 64, 0.5, "2"):
        with pytest.raises(peerlane.InvalidArgument, match="ranks is"):
            peerlane.Hub("127.0.0.1:0", ranks)
        with pytest.raises(peerlane.InvalidArgument, match="ranks is"):
            peerlane.open(hub="127.0.0.1:1", ranks=ranks)
    for options in [
        {"rank": -1},
        {"device": -1},
        {"device": 0.5},
        {"rank": 1 << 32},
        {"timeout": "1"},
        {"hub": 5},
        {"secret": 5},
        {"strict": 5},
    ]:
        with pytest.raises(peerlane.InvalidArgument, match=next(iter(options))):
            peerlane.open(**options)
    # The group goes on.
    group.barrier()
    assert group.all_reduce(numpy.ones(1))[0] == size


def test_numbers_that_are_none_are_refused_by_name():
    peerlane.spawn(numbers_that_are_none, 2)
    for ranks in (0, -1, 0.5, "2"):
        with pytest.raises(peerlane.InvalidArgument, match="ranks is"):
            peerlane.spawn(numbers_that_are_none, ranks)


def missing_torch():
    import sys

    sys.modules["torch"] = None
    with pytest.raises(peerlane.Unavailable, match="pip install torch"):
        importlib.import_module("peerlane.torch")


def old_torch():
    import sys
    import types

    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].__version__ = "2.1.0+cpu"
    sys.modules["torch.distributed"] = sys.modules["torch"].distributed = types.ModuleType("torch.distributed")
    with pytest.raises(peerlane.Unavailable, match=r"PyTorch is 2\.1\.0\+cpu, expected 2\.8 or newer"):
        importlib.import_module("peerlane.torch")


@pytest.mark.parametrize("program", ["missing_torch", "old_torch"])
def test_pytorch_that_is_missing_or_too_old(program):
    ended = run(f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import test_errors; test_errors.{program}()")
    assert ended.returncode == 0, ended.stderr


def a_lost_rank(group):
    array = numpy.full(1000, group.rank)
    if group.rank == 1:
        group.all_reduce(array)
        os.kill(os.getpid(), signal.SIGKILL) if os.fork() == 0 else group.abandon()
        return None
    # The first call can fail already: rank 1 may leave while it goes on here.
    with pytest.raises(peerlane.PeerLost) as caught:
        for _ in range(101):
            group.all_reduce(array)
    assert caught.value.rank == 1 and isinstance(caught.value, ConnectionError)
    with pytest.raises(peerlane.Error):
        group.check()
    with group.shrink() as rest:
        total = rest.all_reduce(numpy.ones(3))
        assert rest.size == 2 and total.tolist() == [2, 2, 2]
    group.abandon()
    return "went on"


def test_a_lost_rank_is_named_and_the_others_go_on():
    assert peerlane.spawn(a_lost_rank, 3) == ["went on", None, "went on"]


def killed(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(peerlane.PeerLost) as caught:
        group.barrier()
    assert caught.value.rank == 1
    group.abandon()


def test_a_killed_rank_is_named():
    with pytest.raises(peerlane.Error, match="the process ended with status -9") as caught:
        peerlane.spawn(killed, 2)
    assert caught.value.rank == 1


def late_start(group, waited):
    gather = group.prepare("all-gather", "f32", 1)
    if group.rank == 1:
        while not os.path.exists(waited):
            time.sleep(0.01)
        gather.run()
        group.all_reduce(numpy.ones(1))
        return
    future = gather.start()
    assert not future.done()
    with pytest.raises(TimeoutError, match=r"is not complete after 0.1 s; it goes on"):
        future.wait(timeout=0.1)

    # A deadline that has passed: the wait looks once.
    begun = time.monotonic()
    for timeout in (0, -1, -0.0, -1e-12, -1e300, numpy.float32(-3)):
        for wait in (future.wait, gather.wait):
            with pytest.raises(TimeoutError, match="is not complete after 0 s"):
                wait(timeout=timeout)
    assert time.monotonic() - begun < 5

    open(waited, "w").close()
    future.wait()
    for timeout in (0, -1):
        assert future.wait(timeout=timeout) is not None

    # A call starts, though its deadline has passed.
    array = numpy.ones(1)
    with contextlib.suppress(TimeoutError):
        group.all_reduce(array, timeout=-1)
    group._calls.finish()
    assert array[0] == group.size


def test_a_wait_with_a_limit_can_be_repeated(tmp_path):
    peerlane.spawn(late_start, 2, str(tmp_path / "waited"))


def interrupted(group, call):
    if group.rank == 1:
        # Until the other rank has left.
        with pytest.raises(peerlane.Error):
            while True:
                group.check()
                time.sleep(0.01)
        return
    # A program that a shell has started in the background ignores the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        if call == "barrier":
            group.barrier()
        elif call == "prepare":
            group.prepare("all-gather", "f32", 1)
        else:
            group.all_gather(numpy.zeros(1), numpy.zeros(2))
    # It does not wait for the call, which goes on up to its deadline of 600 s, and neither does the end of the process.
    group.abandon()
    os._exit(0)


@pytest.mark.parametrize("call", ["barrier", "prepare", "all_gather"])
def test_ctrl_c_ends_a_wait(call):
    with pytest.raises(peerlane.Error, match="rank 0 failed: the process ended with status 0"):
        peerlane.spawn(interrupted, 2, call, timeout=600)


def dropped_by_threads(group):
    operations = [group.prepare("all-gather", "f32", 1) for _ in range(20)]
    for operation in operations:
        threads = [threading.Thread(target=operation.drop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(peerlane.InvalidArgument, match="the operation was dropped"):
            operation.run()


def test_threads_drop_one_operation():
    peerlane.spawn(dropped_by_threads, 1)


def forked(group):
    gather = group.prepare("all-gather", "f32", 1)
    child = os.fork()
    if child == 0:
        try:
            gather.run()
        except peerlane.InvalidArgument as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    # Objects that a child drops stay with the parent.
    child = os.fork()
    if child == 0:
        del gather
        group._native.abandon()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gather.run()


def test_a_forked_child_gets_an_error():
    peerlane.spawn(forked, 2)


def run(program, *arguments):
    return subprocess.run([sys.executable, "-c", program, *arguments], **PROCESS)


def test_another_number_of_ranks_than_expected_is_refused():
    program = """
import peerlane
try:
    peerlane.init(backend="host", ranks=4)
except peerlane.InvalidArgument as error:
    print(error)
with peerlane.init(backend="host", ranks=1) as group:
    print(group.selection)
hub = peerlane.Hub("127.0.0.1:0", 2)
try:
    peerlane.open(hub=hub, ranks=3)
except peerlane.InvalidArgument as error:
    print(error)
"""
    ended = run(program)
    assert ended.stdout.splitlines() == [
        "init: the group has 1 rank, because no launcher's variables are set, expected 4 ranks, the number that the program has set; "
        "start the ranks with a launcher that passes its variables on, or set RANK and WORLD_SIZE",
        "host (one rank: no launcher's variables are set)",
        "open: ranks is 3, expected 2, the number of ranks of the hub",
    ], ended.stderr


def test_the_interpreter_ends_with_open_objects():
    ended = run("import peerlane; group = peerlane.init(); gather = group.prepare('all-gather', 'f32', 4); memory = gather.input")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_interpreter_ends_with_a_start_in_progress():
    program = """
import numpy, peerlane, os
hub = peerlane.Hub("127.0.0.1:0", 2)
import subprocess, sys
other = subprocess.Popen([sys.executable, "-c", '''
import sys, peerlane
group = peerlane.open(hub=sys.argv[1], rank=1, ranks=2, backend="host")
group.prepare("all-gather", "f64", 8192)
sys.stdin.read()
''', hub.address], stdin=subprocess.PIPE)
group = peerlane.open(hub=hub.address, rank=0, ranks=2, backend="host")
gather = group.prepare("all-gather", "f64", 8192)
future = gather.start()
sys.exit(3)
"""
    ended = run(program)
    assert ended.returncode == 3, ended.stderr


def test_the_first_page_of_the_documentation_runs():
    program = """
import numpy, peerlane

def work(group):
    mine = numpy.full(4, group.rank, "float32")
    all = group.empty((group.size, 4), "float32")
    group.all_gather(mine, all)
    return all[:, 0].tolist()

print(peerlane.spawn(work, 3, method="fork"))
"""
    assert run(program).stdout.strip() == str([[0.0, 1.0, 2.0]] * 3)


def test_a_function_that_fails_is_named():
    with pytest.raises(peerlane.Error, match=r"rank 1 failed: (?s:.)*ZeroDivisionError") as caught:
        peerlane.spawn(fails_on_rank_1, 3)
    assert caught.value.rank == 1


def fails_on_rank_1(group):
    if group.rank == 1:
        return 1 // 0
    group.barrier()
    return None


def test_the_program_is_found():
    ended = subprocess.run([sys.executable, "-m", "peerlane", "doctor"], **PROCESS)
    assert "host" in ended.stdout, ended.stderr
