/* Ends the program with the text of the error if a call fails or a result is wrong. */
#include <stdio.h>
#include <stdlib.h>

#include "peerlane.h"

#define CHECK(call)                                                                                   \
    do {                                                                                              \
        peerlane_status status_ = (call);                                                             \
        if (status_ != PEERLANE_STATUS_OK) {                                                          \
            fprintf(stderr, "%s:%d: %s: %s (rank %d)\n", __FILE__, __LINE__,                          \
                    peerlane_status_name(status_), peerlane_error_text(), peerlane_error_rank());     \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define EXPECT(condition)                                                                             \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition);                  \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)
