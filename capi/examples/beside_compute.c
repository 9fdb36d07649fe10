/* Sets for a group, and for single operations, that they run beside kernels of the program. */
#include <string.h>

#include "check.h"

/* Prepares an all-gather of one element with a setting. */
static peerlane_status prepare(peerlane_group *group, uint32_t setting, peerlane_operation **gather) {
    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_GATHER;
    options.dtype = PEERLANE_DTYPE_U32;
    options.count = 1;
    options.beside_compute = setting;
    options.engine = setting == PEERLANE_SETTING_ON ? "processor" : NULL;
    return peerlane_operation_prepare(group, &options, gather);
}

/* Runs an all-gather that each rank prepares with a setting of its own, which must mean the same on all ranks. */
static void agree(peerlane_group *group, uint32_t setting) {
    uint32_t rank, ranks;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    peerlane_operation *gather;
    CHECK(prepare(group, setting, &gather));

    void *input, *output;
    CHECK(peerlane_operation_input(gather, &input, NULL));
    *(uint32_t *)input = rank + 1;
    CHECK(peerlane_operation_run(gather));

    CHECK(peerlane_operation_output(gather, &output, NULL));
    for (uint32_t from = 0; from < ranks; from++) EXPECT(((uint32_t *)output)[from] == from + 1);
    CHECK(peerlane_operation_destroy(gather));
}

/* Expects that settings of two ranks differ, and that the error says how. */
static void differ(peerlane_group *group, uint32_t setting, const char *text) {
    peerlane_operation *gather;
    EXPECT(prepare(group, setting, &gather) == PEERLANE_STATUS_MISMATCH);
    EXPECT(gather == NULL && strstr(peerlane_error_text(), text) != NULL);
    CHECK(peerlane_group_check(group));
}

int main(void) {
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    peerlane_group *group, *part;
    options.beside_compute = true;
    options.engine = "processor";
    CHECK(peerlane_group_open(&options, &group));
    uint32_t rank;
    CHECK(peerlane_group_rank(group, &rank, NULL));

    /* A group that is split from another one has its setting. */
    CHECK(peerlane_group_split(group, 0, 0, &part));
    peerlane_group *groups[] = {group, part};
    for (int at = 0; at < 2; at++) {
        agree(groups[at], rank == 0 ? PEERLANE_SETTING_AS_GROUP : PEERLANE_SETTING_ON);
        agree(groups[at], PEERLANE_SETTING_OFF);
        differ(groups[at], rank == 0 ? PEERLANE_SETTING_AS_GROUP : PEERLANE_SETTING_OFF,
               "beside_compute is false on rank 1, true on rank 0");
    }
    CHECK(peerlane_group_close(part));
    CHECK(peerlane_group_close(group));

    /* By default the intent is off. */
    CHECK(peerlane_group_open(NULL, &group));
    agree(group, rank == 0 ? PEERLANE_SETTING_AS_GROUP : PEERLANE_SETTING_OFF);
    agree(group, PEERLANE_SETTING_ON);
    CHECK(peerlane_group_close(group));
    return 0;
}
