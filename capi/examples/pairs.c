/* Sends blocks of other lengths to each rank, with lengths for each start, in operations that are prepared together. */
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { RANKS_MAX = 8, STARTS = 20 };

static uint32_t rank, ranks;

/* How many elements go from one rank to another in a start; in the preparation, start 0, the most. */
static size_t sent(uint32_t from, uint32_t to, size_t start) { return (from + 2 * to + 1) / (start % 4 + 1); }

static int32_t element(uint32_t from, uint32_t to, size_t at) { return (int32_t)(from * 10000 + to * 100 + at); }

/* Writes what this rank sends to each rank and receives from it. */
static void lengths(size_t start, size_t *send, size_t *receive) {
    for (uint32_t peer = 0; peer < ranks; peer++) {
        send[peer] = sent(rank, peer, start);
        receive[peer] = sent(peer, rank, start);
    }
}

static void run(peerlane_operation *exchange, size_t start) {
    void *input, *output;
    size_t bytes;
    CHECK(peerlane_operation_input(exchange, &input, &bytes));
    int32_t *to_send = input;
    /* Every block stays where the preparation has put it. */
    for (uint32_t to = 0, begin = 0; to < ranks; begin += (uint32_t)sent(rank, to, 0), to++)
        for (size_t at = 0; at < sent(rank, to, start); at++) to_send[begin + at] = element(rank, to, at + start);
    CHECK(peerlane_operation_run(exchange));
    CHECK(peerlane_operation_output(exchange, &output, NULL));
    const int32_t *received = output;
    for (uint32_t from = 0, begin = 0; from < ranks; begin += (uint32_t)sent(from, rank, 0), from++)
        for (size_t at = 0; at < sent(from, rank, start); at++)
            EXPECT(received[begin + at] == element(from, rank, at + start));
}

/* Gathers blocks whose lengths differ, and change in each start. */
static void gather_counts(peerlane_operation *gather) {
    for (size_t start = 0; start < STARTS; start++) {
        size_t counts[RANKS_MAX], total = 0, before = 0;
        for (uint32_t from = 0; from < ranks; from++) {
            if (from == rank) before = total;
            total += counts[from] = (from + start) % 5;
        }
        void *memory;
        CHECK(peerlane_operation_resize_counts(gather, counts, PEERLANE_AS_PREPARED, PEERLANE_AS_PREPARED));
        CHECK(peerlane_operation_input(gather, &memory, NULL));
        for (size_t at = 0; at < counts[rank]; at++) ((uint16_t *)memory)[at] = (uint16_t)(start * 100 + before + at);
        CHECK(peerlane_operation_run(gather));
        CHECK(peerlane_operation_output(gather, &memory, NULL));
        for (size_t at = 0; at < total; at++) EXPECT(((uint16_t *)memory)[at] == start * 100 + at);
    }
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    EXPECT(ranks <= RANKS_MAX);
    size_t send[RANKS_MAX], receive[RANKS_MAX], most[RANKS_MAX];
    for (uint32_t from = 0; from < ranks; from++) most[from] = 4;

    enum { OPERATIONS = 3 };
    peerlane_operation_options options[OPERATIONS] = {PEERLANE_OPERATION_OPTIONS_INIT, PEERLANE_OPERATION_OPTIONS_INIT,
                                                      PEERLANE_OPERATION_OPTIONS_INIT};
    lengths(0, send, receive);
    options[0].collective = PEERLANE_COLLECTIVE_ALL_TO_ALL;
    options[0].dtype = PEERLANE_DTYPE_I32;
    options[0].send_counts = send;
    options[0].receive_counts = receive;
    options[0].resizable = true;
    options[0].check_starts = true;
    options[0].label = "pairs";
    options[1].collective = PEERLANE_COLLECTIVE_ALL_GATHER;
    options[1].dtype = PEERLANE_DTYPE_U16;
    options[1].counts = most;
    options[1].resizable = true;
    options[2].collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    options[2].dtype = PEERLANE_DTYPE_F64;
    options[2].count = 1;
    peerlane_operation *operations[OPERATIONS];
    CHECK(peerlane_operation_prepare_all(group, options, OPERATIONS, operations));

    for (size_t start = 0; start < STARTS; start++) {
        lengths(start, send, receive);
        CHECK(peerlane_operation_resize_pairs(operations[0], send, receive, PEERLANE_AS_PREPARED, PEERLANE_AS_PREPARED));
        run(operations[0], start);
    }
    gather_counts(operations[1]);
    void *memory;
    CHECK(peerlane_operation_input(operations[2], &memory, NULL));
    *(double *)memory = rank + 0.5;
    CHECK(peerlane_operation_run(operations[2]));
    CHECK(peerlane_operation_output(operations[2], &memory, NULL));
    EXPECT(*(double *)memory == ranks * (ranks - 1) / 2 + ranks * 0.5);
    for (int at = 0; at < OPERATIONS; at++) CHECK(peerlane_operation_destroy(operations[at]));

    /* One operation at a time has pairs, too. */
    peerlane_operation *single;
    lengths(0, send, receive);
    options[0].resizable = options[0].check_starts = false;
    CHECK(peerlane_operation_prepare(group, &options[0], &single));
    run(single, 0);
    CHECK(peerlane_operation_destroy(single));

    /* A rank that expects another length than comes is an error on all ranks. */
    if (ranks > 1) {
        if (rank == 0) receive[1]++;
        EXPECT(peerlane_operation_prepare(group, &options[0], &single) == PEERLANE_STATUS_MISMATCH);
        EXPECT(strstr(peerlane_error_text(), "send[0] is 2 elements on rank 1, but receive[1] is 3 elements on rank 0") != NULL);
        CHECK(peerlane_group_barrier(group));
    }
    CHECK(peerlane_group_close(group));
    return 0;
}
