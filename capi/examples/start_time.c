/* Prints the median time of a start of an all-gather of 8 bytes on one rank, in nanoseconds, to compare with start_time.rs. */
#include <time.h>

#include "check.h"

enum { ROUNDS = 101, STARTS = 5000 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int compare(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

int main(void) {
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "host";
    peerlane_group *group;
    CHECK(peerlane_group_open(&options, &group));
    peerlane_operation_options description = PEERLANE_OPERATION_OPTIONS_INIT;
    description.count = 8;
    peerlane_operation *gather;
    CHECK(peerlane_operation_prepare(group, &description, &gather));
    double times[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        double begin = now();
        for (int start = 0; start < STARTS; start++) CHECK(peerlane_operation_run(gather));
        times[round] = (now() - begin) / STARTS;
    }
    qsort(times, ROUNDS, sizeof *times, compare);
    printf("%.1f\n", times[ROUNDS / 2]);
    CHECK(peerlane_operation_destroy(gather));
    CHECK(peerlane_group_close(group));
    return 0;
}
