/* Sends each block when it is written, and reads each block when it has arrived. */
#include "check.h"

enum { COUNT = 1000, STARTS = 5 };

static uint32_t value(uint32_t from, uint32_t to, uint32_t start) {
    return 100 * start + 10 * from + to;
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_TO_ALL;
    options.dtype = PEERLANE_DTYPE_U32;
    options.count = COUNT;
    options.arrivals = options.departures = true;
    peerlane_operation *exchange;
    CHECK(peerlane_operation_prepare(group, &options, &exchange));

    peerlane_chunk arrivals[16], departures[16];
    size_t arriving = 16, departing = 16;
    CHECK(peerlane_operation_arrivals(exchange, arrivals, &arriving));
    CHECK(peerlane_operation_departures(exchange, departures, &departing));
    EXPECT(arriving == ranks && departing == ranks);

    for (uint32_t start = 1; start <= STARTS; start++) {
        void *input, *output;
        CHECK(peerlane_operation_input(exchange, &input, NULL));
        EXPECT(peerlane_operation_depart(exchange, 0, PEERLANE_ALL_CHUNKS) == PEERLANE_STATUS_INVALID_ARGUMENT);
        CHECK(peerlane_operation_start(exchange));
        for (size_t i = 0; i < departing; i++) {
            uint32_t to = departures[i].block;
            for (size_t at = 0; at < COUNT; at++) ((uint32_t *)input)[to * COUNT + at] = value(rank, to, start);
            CHECK(peerlane_operation_depart(exchange, to, PEERLANE_ALL_CHUNKS));
            EXPECT(peerlane_operation_depart(exchange, to, PEERLANE_ALL_CHUNKS) == PEERLANE_STATUS_INVALID_ARGUMENT);
        }
        for (size_t i = 0; i < arriving; i++)
            CHECK(peerlane_operation_wait_block(exchange, arrivals[i].block, arrivals[i].chunk, -1, NULL));
        bool has_arrived = false;
        EXPECT(peerlane_operation_wait_block(exchange, ranks, 0, 0, &has_arrived) == PEERLANE_STATUS_INVALID_ARGUMENT);
        CHECK(peerlane_operation_wait(exchange, -1, NULL));

        CHECK(peerlane_operation_output(exchange, &output, NULL));
        for (uint32_t from = 0; from < ranks; from++)
            for (size_t at = 0; at < COUNT; at++)
                EXPECT(((uint32_t *)output)[from * COUNT + at] == value(from, rank, start));
    }

    /* The host has no streams. */
    EXPECT(peerlane_operation_start_beside(exchange, NULL, NULL) == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(peerlane_operation_finish(exchange) == PEERLANE_STATUS_INVALID_ARGUMENT);
    CHECK(peerlane_operation_destroy(exchange));
    CHECK(peerlane_group_close(group));
    return 0;
}
