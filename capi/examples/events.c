/* Waits for starts and for the end of a group in an event loop. */
#include <poll.h>

#include "check.h"

enum { COUNT = 100000, STARTS = 5 };

/* Returns whether a descriptor is readable within a time. */
static bool is_readable(int descriptor, int limit_ms) {
    struct pollfd entry = {.fd = descriptor, .events = POLLIN};
    int ready = poll(&entry, 1, limit_ms);
    EXPECT(ready >= 0);
    return ready == 1 && (entry.revents & POLLIN) != 0;
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    options.dtype = PEERLANE_DTYPE_U32;
    options.count = COUNT;
    peerlane_operation *sum;
    CHECK(peerlane_operation_prepare(group, &options, &sum));
    peerlane_window *window;
    peerlane_channel *channel;
    CHECK(peerlane_window_allocate(group, 64, &window));
    CHECK(peerlane_channel_open(group, window, 1, &channel));

    int descriptor = -1, end = -1, kept = -1;
    EXPECT(peerlane_operation_descriptor(sum, &descriptor) == PEERLANE_STATUS_INVALID_ARGUMENT);
    CHECK(peerlane_group_end_descriptor(group, &end));
    EXPECT(end >= 0 && !is_readable(end, 0));
    for (uint32_t start = 1; start <= STARTS; start++) {
        void *memory;
        CHECK(peerlane_operation_input(sum, &memory, NULL));
        for (size_t at = 0; at < COUNT; at++) ((uint32_t *)memory)[at] = rank + start;

        /* Nothing is complete before rank 0 has started it, too. */
        for (uint32_t peer = 1; rank == 0 && peer < ranks; peer++)
            CHECK(peerlane_channel_wait(channel, NULL, peer, 0, 20000));
        CHECK(peerlane_operation_start(sum));
        CHECK(peerlane_operation_descriptor(sum, &descriptor));
        EXPECT(kept == -1 || kept == descriptor);
        kept = descriptor;
        if (rank != 0) {
            EXPECT(!is_readable(descriptor, 20));
            CHECK(peerlane_channel_signal(channel, NULL, 0, 0));
        }
        EXPECT(is_readable(descriptor, 20000));
        bool is_done = false;
        CHECK(peerlane_operation_wait(sum, 0, &is_done));
        EXPECT(is_done);
        EXPECT(peerlane_operation_descriptor(sum, &descriptor) == PEERLANE_STATUS_INVALID_ARGUMENT);

        CHECK(peerlane_operation_output(sum, &memory, NULL));
        for (size_t at = 0; at < COUNT; at++)
            EXPECT(((uint32_t *)memory)[at] == ranks * (ranks - 1) / 2 + ranks * start);
    }

    /* Rank 0 leaves without the others, whose open start and group end. */
    if (rank == 0) {
        for (uint32_t peer = 1; peer < ranks; peer++)
            CHECK(peerlane_channel_wait(channel, NULL, peer, 0, 20000));
        CHECK(peerlane_channel_destroy(channel));
        CHECK(peerlane_operation_destroy(sum));
        CHECK(peerlane_group_destroy(group));
        return 0;
    }
    CHECK(peerlane_operation_start(sum));
    CHECK(peerlane_operation_descriptor(sum, &descriptor));
    CHECK(peerlane_channel_signal(channel, NULL, 0, 0));
    EXPECT(is_readable(descriptor, 20000));
    EXPECT(is_readable(end, 20000));
    EXPECT(peerlane_group_check(group) != PEERLANE_STATUS_OK);
    bool is_done;
    EXPECT(peerlane_operation_wait(sum, 0, &is_done) != PEERLANE_STATUS_OK);
    CHECK(peerlane_channel_destroy(channel));
    CHECK(peerlane_operation_destroy(sum));
    CHECK(peerlane_group_destroy(group));
    return 0;
}
