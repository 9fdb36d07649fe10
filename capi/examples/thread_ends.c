/* Calls while a thread ends return their status. The destructor of a key runs after the thread-local variables of the library are destroyed. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "check.h"

static pthread_key_t key;
static peerlane_group *group;
static peerlane_operation *operation;
static atomic_int destructors;

/* The text of an error is kept up to the end of the thread, but not more than its beginning if it is long. */
static void refused(peerlane_status status, const char *beginning) {
    EXPECT(status == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(strncmp(peerlane_error_text(), beginning, strlen(beginning)) == 0);
    EXPECT(peerlane_error_rank() == -1 && peerlane_error_needed_bytes() == 0);
}

static void use_library(void) {
    static char name[3000];
    bool is_done;
    refused(peerlane_group_barrier(NULL), "the group is NULL, expected a handle");
    CHECK(peerlane_group_barrier(group));
    CHECK(peerlane_group_check(group));
    CHECK(peerlane_operation_run(operation));
    CHECK(peerlane_operation_start(operation));
    refused(peerlane_operation_run(operation), "a start is open");
    do CHECK(peerlane_operation_wait(operation, 100, &is_done));
    while (!is_done);

    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    peerlane_group *other;
    memset(name, 'x', sizeof name - 1);
    options.backend = name;
    EXPECT(peerlane_group_open(&options, &other) == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(strlen(peerlane_error_text()) > 100);

    peerlane_hub *hub;
    char address[64];
    CHECK(peerlane_hub_open(NULL, 1, NULL, &hub));
    CHECK(peerlane_hub_address(hub, address, sizeof address));
    options.backend = "host";
    options.hub = address;
    options.ranks = 1;
    CHECK(peerlane_group_open(&options, &other));
    CHECK(peerlane_group_barrier(other));
    CHECK(peerlane_operation_run(operation));
    CHECK(peerlane_group_barrier(other));
    CHECK(peerlane_group_close(other));
    CHECK(peerlane_hub_close(hub));
    refused(peerlane_group_barrier(other), "the group 0x");
    char small[2];
    EXPECT(peerlane_group_selection(group, small, sizeof small) == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(peerlane_error_needed_bytes() > sizeof small);
}

static void at_end(void *value) {
    use_library();
    destructors++;
    /* The destructor runs again while the value is not NULL. */
    uintptr_t rounds = (uintptr_t)value - 1;
    EXPECT(pthread_setspecific(key, (void *)rounds) == 0);
}

static void *first_use_in_destructor(void *argument) {
    EXPECT(pthread_setspecific(key, argument) == 0);
    return NULL;
}

static void *use_before_destructor(void *argument) {
    use_library();
    return first_use_in_destructor(argument);
}

static void in_thread(void *(*body)(void *), uintptr_t rounds) {
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, body, (void *)rounds) == 0);
    EXPECT(pthread_join(thread, NULL) == 0);
}

int main(void) {
    peerlane_group_options options = PEERLANE_GROUP_OPTIONS_INIT;
    options.backend = "host";
    CHECK(peerlane_group_open(&options, &group));
    peerlane_operation_options description = PEERLANE_OPERATION_OPTIONS_INIT;
    description.count = 8;
    CHECK(peerlane_operation_prepare(group, &description, &operation));
    EXPECT(pthread_key_create(&key, at_end) == 0);

    in_thread(use_before_destructor, 1);
    in_thread(use_before_destructor, 2);
    in_thread(first_use_in_destructor, 2);
    EXPECT(destructors == 5);
    refused(peerlane_group_barrier(NULL), "the group is NULL");

    CHECK(peerlane_operation_destroy(operation));
    CHECK(peerlane_group_close(group));
    return 0;
}
