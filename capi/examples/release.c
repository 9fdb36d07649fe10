/* A release that fails leaves the window as it is on every rank, and succeeds once nobody uses the window. */
#include <string.h>

#include "check.h"

int main(void) {
    peerlane_group *group, *other;
    CHECK(peerlane_group_open(NULL, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    CHECK(peerlane_group_split(group, 0, 0, &other));
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, 8 * ranks, &window));
    void *memory;
    CHECK(peerlane_window_memory(window, &memory, NULL));
    volatile uint64_t *words = memory;
    peerlane_channel *channel;
    CHECK(peerlane_channel_open(group, window, 1, &channel));
    if (rank != 0) CHECK(peerlane_channel_destroy(channel));

    peerlane_status status = peerlane_window_release(group, window);
    EXPECT(status == (rank == 0 ? PEERLANE_STATUS_INVALID_ARGUMENT : PEERLANE_STATUS_ABORTED));
    EXPECT(strstr(peerlane_error_text(), "is still used") != NULL);
    EXPECT(peerlane_window_release(other, window) != PEERLANE_STATUS_OK);

    /* Rank 0 still writes to the memory of its peers. */
    CHECK(peerlane_window_memory(window, &memory, NULL));
    EXPECT(memory == (void *)words);
    if (rank == 0) {
        words[0] = 77;
        for (uint32_t peer = 1; peer < ranks; peer++) CHECK(peerlane_channel_put(channel, NULL, peer, 0, 8, 8));
        CHECK(peerlane_channel_flush(channel, 10000));
        CHECK(peerlane_channel_destroy(channel));
    }
    CHECK(peerlane_group_barrier(group));
    if (rank != 0) EXPECT(words[1] == 77);

    CHECK(peerlane_window_release(group, window));
    EXPECT(peerlane_window_release(group, window) == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(strstr(peerlane_error_text(), "destroyed") != NULL);
    CHECK(peerlane_group_close(other));
    CHECK(peerlane_group_close(group));
    return 0;
}
