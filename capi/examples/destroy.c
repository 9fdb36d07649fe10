/* Destroying an operation or a channel waits for a call of another thread that uses it. The ranks are threads of this process. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "check.h"

enum { RANKS = 2 };

static char address[64];
static peerlane_group *groups[RANKS];
static peerlane_window *windows[RANKS];
static peerlane_channel *channels[RANKS];
static peerlane_operation *operations[RANKS];
static atomic_bool is_destroyed;

static void pause_ms(long ms) {
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void *open_rank(void *argument) {
    uint32_t rank = (uint32_t)(uintptr_t)argument;
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "host";
    options.hub = address;
    options.rank = rank;
    options.ranks = RANKS;
    CHECK(peerlane_group_open(&options, &groups[rank]));
    CHECK(peerlane_window_allocate(groups[rank], 64, &windows[rank]));
    CHECK(peerlane_channel_open(groups[rank], windows[rank], 1, &channels[rank]));
    peerlane_operation_options description = PEERLANE_OPERATION_OPTIONS_INIT;
    description.count = 8;
    CHECK(peerlane_operation_prepare(groups[rank], &description, &operations[rank]));
    return NULL;
}

static void *run_first(void *argument) {
    (void)argument;
    CHECK(peerlane_operation_run(operations[0]));
    return NULL;
}

static void *wait_first(void *argument) {
    (void)argument;
    CHECK(peerlane_channel_wait(channels[0], NULL, 1, 0, 30000));
    return NULL;
}

static void *destroy_operation(void *argument) {
    (void)argument;
    CHECK(peerlane_operation_destroy(operations[0]));
    is_destroyed = true;
    return NULL;
}

static void *destroy_channel(void *argument) {
    (void)argument;
    CHECK(peerlane_channel_destroy(channels[0]));
    is_destroyed = true;
    return NULL;
}

static void *close_rank(void *argument) {
    CHECK(peerlane_group_close(groups[(uintptr_t)argument]));
    return NULL;
}

/* Runs a function once for each rank at the same time. */
static void on_all(void *(*body)(void *)) {
    pthread_t threads[RANKS];
    for (uintptr_t rank = 0; rank < RANKS; rank++) EXPECT(pthread_create(&threads[rank], NULL, body, (void *)rank) == 0);
    for (int rank = 0; rank < RANKS; rank++) EXPECT(pthread_join(threads[rank], NULL) == 0);
}

int main(void) {
    peerlane_hub *hub;
    CHECK(peerlane_hub_open(NULL, RANKS, NULL, &hub));
    CHECK(peerlane_hub_address(hub, address, sizeof address));
    on_all(open_rank);

    /* Rank 0 runs the operation and waits for rank 1. */
    pthread_t user, destroyer;
    EXPECT(pthread_create(&user, NULL, run_first, NULL) == 0);
    pause_ms(200);
    EXPECT(pthread_create(&destroyer, NULL, destroy_operation, NULL) == 0);
    pause_ms(200);
    EXPECT(!is_destroyed);
    EXPECT(peerlane_operation_run(operations[0]) == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(strstr(peerlane_error_text(), "destroyed") != NULL);
    CHECK(peerlane_operation_run(operations[1]));
    EXPECT(pthread_join(user, NULL) == 0 && pthread_join(destroyer, NULL) == 0);
    EXPECT(is_destroyed);
    CHECK(peerlane_operation_destroy(operations[1]));

    /* Rank 0 waits for a signal of rank 1. */
    is_destroyed = false;
    EXPECT(pthread_create(&user, NULL, wait_first, NULL) == 0);
    pause_ms(200);
    EXPECT(pthread_create(&destroyer, NULL, destroy_channel, NULL) == 0);
    pause_ms(200);
    EXPECT(!is_destroyed);
    CHECK(peerlane_channel_signal(channels[1], NULL, 0, 0));
    EXPECT(pthread_join(user, NULL) == 0 && pthread_join(destroyer, NULL) == 0);
    EXPECT(is_destroyed);
    CHECK(peerlane_channel_destroy(channels[1]));

    on_all(close_rank);
    CHECK(peerlane_hub_close(hub));
    return 0;
}
