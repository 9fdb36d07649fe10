/* Runs collectives on any memory of the program and on parts of a window, without preparing operations. */
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { COUNT = 300, RANKS_MAX = 8 };

static uint32_t rank, ranks;

static peerlane_call_options call_of(uint32_t collective, uint32_t dtype) {
    peerlane_call_options options = PEERLANE_CALL_OPTIONS_INIT;
    options.collective = collective;
    options.dtype = dtype;
    return options;
}

/* Arrays of the program, of another length in each call. */
static void arrays(peerlane_group *group) {
    float input[COUNT], sum[COUNT];
    for (size_t count = 1; count <= COUNT; count += 13) {
        for (size_t at = 0; at < count; at++) input[at] = (float)(rank + at);
        peerlane_call_options reduce = call_of(PEERLANE_COLLECTIVE_ALL_REDUCE, PEERLANE_DTYPE_F32);
        reduce.reduction = PEERLANE_REDUCTION_MAX;
        reduce.input = input;
        reduce.output = sum;
        reduce.input_count = reduce.output_count = count;
        CHECK(peerlane_call_run(group, &reduce));
        for (size_t at = 0; at < count; at++) EXPECT(sum[at] == (float)(ranks - 1 + at));

        /* In place: the input is the output. */
        reduce.reduction = PEERLANE_REDUCTION_SUM;
        reduce.output = input;
        reduce.timeout_ms = 20000;
        reduce.beside_compute = PEERLANE_SETTING_ON;
        CHECK(peerlane_call_run(group, &reduce));
        for (size_t at = 0; at < count; at++) EXPECT(input[at] == (float)(ranks * (ranks - 1) / 2 + ranks * at));
    }

    /* Only the root of a gather has an output, and the array of a broadcast is the output. */
    int32_t own[2] = {(int32_t)rank, 7}, gathered[2 * RANKS_MAX];
    peerlane_call_options gather = call_of(PEERLANE_COLLECTIVE_GATHER, PEERLANE_DTYPE_I32);
    gather.root = ranks - 1;
    gather.input = own;
    gather.input_count = 2;
    if (rank == gather.root) {
        gather.output = gathered;
        gather.output_count = 2 * ranks;
    }
    CHECK(peerlane_call_run(group, &gather));
    for (uint32_t from = 0; rank == gather.root && from < ranks; from++)
        EXPECT(gathered[2 * from] == (int32_t)from && gathered[2 * from + 1] == 7);
    peerlane_call_options broadcast = call_of(PEERLANE_COLLECTIVE_BROADCAST, PEERLANE_DTYPE_I32);
    broadcast.output = own;
    broadcast.output_count = 2;
    CHECK(peerlane_call_run(group, &broadcast));
    EXPECT(own[0] == 0 && own[1] == 7);
}

/* Blocks of different lengths. */
static void lengths(peerlane_group *group) {
    size_t counts[RANKS_MAX], total = 0, before = 0;
    for (uint32_t from = 0; from < ranks; from++) {
        if (from == rank) before = total;
        total += counts[from] = 3 * from + 1;
    }
    uint16_t *all = calloc(total, sizeof *all), own[3 * RANKS_MAX];
    for (size_t at = 0; at < counts[rank]; at++) own[at] = (uint16_t)(before + at + 1);
    peerlane_call_options gather = call_of(PEERLANE_COLLECTIVE_ALL_GATHER, PEERLANE_DTYPE_U16);
    gather.counts = counts;
    gather.input = own;
    gather.input_count = counts[rank];
    gather.output = all;
    gather.output_count = total;
    CHECK(peerlane_call_run(group, &gather));
    for (size_t at = 0; at < total; at++) EXPECT(all[at] == at + 1);
    free(all);
}

/* Calls without elements, on all ranks or on some, need no memory. */
static void no_elements(peerlane_group *group) {
    for (uint32_t collective = PEERLANE_COLLECTIVE_ALL_GATHER; collective <= PEERLANE_COLLECTIVE_EXSCAN; collective++) {
        peerlane_call_options nothing = call_of(collective, PEERLANE_DTYPE_F32);
        CHECK(peerlane_call_run(group, &nothing));
    }
    size_t counts[RANKS_MAX] = {0};
    counts[ranks - 1] = 2;
    int32_t own[2] = {5, 6}, all[2] = {0, 0};
    peerlane_call_options gather = call_of(PEERLANE_COLLECTIVE_ALL_GATHER, PEERLANE_DTYPE_I32);
    gather.counts = counts;
    gather.input = counts[rank] > 0 ? own : NULL;
    gather.input_count = counts[rank];
    gather.output = all;
    gather.output_count = 2;
    CHECK(peerlane_call_run(group, &gather));
    EXPECT(all[0] == 5 && all[1] == 6);
}

/* Blocks of another length for each pair of ranks: none to the own rank, and none at all in some calls. */
static void pairs(peerlane_group *group) {
    for (size_t most = 0; most < 5; most++) {
        size_t send[RANKS_MAX], receive[RANKS_MAX], sent = 0, received = 0;
        int64_t input[RANKS_MAX * 16], output[RANKS_MAX * 16];
        for (uint32_t peer = 0; peer < ranks; peer++) {
            send[peer] = peer == rank ? 0 : most * (peer % 2 + 1);
            receive[peer] = peer == rank ? 0 : most * (rank % 2 + 1);
            for (size_t at = 0; at < send[peer]; at++) input[sent++] = (int64_t)(rank * 1000 + peer * 100 + at);
            received += receive[peer];
        }
        peerlane_call_options exchange = call_of(PEERLANE_COLLECTIVE_ALL_TO_ALL, PEERLANE_DTYPE_I64);
        exchange.send_counts = send;
        exchange.receive_counts = receive;
        exchange.input = sent > 0 ? input : NULL;
        exchange.input_count = sent;
        exchange.output = received > 0 ? output : NULL;
        exchange.output_count = received;
        CHECK(peerlane_call_run(group, &exchange));
        const int64_t *block = output;
        for (uint32_t peer = 0; peer < ranks; block += receive[peer], peer++)
            for (size_t at = 0; at < receive[peer]; at++) EXPECT(block[at] == (int64_t)(peer * 1000 + rank * 100 + at));
    }
}

/* Parts of a window, without a copy, and mixed with an array. */
static void windows(peerlane_group *group) {
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, (1 + RANKS_MAX) * COUNT * sizeof(double), &window));
    void *memory;
    CHECK(peerlane_window_memory(window, &memory, NULL));
    double *elements = memory;
    peerlane_call_options gather = call_of(PEERLANE_COLLECTIVE_ALL_GATHER, PEERLANE_DTYPE_F64);
    gather.input_window = gather.output_window = window;
    gather.output_begin = COUNT;
    for (size_t count = COUNT; count > 0; count /= 3) {
        gather.input_begin = COUNT - count;
        gather.input_count = count;
        gather.output_count = count * ranks;
        for (size_t at = 0; at < count; at++) elements[COUNT - count + at] = (double)(rank * 1000 + at);
        CHECK(peerlane_call_run(group, &gather));
        for (uint32_t from = 0; from < ranks; from++)
            for (size_t at = 0; at < count; at++)
                EXPECT(elements[COUNT + from * count + at] == (double)(from * 1000 + at));
    }

    double own = rank + 0.5;
    gather.input_window = NULL;
    gather.input = &own;
    gather.input_count = 1;
    gather.output_count = ranks;
    CHECK(peerlane_call_run(group, &gather));
    for (uint32_t from = 0; from < ranks; from++) EXPECT(elements[COUNT + from] == from + 0.5);
    CHECK(peerlane_window_release(group, window));
}

/* Calls that are started, and waited for later. */
static void starts(peerlane_group *group) {
    uint64_t own = 0, all[RANKS_MAX], more[RANKS_MAX];
    peerlane_call_options gather = call_of(PEERLANE_COLLECTIVE_ALL_GATHER, PEERLANE_DTYPE_U64);
    gather.input = &own;
    gather.input_count = 1;
    gather.output = all;
    gather.output_count = ranks;
    for (uint64_t start = 0; start < 10; start++) {
        own = 100 * start + rank;
        peerlane_call *call;
        CHECK(peerlane_call_start(group, &gather, &call));
        bool is_done = false;
        if (start % 2 == 0) CHECK(peerlane_call_wait(call, -1, NULL));
        while (!is_done) CHECK(peerlane_call_wait(call, start % 3 == 0 ? 0 : 10, &is_done));
        for (uint32_t from = 0; from < ranks; from++) EXPECT(all[from] == 100 * start + from);

        /* Each wait returns the same. */
        is_done = false;
        CHECK(peerlane_call_wait(call, 0, &is_done));
        EXPECT(is_done);
        CHECK(peerlane_call_wait(call, -1, NULL));
        CHECK(peerlane_call_destroy(call));
        EXPECT(peerlane_call_wait(call, -1, NULL) == PEERLANE_STATUS_INVALID_ARGUMENT);
    }

    /* The next call completes the one before, and so does the end of the handle. */
    peerlane_call *first, *second;
    own = rank + 1;
    CHECK(peerlane_call_start(group, &gather, &first));
    gather.output = more;
    CHECK(peerlane_call_start(group, &gather, &second));
    CHECK(peerlane_call_destroy(second));
    for (uint32_t from = 0; from < ranks; from++) EXPECT(all[from] == from + 1 && more[from] == from + 1);
    CHECK(peerlane_call_wait(first, -1, NULL));
    CHECK(peerlane_call_destroy(first));
}

/* The stats count calls, and those that found a kept operation. */
static void counters(peerlane_group *group) {
    char stats[4096];
    CHECK(peerlane_group_stats(group, stats, sizeof stats));
    const char *calls = strstr(stats, "\"calls\":"), *hits = strstr(stats, "\"hits\":");
    EXPECT(calls != NULL && hits != NULL);
    long made = atol(calls + strlen("\"calls\":")), found = atol(hits + strlen("\"hits\":"));
    EXPECT(made > 60 && found > made / 2 && found < made);
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    EXPECT(ranks <= RANKS_MAX);
    arrays(group);
    lengths(group);
    no_elements(group);
    pairs(group);
    windows(group);
    starts(group);
    counters(group);
    CHECK(peerlane_group_close(group));
    return 0;
}
