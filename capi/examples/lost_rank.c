/* Rank 1 ends without a word; the others get an error that names it, and go on without it. */
#include <string.h>

#include "check.h"

int main(void) {
    peerlane_group *group, *rest;
    CHECK(peerlane_group_open(NULL, &group));
    uint32_t rank, ranks, left;
    CHECK(peerlane_group_rank(group, &rank, &ranks));
    if (rank == 1) _Exit(0);
    peerlane_status status = peerlane_group_barrier(group);
    EXPECT(status == PEERLANE_STATUS_PEER_LOST);
    EXPECT(peerlane_error_rank() == 1);
    EXPECT(strstr(peerlane_error_text(), "rank 1") != NULL);
    EXPECT(peerlane_group_check(group) == PEERLANE_STATUS_PEER_LOST);
    CHECK(peerlane_group_shrink(group, &rest));
    CHECK(peerlane_group_destroy(group));
    CHECK(peerlane_group_rank(rest, NULL, &left));
    EXPECT(left == ranks - 1);
    CHECK(peerlane_group_barrier(rest));
    CHECK(peerlane_group_close(rest));
    return 0;
}
