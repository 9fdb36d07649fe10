/* Gathers from and into an arena that the program has mapped itself: in a memfd, and in a file of /dev/shm. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

enum { LEN = 1501, STARTS = 3 };

/* Gathers in a part of the file, which begins at its second page. */
static void gather(peerlane_group *group, int file) {
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t bytes = (LEN + ranks * LEN) * sizeof(uint32_t);
    EXPECT(ftruncate(file, (off_t)(page + bytes)) == 0);
    char *arena = mmap(NULL, page + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    EXPECT(arena != MAP_FAILED);

    peerlane_window *window;
    CHECK(peerlane_window_over_descriptor(group, file, page, bytes, &window));
    size_t size;
    CHECK(peerlane_window_memory(window, NULL, &size));
    EXPECT(size == bytes);

    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_GATHER;
    options.dtype = PEERLANE_DTYPE_U32;
    options.count = LEN;
    options.input = window;
    options.output = window;
    options.output_begin = LEN;
    peerlane_operation *operation;
    CHECK(peerlane_operation_prepare(group, &options, &operation));

    /* The program's own mapping shows the same bytes. */
    volatile uint32_t *input = (uint32_t *)(arena + page);
    volatile uint32_t *output = input + LEN;
    for (uint32_t start = 0; start < STARTS; start++) {
        for (uint32_t at = 0; at < LEN; at++) input[at] = 1000000 * rank + 10000 * start + at;
        CHECK(peerlane_operation_run(operation));
        for (uint32_t at = 0; at < ranks * LEN; at++) EXPECT(output[at] == 1000000 * (at / LEN) + 10000 * start + at % LEN);
        CHECK(peerlane_group_barrier(group));
    }
    CHECK(peerlane_operation_destroy(operation));
    CHECK(peerlane_window_release(group, window));
    EXPECT(munmap(arena, page + bytes) == 0);
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));

    int sealed = memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(sealed >= 0);
    gather(group, sealed);
    EXPECT(fcntl(sealed, F_GET_SEALS) == F_SEAL_SHRINK);
    EXPECT(close(sealed) == 0);

    char name[64];
    snprintf(name, sizeof name, "/arena-of-a-test-%d", (int)getpid());
    int shared = shm_open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    EXPECT(shared >= 0 && shm_unlink(name) == 0);
    gather(group, shared);
    /* The file is the program's again. */
    EXPECT(ftruncate(shared, 0) == 0);
    EXPECT(close(shared) == 0);

    CHECK(peerlane_group_close(group));
    return 0;
}
