/* Rank 1 gives arguments that the library refuses; the others get an error that names it, and all go on. */
#define _GNU_SOURCE
#include <poll.h>
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
    PREPARE_REFUSED(reduction, 99, "reduction is 99, expected 0 to 5");
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

/* Lengths for each pair of ranks, and several operations at once. */
static void lengths(peerlane_group *group) {
    static const size_t counts[] = {1, 1, 1, 1};
    peerlane_operation *operations[2];
    PREPARE_REFUSED(send_counts, counts, "receive_counts is NULL, expected a number for each rank, as in send_counts");
    PREPARE_REFUSED(receive_counts, counts, "send_counts is NULL, expected a number for each rank, as in receive_counts");
    peerlane_operation_options pairs = good();
    pairs.counts = ON_1(counts, NULL);
    pairs.send_counts = pairs.receive_counts = counts;
    pairs.collective = PEERLANE_COLLECTIVE_ALL_TO_ALL;
    REFUSED(peerlane_operation_prepare(group, &pairs, &operations[0]), "counts and send_counts are set, expected one of them");

    peerlane_operation_options both[] = {good(), good()};
#define ALL_REFUSED(options, count, operations_, word)                                                \
    do {                                                                                              \
        operations[0] = operations[1] = (peerlane_operation *)group;                                  \
        REFUSED(peerlane_operation_prepare_all(group, options, count, operations_), word);            \
    } while (0)
    ALL_REFUSED(ON_1(NULL, both), 2, operations, "options is NULL");
    EXPECT(operations[0] == NULL && operations[1] == NULL);
    ALL_REFUSED(both, 2, ON_1(NULL, operations), "operations is NULL");
    ALL_REFUSED(both, ON_1(0, 2), operations, "count is 0, expected at least 1");
    if (rank == 1) both[1].collective = 99;
    ALL_REFUSED(both, 2, operations, "options[1]: collective is 99, expected 0 to 9");
    EXPECT(operations[0] == NULL && operations[1] == NULL);
    both[1] = good();
    if (rank == 1) both[0].header_version = 4;
    ALL_REFUSED(both, 2, operations, "header_version is 4, expected 6");
    both[0] = good();
    if (rank == 1) both[1].algorithm = "guess";
    ALL_REFUSED(both, 2, operations, "options[1]: algorithm: ");
    both[1] = good();

    /* Another number of operations is another call, and does not end the group. */
    EXPECT(peerlane_operation_prepare_all(group, both, ON_1(1, 2), operations) == PEERLANE_STATUS_MISMATCH);
    EXPECT(operations[0] == NULL);
    CHECK(peerlane_group_check(group));
    CHECK(peerlane_operation_prepare_all(group, both, 2, operations));
    for (int at = 0; at < 2; at++) {
        CHECK(peerlane_operation_run(operations[at]));
        CHECK(peerlane_operation_destroy(operations[at]));
    }
}

#define EXCHANGE_REFUSED(field, wrong, word)                                                          \
    do {                                                                                              \
        peerlane_all_to_all_v *refused_ = (peerlane_all_to_all_v *)group;                             \
        peerlane_all_to_all_v_options options_ = PEERLANE_ALL_TO_ALL_V_OPTIONS_INIT;                  \
        options_.send_max = options_.receive_max = 4;                                                 \
        if (rank == 1) options_.field = (wrong);                                                      \
        REFUSED(peerlane_all_to_all_v_prepare(group, &options_, &refused_), word);                    \
        EXPECT(refused_ == NULL);                                                                     \
    } while (0)

static void exchanges(peerlane_group *group, peerlane_window *of_another) {
    int foreign = 0;
    EXCHANGE_REFUSED(header_version, 77, "header_version is 77, expected 6");
    EXCHANGE_REFUSED(dtype, 99, "dtype is 99, expected 0 to 15");
    EXCHANGE_REFUSED(beside_compute, 99, "beside_compute is 99, expected 0 to 2");
    EXCHANGE_REFUSED(algorithm, "guess", "algorithm: ");
    EXCHANGE_REFUSED(label, "\xff", "label is not UTF-8");
    EXCHANGE_REFUSED(timeout_ms, (uint64_t)-3, "timeout_ms is 18446744073709551613");
    EXCHANGE_REFUSED(outputs, 3, "outputs");
    EXCHANGE_REFUSED(send_max, SIZE_MAX, "");
    EXCHANGE_REFUSED(input, (peerlane_window *)&foreign, "no handle");
    EXCHANGE_REFUSED(output, of_another, "another group");

    peerlane_all_to_all_v *exchange;
    peerlane_all_to_all_v_options options = PEERLANE_ALL_TO_ALL_V_OPTIONS_INIT;
    REFUSED(peerlane_all_to_all_v_prepare(group, ON_1(NULL, &options), &exchange), "options is NULL");
    REFUSED(peerlane_all_to_all_v_prepare(group, &options, ON_1(NULL, &exchange)), "exchange is NULL");
}

static peerlane_call_options good_call(void) {
    static int32_t input[4], output[4];
    peerlane_call_options options = PEERLANE_CALL_OPTIONS_INIT;
    options.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    options.dtype = PEERLANE_DTYPE_I32;
    options.input = input;
    options.output = output;
    options.input_count = options.output_count = 4;
    return options;
}

#define CALL_REFUSED(field, wrong, word)                                                              \
    do {                                                                                              \
        peerlane_call_options options_ = good_call();                                                 \
        if (rank == 1) options_.field = (wrong);                                                      \
        REFUSED(peerlane_call_run(group, &options_), word);                                           \
        peerlane_call *refused_ = (peerlane_call *)group;                                             \
        REFUSED(peerlane_call_start(group, &options_, &refused_), word);                              \
        EXPECT(refused_ == NULL);                                                                     \
    } while (0)

/* Immediate calls, of which none has prepared an operation yet. */
static void calls(peerlane_group *group, peerlane_window *of_another) {
    int foreign = 0;
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, 64, &window));
    CALL_REFUSED(header_version, 77, "header_version is 77, expected 6");
    CALL_REFUSED(collective, 99, "collective is 99, expected 0 to 9");
    CALL_REFUSED(dtype, 99, "dtype is 99, expected 0 to 15");
    CALL_REFUSED(dtype, PEERLANE_DTYPE_F8E4M3, "f8e4m3");
    CALL_REFUSED(reduction, 99, "reduction is 99, expected 0 to 5");
    CALL_REFUSED(beside_compute, 99, "beside_compute is 99, expected 0 to 2");
    CALL_REFUSED(timeout_ms, (uint64_t)-3, "timeout_ms is 18446744073709551613");
    CALL_REFUSED(input, NULL, "input is NULL, expected the address of 4 elements");
    CALL_REFUSED(output, NULL, "output is NULL, expected the address of 4 elements");
    CALL_REFUSED(input_count, 3, "");
    CALL_REFUSED(output_count, SIZE_MAX / 4, "output_count is 4611686018427387903, expected at most 2305843009213693951 for i32");
    CALL_REFUSED(input_window, window, "expected NULL, because input_window is set");

    peerlane_call_options none = good_call(), part = good_call();
    if (rank == 1) {
        none.input = NULL;
        none.input_count = 0;
    }
    REFUSED(peerlane_call_run(group, &none), "output has 4 elements, expected 0");
    part.output = NULL;
    part.output_window = ON_1((peerlane_window *)&foreign, window);
    REFUSED(peerlane_call_run(group, &part), "output: the window");
    part.output_window = ON_1((peerlane_window *)group, window);
    REFUSED(peerlane_call_run(group, &part), "another kind");
    part.output_window = ON_1(of_another, window);
    REFUSED(peerlane_call_run(group, &part), "another group");
    part.output_window = window;
    part.output_begin = ON_1(13, 0);
    REFUSED(peerlane_call_run(group, &part), "output: ");
    part.output_begin = ON_1(SIZE_MAX, 0);
    REFUSED(peerlane_call_run(group, &part), "output_begin is 18446744073709551615, expected at most");

    /* Each call with lengths for each pair exchanges messages. */
    size_t ones[] = {1, 1, 1, 1}, wrong[] = {1, 1, 1, 2};
    peerlane_call_options pairs = good_call();
    pairs.collective = PEERLANE_COLLECTIVE_ALL_TO_ALL;
    for (int made = 0; made < 3; made++) {
        pairs.send_counts = ones;
        pairs.receive_counts = ON_1(NULL, ones);
        REFUSED(peerlane_call_run(group, &pairs), "receive_counts is NULL, expected a number for each rank");
        pairs.receive_counts = ones;
        pairs.send_counts = ON_1(NULL, ones);
        REFUSED(peerlane_call_run(group, &pairs), "send_counts is NULL, expected a number for each rank");
        pairs.send_counts = ON_1(wrong, ones);
        REFUSED(peerlane_call_run(group, &pairs), "expected 4 numbers with that sum");
        pairs.send_counts = ones;
        pairs.dtype = ON_1(99, PEERLANE_DTYPE_I32);
        REFUSED(peerlane_call_run(group, &pairs), "dtype is 99");
        pairs.dtype = PEERLANE_DTYPE_I32;
        CHECK(peerlane_call_run(group, &pairs));
    }

    peerlane_call *call;
    peerlane_call_options options = good_call();
    REFUSED(peerlane_call_run(group, ON_1(NULL, &options)), "options is NULL");
    REFUSED(peerlane_call_start(group, &options, ON_1(NULL, &call)), "call is NULL");
    options.root = 9;
    CHECK(peerlane_call_run(group, &options));
    CHECK(peerlane_window_release(group, window));
}

/* After a call has prepared an operation, the next ones exchange no messages: the others wait for the rank that has
 * refused the call, and return an error with its text. They know from the other group that it has. */
static void calls_without_messages(peerlane_group *group, peerlane_group *other) {
    peerlane_call_options options = good_call();
    CHECK(peerlane_call_run(group, &options));
    CHECK(peerlane_call_run(group, &options));
    char text[1024];
    peerlane_status status = PEERLANE_STATUS_OK;
    /* The short timeout is that of one rank, which begins to wait when the call has been refused. */
    if (rank == 0) options.timeout_ms = 500;
    if (rank == 1) {
        options.dtype = 99;
        status = peerlane_call_run(group, &options);
        snprintf(text, sizeof text, "%s", peerlane_error_text());
    }
    CHECK(peerlane_group_barrier(other));
    if (rank != 1) {
        status = peerlane_call_run(group, &options);
        snprintf(text, sizeof text, "%s", peerlane_error_text());
    }
    EXPECT(status == (rank == 1 ? PEERLANE_STATUS_INVALID_ARGUMENT : PEERLANE_STATUS_TIMEOUT));
    int descriptor;
    CHECK(peerlane_group_end_descriptor(group, &descriptor));
    struct pollfd end = {.fd = descriptor, .events = POLLIN};
    EXPECT(poll(&end, 1, 20000) == 1);
    const char *word = rank == 1 ? "dtype is 99" : "refused its last call: dtype is 99";
    EXPECT(strstr(text, word) != NULL);
    CHECK(peerlane_group_destroy(group));
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
    lengths(group);
    exchanges(group, of_another);
    calls(group, of_another);
    windows(group, of_another);
    CHECK(peerlane_window_release(another, of_another));
    calls_without_messages(another, group);
    CHECK(peerlane_group_barrier(group));
    CHECK(peerlane_group_close(group));
    return 0;
}
