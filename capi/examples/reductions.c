/* Gives each rank a part of its own length of a sum, sums of other lengths in each start, and the sum of the ranks up
 * to its own. */
#include <stdlib.h>

#include "check.h"

/* The element of a rank at a place. */
static int64_t element(uint32_t rank, size_t at) { return (int64_t)(rank + 1) * 1000 + (int64_t)at; }

/* The sum of the elements of the first ranks at a place. */
static int64_t sum_of(uint32_t ranks, size_t at) {
    int64_t sum = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) sum += element(rank, at);
    return sum;
}

/* Starts an operation, and compares the output with `expected` sums of the first ranks from an offset on. */
static void start(peerlane_operation *operation, uint32_t rank, uint32_t summed, size_t first, size_t expected) {
    void *input, *output;
    size_t bytes;
    CHECK(peerlane_operation_input(operation, &input, &bytes));
    for (size_t at = 0; at < bytes / sizeof(int64_t); at++) ((int64_t *)input)[at] = element(rank, at);
    CHECK(peerlane_operation_run(operation));

    CHECK(peerlane_operation_output(operation, &output, &bytes));
    EXPECT(bytes == expected * sizeof(int64_t));
    for (size_t at = 0; at < expected; at++) EXPECT(((int64_t *)output)[at] == sum_of(summed, first + at));
}

/* Prepares an operation and starts it once. */
static void run(peerlane_group *group, const peerlane_operation_options *options, uint32_t summed, size_t first) {
    uint32_t rank;
    CHECK(peerlane_group_rank(group, &rank, NULL));
    peerlane_operation *operation;
    CHECK(peerlane_operation_prepare(group, options, &operation));

    size_t expected = options->counts ? options->counts[rank] : summed ? options->count : 0;
    start(operation, rank, summed, first, expected);
    CHECK(peerlane_operation_destroy(operation));
}

/* Gives each start of an all-reduce a length of its own, up to that of the options. */
static void run_resized(peerlane_group *group, const peerlane_operation_options *options) {
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    peerlane_operation *operation;
    CHECK(peerlane_operation_prepare(group, options, &operation));

    const size_t lengths[] = {3, options->count, 0, 777};
    for (size_t at = 0; at < sizeof lengths / sizeof *lengths; at++) {
        CHECK(peerlane_operation_resize(operation, lengths[at], PEERLANE_AS_PREPARED, PEERLANE_AS_PREPARED));
        start(operation, rank, ranks, 0, lengths[at]);
    }
    CHECK(peerlane_operation_destroy(operation));
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));

    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.dtype = PEERLANE_DTYPE_I64;
    options.reduction = PEERLANE_REDUCTION_SUM;

    /* Parts of 1, 70, 0, 1, 70, 0, ... elements. */
    const size_t lengths[] = {1, 70, 0};
    size_t *counts = calloc(ranks, sizeof *counts);
    size_t before = 0;
    for (uint32_t to = 0; to < ranks; to++) {
        counts[to] = lengths[to % 3];
        if (to < rank) before += counts[to];
    }
    options.collective = PEERLANE_COLLECTIVE_REDUCE_SCATTER;
    options.counts = counts;
    run(group, &options, ranks, before);
    options.counts = NULL;
    free(counts);

    options.count = 20000;
    options.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    options.resizable = true;
    run_resized(group, &options);
    options.resizable = false;

    options.count = 100;
    options.collective = PEERLANE_COLLECTIVE_SCAN;
    run(group, &options, rank + 1, 0);

    /* Rank 0 gets nothing. */
    options.collective = PEERLANE_COLLECTIVE_EXSCAN;
    run(group, &options, rank, 0);

    CHECK(peerlane_group_close(group));
    return 0;
}
