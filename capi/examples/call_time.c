/* Prints the median time of an immediate all-gather of 8 bytes on one rank, in nanoseconds, to compare with call_time.rs:
 * of memory of the program, or with the argument "window" of parts of a window, or with "start" of a call with a handle. */
#include <string.h>
#include <time.h>

#include "check.h"

enum { ROUNDS = 101, CALLS = 5000 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int compare(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

int main(int count, char **arguments) {
    const char *way = count > 1 ? arguments[1] : "";
    peerlane_group_options group_options = PEERLANE_GROUP_OPTIONS_INIT;
    group_options.backend = "host";
    peerlane_group *group;
    CHECK(peerlane_group_open(&group_options, &group));
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, 16, &window));

    uint8_t input[8] = {1}, output[8];
    peerlane_call_options options = PEERLANE_CALL_OPTIONS_INIT;
    options.input_count = options.output_count = 8;
    if (strcmp(way, "window") == 0) {
        options.input_window = options.output_window = window;
        options.output_begin = 8;
    } else {
        options.input = input;
        options.output = output;
    }

    const bool has_handle = strcmp(way, "start") == 0;
    double times[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now();
        for (int made = 0; made < CALLS; made++) {
            if (!has_handle) {
                CHECK(peerlane_call_run(group, &options));
                continue;
            }
            peerlane_call *call;
            CHECK(peerlane_call_start(group, &options, &call));
            CHECK(peerlane_call_wait(call, -1, NULL));
            CHECK(peerlane_call_destroy(call));
        }
        times[round] = (now() - begin) / CALLS;
    }
    qsort(times, ROUNDS, sizeof *times, compare);
    printf("%.1f\n", times[ROUNDS / 2]);
    CHECK(peerlane_window_release(group, window));
    CHECK(peerlane_group_close(group));
    return 0;
}
