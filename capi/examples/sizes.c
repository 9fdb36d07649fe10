/* Gathers another number of elements in each start, from and into a window, in two groups that were split. */
#include "check.h"

enum { COUNT_MAX = 500, RANKS_MAX = 16 };

int main(void) {
    peerlane_group *world, *group;
    CHECK(peerlane_group_open(NULL, &world));
    uint32_t world_rank, rank, ranks;
    CHECK(peerlane_group_rank(world, &world_rank, NULL));
    CHECK(peerlane_group_split(world, world_rank % 2, 0, &group));
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    EXPECT(ranks < RANKS_MAX);
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, (1 + RANKS_MAX) * COUNT_MAX * sizeof(double), &window));
    void *memory;
    CHECK(peerlane_window_memory(window, &memory, NULL));
    double *elements = memory;

    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_GATHER;
    options.dtype = PEERLANE_DTYPE_F64;
    options.count = COUNT_MAX;
    options.resizable = true;
    options.input = window;
    options.output = window;
    options.output_begin = COUNT_MAX;
    peerlane_operation *gather;
    CHECK(peerlane_operation_prepare(group, &options, &gather));
    for (size_t start = 1; start < 100; start++) {
        size_t count = start * 37 % COUNT_MAX + 1, begin = COUNT_MAX + start % 8 * 8;
        for (size_t at = 0; at < count; at++) elements[at] = (double)(rank * 1000 + at + start);
        CHECK(peerlane_operation_resize(gather, count, PEERLANE_AS_PREPARED, begin));
        CHECK(peerlane_operation_run(gather));
        for (uint32_t from = 0; from < ranks; from++)
            for (size_t at = 0; at < count; at++)
                EXPECT(elements[begin + from * count + at] == (double)(from * 1000 + at + start));
    }

    /* Place 0 is the begin of the window, and not the place of the preparation. */
    for (size_t at = 0; at < (1 + RANKS_MAX) * COUNT_MAX; at++) elements[at] = -1;
    elements[COUNT_MAX * RANKS_MAX] = rank + 1;
    CHECK(peerlane_operation_resize(gather, 1, COUNT_MAX * RANKS_MAX, 0));
    CHECK(peerlane_operation_run(gather));
    for (uint32_t from = 0; from < ranks; from++) EXPECT(elements[from] == from + 1);
    EXPECT(elements[COUNT_MAX] == -1);
    elements[0] = 10 + rank;
    CHECK(peerlane_operation_resize(gather, 1, PEERLANE_AS_PREPARED, PEERLANE_AS_PREPARED));
    CHECK(peerlane_operation_run(gather));
    for (uint32_t from = 0; from < ranks; from++) EXPECT(elements[COUNT_MAX + from] == 10 + from);

    CHECK(peerlane_operation_destroy(gather));
    CHECK(peerlane_window_release(group, window));
    CHECK(peerlane_group_close(group));

    /* The same ranks again, by a list. */
    uint32_t members[RANKS_MAX];
    for (uint32_t at = 0; at < ranks; at++) members[at] = 2 * at + world_rank % 2;
    CHECK(peerlane_group_subgroup(world, members, ranks, &group));
    uint32_t again;
    CHECK(peerlane_group_rank(group, &again, NULL));
    EXPECT(again == rank);
    CHECK(peerlane_group_close(group));
    CHECK(peerlane_group_close(world));
    return 0;
}
