/* Sends a number around the ring of ranks, through a window, by puts and signals. */
#include "check.h"

int main(void) {
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "host";
    peerlane_group *group;
    CHECK(peerlane_group_open(&options, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, 2 * sizeof(uint64_t), &window));
    peerlane_channel *channel;
    CHECK(peerlane_channel_open(group, window, 1, &channel));
    void *memory;
    CHECK(peerlane_window_memory(window, &memory, NULL));
    /* The first number is sent, the second one received. */
    volatile uint64_t *numbers = memory;

    uint32_t next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    for (uint64_t round = 0; round < 100; round++) {
        if (rank > 0 || round > 0) {
            CHECK(peerlane_channel_wait(channel, NULL, previous, 0, 10000));
            EXPECT(numbers[1] == round * ranks + rank - 1);
        }
        numbers[0] = round * ranks + rank;
        CHECK(peerlane_channel_put_signal(channel, NULL, next, 0, sizeof(uint64_t), sizeof(uint64_t), 0));
        CHECK(peerlane_channel_flush(channel, 10000));
    }
    if (rank == 0) CHECK(peerlane_channel_wait(channel, NULL, previous, 0, 10000));
    CHECK(peerlane_group_barrier(group));
    CHECK(peerlane_channel_destroy(channel));
    CHECK(peerlane_window_release(group, window));
    CHECK(peerlane_group_close(group));
    return 0;
}
