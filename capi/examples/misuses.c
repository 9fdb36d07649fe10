/* Every misuse is an error with a text, and the library goes on. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define REFUSED(call, word)                                                                           \
    do {                                                                                              \
        EXPECT((call) == PEERLANE_STATUS_INVALID_ARGUMENT);                                           \
        if (strstr(peerlane_error_text(), word) == NULL) {                                            \
            fprintf(stderr, "%s:%d: \"%s\" lacks \"%s\"\n", __FILE__, __LINE__, peerlane_error_text(), word); \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

static peerlane_operation_options description = PEERLANE_OPERATION_OPTIONS_INIT;

static peerlane_call_options call_description = PEERLANE_CALL_OPTIONS_INIT;
static peerlane_all_to_all_v_options exchange_description = PEERLANE_ALL_TO_ALL_V_OPTIONS_INIT;

static void bad_group(void *group, const char *word) {
    uint32_t rank = 0;
    char text[256];
    peerlane_group *part;
    peerlane_window *window;
    peerlane_channel *channel;
    peerlane_operation *operation;
    peerlane_call *call;
    peerlane_all_to_all_v *exchange;
    int descriptor;
    REFUSED(peerlane_group_rank(group, &rank, NULL), word);
    REFUSED(peerlane_group_selection(group, text, sizeof text), word);
    REFUSED(peerlane_group_barrier(group), word);
    REFUSED(peerlane_group_check(group), word);
    REFUSED(peerlane_group_split(group, 0, 0, &part), word);
    REFUSED(peerlane_group_subgroup(group, &rank, 1, &part), word);
    REFUSED(peerlane_group_subgroup(group, NULL, 1, &part), word);
    REFUSED(peerlane_group_shrink(group, &part), word);
    REFUSED(peerlane_group_close(group), word);
    REFUSED(peerlane_group_destroy(group), word);
    REFUSED(peerlane_window_allocate(group, 8, &window), word);
    REFUSED(peerlane_window_over(group, text, sizeof text, &window), word);
    REFUSED(peerlane_window_over_descriptor(group, -1, 0, 1, &window), word);
    REFUSED(peerlane_operation_prepare(group, &description, &operation), word);
    REFUSED(peerlane_operation_prepare_all(group, &description, 1, &operation), word);
    REFUSED(peerlane_group_end_descriptor(group, &descriptor), word);
    REFUSED(peerlane_all_to_all_v_prepare(group, &exchange_description, &exchange), word);
    REFUSED(peerlane_call_run(group, &call_description), word);
    REFUSED(peerlane_call_start(group, &call_description, &call), word);
    REFUSED(peerlane_call_run_on(group, &call_description, NULL), word);
    REFUSED(peerlane_channel_open(group, NULL, 1, &channel), "");
    EXPECT(part == NULL && window == NULL && operation == NULL && channel == NULL && call == NULL && exchange == NULL);
}

static void bad_object(peerlane_group *group, void *object, const char *word) {
    char text[256];
    bool is_done;
    void *address;
    REFUSED(peerlane_operation_input(object, &address, NULL), word);
    REFUSED(peerlane_operation_output(object, &address, NULL), word);
    REFUSED(peerlane_operation_resize(object, 1, 0, 0), word);
    size_t counts[] = {1};
    int descriptor;
    REFUSED(peerlane_operation_resize_counts(object, counts, 0, 0), word);
    REFUSED(peerlane_operation_resize_pairs(object, counts, counts, 0, 0), word);
    REFUSED(peerlane_operation_descriptor(object, &descriptor), word);
    REFUSED(peerlane_call_wait(object, 0, &is_done), word);
    REFUSED(peerlane_call_destroy(object), word);
    REFUSED(peerlane_all_to_all_v_run(object, counts, NULL, NULL), word);
    REFUSED(peerlane_all_to_all_v_start_on(object, NULL, counts, NULL, NULL, NULL), word);
    REFUSED(peerlane_all_to_all_v_received(object, counts, counts), word);
    REFUSED(peerlane_all_to_all_v_input(object, &address, NULL), word);
    REFUSED(peerlane_all_to_all_v_output(object, &address, NULL), word);
    REFUSED(peerlane_all_to_all_v_end_lease(object), word);
    REFUSED(peerlane_all_to_all_v_check(object), word);
    REFUSED(peerlane_all_to_all_v_report(object, text, sizeof text), word);
    REFUSED(peerlane_all_to_all_v_destroy(object), word);
    REFUSED(peerlane_operation_run(object), word);
    REFUSED(peerlane_operation_start(object), word);
    REFUSED(peerlane_operation_wait(object, 0, &is_done), word);
    REFUSED(peerlane_operation_start_on(object, NULL, NULL), word);
    REFUSED(peerlane_operation_end_lease(object), word);
    REFUSED(peerlane_operation_check(object), word);
    REFUSED(peerlane_operation_report(object, text, sizeof text), word);
    REFUSED(peerlane_operation_destroy(object), word);
    REFUSED(peerlane_window_memory(object, &address, NULL), word);
    REFUSED(peerlane_window_release(group, object), word);
    REFUSED(peerlane_window_destroy(object), word);
    REFUSED(peerlane_channel_put(object, NULL, 0, 0, 1, 0), word);
    REFUSED(peerlane_channel_put_signal(object, NULL, 0, 0, 1, 0, 0), word);
    REFUSED(peerlane_channel_get(object, NULL, 0, 0, 1, 0), word);
    REFUSED(peerlane_channel_signal(object, NULL, 0, 0), word);
    REFUSED(peerlane_channel_wait(object, NULL, 0, 0, 1), word);
    REFUSED(peerlane_channel_flush(object, 1), word);
    REFUSED(peerlane_channel_destroy(object), word);
    REFUSED(peerlane_hub_address(object, text, sizeof text), word);
    REFUSED(peerlane_hub_close(object), word);
}

int main(void) {
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    peerlane_group *group;
    REFUSED(peerlane_group_open(&options, NULL), "NULL");
    options.header_version = 77;
    REFUSED(peerlane_group_open(&options, &group), "header");
    EXPECT(group == NULL);
    options.header_version = PEERLANE_HEADER_VERSION;
    options.backend = "abacus";
    REFUSED(peerlane_group_open(&options, &group), "abacus");
    options.backend = "host";
    options.timeout_ms = (uint64_t)-5;
    REFUSED(peerlane_group_open(&options, &group), "timeout_ms is 18446744073709551611, which is -5 with a sign, expected at most");
    options.timeout_ms = 0;
    options.start_timeout_ms = UINT64_MAX;
    REFUSED(peerlane_group_open(&options, &group), "start_timeout_ms is 18446744073709551615, which is -1 with a sign");
    options.start_timeout_ms = 0;
    options.ranks = 3;
    REFUSED(peerlane_group_open(&options, &group), "WORLD_SIZE is 1, expected 3");
    options.ranks = 1;
    CHECK(peerlane_group_open(&options, &group));

    int foreign = 0;
    void *wrong[] = {NULL, &foreign, (char *)group + 1, (char *)group + 0x100000};
    const char *groups[] = {"NULL", "no handle", "destroyed", "destroyed"};
    const char *others[] = {"NULL", "no handle", "another kind", "another kind"};
    for (int at = 0; at < 4; at++) {
        bad_group(wrong[at], groups[at]);
        bad_object(group, wrong[at], others[at]);
    }
    REFUSED(peerlane_operation_run((peerlane_operation *)group), "another kind");
    REFUSED(peerlane_channel_flush((peerlane_channel *)group, 1), "another kind");
    char small[2];
    REFUSED(peerlane_group_selection(group, small, sizeof small), "expected at least");
    size_t needed = peerlane_error_needed_bytes();
    EXPECT(needed > sizeof small);
    REFUSED(peerlane_group_selection(group, NULL, 0), "expected at least");
    char *enough = malloc(needed);
    REFUSED(peerlane_group_selection(group, enough, needed - 1), "expected at least");
    CHECK(peerlane_group_selection(group, enough, needed));
    EXPECT(strlen(enough) == needed - 1);
    free(enough);

    peerlane_group *part;
    uint32_t member = 0;
    REFUSED(peerlane_group_subgroup(group, &member, 2, &part), "count is 2, expected at most 1");
    REFUSED(peerlane_group_subgroup(group, &member, SIZE_MAX, &part), "expected at most 1");
    EXPECT(part == NULL && peerlane_error_needed_bytes() == 0);
    REFUSED(peerlane_group_subgroup(group, &member, 0, &part), "");
    CHECK(peerlane_group_subgroup(group, &member, 1, &part));
    CHECK(peerlane_group_close(part));

    peerlane_operation *operation;
    REFUSED(peerlane_operation_prepare(group, NULL, &operation), "NULL");
    REFUSED(peerlane_operation_prepare(group, &description, NULL), "NULL");
    description.collective = 99;
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "collective is 99");
    description.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    description.dtype = 99;
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "dtype is 99");
    description.dtype = PEERLANE_DTYPE_I32;
    description.reduction = 99;
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "reduction is 99");
    description.reduction = PEERLANE_REDUCTION_AVERAGE;
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "average");
    description.reduction = PEERLANE_REDUCTION_SUM;
    description.algorithm = "guess";
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "guess");
    description.algorithm = NULL;
    description.input = (peerlane_window *)group;
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "another kind");
    description.input = NULL;
    description.count = 10;
    description.timeout_ms = (uint64_t)-3;
    REFUSED(peerlane_operation_prepare(group, &description, &operation), "timeout_ms is 18446744073709551613, which is -3 with a sign");
    description.timeout_ms = 0;
    CHECK(peerlane_operation_prepare(group, &description, &operation));
    bool is_done;
    REFUSED(peerlane_operation_wait(operation, 0, &is_done), "no start is open");
    REFUSED(peerlane_operation_end_lease(operation), "leased");
    REFUSED(peerlane_operation_start_on(operation, &foreign, NULL), "no streams");
    REFUSED(peerlane_operation_resize(operation, 5, 0, 0), "resizable");
    size_t counts[] = {1};
    int descriptor;
    REFUSED(peerlane_operation_resize_counts(operation, NULL, 0, 0), "counts is NULL, expected a number for each rank");
    REFUSED(peerlane_operation_resize_counts(operation, counts, 0, 0), "resizable");
    REFUSED(peerlane_operation_resize_pairs(operation, NULL, counts, 0, 0), "send_counts is NULL");
    REFUSED(peerlane_operation_resize_pairs(operation, counts, NULL, 0, 0), "receive_counts is NULL");
    REFUSED(peerlane_operation_resize_pairs(operation, counts, counts, 0, 0), "resizable");
    REFUSED(peerlane_operation_descriptor(operation, &descriptor), "no start is open");
    REFUSED(peerlane_operation_descriptor(operation, NULL), "descriptor is NULL");
    REFUSED(peerlane_group_end_descriptor(group, NULL), "descriptor is NULL");
    CHECK(peerlane_operation_start(operation));
    REFUSED(peerlane_operation_run(operation), "a start is open");
    REFUSED(peerlane_operation_wait(operation, 5, NULL), "is_done is NULL");
    CHECK(peerlane_operation_wait(operation, -1, NULL));
    CHECK(peerlane_operation_run(operation));
    CHECK(peerlane_operation_destroy(operation));
    REFUSED(peerlane_operation_run(operation), "destroyed");
    REFUSED(peerlane_operation_destroy(operation), "destroyed");

    int32_t input[2] = {1, 2}, output[2];
    call_description.collective = PEERLANE_COLLECTIVE_ALL_REDUCE;
    call_description.dtype = PEERLANE_DTYPE_I32;
    call_description.input = input;
    call_description.output = output;
    call_description.input_count = call_description.output_count = 2;
    peerlane_call *started;
    REFUSED(peerlane_call_run(group, NULL), "options is NULL");
    REFUSED(peerlane_call_start(group, NULL, &started), "options is NULL");
    REFUSED(peerlane_call_start(group, &call_description, NULL), "call is NULL");
    REFUSED(peerlane_call_run_on(group, NULL, &foreign), "options is NULL");
    REFUSED(peerlane_call_run_on(group, &call_description, &foreign), "no streams");
    CHECK(peerlane_call_start(group, &call_description, &started));
    REFUSED(peerlane_call_wait(started, 0, NULL), "is_done is NULL");
    CHECK(peerlane_call_wait(started, -1, NULL));
    EXPECT(output[0] == 1 && output[1] == 2);
    CHECK(peerlane_call_destroy(started));
    REFUSED(peerlane_call_wait(started, -1, NULL), "destroyed");
    REFUSED(peerlane_call_destroy(started), "destroyed");
    call_description.input_count = 3;
    REFUSED(peerlane_call_run(group, &call_description), "");
    call_description.input_count = 2;
    CHECK(peerlane_call_run(group, &call_description));

    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, 64, &window));
    peerlane_channel *channel;
    REFUSED(peerlane_channel_open(group, window, 0, &channel), "signals");
    EXPECT(peerlane_channel_open(group, window, SIZE_MAX, &channel) != PEERLANE_STATUS_OK);
    EXPECT(peerlane_channel_open(group, window, SIZE_MAX / 1024, &channel) != PEERLANE_STATUS_OK);
    EXPECT(channel == NULL);
    CHECK(peerlane_channel_open(group, window, 1, &channel));
    REFUSED(peerlane_channel_put(channel, NULL, 7, 0, 8, 0), "7");
    REFUSED(peerlane_channel_put(channel, NULL, 0, 60, 8, 0), "window");
    REFUSED(peerlane_channel_put(channel, NULL, 0, SIZE_MAX, 8, 0), "window");
    REFUSED(peerlane_channel_signal(channel, NULL, 0, 9), "9");
    REFUSED(peerlane_channel_signal(channel, &foreign, 0, 0), "no streams");
    REFUSED(peerlane_channel_wait(channel, NULL, 0, 0, (uint64_t)-5), "timeout_ms is 18446744073709551611, which is -5 with a sign");
    REFUSED(peerlane_channel_flush(channel, (uint64_t)-5), "timeout_ms is 18446744073709551611, which is -5 with a sign");
    EXPECT(peerlane_channel_wait(channel, NULL, 0, 0, 0) == PEERLANE_STATUS_TIMEOUT);
    CHECK(peerlane_channel_flush(channel, INT64_MAX));
    CHECK(peerlane_channel_destroy(channel));
    CHECK(peerlane_window_release(group, window));
    REFUSED(peerlane_window_memory(window, NULL, NULL), "destroyed");

    pid_t child = fork();
    if (child == 0) _exit(peerlane_group_barrier(group) == PEERLANE_STATUS_INVALID_ARGUMENT ? 0 : 1);
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    CHECK(peerlane_group_barrier(group));
    CHECK(peerlane_group_close(group));
    REFUSED(peerlane_group_barrier(group), "destroyed");
    return 0;
}
