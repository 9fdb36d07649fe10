/* Rank 1 gives arguments that the library refuses; the others get an error that names it, and all go on. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

static uint32_t rank;

/* The call is refused on rank 1, and the others learn of it: the group has not ended, which a wait for rank 1 would do. */
#define REFUSED(call, word)                                                                           \
    do {                                                                                              \
        peerlane_status status_ = (call);                                                             \
        const char *text_ = peerlane_error_text();                                                    \
        int is_as_expected_ = rank == 1                                                               \
            ? status_ == PEERLANE_STATUS_INVALID_ARGUMENT                                             \
            : status_ == PEERLANE_STATUS_ABORTED && peerlane_error_rank() == 1                        \
                && strstr(text_, "rank 1 failed (invalid argument)") != NULL;                         \
        if (!is_as_expected_ || strstr(text_, word) == NULL) {                                        \
            fprintf(stderr, "%s:%d: rank %u: status %d, \"%s\"\n", __FILE__, __LINE__, rank, status_, text_); \
            exit(1);                                                                                  \
        }                                                                                             \
        CHECK(peerlane_group_check(group));                                                           \
    } while (0)

/* The value on rank 1, and that on the others. */
#define ON_1(wrong, right) (rank == 1 ? (wrong) : (right))

static peerlane_operation_options good(void) {
    peerlane_operation_options options = PEERLANE_OPERATION_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    options.count = 10;
    return options;
}

#define PREPARE_REFUSED(field, wrong, word)                                                           \
    do {                                                                                              \
        peerlane_operation *refused_;                                                                 \
        peerlane_operation_options options_ = good();                                                 \
        if (rank == 1) options_.field = (wrong);                                                      \
        REFUSED(peerlane_operation_prepare(group, &options_, &refused_), word);                       \
        EXPECT(refused_ == NULL);                                                                     \
    } while (0)

static void operations(peerlane_group *group, peerlane_window *of_another) {
    peerlane_operation *operation;
    int foreign = 0;
    PREPARE_REFUSED(header_version, 77, "header_version is 77");
    PREPARE_REFUSED(collective, 99, "collective is 99, expected 0 to 9");
    PREPARE_REFUSED(dtype, 99, "dtype is 99, expected 0 to 15");
    PREPARE_REFUSED(reduction, 99, "reduction is 99, expected 0 to 3");
    PREPARE_REFUSED(engine, "warp", "engine is \"warp\", expected a kind that all ranks offer: processor");
    PREPARE_REFUSED(beside_compute, 99, "beside_compute is 99, expected 0 to 2");
    PREPARE_REFUSED(algorithm, "guess", "guess");
    PREPARE_REFUSED(algorithm, "\xff", "algorithm is not UTF-8");
    PREPARE_REFUSED(timeout_ms, (uint64_t)-3, "timeout_ms is 18446744073709551613");
    PREPARE_REFUSED(input, (peerlane_window *)&foreign, "no handle");
    PREPARE_REFUSED(output, (peerlane_window *)group, "another kind");
    PREPARE_REFUSED(output, of_another, "another group");
    PREPARE_REFUSED(count, SIZE_MAX, "which exceed the address space");

    // These only move.
    const uint32_t moved[] = {PEERLANE_DTYPE_F8E4M3, PEERLANE_DTYPE_F8E8M0, PEERLANE_DTYPE_COMPLEX64};
    const char *names[] = {"dtype is f8e4m3", "dtype is f8e8m0", "dtype is complex64"};
    for (int at = 0; at < 3; at++) {
        peerlane_operation_options sum = good();
        sum.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
        if (rank == 1) sum.dtype = moved[at];
        REFUSED(peerlane_operation_prepare(group, &sum, &operation), names[at]);
    }

    peerlane_operation_options options = good();
    REFUSED(peerlane_operation_prepare(group, ON_1(NULL, &options), &operation), "options is NULL");
    REFUSED(peerlane_operation_prepare(group, &options, ON_1(NULL, &operation)), "operation is NULL");
    CHECK(peerlane_operation_prepare(group, &options, &operation));
    CHECK(peerlane_operation_run(operation));
    CHECK(peerlane_operation_destroy(operation));
}

static void windows(peerlane_group *group, peerlane_window *of_another) {
    static char memory[64];
    peerlane_window *window, *over;
    REFUSED(peerlane_window_allocate(group, 64, ON_1(NULL, &window)), "window is NULL");
    REFUSED(peerlane_window_over(group, ON_1(NULL, memory), sizeof memory, &over), "memory is NULL");
    REFUSED(peerlane_window_over(group, memory, ON_1(SIZE_MAX, sizeof memory), &over), "");
    int file = memfd_create("arena", MFD_CLOEXEC);
    EXPECT(file >= 0 && ftruncate(file, 1 << 20) == 0);
    REFUSED(peerlane_window_over_descriptor(group, ON_1(-1, file), 0, 64, &over), "descriptor is -1");
    REFUSED(peerlane_window_over_descriptor(group, file, ON_1(100, 0), 64, &over), "offset is 100");
    REFUSED(peerlane_window_over_descriptor(group, file, ON_1(1 << 20, 0), 64, &over), "has 1048576 bytes");
    REFUSED(peerlane_window_over_descriptor(group, file, 0, 64, ON_1(NULL, &over)), "window is NULL");
    EXPECT(close(file) == 0);
    CHECK(peerlane_window_allocate(group, 64, &window));

    peerlane_channel *channel;
    REFUSED(peerlane_channel_open(group, window, 1, ON_1(NULL, &channel)), "channel is NULL");
    REFUSED(peerlane_channel_open(group, ON_1(NULL, window), 1, &channel), "window is NULL");
    REFUSED(peerlane_channel_open(group, ON_1(of_another, window), 1, &channel), "another group");
    REFUSED(peerlane_channel_open(group, window, ON_1(0, 1), &channel), "signals is 0");
    CHECK(peerlane_channel_open(group, window, 1, &channel));
    CHECK(peerlane_channel_destroy(channel));

    REFUSED(peerlane_window_release(group, ON_1(NULL, window)), "window is NULL");
    REFUSED(peerlane_window_release(group, ON_1((peerlane_window *)group, window)), "another kind");
    REFUSED(peerlane_window_release(group, ON_1(of_another, window)), "another group");
    CHECK(peerlane_window_release(group, window));
}

static void groups(peerlane_group *group) {
    peerlane_group *part;
    uint32_t all[] = {0, 1, 2, 3};
    REFUSED(peerlane_group_split(group, ON_1((int64_t)1 << 32, 0), 0, &part), "color is 4294967296");
    REFUSED(peerlane_group_split(group, 0, 0, ON_1(NULL, &part)), "part is NULL");
    REFUSED(peerlane_group_subgroup(group, ON_1(NULL, all), 4, &part), "ranks is NULL");
    REFUSED(peerlane_group_subgroup(group, all, ON_1(5, 4), &part), "count is 5");
    REFUSED(peerlane_group_subgroup(group, all, 4, ON_1(NULL, &part)), "part is NULL");
    CHECK(peerlane_group_subgroup(group, all, 4, &part));
    CHECK(peerlane_group_barrier(part));
    CHECK(peerlane_group_close(part));
}

int main(void) {
    peerlane_group *group, *another;
    peerlane_window *of_another;
    CHECK(peerlane_group_open(NULL, &group));
    CHECK(peerlane_group_rank(group, &rank, NULL));
    groups(group);
    CHECK(peerlane_group_split(group, 0, 0, &another));
    CHECK(peerlane_window_allocate(another, 64, &of_another));
    operations(group, of_another);
    windows(group, of_another);
    CHECK(peerlane_window_release(another, of_another));
    CHECK(peerlane_group_close(another));
    CHECK(peerlane_group_barrier(group));
    CHECK(peerlane_group_close(group));
    return 0;
}
