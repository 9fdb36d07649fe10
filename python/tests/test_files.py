"""Windows over files of the program: ranks of other processes use an arena that the program has mapped itself."""

import fcntl
import mmap
import os

import numpy
import pytest

import peerlane

LEN = 1501
STARTS = 3


def gather(group, file):
    """Gathers from and into a part of a file, which begins at its second page."""
    nbytes = (1 + group.size) * LEN * 4
    os.truncate(file.fileno(), mmap.PAGESIZE + nbytes)
    mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE + nbytes)
    arena = numpy.frombuffer(mapped, "u4", offset=mmap.PAGESIZE)

    window = group.window_over_descriptor(file, nbytes, mmap.PAGESIZE)
    operation = group.prepare("all-gather", "u32", LEN, input=(window, 0), output=(window, LEN))
    for start in range(STARTS):
        blocks = [1000 * (STARTS * rank + start) + numpy.arange(LEN, dtype="u4") for rank in range(group.size)]
        arena[:LEN] = blocks[group.rank]
        operation.run()
        assert (arena[LEN:] == numpy.concatenate(blocks)).all()
        assert (numpy.asarray(window.memory(dtype="u32")) == arena).all()
        group.barrier()
    operation.drop()
    group.release(window)

    # The arena is the program's again, with its last content.
    assert (arena[LEN : 2 * LEN] == 1000 * (STARTS - 1) + numpy.arange(LEN)).all()
    del arena
    mapped.close()


def memfds(group):
    with open(os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0) as file:
        gather(group, file)
        assert fcntl.fcntl(file, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK


def shared_files(group):
    path = f"/dev/shm/arena-of-a-test-{os.getpid()}"
    with open(path, "x+b", buffering=0) as file:
        os.remove(path)
        gather(group, file)
        file.truncate(0)
    group.barrier()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_memfd_is_a_window(ranks):
    peerlane.spawn(memfds, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_a_file_of_shared_memory_is_a_window(ranks):
    peerlane.spawn(shared_files, ranks)


def refusals(group):
    arena = open(os.memfd_create("arena"), "r+b", buffering=0)
    arena.truncate(1 << 20)

    def refused(words, *good, bad):
        # Rank 1 makes the call with a wrong argument, and all ranks learn of it.
        arguments = bad if group.rank == 1 else good
        with pytest.raises(peerlane.Error) as caught:
            group.window_over_descriptor(*arguments)
        assert words in str(caught.value), caught.value
        group.check()

    reader, writer = os.pipe()
    closed = open(os.memfd_create("arena"), "r+b")
    closed.close()
    refused("is that of a pipe, pipe:[", arena, 8, bad=(reader, 8))
    refused("descriptor is -1", arena, 8, bad=(-1, 8))
    refused("expected an open file or its descriptor", arena, 8, bad=(closed, 8))
    refused("offset is 100 bytes", arena, 8, bad=(arena, 8, 100))
    refused("has 1048576 bytes, expected at least 1048577 bytes from offset 0", arena, 8, bad=(arena, 1048577))
    with open(f"/proc/self/fd/{arena.fileno()}", "rb") as readable:
        refused("for reading only (O_RDONLY)", arena, 8, bad=(readable, 8))
    os.close(reader)
    os.close(writer)
    group.release(group.window_over_descriptor(arena.fileno(), 8))


def test_what_is_no_file_to_map_is_refused():
    peerlane.spawn(refusals, 2)
