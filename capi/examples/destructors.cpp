// Destructors of thread-local and of static objects use the library: their calls return, or throw, and never end the process.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "peerlane.hpp"

#define EXPECT(condition)                                                            \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                           \
        }                                                                            \
    } while (0)

namespace {

void is_refused() {
    try {
        peerlane::check(peerlane_group_barrier(nullptr));
        EXPECT(false);
    } catch (const peerlane::Error &error) {
        EXPECT(error.status() == PEERLANE_STATUS_INVALID_ARGUMENT);
        EXPECT(std::strcmp(error.what(), "the group is NULL, expected a handle") == 0);
        EXPECT(!error.rank());
    }
}

/// It is created before the variables of the library in its thread, and so destroyed after them.
struct FailsAtEnd {
    int *destroyed = nullptr;
    ~FailsAtEnd() {
        is_refused();
        ++*destroyed;
    }
};

/// It owns a group and an operation up to the end of its thread.
struct OwnsGroup {
    peerlane::Group group{options()};
    peerlane::Operation sum = group.prepare(peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_REDUCE, peerlane::dtype<float>, 16));

    static peerlane_group_options options() {
        auto options = peerlane::group_options();
        options.backend = "host";
        return options;
    }

    ~OwnsGroup() {
        sum.run();
        sum.start();
        sum.wait();
        group.barrier();
    }
};

struct ClosesGroup {
    OwnsGroup *owner;
    ~ClosesGroup() {
        {
            peerlane::Operation last = std::move(owner->sum);
            last.run();
        }
        owner->sum = owner->group.prepare(peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_GATHER, peerlane::dtype<int>, 3));
        is_refused();
    }
};

}  // namespace

int main() {
    int destroyed = 0;
    std::thread([&] {
        static thread_local FailsAtEnd fails;
        fails.destroyed = &destroyed;
        is_refused();
    }).join();
    EXPECT(destroyed == 1);

    std::thread([&] {
        static thread_local FailsAtEnd fails;
        fails.destroyed = &destroyed;
        static thread_local OwnsGroup owner;
        owner.sum.run();
    }).join();
    EXPECT(destroyed == 2);

    // Destroyed in the reverse order, after the thread-local variables of the main thread.
    static FailsAtEnd fails;
    static int destroyed_statics = 0;
    fails.destroyed = &destroyed_statics;
    static OwnsGroup owner;
    static ClosesGroup closes{&owner};
    owner.sum.run();
    is_refused();
    return 0;
}
