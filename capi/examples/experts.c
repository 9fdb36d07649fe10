/* Sends tokens to the ranks of their experts and back, with other counts in each start, which only the sender knows. */
#include <string.h>

#include "check.h"

enum { RANKS_MAX = 8, TOKENS = 60, STARTS = 30 };

static uint32_t rank, ranks;

/* How many tokens go from one rank to another in a start. */
static size_t tokens(uint32_t from, uint32_t to, size_t start) { return (from * 7 + to * 3 + start) % (TOKENS / ranks + 1); }

static int64_t token(uint32_t from, uint32_t to, size_t start, size_t at) {
    return (int64_t)(((from * 10 + to) * 1000 + start) * 1000 + at);
}

/* Dispatches tokens from a place for each rank, and sends what has come back to where it came from. */
static void round_trip(peerlane_all_to_all_v *dispatch, peerlane_all_to_all_v *combine, size_t start) {
    size_t send[RANKS_MAX], places[RANKS_MAX], received[RANKS_MAX], begins[RANKS_MAX], sent_back[RANKS_MAX], bytes;
    void *memory;
    CHECK(peerlane_all_to_all_v_input(dispatch, &memory, &bytes));
    EXPECT(bytes == TOKENS * sizeof(int64_t));
    int64_t *input = memory;
    /* The last rank's block is the first one in the input. */
    for (uint32_t to = ranks, next = 0; to-- > 0; next += (uint32_t)send[to]) {
        send[to] = tokens(rank, to, start);
        places[to] = next;
        for (size_t at = 0; at < send[to]; at++) input[next + at] = token(rank, to, start, at);
    }
    CHECK(peerlane_all_to_all_v_run(dispatch, send, places, NULL));
    CHECK(peerlane_all_to_all_v_received(dispatch, received, begins));
    CHECK(peerlane_all_to_all_v_output(dispatch, &memory, &bytes));
    const int64_t *output = memory;
    size_t next = 0;
    for (uint32_t from = 0; from < ranks; next += received[from], from++) {
        EXPECT(received[from] == tokens(from, rank, start) && begins[from] == next);
        for (size_t at = 0; at < received[from]; at++) EXPECT(output[next + at] == token(from, rank, start, at));
    }
    EXPECT(bytes == next * sizeof(int64_t));

    CHECK(peerlane_all_to_all_v_input(combine, &memory, NULL));
    memcpy(memory, output, bytes);
    CHECK(peerlane_all_to_all_v_run(combine, received, NULL, send));
    CHECK(peerlane_all_to_all_v_received(combine, sent_back, NULL));
    CHECK(peerlane_all_to_all_v_output(combine, &memory, NULL));
    output = memory;
    for (uint32_t from = 0; from < ranks; output += send[from], from++) {
        EXPECT(sent_back[from] == send[from]);
        for (size_t at = 0; at < send[from]; at++) EXPECT(output[at] == token(rank, from, start, at));
    }
}

/* What one rank must not give is an error on all ranks; then the next start works. */
static void refusals(peerlane_all_to_all_v *dispatch) {
    size_t good[RANKS_MAX] = {0}, many[RANKS_MAX] = {TOKENS + 1}, expected[RANKS_MAX] = {1};
    bool is_last = rank == ranks - 1;
    peerlane_status own = is_last ? PEERLANE_STATUS_INVALID_ARGUMENT : PEERLANE_STATUS_ABORTED;
#define REFUSED(call, status, word)                                                                   \
    do {                                                                                              \
        EXPECT((call) == (status));                                                                   \
        EXPECT(strstr(peerlane_error_text(), word) != NULL);                                          \
    } while (0)
    REFUSED(peerlane_all_to_all_v_run(dispatch, is_last ? NULL : good, NULL, NULL), own,
            is_last ? "send_counts is NULL" : "there are 0 send counts");
    REFUSED(peerlane_all_to_all_v_run(dispatch, is_last ? many : good, NULL, NULL), own, "61 elements are sent to rank 0");
    REFUSED(peerlane_all_to_all_v_run(dispatch, good, NULL, is_last ? expected : NULL), PEERLANE_STATUS_MISMATCH,
            "which expects 1");
    int foreign = 0;
    void *output;
    REFUSED(is_last ? peerlane_all_to_all_v_start_on(dispatch, &foreign, good, NULL, NULL, &output)
                    : peerlane_all_to_all_v_run(dispatch, good, NULL, NULL),
            own, is_last ? "no streams" : "rank ");
    REFUSED(peerlane_all_to_all_v_end_lease(dispatch), PEERLANE_STATUS_INVALID_ARGUMENT, "no start on a stream is leased");
    CHECK(peerlane_all_to_all_v_check(dispatch));
    char report[4096];
    CHECK(peerlane_all_to_all_v_report(dispatch, report, sizeof report));
    EXPECT(strstr(report, "\"collective\":\"all-to-all\"") != NULL);
}

int main(void) {
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    EXPECT(ranks <= RANKS_MAX);
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, (1 + RANKS_MAX) * TOKENS * sizeof(int64_t), &window));

    /* All tokens of all ranks can go to one rank. */
    peerlane_all_to_all_v_options options = PEERLANE_ALL_TO_ALL_V_OPTIONS_INIT;
    options.dtype = PEERLANE_DTYPE_I64;
    options.send_max = TOKENS;
    options.receive_max = ranks * TOKENS;
    options.label = "dispatch";
    peerlane_all_to_all_v *dispatch, *combine, *refused;
    CHECK(peerlane_all_to_all_v_prepare(group, &options, &dispatch));
    options.send_max = ranks * TOKENS;
    options.receive_max = TOKENS;
    options.input = options.output = window;
    options.output_begin = RANKS_MAX * TOKENS;
    options.label = "combine";
    options.algorithm = "direct";
    options.timeout_ms = 20000;
    CHECK(peerlane_all_to_all_v_prepare(group, &options, &combine));

    for (size_t start = 0; start < STARTS; start++) round_trip(dispatch, combine, start);
    refusals(dispatch);
    round_trip(dispatch, combine, STARTS);

    options.outputs = rank == 0 ? 3 : 1;
    EXPECT(peerlane_all_to_all_v_prepare(group, &options, &refused) != PEERLANE_STATUS_OK && refused == NULL);
    CHECK(peerlane_group_check(group));
    CHECK(peerlane_all_to_all_v_destroy(combine));
    CHECK(peerlane_all_to_all_v_destroy(dispatch));
    CHECK(peerlane_window_release(group, window));
    CHECK(peerlane_group_close(group));
    return 0;
}
