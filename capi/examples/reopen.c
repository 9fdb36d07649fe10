/* Opens and closes a group many times with one environment of a launcher, as a program with several phases does. */
#include <string.h>

#include "check.h"

enum { ROUNDS = 100 };

int main(int argc, char **argv) {
    int with_barrier = argc > 1 && strcmp(argv[1], "barrier") == 0;
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "host";
    options.start_timeout_ms = 8000;
    for (int round = 0; round < ROUNDS; round++) {
        peerlane_group *group;
        CHECK(peerlane_group_open(&options, &group));
        if (with_barrier) CHECK(peerlane_group_barrier(group));
        CHECK(peerlane_group_close(group));
    }
    return 0;
}
