// A deadline that has passed: a wait looks once and returns at once, whether the time that is left is zero or negative.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "peerlane.hpp"

#define EXPECT(condition)                                                            \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

using std::chrono::milliseconds;

namespace {

constexpr milliseconds PASSED[] = {milliseconds(0), milliseconds(-1), milliseconds(-5), milliseconds::min()};

/// Runs a wait, which must throw that its time has passed.
template <typename Wait>
void times_out(Wait wait) {
    try {
        wait();
        EXPECT(false);
    } catch (const peerlane::Error &error) {
        EXPECT(error.status() == PEERLANE_STATUS_TIMEOUT);
    }
}

}  // namespace

int main() try {
    peerlane::Group group;
    const std::uint32_t peer = 1 - group.rank();
    auto window = group.allocate(64);
    {
        auto channel = group.channel(window, 2);
        auto sum = group.prepare(peerlane::operation_options(PEERLANE_COLLECTIVE_ALL_REDUCE, peerlane::dtype<int>, 10));
        if (group.rank() == 0) {
            // The other rank starts the operation after these waits.
            auto begun = std::chrono::steady_clock::now();
            sum.start();
            for (milliseconds limit : PASSED) {
                EXPECT(!sum.wait_for(limit));
                times_out([&] { channel.wait(peer, 0, limit); });
                channel.flush(limit);
            }
            EXPECT(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5));
            channel.signal(peer, 1);
        } else {
            channel.wait(peer, 1, std::chrono::seconds(20));
            sum.start();
        }
        sum.wait();

        // What has come before is found.
        for (milliseconds limit : PASSED) {
            channel.signal(peer, 0);
            group.barrier();
            channel.wait(peer, 0, limit);
            sum.start();
            group.barrier();
            while (!sum.wait_for(limit)) {}
        }
        channel.signal(peer, 0);
        channel.wait(peer, 0, milliseconds::max());
        sum.start();
        EXPECT(sum.wait_for(milliseconds::max()));
    }
    group.release(window);
    group.close();
    return 0;
} catch (const peerlane::Error &error) {
    std::fprintf(stderr, "%s: %s\n", peerlane_status_name(error.status()), error.what());
    return 1;
}
