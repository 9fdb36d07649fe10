/* Threads of rank 0 wait for signals on one channel, which its other threads use meanwhile. Rank 1 answers. */
#include <pthread.h>

#include "check.h"

enum { WAITERS = 3, TIMEOUT_MS = 30000 };

static peerlane_channel *channel;

/* Waits for a signal, and gives it back. */
static void *wait_and_answer(void *argument) {
    size_t signal = (size_t)argument;
    CHECK(peerlane_channel_wait(channel, NULL, 1, signal, TIMEOUT_MS));
    CHECK(peerlane_channel_signal(channel, NULL, 1, signal));
    return NULL;
}

static void rank_0(void) {
    pthread_t waiters[WAITERS];
    for (size_t signal = 0; signal < WAITERS; signal++)
        EXPECT(pthread_create(&waiters[signal], NULL, wait_and_answer, (void *)signal) == 0);
    /* Rank 1 gives no signal before this put. If it waited until the others return, all would run into their timeouts. */
    CHECK(peerlane_channel_put_signal(channel, NULL, 1, 0, 8, 8, WAITERS));
    CHECK(peerlane_channel_flush(channel, TIMEOUT_MS));
    for (int waiter = 0; waiter < WAITERS; waiter++) EXPECT(pthread_join(waiters[waiter], NULL) == 0);
}

static void rank_1(void) {
    CHECK(peerlane_channel_wait(channel, NULL, 0, WAITERS, TIMEOUT_MS));
    /* One signal after the answer to the one before, and the last waiter first. */
    for (size_t signal = WAITERS; signal-- > 0;) {
        CHECK(peerlane_channel_signal(channel, NULL, 0, signal));
        CHECK(peerlane_channel_wait(channel, NULL, 0, signal, TIMEOUT_MS));
    }
}

int main(void) {
    peerlane_group *group;
    peerlane_window *window;
    uint32_t rank;
    CHECK(peerlane_group_open(NULL, &group));
    CHECK(peerlane_group_rank(group, &rank, NULL));
    CHECK(peerlane_window_allocate(group, 64, &window));
    CHECK(peerlane_channel_open(group, window, WAITERS + 1, &channel));
    for (int round = 0; round < 20; round++) rank == 0 ? rank_0() : rank_1();
    CHECK(peerlane_channel_destroy(channel));
    CHECK(peerlane_group_close(group));
    return 0;
}
