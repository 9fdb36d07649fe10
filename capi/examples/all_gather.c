/* Gathers blocks of floats, and then sums an array over all ranks. */
#include <string.h>

#include "check.h"

enum { COUNT = 1000 };

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));

    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_GATHER;
    options.dtype = PEERLANE_DTYPE_F32;
    options.count = COUNT;
    peerlane_operation *gather;
    CHECK(peerlane_operation_prepare(group, &options, &gather));
    for (int start = 0; start < 10; start++) {
        void *input, *output;
        size_t bytes;
        CHECK(peerlane_operation_input(gather, &input, &bytes));
        EXPECT(bytes == COUNT * sizeof(float));
        for (int at = 0; at < COUNT; at++) ((float *)input)[at] = (float)(rank * 100 + (unsigned)start);
        CHECK(peerlane_operation_run(gather));
        CHECK(peerlane_operation_output(gather, &output, &bytes));
        EXPECT(bytes == ranks * COUNT * sizeof(float));
        for (uint32_t from = 0; from < ranks; from++)
            for (int at = 0; at < COUNT; at++)
                EXPECT(((float *)output)[from * COUNT + (unsigned)at] == (float)(from * 100 + (unsigned)start));
    }
    CHECK(peerlane_operation_destroy(gather));

    options.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    options.dtype = PEERLANE_DTYPE_I32;
    options.reduction = PEERLANE_REDUCTION_SUM;
    peerlane_operation *sum;
    CHECK(peerlane_operation_prepare(group, &options, &sum));
    void *input, *output;
    CHECK(peerlane_operation_input(sum, &input, NULL));
    for (int at = 0; at < COUNT; at++) ((int32_t *)input)[at] = (int32_t)rank + at;
    CHECK(peerlane_operation_start(sum));
    CHECK(peerlane_operation_wait(sum, -1, NULL));
    CHECK(peerlane_operation_output(sum, &output, NULL));
    int32_t all = (int32_t)(ranks * (ranks - 1) / 2);
    for (int at = 0; at < COUNT; at++) EXPECT(((int32_t *)output)[at] == all + (int32_t)ranks * at);

    char text[4096];
    CHECK(peerlane_operation_report(sum, text, sizeof text));
    EXPECT(strstr(text, "\"collective\":\"all-reduce\"") != NULL);
    CHECK(peerlane_operation_destroy(sum));
    CHECK(peerlane_group_close(group));
    return 0;
}
