/* The memory of windows that are not released is given back when their group is closed or destroyed. */
#include <dirent.h>
#include <string.h>

#include "check.h"

enum { ROUNDS = 20, BYTES = 16 << 20 };

enum end { UNTOUCHED, DESTROYED_BEFORE, DESTROYED_AFTER, GROUP_DESTROYED };

static long descriptors(void) {
    long count = 0;
    DIR *folder = opendir("/proc/self/fd");
    EXPECT(folder != NULL);
    while (readdir(folder) != NULL) count++;
    closedir(folder);
    return count;
}

/* Returns the shared memory that this process has mapped, in KiB. */
static long shared_kib(void) {
    char line[256];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    EXPECT(status != NULL);
    while (fgets(line, sizeof line, status) != NULL) sscanf(line, "RssShmem: %ld", &kib);
    fclose(status);
    return kib;
}

static void open_and_close(enum end end) {
    peerlane_hub *hub;
    char address[64];
    CHECK(peerlane_hub_open(NULL, 1, NULL, &hub));
    CHECK(peerlane_hub_address(hub, address, sizeof address));
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "host";
    options.hub = address;
    options.ranks = 1;
    peerlane_group *group;
    CHECK(peerlane_group_open(&options, &group));
    peerlane_window *window;
    CHECK(peerlane_window_allocate(group, BYTES, &window));
    void *memory;
    CHECK(peerlane_window_memory(window, &memory, NULL));
    memset(memory, 1, BYTES);
    if (end == DESTROYED_BEFORE) {
        CHECK(peerlane_window_destroy(window));
        EXPECT(peerlane_window_memory(window, &memory, NULL) == PEERLANE_STATUS_INVALID_ARGUMENT);
        /* A peer may still write to the memory. */
        EXPECT(shared_kib() >= BYTES / 1024);
    }
    if (end == GROUP_DESTROYED) CHECK(peerlane_group_destroy(group));
    else CHECK(peerlane_group_close(group));
    CHECK(peerlane_hub_close(hub));
    if (end == DESTROYED_AFTER) EXPECT(peerlane_window_destroy(window) == PEERLANE_STATUS_INVALID_ARGUMENT);
}

int main(void) {
    for (enum end end = UNTOUCHED; end <= GROUP_DESTROYED; end++) {
        open_and_close(end);
        long descriptors_before = descriptors(), kib_before = shared_kib();
        for (int round = 0; round < ROUNDS; round++) open_and_close(end);
        long more = descriptors() - descriptors_before, more_kib = shared_kib() - kib_before;
        if (more > ROUNDS / 2 || more_kib > BYTES / 1024 / 2) {
            fprintf(stderr, "case %d: %ld descriptors and %ld KiB more after %d groups\n", end, more, more_kib, ROUNDS);
            return 1;
        }
    }
    return 0;
}
