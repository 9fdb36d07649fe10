/* Loads another copy of the library, whose name is the argument, and gives it a handle of the first one. */
#include <dlfcn.h>
#include <string.h>

#include "check.h"

int main(int count, char **arguments) {
    EXPECT(count == 2);
    peerlane_group *group;
    CHECK(peerlane_group_open(NULL, &group));
    void *copy = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    EXPECT(copy != NULL);
    peerlane_status (*barrier)(peerlane_group *);
    const char *(*text)(void);
    *(void **)&barrier = dlsym(copy, "peerlane_group_barrier");
    *(void **)&text = dlsym(copy, "peerlane_error_text");
    EXPECT(barrier != NULL && barrier != peerlane_group_barrier && text != NULL);
    EXPECT(barrier(group) == PEERLANE_STATUS_INVALID_ARGUMENT);
    EXPECT(strstr(text(), "another copy") != NULL);
    CHECK(peerlane_group_barrier(group));
    CHECK(peerlane_group_close(group));
    return 0;
}
